"""Bytes from shards into tensors: whole tensors, or only the blocks that a rank's piece needs.

Positional reads into a tensor's own memory, never a memory map: a shard that shrinks must raise,
not kill the server. With digests at hand a tensor is read whole, once, and checked before it is
used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from mxfp4prep.errors import LayoutError, Unsupported, naming
from mxfp4prep.layouts import Layout
from mxfp4prep.runtime import memory
from mxfp4prep.runtime.agreement import Place
from mxfp4prep.runtime.blocks import Block, Checked, Plain, plain_units
from mxfp4prep.runtime.crew import do_units, thread_count
from mxfp4prep.runtime.lanes import HOST, host_lane, lane_to
from mxfp4prep.runtime.opening import Opened
from mxfp4prep.runtime.slices import Range, Rectangle, copies, rectangle
from mxfp4prep.runtime.transfer import PIECE_NBYTES, Files, Mover

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from mxfp4prep.runtime.blocks import Repack

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and those there are to do, on the thread that asked."""

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


class Reader:
    """One opened checkpoint, for any number of threads, and how many bytes were read of it."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.nbytes = 0
        self._lock = threading.Lock()
        self._files = {record.name: at for at, record in enumerate(opened.manifest.files)}

    def position(self, name: str) -> tuple[int, int]:
        """Where a tensor stands: the number of its file, and its offset there."""
        place = self.opened.places[name]
        return self._files[place.file], place.offset

    def count(self, nbytes: int) -> None:
        """Adds to what was read."""
        with self._lock:
            self.nbytes += nbytes


class Batch:
    """What is to be read of a checkpoint, collected first and then read in the order of the files.

    Tensors that `add` or `later` fill hold nothing before `run` has returned. A context: leaving it
    closes the files.
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self.reader = reader
        self.device = device
        self._files = Files(reader.opened.root, reader.opened.signatures)
        self._blocks: dict[str, list[Block]] = {}  # by tensor
        self._read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def now(self, name: str) -> Tensor:
        """A tensor as it is stored, in host memory, read at once: for values to be looked at.

        A batch for meta gives a meta tensor and reads nothing.
        """
        place, dtype = self._place(name)
        is_meta = self.device.type == "meta"
        raw = memory.empty((place.entry.nbytes,), self.device if is_meta else HOST)
        if not is_meta:
            mover = Mover(self._files, host_lane(), 0, self.reader.opened.digests or {})
            for unit in self._units({name: [_whole(place, raw)]}):
                self._done(mover.move(unit))
        return raw.view(dtype).reshape(place.entry.shape)

    def later(self, name: str) -> Tensor:
        """A tensor as it is stored, on the batch's device, read when the batch is run.

        Raises Unsupported for a dtype that torch has no name for.
        """
        place, dtype = self._place(name)
        raw = memory.empty((place.entry.nbytes,), self.device)
        if self.device.type != "meta":
            self._blocks.setdefault(name, []).append(_whole(place, raw))
        return raw.view(dtype).reshape(place.entry.shape)

    def add(self, operand: Operand, index: int, source: Rectangle, into: Tensor | Repack) -> None:
        """Puts a block of stored matrix `index` on the list.

        into   (source's rows, columns) uint8, rows contiguous; or a function of the block
        """
        if self.device.type == "meta":
            return
        rows, cols = operand.layout.stored_shape(operand.rows, operand.cols)
        place = self.reader.opened.places[operand.tensor]
        offset = place.offset + (index * rows + source.top) * cols + source.left
        height, width = source.bottom - source.top, source.right - source.left
        block = Block(place.file, offset, cols, height, width, into)
        self._blocks.setdefault(operand.tensor, []).append(block)

    def run(self, progress: Progress | None = None) -> None:
        """Reads everything on the list; the bytes are in their places when it returns.

        Raises IOFailed where a file ends early, InvalidCheckpoint for another digest.
        """
        units = list(self._units(self._blocks))
        self._blocks = {}
        nbytes = sum(unit.nbytes for unit in units)
        total = self._read + nbytes
        digests = self.reader.opened.digests or {}
        capacity = min(PIECE_NBYTES, max((unit.nbytes for unit in units), default=0))
        movers = [
            Mover(self._files, lane_to(self.device), capacity, digests)
            for _ in range(max(1, min(thread_count(nbytes), len(units))))
        ]

        def done(nbytes: int) -> None:
            self._done(nbytes)
            if progress is not None:
                progress(self._read, total)

        done(0)
        with naming(self.reader.opened.root):
            do_units(units, movers, done)

    def _place(self, name: str) -> tuple[Place, torch.dtype]:
        place = self.reader.opened.places[name]
        dtype = DTYPES.get(place.entry.dtype)
        if dtype is None:
            raise Unsupported(name, "torch has no such dtype", found=place.entry.dtype)
        return place, dtype

    def _done(self, nbytes: int) -> None:
        self._read += nbytes
        self.reader.count(nbytes)

    def _units(self, blocks: Mapping[str, Sequence[Block]]) -> Iterator[Plain | Checked]:
        """What there is to do for blocks of tensors, in the order of the files. With digests at
        hand every tensor is a unit."""
        opened = self.reader.opened
        names = sorted(blocks, key=self.reader.position)
        wanted = {name: sorted(blocks[name], key=lambda block: block.offset) for name in names}
        if opened.digests is None:
            yield from plain_units(chain.from_iterable(wanted.values()), PIECE_NBYTES)
            return
        for name, parts in wanted.items():
            place = opened.places[name]
            yield Checked(place.file, name, place.offset, place.entry.nbytes, tuple(parts))


def _whole(place: Place, raw: Tensor) -> Block:
    nbytes = place.entry.nbytes
    return Block(place.file, place.offset, nbytes, 1, nbytes, raw.view(1, -1))


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
    batch: Batch,
    operand: Operand,
    index: int,
    rows: Sequence[Range],
    columns: Range,
    target: Target,
) -> None:
    """Has one piece of stored matrix `index` put where `target` says when the batch is run.

    rows, columns   the piece: row ranges, stacked in this order, and one range of byte columns

    Where the layouts are equal and the borders allow it, only the piece's bytes are read; else the
    matrix is read whole and repacked.
    """
    layout, at = target.layout, target.at
    into = target.rows, columns[1] - columns[0]
    if layout.id == operand.layout.id:
        steps = copies(layout, (operand.rows, operand.cols), rows, columns, into, at)
        if steps is not None:
            for step in steps:
                batch.add(operand, index, step.source, _cut(target.out, step.target))
            return
    height = sum(stop - start for start, stop in rows)
    block = rectangle(layout, into, (at, at + height), (0, into[1]))
    if block is None:
        raise LayoutError(operand.tensor, f"no place for rows {at} on in layout {layout.id}")
    place = _cut(target.out, block)

    def repack(stored: Tensor) -> tuple[Tensor, Tensor]:
        matrix = operand.layout.inverse(stored, operand.rows, operand.cols)
        piece = torch.cat([matrix[start:stop, columns[0] : columns[1]] for start, stop in rows])
        return place, layout.forward(piece)

    stored_rows, stored_columns = operand.layout.stored_shape(operand.rows, operand.cols)
    batch.add(operand, index, Rectangle(0, stored_rows, 0, stored_columns), repack)


def _cut(matrix: Tensor, block: Rectangle) -> Tensor:
    return matrix[block.top : block.bottom, block.left : block.right]
