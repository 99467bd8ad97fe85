"""A directory that appears whole or not at all: built beside its place, then renamed there.

The staging folder's name says who makes it, so that a later run can sweep what a dead process
left and never what a live one is still writing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.errors import UnsafeOutput
from mxfp4prep.manifest import MANIFEST_NAME

_OWNER = re.compile(r"([0-9a-f]{8})-(\d+)-(\d+)$")


def check_output(out: Path, source: Path, *, overwrite: bool = False) -> None:
    """Raises UnsafeOutput when `out` exists, contains or lies in `source`, or is a link.

    overwrite   a directory that carries our manifest may be replaced; nothing else ever is
    """
    if out.is_symlink():
        raise UnsafeOutput(out, "is a link", hint="give the real path")
    inside, around = out.resolve(), source.resolve()
    if inside == around or around in inside.parents:
        raise UnsafeOutput(out, f"lies in the source {source}", hint="choose a place beside it")
    if inside in around.parents:
        raise UnsafeOutput(out, f"contains the source {source}", hint="choose a place beside it")
    if not out.parent.is_dir():
        raise UnsafeOutput(
            out, f"no directory {out.parent} to put it in", hint=f"mkdir -p {out.parent}"
        )
    if not out.exists():
        return
    if not overwrite:
        raise UnsafeOutput(
            out,
            "exists already",
            hint="choose another name, or --overwrite to replace a prepared checkpoint",
        )
    if not (out.is_dir() and (out / MANIFEST_NAME).is_file()):
        raise UnsafeOutput(
            out,
            f"is not a prepared checkpoint (no {MANIFEST_NAME}): --overwrite will not touch it",
            hint="remove it yourself if you are sure",
        )


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A fresh folder beside `out`; when the block ends well it becomes `out`, else it vanishes.

    An `out` that exists (checked by `check_output`) is replaced. Raises UnsafeOutput when a
    living process is writing the same output.
    """
    prefix = f".{out.name}.mxfp4prep-"
    _sweep(out, prefix)
    me = f"{_host()}-{os.getpid()}-{_started(os.getpid())}"
    stage = out.parent / (prefix + me)
    io.mkdir(stage)
    try:
        _sweep(out, prefix, mine=stage)
        yield stage
        io.fsync_dir(stage)
        _publish(stage, out, out.parent / f"{prefix}old-{me}")
    except BaseException:
        io.rmtree(stage)
        raise
    io.fsync_dir(out.parent)


def _publish(stage: Path, out: Path, aside: Path) -> None:
    if not out.exists():
        io.rename(stage, out)
        return
    io.rename(out, aside)
    try:
        io.rename(stage, out)
    except BaseException:
        io.rename(aside, out)
        raise
    io.rmtree(aside)


def _sweep(out: Path, prefix: str, mine: Path | None = None) -> None:
    """Removes staging folders of dead processes; refuses when a living one is at work."""
    for path in sorted(out.parent.glob(f"{_escape(prefix)}*")):
        owner = _OWNER.search(path.name)
        if path == mine or owner is None or not path.is_dir() or path.is_symlink():
            continue
        host, pid, started = owner.groups()
        if host == _host() and _started(int(pid)) != int(started):
            if path.name.startswith(f"{prefix}old-") and not out.exists():
                io.rename(path, out)
            else:
                io.rmtree(path)
            continue
        raise UnsafeOutput(
            out,
            f"another run is writing it: found {path.name}",
            hint="wait for it; if no such process lives, remove that folder",
        )


def _escape(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


def _host() -> str:
    """Eight hex digits for this machine's name: folders of other hosts are never swept."""
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]


def _started(pid: int) -> int:
    """Start time of process `pid` in clock ticks since boot, or -1 when there is none.

    Source: field 22 of /proc/PID/stat, proc(5).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])
