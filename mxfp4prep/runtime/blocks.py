"""What is read of the shards: blocks of bytes with a place to go, cut into units of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

Repack = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a block in host memory to a target and what belongs there."""


class Block(NamedTuple):
    """`height` rows of `width` bytes of a file; row i begins at byte `offset` + i * `pitch`.

    into   where they go: (height, width) uint8 with contiguous rows, on any device; or a function
           that is handed the block in host memory, for what must be repacked
    """

    file: str
    offset: int
    pitch: int
    height: int
    width: int
    into: Tensor | Repack

    @property
    def nbytes(self) -> int:
        return self.height * self.width


class Plain(NamedTuple):
    """A unit of work: pieces of one file, in its order, read and delivered together.

    A block to repack is a unit of its own, whatever its size.
    """

    file: str
    pieces: tuple[Block, ...]
    nbytes: int


class Checked(NamedTuple):
    """A unit of work: a tensor read whole, front to back, and compared with its digest.

    offset, nbytes   the tensor's place in the file
    blocks           what is wanted of it, inside that place
    """

    file: str
    name: str
    offset: int
    nbytes: int
    blocks: tuple[Block, ...]


def plain_units(blocks: Iterable[Block], limit: int) -> Iterator[Plain]:
    """The blocks in their order, large ones cut, small ones put together: `limit` bytes at most.

    blocks   sorted by file and offset
    """
    pieces: list[Block] = []
    nbytes = 0
    for block in blocks:
        alone = not isinstance(block.into, Tensor)
        for piece in (block,) if alone else cut(block, limit):
            full = alone or nbytes + piece.nbytes > limit
            if pieces and (full or piece.file != pieces[0].file):
                yield Plain(pieces[0].file, tuple(pieces), nbytes)
                pieces, nbytes = [], 0
            pieces.append(piece)
            nbytes += piece.nbytes
            if alone:
                yield Plain(piece.file, (piece,), nbytes)
                pieces, nbytes = [], 0
    if pieces:
        yield Plain(pieces[0].file, tuple(pieces), nbytes)


def cut(block: Block, limit: int) -> Iterator[Block]:
    """A block whose place is a tensor, in pieces of at most `limit` bytes, in the file's order.

    Where it is one run of bytes both in the file and at its place, so are the pieces.
    """
    into = block.into
    if not isinstance(into, Tensor) or not block.nbytes:
        return
    file, offset, pitch, height, width, _ = block
    if pitch == width and into.is_contiguous():
        height, width, pitch = 1, height * width, height * width
        into = into.view(height, width)
    if width > limit:
        for row in range(height):
            for left in range(0, width, limit):
                right = min(left + limit, width)
                start = offset + row * pitch + left
                part = into[row : row + 1, left:right]
                yield Block(file, start, right - left, 1, right - left, part)
        return
    step = limit // width
    for top in range(0, height, step):
        bottom = min(top + step, height)
        start = offset + top * pitch
        yield Block(file, start, pitch, bottom - top, width, into[top:bottom])


def runs(pieces: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """(offset, nbytes) of the runs of the file that the pieces take, in their order: rows and
    pieces that lie one behind the other there make one run."""
    start = end = -1
    for piece in pieces:
        for row in range(piece.height):
            offset = piece.offset + row * piece.pitch
            if offset != end:
                if end > start:
                    yield start, end - start
                start = offset
            end = offset + piece.width
    if end > start:
        yield start, end - start
