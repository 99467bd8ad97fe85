"""A source that changes while it is read: exit code 6 and its name, never SIGBUS, nothing left."""

from __future__ import annotations

import os
import shutil

import pytest
from quark_factory import write_checkpoint
from test_convert import files_of, planned

from mxfp4prep import cli, io
from mxfp4prep.convert import convert

LINEARS = {
    "model.layers.0.mlp.down_proj": (64, 256),
    "model.layers.1.mlp.down_proj": (64, 256),
}
SHARD = "model-00002-of-00002.safetensors"
SIDE = "tokenizer.json"


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def grow(path):
    with path.open("ab") as file:
        file.write(b"\0" * 100)


def rewrite_in_place(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    os.utime(path, ns=(1, 1))  # a coarse clock may give the same time again


def replace(path):
    new = path.with_name("new")
    shutil.copy2(path, new)
    new.rename(path)


def delete(path):
    path.unlink()


def put_a_folder(path):
    path.unlink()
    path.mkdir()


def move_the_source(path):
    path.parent.rename(path.parent.with_name("elsewhere"))


MOVES = (cut, empty, grow, rewrite_in_place, replace, delete, put_a_folder, move_the_source)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    base = tmp_path_factory.mktemp("moving")
    source = write_checkpoint(base / "m", LINEARS, shards=2, side_files={SIDE: b"{}" * 100})
    return source, convert(planned(source), base / "out").out


@pytest.fixture
def source(pristine, tmp_path):
    return shutil.copytree(pristine[0], tmp_path / "m")


@pytest.fixture
def prepared(pristine, tmp_path):
    return shutil.copytree(pristine[1], tmp_path / "prepared")


def move_while_reading(monkeypatch, path, move, before: bool) -> list[str]:
    """Moves `path` at the first read of its data, just before or just after the bytes come."""
    real, moved = io.pread_into, []

    def pread_into(fd, view, offset, where):
        is_it = not moved and path.exists() and os.path.samestat(os.fstat(fd), path.stat())
        if is_it and (offset > 8 or path.suffix != ".safetensors"):  # the header was read already
            moved.append(path.name)
            if before:
                move(path)
            real(fd, view, offset, where)
            if not before:
                move(path)
        else:
            real(fd, view, offset, where)

    monkeypatch.setattr(io, "pread_into", pread_into)
    return moved


def ends_with_6(capsys, out, *words):
    capsys.readouterr()
    beside = sorted(p.name for p in out.parent.iterdir())
    assert cli.main([*map(str, words), "--workers", "1", "--no-progress"]) == 6
    told = capsys.readouterr().err.splitlines()
    told = [line for line in told if not line.startswith(("warning:", "note:"))]
    where = [line for line in told[1:-1] if line != f"in: {words[1]}"]
    assert (where, "in: " not in "".join(told)) == ([], str(words[1]) in told[0])
    assert [told[0][:7], told[-1][:6]] == ["error: ", "hint: "]
    assert not out.exists()
    left = {p.name for p in out.parent.iterdir()} - {"elsewhere"}
    assert left <= set(beside)
    return told[0]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", [SHARD, SIDE])
@pytest.mark.parametrize("move", MOVES)
def test_convert(source, tmp_path, monkeypatch, capsys, tried, move, name, before):
    moved = move_while_reading(monkeypatch, source / name, move, before)
    error = ends_with_6(capsys, tmp_path / "out", "convert", source, tmp_path / "out")
    assert moved == [name]
    assert name in error
    tried("F5")


@pytest.mark.parametrize("move", MOVES)
def test_restore(prepared, tmp_path, monkeypatch, capsys, tried, move):
    moved = move_while_reading(monkeypatch, prepared / SHARD, move, before=False)
    error = ends_with_6(capsys, tmp_path / "back", "restore", prepared, tmp_path / "back")
    assert moved == [SHARD]
    assert SHARD in error
    tried("F5")


@pytest.mark.parametrize("move", [cut, grow, delete])
@pytest.mark.parametrize("resume", [False, True])
def test_between_the_plan_and_the_work(source, tmp_path, monkeypatch, capsys, move, resume):
    """Another header than the one that was planned for is refused; so is a file that has gone."""
    from mxfp4prep import commands

    real = commands._plan

    def plan_then_move(*args):
        plan = real(*args)
        move(source / SHARD)
        return plan

    monkeypatch.setattr(commands, "_plan", plan_then_move)
    words = ["convert", str(source), str(tmp_path / "out"), *(["--resume"] if resume else [])]
    code = cli.main([*words, "--workers", "1", "-q"])
    assert code in (3, 6)  # 3: what is there by then is no safetensors file
    assert SHARD in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_lost_between_header_and_data(source, tmp_path, monkeypatch, capsys):
    real = io.open_read

    def open_read(path):
        if path.name == SHARD and opened:
            path.chmod(0)
        opened.append(path.name)
        return real(path)

    opened: list[str] = []
    monkeypatch.setattr(io, "open_read", open_read)
    error = ends_with_6(capsys, tmp_path / "out", "convert", source, tmp_path / "out")
    assert "permission denied" in error


@pytest.mark.parametrize("what", ["time", "mode", "a second name"])
def test_what_is_no_change_of_the_bytes(source, tmp_path, monkeypatch, pristine, what):
    """Only a new time counts as a change; another mode or name does not."""

    def touch(path):
        if what == "mode":
            path.chmod(0o600)
        elif what == "a second name":
            os.link(path, tmp_path / "second")
        else:
            os.utime(path, ns=(5, 5))

    moved = move_while_reading(monkeypatch, source / SHARD, touch, before=False)
    code = cli.main(["convert", str(source), str(tmp_path / "out"), "-q"])
    assert moved
    assert code == (6 if what == "time" else 0)
    if code == 0:
        assert files_of(tmp_path / "out") == files_of(pristine[1])
