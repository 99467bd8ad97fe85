"""stdout is the result, stderr the story: how both are written, and what happens when they break.

A reader that goes away (`| head -1`) has what it wanted: the rest is dropped and the exit code
stays the answer's. A result that cannot be written (/dev/full, a closed stdout) is an I/O failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from mxfp4prep.errors import IOFailed, printable


def prepare() -> None:
    """Makes stdin, stdout and stderr usable: no missing descriptor, no character that cannot be
    written.

    A descriptor that was closed is filled with /dev/null, or the next file that is opened would
    become stdout. Closed stdout gets one that is not writable, so that a result fails there.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free descriptor, which is fd
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def emit(text: str) -> None:
    """Writes `text` to stdout, all of it, now. Raises as `emit_all` does."""
    emit_all((text,))


def emit_all(texts: Iterable[str]) -> None:
    """Writes every text to stdout, one after the other, now.

    Raises IOFailed when it cannot be written, except to a reader that has gone.
    """
    try:
        for text in texts:
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        raise IOFailed("stdout", f"the result cannot be written: {error.strerror}") from error


def tell(line: str) -> None:
    """Writes one line to stderr. A story that nobody can hear is no failure."""
    try:
        sys.stderr.write(printable(line) + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def settle() -> None:
    """Leaves nothing in stdout's and stderr's buffers that could fail when Python exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)


def discard(stream: TextIO) -> None:
    """Sends what is left in the buffer of `stream`, and all that follows, nowhere."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        return  # not a real file: there is no buffer that could fail later
