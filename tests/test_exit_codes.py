"""Every exit code of the table, and an end without a traceback, by processes of the real command.

The command is the script that an installation makes of `[project.scripts]`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import FIXTURES
from processes import ROOT, default_signals, environment
from sparse import linear, write_sparse

from mxfp4prep import cli

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MODULE, _, FUNCTION = SCRIPTS["mxfp4prep"].partition(":")
SCRIPT = f"import sys\nfrom {MODULE} import {FUNCTION}\nsys.exit({FUNCTION}())\n"


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that tp 8 cannot split, two audits, an empty folder and the script."""
    root = tmp_path_factory.mktemp("codes")
    shapes = linear("model.layers.0.mlp.down_proj", 256, 640)
    write_sparse(root / "model", [shapes], {"model.norm.weight": (8,)})
    (root / "empty").mkdir()
    (root / "foreign.html").write_text("mine\n")
    (root / "mxfp4prep").write_text(SCRIPT)
    return root


def run(place: Path, words: Sequence[str], fault: str = "", out: Any = subprocess.PIPE) -> Ended:
    """Runs one command line in `place`. fault: Python that runs before it."""
    script = place / ("faulty" if fault else "mxfp4prep")
    script.write_text(fault + SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *words],
        cwd=place,
        env=environment(),
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(done.returncode, done.stdout or "", done.stderr)


FAULT = """
import mxfp4prep.auditing
def broken(*args):
    raise ZeroDivisionError("a fault of ours")
mxfp4prep.auditing.survey = broken
"""
NO_ROOM = FAULT.replace('ZeroDivisionError("a fault of ours")', "MemoryError")
FULL = "# stdout is a device without room\n"

NVFP4 = str(FIXTURES / "lookalike-nvfp4")
CASES = [
    (0, ["--version"], ""),
    (0, ["audit", "model", "--tp", "1,2,4"], ""),
    (1, ["audit", "model"], ""),
    (1, ["diff", "a.json", "b.json"], ""),
    (2, [], ""),
    (2, ["audit", "model", "--tp", "0"], ""),
    (3, ["audit", "empty"], ""),
    (3, ["show", "model"], ""),
    (4, ["audit", NVFP4], ""),
    (5, ["audit", "model", "--html", "foreign.html"], ""),
    (6, ["audit", "model", "--format", "json"], FULL),
    (6, ["audit", "model"], NO_ROOM),
    (70, ["audit", "model"], FAULT),
]


@pytest.mark.parametrize(("code", "words", "fault"), CASES)
def test_every_code_is_reached(
    place: Path, code: int, words: list[str], fault: str, tried: Callable[..., None]
) -> None:
    if words[:1] == ["diff"]:
        for name, tp in (("a.json", "1,2"), ("b.json", "1,2,4")):
            made = run(place, ["audit", "model", "--tp", tp, "--format", "json"])
            text = made.out if tp == "1,2" else made.out.replace('"k":640', '"k":672')
            (place / name).write_text(text)
    with Path("/dev/full").open("w") as full:
        ended = run(place, words, fault, full if fault is FULL else subprocess.PIPE)
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    # code 1 is an answer, on stdout; no words at all print the help
    assert bool(re.match(r"error: \S", ended.err)) is (code > 1 and words != [])
    assert (ended.out == "") is (code > 1 and words != [])
    assert (place / "foreign.html").read_text() == "mine\n"
    tried("C2")


def test_the_codes_in_the_help_are_those_that_are_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["--help"])
    told = " ".join(capsys.readouterr().out.split()).partition("Exit codes: ")[2]
    numbers = {int(number) for number in re.findall(r"(?:^|, )(\d+) [a-zA-Z]", told)}
    assert numbers == {code for code, _, _ in CASES} | {130}


# --- interruption -------------------------------------------------------------------------------

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

WAITING = "print('here', flush=True)\nimport time\ntime.sleep(600)\n"


def interrupted(command: Sequence[str], cwd: Path, env: dict[str, str], number: int) -> Ended:
    """How a process ends that gets a signal once it has said "here"."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return Ended(process.returncode, out, err)


@pytest.mark.parametrize(
    ("number", "start"),
    [(signal.SIGINT, "script"), (signal.SIGTERM, "module"), (signal.SIGHUP, "script")],
)
def test_a_signal_while_the_command_is_still_imported(
    place: Path, tmp_path: Path, number: int, start: str, tried: Callable[..., None]
) -> None:
    """The first thing that is imported says so and takes its time."""
    (tmp_path / "typer.py").write_text(WAITING)
    command = ["mxfp4prep"] if start == "script" else ["-m", "mxfp4prep"]
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    ended = interrupted([*command, "audit", "model"], place, environment(PYTHONPATH=path), number)
    assert ended == (130, "", "interrupted\n")
    tried("C2")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_verb_is_imported(
    place: Path, tmp_path: Path, number: int, tried: Callable[..., None]
) -> None:
    """Also where the module that was cut short turns it into an error of its own."""
    (tmp_path / "torch.py").write_text(
        "try:\n"
        + "".join(f"    {line}\n" for line in WAITING.splitlines())
        + "except BaseException:\n    raise ImportError('DLL load failed') from None\n"
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    words = ["mxfp4prep", "convert", "model", "out"]
    ended = interrupted(words, place, environment(PYTHONPATH=path), number)
    assert ended == (130, "", "interrupted\n")
    assert not (place / "out").exists()
    tried("C2")


def test_a_signal_after_the_answer_does_not_change_it(place: Path) -> None:
    """While the interpreter ends, which takes a while with torch."""
    late = place / "late"
    late.write_text(
        "import atexit, time\n"
        "atexit.register(lambda: (print('here', flush=True), time.sleep(600)))\n" + SCRIPT
    )
    words = [str(late), "audit", "model", "--format", "json"]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=place,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    assert process.stdout is not None
    answer = ""
    while (line := process.stdout.readline()) != "here\n":
        answer += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "", "")
    assert json.loads(answer)["schema_version"] == 1


def test_a_second_signal_kills(place: Path) -> None:
    """Where cleaning up hangs, nobody has to look for the process."""
    stubborn = place / "stubborn"
    stubborn.write_text(
        "import time\nimport mxfp4prep.auditing as auditing\n"
        "def hang(*args):\n"
        "    try:\n        print('here', flush=True); time.sleep(600)\n"
        "    finally:\n        print('there', flush=True); time.sleep(600)\n"
        "auditing.survey = hang\n" + SCRIPT
    )
    process = subprocess.Popen(
        [sys.executable, str(stubborn), "audit", "model"],
        cwd=place,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    assert process.stdout is not None
    for word in ("here\n", "there\n"):
        assert process.stdout.readline() == word
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


def test_signals_that_are_ignored_stay_ignored(place: Path) -> None:
    ignoring = place / "ignoring"
    ignoring.write_text(
        "import os, signal\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "import mxfp4prep.auditing as auditing\n"
        "real = auditing.survey\n"
        "def survey(*args):\n"
        "    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "        os.kill(os.getpid(), number)\n"
        "    return real(*args)\n"
        "auditing.survey = survey\n" + SCRIPT
    )
    done = subprocess.run(
        [sys.executable, str(ignoring), "audit", "model", "--tp", "1"],
        cwd=place,
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_handlers_of_the_host_are_left_alone_and_ours_put_back(place: Path) -> None:
    def hosts(*_args: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, hosts)
    try:
        every = [signal.getsignal(number) for number in SIGNALS]
        assert cli.main(["audit", str(place / "model"), "--tp", "1"]) == 0
        assert [signal.getsignal(number) for number in SIGNALS] == every
    finally:
        signal.signal(signal.SIGTERM, before)
