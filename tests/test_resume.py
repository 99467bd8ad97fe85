"""`convert --resume`: a finished shard of an earlier run is taken over if every byte is right."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from quark_factory import write_checkpoint
from test_convert import files_of, planned

from mxfp4prep import cli, io
from mxfp4prep.convert import convert
from mxfp4prep.errors import IOFailed, UnsafeOutput
from mxfp4prep.leftovers import _host, _started, abandoned, stage_path
from mxfp4prep.staging import staged

LINEARS = {
    "model.layers.0.mlp.down_proj": (64, 256),
    "model.layers.1.mlp.down_proj": (64, 256),
    "model.layers.1.mlp.up_proj": (64, 512),
}
FIRST, SECOND, THIRD = (f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3))


class Case:
    """A source of three shards, its output, and a place for a run that was killed before."""

    def __init__(self, base: Path, whole: Path, source: Path) -> None:
        self.base, self.source = base, source
        self.whole = files_of(whole)
        self.out = base / "out"
        self.pid = 999_999_990

    def killed(self, *names: str, of: Path | None = None) -> Path:
        """The staging folder of a dead run that had finished those files, and begun another."""
        self.pid += 1
        stage = self.base / f".out.mxfp4prep-{_host()}-{self.pid}-5"
        stage.mkdir()
        for name in names:
            path = stage / name
            path.write_bytes(self.whole[name] if of is None else (of / name).read_bytes())
        (stage / f"{THIRD}.mxfp4prep.part").write_bytes(self.whole[THIRD][:500])
        (stage / "config.json").write_text("{}")
        return stage

    def resume(self, **options):
        return convert(planned(self.source), self.out, workers=1, resume=True, **options)

    def check(self, done, *reused: str, differ: tuple[str, ...] = ()) -> None:
        assert files_of(self.out) == self.whole
        assert done.reused == reused
        noticed = {f.where for f in done.findings if f.code == "not_reused"}
        assert noticed == set(differ)
        assert [p.name for p in self.base.iterdir() if p.name.startswith(".")] == []
        modes = {p.stat().st_mode & 0o777 for p in self.out.rglob("*") if p.is_file()}
        assert len(modes) == 1


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    base = tmp_path_factory.mktemp("resume")
    source = write_checkpoint(base / "m", LINEARS, shards=3)
    return source, convert(planned(source), base / "whole").out


@pytest.fixture
def case(pristine, tmp_path):
    source, whole = pristine
    return Case(tmp_path, whole, shutil.copytree(source, tmp_path / "m"))


def written(monkeypatch) -> list[str]:
    """Names of the files that are created from now on."""
    names: list[str] = []
    real = io.create

    def create(path):
        names.append(path.name.removesuffix(".mxfp4prep.part"))
        return real(path)

    monkeypatch.setattr(io, "create", create)
    return names


def test_finished_shards_are_taken_over_and_not_written(case, monkeypatch):
    case.killed(FIRST, SECOND)
    names = written(monkeypatch)
    case.check(case.resume(), FIRST, SECOND)
    assert {FIRST, SECOND} & set(names) == set()
    assert THIRD in names


def test_all_shards_finished(case):
    case.killed(FIRST, SECOND, THIRD)
    case.check(case.resume(), FIRST, SECOND, THIRD)


def test_nothing_to_resume_is_a_plain_run(case):
    case.check(case.resume())


def test_without_resume_it_is_swept(case):
    case.killed(FIRST)
    case.check(convert(planned(case.source), case.out))


@pytest.mark.parametrize("at", ["length", "header", "first byte", "middle", "last byte"])
def test_one_flipped_bit_anywhere_and_the_shard_is_written_anew(case, at):
    path = case.killed(FIRST, SECOND) / SECOND
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    place = {
        "length": 0,
        "header": 60,
        "first byte": start,
        "middle": (start + len(raw)) // 2,
        "last byte": -1,
    }[at]
    raw[place] ^= 1
    path.write_bytes(raw)
    case.check(case.resume(), FIRST, differ=(SECOND,))


@pytest.mark.parametrize("nbytes", [0, 7, 100, -1])
def test_a_shard_that_was_cut(case, nbytes):
    path = case.killed(FIRST) / FIRST
    path.write_bytes(path.read_bytes()[:nbytes])
    case.check(case.resume(), differ=(FIRST,))


def test_a_shard_that_goes_on_after_its_end(case):
    path = case.killed(FIRST) / FIRST
    path.write_bytes(path.read_bytes() + b"\0")
    case.check(case.resume(), differ=(FIRST,))


def test_the_source_has_changed_since(case, tmp_path):
    """With its size and time as they were, which no comparison of either would notice."""
    stage = case.killed(FIRST, SECOND)
    path = case.source / SECOND
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 0xFF
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert stage.exists()
    done = case.resume()
    case.whole = files_of(convert(planned(case.source), tmp_path / "anew").out)
    case.check(done, FIRST, differ=(SECOND,))


def test_the_options_have_changed_since(case, tmp_path):
    """What comes out the same under other options is taken over all the same."""
    other = convert(planned(case.source, layout="triton"), tmp_path / "triton").out
    same = tuple(
        name for name in (FIRST, SECOND, THIRD) if (other / name).read_bytes() == case.whole[name]
    )
    case.killed(FIRST, SECOND, THIRD, of=other)
    differ = tuple(name for name in (FIRST, SECOND, THIRD) if name not in same)
    assert differ
    case.check(case.resume(), *same, differ=differ)


def test_a_restore_that_was_killed_has_nothing_for_a_conversion(case):
    case.killed(FIRST, SECOND, of=case.source)
    case.check(case.resume(), differ=(FIRST, SECOND))


def test_of_two_killed_runs_the_newer_is_asked_first_and_the_older_all_the_same(case):
    old, new = case.killed(FIRST, SECOND), case.killed(FIRST)
    os.utime(old, ns=(1, 1))
    path = new / FIRST
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    done = case.resume()
    case.check(done, FIRST, SECOND)


def test_a_living_run_is_respected_and_keeps_its_folder(case):
    other = subprocess.Popen(["sleep", "60"])
    try:
        stage = case.base / f".out.mxfp4prep-{_host()}-{other.pid}-{_started(other.pid)}"
        stage.mkdir()
        (stage / FIRST).write_bytes(case.whole[FIRST])
        with pytest.raises(UnsafeOutput, match="another run is writing it"):
            case.resume()
        assert (stage / FIRST).exists()
    finally:
        other.kill()
        other.wait()
    case.check(case.resume(), FIRST)


def test_files_that_nobody_asked_for_are_neither_published_nor_followed(case, tmp_path):
    stage = case.killed(FIRST)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    (stage / "notes.txt").write_text("x")
    (stage / "deep").mkdir()
    (stage / "deep" / "evil.safetensors").write_text("x")
    (stage / "link").symlink_to(precious)
    (stage / SECOND).symlink_to(case.source / SECOND)
    os.mkfifo(stage / THIRD)
    case.check(case.resume(), FIRST)
    assert (precious / "thesis.tex").exists()


def test_a_shard_that_has_another_name_elsewhere_is_left_alone(case, tmp_path):
    """Who holds the other name could change the published file."""
    stage = case.killed(FIRST)
    os.link(stage / FIRST, tmp_path / "other")
    case.check(case.resume(), differ=(FIRST,))
    assert (tmp_path / "other").read_bytes() == case.whole[FIRST]
    assert (tmp_path / "other").stat().st_ino != (case.out / FIRST).stat().st_ino


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_has_left_is_not_ours(case):
    stage = case.killed(FIRST)
    os.chown(stage / FIRST, 12345, 12345)
    case.check(case.resume(), differ=(FIRST,))
    shutil.rmtree(case.out)
    stage = case.killed(FIRST)
    os.chown(stage, 12345, 12345)
    for resume in (True, False):
        with pytest.raises(UnsafeOutput, match="another user's run has left something"):
            convert(planned(case.source), case.out, resume=resume)
        assert (stage / FIRST).exists()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_of_this_run_counts(case, umask):
    path = case.killed(FIRST) / FIRST
    path.chmod(0o640)
    before = os.umask(umask)
    try:
        case.check(case.resume(), FIRST)
    finally:
        os.umask(before)
    assert (case.out / FIRST).stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_shard_whose_bytes_the_disk_no_longer_gives(case, monkeypatch):
    case.killed(FIRST, SECOND)
    real = io.pread_into

    def broken(fd, view, offset, where):
        if Path(str(where)).name == FIRST and ".mxfp4prep-left" in str(where):
            raise io.failed(where, OSError(errno.EIO, "bad sector"))
        real(fd, view, offset, where)

    monkeypatch.setattr(io, "pread_into", broken)
    case.check(case.resume(), SECOND, differ=(FIRST,))


def test_progress_ends_where_the_work_ends_though_a_shard_was_begun_twice(case):
    path = case.killed(FIRST, SECOND) / SECOND
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    done = []
    result = case.resume(progress=done.append)
    plain = []
    convert(planned(case.source), case.base / "plain", workers=1, progress=plain.append)
    assert sum(done) == sum(plain)
    assert result.reused in ((FIRST,), (FIRST, SECOND))


def fail_at(monkeypatch, *names: str) -> None:
    """The disk is full when a file of such a name is begun."""
    real = io.create

    def create(path):
        if path.name.startswith(names):
            raise io.failed(path, OSError(errno.ENOSPC, ""))
        return real(path)

    monkeypatch.setattr(io, "create", create)


def said_beside(error):
    """The notes of an error but for its hint."""
    return [note for note in error.__notes__ if not note.startswith("hint: ")]


@pytest.mark.parametrize("name", [THIRD, "config.json", "mxfp4prep.json", "SHA256SUMS"])
def test_a_full_disk_keeps_what_is_finished_and_the_next_run_takes_it_over(case, monkeypatch, name):
    with monkeypatch.context() as patched:
        fail_at(patched, name)
        with pytest.raises(IOFailed, match="the disk is full") as caught:
            case.resume()
    [note] = said_beside(caught.value)
    [kept] = [p for p in case.base.iterdir() if p.name.startswith(".")]
    assert str(kept) in note
    finished = sorted(p.name for p in kept.iterdir())
    if name == THIRD:  # another shard may be under way by then
        assert set(finished) < {FIRST, SECOND, THIRD}
    else:
        assert finished == [FIRST, SECOND, THIRD]
    case.check(case.resume(), *finished)


def test_a_failure_before_the_first_file_keeps_nothing(case, monkeypatch):
    with monkeypatch.context() as patched:
        fail_at(patched, "model-")
        with pytest.raises(IOFailed) as caught:
            case.resume()
    assert said_beside(caught.value) == []
    assert [p.name for p in case.base.iterdir() if p.name.startswith(".")] == []


def test_a_failed_resume_keeps_what_it_had_not_come_to_yet(case, monkeypatch):
    case.killed(FIRST, SECOND)
    with monkeypatch.context() as patched:
        patched.setattr(io, "chmod", lambda path, mode: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.resume()
    kept = {p.name for folder in abandoned(case.out) for p in folder.rglob("*") if p.is_file()}
    assert SECOND in kept or FIRST in kept
    done = case.resume()
    assert files_of(case.out) == case.whole
    assert done.reused


def test_an_interrupt_keeps_what_is_finished(case):
    total = 0

    def interrupt(nbytes):
        nonlocal total
        total += nbytes
        if total > 25_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.resume(progress=interrupt)
    done = case.resume()
    case.check(done, *done.reused)
    assert done.reused


def test_room_is_counted_without_what_is_taken_over_and_after_the_sweep(case, monkeypatch):
    case.killed(FIRST, SECOND)
    plan = planned(case.source)
    taken = sum(len(case.whole[name]) for name in (FIRST, SECOND))
    monkeypatch.setattr(io, "free_nbytes", lambda folder: plan.nbytes + (64 << 20) + 2 - taken)
    case.check(case.resume(), FIRST, SECOND)
    shutil.rmtree(case.out)
    stage = case.killed(FIRST, SECOND)

    def free(folder):
        assert not stage.exists(), "measured before the sweep"
        return 1 << 40

    monkeypatch.setattr(io, "free_nbytes", free)
    case.check(convert(planned(case.source), case.out))


def test_with_overwrite_the_old_output_stays_until_the_new_one_is_there(case, monkeypatch):
    convert(planned(case.source, layout="triton"), case.out)
    old = files_of(case.out)
    case.killed(FIRST)
    with monkeypatch.context() as patched:
        fail_at(patched, "mxfp4prep.json")
        with pytest.raises(IOFailed):
            case.resume(overwrite=True)
    assert files_of(case.out) == old
    case.check(case.resume(overwrite=True), FIRST, SECOND, THIRD)


def test_an_output_that_exists_is_safe_with_resume_too(case):
    case.out.mkdir()
    (case.out / "thesis.tex").write_text("x")
    stage = case.killed(FIRST)
    with pytest.raises(UnsafeOutput, match="exists already"):
        case.resume()
    assert (stage / FIRST).exists()


def test_the_command_tells_what_it_took_over(case, capsys):
    case.killed(FIRST, SECOND)
    words = ["convert", str(case.source), str(case.out), "--resume", "--no-progress"]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "earlier runs have finished 2 of 3 shards" in capsys.readouterr().err
    assert len(abandoned(case.out)) == 1
    assert cli.main([*words, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["reused"] == [FIRST, SECOND]
    assert files_of(case.out) == case.whole


def test_the_command_tells_what_it_did_not_take_over(case, capsys):
    path = case.killed(FIRST) / FIRST
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    words = ["convert", str(case.source), str(case.out), "--resume", "--no-progress"]
    assert cli.main(words) == 0
    told = capsys.readouterr()
    assert f"warning: {FIRST}: what an earlier run left" in told.err
    assert "taken over" not in told.out
    assert files_of(case.out) == case.whole


@pytest.mark.parametrize(
    ("words", "names", "told"),
    [
        ([], [FIRST, SECOND], "2 of 3 shards: without --resume they are removed"),
        (["--dry-run"], [FIRST, SECOND], "2 of 3 shards: without --resume they are removed"),
        (["--resume"], [FIRST], "1 of 3 shards: each is compared before it is taken over"),
        (["--resume"], [], "0 of 3 shards: this one starts from the beginning"),
        ([], [], None),
        (["-q"], [FIRST], None),
    ],
)
def test_the_command_tells_first_what_becomes_of_earlier_shards(case, capsys, words, names, told):
    if names:
        case.killed(*names)
    words = ["convert", str(case.source), str(case.out), "--no-progress", *words]
    assert cli.main(words) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "earlier runs" in line]
    assert notes == ([f"note: earlier runs have finished {told}"] if told else [])


@pytest.mark.parametrize("resume", [False, True])
def test_who_fails_without_resume_is_told_what_it_would_have_kept(
    case, monkeypatch, capsys, resume
):
    real = io.create

    def create(path):
        if path.name.startswith(THIRD):
            raise io.failed(path, OSError(errno.ENOSPC, "full"))
        return real(path)

    monkeypatch.setattr(io, "create", create)
    words = ["convert", str(case.source), str(case.out), "--no-progress", "--workers", "1"]
    assert cli.main([*words, *(["--resume"] if resume else [])]) == 6
    notes = [line for line in capsys.readouterr().err.splitlines() if "kept" in line]
    kept = sum(1 for path in case.base.glob(".out.*/model-*"))
    assert (kept > 0) is resume
    assert len(notes) == 1
    assert re.match(
        r"note: kept for --resume: \d" if resume else r"note: not kept: .*--resume", notes[0]
    )


def test_a_folder_that_another_run_claims_at_the_same_time_is_its(case, monkeypatch):
    case.killed(FIRST)
    real = io.rename

    def snatch(source, target):
        if "-left0-" in target.name:
            shutil.rmtree(source)
        real(source, target)

    monkeypatch.setattr(io, "rename", snatch)
    case.check(case.resume())


def test_two_failures_in_one_process_add_up(case, monkeypatch):
    shards = sorted(planned(case.source).shards, key=lambda shard: -shard.nbytes)
    order = [shard.shard.name for shard in shards]
    for full in (order[1:], order[2:]):
        with monkeypatch.context() as patched:
            fail_at(patched, *full)
            with pytest.raises(IOFailed):
                case.resume()
    case.check(case.resume(), *sorted(order[:2]))


def test_a_folder_that_is_not_a_runs_is_no_leftover(case):
    names = [
        f".out.mxfp4prep-{_host()}-5",
        f".out.mxfp4prep-new-{_host()}-999999999-5",
        f".out2.mxfp4prep-{_host()}-999999999-5",
        f".out.mxfp4prep-{_host()}-999999999-5.bak",
    ]
    for name in names:
        (case.base / name).mkdir()
    file = stage_path(case.out).with_name(f".out.mxfp4prep-{_host()}-999999998-5")
    file.write_text("no folder")
    assert abandoned(case.out) == []
    with staged(case.out):
        pass
    assert file.exists()
    assert all((case.base / name).is_dir() for name in names)
