"""One output file: hashed and written by a thread of its own while the next piece is prepared.

sha256 and write both release the interpreter lock, so a single shard keeps two cores busy.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from mxfp4prep import io
from mxfp4prep.errors import IOFailed
from mxfp4prep.stream import PIECE_NBYTES
from mxfp4prep.workers import enough_threads

BUFFERS = 4
"""Pieces that may be under way between producer and writer."""

WRITEBACK_NBYTES = 32 << 20
"""Bytes after which the kernel is asked to begin writing them to disk, so that the sync at the end
finds little left: 2.7 s instead of 3.7 s for 4 GB on 2 cores."""


class Different(Exception):
    """A finished file has other bytes than those that would be written in its place."""


class Written(NamedTuple):
    """What stands in the file."""

    nbytes: int
    sha256: str


class FileSink:
    """Creates `path`, takes pieces in order, and publishes nothing: the caller renames.

    finished   `path` stands there already, made by user `finished`: nothing is written, and each
               piece is compared with what is there; `Different` is raised in place of IOFailed

    Use as a context manager: leaving it without `finish` closes the file and stops the thread.
    Raises IOFailed, from `take`, `put` or `finish`, for a write that failed in the thread.
    """

    def __init__(self, path: Path, *, finished: int | None = None) -> None:
        self._path = path
        self._finished = finished is not None
        self._found = bytearray()
        self._sha256 = hashlib.sha256()
        self._nbytes = 0
        self._started = 0
        self._error: BaseException | None = None
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._under_way = threading.Semaphore(BUFFERS)
        self._full: queue.SimpleQueue[tuple[bytearray | None, bytes | memoryview] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=f"write {path.name}", daemon=True)
        self._fd = io.create(path) if finished is None else _open_finished(path, finished)

    def __enter__(self) -> FileSink:
        try:
            with enough_threads(self._path):
                self._thread.start()
        except BaseException:
            self._close_quietly()
            raise
        return self

    def take(self, nbytes: int) -> bytearray:
        """A buffer of at least `nbytes`; waits while all of them are under way."""
        self._check()
        self._under_way.acquire()
        if nbytes > PIECE_NBYTES:
            return bytearray(nbytes)
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return bytearray(PIECE_NBYTES)

    def put(self, view: bytes | memoryview, buffer: bytearray | None = None) -> None:
        """Queues `view` for writing; `buffer`, if it came from `take`, returns to the pool."""
        self._check()
        self._full.put((buffer, view))

    def finish(self) -> Written:
        """Waits for the last write, syncs the file to disk and closes it."""
        self._full.put(None)
        self._thread.join()
        self._check()
        if self._finished and io.file_size(self._fd, self._path) != self._nbytes:
            raise Different
        io.fsync(self._fd, self._path)
        fd, self._fd = self._fd, -1
        io.close(fd, self._path)
        return Written(self._nbytes, self._sha256.hexdigest())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread.is_alive():
            self._full.put(None)
            self._thread.join()
        self._close_quietly()

    def _close_quietly(self) -> None:
        """Another failure is under way: one of closing must not hide it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(IOFailed):
                io.close(fd, self._path)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, view = item
            try:
                if self._error is None:
                    self._sha256.update(view)
                    if self._finished:
                        self._compare(view)
                    else:
                        self._write(view)
                    self._nbytes += len(view)
            except BaseException as error:
                self._error = error
            finally:
                if buffer is not None:
                    if len(buffer) == PIECE_NBYTES:
                        self._free.put(buffer)
                    self._under_way.release()

    def _write(self, view: bytes | memoryview) -> None:
        io.write_all(self._fd, view, self._path)
        written = self._nbytes + len(view)
        if written - self._started >= WRITEBACK_NBYTES:
            io.start_writeback(self._fd, self._started, written - self._started)
            self._started = written

    def _compare(self, view: bytes | memoryview) -> None:
        if len(self._found) != len(view):
            self._found = bytearray(len(view))
        try:
            io.pread_into(self._fd, memoryview(self._found), self._nbytes, self._path)
        except IOFailed as error:  # shorter, or its disk is damaged there
            raise Different from error
        there: object = self._found  # a bytearray is compared at once, a memoryview item by item
        if there != view:
            raise Different


def _open_finished(path: Path, owner: int) -> int:
    try:
        return io.open_own(path, owner)
    except IOFailed as error:
        raise Different from error
