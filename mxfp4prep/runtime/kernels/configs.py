"""Which tile sizes a product of a given shape runs with: a small table, not a search at serve time.

Tuned on an H200 (bench/RESULTS.md has the measurements); other GPUs get the same choices.
"""

from __future__ import annotations

from typing import NamedTuple

PROGRAMS = 512
"""Programs that keep an H200's 132 multiprocessors busy when a program is two warps."""

STEPS = 4
"""Tiles of columns below which a split costs more than it brings: what splits add up is small where
rows are few."""

COLUMNS = 512
"""Columns up to which a split of more rows costs more than it brings."""

SMALL = 1 << 24
"""Weights (n * k) below which one launch is mostly overhead, 8 MiB of codes."""


CHUNKS = (128, 2), (1024, 4)
"""Pairs that a program which lists an expert's looks at together, and its warps: the second where
there are more than the first can take. Of more still, counting is a launch of its own."""


class Tile(NamedTuple):
    """How one launch divides its work.

    kernel       "few", "many" or "scaled", of kernels.gemm and kernels.scaled
    bm, bn, bk   rows of activations, rows of weights and columns of a tile
    splits       programs that share a tile's columns
    """

    kernel: str
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    splits: int = 1

    def division(self, k: int) -> tuple[int, int]:
        """Tiles of k columns per split, and how many splits that makes: at most `splits`."""
        steps = -(-k // self.bk)
        each = -(-steps // self.splits)
        return each, -(-steps // each)

    def columns(self, k: int) -> int:
        """k, rounded up to what the splits read."""
        each, splits = self.division(k)
        return each * splits * self.bk

    def loads(self, whole_k: bool, pieces: int = 1, *, amd: bool) -> int:
        """Steps whose loads are under way at once.

        On AMD's GPUs one where the last tile is ragged, since the masks of the steps before and
        after a pipelined loop do not fit in the scalar registers, and one where activations come
        in pieces, of which two steps do not fit in gfx942's LDS.
        """
        return 1 if amd and (not whole_k or pieces > 1) else self.stages


FEW = {
    8: Tile("few", 8, 64, 128, 2, 4),
    16: Tile("few", 16, 64, 128, 2, 3),
    32: Tile("few", 32, 64, 128, 2, 3),
    64: Tile("few", 64, 128, 128, 4, 3),
}
"""By the most rows of activations they take in one tile."""

MANY = {
    "64": Tile("many", 64, 128, 128, 4, 3),
    "64 by 64": Tile("many", 64, 128, 64, 4, 4),
    "128": Tile("many", 128, 64, 64, 4, 3),
}
"""By the rows of activations they take in one tile. Those with 64 columns leave registers for more
programs at once, but read 32 bytes of a raw weight's row at a time, half of what a GPU fetches."""

SCALED = {
    16: Tile("scaled", 16, 64, 256, 4, 2),
    64: Tile("scaled", 64, 128, 256, 4, 2),
    128: Tile("scaled", 128, 128, 256, 8, 2),
}
"""For GPUs that multiply MXFP4 as it is: activations in MXFP4."""

SCALED_BF16 = {
    16: Tile("scaled", 16, 64, 128, 4, 2),
    64: Tile("scaled", 64, 128, 128, 4, 2),
    128: Tile("scaled", 128, 128, 128, 8, 2),
}
"""The same for activations in bfloat16: four times the room (of 160 KiB of LDS on gfx950)."""


def on_amd(tile: Tile) -> Tile:
    """The tile for an AMD GPU: its matrix units take 16 rows at least, the loads of two steps fit
    in the 64 KiB of LDS that gfx942 has, and with fewer waves registers are spilled: for decoded
    numbers, and where tiles are ragged for the masks of all the bytes that a wave reads.
    """
    return tile._replace(
        bm=max(tile.bm, 16), warps=min(2 * tile.warps, 8), stages=min(tile.stages, 2)
    )


def expands(m: int, n: int, k: int) -> bool:
    """Whether a bfloat16 copy of an (n, k) weight pays for (m, k) activations."""
    return m >= 192 or (m > 64 and n * k < SMALL and k > 2048)


def dense_tile(m: int, n: int, k: int, pieces: int = 1, *, tiled: bool) -> Tile:
    """The tile for (m, k) activations, a sum of `pieces`, and an (n, k) weight.

    tiled   the weight is stored in tile16x16
    """
    if m <= 32 or pieces > 1 or k < 128:
        tile = FEW[8 if m <= 8 else 16 if m <= 16 or pieces > 1 else 32]
        return _split(tile, m, n, k, PROGRAMS)
    if m <= 64 and n * k < SMALL:
        return _split(FEW[32], m, n, k, PROGRAMS)
    if m <= 64 and tiled:
        return _split(FEW[64], m, n, k, PROGRAMS // 2)
    return _split(MANY["128" if m > 64 and tiled else "64"], m, n, k, PROGRAMS // 2)


def _split(tile: Tile, m: int, n: int, k: int, programs: int) -> Tile:
    """The tile with as many splits as keep `programs` busy, and enough columns in each."""
    blocks = -(-n // tile.bn) * -(-m // tile.bm)
    most, columns = (16, STEPS * tile.bk - 1) if tile.bm <= 16 else (8, COLUMNS)
    splits = 1
    while splits < most and 2 * splits * blocks <= programs and k > 2 * splits * columns:
        splits *= 2
    return tile._replace(splits=splits)


def scaled_tile(m: int, n: int, k: int, encoded: bool) -> Tile:
    """As dense_tile, for GPUs that multiply MXFP4 as it is; encoded: x is MXFP4 too."""
    tile = (SCALED if encoded else SCALED_BF16)[16 if m <= 16 else 64 if m <= 64 else 128]
    return _split(tile, m, n, k, PROGRAMS // 2)


def grouped_tile(pairs: int, experts: int, pieces: int = 1, *, tiled: bool) -> Tile:
    """The tile for `pairs` rows, sums of `pieces`, spread over at most `experts` matrices."""
    share = _share(pairs, experts)
    if share <= 24:
        return FEW[8 if share <= 6 else 16 if share <= 16 else 32]
    if pieces > 1 or (share <= 64 and not tiled):
        return MANY["64"]
    return MANY["128" if share > 128 and tiled else "64 by 64"]


def grouped_scaled_tile(pairs: int, experts: int, encoded: bool) -> Tile:
    """As grouped_tile, for GPUs that multiply MXFP4 as it is; encoded: x is MXFP4 too."""
    share = _share(pairs, experts)
    return (SCALED if encoded else SCALED_BF16)[16 if share <= 16 else 64 if share <= 64 else 128]


def _share(pairs: int, experts: int) -> float:
    """Rows that a matrix gets on average, of those that get any."""
    return pairs / max(1, min(pairs, experts))
