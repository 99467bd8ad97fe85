"""Two commands on one output, and what runs that ended badly have left beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import with_path
from quark_factory import write_checkpoint
from test_convert import files_of, planned

from mxfp4prep.convert import convert
from mxfp4prep.errors import UnsafeOutput
from mxfp4prep.leftovers import _host, _started, abandoned
from mxfp4prep.staging import staged
from mxfp4prep.verify import verify

TESTS = Path(__file__).parent
ROUNDS = 8


@pytest.mark.timeout(300)
def test_processes_that_begin_at_the_same_moment(tried):
    done = subprocess.run(
        [sys.executable, TESTS / "attacks" / "race.py", "--json", f"--rounds={ROUNDS}"],
        env=with_path(TESTS),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts.pop("commands") == 4 * ROUNDS
    assert sum(counts.values()) == ROUNDS
    tried("F6", ROUNDS)


def folder_of(pid: int, started: int, base: Path, host: str | None = None) -> Path:
    folder = base / f".out.mxfp4prep-{host or _host()}-{pid}-{started}"
    folder.mkdir()
    (folder / "model.safetensors").write_text("x")
    return folder


def writes(base: Path) -> None:
    with staged(base / "out") as stage:
        (stage / "new").touch()
    assert (base / "out" / "new").exists()


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_the_number_of_a_dead_process_that_another_has_by_now(tmp_path, sleeper, tried):
    folder = folder_of(sleeper.pid, _started(sleeper.pid) - 1, tmp_path)
    writes(tmp_path)
    assert not folder.exists()
    tried("F6")


def test_a_killed_process_whose_parent_has_not_noticed_yet(tmp_path, sleeper, tried):
    folder = folder_of(sleeper.pid, _started(sleeper.pid), tmp_path)
    with pytest.raises(UnsafeOutput, match="another run is writing it"):
        writes(tmp_path)
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
    assert Path(f"/proc/{sleeper.pid}").exists()
    writes(tmp_path)
    assert not folder.exists()
    tried("F6")


def test_another_machines_run_is_never_judged(tmp_path, tried):
    folder = folder_of(999_999_999, 5, tmp_path, host="00000000")
    with pytest.raises(UnsafeOutput, match="another run is writing it"):
        writes(tmp_path)
    assert folder.exists()
    tried("F6")


def test_what_a_dead_run_has_set_aside_is_swept_once_there_is_an_output(tmp_path, tried):
    out = tmp_path / "out"
    out.mkdir()
    old = tmp_path / f".out.mxfp4prep-old-{_host()}-999999999-5"
    old.mkdir()
    with staged(out, replace=True) as stage:
        (stage / "new").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in out.iterdir()] == ["new"]
    tried("F6")


def test_the_second_refuses_while_the_first_is_at_work_and_the_first_ends_well(tmp_path, tried):
    source = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (32, 256)})
    out = tmp_path / "out"
    begun, go_on = threading.Event(), threading.Event()

    def hold(nbytes):
        begun.set()
        assert go_on.wait(60)

    first = threading.Thread(target=convert, args=(planned(source), out), kwargs={"progress": hold})
    first.start()
    try:
        assert begun.wait(60)
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(UnsafeOutput, match="another run is writing it"):
                convert(planned(source), out, **options)
    finally:
        go_on.set()
        first.join()
    assert verify(out, "deep", source).problems == ()
    assert abandoned(out) == []
    tried("F6", 3)


def test_verify_while_its_checkpoint_is_being_replaced(tmp_path, monkeypatch, tried):
    """What it has begun to read is replaced by another: never an answer that all is well."""
    source = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (32, 256)})
    out = convert(planned(source, layout="triton"), tmp_path / "out").out
    import mxfp4prep.verify as module

    real = module.open_prepared

    def opened_then_replaced(path):
        opened = real(path)
        convert(planned(source), out, overwrite=True)
        return opened

    monkeypatch.setattr(module, "open_prepared", opened_then_replaced)
    report = verify(out)
    assert report.problems
    monkeypatch.undo()
    assert verify(out, "deep", source).problems == ()
    tried("F6")


def test_what_came_into_the_old_output_meanwhile_is_not_deleted(tmp_path, tried):
    source = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (32, 256)})
    out = convert(planned(source, layout="triton"), tmp_path / "out").out
    before = files_of(out)

    def write_a_note(nbytes):
        (out / "notes.txt").write_text("precious")

    with pytest.raises(UnsafeOutput, match="has changed while its replacement was being written"):
        convert(planned(source), out, overwrite=True, progress=write_a_note)
    assert files_of(out) == {**before, "notes.txt": b"precious"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    tried("F6")
