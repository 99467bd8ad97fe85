"""The experts of an MoE layer on the grouped GEMM kernels: from operator arguments to launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mxfp4prep.errors import UsageError
from mxfp4prep.layouts import PATHS
from mxfp4prep.mxfp4 import ELEMENTS, dynamic_fp8_scale
from mxfp4prep.runtime.kernels.configs import (
    CHUNKS,
    Tile,
    grouped_scaled_tile,
    grouped_tile,
    on_amd,
)
from mxfp4prep.runtime.kernels.dense import row_scales
from mxfp4prep.runtime.kernels.gates import gate
from mxfp4prep.runtime.kernels.launch import (
    ELEMENT_OF,
    PIECES,
    Groups,
    Rows,
    Stored,
    arranged,
    ceil_div,
    dependent,
    encoded,
    is_amd,
    multiplies_mxfp4,
    product,
    rows_of,
)
from mxfp4prep.runtime.kernels.routing import NOBODY, combine, count_pairs, list_pairs

if TYPE_CHECKING:
    from torch import Tensor

UNSORTED = 64
"""Pairs up to which each is a block of its own: the sort's launch costs more than it saves."""

PARTS = 16
"""Parts at most that many pairs are divided into."""

_singles: dict[tuple[torch.device, int], Tensor] = {}


@dataclass(frozen=True, slots=True)
class Gate:
    """What stands between the two GEMMs, by the names of runtime.gating."""

    activation: str
    limit: float | None
    interleaved: bool


def experts(
    x: Tensor,
    out: Tensor,
    gate_up: Stored,
    down: Stored,
    between: Gate,
    topk_weights: Tensor,
    topk_ids: Tensor,
    input_quant: str,
    input_scales: tuple[Tensor | None, Tensor | None],
    tile: Tile | None = None,
) -> None:
    """Fills out (t, h) with each token's weighted sum of experts; x (t, gate_up.k).

    input_scales   of both GEMMs, (e,) each, for FP8 that is static
    tile           how to divide the work; None: as configs.py has it
    """
    (tokens, top), count = topk_ids.shape, gate_up.weight.shape[0]
    pairs, ids = tokens * top, topk_ids.contiguous()
    if ids.dtype not in (torch.int32, torch.int64):  # what the kernels are compiled for
        ids = ids.int()
    sorted_ = tile is not None
    if tile is None:
        encodes = input_quant == "mxfp4"
        whole = encodes or (input_quant == "none" and PIECES[x.dtype] == 1)
        if whole and multiplies_mxfp4(x.device):
            tile = grouped_scaled_tile(pairs, count, encodes)
        else:
            pieces = PIECES[x.dtype] if input_quant == "none" else 1
            tiled = PATHS[gate_up.path][0] == "tile16x16"
            tile = grouped_tile(pairs, count, pieces, tiled=tiled)
        tile = on_amd(tile) if is_amd(x.device) else tile
    if not sorted_ and pairs <= UNSORTED and tile.bm <= 8:
        groups = Groups(_single_rows(pairs, tile.bm, x.device), ids.view(-1), top)
    else:
        groups = sorted_pairs(ids, count, tile.bm, top)
    rows, per_pair = _first_rows(x, ids, count, input_quant, input_scales[0], gate_up.k, tile)
    first = groups._replace(top=1) if per_pair else groups
    both = torch.empty((pairs, gate_up.n), dtype=torch.float32, device=x.device)
    product(rows, gate_up, both, tile, first)
    rows = _second_rows(
        both, x.dtype, between, ids, count, input_quant, input_scales[1], down.k, tile
    )
    result = torch.empty((pairs, down.n), dtype=torch.float32, device=x.device)
    product(rows, down, result, tile, groups._replace(top=1))
    hidden = out.shape[1]
    block = 256 if tokens < 256 else 1024
    combine[(tokens, ceil_div(hidden, block))](
        result, topk_weights.contiguous(), ids, out, count, down.n, hidden,
        TOP=top, BLOCK=block, num_warps=1 if tokens < 256 else 4,
        **dependent(x.device),
    )  # fmt: skip


def sorted_pairs(ids: Tensor, count: int, bm: int, top: int) -> Groups:
    """The pairs of `ids` listed by expert, in as many blocks as there can be at most.

    count   experts of the bank; an id outside 0..count - 1 is in no block
    """
    pairs, device = ids.numel(), ids.device
    blocks = min(pairs, pairs // bm + count)
    rows = torch.empty(blocks * bm, dtype=torch.int32, device=device)
    block_expert = torch.empty(blocks, dtype=torch.int32, device=device)
    width = max(16, 1 << count.bit_length())
    chunk, warps = CHUNKS[pairs > CHUNKS[0][0]]
    counted = pairs > chunk
    parts = min(PARTS, ceil_div(pairs, chunk))
    span = ceil_div(ceil_div(pairs, chunk), parts) * chunk
    parts = ceil_div(pairs, span)
    counts = block_expert
    if counted:
        counts = torch.empty((parts, width), dtype=torch.int32, device=device)
        count_pairs[(parts,)](
            ids, counts, pairs, span, count,
            EXPERTS=width, CHUNK=chunk, num_warps=warps, **dependent(device),
        )  # fmt: skip
    list_pairs[(count + 1, parts)](
        ids, counts, rows, block_expert, pairs, span, parts, blocks, count,
        COUNTED=counted, EXPERTS=width, BM=bm, CHUNK=chunk, num_warps=warps,
        **dependent(device),
    )  # fmt: skip
    return Groups(rows, block_expert, top)


def _single_rows(pairs: int, bm: int, device: torch.device) -> Tensor:
    """The rows of blocks that hold one pair each, (pairs * bm,) int32: made once per device."""
    rows = _singles.get((device, bm))
    if rows is None:
        rows = torch.full((UNSORTED, bm), NOBODY.value, dtype=torch.int32, device=device)
        rows[:, 0] = torch.arange(UNSORTED, dtype=torch.int32, device=device)
        rows = rows.view(-1)
        # a tensor made in a capture is filled by its replay only: of no use to others
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _singles[device, bm] = rows
    return rows[: pairs * bm]


def _first_rows(
    x: Tensor,
    ids: Tensor,
    count: int,
    input_quant: str,
    scale: Tensor | None,
    k: int,
    tile: Tile,
) -> tuple[Rows, bool]:
    """The first GEMM's rows, and whether there is one per pair instead of one per token."""
    top = ids.shape[1]
    if input_quant in ("fp8_static", "fp8_tensor"):
        x = x.repeat_interleave(top, 0)
        scales = _expert_scales(x, ids, count, input_quant, scale)
        return rows_of(x, input_quant, scales, tile, k), True
    rows = rows_of(x, input_quant, row_scales(x, input_quant, scale), tile, k)
    if rows.row_scale is not None:
        rows = rows._replace(row_scale=rows.row_scale.repeat_interleave(top))
    return rows, False


def _second_rows(
    both: Tensor,
    dtype: torch.dtype,
    between: Gate,
    ids: Tensor,
    count: int,
    input_quant: str,
    scale: Tensor | None,
    k: int,
    tile: Tile,
) -> Rows:
    """act(gate) * up, as the second GEMM reads it, from both (pairs, n) float32.

    k   values that are no padding
    """
    if input_quant.startswith("fp8"):
        values = _gated(both, between, "none", 1, torch.float32, k, k)[0]
        if input_quant == "fp8_token":
            scales = row_scales(values, input_quant, None)
        else:
            scales = _expert_scales(values, ids, count, input_quant, scale)
        return arranged(values, input_quant, scales, tile.columns(k))
    if tile.kernel == "scaled" and input_quant == "mxfp4":
        values = _gated(both, between, "none", 1, torch.float32, k, k)[0]
        return encoded(values, tile.columns(k))
    pieces = PIECES[dtype] if input_quant == "none" else 1
    return Rows(_gated(both, between, input_quant, pieces, torch.bfloat16, k, tile.columns(k)))


def _gated(
    both: Tensor,
    between: Gate,
    input_quant: str,
    pieces: int,
    dtype: torch.dtype,
    k: int,
    width: int,
) -> Tensor:
    """(pieces, pairs, width) of `dtype`: their sum is act(gate) * up, quantized; zero from k on."""
    pairs, stride = both.shape
    out = torch.empty((pieces, pairs, width), dtype=dtype, device=both.device)
    element = ELEMENTS[ELEMENT_OF.get(input_quant, "fp4")]
    bm, warps = (1, 1) if pairs <= 64 else (2, 2) if pairs < 1024 else (8, 4)
    gate[(ceil_div(pairs, bm), ceil_div(width, 256))](
        both,
        out,
        pairs,
        stride,
        stride - k,
        k,
        width,
        out.stride(0),
        0.0 if between.limit is None else float(between.limit),
        ACTIVATION=between.activation,
        LIMITED=between.limit is not None,
        INTERLEAVED=between.interleaved,
        KIND="mx" if input_quant in ELEMENT_OF else "none",
        MANT=element.mantissa_bits,
        LOW=element.smallest_exponent,
        TOP=element.largest_exponent,
        PIECES=pieces,
        BM=bm,
        BK=256,
        num_warps=warps,
        **dependent(both.device),
    )
    return out


def _expert_scales(
    x: Tensor, ids: Tensor, count: int, input_quant: str, scale: Tensor | None
) -> Tensor:
    """The FP8 scale of each pair's expert, (pairs,) float32, from x (pairs, k); no host waits."""
    expert = ids.reshape(-1).long()
    if input_quant == "fp8_static":
        if scale is None:
            raise UsageError("input_quant fp8_static", "needs an input_scale")
        return scale.float().reshape(-1)[expert.clamp(0, count - 1)]
    expert = torch.where((expert < 0) | (expert >= count), count, expert)  # those rows count apart
    largest = torch.zeros(count + 1, dtype=torch.float32, device=x.device)
    largest.scatter_reduce_(0, expert, x.abs().amax(-1).float(), "amax")
    return dynamic_fp8_scale(largest)[expert]
