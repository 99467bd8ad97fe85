"""Tensor parallelism over stored layouts: along which dimension transformers may slice a tensor
while it reads it, and what is done with a layer that cannot be sliced so.

Tile-row tensors are sliced like plain ones as long as every border falls between tiles. Where it
does not, every rank reads the layer whole and repacks its piece, as mxfp4prep.load does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from mxfp4prep.errors import CannotShard
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.parallel import SCALE_GROUP, Shard
from mxfp4prep.runtime.slices import RepackWarning, byte_columns, path_of_piece

if TYPE_CHECKING:
    from torch import Tensor

Axis = Literal["rows", "columns"]
"""What ranks share of a layer: its output rows, or its input columns."""


def check_cut(
    where: str, axis: Axis, shape: tuple[int, int], size: int, group: int = SCALE_GROUP
) -> None:
    """Raises CannotShard where `size` equal pieces of a matrix break it, or a group of columns."""
    n, k = shape
    length, what = (n, "rows") if axis == "rows" else (k, "columns")
    if length % size:
        reason = "split_rows" if axis == "rows" else "split_cols"
        raise CannotShard(where, f"{length} {what} do not divide by tp {size}", reason=reason)
    if axis == "columns" and (k // size) % group:
        what = f"no whole {group}-groups at tp {size}: {k} / {size} = {k // size} columns"
        raise CannotShard(where, what, reason="split_groups")


def slicing_of(path: str, n: int, k: int, axis: Axis, size: int) -> tuple[int, int] | None:
    """The dimensions of the stored weight and scale that are sliced evenly for equal pieces of an
    (n, k) matrix, counted from the end of two; None where no slice of the bytes is the piece."""
    for rank in range(size):
        if path_of_piece(path, n, k, piece_of(n, k, axis, rank, size)) != (path, None):
            return None
    straight, turned = (0, 1) if axis == "rows" else (1, 0)
    _, scale = PATHS[path]
    return straight, turned if scale == "transposed" else straight


def piece_of(n: int, k: int, axis: Axis, rank: int, size: int) -> Shard:
    """The rank's rows, or its columns."""
    if axis == "rows":
        return Shard(((rank * n // size, (rank + 1) * n // size),), (0, k))
    return Shard(((0, n),), (rank * k // size, (rank + 1) * k // size))


def cut_matrix(
    pair: tuple[Tensor, Tensor],
    path: str,
    shape: tuple[int, int],
    axis: Axis,
    rank: int,
    size: int,
    row_ranges: Sequence[tuple[int, int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The rank's piece of whole matrices, as path "triton" stores it: weight and scale.

    pair         weight and scale of (n, k) matrices in `path`'s layouts, (..., rows, columns)
    shape        n, k
    row_ranges   which rows are the rank's, where they are not one run of them
    """
    n, k = shape
    piece = piece_of(n, k, axis, rank, size)
    rows = piece.rows if row_ranges is None else row_ranges
    result = []
    for operand, stored, layout, target in zip(
        ("weight", "scale"), pair, PATHS[path], PATHS["triton"], strict=True
    ):
        start, stop = byte_columns(operand, piece.columns)
        width = byte_columns(operand, (0, k))[1]
        matrix = LAYOUTS[layout].inverse(stored.view(torch.uint8), n, width)
        mine = torch.cat([matrix[..., top:end, start:stop] for top, end in rows], dim=-2)
        result.append(LAYOUTS[target].forward(mine))
    return result[0], result[1]


def moved(name: str, rank: int, size: int) -> None:
    """One warning for a layer that was read whole."""
    warnings.warn(
        f"{name}: read whole and repacked for the Triton path at rank {rank} of {size}: its pieces "
        "are no slices of what is stored",
        RepackWarning,
        stacklevel=4,
    )
