"""What `bench` measured, for people: the device's ceilings and a small table per shape."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from mxfp4prep.report.screen import Row, Screen, counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mxfp4prep.report import contract as c

WIDE_COLUMNS = 60
"""Narrower screens get the time and the two ratios alone."""

_WIDE = ("m", "backend", "time", "spread", "bf16 time", "x bf16", "floor", "share", "bound by")

_REFERENCES = {
    "linear": "torch.nn.functional.linear",
    "grouped_mm": "torch's grouped_mm",
    "loop": "a loop over the experts that are hit",
}


def bench_text(report: c.BenchDocument, screen: Screen) -> list[str]:
    """Lines of a benchmark."""
    device = report["device"]
    lines = screen.wrap(
        f"{screen.name(report['name'])} on {screen.name(device['device'])} "
        f"({screen.name(device['name'])}, torch {screen.name(device['torch'])})"
    )
    lines += screen.wrap(
        f"measured ceilings: {scaled(device['bandwidth'], 'B')}/s copied, "
        f"{scaled(device['bf16_rate'], 'FLOP')}/s in bf16"
    )
    for _, group in groupby(report["rows"], key=lambda row: row["layer"]):
        rows = list(group)
        lines += ["", *screen.wrap(_heading(rows[0], screen), rest="  ")]
        lines += _table(rows, screen)
    if report["skipped"]:
        lines.append("")
    for skip in report["skipped"]:
        where = f"{screen.name(skip['layer'])} on {skip['backend']}"
        at = "" if skip["m"] is None else f" at m {skip['m']}"
        lines += screen.wrap(f"not run: {where}{at}: {screen.name(skip['reason'])}", rest="  ")
    if report["rows"]:
        lines += ["", *_legend(report["rows"], screen)]
    return lines


def _heading(row: c.BenchRowDocument, screen: Screen) -> str:
    alike = "" if row["layers"] == 1 else f" and {row['layers'] - 1:,} more"
    if row["experts"] is None:
        shape = f"{row['n']} x {row['k']}"
    else:
        each = f"{row['n']} x {row['k']} and {row['k']} x {row['n'] // 2}"
        shape = f"{counted(row['experts'], 'expert')} of {each}, top {row['top_k']}"
    return f"{screen.name(row['layer'])}{alike}: {shape}, {row['path']}, {row['scheme']}"


def _table(rows: Iterable[c.BenchRowDocument], screen: Screen) -> list[str]:
    if screen.columns < WIDE_COLUMNS:
        head = ("m", "backend", "time", "bf16", "floor")
        table = [Row((str(row["m"]), row["backend"], _time(row), *_ratios(row))) for row in rows]
        return screen.table(head, table, right=(0, 2, 3, 4))
    table = []
    for row in rows:
        bf16 = "" if row["bf16_us"] is None else duration(row["bf16_us"])
        ratio, share = _ratios(row)
        cells = (_time(row), duration(row["spread_us"]), bf16, ratio, duration(row["floor_us"]))
        table.append(Row((str(row["m"]), row["backend"], *cells, share, row["floor_bound"])))
    return screen.table(_WIDE, table, right=(0, 2, 3, 4, 5, 6, 7))


def _time(row: c.BenchRowDocument) -> str:
    return duration(row["median_us"])


def _ratios(row: c.BenchRowDocument) -> tuple[str, str]:
    return _times(row["bf16_ratio"]), _share(row["floor_share"])


def _times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    if ratio < 0.01:
        return "<0.01x"
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:.0f}x"


def _share(share: float) -> str:
    return "<1%" if share < 0.01 else f"{share:.0%}"


def _legend(rows: Iterable[c.BenchRowDocument], screen: Screen) -> list[str]:
    ways = dict.fromkeys(row["bf16_by"] for row in rows)
    named = " or ".join(_REFERENCES[way] for way in ways if way is not None)
    what = f"speed over bfloat16 ({named})" if named else "its weights did not fit into memory"
    if screen.columns < WIDE_COLUMNS:
        median = "time: the median"
        floor = "floor: how near to the least time at the measured ceilings"
    else:
        median = "time: the median; spread: between its quartiles"
        floor = "floor: the least time at the measured ceilings; share: how near to it"
    texts = (median, f"bf16: {what}", floor)
    return [line for text in texts for line in screen.wrap(text, rest="  ")]


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
