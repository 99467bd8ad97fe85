"""What the same layers cost in bfloat16: the calls that a GEMM's time is compared with.

Weights are random: the time of a product does not depend on which ones. Experts run in two ways, of
which the faster one counts: one grouped product per bank, where torch has one for the device, and a
loop over the experts that are hit, which are known beforehand. Neither has to wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F

from mxfp4prep.runtime.ceilings import random_bf16

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.runtime.experts import PreparedExperts

Way = Literal["linear", "grouped_mm", "loop"]
"""How it is done in bfloat16; the last two are for experts."""

Grouped = Callable[..., "Tensor"]


class Routing(NamedTuple):
    """Where tokens go: weights (m, top) float32, ids (m, top) int32."""

    weights: Tensor
    ids: Tensor


class Banks(NamedTuple):
    """w13 (e, 2 * intermediate, hidden), w2 (e, hidden, intermediate), bfloat16."""

    w13: Tensor
    w2: Tensor


def linear_calls(x: Tensor, weights: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """x @ weight.T for each of the weights (n, k), by torch.nn.functional.linear."""
    return [lambda weight=weight: F.linear(x, weight) for weight in weights]  # type: ignore[misc]


def random_banks(layer: PreparedExperts, device: torch.device) -> Banks:
    """Banks for experts of the layer's sizes."""
    count, hidden, width = layer.experts, layer.hidden, layer.intermediate
    return Banks(
        random_bf16((count, 2 * width, hidden), device),
        random_bf16((count, hidden, width), device),
    )


def experts_calls(
    x: Tensor, banks: Sequence[Banks], routings: Sequence[Routing]
) -> dict[Way, list[Callable[[], Tensor]]]:
    """One call per routing, on the banks in turn, for each way: "grouped_mm" if it is there, and
    "loop"."""
    pairs = [(banks[i % len(banks)], routing) for i, routing in enumerate(routings)]
    calls: dict[Way, list[Callable[[], Tensor]]] = {
        "loop": [_loop_call(x, bank, routing) for bank, routing in pairs]
    }
    grouped = grouped_mm(x, banks[0])
    if grouped is not None:
        calls["grouped_mm"] = [_grouped_call(x, bank, routing, grouped) for bank, routing in pairs]
    return calls


def grouped_mm(x: Tensor, banks: Banks) -> Grouped | None:
    """torch's product of groups of rows with a matrix each, or None where it cannot do these."""
    grouped: Grouped | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        return None
    ends = torch.full((banks.w13.shape[0],), x.shape[0], dtype=torch.int32, device=x.device)
    try:
        middle = grouped(x, banks.w13.transpose(-2, -1), offs=ends)
        grouped(middle[:, : banks.w2.shape[-1]].contiguous(), banks.w2.transpose(-2, -1), offs=ends)
    except RuntimeError:  # this device, or widths that it has no kernel for
        return None
    return grouped


def _grouped_call(
    x: Tensor, banks: Banks, routing: Routing, grouped: Grouped
) -> Callable[[], Tensor]:
    w13, w2 = (bank.transpose(-2, -1) for bank in banks)
    top = routing.ids.shape[-1]
    experts = torch.arange(w13.shape[0], dtype=routing.ids.dtype, device=x.device)

    def call() -> Tensor:
        sorted_ids, order = routing.ids.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
        token = order // top
        middle = _gated(grouped(x[token], w13, offs=ends))
        result = grouped(middle, w2, offs=ends)
        result = result * routing.weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, token, result)

    return call


def _loop_call(x: Tensor, banks: Banks, routing: Routing) -> Callable[[], Tensor]:
    steps = []
    for expert in torch.unique(routing.ids).tolist():
        token, slot = (routing.ids == expert).nonzero(as_tuple=True)
        steps.append((expert, token, routing.weights[token, slot].to(x.dtype).unsqueeze(-1)))

    def call() -> Tensor:
        out = torch.zeros_like(x)
        for expert, token, weights in steps:
            middle = _gated(F.linear(x[token], banks.w13[expert]))
            out.index_add_(0, token, F.linear(middle, banks.w2[expert]) * weights)
        return out

    return call


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
