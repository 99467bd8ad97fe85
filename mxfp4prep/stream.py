"""Tensor bytes from one layout to another in bounded pieces, forwards or back.

A layout whose bands of rows are contiguous on both sides is moved a few megabytes at a time, so
memory does not grow with the tensor; a layout without bands is moved one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from mxfp4prep import io
from mxfp4prep.layouts import LAYOUTS, Layout
from mxfp4prep.plan import TensorPlan

PIECE_NBYTES = 2 << 20
"""Bytes moved at a time: small enough to stay in a core's cache between hash, permute and write."""

TakeBuffer = Callable[[int], bytearray]


class Piece(NamedTuple):
    """`read`, what stands in the input file, and `made`, what belongs in the output file.

    Both are views; `made` lies in `buffer`, which came from the caller's `take`.
    """

    read: memoryview
    made: memoryview
    buffer: bytearray


class Scratch:
    """A reusable input buffer that grows to the largest piece asked for."""

    def __init__(self) -> None:
        self._buffer = bytearray(PIECE_NBYTES)

    def take(self, nbytes: int) -> bytearray:
        """At least `nbytes` bytes, the same memory each time."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return self._buffer


def move(
    fd: int,
    offset: int,
    tensor: TensorPlan,
    *,
    inverse: bool,
    scratch: Scratch,
    take: TakeBuffer,
    where: str,
) -> Iterator[Piece]:
    """The pieces of one tensor, in output order.

    fd, offset   open input file and where the tensor's bytes begin in it
    inverse      False: source to stored layout · True: stored back to source
    take         gives a buffer of at least that many bytes for each piece's output
    where        file name for errors

    Raises IOFailed when the file is shorter than its header says.
    """
    if tensor.layout is None or tensor.layout == "raw":
        yield from _copied(fd, offset, tensor.source.nbytes, take, where)
        return
    layout = LAYOUTS[tensor.layout]
    layout.check(tensor.rows, tensor.cols, tensor.source.name)
    for rows in _row_counts(layout, tensor):
        nbytes = rows * tensor.cols
        source = scratch.take(nbytes)
        read = memoryview(source)[:nbytes]
        io.pread_into(fd, read, offset, where)
        buffer = take(nbytes)
        _permute(layout, source, buffer, rows, tensor.cols, inverse)
        yield Piece(read, memoryview(buffer)[:nbytes], buffer)
        offset += nbytes


def _copied(fd: int, offset: int, nbytes: int, take: TakeBuffer, where: str) -> Iterator[Piece]:
    for start in range(0, nbytes, PIECE_NBYTES):
        size = min(PIECE_NBYTES, nbytes - start)
        buffer = take(size)
        view = memoryview(buffer)[:size]
        io.pread_into(fd, view, offset + start, where)
        yield Piece(view, view, buffer)


def _row_counts(layout: Layout, tensor: TensorPlan) -> Iterator[int]:
    """Rows of each piece: whole bands across all matrices, or one matrix at a time."""
    if layout.band_rows is None:
        yield from (tensor.rows for _ in range(tensor.matrices))
        return
    left = tensor.rows * tensor.matrices
    bands = max(1, PIECE_NBYTES // (layout.band_rows * tensor.cols))
    step = bands * layout.band_rows
    while left > 0:
        yield min(step, left)
        left -= step


def _permute(
    layout: Layout, source: bytearray, target: bytearray, rows: int, cols: int, inverse: bool
) -> None:
    count = rows * cols
    given = torch.frombuffer(source, dtype=torch.uint8, count=count)
    made = torch.frombuffer(target, dtype=torch.uint8, count=count)
    stored_shape = layout.stored_shape(rows, cols)
    if inverse:
        layout.inverse(given.view(stored_shape), rows, cols, out=made.view(rows, cols))
    else:
        layout.forward(given.view(rows, cols), out=made.view(stored_shape))
