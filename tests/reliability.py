"""Counts of what the suite really tried, row by row of the reliability plan, and the table made of them.

A test says what it tried with the `tried` fixture, `tried("H1", 64)`: so many inputs or faults of that row were
tried and each came out as the row asks. The counts of passed tests are written to the JSON file that the
environment variable MXFP4PREP_COUNTS names; `python tests/reliability.py COUNTS.json` makes RELIABILITY.md of it
and fails when a row has fewer than its target. `--check` writes nothing and fails when the table says more, too.
"""

# ruff: noqa: E501 - lines of a table

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("RELIABILITY.md")
VARIABLE = "MXFP4PREP_COUNTS"
_PROPERTY = "tried"

Counts = dict[str, dict[str, list[int | bool]]]
"""{row: {test: [count, whether all passed]}}"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the plan: what is tried, when it passes, how many inputs or faults a run of CI must try."""

    id: str
    inputs: str
    passes: str
    target: int


ROWS = (
    Row("H1", "malformed safetensors headers, by hand", "refused by the right error, file and tensor named", 60),
    Row("H2", "valid files, mutated by hypothesis, against `safe_open`", "what is accepted reads the same there; what is refused beyond it stands on a list", 2_000),
    Row("H4", "truncation at every header byte, 256 data lengths", "refused each time", 2_300),
    Row("H5", "every header bit, 2,000 data bits, swapped tensors, a zeroed page", "`verify` finds each, file and tensor named", 20_000),
    Row("H6", "huge or deep headers, indexes and shapes", "at most 5 s and 1 GiB", 6),
    Row("H7", "hostile names, links, pipes, sockets", "nothing outside the output, escaped on the terminal, refused", 40),
    Row("I1", "indexes that lie", "each its own finding", 25),
    Row("Q1", "shapes of quantization_config", "the exact classification", 30),
    Row("N1", "256 weight bytes, 256 scales, 16 x 256 products", "bit-equal to ml_dtypes and torch", 4_096),
    Row("N2", "layouts by shapes", "bijection, inverse, index formula, AITER's recorded bytes", 500),
    Row("N3", "whole tiny models", "dequantized before and after: bit-equal", 6),
    Row("N4", "one-hot activations through the kernels", "the decoded weight, exactly", 12),
    Row("N5", "seeded mutants of the code", "killed: all in layouts and alignment, 95 % elsewhere", 40),
    Row("F1", "the k-th file operation fails, once and for ever", "output absent or whole, source as it was, rerun gives the same bytes", 1_500),
    Row("F2", "SIGKILL at random moments", "as F1; `--resume` gives the same bytes", 50),
    Row("F3", "order of system calls; what stands after each prefix of them", "file synced, renamed, folder synced; manifest last, publication last", 1),
    Row("F4", "full disk, file size, open files, memory, read-only folders", "a clear message and the right exit code", 7),
    Row("F5", "a source that moves while it is read", "exit 6, never SIGBUS", 5),
    Row("F6", "two commands at once", "the second refuses at once; only what is dead and ours is swept", 4),
    Row("F7", "unsafe outputs", "refused, nothing deleted", 12),
    Row("D1", "workers, hash seeds, locales, time zones, folders, umasks", "one digest a file", 24),
    Row("D2", "committed digests of tiny checkpoints, versions of the format", "equal; a later version is refused", 6),
    Row("R1", "a sparse checkpoint with a large tensor", "peak at most twice the largest tensor + 128 MiB, one more a worker", 1),
    Row("R2", "audit of 100,000 tensors", "no torch; time and memory in bench/RESULTS.md", 1),
    Row("R3", "--help, --version", "no torch, no hub", 2),
    Row("R5", "100 conversions in a process", "files, threads and memory as before", 1),
    Row("C1", "each command on each kind of terminal", "no escapes off a terminal, JSON valid", 60),
    Row("C2", "exit codes by real commands", "equal", 8),
    Row("C3", "closed and full outputs", "no traceback; a full device is a failure", 4),
    Row("P1", "installations: lowest, newest, no extras, the other aiter, no triton", "the tests pass there", 5),
    Row("P2", "imports", "no side effects, one direction", 2),
    Row("E1", "blocks of the README and examples", "run and print what is shown", 1),
)  # fmt: skip
_BY_ID = {row.id: row for row in ROWS}


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`tried(row, count=1)`: this test tried so many of the row's inputs or faults."""

    def say(row: str, count: int = 1) -> None:
        assert row in _BY_ID, f"no row {row}"
        assert count > 0, "nothing was tried"
        record_property(_PROPERTY, [row, count])

    return say


class Counter:
    """Sums what passed tests tried; a row whose test failed is marked."""

    def __init__(self) -> None:
        self.rows: Counts = defaultdict(dict)
        self.path = os.environ.pop(VARIABLE, None)  # suites that tests start do not count

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        name = report.nodeid.partition("[")[0].removeprefix("tests/")
        for key, value in report.user_properties:
            if key == _PROPERTY:
                row, count = value  # type: ignore[misc]
                sums = self.rows[row].setdefault(name, [0, True])
                sums[0] += count if report.passed else 0
                sums[1] = bool(sums[1]) and report.passed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.path and not hasattr(session.config, "workerinput"):  # the controller has it all
            path = Path(self.path)
            before = read(path) if path.exists() else {}
            for row, tests in self.rows.items():
                before.setdefault(row, {}).update(tests)
            path.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n")


def read(path: Path) -> Counts:
    """What a run wrote."""
    document: Counts = json.loads(path.read_text())
    return document


def render(counts: Counts) -> str:
    """RELIABILITY.md."""
    lines = [
        "# What was tried",
        "",
        "Generated by `make reliability` from a run of the suites; each count is of inputs or faults that were tried",
        "and came out as the row asks. Do not edit.",
        "",
        "| row | what is tried | passes when | target | tried | result | tests |",
        "| --- | --- | --- | ---: | ---: | --- | --- |",
    ]
    for row in ROWS:
        total, well = _sum(counts.get(row.id, {}))
        result = "reached" if well and total >= row.target else "MISSED"
        tests = ", ".join(f"`{name}`" for name in sorted(counts.get(row.id, {}))) or "none"
        lines.append(
            f"| {row.id} | {row.inputs} | {row.passes} | {row.target:,} | {total:,} | {result} | {tests} |"
        )
    return "\n".join(lines) + "\n"


def missed(counts: Counts) -> Iterator[str]:
    """One line for each row below its target."""
    for row in ROWS:
        total, well = _sum(counts.get(row.id, {}))
        if total < row.target or not well:
            yield f"{row.id}: {total:,} of {row.target:,}" + ("" if well else ", with failures")


def _sum(tests: dict[str, list[int | bool]]) -> tuple[int, bool]:
    return sum(int(count) for count, _ in tests.values()), all(bool(w) for _, w in tests.values())


def overstated(counts: Counts, table: str) -> Iterator[str]:
    """One line for each row of which `table` says more than was tried.

    One in a hundred is let be: where threads take turns a run may have a few calls less to fail.
    """
    for row in ROWS:
        shown = re.search(rf"^\| {row.id} \|(?:[^|]*\|){{3}} ([\d,]+) \|", table, re.MULTILINE)
        total, _ = _sum(counts.get(row.id, {}))
        if shown is None:
            yield f"{row.id}: not in {TABLE.name}"
        elif int(shown[1].replace(",", "")) * 0.99 > total:
            yield f"{row.id}: {TABLE.name} says {shown[1]}, this run tried {total:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it says more")
    arguments = parser.parse_args()
    counts = read(arguments.counts)
    failures = list(missed(counts))
    if arguments.check:
        failures += overstated(counts, TABLE.read_text() if TABLE.exists() else "")
    else:
        TABLE.write_text(render(counts))
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
