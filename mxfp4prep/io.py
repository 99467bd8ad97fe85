"""Every file operation of the product, one thin function each: the seam where tests make them fail.

Callers write `from mxfp4prep import io` and `io.fsync(fd, where)`; nothing else opens, reads,
writes, renames or removes. Each OSError becomes `IOFailed` with the path as its place and the
OSError as its `__cause__`: who must tell "it exists" from "no permission" finds the errno there.
What is no regular file (FIFO, socket, device, folder) is refused with `InvalidCheckpoint` before it
is opened: it can neither hang the program nor be drained.

Reads are positional and never mapped: when a mapped file shrinks, SIGBUS kills the process.
System calls that a signal interrupts are retried by Python itself (PEP 475).
"""
# ruff: noqa: PTH101, PTH116, PTH104, PTH102, PTH108 - the system calls by their own names

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxfp4prep.errors import InvalidCheckpoint, IOFailed
from mxfp4prep.exchange import exchange_names

_DISK_HINT = "free some space there, or choose an output on another disk"
_EXISTS_HINT = "remove it, or choose another output"
_FAILURES: dict[int, tuple[str, str | None]] = {  # errno -> what is wrong, the way out
    errno.ENOSPC: ("the disk is full", _DISK_HINT),
    errno.EDQUOT: ("the disk quota is used up", _DISK_HINT),
    errno.EFBIG: (
        "the file is larger than this filesystem or process may write",
        "choose an output on another filesystem, or raise the limit (ulimit -f)",
    ),
    errno.EROFS: ("the filesystem is read-only", "choose an output on a writable disk"),
    errno.EACCES: ("permission denied", "check the permissions of the file and its folder"),
    errno.EPERM: ("the system does not permit this", "check the owner of the file and its folder"),
    errno.ENOENT: ("no such file or folder", "check the path; it may have been moved or deleted"),
    errno.ENOTDIR: ("a part of the path is not a folder", "check the path"),
    errno.EEXIST: ("it exists already", _EXISTS_HINT),
    errno.ENOTEMPTY: ("the folder is not empty", _EXISTS_HINT),
    errno.ELOOP: ("the symbolic links of this path run in a circle", "check the links"),
    errno.ENAMETOOLONG: ("the name is too long for the filesystem", "choose a shorter one"),
    errno.EXDEV: (  # an overlay says so of a folder that came with the image
        "the two places are on different filesystems or layers of a container",
        "choose another output",
    ),
    errno.EBUSY: ("the system is using it, as a mount point perhaps", "choose another output"),
    errno.EMFILE: ("too many open files", "use fewer workers, or raise the limit (ulimit -n)"),
    errno.ENFILE: ("the system has too many open files", "close other programs and try again"),
    errno.EIO: ("the disk reported an input/output error", "check the disk and the system log"),
    errno.ESTALE: ("the network filesystem lost the file", "mount it again and retry"),
    errno.EINTR: ("a signal interrupted the system call", "try again"),
    errno.ENOMEM: ("the system is out of memory", "use fewer workers, or close other programs"),
}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def failed(where: object, error: OSError) -> IOFailed:
    """What a person can act on, made from what the system said about `where`."""
    what, hint = _FAILURES.get(error.errno or 0, (error.strerror or str(error) or "failed", None))
    return IOFailed(where, what, hint=hint)


@contextmanager
def _failing_as(where: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failed(where, error) from error
    except ValueError as error:  # a NUL byte or a lone surrogate, which no path can have
        raise InvalidCheckpoint(where, f"not a usable path: {error}") from error


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        found = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise InvalidCheckpoint(path, "not a regular file", found=found)


def open_read(path: Path) -> int:
    """A descriptor for reading the regular file at `path`; symbolic links are followed.

    Raises InvalidCheckpoint for anything but a regular file, IOFailed when it cannot be opened.
    """
    with _failing_as(path):
        _require_regular(path, os.stat(path).st_mode)  # opening a device or FIFO has side effects
        # O_NONBLOCK: were a FIFO put there just now, open would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _require_regular(path, os.fstat(fd).st_mode)
        except BaseException:
            os.close(fd)
            raise
        return fd


def file_size(fd: int, where: object = "file") -> int:
    """The size in bytes of an open file."""
    with _failing_as(where):
        return os.fstat(fd).st_size


@contextmanager
def reading(path: Path, where: object | None = None) -> Iterator[int]:
    """A descriptor as `open_read` gives it, closed at the end.

    where   what an error of closing calls it; a failure inside the block hides such an error
    """
    fd = open_read(path)
    try:
        yield fd
    except BaseException:
        with suppress(IOFailed):
            close(fd, path)
        raise
    close(fd, path if where is None else where)


def open_own(path: Path, owner: int) -> int:
    """A descriptor for reading a regular file of `owner`'s that has one name and is no link.

    Raises IOFailed for any other: bytes that have another name may change under it.
    """
    with _failing_as(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    try:
        with _failing_as(path):
            status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != owner:
            raise IOFailed(path, "not a file of our own", hint="remove it")  # noqa: TRY301
    except BaseException:
        os.close(fd)
        raise
    return fd


def signature(fd: int, where: object = "file") -> tuple[int, int]:
    """Size and time of the last change of an open file: differs once somebody has written to it."""
    with _failing_as(where):
        status = os.fstat(fd)
        return status.st_size, status.st_mtime_ns


def require_unchanged(fd: int, path: Path, before: tuple[int, int], where: object) -> None:
    """Raises IOFailed when an open file has changed since its `signature` was `before`.

    Also when another file stands at `path` by now, or none.
    """
    with _failing_as(where):
        status, there = os.fstat(fd), os.stat(path)
    changed = (status.st_size, status.st_mtime_ns) != before
    if changed or (status.st_dev, status.st_ino) != (there.st_dev, there.st_ino):
        what = "changed" if changed else "was replaced by another file"
        raise IOFailed(where, f"{what} while it was being read", hint="run it again")


def exists(path: Path) -> bool:
    """Whether anything stands at `path`, even a link that leads nowhere."""
    with _failing_as(path):
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder or a link to one."""
    with _failing_as(path):
        try:
            return stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False


def identity(path: Path, where: object | None = None) -> tuple[int, int] | None:
    """Device and number of what `path` leads to, the same under every name that it has.

    None where nothing is.

    where   what an error speaks of, if not `path`
    """
    with _failing_as(path if where is None else where):
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino


def status(path: Path) -> os.stat_result:
    """What the system knows of the file, folder or link at `path` itself."""
    with _failing_as(path):
        return os.lstat(path)


def free_nbytes(path: Path) -> int:
    """Bytes that this user may still write to the filesystem of folder `path`."""
    with _failing_as(path):
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def path_size(path: Path) -> int:
    """The size in bytes of the file at `path`."""
    with _failing_as(path):
        return os.stat(path).st_size


def pread_into(fd: int, view: memoryview, offset: int, where: object) -> None:
    """Fills the whole of `view` (contiguous memory) with the file's bytes from `offset` on.

    Raises IOFailed when the file ends before that: somebody cut it while it was being read.
    """
    view = view.cast("B")
    done = 0
    with _failing_as(where):
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise IOFailed(
                    where,
                    "the file became shorter while being read",
                    found=f"its end at byte {offset + done}",
                    expected=f"{len(view)} bytes from byte {offset} on",
                    hint="wait until the download or copy is finished, then try again",
                )
            done += count


def require_end(fd: int, offset: int, where: object) -> None:
    """Raises IOFailed unless the file ends at `offset`, its size.

    Files of /proc, and some of network filesystems, say 0 bytes and hold more.
    """
    with _failing_as(where):
        if os.pread(fd, 1, offset):
            raise IOFailed(
                where,
                "the file holds more than its size says",
                found=f"a byte after the first {offset}",
                expected="its end",
                hint="put a plain copy of it in its place",
            )


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """The whole content of a regular file.

    Raises InvalidCheckpoint when it has more than `limit` bytes, before reading any; IOFailed when
    its size changes meanwhile.
    """
    fd = open_read(path)
    try:
        nbytes = file_size(fd, path)
        if limit is not None and nbytes > limit:
            raise InvalidCheckpoint(
                path, "the file is too large", found=f"{nbytes} bytes", expected=f"at most {limit}"
            )
        content = bytearray(nbytes)
        pread_into(fd, memoryview(content), 0, path)
        if file_size(fd, path) != nbytes:
            raise IOFailed(path, "the file changed its size while being read", hint="try again")
        require_end(fd, nbytes, path)
    finally:
        close(fd, path)
    return bytes(content)


def create(path: Path) -> int:
    """A descriptor for writing a new file, mode 0666 less the umask.

    Raises IOFailed when anything stands at `path`, even a dangling link.
    """
    with _failing_as(path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(fd: int, view: bytes | bytearray | memoryview, where: object) -> None:
    """Writes every byte of `view` (contiguous memory), in as many calls as the system needs."""
    rest = memoryview(view).cast("B")
    with _failing_as(where):
        while len(rest):
            count = os.write(fd, rest)
            if count == 0:
                raise IOFailed(where, "the system takes no more bytes", hint=_DISK_HINT)
            rest = rest[count:]


def fsync(fd: int, where: object) -> None:
    """Returns once the content of an open file is on the disk."""
    with _failing_as(where):
        os.fsync(fd)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Asks the kernel to begin writing a part of a file to disk, and returns at once.

    POSIX_FADV_DONTNEED starts writeback of dirty pages on Linux and lets go of clean ones, so a
    long conversion does not push everything else out of memory. Advice only: failure is no error.
    """
    with suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def fsync_dir(path: Path) -> None:
    """Returns once the names in a folder are on the disk.

    Filesystems that cannot do this for a folder (some network ones say EINVAL) are let be.
    """
    with _failing_as(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)


def close(fd: int, where: object = "file") -> None:
    """Closes a descriptor. After writing, errors matter: NFS may report a full disk only here."""
    with _failing_as(where):
        os.close(fd)


def chmod(path: Path, mode: int) -> None:
    """Sets the permission bits of a file."""
    with _failing_as(path):
        os.chmod(path, mode)


def rename(source: Path, target: Path) -> None:
    """Gives a file or folder another name in one step; a file at `target` is replaced."""
    with _failing_as(f"{source} -> {target}"):
        os.rename(source, target)


def exchange(first: Path, second: Path) -> bool:
    """Lets two names change places in one step; False, and nothing done, where there is no way to.

    Source: renameat2(2). Network filesystems and systems other than Linux cannot.
    """
    with _failing_as(f"{first} <-> {second}"):
        try:
            exchange_names(first, second)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                raise
            return False
        return True


def mkdir(path: Path, where: Path | None = None) -> None:
    """Makes one folder, mode 0777 less the umask. Atomic: of two processes one gets IOFailed.

    where   what an error speaks of, if not `path`: a hidden name helps nobody
    """
    with _failing_as(path if where is None else where):
        os.mkdir(path)


def unlink(path: Path) -> None:
    """Removes a file or a symbolic link."""
    with _failing_as(path):
        os.unlink(path)


def rmtree(path: Path) -> None:
    """Removes a folder and all in it. Links are never followed, and `path` must not be one."""
    with _failing_as(path):
        try:
            shutil.rmtree(path)
        except OSError as error:  # its filename is often relative to a folder deep inside
            inner = str(error.filename or path)
            raise failed(inner if str(path) in inner else f"{path}: {inner}", error) from error


def scan_folder(path: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name."""
    with _failing_as(path), os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def entry_mode(entry: os.DirEntry[str]) -> int:
    """The st_mode of what an entry leads to, links followed; 0 for a link that leads nowhere."""
    with _failing_as(entry.path):
        try:
            return entry.stat().st_mode
        except FileNotFoundError:
            if entry.is_symlink():
                return 0
            raise
