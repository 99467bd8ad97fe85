"""The command line: exit codes, streams, pipes, signals and terminals, as a shell sees them."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import FIXTURES, LOOKALIKES
from processes import default_signals, environment
from quark_factory import write_checkpoint
from test_report import displayed, validate

from mxfp4prep import cli, demo
from mxfp4prep.errors import IOFailed

ROOT = Path(__file__).parent.parent
ESC = "\x1b"
COMMAND = [sys.executable, "-m", "mxfp4prep"]
COMMANDS = ("audit", "diff", "convert", "verify", "restore", "show", "selfcheck", "bench", "demo")

LINEARS = {
    "model.layers.0.mlp.gate_proj": (640, 256),
    "model.layers.0.mlp.up_proj": (640, 256),
    "model.layers.0.mlp.down_proj": (256, 640),
    "model.layers.1.mlp.down_proj": (256, 640),
}


def shell(words: Sequence[object], **changes: str) -> subprocess.CompletedProcess[str]:
    """One command line in a process of its own, streams captured."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(**changes),
        timeout=120,
        check=False,
    )


class Result:
    """What one command line did inside this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process."""

    def call(*words: object) -> Result:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with aligned and misaligned layers; nothing is impossible at tp 1, 2, 4."""
    root = tmp_path_factory.mktemp("cli") / "model"
    return write_checkpoint(root, LINEARS, shards=2, side_files={"tokenizer.json": b"{}\n"})


@pytest.fixture(scope="module")
def prepared_once(model: Path) -> Path:
    out = model.parent / "prepared"
    assert cli.main(["convert", str(model), str(out), "-q"]) == 0
    return out


@pytest.fixture(scope="module")
def demo_prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared checkpoint whose weights are of a sensible size."""
    root = tmp_path_factory.mktemp("selfcheck")
    demo.build(root / "model")
    assert cli.main(["convert", str(root / "model"), str(root / "prepared"), "-q"]) == 0
    return root / "prepared"


@pytest.fixture
def prepared(prepared_once: Path, tmp_path: Path) -> Path:
    """A prepared checkpoint that the test may damage."""
    return Path(shutil.copytree(prepared_once, tmp_path / "prepared"))


# --- exit codes ---------------------------------------------------------------------------------


def damage(prepared: Path) -> Path:
    """Flips one bit of tensor data."""
    path = prepared / "model-00001-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return prepared


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--tp", "1,2,4"], 0),
        (["--tp", "8"], 1),
        ([], 1),
        (["--tp", "1", "--fail-on", "triton"], 1),
        (["--fail-on", "never"], 0),
        (["--tp", "1,2,4", "--fail-on", "impossible"], 0),
    ],
)
def test_audit_answers_with_its_code(run: Any, model: Path, words: list[str], code: int) -> None:
    assert run("audit", model, *words).code == code


def test_an_aligned_checkpoint_passes_the_strictest_gate(run: Any, tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "good", {"model.layers.0.mlp.down_proj": (256, 2048)})
    assert run("audit", root, "--fail-on", "triton").code == 0


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_unsupported(run: Any, name: str) -> None:
    for words in (["audit", FIXTURES / name], ["convert", FIXTURES / name, "--dry-run"]):
        result = run(*words)
        assert result.code == 4
        assert result.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--nope"],
        ["nope"],
        ["audit"],
        ["audit", "x", "--format", "xml"],
        ["audit", "x", "y"],
        ["convert", "x", "--workers", "many"],
        ["verify", "x", "--quick", "--deep"],
        ["verify", "x", "--quick", "--source", "y"],
        ["verify", "x", "--full", "--deep"],
        ["verify", "x", "--deep"],
        ["convert", "x", "a", "-o", "b"],
        ["audit", "x", "--parallel", "nonsense"],
        ["audit", "x", "--parallel", "a=sideways"],
        ["selfcheck", "x", "--m", "0"],
        ["selfcheck", "x", "--device", "toaster"],
    ],
)
def test_wrong_words_are_a_usage_error(run: Any, words: list[str]) -> None:
    result = run(*words)
    assert (result.code, result.out) == (2, "")
    lines = result.err.splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:])


@pytest.mark.parametrize("tp", ["0", "x", "", "1,,2", "-1", "1.5", "1025", "٣", "9" * 5000, "1;2"])
def test_degrees_that_are_none(run: Any, model: Path, tp: str) -> None:
    result = run("audit", model, f"--tp={tp}")
    assert result.code == 2
    assert result.err.startswith("error: --tp: not a tensor-parallel degree: found ")


def test_degrees_are_lists_and_may_repeat(run: Any, model: Path) -> None:
    result = run("audit", model, "--tp", "64,3", "--tp", "3", "--tp", " 16", "--format", "json")
    assert json.loads(result.out)["tp"] == [3, 16, 64]


def test_no_words_print_the_help_and_are_wrong(run: Any) -> None:
    result = run()
    assert result.code == 2
    assert "Usage: mxfp4prep" in result.out


@pytest.mark.parametrize("debug", [False, True])
def test_a_bug_is_one_line_unless_debugging(
    run: Any, model: Path, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    def broken(*_args: object) -> None:
        raise ZeroDivisionError("of a\nkind")

    monkeypatch.setattr("mxfp4prep.auditing.survey", broken)
    monkeypatch.setenv("MXFP4PREP_DEBUG", "1" if debug else "")
    result = run("audit", model)
    assert (result.code, result.out) == (70, "")
    lines = result.err.splitlines()
    assert ("Traceback (most recent call last):" in lines) is debug
    assert lines[-2] == "error: internal: ZeroDivisionError: of a kind"
    assert lines[-1].startswith("hint: ")
    assert "MXFP4PREP_DEBUG" in lines[-1]
    assert debug or len(lines) == 2


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (
            OSError(5, "Input/output error", "a\x1bfile"),
            6,
            r"error: a\x1bfile: the disk reported an input/output error",
        ),
        (MemoryError(), 6, "error: memory: "),
        (KeyboardInterrupt(), 130, "interrupted"),
        (IOFailed("f", "gone", hint="try again"), 6, "error: f: gone"),
    ],
)
def test_failures_keep_their_codes(
    run: Any,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    start: str,
) -> None:
    def broken(*_args: object) -> None:
        raise error

    monkeypatch.setattr("mxfp4prep.auditing.survey", broken)
    result = run("audit", model)
    assert result.code == code
    assert result.err.startswith(start)
    assert "Traceback" not in result.err


@pytest.mark.parametrize("stop", [KeyboardInterrupt, typer.Abort])
def test_an_interruption_is_130_wherever_it_comes(
    run: Any, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def interrupted(_words: list[str]) -> int:
        raise stop

    monkeypatch.setattr(cli, "_run", interrupted)  # versions of Typer differ in what they raise
    result = run("audit", "x")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_a_finding_of_severity_error_is_a_no(
    run: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from mxfp4prep import auditing as module
    from mxfp4prep.findings import Finding

    real = module.survey

    def with_error(*args: Any) -> Any:
        return replace(real(*args), findings=(Finding("odd", "error", "x", "is odd"),))

    monkeypatch.setattr("mxfp4prep.auditing.survey", with_error)
    assert run("audit", model, "--tp", "1").code == 1
    assert run("audit", model, "--tp", "1", "--fail-on", "never").code == 0


# --- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "a\x1b[31mb", "new\nline", "\u202etxt", "漢字"])
def test_names_in_errors_are_plain_and_whole(run: Any, tmp_path: Path, name: str) -> None:
    result = run("audit", tmp_path / name)
    first, *rest = result.err.splitlines()
    escaped = name.replace("\x1b", r"\x1b").replace("\n", r"\n").replace("\u202e", r"\u202e")
    assert first == f"error: {tmp_path}/{escaped}: no such directory"
    assert [line[:6] for line in rest] == ["hint: "]


def test_long_errors_are_not_wrapped(tmp_path: Path) -> None:
    name = "/".join(["directory"] * 40)
    result = shell(["audit", tmp_path / name], COLUMNS="40")
    assert result.stderr.splitlines()[0] == f"error: {tmp_path / name}: no such directory"


def test_json_is_all_that_stdout_gets(
    run: Any, model: Path, prepared: Path, tmp_path: Path
) -> None:
    calls: dict[str, list[object]] = {
        "audit": ["audit", model],
        "plan": ["convert", model, tmp_path / "a", "--dry-run"],
        "convert": ["convert", model, tmp_path / "b"],
        "verify": ["verify", prepared],
        "restore": ["restore", prepared, tmp_path / "c"],
        "show": ["show", prepared],
        "selfcheck": ["selfcheck", prepared, "--m", "1,2"],
    }
    for name, words in calls.items():
        document = json.loads(run(*words, "--format", "json").out)
        validate(document, name)
        assert document["schema_version"] == 1


def test_audit_reads_what_the_contract_says(run: Any, model: Path) -> None:
    document = json.loads(run("audit", model, "--format", "json").out)
    layers = {layer["name"]: layer for layer in document["layers"]}
    assert layers.keys() == LINEARS.keys()
    down = layers["model.layers.0.mlp.down_proj"]
    assert {tp: verdict["path"] for tp, verdict in down["verdict"].items()} == {
        "1": "triton",
        "2": "triton",
        "4": "triton",
        "8": "impossible",
    }


def test_user_rules_reach_the_survey(run: Any, model: Path) -> None:
    words = ("audit", model, "--parallel", "*.down_proj=replicated", "--format", "json")
    layers = json.loads(run(*words).out)["layers"]
    kinds = {layer["name"].rpartition(".")[2]: layer["parallel"] for layer in layers}
    assert kinds["down_proj"] == "replicated"


def test_convert_tells_its_findings_on_stderr(run: Any, tmp_path: Path) -> None:
    source = FIXTURES / "llama-mixed-fp8attn-kvfp8"
    result = run("convert", source, tmp_path / "out", "--tp", "8")
    assert result.code == 0
    assert "warning: model.layers.0.mlp.down_proj: " in result.err
    assert "cannot be split" not in result.out
    assert f"note: 3 more remarks: `mxfp4prep audit {source}` tells\n" in result.err
    assert "note: model" not in result.err
    verbose = run("-v", "convert", source, tmp_path / "again", "--dry-run")
    assert re.search(r"^note: model\.layers\.0\.", verbose.err, re.MULTILINE)
    assert "more remark" not in verbose.err


def test_quiet_is_quiet(run: Any, tmp_path: Path) -> None:
    source = FIXTURES / "llama-mixed-fp8attn-kvfp8"
    out, back = tmp_path / "out", tmp_path / "back"
    for words in (["convert", source, out, "--tp", "8"], ["verify", out], ["restore", out, back]):
        result = run(*words, "-q")
        assert (result.code, result.out, result.err) == (0, "", "")
    assert run("verify", damage_any(out), "-q").out.startswith("error: ")


def damage_any(prepared: Path) -> Path:
    path = prepared / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    return prepared


# --- signals ------------------------------------------------------------------------------------

SLOW = textwrap.dedent(
    """
    import sys, time
    from mxfp4prep import cli, io
    real = io.pread_into
    def slow(*args):
        if "model-00001" in str(args[3]):
            print("busy", file=sys.stderr, flush=True)
            time.sleep(0.2)
        real(*args)
    io.pread_into = slow
    sys.exit(cli.main(sys.argv[1:]))
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_clean_up_and_exit_130(model: Path, tmp_path: Path, number: int) -> None:
    words = ["convert", str(model), str(tmp_path / "out"), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=default_signals,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "busy\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_signals_that_come_together_are_one() -> None:
    """Held back by a mask, all of them are there when the first one is taken."""
    code = """if True:
    import os, signal, sys
    from mxfp4prep.stopping import Stop
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    with Stop() as stop:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            for number in numbers:
                os.kill(os.getpid(), number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        except KeyboardInterrupt:
            os.write(1, b"cleaned up")
        assert stop.asked
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_DFL}
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=environment(),
        preexec_fn=default_signals,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"cleaned up", b"")


def test_an_ignored_hangup_stays_ignored(model: Path, tmp_path: Path) -> None:
    words = ["convert", str(model), str(tmp_path / "out"), "-q"]
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SLOW
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "busy\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0


# --- terminals ----------------------------------------------------------------------------------


def terminal(words: Sequence[object], columns: int = 80, **changes: str) -> str:
    """What a command line shows on a terminal of its own."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", f'stty cols {columns} rows 24; exec "$@"', "-", *COMMAND, *map(str, words)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(TERM="xterm-256color") | changes,
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    process.wait(timeout=60)
    return shown.decode().replace("\r\n", "\n")


def test_colours_on_a_terminal(model: Path) -> None:
    assert f"{ESC}[31;1mIMPOSSIBLE" in terminal(["audit", model])
    assert ESC not in terminal(["audit", model], NO_COLOR="1")
    assert ESC not in terminal(["audit", model], TERM="dumb")


def test_no_escape_codes_off_terminals(model: Path, tmp_path: Path) -> None:
    for words in (["audit", model], ["convert", model, tmp_path / "out"], ["audit", "--help"]):
        result = shell(words)
        assert ESC not in result.stdout + result.stderr
    forced = shell(["audit", model], FORCE_COLOR="1")
    assert f"{ESC}[31;1mIMPOSSIBLE" in forced.stdout


def test_a_bar_on_a_terminal_and_none_on_a_dumb_one(model: Path, tmp_path: Path) -> None:
    assert "converting" in terminal(["convert", model, tmp_path / "a"])
    shown = terminal(["convert", model, tmp_path / "b"], TERM="dumb")
    assert ESC not in shown
    assert "converting" not in terminal(["convert", model, tmp_path / "c", "--no-progress"])


@pytest.mark.parametrize(
    ("tty", "term", "live"),
    [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)],
)
def test_bars_are_for_terminals_that_can_draw(
    monkeypatch: pytest.MonkeyPatch, tty: bool, term: str, live: bool
) -> None:
    from contextlib import nullcontext

    from mxfp4prep.report.voice import Voice

    seen = []

    def spy(*_args: object, live: bool) -> Any:
        seen.append(live)
        return nullcontext()

    monkeypatch.setattr("mxfp4prep.report.progress.progress", spy)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty, raising=False)
    with Voice(False, {"TERM": term}).progress("x", lambda: 1, silent=False):
        pass
    assert seen == [live]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_whole_on_narrow_ascii_terminals(name: str) -> None:
    words = [name, "--help"] if name else ["--help"]
    wide = shell(words, COLUMNS="200")
    narrow = shell(words, COLUMNS="40", LC_ALL="C", PYTHONIOENCODING="ascii", TERM="dumb")
    assert (wide.returncode, narrow.returncode) == (0, 0)
    assert narrow.stdout.isascii()
    assert ESC not in narrow.stdout
    # Nothing is cut short. Words are; Typer makes no lines of less than 50 columns.
    assert re.sub(r"\s", "", narrow.stdout) == re.sub(r"\s", "", wide.stdout)
    text, _, examples = narrow.stdout.partition("  Examples:\n")
    assert max(map(len, text.splitlines())) <= 50
    assert text.startswith(f"Usage: mxfp4prep {name}".strip())
    if name:
        assert all(line.startswith(f"    mxfp4prep {name}") for line in examples.splitlines())
        assert examples
    else:
        assert "130 interrupted" in " ".join(text.split())
        assert set(COMMANDS) <= set(text.split())


def test_audit_fits_a_narrow_terminal(model: Path) -> None:
    lines = terminal(["audit", model], columns=40, NO_COLOR="1").splitlines()
    wide = [line for line in lines if displayed(line) > 40]
    assert [line for line in wide if not line.startswith("next: ")] == []


def test_ascii_locale_never_breaks(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "漢字", {"model.漢.é": (256, 256)})
    plain = {
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    audit = shell(["audit", root], **plain)
    assert audit.returncode == 0
    assert r"model.\u6f22.\xe9" in audit.stdout
    named = shell(["audit", root], PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert named.returncode == 0
    assert named.stdout.endswith("\\u6f22\\u5b57' --tp 8\n")
    convert = shell(["convert", root, tmp_path / "out"], **plain)
    assert convert.returncode == 0, convert.stderr
    assert shell(["audit", tmp_path / "é"], **plain).returncode == 3


# --- start --------------------------------------------------------------------------------------


def imported(words: Sequence[object], **changes: str) -> set[str]:
    """Top-level modules that a command line imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mxfp4prep", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(**changes),
        timeout=120,
        check=False,
    )
    return {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in result.stderr.splitlines()
        if line.startswith("import time:")
    }


HEAVY = {"torch", "transformers", "numpy", "huggingface_hub", "safetensors"}


def test_audit_help_version_and_completion_start_light(model: Path) -> None:
    assert not imported(["--help"]) & (HEAVY | {"pydantic"})
    assert not imported(["--version"]) & (HEAVY | {"pydantic", "rich"})
    assert not imported(["audit", model]) & HEAVY
    assert not imported(["audit", model, "--format", "json"]) & HEAVY
    completion = {
        "_MXFP4PREP_COMPLETE": "complete_bash",
        "COMP_WORDS": "mxfp4prep au",
        "COMP_CWORD": "1",
    }
    assert not imported([], **completion) & HEAVY


def test_completion_completes() -> None:
    completion = {
        "_MXFP4PREP_COMPLETE": "complete_bash",
        "COMP_WORDS": "mxfp4prep au",
        "COMP_CWORD": "1",
    }
    result = shell([], **completion)
    assert (result.returncode, result.stdout.split()) == (0, ["audit"])


def test_version(run: Any) -> None:
    result = run("--version")
    assert result.code == 0
    assert re.fullmatch(r"mxfp4prep \S+\n", result.out)


# --- convert, verify, restore, show, selfcheck ---------------------------------------------------


def tree(root: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_convert_verify_and_restore(run: Any, model: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    converted = run("convert", model, "-o", out)
    assert converted.code == 0
    lines = converted.out.splitlines()
    assert lines[-1] == f"next: mxfp4prep verify {out} --source {model}"
    assert ["asm", "2", "174", "kB"] in [line.split() for line in lines]
    assert ["triton", "2", "174", "kB"] in [line.split() for line in lines]
    for words in ([], ["--quick"], ["--full"], ["--source", model], ["--deep", "--source", model]):
        assert run("verify", out, *words).code == 0
    assert run("restore", out, back).code == 0
    assert tree(back) == tree(model)


def test_convert_has_a_default_place(run: Any, model: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(model, tmp_path / "some model"))
    result = run("convert", root)
    assert result.code == 0
    assert (tmp_path / "some model-mxfp4prep" / "mxfp4prep.json").is_file()
    assert f"'{tmp_path}/some model-mxfp4prep' --source '{root}'" in result.out


def test_a_dry_run_writes_nothing_and_plans_what_is_done(
    run: Any, model: Path, tmp_path: Path
) -> None:
    words = ["--keep", "model.layers.1.*", "--tp", "1,2", "--format", "json"]
    plan = json.loads(run("convert", model, tmp_path / "out", *words, "--dry-run").out)
    assert list(tmp_path.iterdir()) == []
    assert run("convert", model, tmp_path / "out", *words).code == 0
    manifest = json.loads(run("show", tmp_path / "out", "--format", "json").out)
    planned = {
        p["name"]: (p["path"], p["reasons"], p["weight_layout"], p["scale_layout"], p["verdict"])
        for p in plan["layers"]
    }
    assert planned == {
        r["name"]: (
            r["path"],
            r["reasons"],
            r["weight"]["layout"],
            r["scale"]["layout"],
            r["verdict"],
        )
        for r in manifest["layers"]
    }
    assert planned["model.layers.1.mlp.down_proj"][:3] == ("triton", ["kept"], "raw")
    assert plan["summary"]["kept"]["layers"] == 1
    assert all(list(layer["verdict"]) == ["1", "2", "4", "8"] for layer in plan["layers"])
    assert plan["tp"] == manifest["target"]["tp"] == [1, 2]
    assert plan["output"] == str(tmp_path / "out")


def test_convert_for_an_engine_says_so_from_the_plan_to_the_manifest(
    run: Any, model: Path, tmp_path: Path
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    words = ["convert", model, out, "--for", "sglang"]
    text = run(*words, "--dry-run")
    assert "laid out for SGLang" in " ".join(text.out.split())
    assert "scale_cols, engine, kept" in text.out
    assert re.search(r"^  engine +the engine that --for names", text.out, re.MULTILINE)
    assert "warning: SGLang: laid out as SGLang 0.5.23 would hold it" in text.err
    plan = json.loads(run(*words, "--dry-run", "--format", "json").out)
    validate(plan, "plan")
    assert plan["engine"] == "sglang"
    assert plan["summary"]["kept"]["layers"] == 2
    done = json.loads(run(*words, "--format", "json").out)
    validate(done, "convert")
    assert done["engine"] == "sglang"
    shown = run("show", out)
    assert "laid out for SGLang" in " ".join(shown.out.split())
    assert "scale_cols, engine, kept" in shown.out
    document = json.loads(run("show", out, "--format", "json").out)
    validate(document, "show")
    assert document["target"]["engine"] == "sglang"
    assert run("verify", out, "--source", model).code == 0
    assert run("restore", out, back).code == 0
    assert tree(back) == tree(model)


def test_convert_for_mxfp4prep_is_what_it_does_without(
    run: Any, model: Path, tmp_path: Path
) -> None:
    run("convert", model, tmp_path / "a")
    text = run("convert", model, tmp_path / "b", "--for", "mxfp4prep")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert "laid out" not in text.out + run("show", tmp_path / "a").out
    assert "engine" not in json.loads(run("show", tmp_path / "a", "--format", "json").out)["target"]


def test_convert_for_knows_four_engines(run: Any, model: Path, tmp_path: Path) -> None:
    refused = run("convert", model, tmp_path / "out", "--for", "tgi")
    assert refused.code == 2
    assert "'tgi'" in refused.err
    assert "'sglang'" in refused.err
    clash = run("convert", model, tmp_path / "out", "--for", "atom", "--layout", "triton")
    assert clash.code == 2
    assert "error: --layout triton: ATOM reads the scale as it was" in clash.err
    assert not (tmp_path / "out").exists()
    assert "--for sglang --tp 8" in run("convert", "--help").out


def test_a_dry_run_refuses_what_convert_would(run: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("convert", model, tmp_path / "out", "--dry-run").code == 5
    assert run("convert", model, tmp_path / "new", "--dry-run", "--layout", "asm").code == 4
    (model / "x.mxfp4prep.part").write_text("x")
    assert run("convert", model, tmp_path / "new", "--dry-run").code == 4
    (model / "x.mxfp4prep.part").unlink()
    text = run("convert", model, tmp_path / "new", "--dry-run", "--layout", "triton")
    assert text.code == 0
    assert "forced" in text.out
    assert text.out.splitlines()[-1] == "next: the same command without --dry-run"


def test_overwrite_replaces_only_what_was_prepared(
    run: Any, model: Path, prepared: Path, tmp_path: Path
) -> None:
    assert run("convert", model, prepared).code == 5
    assert run("convert", model, prepared, "--overwrite", "--layout", "triton").code == 0
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious").write_text("x")
    assert run("convert", model, foreign, "--overwrite").code == 5
    assert (foreign / "precious").read_text() == "x"


def test_workers_come_from_the_flag_or_the_environment(
    run: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []

    def stop(*_args: Any, workers: int | None, **_more: Any) -> None:
        seen.append(workers)
        raise IOFailed("test", "seen")

    monkeypatch.setattr("mxfp4prep.convert.convert", stop)
    run("convert", model, tmp_path / "out")
    monkeypatch.setenv("MXFP4PREP_WORKERS", "3")
    run("convert", model, tmp_path / "out")
    run("convert", model, tmp_path / "out", "--workers", "2")
    assert seen == [None, 3, 2]


def test_progress_adds_up(
    run: Any, model: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    counted: dict[str, list[int]] = {}

    @contextmanager
    def counting(label: str, total: int, *_args: object, **_more: object) -> Any:
        counted[label] = [total, 0]

        def advance(nbytes: int) -> None:
            counted[label][1] += nbytes

        yield advance

    monkeypatch.setattr("mxfp4prep.report.progress.progress", counting)
    run("convert", model, tmp_path / "out")
    run("verify", prepared)
    run("restore", prepared, tmp_path / "back")
    for label, (total, done) in counted.items():
        assert total * 0.9 <= done <= total * 1.1, label
    assert set(counted) == {"converting", "verifying", "restoring"}


def test_verify_names_the_damaged_tensor(run: Any, prepared: Path) -> None:
    assert run("verify", damage(prepared), "--quick").code == 0
    result = run("verify", prepared, "--format", "json")
    assert result.code == 1
    document = json.loads(result.out)
    assert document["ok"] is False
    named = {(p["file"], p["tensor"]) for p in document["problems"]}
    assert ("model-00001-of-00002.safetensors", None) in named
    assert len([tensor for _, tensor in named if tensor is not None]) == 1
    text = run("verify", prepared)
    assert text.out.startswith("error: model-00001-of-00002.safetensors: ")
    assert "NOT what was prepared: 2 problems" in " ".join(text.out.split())


def test_verify_levels(run: Any, model: Path, prepared: Path) -> None:
    for words, level in (
        ([], "full"),
        (["--quick"], "quick"),
        (["--full"], "full"),
        (["--source", model], "deep"),
    ):
        assert json.loads(run("verify", prepared, *words, "--format", "json").out)["level"] == level


def test_show_prints_the_manifest(run: Any, prepared: Path) -> None:
    written = json.loads((prepared / "mxfp4prep.json").read_text())
    assert json.loads(run("show", prepared, "--format", "json").out) == written
    chosen = json.loads(run("show", prepared, "--layers", "*.down_proj", "--format", "json").out)
    assert chosen["layers"] == [r for r in written["layers"] if r["name"].endswith("down_proj")]
    text = run("show", prepared, "--layers", "*.1.*").out
    assert "model.layers.1.mlp.down_proj" in text
    assert "layers.0" not in text.partition("findings")[0]
    assert run("show", prepared, "--layers", "nothing").code == 2


def test_layout_asm_says_what_to_do_instead(run: Any, model: Path, tmp_path: Path) -> None:
    def hint(source: Path, *words: str) -> str:
        result = run("convert", source, tmp_path / "new", "--dry-run", "--layout", "asm", *words)
        assert (result.code, result.out) == (4, "")
        return next(line for line in result.err.splitlines() if line.startswith("hint: "))

    none = FIXTURES / "qwen2-w4a4-misaligned-tied"
    assert hint(none).startswith("hint: leave --layout out and all go to the Triton path; `mxfp4")
    aligned = FIXTURES / "llama-w4a4-aligned"
    assert "the others stay asm; all are asm at --tp 1; " in hint(aligned, "--tp", "8")
    assert "--tp" not in hint(aligned, "--keep", "*.0.*")
    assert "the others stay asm; `mxfp4prep audit` says" in hint(model)


def test_verbs_refuse_what_was_never_prepared(run: Any, model: Path, tmp_path: Path) -> None:
    for words in (["verify", model], ["show", model], ["restore", model, tmp_path / "x"]):
        assert run(*words).code == 3
    assert run("selfcheck", model).code in (3, 4)


def test_selfcheck(run: Any, demo_prepared: Path) -> None:
    words = ("--layers", "*.down_proj", "--m", "1,3", "--format", "json")
    document = json.loads(run("selfcheck", demo_prepared, *words).out)
    assert [(row["layer"], row["m"]) for row in document["rows"]] == [
        (f"model.layers.{i}.mlp.down_proj", m) for i in range(2) for m in (1, 3)
    ]
    assert document["ok"] is True
    result = run("selfcheck", demo_prepared, "--backend", "torch")
    assert result.code == 0
    assert result.out.splitlines()[-1].endswith("all within rounding of float64")
    assert run("selfcheck", demo_prepared, "--layers", "nothing").code == 2
    assert run("selfcheck", demo_prepared, "--backend", "nothing").code == 2


def test_selfcheck_says_no(run: Any, demo_prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mxfp4prep.runtime import selfcheck as module

    real = module.selfcheck
    monkeypatch.setattr(
        module, "selfcheck", lambda *a, **k: (row._replace(ok=False) for row in real(*a, **k))
    )
    result = run("selfcheck", demo_prepared, "--m", "1")
    assert result.code == 1
    assert "WRONG" in result.out


def test_selfcheck_without_a_gpu(run: Any, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("selfcheck", prepared, "--device", "cuda")
    assert result.code == 4
    assert result.err.splitlines()[-1] == "hint: --device cpu runs the reference"


def test_warnings_are_one_plain_line(
    run: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    from mxfp4prep import auditing as module

    real = module.survey

    def warning(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("odd \x1b[31m\nthing", stacklevel=1)
        return real(*args)

    monkeypatch.setattr("mxfp4prep.auditing.survey", warning)
    assert run("audit", model, "--tp", "1").err == "warning: odd \\x1b[31m thing\n"
