"""Units of work done: bytes from shards to where modules have them, compared with their digests.

To the CPU they are read straight into their place, to a GPU through staging buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mxfp4prep import io
from mxfp4prep.errors import InvalidCheckpoint, IOFailed
from mxfp4prep.prepared import VERIFY_HINT
from mxfp4prep.runtime import memory
from mxfp4prep.runtime.blocks import Block, Checked, Plain, runs
from mxfp4prep.runtime.lanes import HOST, Lane, Pair, Ring

PIECE_NBYTES = 8 << 20
"""Bytes of a unit of work, and of a staging buffer: large beside the price of a call or a copy
(tens of microseconds), small beside a layer, so that all threads have something to do."""


class Files:
    """The shards below a folder, each opened when it is first read, for any number of threads.

    signatures   by file name, as they were when the headers were read: who replaces a checkpoint
                 must not give half a model of the old one and half of the new
    """

    def __init__(self, root: Path, signatures: Mapping[str, tuple[int, int]]) -> None:
        self._root = root
        self._signatures = signatures
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    def read(self, file: str, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset` on.

        Raises IOFailed where the file ends before that, or is not the one that was opened first.
        """
        with self._lock:
            fd = self._open.get(file)
            if fd is None:
                fd = self._open[file] = io.open_read(self._root / file)
                if io.signature(fd, file) != self._signatures[file]:
                    what = "was changed or replaced after the checkpoint was opened"
                    raise IOFailed(file, what, hint="load the checkpoint again")
        io.pread_into(fd, into, offset, file)

    def close(self) -> None:
        """Closes what is open; nothing may be reading any more."""
        while self._open:
            file, fd = self._open.popitem()
            io.close(fd, self._root / file)


class Mover:
    """Does units of work, one after the other, for one thread.

    lane      leads to where the blocks' places are
    capacity  bytes of a staging buffer
    digests   xxh3_128 of tensors by name, for units that are to be checked
    """

    def __init__(self, files: Files, lane: Lane, capacity: int, digests: Mapping[str, str]) -> None:
        self._files = files
        self._ring = Ring(lane, capacity)
        self._direct = lane.direct
        self._digests = digests

    def move(self, unit: Plain | Checked) -> int:
        """How many bytes were read for the unit; what was sent to a device may still be on its way.

        Raises IOFailed for a file that ends early, InvalidCheckpoint for another digest.
        """
        if isinstance(unit, Checked):
            self._checked(unit)
        elif not isinstance(unit.pieces[0].into, Tensor):
            self._repacked(unit.pieces[0])
        elif self._direct:
            for piece in unit.pieces:
                assert isinstance(piece.into, Tensor)
                self._fill(piece, piece.into)
        else:
            self._staged(unit)
        return unit.nbytes

    def drain(self) -> None:
        """Returns once everything has arrived."""
        self._ring.drain()

    def _fill(self, block: Block, out: Tensor) -> None:
        """Reads a block, row by row unless it is one run, into host memory."""
        file, offset, pitch, height, width, _ = block
        if out.is_contiguous() and (pitch == width or height == 1):
            self._files.read(file, offset, memory.view(out))
            return
        stride = out.stride(0)
        rows = memory.view(out, (height - 1) * stride + width)
        for row in range(height):
            at = row * stride
            self._files.read(file, offset + row * pitch, rows[at : at + width])

    def _staged(self, unit: Plain) -> None:
        buffer = self._ring.take(unit.nbytes)
        bytes_of_buffer, at = memory.view(buffer), 0
        for offset, nbytes in runs(unit.pieces):
            self._files.read(unit.file, offset, bytes_of_buffer[at : at + nbytes])
            at += nbytes
        pairs, at = [], 0
        for piece in unit.pieces:
            assert isinstance(piece.into, Tensor)
            staged = buffer[at : at + piece.nbytes].view(piece.height, piece.width)
            pairs.append((piece.into, staged))
            at += piece.nbytes
        self._ring.send(pairs)

    def _repacked(self, block: Block) -> None:
        assert not isinstance(block.into, Tensor)
        stored = memory.empty((block.height, block.width), HOST)
        self._fill(block, stored)
        self._ring.send([block.into(stored)])

    def _checked(self, unit: Checked) -> None:
        import xxhash

        digest = xxhash.xxh3_128()
        for band in self._bands(unit):
            digest.update(band)
        found, expected = digest.hexdigest(), self._digests.get(unit.name)
        if found != expected:
            raise InvalidCheckpoint(
                f"{unit.file}: {unit.name}",
                "the tensor's bytes differ from what convert wrote (xxh3_128)",
                found=found,
                expected=expected or "a digest",
                hint=VERIFY_HINT,
            )

    def _bands(self, unit: Checked) -> Iterator[memoryview]:
        """The tensor's bytes from front to back; behind each band, what is wanted of it is sent."""
        whole = _whole(unit)
        if whole is not None and self._direct:
            place = memory.view(whole)
            for start in range(0, unit.nbytes, PIECE_NBYTES):
                band = place[start : start + PIECE_NBYTES]
                self._files.read(unit.file, unit.offset + start, band)
                yield band
            return
        blocks = unit.blocks
        if whole is not None:  # bytes one below the other, to be cut anywhere
            blocks = (Block(unit.file, unit.offset, 1, unit.nbytes, 1, whole.view(-1, 1)),)
        pitch = blocks[0].pitch
        step = max(1, PIECE_NBYTES // pitch)
        parts = _Parts(unit.offset, pitch, blocks)
        for top in range(0, unit.nbytes // pitch, step):
            nbytes = min(step * pitch, unit.nbytes - top * pitch)
            buffer = self._ring.take(nbytes)
            band = memory.view(buffer)
            self._files.read(unit.file, unit.offset + top * pitch, band)
            yield band
            self._ring.send(list(parts.of(buffer.view(-1, pitch), top)))


def _whole(unit: Checked) -> Tensor | None:
    """The unit's only place, if that is one run of memory for the whole tensor."""
    into = unit.blocks[0].into
    if isinstance(into, Tensor) and into.numel() == unit.nbytes and into.is_contiguous():
        return into
    return None


class _Parts:
    """What blocks want of the bands of a matrix, (rows, `pitch`) bytes at `offset` of a file."""

    def __init__(self, offset: int, pitch: int, blocks: Sequence[Block]) -> None:
        self._pitch = pitch
        self._blocks = [(block, *divmod(block.offset - offset, pitch)) for block in blocks]
        self._unfinished: dict[int, Tensor] = {}

    def of(self, band: Tensor, top: int) -> Iterator[Pair]:
        """Pairs for the rows of `band`, which is the matrix from row `top` on."""
        bottom = top + len(band)
        for number, (block, first, left) in enumerate(self._blocks):
            last = first + block.height
            start, stop = max(top, first), min(bottom, last)
            if start >= stop:
                continue
            part = band[start - top : stop - top, left : left + block.width]
            if isinstance(block.into, Tensor):
                yield block.into[start - first : stop - first], part
                continue
            stored = self._unfinished.get(number)
            if stored is None:
                shape = block.height, block.width
                stored = self._unfinished[number] = memory.empty(shape, HOST)
            stored[start - first : stop - first].copy_(part)
            if stop == last:
                yield block.into(self._unfinished.pop(number))
