"""A directory that appears whole or not at all: built beside its place, then renamed there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.documents import JSON_LIMIT
from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest, Mxfp4PrepError, UnsafeOutput
from mxfp4prep.leftovers import Leftovers, abandoned, release, stage_path, was_set_aside
from mxfp4prep.manifest import parse
from mxfp4prep.marks import (
    MANIFEST_NAME,
    SUMS_NAME,
)


def check_output(out: Path, source: Path, *, overwrite: bool | None = None) -> None:
    """Raises UnsafeOutput when `out` exists, contains or lies in `source`, or is a link.

    overwrite   a directory that carries our manifest, and only files that it lists, may be
                replaced; None where the command has no such option
    """
    if io.exists(out) and stat.S_ISLNK(io.status(out).st_mode):
        raise UnsafeOutput(out, "is a link", hint="give the real path")
    inside, around = real_path(out), real_path(source)
    # by number, too: a bind mount, or a disk that takes a and A for one, has several paths to it
    there = {io.identity(path, out) for path in (inside, *inside.parents)}
    if inside == around or around in inside.parents or io.identity(around) in there - {None}:
        raise UnsafeOutput(out, f"lies in the source {source}", hint="choose a place beside it")
    if inside in around.parents:
        raise UnsafeOutput(out, f"contains the source {source}", hint="choose a place beside it")
    if not io.is_folder(out.parent):
        raise UnsafeOutput(
            out, f"no directory {out.parent} to put it in", hint=f"mkdir -p {out.parent}"
        )
    if not io.exists(out):
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
        if not io.is_folder(out) or not io.exists(out / MANIFEST_NAME):
            raise InvalidManifest(out, f"no {MANIFEST_NAME}")
        manifest = parse(io.read_bytes(out / MANIFEST_NAME, limit=JSON_LIMIT))
    except InvalidCheckpoint:
        raise UnsafeOutput(
            out,
            f"is not a prepared checkpoint (no readable {MANIFEST_NAME}): --overwrite will not "
            "touch it",
            hint="remove it yourself if you are sure",
        ) from None
    known = {record.name for record in manifest.files} | {MANIFEST_NAME, SUMS_NAME}
    found = (path for path, status in _walk(out) if not stat.S_ISDIR(status.st_mode))
    return sorted({path.relative_to(out).as_posix() for path in found} - known)


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All that is under `root`, a folder before what is in it; links are not followed."""
    folders = [root]
    while folders:
        for entry in io.scan_folder(folders.pop()):
            path = Path(entry.path)
            status = io.status(path)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)


@contextmanager
def staged(
    out: Path, *, replace: bool = False, leftovers: Leftovers | None = None
) -> Iterator[Path]:
    """A fresh folder beside `out`; when the block ends well it becomes `out`, else it vanishes.

    replace     an `out` that exists by then (see `check_output`) makes way; otherwise it is safe
    leftovers   takes what dead runs have left, which is swept otherwise, and keeps what this run
                has finished, should it fail

    Raises UnsafeOutput when a living process is writing the same output, or `out` has appeared or
    changed meanwhile.
    """
    out = real_path(out)  # a path through `out` itself would lead nowhere once it is set aside
    _put_back(out)
    if io.exists(out) and not replace:
        raise _exists(out, None)
    stage, aside = stage_path(out), stage_path(out, "old-")
    made: tuple[int, int] | None = None
    try:
        io.mkdir(stage, out.parent)
        made = io.identity(stage, out)
        # Only now: of two that begin at once, each sees the other's folder, and none sweeps.
        left = abandoned(out, mine=stage)
        before = _content(out)
        _sweep(left if leftovers is None else [p for p in left if was_set_aside(out, p)])
        if leftovers is not None:
            leftovers.claim(out, [p for p in left if not was_set_aside(out, p)])
        yield stage
        _publish(stage, out, aside, before)
        _sweep([path for path in (stage, aside) if io.exists(path)])
        if leftovers is not None:
            leftovers.sweep()
    except BaseException as error:
        # What cannot be cleaned up hides no error: a later run sweeps it.
        with suppress(Mxfp4PrepError, MemoryError):
            _give_up(stage, out, aside, leftovers, error, made)
        raise


def real_path(path: Path) -> Path:
    """`path` without links on the way. Raises UnsafeOutput where they run in a circle."""
    try:
        return path.resolve()
    except RuntimeError as error:  # pathlib's word for it until Python 3.12
        raise UnsafeOutput(path, str(error), hint="give the real path") from error


def _put_back(out: Path) -> None:
    """Gives an output its name again that a run has set aside before it was killed."""
    for folder in abandoned(out):
        if was_set_aside(out, folder) and not io.exists(out):
            io.rename(folder, out)


def _content(out: Path) -> list[tuple[Path, int, int]] | None:
    """Name, size and time of all in a folder: another list once anybody has touched it."""
    if not io.exists(out):
        return None
    return sorted((path, status.st_size, status.st_mtime_ns) for path, status in _walk(out))


def _publish(
    stage: Path, out: Path, aside: Path, before: list[tuple[Path, int, int]] | None
) -> None:
    """Gives `stage` the name `out`; an old output is at `stage` then, or at `aside`."""
    below = [path for path, status in _walk(stage) if stat.S_ISDIR(status.st_mode)]
    for folder in (*reversed(below), stage):
        io.fsync_dir(folder)
    if io.exists(out):
        if before is None:
            raise _exists(out, None)
        if not io.is_folder(out) or _content(out) != before:
            raise UnsafeOutput(
                out,
                "has changed while its replacement was being written",
                hint="look at what came there, then try again",
            )
        if io.exchange(stage, out):
            io.fsync_dir(out.parent)
            return
        io.rename(out, aside)
    io.rename(stage, out)
    io.fsync_dir(out.parent)


def _sweep(folders: list[Path]) -> None:
    for folder in folders:
        io.rmtree(folder)


def _give_up(
    stage: Path,
    out: Path,
    aside: Path,
    leftovers: Leftovers | None,
    error: BaseException,
    made: tuple[int, int] | None,
) -> None:
    """Leaves the old output or the new one, and of the rest only what `leftovers` is to keep.

    made    the folder that was staged, by its number: it may have become the output
    """
    if made is not None and io.identity(out) == made:
        error.add_note(f"{out} stands whole all the same: check it with `mxfp4prep verify`")
        for old in (stage, aside):
            if io.exists(old):
                given_up = release(old, out, "old-")
                io.fsync_dir(out.parent)  # before the old output goes
                io.rmtree(given_up)
        if leftovers is not None:
            leftovers.sweep()
        return
    if io.exists(aside) and not io.exists(out):
        io.rename(aside, out)
    if leftovers is None:
        if io.exists(stage):
            io.rmtree(release(stage, out))
        return
    count, folders = leftovers.keep(stage)
    if count:
        places = ", ".join(map(str, folders))
        error.add_note(
            f"kept for --resume: {count} finished files in {places}; without --resume the next "
            "run removes them"
        )
