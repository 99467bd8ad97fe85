"""Dense products on a GPU: stored layouts and input quantizations against bfloat16 in one run.

    python bench/gemm.py [--quick] [--shapes NAME ...] > gemm.json

Needs a GPU that torch and Triton can use. Times are medians over replays of a CUDA graph in which
as many copies of the weight take turns as it takes to leave the caches; the bfloat16 product
(torch.mm, cuBLAS on NVIDIA) is measured the same way. A table goes to stderr, JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

import torch

from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime.backends import torch_backend, triton_backend
from mxfp4prep.runtime.devices import cache_nbytes
from mxfp4prep.runtime.timing import copies_beyond, measure

SHAPES = {  # (n, k); Llama-3 70B's projections as one of eight ranks holds them
    "8192": (8192, 8192),
    "70B tp8 qkv": (1280, 8192),
    "70B tp8 o": (8192, 1024),
    "70B tp8 gate_up": (7168, 8192),
    "70B tp8 down": (8192, 3584),
}
QUANTS = {"w4a16": "none", "w4a4": "mxfp4"}
TARGETS = {1: 2.0, 16: 2.0, 64: 1.3, 4096: 0.9}
TOLERANCE = 4e-3
"""Norm of the difference from the reference backend over its norm: bfloat16 output rounding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the m that have a target")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    tokens = list(TARGETS) if arguments.quick else [1, 4, 16, 32, 64, 128, 256, 1024, 4096]
    rows = []
    print(
        f"{'shape':16} {'path':6} {'m':>5} {'bf16 us':>8} "
        + "".join(f"{q + ' us':>9} {'ratio':>6}" for q in QUANTS),
        file=sys.stderr,
    )
    for name in arguments.shapes:
        n, k = SHAPES[name]
        plain = bf16_times(n, k, tokens, device)
        for path in ("asm", "triton"):
            for m in tokens:
                row = {"shape": name, "n": n, "k": k, "path": path, "m": m, "bf16_us": plain[m]}
                for scheme, quant in QUANTS.items():
                    row[scheme] = prepared_time(n, k, m, path, quant, device)
                    row[scheme]["ratio"] = round(plain[m] / row[scheme]["us"], 2)
                rows.append(row)
                cells = "".join(f"{row[q]['us']:9.1f} {row[q]['ratio']:6.2f}" for q in QUANTS)
                print(f"{name:16} {path:6} {m:5} {plain[m]:8.1f} {cells}", file=sys.stderr)
    properties = torch.cuda.get_device_properties(device)
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    json.dump({"device": properties.name, **versions, "rows": rows}, sys.stdout, indent=1)


def bf16_times(n: int, k: int, tokens: list[int], device: torch.device) -> dict[int, float]:
    count = copies_beyond(cache_nbytes(device), 2 * n * k)
    weights = [torch.randn((n, k), device=device, dtype=torch.bfloat16) for _ in range(count)]
    times = {}
    for m in tokens:
        x = torch.randn((m, k), device=device, dtype=torch.bfloat16)
        calls = [partial(torch.mm, x, w.T) for w in weights]
        times[m] = round(measure(calls, device, seconds=0.05).median_us, 2)
    return times


def prepared_time(
    n: int, k: int, m: int, path: str, quant: str, device: torch.device
) -> dict[str, float]:
    count = copies_beyond(cache_nbytes(device), n * k * 17 // 32)
    copies = [stored(n, k, path, device) for _ in range(count)]
    x = torch.randn((m, k), device=device, dtype=torch.bfloat16)
    calls = [
        partial(triton_backend.gemm, x, w, s, n, path, quant, bias=None, input_scale=None)
        for w, s in copies
    ]
    y = calls[0]().double()
    w, s = copies[0]
    expected = torch_backend.gemm(
        x.float(), w, s, n, path, quant, bias=None, input_scale=None
    ).double()
    error = float((y - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        sys.exit(f"wrong: {n} x {k}, m {m}, {path}, {quant}: relative error {error}")
    timing = measure(calls, device, seconds=0.05)
    return {
        "us": round(timing.median_us, 2),
        "spread_us": round(timing.spread_us, 2),
        "error": error,
    }


def stored(n: int, k: int, path: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights with scales as real checkpoints have them, in the layouts of `path`."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 126, (n, k // 32), dtype=torch.uint8, device=device)
    weight, scale = (LAYOUTS[layout] for layout in PATHS[path])
    return weight.forward(codes), scale.forward(scales)


if __name__ == "__main__":
    main()
