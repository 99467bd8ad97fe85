"""Every command on every kind of output: wide, narrow, dumb, plain, ASCII, a file.

In this process, on real terminals (a pty with a size) and real pipes: what is shown is what came
out at their other end. The same words must stand there everywhere, broken and painted otherwise.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from quark_factory import write_checkpoint
from test_report import displayed, validate

from mxfp4prep import cli, demo

ESC = "\x1b"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Kind:
    """Where a command's output goes. columns: of a terminal; None for a pipe."""

    name: str
    columns: int | None
    encoding: str = "utf-8"
    environ: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


KINDS = [
    Kind("terminal-40", 40),
    Kind("terminal-80", 80),
    Kind("terminal-200", 200),
    Kind("terminal-no-colour", 80, environ={"NO_COLOR": "1"}),
    Kind("terminal-dumb", 80, environ={"TERM": "dumb"}),
    Kind("terminal-ascii-40", 40, encoding="ascii"),
    Kind("pipe", None),
    Kind("pipe-latin-1", None, encoding="latin-1"),
]
PLAIN = KINDS[-2]


class Shown:
    """What a command line wrote, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shown]:
    """Runs a command line with stdout and stderr of a kind."""

    def call(kind: Kind, *words: object) -> Shown:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        for name, value in kind.environ.items():
            monkeypatch.setenv(name, value)
        with _opened(kind) as (out, err), monkeypatch.context() as streams:
            for name, stream in (("stdout", out.file), ("stderr", err.file)):
                streams.setattr(sys, name, stream)
                streams.setattr(sys, f"__{name}__", stream)
            code = cli.main([str(word) for word in words])
        return Shown(code, out.text(kind.encoding), err.text(kind.encoding))

    return call


class _Channel:
    """A pty or a pipe whose other end is read as it is written."""

    def __init__(self, kind: Kind) -> None:
        if kind.columns is None:
            self._reader, writer = os.pipe()
        else:
            self._reader, writer = pty.openpty()
            size = struct.pack("HHHH", 24, kind.columns, 0, 0)
            fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
        self.file = io.TextIOWrapper(
            os.fdopen(writer, "wb"), encoding=kind.encoding, errors="strict", write_through=True
        )
        self._read: list[bytes] = []
        self._thread = threading.Thread(target=self._drain)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while chunk := os.read(self._reader, 65536):
                self._read.append(chunk)
        except OSError:  # a terminal whose other end is closed
            pass
        os.close(self._reader)

    def close(self) -> None:
        self.file.close()
        self._thread.join()

    def text(self, encoding: str) -> str:
        return b"".join(self._read).decode(encoding).replace("\r\n", "\n")


class _opened:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __enter__(self) -> tuple[_Channel, _Channel]:
        self.channels = _Channel(self.kind), _Channel(self.kind)
        return self.channels

    def __exit__(self, *_error: object) -> None:
        for channel in self.channels:
            channel.close()


LINEARS = {
    "model.layers.0.mlp.gate_proj": (640, 256),
    "model.layers.0.mlp.up_proj": (640, 256),
    "model.layers.0.mlp.down_proj": (256, 640),
    "model.layers.0.\u6f22\u5b57.\u00e9_\u202e_proj": (256, 512),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder, and the current one, with a model of odd names, prepared, damaged, audited."""
    root: Path = tmp_path_factory.mktemp("terminals")
    before = Path.cwd()
    os.chdir(root)
    write_checkpoint(root / "m", LINEARS)
    demo.build(root / "d")
    for model, out in (("m", "p"), ("m", "x"), ("d", "q")):
        assert cli.main(["convert", model, out, "-q", "--tp", "1,2"]) == 0
    damaged = root / "x" / "model.safetensors"
    raw = bytearray(damaged.read_bytes())
    raw[-20] ^= 1
    damaged.write_bytes(raw)
    yield root
    os.chdir(before)


COMMANDS: dict[str, tuple[list[str], int]] = {
    "help": (["--help"], 0),
    "audit": (["audit", "m"], 1),
    "audit-engine": (["audit", "d", "--engine", "vllm-0.33", "--ep"], 1),
    "diff": (["diff", "m", "d"], 1),
    "dry-run": (["convert", "m", "o", "--tp", "8", "--dry-run"], 0),
    "convert": (["convert", "m", "OUT"], 0),
    "verify": (["verify", "p", "--source", "m"], 0),
    "verify-no": (["verify", "x"], 1),
    "restore": (["restore", "p", "OUT"], 0),
    "show": (["show", "p"], 0),
    "selfcheck": (["selfcheck", "q", "--m", "1", "--layers", "*.0.mlp.down_proj"], 0),
    "error": (["audit", "nowhere/\u6f22\x1b[31m"], 3),
    "usage": (["convert", "m", "o", "--tp", "0"], 2),
}
WIDER_THAN_40 = {"help", "error", "usage"}
"""Typer makes no lines of less than 50 columns; an error stays on one line, to be found by grep."""


def words_of(text: str) -> str:
    """Text without colours, spaces and breaks."""
    return re.sub(r"\s", "", COLOURS.sub("", text))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_every_kind_of_output(
    name: str, place: Path, show: Callable[..., Shown], tried: Callable[..., None]
) -> None:
    words, code = COMMANDS[name]
    seen: dict[str, Shown] = {}
    for kind in KINDS:
        out = str(place / "made" / f"{name}-{kind}")
        (place / "made").mkdir(exist_ok=True)
        given = [out if word == "OUT" else word for word in words]
        os.chdir(place)
        shown = seen[str(kind)] = show(kind, *given)
        assert shown.code == code, (kind, shown.err)
        assert "Traceback" not in shown.err
        for text in (shown.out, shown.err):
            plain = kind.columns is None or "TERM" in kind.environ
            assert not plain or ESC not in text, kind
            assert "NO_COLOR" not in kind.environ or not COLOURS.search(text), kind
            bare = COLOURS.sub("", text) if text is shown.out else CONTROLS.sub("", text)
            assert ESC not in bare, "nothing but colours, and a bar's cursor on stderr"
            assert all(c.isprintable() or c in "\n\r" for c in bare)
            if text is shown.out and kind.columns == 40 and name not in WIDER_THAN_40:
                too_wide = [
                    line
                    for line in bare.splitlines()
                    if displayed(line) > 40 and not line.startswith("next: ")  # is copied whole
                ]
                assert too_wide == [], kind
        if kind.encoding == "ascii":
            assert shown.out.isascii()
    whole = seen[str(PLAIN)].out
    assert whole or name in ("error", "usage")
    if name not in ("selfcheck", "convert", "restore"):  # they name times and places
        for kind in KINDS:
            text = words_of(seen[str(kind)].out)
            if kind.encoding == "utf-8" and kind.columns != 40:
                assert text == words_of(whole), kind  # nothing cut, nothing added
            else:  # tables are spelled out
                lacking = [word for word in re.findall(r"[A-Za-z_]{3,}", whole) if word not in text]
                assert lacking == [], kind
    tried("C1", len(KINDS))


def test_colours_where_there_are_any(place: Path, show: Callable[..., Shown]) -> None:
    os.chdir(place)
    by_kind = {str(kind): show(kind, "audit", "m").out for kind in KINDS}
    painted = {name for name, text in by_kind.items() if f"{ESC}[31;1mIMPOSSIBLE" in text}
    assert painted == {"terminal-80", "terminal-200"}  # cells of a table, spelled out at 40


JSON: dict[str, list[str]] = {
    "audit": ["audit", "m", "--values", "--engine", "vllm-0.33"],
    "diff": ["diff", "m", "d"],
    "plan": ["convert", "m", "o", "--dry-run"],
    "convert": ["convert", "m", "OUT"],
    "verify": ["verify", "x"],
    "restore": ["restore", "p", "OUT"],
    "show": ["show", "p"],
    "selfcheck": ["selfcheck", "q", "--m", "1", "--layers", "*.0.mlp.down_proj"],
}


@pytest.mark.parametrize("name", JSON)
def test_json_is_valid_and_the_same_everywhere(
    name: str, place: Path, show: Callable[..., Shown], tried: Callable[..., None]
) -> None:
    documents: list[Any] = []
    chosen = (KINDS[0], KINDS[4], KINDS[5], PLAIN)
    for kind in chosen:
        os.chdir(place)
        (place / "json").mkdir(exist_ok=True)
        out = str(place / "json" / f"{name}-{kind}")
        words = [out if word == "OUT" else word for word in JSON[name]]
        text = show(kind, *words, "--format", "json").out
        assert ESC not in text
        document = json.loads(text)
        validate(document, name)
        documents.append(json.loads(text.replace(out, "OUT")))
    if name != "selfcheck":
        assert all(document == documents[0] for document in documents)
    tried("C1", len(chosen))


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    place: Path, show: Callable[..., Shown]
) -> None:
    os.chdir(place)
    (place / "bars").mkdir()
    for kind in KINDS:
        shown = show(kind, "convert", "m", str(place / "bars" / str(kind)))
        live = kind.columns is not None and kind.environ.get("TERM") != "dumb"
        assert ("converting" in shown.err) is live, kind
        if live:
            assert shown.err.count(f"{ESC}[?25l") == shown.err.count(f"{ESC}[?25h"), "the cursor"
