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
"""Of all that is decided and that a manifest records of it: versions of this package that share it
come to the same manifest."""

SCALE_ROW_MULTIPLE = 32
SCALE_COLUMN_MULTIPLE = 8
"""The scale tile of AITER's ASM GEMM, rows by columns (csrc/include/mx_quant_utils.h)."""

BAD_SCALE_ROWS = frozenset({96})
"""Row counts whose ASM kernel answers wrongly for M <= 64 (AITER issue 5931, vLLM PR 58139)."""

WIDEST_UNGUARDED_TILE = 256
"""Rows of the ASM tile that AITER's heuristic takes for shapes without a tuned entry and whose
epilogue does not test N: its last tile writes all 256 output columns.
Source: hsa/gfx950/f4gemm disassembled, and csrc/py_itfs_cu/asm_gemm_a4w4.cu, at AITER e4048607."""

REASONS: dict[str, str] = {
    "scale_rows": "scale rows are not a multiple of 32",
    "scale_cols": "scale columns are not a multiple of 8 (K is not a multiple of 256)",
    "bad_tile": "96 scale rows: the ASM kernel is wrong for M <= 64 (AITER issue 5931)",
    "not_2d": "the weight is neither a matrix nor a bank of expert matrices",
    "group_part": "another part of the same fused projection cannot take the ASM path",
    "mixed_group": "parts of one fused projection have different schemes: not fusable",
    "kept": "left as it was, by --keep or for the engine that --for names",
    "forced": "the Triton path was asked for with --layout triton",
    "engine": "the engine that --for names does not run it on the ASM GEMM, and its other paths "
    "read weights and scales as they were",
    "engine_all": "the engine that --for names makes one choice for all of these, and another of "
    "them cannot take the ASM path",
    "engine_pad": "the engine that --for names fills experts of this size up with zeros before it "
    "lays them out",
    "split_rows": "rows (or heads) do not divide by the ranks",
    "split_cols": "columns do not divide by the ranks",
    "split_groups": "columns per rank are not whole groups of 32",
}
"""Reason codes and what they say."""

HAZARDS: dict[str, str] = {
    "short_group": "the last scale group of a row covers fewer than 32 values",
    "mixed_group": REASONS["mixed_group"],
    "nan_scale": "some scale bytes are 255: their groups decode to NaN",
    "small_n": "fewer than 256 rows on a rank: for shapes without a tuned entry AITER may choose "
    "an ASM tile of 256 rows, which writes beyond the layer's outputs (at small M; from M = 2048 "
    "on also where rows % 256 != 0). Read from its kernels, unconfirmed on hardware; a tuned "
    "entry for the shape avoids it",
}
"""Hazard codes and what they say: nothing that stops a path, but worth knowing."""

ASM_HAZARDS = frozenset({"small_n"})
"""Hazards of the ASM kernels, which a layer on another path does not have."""


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
def judge_matrix(rows: int, k: int, is_matrix: bool = True, dense_a4w4: bool = False) -> Verdict:
    """The verdict on a whole (rows, k) matrix as one kernel call sees it.

    dense_a4w4   AITER's dense W4A4 GEMM runs it as it is: no other scheme, no matrix of a bank
                 (which the MoE kernels run), no part that is fused with others first
    """
    reasons = []
    if not is_matrix:
        reasons.append("not_2d")
    if rows % SCALE_ROW_MULTIPLE:
        reasons.append("scale_rows")
    if k % (SCALE_COLUMN_MULTIPLE * SCALE_GROUP):
        reasons.append("scale_cols")
    if rows in BAD_SCALE_ROWS:
        reasons.append("bad_tile")
    hazards = ["short_group"] if k % SCALE_GROUP else []
    if dense_a4w4 and not reasons and 0 < rows < WIDEST_UNGUARDED_TILE:
        hazards.append("small_n")
    return Verdict(
        "triton" if reasons else "asm", (rows, scale_columns(k)), tuple(reasons), tuple(hazards)
    )


@lru_cache(maxsize=65536)
def judge_layer(
    cut: Cut, n: int, k: int, tp_size: int, is_matrix: bool = True, dense_a4w4: bool = False
) -> Verdict:
    """The verdict on one stored (n, k) tensor, cut by itself over `tp_size` ranks."""
    try:
        piece = shard(cut, n, k, tp_size)
        last = shard(cut, n, k, tp_size, tp_size - 1)
    except CannotShard as error:
        return Verdict("impossible", None, (error.reason,), (), error.what)
    # Ranks hold equal pieces but for a vocabulary, whose last rank may be short: then it is that
    # rank's hazards that count, since fewer rows can only add some.
    return stricter(
        judge_matrix(piece.n, piece.k, is_matrix, dense_a4w4),
        judge_matrix(last.n, last.k, is_matrix, dense_a4w4),
    )


def judge_group(
    members: Iterable[tuple[Cut, int]], k: int, tp_size: int, dense_a4w4: bool = False
) -> Verdict:
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
    return judge_matrix(rows, k_rank, dense_a4w4=dense_a4w4)


_STRICTNESS: dict[Path, int] = {"asm": 0, "triton": 1, "impossible": 2}


def stricter(first: Verdict, second: Verdict) -> Verdict:
    """The verdict that allows less; when both allow the same, the first with the second's hazards.

    The second is what the kernel sees (a fused whole, the last rank), so what is dangerous about
    the first alone (few rows) need not be about it.
    """
    allowed = _STRICTNESS[second.path] - _STRICTNESS[first.path]
    if allowed > 0:
        return second
    if allowed < 0 or first.hazards == second.hazards:
        return first
    return _with_hazards(first, second.hazards)


@lru_cache(maxsize=65536)
def demoted(verdict: Verdict, reason: str) -> Verdict:
    """An asm verdict as the triton one that `reason` makes of it."""
    hazards = tuple(hazard for hazard in verdict.hazards if hazard not in ASM_HAZARDS)
    return verdict._replace(path="triton", reasons=(reason,), hazards=hazards)


@lru_cache(maxsize=65536)
def _with_hazards(verdict: Verdict, hazards: tuple[str, ...]) -> Verdict:
    # Cached so that like layers share one verdict.
    return verdict._replace(hazards=hazards)


def outdated(rule_version: int) -> bool:
    """Whether an earlier version's rules were these: they may have decided otherwise than ours.

    A number that no version ever had, or that a later one will have, is none of those.
    """
    return 1 <= rule_version < RULE_VERSION
