"""How long a call takes on a device: the median of many runs, with nothing of the first ones in it.

Weights that one run leaves in a cache make the next one look faster than a model's, whose layers
push each other out. So a call is measured as a list of calls, each on its own copy of the weights,
enough of them (`copies_beyond`) that none finds its bytes in the cache.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import cuda

from mxfp4prep.runtime.devices import wait_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SECONDS = 0.2
"""How long runs are repeated for one result, but FEWEST_RUNS at least and MOST_RUNS at most."""

FEWEST_RUNS, MOST_RUNS = 5, 200
WARM_UP = 3

CALLS_PER_GRAPH = 16
"""A graph has so many calls at least: they share the microsecond or two that it takes to start."""

TASKS = Path("/proc/self/task")

TIMES_THE_CACHE = 3
MOST_COPIES = 256
"""Weights of less than a 256th of 3 caches stay in them; a graph of more calls is slow to make."""

Method = Literal["graph", "events", "clock"]


STEADY_SPREAD, STEADY_MEDIAN, STEADY_WAITING = 0.25, 1.5, 0.1
"""Runs were not alone on the machine where their middle half spreads over more than this share of
the median, or the median is more than so many times the fastest, or the process's threads waited
for a CPU for more than this share of the time. The last alone shows what hits every run: a call of
0.9 ms on two cores that another process used took 56 ms, the same each time."""


class Timing(NamedTuple):
    """How long one call takes, in microseconds.

    spread_us   from the first to the third quartile
    fastest_us  of the fastest run
    waited      time that this process's threads waited for a CPU while the runs went on, over the
                time of the runs; None on a GPU, and where the kernel does not tell
    runs        how many times the whole list of calls ran (clock: single calls)
    method      graph: replays of a CUDA graph with all calls · events: the calls one after the
                other between two CUDA events, for those that wait for the host · clock: single
                calls on the host's clock, until the device is done
    """

    median_us: float
    spread_us: float
    fastest_us: float
    runs: int
    method: Method
    waited: float | None = None

    @property
    def steady(self) -> bool:
        """Whether the runs agree well enough for their median to say something."""
        return (
            self.spread_us <= STEADY_SPREAD * self.median_us
            and self.median_us <= STEADY_MEDIAN * self.fastest_us
            and (self.waited is None or self.waited <= STEADY_WAITING)
        )


def measure(
    run_list: Sequence[Callable[[], Tensor]], device: torch.device, seconds: float = SECONDS
) -> Timing:
    """The time of one of the calls of `run_list`, which differ in the bytes that they read alone.

    Their results are dropped at once: they may be allocated inside a graph. Calls are run before
    the clock starts, on a GPU all of them, so that what is compiled or tuned is not in the result.

    Raises what a call raises, ValueError without one.
    """
    if not run_list:
        raise ValueError("no call to measure")
    if device.type == "cuda":
        return _on_gpu(run_list, device, seconds)
    return _on_clock(run_list, device, seconds)


def copies_beyond(cache: int, nbytes: int, limit: int | None = None) -> int:
    """How many copies of `nbytes` bytes do not fit into a cache, by a factor of TIMES_THE_CACHE.

    limit   bytes that all copies may take; one copy is always made
    """
    nbytes = max(nbytes, 1)
    wanted = min(-(-TIMES_THE_CACHE * cache // nbytes), MOST_COPIES)
    return max(1, wanted if limit is None else min(wanted, limit // nbytes))


def _on_clock(
    calls: Sequence[Callable[[], Tensor]], device: torch.device, seconds: float
) -> Timing:
    turns = cycle(calls)
    for _ in range(WARM_UP):
        next(turns)()
    wait_for(device)
    times: list[float] = []
    spent, before = 0.0, waited_seconds()
    while len(times) < FEWEST_RUNS or (spent < seconds and len(times) < MOST_RUNS):
        call = next(turns)
        start = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - start)
        spent += times[-1]
    after = waited_seconds()
    waited = None if before is None or after is None else max(0.0, after - before) / spent
    return _timing([duration * 1e6 for duration in times], "clock", waited)


def waited_seconds(tasks: Path = TASKS) -> float | None:
    """How long the threads of this process have been ready to run while other ones had the CPU.

    Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat. None where the
    kernel does not keep it.
    """
    waited, known = 0, False
    for thread in tasks.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            waited += int(thread.read_text(encoding="ascii").split()[1])  # nanoseconds
            known = True
    return waited / 1e9 if known else None


def _on_gpu(calls: Sequence[Callable[[], Tensor]], device: torch.device, seconds: float) -> Timing:
    with cuda.device(device):
        stream = cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            for _ in range(-(-WARM_UP // len(calls))):
                _run_all(calls)
        method: Method = "events"
        run: Callable[[], object] = partial(_run_all, calls)
        count = len(calls)
        if not _waits_for_the_host(calls[0], stream):
            rounds = -(-CALLS_PER_GRAPH // count)
            graph = _capture(calls, rounds, stream)
            if graph is not None:
                method, run, count = "graph", graph.replay, rounds * count
        with cuda.stream(stream):
            run()  # the first replay also uploads the graph
            first = _event_times(run, 1)[0]
            runs = int(min(max(seconds * 1000 / max(first, 1e-3), FEWEST_RUNS), MOST_RUNS))
            milliseconds = _event_times(run, runs)
        cuda.current_stream().wait_stream(stream)
    return _timing([value * 1000 / count for value in milliseconds], method)


def _capture(
    calls: Sequence[Callable[[], Tensor]], rounds: int, stream: cuda.Stream
) -> cuda.CUDAGraph | None:
    """A graph of all calls, `rounds` times in turn; None where they cannot be captured."""
    graph = cuda.CUDAGraph()
    try:
        with cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                _run_all(calls)
    except RuntimeError:
        cuda.synchronize()
        return None
    return graph


def _run_all(calls: Sequence[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()


def _waits_for_the_host(call: Callable[[], Tensor], stream: cuda.Stream) -> bool:
    """Whether `call` makes the host wait (`.item()`, `.tolist()`), which no graph can hold.

    Asked before the capture: one that fails leaves torch's allocator in a state of its own.
    """
    stream.synchronize()
    mode = cuda.get_sync_debug_mode()
    with warnings.catch_warnings(), cuda.stream(stream):
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            cuda.set_sync_debug_mode(mode)
    return False


def _event_times(run: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` runs, queued one behind the other."""
    events = [
        cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(count + 1)
    ]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return [events[i].elapsed_time(events[i + 1]) for i in range(count)]


def _timing(microseconds: list[float], method: Method, waited: float | None = None) -> Timing:
    first, median, third = statistics.quantiles(microseconds, n=4, method="inclusive")
    return Timing(median, third - first, min(microseconds), len(microseconds), method, waited)
