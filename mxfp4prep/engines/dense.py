"""What an engine does with the (rows, k) matrix that one rank hands to the GEMM."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from mxfp4prep.alignment import SCALE_COLUMN_MULTIPLE, SCALE_ROW_MULTIPLE, scale_columns
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.rules import DenseRule, Engine
from mxfp4prep.engines.tuned import Tuned
from mxfp4prep.parallel import SCALE_GROUP

UNSAFE_ROWS = 128
"""Up to here AITER's own choice of a tile is wrong for 2 <= M <= 64.

Measured on MI355X at AITER e7d2453f2 (SGLang 0.5.23, quark_w4a4_mxfp4.py), and for 96 rows apart
(vLLM PR 58139).
"""

REPORTED_ROWS = 96
"""The scale rows of vLLM PR 58139: wrong for M of 8, 16, 32 and 64 on MI355X."""

DOUBTFUL_ROWS = 256
"""Below this AITER may choose a tile that writes beyond the matrix; not confirmed on hardware."""

WEIGHT_ROW_MULTIPLE = 16
WEIGHT_COLUMN_MULTIPLE = 64
"""What shuffle_weight(layout=(16, 16)) asserts of a weight of (rows, k): aiter/ops/shuffle.py."""


def run_dense(
    engine: Engine, on: frozenset[str], rows: int, k: int, tuned: Tuned | None
) -> Outcome:
    """The outcome of a W4A4 linear whose piece on one rank is (rows, k).

    on      switches that are on
    tuned   AITER's tuned tables, None where they are not known
    """
    rule = engine.dense
    for switch, path in rule.instead:
        if switch in on:
            return _instead(path, rows, k)
    if not on.issuperset(rule.needs):
        return Outcome("ok", "triton")
    columns = scale_columns(k)
    if rule.guarded and (rows % SCALE_ROW_MULTIPLE or k % (SCALE_COLUMN_MULTIPLE * SCALE_GROUP)):
        return Outcome(
            "ok", "triton", f"the scale of {rows} x {columns} does not fill tiles of 32 x 8"
        )
    if rule.guarded and (rows in rule.triton_rows or rows <= rule.triton_up_to):
        return Outcome("ok", "triton", f"{rows} rows are kept from the ASM GEMM")
    if not rule.guarded:
        misfit = _misfit(rows, k)
        if misfit is not None:
            return misfit
    small_m = _small_m(rule, on, rows, k, tuned)
    if rule.asm == "tuned":
        if tuned is None:
            return _undecided(rows, k, small_m == "asm")
        if not tuned.for_both(rows, k):
            return Outcome("ok", "triton", f"AITER's tables have no row for {rows} x {k}")
    if small_m == "triton":
        return Outcome("ok", "asm", _spared(rows))
    if small_m == "unknown" and rows <= UNSAFE_ROWS:
        return _unprobed(rows, k, rule.small_m_triton)
    return _asm(rows, k, not (tuned and tuned.for_small_m(rows, k)))


def _small_m(
    rule: DenseRule, on: frozenset[str], rows: int, k: int, tuned: Tuned | None
) -> Literal["asm", "triton", "unknown"]:
    """The GEMM that M <= 64 meets in a layer that is prepared for the ASM GEMM."""
    if not rule.small_m_triton or rule.small_m_asm in on:
        return "asm"
    if tuned is None:
        return "unknown"
    return "triton" if tuned.for_preshuffle(rows, rule.small_m_triton * k) else "asm"


def _spared(rows: int) -> str:
    """What keeps a matrix from the ASM GEMM's wrong results; "" where it has none."""
    if rows > UNSAFE_ROWS:
        return ""
    said = f"SGLang 0.5.23 measured up to {UNSAFE_ROWS}"
    if rows == REPORTED_ROWS:
        said = f"vLLM PR 58139 reports {rows}"
    return (
        f"M <= 64 goes to Triton's preshuffle GEMM: {said} rows numerically wrong there on the "
        "ASM GEMM"
    )


def _unprobed(rows: int, k: int, factor: int) -> Outcome:
    """A matrix whose small M goes where tables say which are not known."""
    asked = f"{rows} x {factor * k}"
    if factor != 1:
        asked += f" ({factor} times the {k} columns, as this engine asks)"
    return Outcome(
        "unknown",
        None,
        f"ASM, and M <= 64 on Triton's preshuffle GEMM if AITER's tables, which are not known, "
        f"have {asked}; else {rows} rows may be wrong at M <= 64",
    )


def _asm(rows: int, k: int, untuned: bool) -> Outcome:
    """A matrix in the ASM GEMM; `untuned`: for small M, AITER chooses the tile by itself."""
    if not untuned or rows >= DOUBTFUL_ROWS:
        return Outcome("ok", "asm")
    if rows <= UNSAFE_ROWS:
        return Outcome(
            "corrupt",
            "asm",
            f"{rows} rows: wrong results at M <= 64 where AITER is not tuned, measured on MI355X "
            "(SGLang 0.5.23, vLLM PR 58139)",
        )
    return Outcome(
        "ok",
        "asm",
        f"{rows} rows, fewer than {DOUBTFUL_ROWS}: AITER may choose a tile that writes too far "
        f"where it is not tuned for {rows} x {k} (not confirmed on hardware)",
    )


def _undecided(rows: int, k: int, small_m_asm: bool) -> Outcome:
    """A matrix that goes where tables say which are not known."""
    if small_m_asm and rows <= UNSAFE_ROWS:
        return Outcome(
            "unknown",
            None,
            f"ASM if AITER's tables, which are not known, have {rows} x {k}; then {rows} rows may "
            "be wrong at M <= 64",
        )
    spared = _spared(rows)
    return Outcome(
        "ok",
        "asm or triton",
        "ASM where AITER's tables have the shape (GEMM at M 1024 and 8192, and Triton's "
        f"preshuffle), else Triton: they are not known here{spared and f'; {spared}'}",
    )


def _misfit(rows: int, k: int) -> Outcome | None:
    """What becomes of a matrix that is put into the ASM GEMM without looking."""
    if rows % WEIGHT_ROW_MULTIPLE or k % WEIGHT_COLUMN_MULTIPLE:
        return Outcome("crash", None, f"AssertionError in shuffle_weight: {_residues(rows, k)}")
    if rows % SCALE_ROW_MULTIPLE:
        return Outcome(
            "corrupt",
            "asm",
            f"{rows} % 32 = {rows % 32} rows: part of the last scales reads as 0 and results spill "
            "into the next row",
        )
    if k % (SCALE_COLUMN_MULTIPLE * SCALE_GROUP):
        return Outcome(
            "corrupt",
            "asm",
            f"{k} % 256 = {k % 256} columns: the scale is padded with bytes that were never set "
            "(AITER issue 4176)",
        )
    return None


def _residues(rows: int, k: int) -> str:
    words = []
    if rows % WEIGHT_ROW_MULTIPLE:
        words.append(f"{rows} rows % {WEIGHT_ROW_MULTIPLE} = {rows % WEIGHT_ROW_MULTIPLE}")
    if k % WEIGHT_COLUMN_MULTIPLE:
        words.append(f"{k} columns % {WEIGHT_COLUMN_MULTIPLE} = {k % WEIGHT_COLUMN_MULTIPLE}")
    return ", ".join(words)


def _instead(path: str, rows: int, k: int) -> Outcome:
    if path != "triton-preshuffle":
        return Outcome("ok", path)
    if rows % WEIGHT_ROW_MULTIPLE or k % WEIGHT_COLUMN_MULTIPLE:
        return Outcome("crash", None, f"AssertionError in shuffle_weight: {_residues(rows, k)}")
    if k % (SCALE_COLUMN_MULTIPLE * SCALE_GROUP):
        return Outcome(
            "crash", None, f"{k} % 256 = {k % 256} columns: the preshuffle kernel does not compile"
        )
    if rows % SCALE_ROW_MULTIPLE:
        return Outcome(
            "unknown", None, f"{rows} % 32 = {rows % 32} rows in the preshuffle kernel: not known"
        )
    return Outcome("ok", path)


MAX_RUNS = 4
"""Ranks that fare differently, up to which a message names them."""


@lru_cache(maxsize=1024)
def wrong_shares(k: int, ranks: int, floored_starts: bool) -> tuple[float, ...]:
    """The share of each rank's weights that get another group's scale, 0 to 1, rank by rank.

    A rank gets columns [r * k / ranks, (r + 1) * k / ranks) of the weights, and whole scale
    columns: floor(k / 32 / ranks) of them from where the ranks before it ended, or, with
    `floored_starts`, those between the floors of its own limits.

    k   columns of the whole weight, divisible by `ranks` and by 32
    """
    width, groups = k // ranks, k // SCALE_GROUP
    shares = []
    for rank in range(ranks):
        start, stop = rank * (groups // ranks), (rank + 1) * (groups // ranks)
        if floored_starts:
            start, stop = rank * width // SCALE_GROUP, (rank + 1) * width // SCALE_GROUP
        wrong = sum(
            1
            for column in range(width)
            if not start + column // SCALE_GROUP < stop
            or start + column // SCALE_GROUP != (rank * width + column) // SCALE_GROUP
        )
        shares.append(wrong / width)
    return tuple(shares)


def shares_text(shares: tuple[float, ...]) -> str:
    """`9 % of rank 0's weights, 55 % of rank 1's, 100 % of ranks 2 to 7's`."""
    runs: list[tuple[int, int, int]] = []
    for rank, share in enumerate(shares):
        percent = round(100 * share)
        if runs and runs[-1][2] == percent:
            runs[-1] = (runs[-1][0], rank, percent)
        else:
            runs.append((rank, rank, percent))
    if len(runs) > MAX_RUNS:
        low, high = min(run[2] for run in runs), max(run[2] for run in runs)
        return f"{low} to {high} % of the weights of a rank"
    words = []
    for first, last, percent in runs:
        who = f"rank {first}'s" if first == last else f"ranks {first} to {last}'s"
        words.append(f"{percent} % of {who}")
    return ", ".join([f"{words[0]} weights", *words[1:]])


def floored(what: str, k: int, ranks: int, floored_starts: bool = False) -> str:
    """The message about scales that are cut by a floor division: `what` is the tensor."""
    width = k // ranks
    return (
        f"{k} / {ranks} = {width} columns a rank = {width / SCALE_GROUP:g} groups of 32, floored: "
        f"{what} gets wrong scales for {shares_text(wrong_shares(k, ranks, floored_starts))}, "
        "no error"
    )
