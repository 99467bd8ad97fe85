"""What `bench` measured, for people: the device's ceilings and a small table per shape."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from mxfp4prep.report.screen import Row, Screen, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mxfp4prep.report import contract as c

WIDE_COLUMNS = 79
"""Narrower screens get no times of bfloat16 and of the floor, only how they compare."""

UNSTEADY = "!"
"""Stands before the spread of rows that are not steady."""

_REFERENCES = {
    "linear": "torch.nn.functional.linear",
    "grouped_mm": "torch's grouped_mm",
    "loop": "a loop over the experts that are hit",
}


class Column(NamedTuple):
    """A column of the tables: its head, what the legend says of it, its cells."""

    head: str
    meaning: str
    cell: Callable[[c.BenchRowDocument], str]


def bench_text(report: c.BenchDocument, screen: Screen, given: str) -> list[str]:
    """Lines of a benchmark; `given` is the directory as the command names it."""
    device = report["device"]
    lines = screen.wrap(
        f"{screen.name(given)} on {screen.name(device['device'])} "
        f"({screen.name(device['name'])}, torch {screen.name(device['torch'])})"
    )
    lines += screen.wrap(
        f"measured ceilings: {scaled(device['bandwidth'], 'B')}/s copied, "
        f"{scaled(device['bf16_rate'], 'FLOP')}/s in bf16"
    )
    columns = _columns(report["rows"], screen)
    for _, group in groupby(report["rows"], key=lambda row: row["layer"]):
        rows = list(group)
        lines += ["", *screen.wrap(_heading(rows[0], screen), rest="  ")]
        lines += _table(rows, columns, screen)
    if report["skipped"]:
        lines.append("")
    for skip in report["skipped"]:
        where = f"{screen.name(skip['layer'])} on {skip['backend']}"
        at = "" if skip["m"] is None else f" at m {skip['m']}"
        lines += screen.wrap(f"not run: {where}{at}: {screen.name(skip['reason'])}", rest="  ")
    if report["rows"]:
        lines += ["", *_legend(columns, screen)]
    return lines + _unsteady(report["rows"], screen)


def _heading(row: c.BenchRowDocument, screen: Screen) -> str:
    alike = "" if row["layers"] == 1 else f" and {row['layers'] - 1:,} more"
    if row["experts"] is None:
        shape = f"{row['n']} x {row['k']}"
    else:
        each = f"{row['n']} x {row['k']} and {row['k']} x {row['n'] // 2}"
        shape = f"{counted(row['experts'], 'expert')} of {each}, top {row['top_k']}"
    return f"{screen.name(row['layer'])}{alike}: {shape}, {row['path']}, {row['scheme']}"


def _columns(rows: Sequence[c.BenchRowDocument], screen: Screen) -> list[Column]:
    """The columns after m and backend, those that the screen has room for."""
    ways = dict.fromkeys(row["bf16_by"] for row in rows)
    named = " or ".join(_REFERENCES[way] for way in ways if way is not None)
    none = "its weights did not fit into memory"
    time = Column("time", "of one call: the median", lambda row: _us(row["median_us"]))
    spread = Column("spread", "of the middle half of the runs, as a share of time", _spread)
    if screen.columns < WIDE_COLUMNS:
        return [
            time,
            spread,
            Column("x bf16", f"speed over bfloat16 ({named})" if named else none, _times),
            Column("share", "the least time at the measured ceilings, as a share of time", _share),
        ]
    same = f"of the same in bfloat16 ({named})" if named else none
    return [
        time,
        spread,
        Column("bf16 time", same, lambda row: _us(row["bf16_us"])),
        Column("x bf16", "speed over bfloat16: bf16 time / time", _times),
        Column(
            "floor", "the least time at the measured ceilings", lambda row: _us(row["floor_us"])
        ),
        Column("share", "floor / time", _share),
        Column(
            "bound by",
            "what makes the floor: bytes (memory) or operations (arithmetic)",
            lambda row: row["floor_bound"],
        ),
    ]


def _table(
    rows: Sequence[c.BenchRowDocument], columns: Sequence[Column], screen: Screen
) -> list[str]:
    heads = tuple(column.head for column in columns)
    table = [tuple(column.cell(row) for column in columns) for row in rows]
    numbers = [i for i, head in enumerate(heads) if head != "bound by"]
    if screen.columns < WIDE_COLUMNS:  # the first column can have a line of its own
        firsts = [f"{row['m']} {row['backend']}" for row in rows]
        named = [Row((first, *cells)) for first, cells in zip(firsts, table, strict=True)]
        return screen.table(("m, backend", *heads), named, right=[i + 1 for i in numbers])
    named = [
        Row((str(row["m"]), row["backend"], *cells)) for row, cells in zip(rows, table, strict=True)
    ]
    return screen.table(("m", "backend", *heads), named, right=[0, *(i + 2 for i in numbers)])


def _us(microseconds: float | None) -> str:
    return "" if microseconds is None else duration(microseconds)


def _spread(row: c.BenchRowDocument) -> str:
    mark = "" if row["steady"] else UNSTEADY
    return f"{mark}{row['spread_us'] / row['median_us']:.0%}"


def _times(row: c.BenchRowDocument) -> str:
    ratio = row["bf16_ratio"]
    if ratio is None:
        return ""
    if ratio < 0.01:
        return "<0.01x"
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:.0f}x"


def _share(row: c.BenchRowDocument) -> str:
    return "<1%" if row["floor_share"] < 0.01 else f"{row['floor_share']:.0%}"


def _legend(columns: Sequence[Column], screen: Screen) -> list[str]:
    """What the head of each column means, under each other."""
    width = max(len(column.head) for column in columns)
    lines = []
    for column in columns:
        lines += screen.wrap(column.meaning, f"{column.head:<{width}}  ")
    return lines


def _unsteady(rows: Sequence[c.BenchRowDocument], screen: Screen) -> list[str]:
    """That some rows are not to be trusted, after an empty line."""
    count = sum(not row["steady"] for row in rows)
    if not count:
        return []
    text = (
        f"{screen.paint('warning')}: {count:,} of {counted(len(rows), 'row')} not to be trusted "
        f"({UNSTEADY} before the spread): something else used the machine. Measure again when it "
        "is quiet."
    )
    return ["", *screen.wrap(text, rest="  ")]


def duration(microseconds: float) -> str:
    """`0.42 us`, `12.3 us`, `1.23 ms`, `2.5 s`: three digits."""
    for unit in ("us", "ms"):
        if microseconds < 999.5:
            return f"{microseconds:.3g} {unit}"
        microseconds /= 1000
    return f"{microseconds:.3g} s"


def scaled(value: float, unit: str) -> str:
    """`4.15 TB`, `689 TFLOP`: three digits, decimal prefixes."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
