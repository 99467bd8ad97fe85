"""The one file that an audit may write, its HTML page: whole or not at all, nothing else lost."""

from __future__ import annotations

import os
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.errors import UnsafeOutput

_SUFFIXES = (".html", ".htm")
_HEAD = b"<!doctype html"
_PARTIAL = ".mxfp4prep.part"


def check_page_file(path: Path) -> None:
    """Raises UnsafeOutput unless a page may be written at `path`: its folder is there, its name
    ends in .html, and what stands there already, if anything, is an HTML page."""
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
                path, "stands there already and is not an HTML page", hint="choose another name"
            )


def _starts_as_page(path: Path) -> bool:
    fd = io.open_read(path)
    try:
        if io.file_size(fd, path) < len(_HEAD):
            return False
        head = bytearray(len(_HEAD))
        io.pread_into(fd, memoryview(head), 0, path)
    finally:
        io.close(fd, path)
    return bytes(head).lower() == _HEAD


def write_page_file(path: Path, text: str) -> None:
    """Writes `text` at `path` in one step: a reader sees the old page or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    fd = io.create(partial)
    try:
        try:
            io.write_all(fd, text.encode(), partial)
            io.fsync(fd, partial)
        finally:
            io.close(fd, partial)
        io.rename(partial, path)
    except BaseException:
        io.unlink(partial)
        raise
    io.fsync_dir(path.parent)
