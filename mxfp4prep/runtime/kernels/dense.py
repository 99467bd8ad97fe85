"""The dense product: activations quantized as the layer asks, times one stored matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mxfp4prep.errors import UsageError
from mxfp4prep.layouts import PATHS
from mxfp4prep.mxfp4 import dynamic_fp8_scale
from mxfp4prep.runtime.kernels.configs import Tile, dense_tile, expands, on_amd, scaled_tile
from mxfp4prep.runtime.kernels.launch import (
    PIECES,
    Stored,
    arranged,
    expanded,
    is_amd,
    multiplies_mxfp4,
    product,
    rows_of,
)

if TYPE_CHECKING:
    from torch import Tensor


def dense(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    path: str,
    input_quant: str,
    bias: Tensor | None,
    input_scale: Tensor | None,
    tile: Tile | None = None,
) -> None:
    """Fills out (m, n) with x (m, k) times the stored weight, + bias.

    tile   how to divide the work; None: as configs.py has it, which for many rows is to expand the
           weight and leave the product to the vendor's GEMM
    """
    m, k = x.shape
    n = out.shape[1]
    row_scale = row_scales(x, input_quant, input_scale)
    pieces = PIECES[x.dtype] if input_quant == "none" else 1
    encoded = input_quant == "mxfp4"
    native = (encoded or (input_quant == "none" and pieces == 1)) and multiplies_mxfp4(x.device)
    if tile is None and not (native and encoded) and pieces == 1 and expands(m, n, k):
        by_expanding(x, weight, scale, out, path, input_quant, bias, row_scale)
        return
    if tile is None:
        tiled = PATHS[path][0] == "tile16x16"
        if native:
            tile = scaled_tile(m, n, k, encoded)
        else:
            tile = dense_tile(m, n, k, pieces, tiled=tiled)
        tile = on_amd(tile) if is_amd(x.device) else tile
    rows = rows_of(x, input_quant, row_scale, tile, k)
    product(rows, Stored(weight, scale, bias, path, n, k, n, k), out, tile)


def by_expanding(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    path: str,
    input_quant: str,
    bias: Tensor | None,
    row_scale: Tensor | None,
) -> None:
    """As `dense`, through a bfloat16 copy of the weight."""
    n, k = out.shape[1], x.shape[1]
    if input_quant != "none":
        x = arranged(x, input_quant, row_scale, k).tensor[0]
    matrix = expanded(weight, scale, n, k, path)
    if row_scale is None and bias is None and out.dtype == torch.bfloat16:
        torch.mm(x, matrix.T, out=out)
        return
    if x.is_cuda:
        result = torch.mm(x, matrix.T, out_dtype=torch.float32)
    else:
        result = x.float() @ matrix.float().T
    if row_scale is not None:
        result *= row_scale.unsqueeze(-1)
    if bias is not None:
        result += bias.float()
    out.copy_(result)


def row_scales(x: Tensor, input_quant: str, input_scale: Tensor | None) -> Tensor | None:
    """The scale of each row of x, (m,) float32, for FP8 inputs; None for others."""
    if not input_quant.startswith("fp8"):
        return None
    rows = x.shape[0]
    if input_quant == "fp8_static":
        if input_scale is None:
            raise UsageError("input_quant fp8_static", "needs an input_scale")
        return input_scale.float().reshape(-1).expand(rows).contiguous()
    largest = x.abs().amax(-1).float()
    if input_quant == "fp8_tensor":
        largest = largest.amax().expand(rows)
    return dynamic_fp8_scale(largest).contiguous()
