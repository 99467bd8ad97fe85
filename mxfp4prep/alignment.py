"""The verdict: which GEMM path a shape can take, and what stops the faster one.

The rule is about the scale matrix a rank really hands to the kernel: rows % 32 == 0 and
columns % 8 == 0, and not a tile known to be wrong. Pure arithmetic on shapes; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from mxfp4prep.errors import CannotShard
from mxfp4prep.parallel import SCALE_GROUP, Cut, shard

Path = Literal["asm", "triton", "impossible"]

RULE = "rows % 32 == 0, columns % 8 == 0, rows != 96"
RULE_VERSION = 1

SCALE_ROW_MULTIPLE = 32
SCALE_COLUMN_MULTIPLE = 8
"""The scale tile of AITER's ASM GEMM, rows by columns (csrc/include/mx_quant_utils.h)."""

BAD_SCALE_ROWS = frozenset({96})
"""Row counts whose ASM kernel answers wrongly for M <= 64 (AITER issue 5931, vLLM PR 58139)."""

REASONS: dict[str, str] = {
    "scale_rows": "scale rows are not a multiple of 32",
    "scale_cols": "scale columns are not a multiple of 8 (K is not a multiple of 256)",
    "bad_tile": "96 scale rows: the ASM kernel is wrong for M <= 64 (AITER issue 5931)",
    "not_2d": "the weight is neither a matrix nor a bank of expert matrices",
    "group_part": "another part of the same fused projection cannot take the ASM path",
    "mixed_group": "parts of one fused projection have different schemes: not fusable",
    "kept": "left as it was by --keep",
    "forced": "the Triton path was asked for with --layout triton",
    "split_rows": "rows (or heads) do not divide by the ranks",
    "split_cols": "columns do not divide by the ranks",
    "split_groups": "columns per rank are not whole groups of 32",
}
"""Reason codes and what they say."""

HAZARDS: dict[str, str] = {
    "short_group": "the last scale group of a row covers fewer than 32 values",
    "mixed_group": REASONS["mixed_group"],
    "nan_scale": "some scale bytes are 255: their groups decode to NaN",
}
"""Hazard codes and what they say: nothing that stops a path, but worth knowing."""


class Verdict(NamedTuple):
    """The path of one shape at one tensor-parallel degree.

    scale_shard   rows and columns of the per-rank scale matrix; None where it cannot be cut
    reasons       codes of REASONS, empty for asm
    """

    path: Path
    scale_shard: tuple[int, ...] | None
    reasons: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    detail: str = ""


def scale_columns(k: int) -> int:
    """Scale columns of K FP4 values: one per group of 32, the last group may be short."""
    return -(-k // SCALE_GROUP)


@lru_cache(maxsize=65536)
def judge_matrix(rows: int, k: int, is_matrix: bool = True) -> Verdict:
    """The verdict on a whole (rows, k) matrix as one kernel call sees it."""
    reasons = []
    if not is_matrix:
        reasons.append("not_2d")
    if rows % SCALE_ROW_MULTIPLE:
        reasons.append("scale_rows")
    if k % (SCALE_COLUMN_MULTIPLE * SCALE_GROUP):
        reasons.append("scale_cols")
    if rows in BAD_SCALE_ROWS:
        reasons.append("bad_tile")
    hazards = ("short_group",) if k % SCALE_GROUP else ()
    return Verdict(
        "triton" if reasons else "asm", (rows, scale_columns(k)), tuple(reasons), hazards
    )


@lru_cache(maxsize=65536)
def judge_layer(cut: Cut, n: int, k: int, tp_size: int, is_matrix: bool = True) -> Verdict:
    """The verdict on one stored (n, k) tensor, cut by itself over `tp_size` ranks."""
    try:
        piece = shard(cut, n, k, tp_size)
        last = shard(cut, n, k, tp_size, tp_size - 1)
    except CannotShard as error:
        return Verdict("impossible", None, (error.reason,), (), error.what)
    # Ranks hold equal pieces but for a vocabulary, whose last rank may be short.
    first = judge_matrix(piece.n, piece.k, is_matrix)
    return stricter(first, judge_matrix(last.n, last.k, is_matrix))


def judge_group(members: Iterable[tuple[Cut, int]], k: int, tp_size: int) -> Verdict:
    """The verdict on the concatenation, along rows, of every member's piece on one rank.

    members   (cut, n) of each part, in any order; all parts have the same k
    """
    rows = 0
    for cut, n in members:
        try:
            piece = shard(cut, n, k, tp_size)
        except CannotShard as error:
            return Verdict("impossible", None, (error.reason,), (), error.what)
        rows += piece.n
        k_rank = piece.k
    return judge_matrix(rows, k_rank)


_STRICTNESS: dict[Path, int] = {"asm": 0, "triton": 1, "impossible": 2}


def stricter(first: Verdict, second: Verdict) -> Verdict:
    """The verdict that allows less; the first when both allow the same."""
    return second if _STRICTNESS[second.path] > _STRICTNESS[first.path] else first
