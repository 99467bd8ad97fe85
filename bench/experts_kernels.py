"""How long each launch of an MoE layer's experts takes by itself, on a GPU.

    python bench/experts_kernels.py [--tokens 1 16 256] > kernels.json

The sizes of bench/experts.py. Each launch is replayed in a graph of its own, over several routings,
so that a product's weights are not in the cache. A table goes to stderr, JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch
from experts import HIDDEN, QUANTS, ROUTINGS, WIDTH, bank, routing
from torch import Tensor

from mxfp4prep.runtime.backends import triton_backend
from mxfp4prep.runtime.kernels import grouped
from mxfp4prep.runtime.timing import measure

STAGES = ("sorted_pairs", "_first_rows", "product", "_second_rows", "combine")
"""Functions of kernels.grouped in the order of an MoE layer; product is called twice."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 256])
    arguments = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for path in ("asm", "triton"):
        banks = (*bank(2 * WIDTH, HIDDEN, path, device), *bank(HIDDEN, WIDTH, path, device))
        for tokens in arguments.tokens:
            x = torch.randn((tokens, HIDDEN), device=device, dtype=torch.bfloat16)
            routings = [routing(tokens, device) for _ in range(ROUTINGS)]
            for scheme, quant in QUANTS.items():
                times = stages(x, banks, path, quant, routings)
                rows.append({"tokens": tokens, "path": path, "scheme": scheme, "us": times})
                cells = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
                print(f"{tokens:6} {path:6} {scheme:5} {cells}", file=sys.stderr)
    json.dump({"device": torch.cuda.get_device_name(device), "rows": rows}, sys.stdout, indent=1)


def stages(
    x: Tensor,
    banks: tuple[Tensor, ...],
    path: str,
    quant: str,
    routings: list[tuple[Tensor, Tensor]],
) -> dict[str, float]:
    """Microseconds by stage: each stage's calls, as fused_moe makes them, played again alone."""
    recorded: dict[str, list[Callable[[], Tensor]]] = {}
    for weights, ids in routings:
        for name, call in calls(x, banks, path, quant, weights, ids):
            recorded.setdefault(name, []).append(call)
    return {
        name: round(measure(alone, x.device, seconds=0.05).median_us, 1)
        for name, alone in recorded.items()
    }


def calls(
    x: Tensor, banks: tuple[Tensor, ...], path: str, quant: str, weights: Tensor, ids: Tensor
) -> list[tuple[str, Callable[[], Tensor]]]:
    """The stages of one fused_moe with their arguments, first and second product apart."""
    found: list[tuple[str, Callable[[], Tensor]]] = []
    real = {name: getattr(grouped, name) for name in STAGES}

    def recorder(name: str) -> Callable[..., object]:
        def run(*arguments: object, **given: object) -> object:
            taken = sum(known.startswith(name) for known, _ in found)
            label = f"{name}_{taken + 1}" if name == "product" else name
            found.append((label, lambda: again(real[name], arguments, given)))
            return real[name](*arguments, **given)

        return run

    class Launches:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def run(*arguments: object, **given: object) -> None:
                kernel = real["combine"][grid]
                found.append(("combine", lambda: again(kernel, arguments, given)))
                kernel(*arguments, **given)

            return run

    try:
        for name in STAGES:
            setattr(grouped, name, Launches() if name == "combine" else recorder(name))
        triton_backend.fused_moe(
            x, *banks, weights, ids, WIDTH, path, path, quant,
            activation="silu", limit=None, gate_up="concatenated", hidden_pad=0,
            intermediate_pad=0, bias1=None, bias2=None, a1_scale=None, a2_scale=None,
        )  # fmt: skip
    finally:
        for name, function in real.items():
            setattr(grouped, name, function)
    return found


def again(function: Callable[..., object], arguments: tuple, given: dict[str, object]) -> Tensor:
    function(*arguments, **given)
    return arguments[0] if isinstance(arguments[0], Tensor) else arguments[2]


if __name__ == "__main__":
    main()
