"""How far long work is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from mxfp4prep.report.screen import human

Advance = Callable[[int], None]

WIDE_COLUMNS = 64
"""Terminals narrower than this get a percentage instead of sizes and speed."""

STEP_PERCENT = 10
LINE_SECONDS, MAX_SECONDS = 1.0, 10.0
"""A plain line comes after STEP_PERCENT of the work but LINE_SECONDS after the last at the
earliest, and after MAX_SECONDS at the latest."""


@contextmanager
def progress(
    label: str,
    total: int,
    stream: TextIO,
    *,
    live: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """A function to call with the bytes done since the last call, from any thread.

    label   what is being done, already escaped
    live    draw a bar with Rich; else plain lines without cursor codes
    """
    if live:
        with _bar(label, total, stream, steps=False) as advance:
            yield advance
    else:
        yield _Lines(label, total, stream, clock, steps=False).advance


@contextmanager
def steps(
    label: str,
    total: int,
    stream: TextIO,
    *,
    live: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """As `progress`, for work that comes in `total` steps instead of bytes."""
    if live:
        with _bar(label, total, stream, steps=True) as advance:
            yield advance
    else:
        yield _Lines(label, total, stream, clock, steps=True).advance


@contextmanager
def _bar(label: str, total: int, stream: TextIO, *, steps: bool) -> Iterator[Advance]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(file=stream, highlight=False)
    facts: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
    if console.width < WIDE_COLUMNS:
        facts = (TaskProgressColumn(),)
    elif steps:
        facts = (MofNCompleteColumn(),)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        *facts,
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(escape(label), total=total)
        lock = threading.Lock()
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            with lock:
                done = min(done + nbytes, total)
                bar.update(task, completed=done)

        yield advance


class _Lines:
    """`label: 40 % (1.2 GB of 3.0 GB, 800 MB/s, 2 s left)`, of steps `label: 40 % (12 of 30, 2 s
    left)`, not too often."""

    def __init__(
        self,
        label: str,
        total: int,
        stream: TextIO,
        clock: Callable[[], float],
        *,
        steps: bool,
    ) -> None:
        self._label, self._total, self._stream, self._clock = label, total, stream, clock
        self._steps = steps
        self._lock = threading.Lock()
        self._done = 0
        self._shown = 0.0
        self._began = self._last = clock()

    def advance(self, nbytes: int) -> None:
        """Counts `nbytes` more, and says so when it is time."""
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            now = self._clock()
            percent = 100 * self._done / max(self._total, 1)
            waited = now - self._last
            if (percent - self._shown >= STEP_PERCENT and waited >= LINE_SECONDS) or (
                waited >= MAX_SECONDS
            ):
                self._shown, self._last = percent, now
                self._say(percent, now - self._began)

    def _say(self, percent: float, seconds: float) -> None:
        speed = self._done / seconds
        left = (self._total - self._done) / speed if speed else 0.0
        try:
            self._stream.write(
                f"{self._label}: {percent:.0f} % ({self._facts(speed)}, {left:.0f} s left)\n"
            )
            self._stream.flush()
        except OSError:
            self._last = float("inf")  # nobody listens: the work goes on without a word

    def _facts(self, speed: float) -> str:
        if self._steps:  # they differ too much for a speed
            return f"{self._done:,} of {self._total:,}"
        return f"{human(self._done)} of {human(self._total)}, {human(int(speed))}/s"


class Count:
    """`headers from the Hub: 40 of 91`, once in LINE_SECONDS at most; quick work says nothing."""

    def __init__(
        self,
        what: str,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._tell, self._clock = what, tell, clock
        self._lock = threading.Lock()
        self._last = clock()

    def advance(self, done: int, total: int) -> None:
        """Says that `done` of `total` are done, when it is time. Called from any thread."""
        with self._lock:
            now = self._clock()
            if now - self._last < LINE_SECONDS:
                return
            self._last = now
            self._tell(f"{self._what}: {done:,} of {total:,}")
