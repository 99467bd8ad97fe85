"""Outputs that go away, are full, or were never there: no traceback, no half result, a code."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from processes import environment
from quark_factory import write_checkpoint
from sparse import linear, write_sparse

from mxfp4prep import cli, prepared, verify
from mxfp4prep.report import streams

COMMAND = [sys.executable, "-m", "mxfp4prep"]
PIPE_NBYTES = 65536
"""What a pipe holds: a longer result still waits in it when its reader leaves."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose audits are longer than a pipe, and a small one, prepared."""
    root = tmp_path_factory.mktemp("pipes")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(300):
        for part in ("gate_proj", "up_proj", "down_proj"):
            n, k = 64 + 32 * (layer % 40), 256 + 32 * (layer // 5)
            shapes |= linear(f"model.layers.{layer}.odd_{layer}.{part}", n, k)
    write_sparse(root / "large", [shapes])
    linears = {"model.layers.0.mlp.down_proj": (256, 640)}
    write_checkpoint(root / "model", linears)
    assert cli.main(["convert", str(root / "model"), str(root / "prepared"), "-q"]) == 0
    return root


def bash(place: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A bash script in which `$RUN` is the command."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        cwd=place,
        capture_output=True,
        text=True,
        env=environment(RUN=" ".join(COMMAND)),
        timeout=120,
        check=False,
    )


# --- a reader that leaves -----------------------------------------------------------------------

LONG = [  # (words, exit code, how the first line begins)
    ("audit large", 1, "large: llama, "),
    ("audit large --format json", 1, "{"),
    ("audit large --format csv", 1, "layer,"),
    ("audit large --tp 1", 0, "large: llama, "),
]


@pytest.mark.parametrize(("words", "code", "first"), LONG)
def test_head_gets_its_line_and_the_code_stays_the_answers(
    place: Path, words: str, code: int, first: str, tried: Callable[..., None]
) -> None:
    result = bash(place, f"$RUN {words} | head -1; echo ${{PIPESTATUS[0]}}")
    line, told = result.stdout.splitlines()
    assert line.startswith(first)
    assert (told, result.stderr) == (str(code), "")
    tried("C3")


def test_these_results_are_longer_than_a_pipe(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, _, _ in LONG:
        name = words.split()[1]
        cli.main([words.split()[0], str(place / name), *words.split()[2:]])
        assert len(capsys.readouterr().out) > PIPE_NBYTES, words


@pytest.mark.parametrize(
    ("words", "code"), [("audit model --tp 1", 0), ("audit large", 1), ("--help", 0)]
)
def test_a_reader_that_never_came(
    place: Path, words: str, code: int, tried: Callable[..., None]
) -> None:
    result = bash(place, f"$RUN {words} | head -0; echo ${{PIPESTATUS[0]}}")
    assert (result.stdout.split()[-1], result.stderr) == (str(code), "")
    tried("C3")


# --- a result that cannot be written ------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("audit model --tp 1", "> /dev/full"),
        ("audit large --format json", "> /dev/full"),
        ("audit large --format csv", "> /dev/full"),
        ("show prepared", "> /dev/full"),
        ("show prepared --format json", ">&-"),
        ("audit model --tp 1", ">&-"),
        ("--help", "> /dev/full"),
        ("--version", ">&-"),
    ],
)
def test_a_result_that_cannot_be_written_is_a_failure(
    place: Path, words: str, target: str, tried: Callable[..., None]
) -> None:
    result = bash(place, f"$RUN {words} {target}")
    assert result.returncode == 6
    first, *hints = result.stderr.splitlines()
    assert first.startswith(("error: stdout: the result cannot", "error: output: the disk is full"))
    assert all(hint.startswith("hint: ") for hint in hints)
    tried("C3")


def test_what_waits_in_the_buffer_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "_run", lambda _words: print("result") or 0)
    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main([]) == 6


def test_a_page_never_goes_to_a_device(
    place: Path, capsys: pytest.CaptureFixture[str], tried: Callable[..., None]
) -> None:
    link = place / "link.html"
    link.symlink_to("/dev/full")
    for name in ("/dev/full", "/dev/stdout", "/dev/null", str(link)):
        assert cli.main(["audit", str(place / "model"), "--html", name]) == 5
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {name}: ")
        tried("C3")
    assert link.is_symlink()


@pytest.mark.parametrize("target", ["> /dev/full", ">&-"])
def test_a_page_is_whole_or_absent_where_the_text_fails(
    place: Path, tmp_path: Path, target: str, tried: Callable[..., None]
) -> None:
    page = tmp_path / "page.html"
    result = bash(place, f"$RUN audit large --html {page} {target}")
    assert result.returncode == 6
    assert not page.exists() or page.read_text().rstrip().endswith("</html>")
    assert set(tmp_path.iterdir()) <= {page}
    tried("C3")


# --- a story that nobody hears, an input that is not there --------------------------------------


@pytest.mark.parametrize("target", ["2>&-", "2>/dev/full"])
def test_a_story_that_nobody_hears_is_none(
    place: Path, target: str, tried: Callable[..., None]
) -> None:
    result = bash(place, f"$RUN audit model --tp 1 {target}; $RUN audit /nowhere {target}; echo $?")
    assert result.stdout.startswith("model: llama, ")
    assert (result.stdout.split()[-1], result.stderr) == ("3", "")
    tried("C3", 2)


def test_stdin_is_not_read(place: Path, tried: Callable[..., None]) -> None:
    closed = bash(place, "$RUN audit model --tp 1 <&-")
    endless = bash(place, "$RUN audit model --tp 1 < /dev/zero")
    assert closed.returncode == endless.returncode == 0
    assert closed.stdout == endless.stdout
    assert closed.stdout.startswith("model: llama, ")
    tried("C3", 2)


def test_closed_streams_never_become_files(
    place: Path, tmp_path: Path, tried: Callable[..., None]
) -> None:
    """What is opened next gets their numbers, and a line for stderr would stand in a shard."""
    result = bash(place, f"$RUN convert model {tmp_path}/out --workers 1 <&- >&- 2>&-")
    assert result.returncode == 6
    found = prepared.open_prepared(tmp_path / "out")
    assert verify.verify(found.root, "deep", place / "model").problems == ()
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.safetensors")} == {
        p.name: p.read_bytes() for p in (place / "prepared").glob("*.safetensors")
    }
    tried("C3")


class Standard:
    """fds 0, 1 and 2 of this process, put back on leaving."""

    def __init__(self, *closed: int) -> None:
        self.closed = closed

    def __enter__(self) -> None:
        self.kept = {fd: os.dup(fd) for fd in range(3)}
        for fd in self.closed:
            os.close(fd)

    def __exit__(self, *_error: object) -> None:
        for fd, copy in self.kept.items():
            os.dup2(copy, fd)
            os.close(copy)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_closed_descriptors_are_filled(closed: Sequence[int]) -> None:
    with Standard(*closed):
        streams.prepare()
        found = [os.fstat(fd) for fd in closed]
        writable = {fd: _can_write(fd) for fd in closed}
        beyond = os.dup(0)
        os.close(beyond)
    assert beyond > 2
    assert all(os.path.samestat(status, Path(os.devnull).stat()) for status in found)
    assert writable.get(1, False) is False
    assert writable.get(2, True) is True


def _can_write(fd: int) -> bool:
    try:
        os.write(fd, b"x")
    except OSError:
        return False
    return True
