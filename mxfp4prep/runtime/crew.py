"""Units of work shared among threads: begun in order, counted by the caller, stopped together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from mxfp4prep.runtime.blocks import Checked, Plain
from mxfp4prep.runtime.transfer import Mover

Unit = Plain | Checked

MOST_THREADS = 8
"""Reading 4 GB from the page cache takes 2 threads for 16 GB/s; a disk wants several reads at a
time, and beyond this they wait for one another."""


WORTH_A_THREAD = 1 << 20
"""Bytes that take about as long to read as a thread takes to start and to be waited for."""


def thread_count(nbytes: int) -> int:
    """How many threads read `nbytes`: one per core that this process may use, up to a few."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), nbytes // WORTH_A_THREAD))


def do_units(units: Iterable[Unit], movers: Sequence[Mover], done: Callable[[int], None]) -> None:
    """Has every unit done by one of `movers`, each on a thread of its own; a single one on this.

    done   called on this thread with the bytes of each unit

    Returns, or raises the first failure (its own, that of `done`, Ctrl-C), once all have stopped
    and nothing is on its way any more.
    """
    if len(movers) == 1:
        try:
            for unit in units:
                done(movers[0].move(unit))
        finally:
            movers[0].drain()
        return
    crew = _Crew(units)
    threads = [
        threading.Thread(target=crew.work, args=(mover,), name="mxfp4prep-read") for mover in movers
    ]
    try:
        for thread in threads:
            thread.start()
        crew.collect(len(threads), done)
    finally:
        crew.stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


class _Crew:
    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = iter(units)
        self._lock = threading.Lock()
        self._results: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self.stop = threading.Event()

    def work(self, mover: Mover) -> None:
        """Does units until there are none or somebody failed."""
        try:
            try:
                while (unit := self._next()) is not None:
                    self._results.put(mover.move(unit))
            finally:
                mover.drain()
        except BaseException as error:  # goes to the thread that waits
            self.stop.set()
            self._results.put(error)
        else:
            self._results.put(None)

    def collect(self, workers: int, done: Callable[[int], None]) -> None:
        """Reports what was done until every worker has ended; raises the first failure."""
        while workers:
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                workers -= 1
            else:
                done(result)

    def _next(self) -> Unit | None:
        with self._lock:
            return None if self.stop.is_set() else next(self._units, None)
