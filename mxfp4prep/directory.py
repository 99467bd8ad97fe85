"""The files of a checkpoint directory: regular files under UTF-8 names, links followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from mxfp4prep import io
from mxfp4prep.errors import InvalidCheckpoint, Unsupported

SKIPPED_DIRS = frozenset({".git", ".cache"})
"""Top-level folders that are a download tool's bookkeeping, not part of the checkpoint."""


def list_files(root: Path) -> list[str]:
    """Paths of all regular files under `root`, links followed, in sorted order.

    Raises InvalidCheckpoint for a dangling link, a linked folder, or anything that is no file.
    """

    names: list[str] = []
    folders = [(root, PurePosixPath())]
    while folders:
        folder, prefix = folders.pop()
        for entry in io.scan_folder(folder):
            relative = prefix / entry.name
            name = str(relative)
            mode = io.entry_mode(entry)
            if not prefix.parts and entry.name in SKIPPED_DIRS and stat.S_ISDIR(mode):
                continue
            if not is_utf8(name) or os.fsencode(name) != name.encode():
                raise Unsupported(
                    name,
                    "the file's name is not UTF-8: a manifest cannot hold it",
                    hint="rename it, or set PYTHONUTF8=1 where it is UTF-8 and the locale is not",
                )
            if mode == 0:
                raise InvalidCheckpoint(
                    name,
                    f"a link to a file that is not there: {Path(entry.path).readlink()}",
                    hint="download the checkpoint again",
                )
            if stat.S_ISREG(mode):
                names.append(name)
            elif stat.S_ISDIR(mode) and not entry.is_symlink():
                folders.append((Path(entry.path), relative))
            else:
                what = "a linked folder" if stat.S_ISDIR(mode) else "not a regular file"
                raise InvalidCheckpoint(name, what, expected="files and folders only")
    return sorted(names)


def is_utf8(name: str) -> bool:
    """Whether a name from the file system can be written down; others carry surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
