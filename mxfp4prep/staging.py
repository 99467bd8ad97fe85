"""A directory that appears whole or not at all: built beside its place, then renamed there.

The staging folder's name says who makes it, so that a later run can sweep what a dead process
left and never what a live one is still writing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.documents import JSON_LIMIT
from mxfp4prep.errors import InvalidCheckpoint, IOFailed, UnsafeOutput
from mxfp4prep.manifest import parse
from mxfp4prep.marks import (
    MANIFEST_NAME,
    SUMS_NAME,
)

_OWNER = re.compile(r"([0-9a-f]{8})-(\d+)-(\d+)$")


def check_output(out: Path, source: Path, *, overwrite: bool | None = None) -> None:
    """Raises UnsafeOutput when `out` exists, contains or lies in `source`, or is a link.

    overwrite   a directory that carries our manifest, and only files that it lists, may be
                replaced; None where the command has no such option
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
        raise _exists(out, overwrite)
    strangers = _strangers(out)
    if strangers:
        raise UnsafeOutput(
            out,
            "holds files that no conversion has put there, --overwrite will not delete them",
            found=", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else ""),
            hint="move them elsewhere first",
        )


def _exists(out: Path, overwrite: bool | None) -> UnsafeOutput:
    hint = "choose another name"
    if overwrite is not None:
        hint += ", or --overwrite to replace a prepared checkpoint"
    return UnsafeOutput(out, "exists already", hint=hint)


def _strangers(out: Path) -> list[str]:
    """Files in a prepared directory that its manifest does not list."""
    try:
        manifest = parse(io.read_bytes(out / MANIFEST_NAME, limit=JSON_LIMIT))
    except (InvalidCheckpoint, IOFailed):
        raise UnsafeOutput(
            out,
            f"is not a prepared checkpoint (no readable {MANIFEST_NAME}): --overwrite will not "
            "touch it",
            hint="remove it yourself if you are sure",
        ) from None
    known = {record.name for record in manifest.files} | {MANIFEST_NAME, SUMS_NAME}
    found = (path for path in out.rglob("*") if not path.is_dir() or path.is_symlink())
    return sorted({path.relative_to(out).as_posix() for path in found} - known)


@contextmanager
def staged(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A fresh folder beside `out`; when the block ends well it becomes `out`, else it vanishes.

    replace   an `out` that exists by then (see `check_output`) makes way; otherwise it is safe

    Raises UnsafeOutput when a living process is writing the same output, or `out` has appeared.
    """
    out = out.resolve()  # a path through `out` itself would lead nowhere once it is set aside
    prefix = f".{out.name}.mxfp4prep-"
    _sweep(out, prefix)
    if out.exists() and not replace:
        raise _exists(out, None)
    me = f"{_host()}-{os.getpid()}-{_started(os.getpid())}"
    stage, aside = out.parent / (prefix + me), out.parent / f"{prefix}old-{me}"
    try:
        io.mkdir(stage)
        _sweep(out, prefix, mine=stage)
        yield stage
        for folder in sorted((p for p in stage.rglob("*") if p.is_dir()), reverse=True):
            io.fsync_dir(folder)
        io.fsync_dir(stage)
        if replace and out.exists():
            io.rename(out, aside)
        elif out.exists() or out.is_symlink():
            raise _exists(out, None)  # noqa: TRY301
        io.rename(stage, out)
        io.fsync_dir(out.parent)
    except BaseException:
        if stage.exists():  # not published
            if aside.exists() and not out.exists():
                io.rename(aside, out)
            io.rmtree(stage)
        raise
    finally:
        # The old output goes last: should this fail or be interrupted, a later run sweeps it.
        if aside.exists() and out.exists():
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
    """Eight hex digits for this machine and process namespace: others' folders are never swept."""
    name = os.uname().nodename
    with suppress(OSError):
        name += str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _started(pid: int) -> int:
    """Start time of process `pid` in clock ticks since boot, or -1 when there is none.

    Source: field 22 of /proc/PID/stat, proc(5).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])
