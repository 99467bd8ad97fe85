"""Proofs that hold without the source, and the order in which files come to stand."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shutil
import stat
import threading

import pytest
from conftest import FIXTURES
from quark_factory import write_checkpoint
from safetensors.torch import load_file
from test_convert import LINEARS, converted

from mxfp4prep import io, workers
from mxfp4prep.errors import IntegrityError
from mxfp4prep.restore import restore
from mxfp4prep.verify import verify
from mxfp4prep.workers import Cancel, Cancelled, run_jobs

DIGESTS, MANIFEST, SUMS = "mxfp4prep.digests.json", "mxfp4prep.json", "SHA256SUMS"
SIDE = {"tokenizer.json": b"{\n }", "sub/modeling.py": b"if x:\n  pass\n"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    base = tmp_path_factory.mktemp("proofs")
    source = write_checkpoint(base / "m", LINEARS, shards=2, side_files=SIDE)
    return converted(source, base / "out").out


@pytest.fixture
def prepared(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "out")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def put_consistently(root, name, content):
    """Replaces a file and makes manifest and SHA256SUMS say that it was always so."""
    (root / name).write_bytes(content)
    document = json.loads((root / MANIFEST).read_text())
    [record] = [record for record in document["files"] if record["name"] == name]
    record.update(nbytes=len(content), sha256=sha256(root / name))
    if name == DIGESTS:
        document["digests"]["sha256"] = record["sha256"]
    (root / MANIFEST).write_text(json.dumps(document))
    sum_again(root, name, MANIFEST)


def sum_again(root, *names):
    lines = (root / SUMS).read_text().splitlines()
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    assert set(names) <= set(listed)
    listed |= {name: sha256(root / name) for name in names}
    (root / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in listed.items()))


def edit_digests(root, change):
    document = json.loads((root / DIGESTS).read_text())
    change(document["tensors"])
    put_consistently(root, DIGESTS, json.dumps(document).encode())


def refused(prepared, tmp_path):
    """Restore refuses with IntegrityError and leaves nothing."""
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(IntegrityError) as caught:
        restore(prepared, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.o_proj.weight_scale",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.weight_scale",
        "model.norm.weight",
    ],
)
def test_lossless_is_proven_by_the_sources_digest_alone(prepared, tmp_path, name):
    def another_source(tensors):
        tensors[name][0] = f"{int(tensors[name][0], 16) ^ 1:032x}"

    edit_digests(prepared, another_source)
    assert verify(prepared, "quick").problems == ()  # all that can be seen without the bytes agrees
    [problem] = verify(prepared, "full").problems
    assert problem.tensor == name
    assert problem.what.startswith("inverse")
    assert name in refused(prepared, tmp_path)


def test_digests_that_were_consistently_rewritten_unchanged_still_pass(prepared, tmp_path):
    edit_digests(prepared, lambda tensors: None)
    assert verify(prepared).problems == ()
    assert restore(prepared, tmp_path / "back").files == 6


def test_a_digest_pair_too_few(prepared, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_digests(prepared, lambda tensors: tensors.pop(name))
    for level in ("quick", "full"):
        assert (DIGESTS, name) in {(p.file, p.tensor) for p in verify(prepared, level).problems}
    assert name in refused(prepared, tmp_path)


def test_a_digest_pair_too_many(prepared):
    edit_digests(prepared, lambda tensors: tensors.update({"ghost": ["0" * 32, "0" * 32]}))
    for level in ("quick", "full"):
        [problem] = verify(prepared, level).problems
        assert (problem.file, problem.tensor) == (DIGESTS, "ghost")


@pytest.mark.parametrize("name", ["tokenizer.json", "sub/modeling.py", "source/config.json"])
def test_a_file_that_is_copied_back_was_changed_in_place(prepared, tmp_path, name):
    path = prepared / name
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"\n ", b"  ", 1))
    assert path.stat().st_size == len(raw)
    assert path.read_bytes() != raw
    sum_again(prepared, name)
    assert name in refused(prepared, tmp_path)


@pytest.mark.parametrize("name", ["source/config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("level", ["quick", "full"])
def test_documents_of_the_source_have_a_second_digest(prepared, name, level):
    raw = (prepared / name).read_bytes()
    put_consistently(prepared, name, raw.replace(b"\n ", b"  ", 1))
    assert name in {problem.file for problem in verify(prepared, level).problems}


def test_a_wrong_index_of_a_real_export_is_mended(tmp_path):
    source = FIXTURES / "llama-w4a4-file2file"
    out = converted(source, tmp_path / "out").out
    name = "model.safetensors.index.json"
    tensors = {}
    for path in out.glob("*.safetensors"):
        tensors |= load_file(path)
    index = json.loads((out / name).read_text())
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["metadata"]["total_size"] == total
    assert json.loads((source / name).read_text())["metadata"].get("total_size") != total
    assert set(index["weight_map"]) == set(tensors)
    assert (out / "source" / name).read_bytes() == (source / name).read_bytes()


class Spy:
    """What was done to files, in order; descriptors by the path they were created for."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.paths = {}
        lock = threading.Lock()
        real = {name: getattr(io, name) for name in ("create", "fsync", "rename", "fsync_dir")}

        def create(path):
            fd = real["create"](path)
            with lock:
                self.paths[fd] = path
                self.calls.append(("create", path))
            return fd

        def fsync(fd, where):
            real["fsync"](fd, where)
            with lock:
                self.calls.append(("fsync", self.paths[fd]))

        def rename(source, target):
            real["rename"](source, target)
            with lock:
                self.calls.append(("rename", source, target))

        def fsync_dir(path):
            real["fsync_dir"](path)
            with lock:
                self.calls.append(("fsync_dir", path))

        for name, spy in (
            ("create", create),
            ("fsync", fsync),
            ("rename", rename),
            ("fsync_dir", fsync_dir),
        ):
            monkeypatch.setattr(io, name, spy)


def check_order(calls, out):
    created = [call[1] for call in calls if call[0] == "create"]
    assert len(set(created)) == len(created)
    settled = []
    for path in created:
        [renamed] = [at for at, call in enumerate(calls) if call[:2] == ("rename", path)]
        assert calls.index(("create", path)) < calls.index(("fsync", path)) < renamed
        target = calls[renamed][2]
        assert target.parent == path.parent
        assert target != path
        assert path.name.startswith(target.name)
        settled.append(target)
    renames = [at for at, call in enumerate(calls) if call[0] == "rename"]
    last = renames[-1]
    _, stage, target = calls[last]
    assert target == out
    assert stage.parent == out.parent
    assert len(renames) == len(created) + 1
    assert renames[-2] < calls.index(("fsync_dir", stage)) < last
    assert ("fsync_dir", out.parent) in calls[last + 1 :]
    assert all(call[0] == "fsync_dir" for call in calls[last + 1 :])
    return [path.relative_to(stage).as_posix() for path in settled]


def test_files_are_synced_before_they_get_their_names_and_the_manifest_comes_last(
    tmp_path, monkeypatch, tried
):
    source = write_checkpoint(tmp_path / "m", LINEARS, shards=2, side_files=SIDE)
    spy = Spy(monkeypatch)
    out = converted(source, tmp_path / "out", workers=2).out
    names = check_order(spy.calls, out)
    assert names[-2:] == [SUMS, MANIFEST]
    assert set(names) == {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    tried("F3")


def test_restore_keeps_the_same_order(prepared, tmp_path, monkeypatch, tried):
    spy = Spy(monkeypatch)
    restore(prepared, tmp_path / "back", workers=2)
    check_order(spy.calls, tmp_path / "back")
    tried("F3")


def test_the_first_failure_stops_the_others_and_is_the_one_reported():
    cancel = Cancel(None)
    began = threading.Barrier(3, timeout=20)
    stopped = []

    def fail():
        began.wait()
        raise ValueError("the first")

    def work(after):
        began.wait()
        try:
            for _ in range(20_000):
                cancel.done(1)
                threading.Event().wait(0.001)
        except Cancelled:
            stopped.append(after)
            if after is not None:
                raise after from None
            raise

    jobs = [lambda: work(None), lambda: work(OSError("while stopping")), fail]
    with pytest.raises(ValueError, match="the first"):
        run_jobs(jobs, 3, cancel)
    assert len(stopped) == 2


def test_jobs_that_wait_behind_a_failure_never_run():
    cancel = Cancel(None)
    ran = []

    def fail():
        ran.append("fail")
        raise ValueError("the first")

    def wait():
        cancel.done(1)
        ran.append("wait")
        while True:
            cancel.done(1)
            threading.Event().wait(0.001)

    with pytest.raises(ValueError, match="the first"):
        run_jobs([fail, wait, wait, wait, wait], 1, cancel)
    assert ran in (["fail"], ["fail", "wait"])


def test_modes_follow_the_umask(tmp_path):
    source = write_checkpoint(tmp_path / "m", LINEARS, side_files=SIDE)
    before = os.umask(0o027)
    try:
        out = converted(source, tmp_path / "out").out
        back = restore(out, tmp_path / "back").out
    finally:
        os.umask(before)
    for root in (out, back):
        found = {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in (root, *root.rglob("*"))}
        assert found == {(False, 0o640), (True, 0o750)}


def test_the_failure_that_came_first_is_the_one_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when several have failed by the time that anybody looks."""
    everything = concurrent.futures.wait
    monkeypatch.setattr(workers, "wait", lambda futures, return_when: everything(futures))
    failed = threading.Event()

    def first() -> None:
        try:
            raise ValueError("first")
        finally:
            threading.Timer(0.05, failed.set).start()

    def second() -> None:
        failed.wait(10)
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        run_jobs([second, first], 2, Cancel(None))
