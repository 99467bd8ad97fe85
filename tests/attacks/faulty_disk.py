"""A disk on which the k-th call of one operation fails: in place of `os` beneath the file seam.

Used by `attacks/faults.py` and `attacks/kill.py`, and by the tests of the same names.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4prep import io

ERRNOS = ("EIO", "ENOSPC", "EDQUOT", "EACCES", "EINTR")
EXCEPTIONS: dict[str, type[BaseException]] = {
    "MemoryError": MemoryError,
    "KeyboardInterrupt": KeyboardInterrupt,
}
OPERATIONS = (
    "open", "create", "open dir", "pread", "write", "fsync", "fsync dir", "chmod", "rename",
    "exchange", "mkdir", "unlink", "rmdir", "scan", "stat", "close",
)  # fmt: skip
ANY = "any operation"


class Killed(BaseException):
    """Stands for SIGKILL: from here on the process does nothing any more."""


@dataclass(frozen=True)
class Fault:
    """The `call`-th call (from 1) of `operation` fails; every later one too if `ever`.

    error   an errno's name, an exception's, "short" (fewer bytes than asked for) or "killed"
    after   the call has done its work before it fails
    """

    operation: str
    call: int
    error: str
    ever: bool = False
    after: bool = False

    def __str__(self) -> str:
        when = "every call from" if self.ever else "call"
        return (
            f"{self.operation}: {self.error} {'after' if self.after else 'at'} {when} {self.call}"
        )


def _opening(path: object, flags: int, *_rest: object, **_options: object) -> str:
    if flags & os.O_CREAT:
        return "create"
    return "open dir" if flags & os.O_DIRECTORY else "open"


def _syncing(fd: int) -> str:
    return "fsync dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync"


_CALLS: dict[str, str | Callable[..., str]] = {
    "open": _opening,
    "fsync": _syncing,
    "preadv": "pread",
    "write": "write",
    "chmod": "chmod",
    "rename": "rename",
    "mkdir": "mkdir",
    "unlink": "unlink",
    "rmdir": "rmdir",
    "scandir": "scan",
    "stat": "stat",
    "lstat": "stat",
    "fstat": "stat",
    "statvfs": "stat",
    "close": "close",
}


class FaultyDisk:
    """Stands in for the module `os`: counts calls by operation, and fails as its fault says.

    fired   how often it failed
    trace   (operation, what it was called with) of every call that did its work
    """

    def __init__(
        self, fault: Fault | None = None, note: Callable[[str], None] | None = None
    ) -> None:
        self.fault = fault
        self.fired = 0
        self.counts: dict[str, int] = {}
        self.trace: list[tuple[str, tuple[Any, ...]]] = []
        self._note = note
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        kind = _CALLS.get(name)
        return real if kind is None else self.calling(kind, real, name)

    def calling(
        self, kind: str | Callable[..., str], real: Callable[..., Any], name: str = ""
    ) -> Callable[..., Any]:
        """`real`, counted and failing as operation `kind`."""

        def call(*args: Any, **options: Any) -> Any:
            operation = kind if isinstance(kind, str) else kind(*args, **options)
            if self._note is not None:
                self._note(operation)
            return self._call(operation, name, real, args, options)

        return call

    def _call(self, operation: str, name: str, real: Any, args: Any, options: Any) -> Any:
        fault = self.fault
        with self._lock:
            for each in (operation, ANY):
                self.counts[each] = self.counts.get(each, 0) + 1
            fails = (
                fault is not None
                and fault.operation in (operation, ANY)
                and (
                    self.counts[fault.operation] == fault.call
                    or (fault.ever and self.counts[fault.operation] > fault.call)
                )
            )
            self.fired += fails
        if not fails or fault is None:
            result = self._work(name, real, args, options)
            with self._lock:
                # no buffers: an exported one cannot be resized
                told = tuple(a for a in args if isinstance(a, int | str | os.PathLike))
                self.trace.append((operation, told))
            return result
        if fault.error == "short":
            return self._short(real, args)
        if fault.after or name == "close":  # Linux lets go of the descriptor whatever close says
            with suppress(OSError):
                result = self._work(name, real, args, options)
                if name == "open":
                    os.close(result)  # nobody will ever know its number
                elif name == "scandir":
                    result.close()
        if fault.error == "killed":
            raise Killed
        if fault.error in EXCEPTIONS:
            raise EXCEPTIONS[fault.error]
        number = getattr(errno, fault.error)
        path = args[0] if args and isinstance(args[0], str | os.PathLike) else None
        raise OSError(number, os.strerror(number), None if path is None else os.fspath(path))

    def _work(self, name: str, real: Any, args: Any, options: Any) -> Any:
        if name == "fsync":  # the cost of a real one is all that it would add here
            return os.fstat(*args) and None
        return real(*args, **options)

    @staticmethod
    def _short(real: Any, args: Any) -> int:
        if real is os.preadv:
            fd, [view], offset = args
            return int(os.preadv(fd, [view[: max(1, len(view) // 3)]], offset))
        fd, view = args
        return int(os.write(fd, view[: max(1, len(view) // 3)]))


class _Removing:
    """The same disk for `shutil.rmtree`, which may close a folder twice when closing fails."""

    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return os.close if name == "close" else getattr(self._disk, name)


@contextmanager
def on_disk(disk: FaultyDisk) -> Iterator[FaultyDisk]:
    """While it lasts, the product's file operations go through `disk`."""
    io_os, shutil_os = io.os, shutil.os  # type: ignore[attr-defined]
    exchange = io.exchange_names  # type: ignore[attr-defined]
    io.os, shutil.os = disk, _Removing(disk)  # type: ignore[attr-defined]
    io.exchange_names = disk.calling("exchange", exchange)  # type: ignore[attr-defined]
    try:
        yield disk
    finally:
        io.os, shutil.os = io_os, shutil_os  # type: ignore[attr-defined]
        io.exchange_names = exchange  # type: ignore[attr-defined]


def no_exchange(*_names: object) -> None:
    """In place of `io.exchange_names`: what a network's disk says to it."""
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def open_descriptors() -> int:
    """How many files this process holds open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def fast_folder() -> str | None:
    """Where temporary files cost no disk: for `dir` of `tempfile`'s functions."""
    shared = "/dev/shm"
    return shared if os.path.isdir(shared) and os.access(shared, os.W_OK) else None  # noqa: PTH112


def tree(root: Path) -> dict[str, bytes]:
    """Every file under `root` by its path inside."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
