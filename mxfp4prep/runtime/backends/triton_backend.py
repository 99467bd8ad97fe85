"""The Triton backend: own kernels on the stored layouts, on any GPU that Triton supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxfp4prep.runtime.devices import launching_on
from mxfp4prep.runtime.kernels.dense import dense
from mxfp4prep.runtime.kernels.grouped import Gate, experts
from mxfp4prep.runtime.kernels.launch import Stored

if TYPE_CHECKING:
    from torch import Tensor


def gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    n: int,
    path: str,
    input_quant: str,
    *,
    bias: Tensor | None,
    input_scale: Tensor | None,
) -> Tensor:
    """As ops.gemm."""
    out = x.new_empty((x.shape[0], n))
    if out.numel():
        weight, scale = weight.contiguous(), scale.contiguous()
        bias = None if bias is None else bias.contiguous()
        with launching_on(x):
            dense(x, weight, scale, out, path, input_quant, bias, input_scale)
    return out


def fused_moe(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate: int,
    w13_path: str,
    w2_path: str,
    input_quant: str,
    *,
    activation: str,
    limit: float | None,
    gate_up: str,
    hidden_pad: int,
    intermediate_pad: int,
    bias1: Tensor | None,
    bias2: Tensor | None,
    a1_scale: Tensor | None,
    a2_scale: Tensor | None,
) -> Tensor:
    """As ops.fused_moe."""
    if not topk_ids.numel():
        return x.new_zeros(x.shape)
    hidden = x.shape[1]
    used, width = hidden - hidden_pad, intermediate - intermediate_pad
    interleaved = gate_up == "interleaved"
    both = 2 * width if interleaved else intermediate + width  # what is padding at the end is left
    first = Stored(
        w13.contiguous(), w13_scale.contiguous(), None if bias1 is None else bias1.contiguous(),
        w13_path, both, used, 2 * intermediate, hidden,
    )  # fmt: skip
    second = Stored(
        w2.contiguous(), w2_scale.contiguous(), None if bias2 is None else bias2.contiguous(),
        w2_path, used, width, hidden, intermediate,
    )  # fmt: skip
    out = x.new_empty(x.shape)
    with launching_on(x):
        experts(
            x[:, :used], out, first, second, Gate(activation, limit, interleaved),
            topk_weights, topk_ids, input_quant, (a1_scale, a2_scale),
        )  # fmt: skip
    return out
