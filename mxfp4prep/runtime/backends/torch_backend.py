"""The reference backend: plain torch in float32, right on any device and fast on none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mxfp4prep import mxfp4
from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.decoding import decode_matrix, plain_matrix
from mxfp4prep.runtime.gating import gated
from mxfp4prep.runtime.input_quant import INPUT_QUANT

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_ELEMENTS = 1 << 26
"""Weights decoded at a time: 256 MiB of float32, so that a whole lm_head never is."""


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
    """As ops.gemm: inputs quantized and decoded, product and bias in float32."""
    k = x.shape[-1]
    rows = INPUT_QUANT[input_quant](x.float(), input_scale)
    packed, groups = plain_matrix(weight, scale, n, k, path)
    out = torch.empty((x.shape[0], n), dtype=torch.float32, device=x.device)
    step = max(1, CHUNK_ELEMENTS // k)
    for start in range(0, n, step):
        stop = min(start + step, n)
        part = mxfp4.decode(packed[start:stop], groups[start:stop], k)
        out[:, start:stop] = rows @ part.T
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype)


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
    """As ops.fused_moe: expert by expert in float32, padding cut off first, slots of -1 skipped."""
    hidden = x.shape[-1]
    used = hidden - hidden_pad
    quantize = INPUT_QUANT[input_quant]
    real_rows = _real_rows(intermediate, intermediate_pad, gate_up, x.device)
    rows = x[:, :used].float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in _experts_hit(topk_ids, w13.shape[0]):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        inputs = quantize(rows[token], None if a1_scale is None else a1_scale[expert])
        matrix = decode_matrix(w13[expert], w13_scale[expert], 2 * intermediate, hidden, w13_path)
        middle = inputs @ matrix[real_rows, :used].T
        if bias1 is not None:
            middle += bias1[expert][real_rows].float()
        middle = gated(middle, gate_up, activation, limit)
        middle = quantize(middle, None if a2_scale is None else a2_scale[expert])
        matrix = decode_matrix(w2[expert], w2_scale[expert], hidden, intermediate, w2_path)
        result = middle @ matrix[:used, : middle.shape[-1]].T
        if bias2 is not None:
            result += bias2[expert][:used].float()
        result *= topk_weights[token, slot].float().unsqueeze(-1)
        out[:, :used].index_add_(0, token, result)
    return out.to(x.dtype)


def _real_rows(intermediate: int, pad: int, gate_up: str, device: torch.device) -> Tensor:
    """Rows of a gate-up matrix that are not padding, in stored order."""
    rows = torch.arange(2 * intermediate, device=device)
    value = rows // 2 if gate_up == "interleaved" else rows % intermediate
    return rows[value < intermediate - pad]


def _experts_hit(topk_ids: Tensor, experts: int) -> list[int]:
    """The experts that some token goes to, -1 left out. Raises UsageError for an id of none."""
    hit: list[int] = torch.unique(topk_ids).tolist()
    if hit and not -1 <= hit[0] <= hit[-1] < experts:
        wrong = hit[0] if hit[0] < -1 else hit[-1]
        expected = f"0..{experts - 1}, or -1 for one that is elsewhere"
        raise UsageError("topk_ids", "no such expert", found=wrong, expected=expected)
    return [expert for expert in hit if expert >= 0]
