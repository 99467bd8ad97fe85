"""One writer per output, dead writers swept, published whole."""

from __future__ import annotations

import subprocess
import sys

import pytest
from attacks.faulty_disk import no_exchange

from mxfp4prep import io
from mxfp4prep import leftovers as leftovers_module
from mxfp4prep.errors import IOFailed, UnsafeOutput
from mxfp4prep.leftovers import _host, _started
from mxfp4prep.staging import check_output, staged


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


def test_another_machine_of_the_same_name_is_another(tmp_path, monkeypatch):
    out = tmp_path / "out"
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(leftovers_module, "_MACHINE_ID", tmp_path / "one")
    theirs = tmp_path / f".out.mxfp4prep-{_host()}-999999999-5"
    theirs.mkdir()
    monkeypatch.setattr(leftovers_module, "_MACHINE_ID", tmp_path / "other")
    with pytest.raises(UnsafeOutput, match="another run is writing it"), staged(out):
        pass
    assert theirs.is_dir()
    monkeypatch.setattr(leftovers_module, "_MACHINE_ID", tmp_path / "one")
    with staged(out):
        assert not theirs.exists()
    monkeypatch.setattr(leftovers_module, "_MACHINE_ID", tmp_path / "absent")
    assert len(_host()) == 8


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


@pytest.mark.parametrize(
    ("able", "nth"), [(True, 1), (True, 2), (False, 1), (False, 2), (False, 3)]
)
def test_an_interrupt_while_publishing_keeps_the_old_or_the_new(tmp_path, monkeypatch, able, nth):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    real = {name: getattr(io, name) for name in ("rename", "exchange", "rmtree")}
    calls = []

    def interrupt(name):
        def after(*args):
            done = real[name](*args)
            if done is not False:
                calls.append(name)
                if len(calls) == nth:
                    raise KeyboardInterrupt
            return done

        return after

    if not able:
        monkeypatch.setattr(io, "exchange_names", no_exchange)
    for name in real:
        monkeypatch.setattr(io, name, interrupt(name))
    with pytest.raises(KeyboardInterrupt), staged(out, replace=True) as stage:
        (stage / "new").write_text("")
    monkeypatch.undo()
    steps = ["exchange", "rmtree"] if able else ["rename", "rename", "rmtree"]
    assert calls[:nth] == steps[:nth]
    assert [p.name for p in out.iterdir()] in (["old"], ["new"])
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("able", [True, False])
def test_an_old_output_goes_once_the_new_one_has_its_name_on_the_disk(tmp_path, monkeypatch, able):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    steps = []

    def watch(name):
        real = getattr(io, name)

        def step(*args):
            done = real(*args)
            if done is not False:
                there = [p.name for p in out.iterdir()] if out.exists() else None
                steps.append((name, *(p.name for p in args if p in (out, tmp_path)), there))
            return done

        monkeypatch.setattr(io, name, step)

    if not able:
        monkeypatch.setattr(io, "exchange_names", no_exchange)
    for name in ("rename", "exchange", "fsync_dir", "rmtree"):
        watch(name)
    with staged(out, replace=True) as stage:
        (stage / "new").write_text("")
    monkeypatch.undo()
    names = [("exchange", "out", ["new"])]
    if not able:
        names = [("rename", "out", None), ("rename", "out", ["new"])]
    synced = ("fsync_dir", tmp_path.name, ["new"])
    assert steps == [("fsync_dir", ["old"]), *names, synced, ("rmtree", ["new"])]
    assert leftovers(tmp_path) == []


def test_check_output_accepts_a_free_name_beside(tmp_path):
    check_output(tmp_path / "out", tmp_path / "source")


def test_names_that_begin_alike_are_other_outputs(tmp_path):
    with staged(tmp_path / "out"), staged(tmp_path / "out.2") as stage, staged(tmp_path / "ou"):
        (stage / "f").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ou", "out", "out.2"]


def test_a_failure_of_cleaning_up_does_not_hide_what_went_wrong(tmp_path, monkeypatch):
    def fail(path):
        raise io.failed(path, OSError(5, ""))

    with monkeypatch.context() as patched:
        patched.setattr(io, "rmtree", fail)
        with pytest.raises(ZeroDivisionError), staged(tmp_path / "out"):
            raise ZeroDivisionError
    assert len(leftovers(tmp_path)) == 1
    with staged(tmp_path / "out"):
        assert len(leftovers(tmp_path)) == 1  # this one's own
    assert leftovers(tmp_path) == []


def test_an_output_that_stands_although_its_folder_was_not_synced_is_said_to(tmp_path, monkeypatch):
    real = io.fsync_dir

    def fail_outside(path):
        if path == tmp_path:
            raise io.failed(path, OSError(5, ""))
        real(path)

    out = tmp_path / "out"
    monkeypatch.setattr(io, "fsync_dir", fail_outside)
    for replace in (False, True):
        with pytest.raises(IOFailed) as caught, staged(out, replace=replace) as stage:
            (stage / f"new-{replace}").touch()
        assert (out / f"new-{replace}").exists()
        [note] = (note for note in caught.value.__notes__ if not note.startswith("hint: "))
        assert note.startswith(f"{out} stands whole all the same")
        assert len(leftovers(tmp_path)) == replace  # the old one goes once the new one is safe
    monkeypatch.undo()
    with staged(out, replace=True) as stage:
        (stage / "newer").touch()
    assert leftovers(tmp_path) == []
