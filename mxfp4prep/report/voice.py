"""What one command line says: its result on stdout, its story on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxfp4prep.collector import collector_paused
from mxfp4prep.errors import HINT, IN, printable
from mxfp4prep.report import streams

if TYPE_CHECKING:
    from mxfp4prep.findings import Finding
    from mxfp4prep.report.progress import Advance
    from mxfp4prep.report.screen import Screen


@dataclass(frozen=True, slots=True)
class Voice:
    """`verbose` tells notes too; `environ` decides about colours, width and bars."""

    verbose: bool
    environ: Mapping[str, str]

    def print_json(self, document: Mapping[str, Any]) -> None:
        """The result as JSON, and nothing else, on stdout."""
        from mxfp4prep.report.payload import pieces

        with collector_paused():
            streams.emit_all(pieces(document))

    def print_lines(self, pieces: Iterable[str]) -> None:
        """The result as text that is there already, piece by piece, on stdout."""
        with collector_paused():
            streams.emit_all(pieces)

    def say(self, line: str) -> None:
        """One line of the story on stderr."""
        streams.tell(line)

    def print_text(self, render: Callable[[Screen], Sequence[str]]) -> None:
        """The result as the lines that `render` makes for the screen behind stdout."""
        from mxfp4prep.report.screen import screen_of

        streams.emit("\n".join(render(screen_of(sys.stdout, self.environ))) + "\n")

    def tell_findings(self, findings: Sequence[Finding], source: str) -> None:
        """Findings on stderr; notes only when verbose, their number always.

        source   where they were found, as a shell reads it
        """
        from mxfp4prep.report.screen import screen_of

        for finding in findings:
            if finding.severity != "note" or self.verbose:
                text = printable(f"{finding.severity}: {finding.where}: {finding.message}")
                screen = screen_of(sys.stderr, self.environ)
                lines = screen.wrap(text, rest="  ") if sys.stderr.isatty() else [text]
                for line in lines:
                    streams.tell(line)
        notes = sum(finding.severity == "note" for finding in findings)
        if notes and not self.verbose:
            what = "remark" if notes == 1 else "remarks"
            streams.tell(f"note: {notes} more {what}: `mxfp4prep audit {source}` tells")

    @contextmanager
    def notes(self) -> Iterator[None]:
        """Tells what a failure inside has to say beside its error: what it left, how to go on."""
        try:
            yield
        except BaseException as error:
            for note in getattr(error, "__notes__", ()):
                if note.startswith((HINT, IN)):
                    continue  # told with the error, or typed
                streams.tell(f"note: {printable(note)}")
            raise

    def count(self, what: str) -> Callable[[int, int], None]:
        """What to call with how many of how many `what` are done: now and then a line on stderr."""
        from mxfp4prep.report.progress import Count

        return Count(what, streams.tell).advance

    @contextmanager
    def progress(
        self, label: str, total: Callable[[], int], *, silent: bool
    ) -> Iterator[Advance | None]:
        """Progress on stderr: a bar on a terminal that can draw one, else plain lines.

        total   bytes of the whole work; asked for only when they are needed
        """
        if silent:
            yield None
            return
        from mxfp4prep.report.progress import progress

        with progress(label, total(), sys.stderr, live=self._live()) as advance:
            yield advance

    @contextmanager
    def steps(self, label: str, total: int, *, silent: bool) -> Iterator[Advance]:
        """As `progress`, for work of `total` steps; a function to call in any case."""
        if silent:
            yield lambda _: None
            return
        from mxfp4prep.report.progress import steps

        with steps(label, total, sys.stderr, live=self._live()) as advance:
            yield advance

    def _live(self) -> bool:
        return sys.stderr.isatty() and self.environ.get("TERM") != "dumb"
