"""Jobs on a few threads: the first failure, or Ctrl-C, stops them all and is the one reported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from mxfp4prep.errors import IOFailed, UsageError

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


JOB_NBYTES = 16 << 20
"""Memory that a job's threads need at least: their stacks, and buffers of a few megabytes."""


class Cancelled(Exception):
    """Another job failed, or the user asked to stop."""


class Cancel:
    """A flag that jobs look at between pieces, and a progress counter safe to call from any."""

    def __init__(self, progress: Progress | None) -> None:
        self._flag = threading.Event()
        self._lock = threading.Lock()
        self._progress = progress

    def done(self, nbytes: int) -> None:
        """Reports progress. Raises Cancelled once another job has failed."""
        if self._flag.is_set():
            raise Cancelled
        if self._progress is not None:
            with self._lock:
                self._progress(nbytes)

    def set(self) -> None:
        """Makes every job stop at its next piece."""
        self._flag.set()


def worker_count(workers: int | None) -> int:
    """`workers`, or one per core this process may use. Raises UsageError below 1."""
    if workers is None:
        return len(os.sched_getaffinity(0))
    if workers < 1:
        raise UsageError(
            "--workers", "not a number of workers", found=workers, expected="1 or more"
        )
    return workers


def run_jobs(jobs: Iterable[Callable[[], None]], workers: int, cancel: Cancel) -> None:
    """Runs every job on up to `workers` threads; raises the first failure once all have stopped.

    Raises MemoryError before the first one where there is no room for so many.
    """
    jobs = list(jobs)
    # Asked for and given back untouched: a thread that finds no memory to begin with dies without a
    # word, and Python waits for it for ever.
    bytearray(min(workers, len(jobs)) * JOB_NBYTES)
    with _one_torch_thread():
        pool = ThreadPoolExecutor(workers, thread_name_prefix="mxfp4prep")
        try:
            failures: list[BaseException] = []
            with enough_threads("--workers"):
                futures = [pool.submit(_noting, job, failures, cancel) for job in jobs]
            wait(futures, return_when=FIRST_EXCEPTION)
            if failures:
                raise failures[0]
        finally:
            cancel.set()
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def enough_threads(where: object) -> Iterator[None]:
    """Raises IOFailed when the system starts no thread more, for which Python has no own error."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise IOFailed(
            where,
            "the system starts no more threads",
            hint="use fewer workers, or raise the limits (ulimit -u, ulimit -v)",
        ) from error


def _noting(job: Callable[[], None], failures: list[BaseException], cancel: Cancel) -> None:
    """Runs a job, unless one has failed; what it fails with is noted in the order of failing."""
    if failures:
        raise Cancelled
    try:
        job()
    except Cancelled:
        raise
    except BaseException as error:
        failures.append(error)
        cancel.set()  # here: before the thread that waits is awake, others may do whole jobs
        raise


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The jobs are the parallelism: torch must not start threads of its own in each of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
