"""Folders that runs leave beside an output: whose they are, what of them a later run takes over.

A staging folder's name says who makes it, so that a later run can sweep what a dead process left
and never what a live one is still writing. No record in such a folder is believed: a finished file
is taken over only after its bytes were compared with those that would be written in its place.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.errors import IOFailed, UnsafeOutput

_OWNER = re.compile(r"(old-|left[0-9]+-)?([0-9a-f]{8})-(\d+)-(\d+)")
_MACHINE_ID = Path("/etc/machine-id")
"""Stays as it is when the machine is started again, machine-id(5)."""

_RELEASED = 0
"""In place of a start time: the run has given the folder up, whether its process lives or not."""


def stage_path(out: Path, kind: str = "") -> Path:
    """Where this process stages `out`; `kind` is "old-" for the output that it sets aside."""
    pid = os.getpid()
    return out.parent / f"{_prefix(out)}{kind}{_host()}-{pid}-{_started(pid)}"


def abandoned(out: Path, mine: Path | None = None) -> list[Path]:
    """Folders that dead runs have left beside `out`, the newest first.

    mine   this run's own: not one of them, and who owns it must own them

    Raises UnsafeOutput when a run that may be alive is at work on `out`.
    """
    user = None if mine is None else io.status(mine).st_uid
    dead = []
    for entry in io.scan_folder(out.parent):
        path = Path(entry.path)
        owner = _owner(out, path)
        if owner is None or path == mine:
            continue
        try:
            found = io.status(path)
        except IOFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):  # its run has ended just now
                continue
            raise
        if not stat.S_ISDIR(found.st_mode):
            continue
        _, host, pid, started = owner
        alive = host != _host() or _started(pid) == started
        if alive or (user is not None and found.st_uid != user):
            what = "another user's run has left something"
            if alive:
                what = f"another run is writing it, process {pid}"
            raise UnsafeOutput(
                out,
                f"{what}: found {path.name}",
                hint="wait for it; if no such process lives, remove that folder",
            )
        dead.append((-found.st_mtime_ns, path))
    return [path for _, path in sorted(dead)]


def finished(out: Path, names: Collection[str]) -> int:
    """How many of those files stand in what dead runs have left beside `out`; nothing is read."""
    folders = [folder for folder in abandoned(out) if not was_set_aside(out, folder)]
    return sum(any(io.exists(folder / name) for folder in folders) for name in names)


def release(folder: Path, out: Path, kind: str = "") -> Path:
    """Gives a folder of this process up, so that any run may take or sweep it; its new path.

    Where it cannot be renamed it stays as it is until this process ends.
    """
    given_up = out.parent / f"{_prefix(out)}{kind}{_host()}-{os.getpid()}-{_RELEASED}"
    try:
        io.rename(folder, given_up)
    except (IOFailed, MemoryError):
        return folder
    return given_up


def was_set_aside(out: Path, folder: Path) -> bool:
    """Whether one of `abandoned` is an earlier output, as it was."""
    owner = _owner(out, folder)
    return owner is not None and owner[0] == "old-"


def _owner(out: Path, folder: Path) -> tuple[str, str, int, int] | None:
    """(kind, host, pid, start time) by a folder's name, or None for one that is not ours."""
    prefix = _prefix(out)
    if not folder.name.startswith(prefix):
        return None
    found = _OWNER.fullmatch(folder.name, len(prefix))
    return found and (found[1] or "", found[2], int(found[3]), int(found[4]))


def _prefix(out: Path) -> str:
    return f".{out.name}.mxfp4prep-"


def _host() -> str:
    """Eight hex digits for this machine and process namespace: others' folders are never swept.

    Names alone will not do: many machines are called localhost, and some of them share a disk.
    """
    name = os.uname().nodename
    with suppress(OSError):
        name += str(Path("/proc/self/ns/pid").readlink())
    with suppress(OSError):
        name += _MACHINE_ID.read_bytes().hex()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _started(pid: int) -> int:
    """Start time of process `pid` in clock ticks since boot, or -1 when there is none.

    A process that has ended and only waits to be asked for its exit code writes no more: -1.
    Source: fields 3 and 22 of /proc/PID/stat, proc(5).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


class Leftovers:
    """The finished files in what dead runs have left, taken into this run's hands.

    names   of the files that may be taken over; paths inside the output
    reused  those that were: in the staging folder now
    differ  those that were there with other bytes, and are written anew
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._folders: list[Path] = []
        self._out = Path()
        self.reused: list[str] = []
        self.differ: list[str] = []

    def claim(self, out: Path, folders: list[Path]) -> None:
        """Makes `folders` this process's own and removes all from them but files of those names."""
        self._out = out
        for path in folders:
            mine = stage_path(out, f"left{len(self._folders)}-")
            self._folders.append(mine)  # before it is there: an interrupt forgets nothing
            try:
                io.rename(path, mine)
            except IOFailed as error:
                if isinstance(error.__cause__, FileNotFoundError):  # another run was quicker
                    continue
                raise
            self._prune(mine)

    def candidates(self, name: str) -> Iterator[Path]:
        """Files that earlier runs have finished under `name`, the newest first."""
        for folder in self._folders:
            if io.exists(folder / name):
                yield folder / name

    def nbytes(self) -> int:
        """Bytes on the disk that need no room again: one candidate a name."""
        return sum(
            max((io.status(path).st_size for path in self.candidates(name)), default=0)
            for name in self._names
        )

    def sweep(self) -> None:
        """Removes what was not taken over."""
        for folder in self._folders:
            if io.exists(folder):
                io.rmtree(folder)

    def keep(self, stage: Path) -> tuple[int, list[Path]]:
        """Gives `stage` and the claimed folders up for a later run, their finished files only.

        Returns how many files there are, and the folders.
        """
        kept, count = [], 0
        for number, folder in enumerate([stage, *self._folders]):
            finished = self._prune(folder) if io.exists(folder) else 0
            if finished:
                kept.append(release(folder, self._out, f"left{number}-"))
                count += finished
            elif io.exists(folder):
                io.rmtree(folder)
        return count, kept

    def _prune(self, folder: Path, prefix: str = "") -> int:
        """Removes all but files of our names; how many of those there are."""
        count = 0
        for entry in io.scan_folder(folder):
            name = prefix + entry.name
            path = Path(entry.path)
            mode = io.status(path).st_mode
            if stat.S_ISDIR(mode):
                below = self._prune(path, f"{name}/")
                if not below:
                    io.rmtree(path)
                count += below
            elif stat.S_ISREG(mode) and name in self._names:
                count += 1
            else:
                io.unlink(path)
        return count
