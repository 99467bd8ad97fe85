"""One writer per output, dead writers swept, published whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import with_path
from quark_factory import write_checkpoint
from test_convert import converted, files_of

from mxfp4prep.errors import UnsafeOutput
from mxfp4prep.staging import _host, _started, check_output, staged


def leftovers(folder):
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def test_publishes_whole_or_nothing(tmp_path):
    out = tmp_path / "out"
    with staged(out) as stage:
        (stage / "a").write_text("x")
        assert not out.exists()
    assert (out / "a").read_text() == "x"
    with pytest.raises(RuntimeError), staged(tmp_path / "b"):
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_living_writer_is_respected(tmp_path):
    out = tmp_path / "out"
    with (
        staged(out),
        pytest.raises(UnsafeOutput, match="another run is writing it"),
        staged(out),
    ):
        pass
    assert leftovers(tmp_path) == []


def test_dead_writer_is_swept_and_other_hosts_never(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = _started(child.pid)
    dead = tmp_path / f".out.mxfp4prep-{_host()}-{child.pid}-{started}"
    dead.mkdir()
    (dead / "model.safetensors.part").write_text("x")
    with pytest.raises(UnsafeOutput), staged(tmp_path / "out"):
        pass
    child.communicate(b"\n")
    foreign = tmp_path / f".other.mxfp4prep-{_host()}-{child.pid}-{started}"
    foreign.mkdir()
    with staged(tmp_path / "out"):
        assert not dead.exists()
    assert foreign.exists()
    elsewhere = tmp_path / f".x.mxfp4prep-00000000-{child.pid}-{started}"
    elsewhere.mkdir()
    with pytest.raises(UnsafeOutput, match="another run"), staged(tmp_path / "x"):
        pass
    assert elsewhere.exists()


def test_names_that_look_like_patterns(tmp_path):
    out = tmp_path / "a[1]*"
    with staged(out) as stage:
        (stage / "f").write_text("")
    assert out.is_dir()


def test_output_set_aside_by_a_killed_overwrite_comes_back(tmp_path):
    out = tmp_path / "out"
    aside = tmp_path / f".out.mxfp4prep-old-{_host()}-999999999-5"
    aside.mkdir()
    (aside / "mxfp4prep.json").write_text("{}")
    with pytest.raises(UnsafeOutput, match="exists already"), staged(out):
        pass
    assert (out / "mxfp4prep.json").exists()
    with staged(out, replace=True) as stage:
        (stage / "new").write_text("")
    assert (out / "new").exists()
    assert leftovers(tmp_path) == []


def test_what_appears_at_the_output_meanwhile_is_safe(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UnsafeOutput, match="exists already"), staged(out):  # noqa: PT012
        out.mkdir()
        (out / "thesis.tex").write_text("precious")
    assert (out / "thesis.tex").read_text() == "precious"
    assert leftovers(tmp_path) == []


def test_a_path_that_passes_through_the_output_itself(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with staged(out / ".." / "out", replace=True) as stage:
        (stage / "new").write_text("")
    assert (out / "new").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_interrupt_while_publishing_keeps_the_old_or_the_new(tmp_path, monkeypatch, nth):
    from mxfp4prep import io

    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    real, calls = {name: getattr(io, name) for name in ("rename", "rmtree")}, []

    def interrupt(name):
        def after(*args):
            real[name](*args)
            calls.append(name)
            if len(calls) == nth:
                raise KeyboardInterrupt

        return after

    for name in real:
        monkeypatch.setattr(io, name, interrupt(name))
    with pytest.raises(KeyboardInterrupt), staged(out, replace=True) as stage:
        (stage / "new").write_text("")
    monkeypatch.undo()
    assert [p.name for p in out.iterdir()] in (["old"], ["new"])
    assert leftovers(tmp_path) == []


def test_check_output_accepts_a_free_name_beside(tmp_path):
    check_output(tmp_path / "out", tmp_path / "source")


def test_p80_killed_run_leaves_nothing_under_the_name_and_the_rerun_is_the_same(tmp_path):
    linears = {f"model.layers.{i}.mlp.down_proj": (2048, 4096) for i in range(24)}
    root = write_checkpoint(tmp_path / "m", linears, shards=3)
    out = tmp_path / "out"
    program = (
        "import sys, pathlib\n"
        "from test_convert import converted\n"
        "converted(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), workers=1)\n"
    )
    env = with_path(Path(__file__).parent)
    killed_midway = 0
    for delay in (0.0, 0.02, 0.05):
        child = subprocess.Popen([sys.executable, "-c", program, str(root), str(out)], env=env)
        while child.poll() is None and not leftovers(tmp_path):
            time.sleep(0.002)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        killed_midway += not out.exists()
        if out.exists():
            break
    assert killed_midway
    if not out.exists():
        converted(root, out)
    assert leftovers(tmp_path) == []
    assert files_of(out) == files_of(converted(root, tmp_path / "clean").out)
