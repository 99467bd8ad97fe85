"""Linux's renameat2(2) with RENAME_EXCHANGE, which Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD = -100  # linux/fcntl.h: paths are relative to the working directory
_RENAME_EXCHANGE = 2  # linux/fs.h


def exchange_names(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> None:
    """What stands at `first` and what stands at `second` change places, in one step.

    Raises OSError as the system call does: EINVAL for a filesystem that cannot do this, ENOSYS for
    a system or C library without it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # musl
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    old, new = os.fsencode(first), os.fsencode(second)
    if call(_AT_FDCWD, old, _AT_FDCWD, new, ctypes.c_uint(_RENAME_EXCHANGE)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(first), None, os.fspath(second))
