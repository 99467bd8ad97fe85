"""Text that fits where it goes: columns, character set and colours of one output.

Every text from a file passes through `Screen.name` before it is measured or printed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from mxfp4prep.errors import printable

PLAIN_COLUMNS = 80
"""Width of text that does not go to a terminal."""

MIN_COLUMNS, MAX_COLUMNS = 24, 120
INDENT = "    "

_STYLES = {"asm": "32", "triton": "33", "IMPOSSIBLE": "31;1", "error": "31;1", "warning": "33"}
"""Words that are coloured where they stand alone in a cell, with their SGR codes (ECMA-48)."""

_SPACE = re.compile(r"(?<= )(?=[^ ])")
_JOINT = re.compile(r"(?<=[/._,-])(?=[A-Za-z{])")


class Row(NamedTuple):
    """One row of a table, and lines that belong under it."""

    cells: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Screen:
    """Where text goes. The default is a plain file of 80 columns."""

    columns: int = PLAIN_COLUMNS
    encoding: str = "utf-8"
    colour: bool = False

    def name(self, text: object) -> str:
        """`text` as it can be shown here: unprintable and unencodable characters escaped."""
        return printable(str(text)).encode(self.encoding, "backslashreplace").decode(self.encoding)

    def paint(self, cell: str) -> str:
        """`cell` (padded or not) in the colour of the word it holds."""
        code = _STYLES.get(cell.strip()) if self.colour else None
        return cell if code is None else f"\x1b[{code}m{cell}\x1b[0m"

    def wrap(self, text: str, first: str = "", rest: str | None = None) -> list[str]:
        """Lines of `text` after the prefixes `first` and `rest` (default: as many spaces)."""
        rest = " " * cells(first) if rest is None else rest
        lines, line, used = [], first, cells(first)
        for piece in _pieces(text, max(8, self.columns - max(used, cells(rest)))):
            size = cells(piece.rstrip())
            if used + size > self.columns and line.strip() not in ("", first.strip()):
                lines.append(line.rstrip())
                line, used = rest, cells(rest)
            line += piece
            used += cells(piece)
        return [*lines, line.rstrip()]

    def table(
        self, head: Sequence[str], rows: Sequence[Row], right: Sequence[int] = ()
    ) -> list[str]:
        """Lines of a table. Where it is too wide, the first column gets lines of its own.

        right   indices of the columns that are aligned right
        """
        every = [tuple(head), *(row.cells for row in rows)]
        widths = [max(cells(line[column]) for line in every) for column in range(len(head))]
        if sum(widths) + 2 * (len(widths) - 1) <= self.columns:
            lines = self._aligned(every, widths, right)
            return self._with_notes([[line] for line in lines], rows)
        inner = sum(widths[1:]) + 2 * (len(widths) - 2) + len(INDENT)
        if inner <= self.columns:
            tails = self._aligned([line[1:] for line in every], widths[1:], [c - 1 for c in right])
            blocks = [
                [*self.wrap(line[0], rest=INDENT), INDENT + tail]
                for line, tail in zip(every, tails, strict=True)
            ]
            return self._with_notes(blocks, rows)
        blocks = [self.wrap(head[0])]
        for row in rows:
            facts = ", ".join(f"{h} {c}" for h, c in zip(head[1:], row.cells[1:], strict=True) if c)
            blocks.append([*self.wrap(row.cells[0], rest=INDENT), *self.wrap(facts, INDENT)])
        return self._with_notes(blocks, rows)

    def _aligned(
        self, lines: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[int]
    ) -> list[str]:
        aligned = []
        for line in lines:
            padded = []
            for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
                space = " " * (width - cells(cell))
                padded.append(self.paint(space + cell if column in right else cell + space))
            aligned.append("  ".join(padded).rstrip())
        return aligned

    def _with_notes(self, blocks: Sequence[list[str]], rows: Sequence[Row]) -> list[str]:
        lines = [*blocks[0]]
        for block, row in zip(blocks[1:], rows, strict=True):
            lines += block
            for note in row.notes:
                lines += self.wrap(note, INDENT, INDENT + "  ")
        return lines


def screen_of(stream: TextIO, environ: Mapping[str, str]) -> Screen:
    """The screen behind `stream`, as NO_COLOR, FORCE_COLOR, TERM and COLUMNS would have it."""
    tty = stream.isatty()
    wanted = bool(environ.get("FORCE_COLOR")) or (tty and environ.get("TERM") != "dumb")
    columns = shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns
    if not tty and not environ.get("COLUMNS"):
        columns = PLAIN_COLUMNS
    return Screen(
        columns=min(max(columns, MIN_COLUMNS), MAX_COLUMNS),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        colour=wanted and not environ.get("NO_COLOR"),
    )


def cells(text: str) -> int:
    """Terminal cells that `text` takes: East Asian wide characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def human(nbytes: int) -> str:
    """`640 B`, `1.2 GB`, `312 MB`: decimal units, 1 GB = 10^9 bytes."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.5 or unit == "PB":
            break
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """`1 layer`, `2 layers`, `1,234 layers`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _pieces(text: str, most: int) -> list[str]:
    """`text` cut where a line may break: at spaces, and in longer words at joints or anywhere."""
    pieces = []
    for word in _SPACE.split(text):
        parts = [word] if len(word) <= most and cells(word) <= most else _JOINT.split(word)
        for part in parts:
            step = most if len(part) <= most and cells(part) <= most else most // 2
            pieces += [part[start : start + step] for start in range(0, len(part), step)]
    return pieces
