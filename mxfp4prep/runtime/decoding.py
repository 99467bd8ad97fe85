"""Stored bytes back to numbers: the exact inverse of a path's layouts, then the E2M1/E8M0 codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mxfp4prep import mxfp4
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime.slices import byte_columns

if TYPE_CHECKING:
    from torch import Tensor


def plain_matrix(weight: Tensor, scale: Tensor, n: int, k: int, path: str) -> tuple[Tensor, Tensor]:
    """Weight (..., n, k / 2) and scale (..., n, ceil(k / 32)) uint8 in Quark's own order.

    weight, scale   as `path` of PATHS stores (n, k) matrices; leading dimensions are experts
    """
    weight_layout, scale_layout = (LAYOUTS[layout] for layout in PATHS[path])
    _, packed = byte_columns("weight", (0, k))
    _, groups = byte_columns("scale", (0, k))
    return weight_layout.inverse(weight, n, packed), scale_layout.inverse(scale, n, groups)


def decode_matrix(
    weight: Tensor, scale: Tensor, n: int, k: int, path: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The numbers of stored (n, k) matrices, (..., n, k)."""
    packed, groups = plain_matrix(weight, scale, n, k, path)
    return mxfp4.decode(packed, groups, k, dtype)
