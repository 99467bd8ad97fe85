"""What a GEMM on stored bytes must answer, in float64.

Every stored byte is found by the layout's index formula, not by undoing the layout, and decoded by
the definition of E2M1 and E8M0, not by a backend's code: a layout mixed up shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime.gating import gated
from mxfp4prep.runtime.input_quant import INPUT_QUANT
from mxfp4prep.runtime.slices import byte_columns

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.runtime.experts import PreparedExperts
    from mxfp4prep.runtime.linear import PreparedLinear

ROWS_AT_A_TIME = 256

BEYOND = 2.0**128
"""What float32 cannot hold: such a weight (of scale byte 253 or 254) is infinite in it."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def linear_oracle(
    layer: PreparedLinear, x: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x @ weight.T + bias, (m, n) float64, and the same sum of magnitudes, which bounds rounding.

    x      (m, k); its quantization is the layer's own, in float32, as backends do it
    rows   only these output features, (r,) int64; all of them by default
    """
    inputs = INPUT_QUANT[layer.input_quant](x.float(), layer.input_scale).double()
    rows = torch.arange(layer.n, device=x.device) if rows is None else rows
    expected = torch.empty((x.shape[0], len(rows)), dtype=torch.float64, device=x.device)
    magnitude = torch.empty_like(expected)
    shape = layer.n, layer.k
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        stop = min(start + ROWS_AT_A_TIME, len(rows))
        part = decode_rows(layer.weight, layer.scale, shape, layer.path, rows[start:stop])
        expected[:, start:stop] = inputs @ part.T
        magnitude[:, start:stop] = inputs.abs() @ part.abs().T
    if layer.bias is not None:
        expected += layer.bias[rows].double()
        magnitude += layer.bias[rows].double().abs()
    return expected, magnitude


def experts_oracle(
    layer: PreparedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    """What PreparedExperts must answer, (t, hidden) float64: the rank's share where it has one."""
    expected = torch.zeros((x.shape[0], layer.hidden), dtype=torch.float64, device=x.device)
    for expert in torch.unique(topk_ids).tolist():
        place = expert
        if layer.expert_map is not None and expert >= 0:
            place = int(layer.expert_map[expert])
        if place >= 0:
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            weights = topk_weights[token, slot].double().unsqueeze(-1)
            expected.index_add_(0, token, _expert(layer, place, x[token]) * weights)
    if layer.shared_name is not None:
        for token in range(layer.turn.mine, x.shape[0], layer.turn.of):
            expected[token] += _shared(layer, x[token : token + 1])[0]
    return expected


def _shared(layer: PreparedExperts, x: Tensor) -> Tensor:
    """What the shared expert adds to a token, (1, hidden) float64."""
    held = layer.w13.shape[0]
    result = torch.zeros((1, layer.hidden), dtype=torch.float64, device=x.device)
    for slot in range(held - layer.shared_slots, held):
        result += _expert(layer, slot, x)
    apart = layer.shared
    if apart is not None:
        ups = torch.cat([linear_oracle(up, x)[0] for up in apart.layers], dim=-1)
        middle = gated(ups, apart.gate_up, apart.activation, apart.limit)
        result += linear_oracle(apart.down, middle.float())[0]
    gate = layer.shared_gate
    return result if gate is None else result * torch.sigmoid(gate(x).double())


def _expert(layer: PreparedExperts, expert: int, x: Tensor) -> Tensor:
    """What one expert makes of its tokens, float64 but for the rounding of the GEMMs' inputs."""
    quantize = INPUT_QUANT[layer.input_quant]
    scales = [None if bank is None else bank[expert] for bank in (layer.a1_scale, layer.a2_scale)]
    shape = 2 * layer.intermediate, layer.hidden
    bank, scale = layer.w13[expert], layer.w13_scale[expert]
    w13 = decode_rows(bank, scale, shape, layer.w13_path, _all(shape[0], x))
    middle = quantize(x.float(), scales[0]).double() @ w13.T
    if layer.bias1 is not None:
        middle += layer.bias1[expert].double()
    middle = gated(middle, layer.gate_up, layer.activation, layer.limit)
    shape = layer.hidden, layer.intermediate
    bank, scale = layer.w2[expert], layer.w2_scale[expert]
    w2 = decode_rows(bank, scale, shape, layer.w2_path, _all(shape[0], x))
    result = quantize(middle.float(), scales[1]).double() @ w2.T
    return result if layer.bias2 is None else result + layer.bias2[expert].double()


def _all(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def decode_rows(
    weight: Tensor, scale: Tensor, shape: tuple[int, int], path: str, rows: Tensor
) -> Tensor:
    """Some rows of a stored (n, k) matrix, (r, k) float64, infinite from 2^128 on.

    weight, scale   one matrix as `path` of PATHS stores it
    shape           (n, k)
    rows            (r,) int64
    """
    n, k = shape
    row = rows.unsqueeze(-1)
    column = torch.arange(k, device=weight.device)
    weight_layout, scale_layout = (LAYOUTS[layout] for layout in PATHS[path])
    packed_columns = byte_columns("weight", (0, k))[1]
    groups = byte_columns("scale", (0, k))[1]
    byte = weight.flatten()[weight_layout.offset(row, column // 2, n, packed_columns)]
    code = torch.where(column % 2 == 1, byte >> 4, byte & 15).long()
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=weight.device)
    value = magnitudes[code & 7] * (1 - 2 * (code >> 3))
    group = torch.arange(-(-k // 32), device=weight.device)
    exponent = scale.flatten()[scale_layout.offset(row, group, n, groups)].long()
    power = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 127)
    power = power.masked_fill(exponent == 255, torch.nan)
    value = value * power.repeat_interleave(32, dim=1)[:, :k]
    return value.masked_fill(value >= BEYOND, torch.inf).masked_fill(value <= -BEYOND, -torch.inf)
