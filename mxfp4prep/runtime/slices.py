"""Which bytes of a stored matrix make one rank's piece, or that none do and it must be repacked.

A piece is a block of the logical matrix. In every layout of this package a block whose borders
fall on tile borders is also a block of the stored 2-D matrix, so it can be read by itself; where
exactly follows from the layout's own index formula.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from mxfp4prep.alignment import REASONS, judge_matrix
from mxfp4prep.errors import LayoutError
from mxfp4prep.layouts import LAYOUTS, PATHS, Layout
from mxfp4prep.parallel import SCALE_GROUP, Shard

_PACKAGE = f"{__name__.partition('.')[0]}."

Range = tuple[int, int]
"""First element, and the one after the last."""


class RepackWarning(RuntimeWarning):
    """A stored layout could not be sliced at this degree: the layer is read whole and repacked."""


def warn_of_repacking(text: str) -> None:
    """One RepackWarning, at the line outside this package that asked for the layer."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RepackWarning, stacklevel=level)


class Rectangle(NamedTuple):
    """Rows top to bottom, columns left to right (both ends exclusive) of a stored matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def nbytes(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


class Copy(NamedTuple):
    """A block of the stored matrix and its place in the piece's own stored matrix."""

    source: Rectangle
    target: Rectangle


def rectangle(layout: Layout, shape: Range, rows: Range, columns: Range) -> Rectangle | None:
    """Where a block of a logical matrix stands in its stored form; None where it is no block there.

    shape           rows and byte columns of the logical matrix
    rows, columns   the block, in logical rows and byte columns
    """
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    if not height or not width:
        return Rectangle(0, 0, 0, 0)
    stored_rows, stored_columns = layout.stored_shape(*shape)
    if (height, width) == shape:
        return Rectangle(0, stored_rows, 0, stored_columns)
    try:  # both borders are multiples of the tile iff their greatest common divisor is
        layout.check(gcd(*rows), gcd(*columns), "block")
    except LayoutError:
        return None
    top, left = divmod(layout.offset(rows[0], columns[0], *shape), stored_columns)
    last = layout.offset(rows[1] - 1, columns[1] - 1, *shape)
    block = Rectangle(top, last // stored_columns + 1, left, last % stored_columns + 1)
    return block if block.nbytes == height * width else None


def copies(
    layout: Layout, shape: Range, rows: Sequence[Range], columns: Range, into: Range, at: int = 0
) -> tuple[Copy, ...] | None:
    """The block copies that make a piece in the same layout, or None where it cannot be sliced.

    shape           rows and byte columns of the whole logical matrix
    rows, columns   the piece: row ranges in the order they are stacked, one range of byte columns
    into            rows and byte columns of the matrix the piece is put into, from row `at` on
    """
    steps = []
    for start, stop in rows:
        source = rectangle(layout, shape, (start, stop), columns)
        target = rectangle(layout, into, (at, at + stop - start), (0, into[1]))
        if source is None or target is None:
            return None
        steps.append(Copy(source, target))
        at += stop - start
    return tuple(steps)


def byte_columns(operand: str, columns: Range) -> Range:
    """The byte columns of "weight" or "scale" that hold FP4 columns `columns`."""
    per_byte = 2 if operand == "weight" else SCALE_GROUP
    return columns[0] // per_byte, -(-columns[1] // per_byte)


def path_of_piece(path: str, n: int, k: int, piece: Shard) -> tuple[str, str | None]:
    """The path that rank's piece can take, and why that is not the stored one (None if it is).

    path    name of PATHS that the (n, k) matrix is stored for
    """
    if path == "asm":
        verdict = judge_matrix(piece.n, piece.k)
        if verdict.path != "asm":
            why = "; ".join(REASONS[reason] for reason in verdict.reasons)
            return "triton", f"the {piece.n} x {piece.k} piece cannot take the ASM path ({why})"
    for operand, layout_id in zip(("weight", "scale"), PATHS[path], strict=True):
        shape = n, byte_columns(operand, (0, k))[1]
        columns = byte_columns(operand, piece.columns)
        into = piece.n, columns[1] - columns[0]
        if copies(LAYOUTS[layout_id], shape, piece.rows, columns, into) is None:
            return "triton", f"the piece's borders cut through tiles of the {operand} ({layout_id})"
    return path, None
