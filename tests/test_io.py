"""The file seam: real files, pipes, links and a full device; patched system calls for the rest."""

from __future__ import annotations

import array
import errno
import os
import shutil
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mxfp4prep import io
from mxfp4prep.errors import InvalidCheckpoint, IOFailed

FDS = Path("/proc/self/fd")


@contextmanager
def no_leak() -> Iterator[None]:
    before = sorted(FDS.iterdir())
    yield
    assert sorted(FDS.iterdir()) == before


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 4)
    return path


# Reading


def test_pread_into_fills_any_memory_from_any_offset(file: Path) -> None:
    fd = io.open_read(file)
    words = array.array("I", [0] * 8)
    io.pread_into(fd, memoryview(words), 260, file)
    assert words.tobytes() == bytes(range(4, 36))
    assert io.file_size(fd, file) == 1024
    io.pread_into(fd, memoryview(bytearray()), 5000, file)  # nothing wanted, nothing missing
    io.close(fd, file)


def test_pread_into_goes_on_after_short_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, []

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return real(fd, [views[0][:100]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert io.read_bytes(file) == bytes(range(256)) * 4
    assert calls == [0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]


def test_a_file_that_became_shorter_is_named(file: Path) -> None:
    fd = io.open_read(file)
    os.truncate(file, 1000)
    with pytest.raises(IOFailed, match=r"weights.bin: the file became shorter") as caught:
        io.pread_into(fd, memoryview(bytearray(1024)), 0, file)
    assert "byte 1000" in str(caught.value)
    assert caught.value.hint is not None
    io.close(fd)


@pytest.mark.parametrize("nbytes", [0, 1000, 1025])
def test_read_bytes_notices_that_the_size_changed(
    file: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = io.pread_into

    def then_change(fd: int, view: memoryview, offset: int, where: object) -> None:
        if nbytes > 1024:
            real(fd, view, offset, where)
        os.truncate(file, nbytes)
        if nbytes <= 1024:
            real(fd, view, offset, where)

    monkeypatch.setattr(io, "pread_into", then_change)
    with no_leak(), pytest.raises(IOFailed, match=r"weights.bin: the file (became|changed)"):
        io.read_bytes(file)


def test_read_bytes_limit_counts_the_last_byte_and_reads_nothing_beyond(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(io.read_bytes(file, limit=1024)) == 1024
    monkeypatch.setattr(os, "preadv", None)
    with no_leak(), pytest.raises(InvalidCheckpoint, match=r"found 1024 bytes, expected at most"):
        io.read_bytes(file, limit=1023)


def test_read_bytes_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert io.read_bytes(tmp_path / "empty") == b""


# What is no regular file


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        cwd = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have 107 bytes only
        try:
            sock.bind(path.name)
        finally:
            os.chdir(cwd)


SPECIAL: list[tuple[str, Callable[[Path], None]]] = [
    ("a named pipe", a_fifo),
    ("a socket", a_socket),
    ("a folder", lambda path: path.mkdir()),
    ("a character device", lambda path: path.symlink_to("/dev/zero")),
    ("a named pipe", lambda path: (a_fifo(path.with_name("p")), path.symlink_to("p"))[1]),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("kind", "make"), SPECIAL)
@pytest.mark.parametrize("read", [io.open_read, io.read_bytes])
def test_no_regular_file_is_refused_at_once(
    tmp_path: Path,
    kind: str,
    make: Callable[[Path], None],
    read: Callable[[Path], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(tmp_path / "model.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", None)  # not even opened
        with pytest.raises(InvalidCheckpoint, match=rf"model.safetensors: not a regular.*{kind}"):
            read(tmp_path / "model.safetensors")


@pytest.mark.timeout(20)
def test_a_fifo_put_there_after_the_look_neither_hangs_nor_leaks(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_fifo(tmp_path / "fifo")
    before = file.stat()
    with no_leak(), monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda path, **options: before)
        with pytest.raises(InvalidCheckpoint, match="named pipe"):
            io.open_read(tmp_path / "fifo")


def test_links_to_files_are_followed_for_reading(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    assert io.read_bytes(tmp_path / "link") == file.read_bytes()


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("absent", "no such file or folder"),
        ("dangling", "no such file or folder"),
        ("loop", "run in a circle"),
        ("weights.bin/below", "not a folder"),
        ("x" * 300, "too long"),
    ],
)
def test_what_cannot_be_opened_is_said_in_plain_words(
    file: Path, tmp_path: Path, name: str, fragment: str
) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(IOFailed, match=fragment) as caught:
        io.open_read(tmp_path / name)
    assert caught.value.where == str(tmp_path / name)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_path_that_cannot_exist_is_the_checkpoints_fault(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidCheckpoint, match="not a usable path") as caught:
        io.open_read(tmp_path / name)
    assert str(caught.value).isprintable()


# Writing


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_create_honours_the_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        io.close(io.create(tmp_path / "new"))
        io.mkdir(tmp_path / "folder")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o777 & ~umask


def test_create_replaces_nothing_and_follows_nothing(file: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for path in (file, tmp_path / "dangling"):
        with pytest.raises(IOFailed, match="exists already") as caught:
            io.create(path)
        assert isinstance(caught.value.__cause__, FileExistsError)
    assert len(file.read_bytes()) == 1024
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_write_all_goes_on_after_short_writes(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:step]))
    fd = io.create(tmp_path / "new")
    words = array.array("I", range(100))
    io.write_all(fd, memoryview(words), "new")
    io.write_all(fd, b"", "new")
    io.write_all(fd, b"end", "new")
    io.write_all(fd, bytearray(b"!"), "new")
    io.fsync(fd, "new")
    io.close(fd)
    assert (tmp_path / "new").read_bytes() == words.tobytes() + b"end!"


@pytest.mark.timeout(20)
def test_write_all_ends_when_the_system_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, view: 0)
    with pytest.raises(IOFailed, match="new: the system takes no more"):
        io.write_all(1, b"x", "new")


def test_a_full_disk_says_how_to_go_on() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(IOFailed, match=r"out.part: the disk is full") as caught:
        io.write_all(fd, b"x", "out.part")
    os.close(fd)
    assert caught.value.exit_code == 6
    assert "another disk" in (caught.value.hint or "")


@pytest.mark.timeout(30)
def test_signals_do_not_tear_a_write() -> None:
    content = os.urandom(1 << 20)
    reader, writer = os.pipe()
    ticks, got = [], bytearray()

    def drain() -> None:
        while piece := os.read(reader, 4096):
            got.extend(piece)

    thread = threading.Thread(target=drain)
    old = signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        thread.start()
        io.write_all(writer, content, "pipe")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        os.close(writer)
        thread.join()
        os.close(reader)
    assert bytes(got) == content


# Folders and names


def test_rename_replaces_a_file_and_moves_a_folder(file: Path, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    io.rename(file, tmp_path / "old")
    assert (tmp_path / "old").stat().st_size == 1024
    io.mkdir(tmp_path / "a")
    io.mkdir(tmp_path / "a" / "inside")
    io.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "inside").is_dir()
    io.mkdir(tmp_path / "c")
    with pytest.raises(IOFailed, match="not empty") as caught:
        io.rename(tmp_path / "c", tmp_path / "b")
    assert str(tmp_path / "c") in str(caught.value)
    assert str(tmp_path / "b") in str(caught.value)


def test_exchange_swaps_two_folders_in_one_step_or_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"was-{name}").touch()

    def found() -> list[str]:
        return [p.name for name in ("first", "second") for p in (tmp_path / name).iterdir()]

    assert io.exchange(tmp_path / "first", tmp_path / "second")
    assert found() == ["was-second", "was-first"]
    with pytest.raises(IOFailed, match="no such file or folder") as caught:
        io.exchange(tmp_path / "first", tmp_path / "nowhere")
    assert caught.value.where == f"{tmp_path / 'first'} <-> {tmp_path / 'nowhere'}"
    monkeypatch.setattr("mxfp4prep.exchange.ctypes.CDLL", lambda *_args, **_options: object())
    assert not io.exchange(tmp_path / "first", tmp_path / "second")  # a C library without it
    monkeypatch.undo()
    for number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        monkeypatch.setattr(io, "exchange_names", raiser(number))
        assert not io.exchange(tmp_path / "first", tmp_path / "second")
    assert found() == ["was-second", "was-first"]


def test_mkdir_lets_one_of_two_succeed(tmp_path: Path) -> None:
    io.mkdir(tmp_path / "stage")
    with pytest.raises(IOFailed, match="exists already"):
        io.mkdir(tmp_path / "stage")
    with pytest.raises(IOFailed, match="no such file or folder"):
        io.mkdir(tmp_path / "absent" / "stage")


def test_rmtree_never_follows_a_link(file: Path, tmp_path: Path) -> None:
    stage, outside = tmp_path / "stage", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (stage / "deep").mkdir(parents=True)
    (stage / "deep" / "link").symlink_to(outside)
    (stage / "part").touch()
    (tmp_path / "link").symlink_to(outside)
    io.rmtree(stage)
    with pytest.raises(IOFailed, match="symbolic link"):
        io.rmtree(tmp_path / "link")
    assert not stage.exists()
    assert (outside / "precious").exists()


def test_rmtree_names_the_file_that_would_not_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "stuck").touch()
    monkeypatch.setattr(os, "unlink", raiser(errno.EACCES))
    with pytest.raises(IOFailed, match=r"stage.*stuck: permission denied"):
        io.rmtree(tmp_path / "stage")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(), "there: failed"),
        (OSError("words of its own"), "there: words of its own"),
        (OSError(errno.ECHILD, "No child processes"), "there: No child processes"),
    ],
)
def test_failures_without_a_plain_word_of_ours_keep_the_systems(
    error: OSError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> None:
        raise error

    assert str(io.failed("there", error)) == message
    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(IOFailed) as caught:
        io.rmtree(Path("there"))
    assert str(caught.value) == message


def test_unlink_removes_the_link_not_its_target(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    io.unlink(tmp_path / "link")
    assert file.exists()
    io.unlink(file)
    assert not file.exists()


def test_scan_folder_sorts_and_entry_mode_follows_links(file: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "Folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    entries = {entry.name: entry for entry in io.scan_folder(tmp_path)}
    assert list(entries) == ["Folder", "dangling", "link", "loop", "weights.bin"]
    assert io.entry_mode(entries["dangling"]) == 0
    assert stat.S_ISREG(io.entry_mode(entries["link"]))
    assert stat.S_ISDIR(io.entry_mode(entries["Folder"]))
    with pytest.raises(IOFailed, match="loop: the symbolic links of this path run in a circle"):
        io.entry_mode(entries["loop"])
    file.unlink()
    with pytest.raises(IOFailed, match=r"weights.bin: no such file"):
        io.entry_mode(entries["weights.bin"])
    with pytest.raises(IOFailed, match="not a folder"):
        io.scan_folder(Path("/dev/null"))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_fsync_dir_lets_filesystems_be_that_cannot(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    io.fsync_dir(tmp_path)
    assert synced == [True]
    monkeypatch.setattr(os, "fsync", raiser(number))
    with no_leak():
        io.fsync_dir(tmp_path)
    with pytest.raises(IOFailed):  # of a file it is a failure
        io.fsync(0, "new")


def test_start_writeback_is_advice_for_the_part_given(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advised.append(arguments))
    io.start_writeback(7, 4096, 512)
    assert advised == [(7, 4096, 512, os.POSIX_FADV_DONTNEED)]
    monkeypatch.undo()
    fd = io.open_read(file)
    io.start_writeback(fd, 0, 1024)
    io.close(fd)
    assert file.read_bytes() == bytes(range(256)) * 4
    reader, writer = os.pipe()
    io.start_writeback(reader, 0, 1024)  # a pipe takes no such advice, and that is no failure
    os.close(reader)
    os.close(writer)


def test_fsync_dir_is_for_folders(file: Path) -> None:
    with pytest.raises(IOFailed, match="not a folder"):
        io.fsync_dir(file)


# Every operation turns what the system says into our error


def raiser(number: int) -> Callable[..., object]:
    def fail(*arguments: object, **options: object) -> object:
        path = next((a for a in arguments if isinstance(a, str | Path)), None)
        raise OSError(number, os.strerror(number), None if path is None else str(path))

    return fail


OPERATIONS: list[tuple[str, Callable[[Path], object]]] = [
    ("stat", lambda path: io.open_read(path)),
    ("open", lambda path: io.open_read(path)),
    ("fstat", lambda path: io.open_read(path)),
    ("fstat", lambda path: io.file_size(0, path)),
    ("preadv", lambda path: io.read_bytes(path)),
    ("open", lambda path: io.create(path)),
    ("write", lambda path: io.write_all(0, b"x", path)),
    ("fsync", lambda path: io.fsync(0, path)),
    ("stat", lambda path: io.identity(path)),
    ("stat", lambda path: io.identity(Path("/"), path)),
    ("pread", lambda path: io.require_end(0, 0, path)),
    ("open", lambda path: io.fsync_dir(path.parent)),
    ("fsync", lambda path: io.fsync_dir(path.parent)),
    ("rename", lambda path: io.rename(path, path)),
    ("exchange_names", lambda path: io.exchange(path, path)),
    ("mkdir", lambda path: io.mkdir(path)),
    ("unlink", lambda path: io.unlink(path)),
    ("scandir", lambda path: io.scan_folder(path.parent)),
    ("rmtree", lambda path: io.rmtree(path)),
]
WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "larger than",
    errno.EACCES: "permission denied",
    errno.EROFS: "read-only",
    errno.EIO: "input/output error",
    errno.EMFILE: "too many open files",
    errno.ESTALE: "network filesystem",
    errno.EXDEV: "different filesystems",
    errno.EBUSY: "mount point",
    errno.ECHILD: "No child processes",  # none of ours: the system's own words
}


@pytest.mark.parametrize("number", WORDS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize(("call", "operation"), OPERATIONS)
def test_every_failure_has_a_place_a_cause_and_a_way_out(
    file: Path,
    call: str,
    operation: Callable[[Path], object],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with no_leak(), monkeypatch.context() as patched:
        owner = {"rmtree": shutil, "exchange_names": io}.get(call, os)
        patched.setattr(owner, call, raiser(number))
        with pytest.raises(IOFailed) as caught:
            operation(file)
    error = caught.value
    assert WORDS[number] in str(error)
    assert str(file.parent) in error.where
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == number
    assert error.exit_code == 6
    if number != errno.ECHILD:
        assert error.hint


def test_close_reports_a_disk_that_was_full_all_along(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", raiser(errno.ENOSPC))
        with pytest.raises(IOFailed, match=r"out.part: the disk is full"):
            io.close(0, "out.part")


def test_interruptions_pass_through_and_leak_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> object:
        raise KeyboardInterrupt

    for call, operation in [("preadv", io.read_bytes), ("fstat", io.open_read)]:
        with no_leak(), monkeypatch.context() as patched:
            patched.setattr(os, call, interrupt)
            with pytest.raises(KeyboardInterrupt):
                operation(file)
