"""An MoE layer's experts on a GPU against the same in bfloat16, in one run.

    python bench/experts.py [--tokens 1 16 ...] > experts.json

128 experts of width 768, hidden size 2048, top 8, random routing that differs from call to call.
The bfloat16 side sorts the pairs by expert and uses torch._grouped_mm; where few pairs make that
slow, a batched product over the pairs' gathered weights is timed too, and the faster one counts.
A table goes to stderr, JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

import torch
from gemm import stored
from torch import Tensor

from mxfp4prep.runtime.backends import torch_backend, triton_backend
from mxfp4prep.runtime.timing import measure

EXPERTS, WIDTH, HIDDEN, TOP = 128, 768, 2048, 8
QUANTS = {"w4a16": "none", "w4a4": "mxfp4"}
ROUTINGS = 8
TOLERANCE = 0.03
"""Norm of the difference from the reference over its norm: the second GEMM's inputs are rounded
again, and one that falls the other way moves by a whole FP4 step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4, 16, 64, 256, 1024, 4096])
    arguments = parser.parse_args()
    device = torch.device("cuda")
    w13 = torch.randn((EXPERTS, 2 * WIDTH, HIDDEN), device=device, dtype=torch.bfloat16)
    w2 = torch.randn((EXPERTS, HIDDEN, WIDTH), device=device, dtype=torch.bfloat16)
    banks = {
        path: (*bank(2 * WIDTH, HIDDEN, path, device), *bank(HIDDEN, WIDTH, path, device))
        for path in ("asm", "triton")
    }
    rows = []
    for tokens in arguments.tokens:
        x = torch.randn((tokens, HIDDEN), device=device, dtype=torch.bfloat16)
        routings = [routing(tokens, device) for _ in range(ROUTINGS)]
        plain = {"grouped_mm": [partial(grouped, x, w13, w2, *r) for r in routings]}
        if tokens * TOP <= 256:
            plain["gathered"] = [partial(gathered, x, w13, w2, *r) for r in routings]
        times = {by: measure(calls, device, seconds=0.05).median_us for by, calls in plain.items()}
        by = min(times, key=times.__getitem__)
        for path in banks:
            row = {"tokens": tokens, "path": path, "bf16_us": times[by], "bf16_by": by}
            for scheme, quant in QUANTS.items():
                calls = [partial(prepared, x, banks[path], path, quant, *r) for r in routings]
                error = difference(x, banks[path], path, quant, routings[0])
                if not error < TOLERANCE:
                    sys.exit(f"wrong: {tokens} tokens, {path}, {scheme}: relative error {error}")
                us = measure(calls, device, seconds=0.05).median_us
                row[scheme] = {
                    "us": round(us, 1),
                    "ratio": round(times[by] / us, 2),
                    "error": error,
                }
            rows.append(row)
            cells = "".join(f"{row[q]['us']:9.1f} {row[q]['ratio']:6.2f}" for q in QUANTS)
            print(f"{tokens:6} {path:6} {times[by]:9.1f} {by:10} {cells}", file=sys.stderr)
    json.dump({"device": torch.cuda.get_device_name(device), "rows": rows}, sys.stdout, indent=1)


def bank(n: int, k: int, path: str, device: torch.device) -> tuple[Tensor, Tensor]:
    weights, scales = zip(*(stored(n, k, path, device) for _ in range(EXPERTS)), strict=True)
    return torch.stack(weights), torch.stack(scales)


def routing(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, TOP) weights that sum to 1, and experts, no expert twice."""
    scores = torch.rand((tokens, EXPERTS), device=device)
    weights, ids = scores.topk(TOP)
    return weights / weights.sum(-1, keepdim=True), ids


def prepared(
    x: Tensor,
    banks: tuple[Tensor, ...],
    path: str,
    quant: str,
    weights: Tensor,
    ids: Tensor,
    backend: object = triton_backend,
) -> Tensor:
    return backend.fused_moe(
        x, *banks, weights, ids, WIDTH, path, path, quant,
        activation="silu", limit=None, gate_up="concatenated", hidden_pad=0, intermediate_pad=0,
        bias1=None, bias2=None, a1_scale=None, a2_scale=None,
    )  # fmt: skip


def difference(
    x: Tensor, banks: tuple[Tensor, ...], path: str, quant: str, routed: tuple[Tensor, Tensor]
) -> float:
    """Of the first 64 tokens' results from the reference backend's."""
    weights, ids = (part[:64] for part in routed)
    y = prepared(x[:64], banks, path, quant, weights, ids).double()
    y_all = prepared(x, banks, path, quant, *routed)[:64].double()
    expected = prepared(x[:64].float(), banks, path, quant, weights, ids, torch_backend).double()
    return max(float((one - expected).norm() / expected.norm()) for one in (y, y_all))


def grouped(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Pairs sorted by expert, two grouped products, summed up per token."""
    expert, order = ids.view(-1).sort()
    ends = torch.searchsorted(expert, torch.arange(EXPERTS, device=x.device), right=True)
    ends = ends.to(torch.int32)
    token = order // TOP
    both = torch._grouped_mm(x[token], w13.transpose(-2, -1), ends)
    gate, up = both.chunk(2, dim=-1)
    result = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(-2, -1), ends)
    result = result * weights.view(-1)[order].unsqueeze(-1).to(result.dtype)
    return torch.zeros_like(x).index_add_(0, token, result)


def gathered(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Every pair by itself, with a copy of its expert's matrices."""
    rows = x.repeat_interleave(TOP, 0).unsqueeze(-1)
    gate, up = torch.bmm(w13[ids.view(-1)], rows).squeeze(-1).chunk(2, dim=-1)
    middle = (torch.nn.functional.silu(gate) * up).unsqueeze(-1)
    result = torch.bmm(w2[ids.view(-1)], middle).view(*ids.shape, HIDDEN)
    return (result * weights.unsqueeze(-1).to(result.dtype)).sum(1)


if __name__ == "__main__":
    main()
