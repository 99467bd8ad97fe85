"""Why a case is as it is, in words and numbers: what both maps and the legend read from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mxfp4prep.alignment import (
    BAD_SCALE_ROWS,
    HAZARDS,
    REASONS,
    SCALE_COLUMN_MULTIPLE,
    SCALE_ROW_MULTIPLE,
)
from mxfp4prep.report.page.cases import Case, Degree

MAX_COUNTS = 8
"""Counts that one line does the arithmetic of."""

MAX_BRIEF = 90
"""Characters of a meaning that needs no shorter one."""

PLACEMENTS = {
    "replicated": "every rank holds it whole",
    "distributed": "the ranks share whole experts out",
    "fused": "held as one more routed expert",
}

_BY_NUMBERS = frozenset({"scale_rows", "scale_cols", "bad_tile"})
"""Codes that say something about the counts; the others are said by their words."""


def arithmetic(degree: Degree) -> str:
    """The numbers behind the path: `scales 4096 × 12 on a rank: 12 columns % 8 = 4`."""
    if degree.detail:
        return degree.detail.replace(f" at tp {degree.tp}:", ":")
    if degree.shard is None or len(degree.shard) < 2:
        return ""
    rows, columns = degree.shard[-2:]
    shown = " × ".join(map(str, degree.shard))
    return f"scales {shown} on a rank: {_remainders([rows], [columns], degree.codes)}"


def _remainders(rows: Sequence[int], columns: Sequence[int], codes: Sequence[str]) -> str:
    """What of the rule fails for these counts, or all of it where nothing in `codes` does."""
    rows, columns = rows[:MAX_COUNTS], columns[:MAX_COUNTS]
    by_rows = f"{_listed(rows)} rows % 32 = {_listed([r % SCALE_ROW_MULTIPLE for r in rows])}"
    remainders = [count % SCALE_COLUMN_MULTIPLE for count in columns]
    by_columns = f"{_listed(columns)} columns % 8 = {_listed(remainders)}"
    said = []
    if "scale_rows" in codes:
        said.append(by_rows)
    if "scale_cols" in codes:
        short = "the last of {} columns covers fewer than 32 values"
        said.append(by_columns if any(remainders) else short.format(_listed(columns)))
    if "bad_tile" in codes:
        said.append(f"{_listed([r for r in rows if r in BAD_SCALE_ROWS])} rows")
    return ", ".join(said or [by_rows, by_columns])


class Summary(NamedTuple):
    """Degrees of a case that say the same, in one line."""

    degrees: tuple[str, ...]
    path: str
    codes: tuple[str, ...]
    words: str


def summaries(case: Case) -> list[Summary]:
    """Why not asm, or what to know all the same; empty where every degree is asm without remark."""
    alike: dict[tuple[object, ...], list[Degree]] = {}
    for degree in case.degrees:
        if degree.path != "asm" or degree.codes or degree.hazards:
            key = (degree.path, degree.codes, degree.hazards, degree.joined)
            alike.setdefault(key, []).append(degree)
    return [
        Summary(
            tuple(degree.tp for degree in degrees),
            degrees[0].path,
            (*degrees[0].codes, *degrees[0].hazards),
            _together(degrees),
        )
        for degrees in alike.values()
    ]


def _together(degrees: Sequence[Degree]) -> str:
    first = degrees[0]
    before = f"joined in {first.joined}: " if first.joined else ""
    if first.detail:
        more = ", …" if len(degrees) > 1 else ""
        return f"{before}{arithmetic(first)}{more}"
    shards = [degree.shard for degree in degrees if degree.shard and len(degree.shard) > 1]
    if not shards or _BY_NUMBERS.isdisjoint(first.codes):
        return before + "; ".join(brief(code) for code in (*first.codes, *first.hazards))
    rows = list(dict.fromkeys(shard[-2] for shard in shards))
    columns = list(dict.fromkeys(shard[-1] for shard in shards))
    return before + _remainders(rows, columns, first.codes)


def engine_lines(case: Case) -> list[tuple[tuple[str, ...], str, str, str]]:
    """(degrees, outcome, path, message) of the asked engine, degrees that say the same together."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for degree in case.degrees:
        if degree.outcome is not None:
            alike.setdefault(degree.outcome, []).append(degree.tp)
    return [(tuple(tps), *said) for said, tps in alike.items()]


def meaning(code: str) -> str:
    """What a reason or hazard says; a code that is not known says itself."""
    return REASONS.get(code) or HAZARDS.get(code) or code


def brief(code: str) -> str:
    """The meaning where it is short, else what stands before its first colon."""
    words = meaning(code)
    return words if len(words) <= MAX_BRIEF else words.partition(":")[0]


def spell_degrees(degrees: Sequence[str]) -> str:
    """`tp 1, 2, 4` and, three or more in a row, `tp 5–7`."""
    runs: list[list[str]] = []
    for degree in degrees:
        if runs and int(degree) == int(runs[-1][-1]) + 1:
            runs[-1].append(degree)
        else:
            runs.append([degree])
    said = (f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)
    return f"tp {', '.join(said)}"


def codes_of(cases: Iterable[Case]) -> list[str]:
    """Every reason and hazard that occurs, sorted."""
    found = {
        code
        for case in cases
        for degree in case.degrees
        for code in (*degree.codes, *degree.hazards)
    }
    return sorted(found)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
