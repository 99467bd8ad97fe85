"""Byte orders in which GEMM kernels read MXFP4 weights and scales: permutations with an inverse.

A layout is a forward and an inverse move, a shape rule and an index formula that shares no code
with the moves. Leading dimensions are experts, each laid out by itself. Being in LAYOUTS is what
gets a layout planned, written and tested. Moves assume a little-endian host; importing this
module does not import torch.

Speed is the reason for the word views: one thread permutes single bytes at 0.3 GB/s (scales) and
5 GB/s (weights), words at 3 and 11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, overload

from mxfp4prep.errors import LayoutError
from mxfp4prep.manifest import LayoutId

if TYPE_CHECKING:
    from torch import Tensor

    Index = int | Tensor
    Move = Callable[[Tensor, Tensor, int], None]
    """Fills the second from the first; the third is the columns of the plain matrix."""

CHUNK_NBYTES = 1 << 20
"""Bytes of whole bands that go through a move at once: source, target and scratch stay in L2."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One byte order of a (rows, cols) uint8 matrix.

    operands    what may be stored in it: "weight", "scale"
    tile        rows and cols must be multiples of these two
    band_rows   rows that are an independent contiguous run of bytes in source and stored order;
                None when the whole matrix is needed
    """

    id: LayoutId
    operands: frozenset[str]
    tile: tuple[int, int]
    band_rows: int | None
    _shape: Callable[[int, int], tuple[int, int]]
    _forward: Move
    _inverse: Move
    _offset: Callable[[Index, Index, int, int], Index]

    def check(self, rows: int, cols: int, where: object) -> None:
        """Nothing; raises LayoutError, naming `where`, for a shape the layout cannot hold."""
        counts = ("rows", rows), ("byte columns", cols)
        for (axis, count), multiple in zip(counts, self.tile, strict=True):
            if count % multiple:
                raise LayoutError(
                    where,
                    f"cannot be stored as {self.id}",
                    found=f"{count} {axis}",
                    expected=f"a multiple of {multiple}",
                )

    def stored_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """The shape a (rows, cols) matrix is stored in. Raises LayoutError."""
        self.check(rows, cols, f"({rows}, {cols}) matrix")
        return self._shape(rows, cols)

    def forward(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """The matrix in this layout: (..., *stored_shape) uint8, contiguous, never a view of it.

        matrix   (..., rows, cols) uint8, any strides (a matrix that is not contiguous may be
                 copied first)
        out      filled and returned: contiguous, of the result's shape, not overlapping matrix

        Raises LayoutError.
        """
        rows, cols = _matrix_shape(matrix, "matrix")
        shape = (*matrix.shape[:-2], *self.stored_shape(rows, cols))
        result = _output(out, shape, matrix)
        if result.numel():
            self._forward(matrix, result, cols)
        return result

    def inverse(self, stored: Tensor, rows: int, cols: int, out: Tensor | None = None) -> Tensor:
        """The matrix that `stored` holds: (..., rows, cols) uint8, contiguous, never a view of it.

        stored   (..., *stored_shape(rows, cols)) uint8, any strides
        out      filled and returned: contiguous, of the result's shape, not overlapping stored

        Raises LayoutError.
        """
        found, expected = _matrix_shape(stored, "stored matrix"), self.stored_shape(rows, cols)
        if found != expected:
            what = f"is not a ({rows}, {cols}) matrix in {self.id}"
            raise LayoutError("stored matrix", what, found=found, expected=expected)
        result = _output(out, (*stored.shape[:-2], rows, cols), stored)
        if result.numel():
            self._inverse(stored, result, cols)
        return result

    @overload
    def offset(self, row: int, col: int, rows: int, cols: int) -> int: ...
    @overload
    def offset(self, row: Tensor, col: Tensor, rows: int, cols: int) -> Tensor: ...
    def offset(self, row: Index, col: Index, rows: int, cols: int) -> Index:
        """Byte offset, in one stored matrix, of the byte at (row, col): the index formula.

        row, col   ints, or integer tensors or arrays that broadcast
        """
        return self._offset(row, col, rows, cols)


def _matrix_shape(tensor: Tensor, where: str) -> tuple[int, int]:
    import torch

    if tensor.dtype != torch.uint8:
        raise LayoutError(where, "layouts move bytes", found=tensor.dtype, expected=torch.uint8)
    if tensor.dim() < 2:
        what = "needs rows and columns"
        raise LayoutError(where, what, found=tuple(tensor.shape), expected="2 or more dimensions")
    return tensor.shape[-2], tensor.shape[-1]


def _output(out: Tensor | None, shape: tuple[int, ...], source: Tensor) -> Tensor:
    """`out` once it is known to be usable, or new memory."""
    import torch

    if out is None:
        return torch.empty(shape, dtype=torch.uint8, device=source.device)
    for what, found, expected in (
        ("shape", tuple(out.shape), shape),
        ("dtype", out.dtype, torch.uint8),
        ("device", out.device, source.device),
        ("strides", out.stride() if not out.is_contiguous() else "contiguous", "contiguous"),
    ):
        if found != expected:
            raise LayoutError("out", f"has the wrong {what}", found=found, expected=expected)
    steps = zip(source.shape, source.stride(), strict=True)
    end = source.data_ptr() + 1 + sum((size - 1) * stride for size, stride in steps)
    if source.data_ptr() < out.data_ptr() + out.numel() and out.data_ptr() < end:
        raise LayoutError("out", "overlaps the input", expected="memory of its own")
    return out


def _copy(source: Tensor, target: Tensor, _cols: int) -> None:
    target.copy_(source)


def _transpose(source: Tensor, target: Tensor, _cols: int) -> None:
    """Matrix by matrix: torch has a blocked transpose (2 GB/s) for two dimensions only."""
    sources = source.reshape(-1, *source.shape[-2:])
    targets = target.view(-1, *target.shape[-2:])
    for matrix, transposed in zip(sources, targets, strict=True):
        transposed.copy_(matrix.t())


def _by_words(
    move: Move, word_nbytes: int, band_rows: int, source: Tensor, target: Tensor, cols: int
) -> None:
    """Runs `move` on flat word views of source and target, over chunks of whole bands.

    word_nbytes   4: int32 · 16: complex128, the widest element that torch copies. A piece that
                  is not aligned to its words goes through scratch that is
    """
    import torch

    word = torch.complex128 if word_nbytes == 16 else torch.int32
    band_nbytes = band_rows * cols
    step = max(1, CHUNK_NBYTES // band_nbytes) * band_nbytes
    given, made = source.contiguous().view(-1), target.view(-1)
    for start in range(0, given.numel(), step):
        piece, place = given[start : start + step], made[start : start + step]
        if not _is_aligned(piece, word_nbytes):
            piece = piece.clone()
        if _is_aligned(place, word_nbytes):
            move(piece.view(word), place.view(word), cols)
        else:
            scratch = torch.empty_like(place)
            move(piece.view(word), scratch.view(word), cols)
            place.copy_(scratch)


def _is_aligned(piece: Tensor, word_nbytes: int) -> bool:
    """Offset and address: torch checks the first, the processor may fault on the second."""
    return piece.storage_offset() % word_nbytes == 0 and piece.data_ptr() % word_nbytes == 0


def _tile16x16_forward(source: Tensor, target: Tensor, cols: int) -> None:
    """Words are 16 bytes of one row; a tile is the words of 16 rows one below the other."""
    words = cols // 16
    target.view(-1, words, 16).copy_(source.view(-1, 16, words).transpose(1, 2))


def _tile16x16_inverse(source: Tensor, target: Tensor, cols: int) -> None:
    words = cols // 16
    target.view(-1, 16, words).copy_(source.view(-1, words, 16).transpose(1, 2))


def _tile32x8_forward(source: Tensor, target: Tensor, cols: int) -> None:
    """Words are 4 bytes of one row; those of columns c and c + 4, rows r and r + 16 make a 4 x 4
    byte matrix, transposed here by exchanging bytes between words of four planes.

    Planes are (half of the rows, half of the columns): (2, 2, bands, tiles, 16) int32, a copy,
    since that order is never the source's own.
    """
    tiles = cols // 8
    planes = source.view(-1, 2, 16, tiles, 2).permute(1, 4, 0, 3, 2).contiguous()
    _exchange(planes[0], planes[1], 8, 0x00FF00FF)
    _exchange(planes[:, 0], planes[:, 1], 16, 0x0000FFFF)
    stored = target.view(-1, tiles, 2, 2, 16)  # column % 4 is split in two bits, high bit first
    for low in (0, 1):
        for high in (0, 1):
            stored[:, :, high, low].copy_(planes[low, high])


def _tile32x8_inverse(source: Tensor, target: Tensor, cols: int) -> None:
    tiles = cols // 8
    planes = source.view(-1, tiles, 2, 2, 16).permute(3, 2, 0, 1, 4).contiguous()
    _exchange(planes[:, 0], planes[:, 1], 16, 0x0000FFFF)
    _exchange(planes[0], planes[1], 8, 0x00FF00FF)
    target.view(-1, 2, 16, tiles, 2).copy_(planes.permute(2, 0, 4, 3, 1))


def _exchange(first: Tensor, second: Tensor, shift: int, mask: int) -> None:
    """Swaps, in place, the bits of `first` under `mask << shift` with those of `second` under
    `mask`. Its own inverse."""
    import torch

    difference = torch.bitwise_right_shift(first, shift)
    difference.bitwise_xor_(second).bitwise_and_(mask)
    second.bitwise_xor_(difference)
    first.bitwise_xor_(difference.bitwise_left_shift_(shift))


def _offset_tile16x16(row: Index, col: Index, _rows: int, cols: int) -> Index:
    tile = (row // 16) * (cols // 32) + col // 32
    return tile * 512 + (col % 32 // 16) * 256 + (row % 16) * 16 + col % 16


def _offset_tile32x8(row: Index, col: Index, _rows: int, cols: int) -> Index:
    tile = (row // 32) * 32 * cols + (col // 8) * 256
    return tile + (col % 4) * 64 + (row % 16) * 4 + (col % 8 // 4) * 2 + row % 32 // 16


WEIGHT, SCALE = frozenset({"weight"}), frozenset({"scale"})

LAYOUTS: dict[str, Layout] = {
    layout.id: layout
    for layout in (
        Layout(
            id="raw",
            operands=WEIGHT | SCALE,
            tile=(1, 1),
            band_rows=1,
            _shape=lambda rows, cols: (rows, cols),
            _forward=_copy,
            _inverse=_copy,
            _offset=lambda row, col, _rows, cols: row * cols + col,
        ),
        Layout(  # AITER shuffle_weight(layout=(16, 16)), aiter/ops/shuffle.py at e4048607
            id="tile16x16",
            operands=WEIGHT,
            tile=(16, 32),
            band_rows=16,
            _shape=lambda rows, cols: (rows // 16, 16 * cols),
            _forward=partial(_by_words, _tile16x16_forward, 16, 16),
            _inverse=partial(_by_words, _tile16x16_inverse, 16, 16),
            _offset=_offset_tile16x16,
        ),
        Layout(  # mx_scale_shuffle_idx, csrc/include/mx_quant_utils.h of AITER at e4048607
            id="tile32x8",
            operands=SCALE,
            tile=(32, 8),
            band_rows=32,
            _shape=lambda rows, cols: (rows // 32, 32 * cols),
            _forward=partial(_by_words, _tile32x8_forward, 4, 32),
            _inverse=partial(_by_words, _tile32x8_inverse, 4, 32),
            _offset=_offset_tile32x8,
        ),
        Layout(
            id="transposed",
            operands=SCALE,
            tile=(1, 1),
            band_rows=None,
            _shape=lambda rows, cols: (cols, rows),
            _forward=_transpose,
            _inverse=_transpose,
            _offset=lambda row, col, rows, _cols: col * rows + row,
        ),
    )
}
"""Every layout by id."""

PATHS: dict[str, tuple[LayoutId, LayoutId]] = {
    "asm": ("tile16x16", "tile32x8"),
    "triton": ("raw", "transposed"),
    "kept": ("raw", "raw"),
}
"""The layouts of (weight, scale) on each path."""
