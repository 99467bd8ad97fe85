"""The one file that an audit may write, its HTML page: whole or not at all, nothing else lost."""

from __future__ import annotations

import os
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.errors import UnsafeOutput
from mxfp4prep.marks import PAGE_GENERATOR

_SUFFIXES = (".html", ".htm")
_HEAD = b"<!doctype html"
_OURS = f'content="{PAGE_GENERATOR}"'.encode()
_HEAD_NBYTES = 1024
"""Where both stand in a page of ours."""
_PARTIAL = ".mxfp4prep.part"


def check_page_file(path: Path) -> None:
    """Raises UnsafeOutput unless a page may be written at `path`: its folder is there, its name
    ends in .html, and what stands there already, if anything, is the page of an audit."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UnsafeOutput(
            path, "not the name of a page", expected="a name that ends in .html", hint="--html FILE"
        )
    if not path.parent.is_dir():
        raise UnsafeOutput(path, f"no such directory: {path.parent}", hint=f"mkdir {path.parent}")
    if path.is_symlink() or path.exists():
        if not path.is_file() or path.is_symlink():
            raise UnsafeOutput(path, "stands there already and is not a regular file")
        if not _starts_as_page(path):
            raise UnsafeOutput(
                path,
                "stands there already and is not the page of an audit",
                hint="choose another name",
            )


def _starts_as_page(path: Path) -> bool:
    fd = io.open_read(path)
    try:
        head = bytearray(min(_HEAD_NBYTES, io.file_size(fd, path)))
        io.pread_into(fd, memoryview(head), 0, path)
    finally:
        io.close(fd, path)
    return head.startswith(_HEAD) and _OURS in head


def write_page_file(path: Path, text: str) -> None:
    """Writes `text` at `path` in one step: a reader sees the old page or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    fd = io.create(partial)
    try:
        try:
            io.write_all(fd, text.encode(), path)
            io.fsync(fd, path)
        finally:
            io.close(fd, path)
        check_page_file(path)  # an audit may take minutes: somebody may have put a file there
        io.rename(partial, path)
    except BaseException:
        io.unlink(partial)
        raise
    io.fsync_dir(path.parent)
