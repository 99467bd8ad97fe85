"""Bytes from shards into tensors: whole tensors, or only the blocks that a rank's piece needs.

Positional reads into a tensor's own memory, never a memory map: a shard that shrinks must raise,
not kill the server. With digests at hand a tensor is read whole and checked before it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mxfp4prep import io
from mxfp4prep.errors import InvalidCheckpoint, LayoutError, Unsupported
from mxfp4prep.layouts import Layout
from mxfp4prep.prepared import VERIFY_HINT
from mxfp4prep.runtime.agreement import Place
from mxfp4prep.runtime.opening import Opened
from mxfp4prep.runtime.slices import Range, Rectangle, copies, rectangle

if TYPE_CHECKING:
    from torch import Tensor

DTYPES: dict[str, torch.dtype] = {  # safetensors' names of what torch can hold
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class Operand:
    """A stored weight or scale: `count` matrices of (rows, cols) bytes, each in `layout`."""

    tensor: str
    layout: Layout
    rows: int
    cols: int
    count: int = 1


@dataclass(slots=True)
class Reader:
    """Reads tensors of one opened checkpoint and counts the bytes that it read."""

    opened: Opened
    nbytes: int = 0

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored, on the CPU.

        Raises Unsupported for a dtype that torch has no name for.
        """
        place = self.opened.places[name]
        dtype = DTYPES.get(place.entry.dtype)
        if dtype is None:
            raise Unsupported(name, "torch has no such dtype", found=place.entry.dtype)
        with self._file(place) as fd:
            raw = self._whole(fd, place)
        return raw.view(dtype).reshape(place.entry.shape)

    @contextmanager
    def open(self, operand: Operand) -> Iterator[Stored]:
        """The operand's stored matrices, readable block by block while the context lasts."""
        place = self.opened.places[operand.tensor]
        with self._file(place) as fd:
            whole = self._whole(fd, place) if self.opened.digests is not None else None
            yield Stored(self, operand, place, fd, whole)

    @contextmanager
    def _file(self, place: Place) -> Iterator[int]:
        path = self.opened.root / place.file
        fd = io.open_read(path)
        try:
            yield fd
        finally:
            io.close(fd, path)

    def _whole(self, fd: int, place: Place) -> Tensor:
        """All bytes of a tensor, their digest checked where digests are at hand."""
        raw = torch.empty(place.entry.nbytes, dtype=torch.uint8)
        self.fill(fd, raw.unsqueeze(0), place.offset, raw.numel(), place.file)
        digests = self.opened.digests
        if digests is not None:
            _check_digest(raw, place, digests)
        return raw

    def fill(self, fd: int, out: Tensor, offset: int, pitch: int, where: str) -> None:
        """Fills `out` (rows, cols) uint8 from a file: row i lies at `offset` + i * `pitch`."""
        height, width = out.shape
        if not out.numel():
            return
        if out.is_contiguous() and pitch == width:
            height, width = 1, height * width
        stride = out.stride(0)
        memory = _memory(out, (height - 1) * stride + width)
        for row in range(height):
            start = row * stride
            io.pread_into(fd, memory[start : start + width], offset + row * pitch, where)
        self.nbytes += height * width


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored matrices of an open operand."""

    reader: Reader
    operand: Operand
    place: Place
    fd: int
    whole: Tensor | None = field(repr=False)

    def block(self, index: int, source: Rectangle, out: Tensor) -> None:
        """Fills `out` (2-D, its rows contiguous) with a block of stored matrix `index`."""
        rows, cols = self.operand.layout.stored_shape(self.operand.rows, self.operand.cols)
        if self.whole is not None:
            matrix = self.whole.view(-1, rows, cols)[index]
            out.copy_(matrix[source.top : source.bottom, source.left : source.right])
            return
        offset = self.place.offset + (index * rows + source.top) * cols + source.left
        self.reader.fill(self.fd, out, offset, cols, self.place.file)

    def matrix(self, index: int) -> Tensor:
        """Logical matrix `index`, (rows, cols) uint8: the layout's exact inverse."""
        layout, rows, cols = self.operand.layout, self.operand.rows, self.operand.cols
        shape = layout.stored_shape(rows, cols)
        stored = torch.empty(shape, dtype=torch.uint8)
        self.block(index, Rectangle(0, shape[0], 0, shape[1]), stored)
        return layout.inverse(stored, rows, cols)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a piece is put: `out`, a matrix of `rows` rows in `layout`, from logical row `at` on.

    out   (layout.stored_shape(rows, byte columns)) uint8
    """

    layout: Layout
    out: Tensor
    rows: int
    at: int = 0


def place_piece(
    stored: Stored,
    index: int,
    rows: Sequence[Range],
    columns: Range,
    target: Target,
) -> None:
    """Puts one piece of stored matrix `index` where `target` says.

    rows, columns   the piece: row ranges, stacked in this order, and one range of byte columns

    Where the layouts are equal and the borders allow it, only the piece's bytes are read.
    """
    operand, layout, at = stored.operand, target.layout, target.at
    into = target.rows, columns[1] - columns[0]
    if layout.id == operand.layout.id:
        steps = copies(layout, (operand.rows, operand.cols), rows, columns, into, at)
        if steps is not None:
            for step in steps:
                stored.block(index, step.source, _cut(target.out, step.target))
            return
    raw = stored.matrix(index)
    piece = torch.cat([raw[start:stop, columns[0] : columns[1]] for start, stop in rows])
    block = rectangle(layout, into, (at, at + len(piece)), (0, into[1]))
    if block is None:
        raise LayoutError(operand.tensor, f"no place for rows {at} on in layout {layout.id}")
    _cut(target.out, block).copy_(layout.forward(piece))


def _cut(matrix: Tensor, block: Rectangle) -> Tensor:
    return matrix[block.top : block.bottom, block.left : block.right]


def _memory(tensor: Tensor, nbytes: int) -> memoryview:
    """The tensor's memory from its first element on; valid while the tensor lives."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def _check_digest(raw: Tensor, place: Place, digests: dict[str, str]) -> None:
    import xxhash

    memory = _memory(raw, raw.numel()) if raw.numel() else b""
    found = xxhash.xxh3_128(memory).hexdigest()
    expected = digests.get(place.entry.name)
    if found != expected:
        raise InvalidCheckpoint(
            f"{place.file}: {place.entry.name}",
            "the tensor's bytes differ from what convert wrote (xxh3_128)",
            found=found,
            expected=expected or "a digest",
            hint=VERIFY_HINT,
        )
