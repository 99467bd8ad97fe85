"""Repositories on a Hub: the same checkpoint as from a directory, few bytes, one error each."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import FIXTURES, LOOKALIKES, MXFP4_FIXTURES
from hub_server import COMMIT, Hub, serving
from quark_factory import model_config, quant_config, write_checkpoint

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.errors import InvalidCheckpoint, IOFailed, Mxfp4PrepError, Unsupported, UsageError
from mxfp4prep.hub import open_source, retrying
from mxfp4prep.hub.failures import CutShort
from mxfp4prep.hub.ranges import TENSOR_NBYTES, guess_nbytes

constants = pytest.importorskip("huggingface_hub.constants")
from huggingface_hub import close_session  # noqa: E402 - after importorskip

SHARDED = "llama-w4a4-file2file"  # three shards with an index
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
OTHER = "89abcdef" * 5
LINEARS = {"model.layers.0.mlp.down_proj": (64, 256), "model.layers.0.mlp.up_proj": (32, 256)}


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    """A cache of this test's own, no token, no waiting between tries."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "hf"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 20)
    monkeypatch.setattr(retrying, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    point_at(monkeypatch, "http://127.0.0.1:9")


@pytest.fixture(autouse=True, scope="module")
def _one_session():
    """huggingface_hub's session for all tests here: making one reads every certificate."""
    close_session()
    yield
    close_session()


def point_at(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def serve(monkeypatch):
    """serve(root) -> a Hub that serves the folder as org/<its name>, and is the one asked."""
    open_hubs = []

    def start(root: Path, **options) -> Hub:
        context = serving(Hub(root, f"org/{root.name}", **options))
        hub = context.__enter__()
        open_hubs.append(context)
        point_at(monkeypatch, hub.url)
        return hub

    yield start
    for context in open_hubs:
        context.__exit__(None, None, None)


@pytest.fixture
def hub(serve):
    return serve(FIXTURES / SHARDED)


@pytest.fixture
def made(tmp_path, serve):
    """A small checkpoint of three shards that a test may damage, and its Hub."""
    return serve(write_checkpoint(tmp_path / "m", LINEARS, shards=3))


def fails(source, match, kind=InvalidCheckpoint, hint=""):
    """The one error of opening `source`: its class, its words and its way out."""
    with pytest.raises(Mxfp4PrepError, match=match) as caught:
        open_source(source)
    assert type(caught.value) is kind
    assert hint in (caught.value.hint or "")
    text = f"{caught.value} {caught.value.hint}"
    assert text.isprintable()
    assert "secret" not in text
    assert "traceback" not in text.lower()
    return caught.value


def facts(checkpoint):
    """All that a checkpoint says, less where it lies."""
    return {
        "name": checkpoint.name,
        "config": checkpoint.config,
        "config_bytes": checkpoint.config_bytes,
        "index": (checkpoint.index_bytes, checkpoint.index_metadata, checkpoint.indexed),
        "shards": [(shard.name, shard.header) for shard in checkpoint.shards],
        "side_files": checkpoint.side_files,
        "tensors": checkpoint.tensors,
        "shard_of": {tensor: shard.name for tensor, shard in checkpoint.shard_of.items()},
        "findings": checkpoint.findings,
    }


def header_nbytes(path):
    with path.open("rb") as handle:
        return 8 + struct.unpack("<Q", handle.read(8))[0]


def snapshot(root, repo, commit=COMMIT, names=None, ref="main"):
    """What `hf download` leaves in the cache: blobs, and links to them."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    here = folder / "snapshots" / commit
    for name in names or [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]:
        blob = folder / "blobs" / f"{commit[:4]}-{name.replace('/', '-')}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, blob)
        link = here / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return here


# --- the same from everywhere


@pytest.mark.parametrize("name", [*MXFP4_FIXTURES, *LOOKALIKES])
@pytest.mark.parametrize("cdn", [False, True], ids=["hub", "cdn"])
def test_a_checkpoint_is_the_same_from_the_hub(serve, name, cdn):
    serve(FIXTURES / name, cdn=cdn)
    remote = open_source(f"org/{name}")
    local = open_source(str(FIXTURES / name))
    assert facts(remote) == facts(local)
    assert (remote.repo, remote.commit) == (f"org/{name}", COMMIT)
    assert (local.repo, local.commit) == (None, None)


def test_findings_are_the_same_from_the_hub(tmp_path, serve):
    root = write_checkpoint(tmp_path / "odd", LINEARS, shards=2)
    shutil.copyfile(FIXTURES / "version-0.9" / "model.safetensors", root / "stray.safetensors")
    (root / ".cache").mkdir()
    (root / ".cache" / "x").write_text("x")
    (root / "sub").mkdir()
    (root / "sub" / "code.py").write_text("x")
    index = json.loads((root / INDEX).read_text())
    index["metadata"]["total_size"] = 3
    del index["weight_map"]["model.norm.weight"]
    (root / INDEX).write_text(json.dumps(index))
    serve(root)
    remote, local = open_source("org/odd"), open_checkpoint(root)
    assert facts(remote) == facts(local)
    assert {f.code for f in remote.findings} == {
        "skipped_folder", "stray_file", "not_in_index", "total_size",
    }  # fmt: skip


def test_a_folder_of_that_name_is_local(tmp_path, monkeypatch, hub):
    write_checkpoint(tmp_path / "org" / SHARDED, LINEARS)
    monkeypatch.chdir(tmp_path)
    assert open_source(f"org/{SHARDED}").repo is None
    assert hub.seen == []


def test_p76_a_snapshot_in_the_cache_is_a_directory_that_knows_its_origin():
    root = FIXTURES / SHARDED
    here = snapshot(root, "org/model")
    checkpoint = open_source(str(here))
    assert facts(checkpoint) == {**facts(open_checkpoint(root)), "name": "model"}
    assert (checkpoint.repo, checkpoint.commit) == ("org/model", COMMIT)
    assert checkpoint.absent == frozenset()
    checkpoint.require_local()
    (here / FIRST).resolve().unlink()
    fails(str(here), "a link to a file that is not there")


# --- what is asked, and how much comes


def test_headers_come_in_one_request_each_and_data_stays_there(hub):
    open_source(f"org/{SHARDED}")
    root = FIXTURES / SHARDED
    for shard in sorted(root.glob("*.safetensors")):
        (seen,) = hub.of(shard.name)
        assert (seen.status, seen.encoding) == (206, "identity")
        assert header_nbytes(shard) <= seen.nbytes < 3 * header_nbytes(shard)
    expected = {"config.json", INDEX, *(p.name for p in root.glob("*.safetensors"))}
    assert {seen.path.rpartition("/")[2] for seen in hub.seen if "/resolve/" in seen.path} == (
        expected
    )
    assert len([seen for seen in hub.seen if seen.path.startswith("/api/models/")]) == 1
    assert hub.body_nbytes() < 20_000


def test_every_read_is_at_one_commit_although_the_branch_moves(hub):
    hub.revisions = {"v1": COMMIT}
    checkpoint = open_source(f"org/{SHARDED}@v1")
    reads = [seen.path for seen in hub.seen if "/resolve/" in seen.path]
    assert len(reads) >= 5
    assert all(f"/resolve/{COMMIT}/" in path for path in reads)
    assert checkpoint.commit == COMMIT
    assert [s.path for s in hub.seen if "/api/" in s.path] == [
        f"/api/models/org/{SHARDED}/revision/v1"
    ]


@pytest.mark.parametrize("revision", ["main", "refs/pr/3", "v1.0+quark", COMMIT])
def test_revisions_reach_the_hub_as_they_are(hub, revision):
    hub.revisions = {revision: COMMIT}
    assert open_source(f"org/{SHARDED}@{revision}").commit == COMMIT
    assert open_source(f"org/{SHARDED}", revision=revision).commit == COMMIT
    asked = {s.path for s in hub.seen if s.path.startswith("/api/")}
    assert asked == {f"/api/models/org/{SHARDED}/revision/{revision}"}


def test_the_token_goes_to_the_hub_and_not_where_it_redirects_to(hub, monkeypatch):
    hub.token, hub.cdn = "hf_abc", True
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    open_source(f"org/{SHARDED}")
    to_hub = {s.authorization for s in hub.seen if s.server == "hub"}
    to_cdn = [s for s in hub.seen if s.server == "cdn"]
    assert to_hub == {"Bearer hf_abc"}
    assert len(to_cdn) == 3
    assert {s.authorization for s in to_cdn} == {None}
    assert all(s.range and s.status == 206 for s in to_cdn)


def test_config_and_index_come_to_lie_in_the_cache_and_headers_do_not(hub):
    first = open_source(f"org/{SHARDED}")
    assert {p.name for p in first.root.iterdir()} == {"config.json", INDEX}
    hub.seen.clear()
    assert facts(open_source(f"org/{SHARDED}")) == facts(first)
    assert not [s for s in hub.seen if s.path.endswith(".json")]
    assert len(hub.seen) == 4  # the commit, three headers


def test_a_shard_in_the_cache_is_read_there(hub):
    root = FIXTURES / SHARDED
    snapshot(root, f"org/{SHARDED}", names=[FIRST, "config.json"])
    checkpoint = open_source(f"org/{SHARDED}")
    assert facts(checkpoint) == facts(open_checkpoint(root))
    assert hub.of(FIRST) == []
    assert len([s for s in hub.seen if s.path.endswith(".safetensors")]) == 2
    assert FIRST not in checkpoint.absent
    checkpoint.require_local([FIRST, "config.json", INDEX])


def test_a_shard_of_another_commit_in_the_cache_is_not(hub):
    snapshot(FIXTURES / SHARDED, f"org/{SHARDED}", commit=OTHER)
    open_source(f"org/{SHARDED}")
    assert len(hub.of(FIRST)) == 1


def test_a_header_longer_than_the_guess_takes_two_requests(tmp_path, serve):
    # Without an index nothing is known about a file: 256 KiB are asked for, then the rest.
    names = [f"model.layers.{i}.{'x' * 200}.weight" for i in range(1500)]
    root = write_checkpoint(tmp_path / "m", LINEARS)
    file, need = safetensors(names)
    hub = serve(root, files={"model.safetensors": file})
    assert list(open_source("org/m").tensors) == names
    seen = hub.of("model.safetensors")
    assert [s.range for s in seen] == ["bytes=0-262143", f"bytes=262144-{need - 1}"]
    assert sum(s.nbytes for s in seen) == need


def test_a_padded_header_that_the_index_does_not_hint_at(made):
    name = "model-00001-of-00003.safetensors"
    plain = (made.root / name).read_bytes()
    length = struct.unpack("<Q", plain[:8])[0]
    padded = struct.pack("<Q", length + 4096) + plain[8 : 8 + length] + b" " * 4096
    made.files = {name: padded + plain[8 + length :]}
    assert open_source("org/m").tensors == open_checkpoint(made.root).tensors
    assert len(made.of(name)) == 2


def safetensors(names):
    """A file of one-byte tensors, and how long its header is with the length bytes."""
    document = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i, name in enumerate(names)
    }
    raw = json.dumps(document, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(len(names)), 8 + len(raw)


def test_the_guess_follows_the_index():
    names = ["a.weight", "b.weight_scale"]
    assert guess_nbytes(names) == 8 + 14 + 2 * TENSOR_NBYTES + 512
    assert guess_nbytes([]) == 512
    assert guess_nbytes(["x" * 1000] * 100_000) == 8 << 20


def test_real_size_sixty_shards_in_few_requests_and_bytes(tmp_path, serve):
    names = [f"model-{i + 1:05d}-of-00060.safetensors" for i in range(60)]
    root = tmp_path / "large"
    root.mkdir()
    weight_map, headers, total = {}, 0, 0
    for i, file in enumerate(names):
        document, offset = {"__metadata__": {"format": "pt"}}, 0
        for j in range(320):
            at = f"model.layers.{i}.mlp.experts.{j}.down_proj"
            for leaf, shape in (("weight", [4096, 768]), ("weight_scale", [4096, 48])):
                end = offset + shape[0] * shape[1]
                entry = {"dtype": "U8", "shape": shape, "data_offsets": [offset, end]}
                document[f"{at}.{leaf}"] = entry
                weight_map[f"{at}.{leaf}"] = file
                offset = end
        raw = json.dumps(document, separators=(",", ":")).encode()
        with (root / file).open("wb") as handle:
            handle.write(struct.pack("<Q", len(raw)) + raw)
            handle.truncate(8 + len(raw) + offset)
        headers += 8 + len(raw)
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / INDEX).write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(model_config()))
    hub = serve(root, cdn=True, delay=0.05)
    steps = []
    checkpoint = open_source("org/large", progress=lambda done, total: steps.append((done, total)))
    assert len(checkpoint.tensors) == 60 * 640
    assert sum(shard.header.file_nbytes for shard in checkpoint.shards) == total + headers
    assert total > 60 * 10**9
    reads = [s for s in hub.seen if s.server == "cdn"]
    assert len(reads) == 60  # one a header
    assert headers <= sum(s.nbytes for s in reads) < 1.25 * headers
    assert 2 <= hub.most_waiting <= 8
    assert steps == [(done, 60) for done in range(1, 61)]


# --- servers that do not do as they should


@pytest.mark.parametrize("fault", ["no range", "no range, no length"])
def test_without_range_support_reading_ends_with_the_header(tmp_path, serve, fault):
    root = write_checkpoint(tmp_path / "m", LINEARS)
    document = {"w": {"dtype": "U8", "shape": [1 << 30], "data_offsets": [0, 1 << 30]}}
    raw = json.dumps(document).encode()
    with (root / "model.safetensors").open("wb") as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        handle.truncate(8 + len(raw) + (1 << 30))
    hub = serve(root, faults={"model.safetensors": [fault]}, forever=True)
    assert open_source("org/m").tensors["w"].nbytes == 1 << 30
    (seen,) = hub.of("model.safetensors")
    assert seen.status == 200
    assert seen.nbytes < 16 << 20  # what the sockets hold, of 1 GiB


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("shifted", r"Content-Range: found bytes 1-\d+/\d+, expected bytes 0-\d+/\d+"),
        ("shorter", r"Content-Range: found bytes 0-\d+/\d+, expected bytes 0-\d+/\d+"),
        ("other total", r"size: found \d+ bytes, expected \d+, as the Hub lists it"),
        ("no content range", r"Content-Range: found '', expected bytes 0-\d+/SIZE"),
        ("encoded", "the answer is encoded: found gzip, expected plain bytes"),
        ("416", r"a range within the file is refused: found 0, expected \d+"),
    ],
)
def test_answers_that_contradict_themselves(hub, fault, match):
    hub.faults, hub.forever = {FIRST: [fault]}, True
    error = fails(f"org/{SHARDED}", f"{FIRST}: {match}", IOFailed, "HF_ENDPOINT")
    assert error.exit_code == 6
    assert len(hub.of(FIRST)) == 1  # asking again would not help


def test_a_total_that_is_not_told_comes_from_the_list(hub):
    hub.faults, hub.forever = {FIRST: ["no total"]}, True
    assert facts(open_source(f"org/{SHARDED}")) == facts(open_checkpoint(FIXTURES / SHARDED))
    hub.listed = {FIRST: None}
    fails(f"org/{SHARDED}", "neither the answer nor the Hub's list says", IOFailed)


def test_sizes_that_the_list_lacks_come_from_the_answer(hub):
    hub.listed = dict.fromkeys(hub.names())
    assert facts(open_source(f"org/{SHARDED}")) == facts(open_checkpoint(FIXTURES / SHARDED))


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("cut", "no answer from 127.0.0.1:.*peer closed"),
        ("closed early", r"the answer was cut short: 300 of \d+ bytes came"),
        ("reset", "no answer from 127.0.0.1:"),
    ],
)
def test_truncated_answers_are_asked_for_again_and_then_told(hub, fault, match):
    hub.faults = {FIRST: [fault, fault]}
    assert facts(open_source(f"org/{SHARDED}")) == facts(open_checkpoint(FIXTURES / SHARDED))
    assert len(hub.of(FIRST)) == 3
    hub.faults, hub.forever = {FIRST: [fault]}, True
    hub.seen.clear()
    assert fails(f"org/{SHARDED}", f"{FIRST}: {match}", IOFailed).exit_code == 6
    assert len(hub.of(FIRST)) == 4


@pytest.mark.parametrize("where", ["api", FIRST])
def test_a_server_that_stumbles_is_asked_again(hub, where):
    hub.faults = {where: ["500", "503", "429"]}
    open_source(f"org/{SHARDED}")
    asked = hub.of(SHARDED) if where == "api" else hub.of(FIRST)
    assert [s.status for s in asked] == [500, 503, 429, asked[-1].status]
    assert asked[-1].status in (200, 206)


@pytest.mark.parametrize("where", ["api", FIRST])
@pytest.mark.parametrize(
    ("status", "tries", "match", "hint"),
    [
        ("503", 4, "answers 503", "try again later"),
        ("429", 4, "too many requests", "HF_TOKEN"),
        ("429:3600", 1, "too many requests", "HF_TOKEN"),
        ("403", 1, "gives no access", "HF_TOKEN"),
        ("400", 1, "answers 400", "try again later"),
    ],
)
def test_a_server_that_keeps_refusing(hub, where, status, tries, match, hint):
    hub.faults, hub.forever = {where: [status]}, True
    error = fails(f"org/{SHARDED}", match, IOFailed, hint)
    assert error.where == f"org/{SHARDED}" + ("" if where == "api" else f": {FIRST}")
    assert len(hub.of(SHARDED if where == "api" else FIRST)) == tries


def test_what_the_library_tries_again_itself_is_not_tried_four_times_more(hub, monkeypatch):
    calls = []

    def cut_short(*args, **options):
        calls.append(args)
        raise CutShort("1 of 2 bytes came")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", cut_short)
    fails(f"org/{SHARDED}", "config.json: the answer was cut short", IOFailed)
    assert len(calls) == 1


def test_a_small_file_that_is_refused(hub):
    hub.faults, hub.forever = {"config.json": ["400:0"]}, True
    error = fails(f"org/{SHARDED}", r"config\.json: 127\.0\.0\.1:\d+ answers 400", IOFailed)
    assert error.exit_code == 6


def test_a_cdn_that_refuses_is_named_without_the_signed_address(hub, monkeypatch):
    hub.cdn, hub.faults, hub.forever = True, {FIRST: ["403"]}, True
    point_at(monkeypatch, hub.url.replace("127.0.0.1", "localhost"))
    error = fails(f"org/{SHARDED}", r"127\.0\.0\.1 answers 403", IOFailed)
    assert "HF_TOKEN" not in error.hint


def test_redirects_that_never_end(hub):
    hub.faults, hub.forever = {FIRST: ["loop"]}, True
    fails(f"org/{SHARDED}", f"{FIRST}: no answer from .*TooManyRedirects", IOFailed)


def test_the_wait_between_tries_is_the_one_asked_for(hub, monkeypatch):
    waits = []
    monkeypatch.setattr(retrying, "RETRY_SECONDS", (0.25, 1.0, 3.0))
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: waits.append(seconds))
    call = iter([OSError("x")])
    with pytest.raises(IOFailed):
        retrying.patiently(lambda: (_ for _ in ()).throw(next(call)), "org/m", None)
    assert waits == []

    answers = [{}, {"Retry-After": "7"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}]

    def stumble():
        if not answers:
            return "there"
        raise retrying.Refused(503, answers.pop(0), "host")

    assert retrying.patiently(stumble, "org/m", None) == "there"
    assert waits == [0.25, 7.0, 3.0]


# --- headers that lie: the same findings as of a file


def lie_length(nbytes):
    return lambda content: struct.pack("<Q", nbytes) + content[8:]


@pytest.mark.parametrize(
    "damage",
    [
        lie_length(2**60),
        lie_length(99_000_000),
        lie_length(0),
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[:200],
        lambda content: content[:5],
        lambda content: b"",
        lambda content: content.replace(b'"U8"', b'"U9"', 1),
        lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
        lambda content: b"<html>503</html>" * 100,
        lambda content: b"PK\x03\x04" + content[4:],
    ],
    ids=["absurd", "beyond", "zero", "cut", "longer", "in header", "tiny", "empty", "dtype", "lfs",
         "html", "zip"],
)  # fmt: skip
@pytest.mark.parametrize("fault", [None, "no range"])
def test_headers_that_lie_are_found_as_in_a_file(made, damage, fault):
    path = made.root / FIRST
    path.write_bytes(damage(path.read_bytes()))
    if fault:
        made.faults, made.forever = {FIRST: [fault]}, True
    with pytest.raises(InvalidCheckpoint) as local:
        open_checkpoint(made.root)
    error = fails("org/m", FIRST, hint="the file on the Hub is so")
    assert str(error) == str(local.value)
    assert FIRST in str(error)
    assert error.__notes__.count("in the checkpoint org/m") == 1
    assert made.body_nbytes(FIRST) < 100_000
    assert len(made.of(FIRST)) == (1 if path.stat().st_size else 0)  # of nothing is no range


# --- repositories that are none


def test_wrong_revision(hub):
    error = fails(f"org/{SHARDED}@nope", "no such revision: found nope", hint="/tree/main")
    assert error.exit_code == 3


def test_no_such_repository(hub):
    error = fails("org/nope", "no such directory, and 127.0.0.1:.* has no such model repository")
    assert error.exit_code == 3
    assert "somebody without a token" in str(error)


def test_private_repository_without_and_with_a_wrong_token(hub, monkeypatch):
    hub.token = "hf_right"
    fails(f"org/{SHARDED}", "or none that somebody without a token may see", hint="set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = fails(
        f"org/{SHARDED}", "gives no access to this token .HTTP 401.: Invalid credentials", IOFailed,
        "HF_TOKEN",
    )  # fmt: skip
    assert error.exit_code == 6
    assert "hf_wrong" not in f"{error}{error.hint}"


@pytest.mark.parametrize("token", [None, "hf_any"])
def test_gated_repository(hub, monkeypatch, token):
    hub.gated = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    who = "this token" if token else "somebody without a token"
    error = fails(
        f"org/{SHARDED}", f"gated, and {who} has no access", IOFailed, "accept its conditions"
    )
    assert f"{hub.url}/org/{SHARDED}" in error.hint


def test_a_password_in_the_endpoint_is_not_shown(hub, monkeypatch):
    hub.gated = True
    point_at(monkeypatch, hub.url.replace("//", "//me:secret@"))
    assert f"{hub.url}/org" in (fails(f"org/{SHARDED}", "gated", IOFailed).hint or "")
    hub.gated, hub.faults, hub.forever = False, {"config.json": ["no commit"]}, True
    host = hub.url.removeprefix("http://")
    fails(f"org/{SHARDED}", f"{host} does not answer as a Hub does: FileMetadataError", IOFailed)


def test_no_network(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    point_at(monkeypatch, f"http://127.0.0.1:{port}")
    error = fails(
        "org/m", f"no answer from 127.0.0.1:{port}: .*refused", IOFailed, "HF_HUB_OFFLINE=1"
    )
    assert error.exit_code == 6


def test_something_else_than_a_hub_answers(hub):
    hub.faults, hub.forever = {"api": ["html"]}, True
    fails(f"org/{SHARDED}", "does not answer as a Hub does", IOFailed, "check HF_ENDPOINT")


@pytest.mark.parametrize(
    ("description", "match", "kind"),
    [
        (b"[]", "does not answer as a Hub does", IOFailed),
        (b"{}", "does not answer as a Hub does", IOFailed),
        (b'{"id": "org/m", "sha": "../../x"}', "names no commit", IOFailed),
        (b'{"id": "org/m"}', "names no commit", IOFailed),
        (b'{"id": "org/m", "sha": "%s"}' % COMMIT.encode(), "no config.json", InvalidCheckpoint),
        (
            b'{"id": "org/m", "sha": "%s", "siblings": [{"rfilename": "../../x"}]}'
            % COMMIT.encode(),
            "a file that can be none: found '../../x'",
            InvalidCheckpoint,
        ),
        (
            b'{"id": "org/m", "sha": "%s", "siblings": [{"rfilename": "a\\ud800.safetensors"}]}'
            % COMMIT.encode(),
            r"a file that can be none: found 'a\\ud800.safetensors'",
            InvalidCheckpoint,
        ),
        (
            b'{"id": "org/m", "sha": "%s", "siblings": [{"rfilename": "config.json", "size": '
            b"1000000000000}]}" % COMMIT.encode(),
            "config.json: the file is too large: found 1000000000000 bytes",
            InvalidCheckpoint,
        ),
    ],
)
def test_descriptions_that_cannot_be(hub, description, match, kind):
    hub.description = description
    fails(f"org/{SHARDED}", match, kind)
    assert not [s for s in hub.seen if "/resolve/" in s.path]


def test_another_commit_than_the_one_pinned(hub):
    hub.faults, hub.forever = {"config.json": ["other commit"]}, True
    error = fails(f"org/{SHARDED}", "config.json: the Hub answers with another commit", IOFailed)
    assert (error.found, error.expected) == ("f" * 40, COMMIT)


def test_p75_a_repository_with_pickles_only(made):
    for path in [*made.root.glob("*.safetensors"), made.root / INDEX]:
        path.unlink()
    (made.root / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    fails("org/m", "org/m: no .safetensors file: found pytorch_model.bin, which is not safetensors")
    assert made.of("pytorch_model.bin") == []


def test_a_repository_without_a_config(made):
    (made.root / "config.json").unlink()
    error = fails("org/m", r"org/m: no config\.json in it", hint="config.json and *.safetensors")
    assert error.exit_code == 3
    (made.root / "fp4").mkdir()
    (made.root / "fp4" / "config.json").write_text("{}")
    fails("org/m", r"no config\.json in it", hint="fp4/config.json is there")


@pytest.mark.parametrize("raw", [b"[]", b"{", b'{"a":1,"a":2}', b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_that_is_none(made, name, raw):
    (made.root / name).write_bytes(raw)
    fails("org/m", name)


def test_p65_the_index_names_a_shard_that_the_repository_lacks(made):
    (made.root / FIRST).unlink()
    fails("org/m", f"1 of 3 files it names are not here: {FIRST}", hint="repository is incomplete")


def test_an_index_that_leads_elsewhere(made):
    index = json.loads((made.root / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../x.safetensors"
    (made.root / INDEX).write_text(json.dumps(index))
    fails("org/m", "weight_map entry of model.norm.weight: found '../x.safetensors'")


def test_p22_a_prepared_repository_is_refused(made):
    (made.root / "mxfp4prep.json").write_text("{}")
    assert fails("org/m", "org/m: is already prepared", Unsupported).exit_code == 4


def test_a_repository_that_is_not_quarks(tmp_path, serve):
    from mxfp4prep.survey import survey

    config = model_config(quant_config(quant_method="awq"))
    serve(write_checkpoint(tmp_path / "awq", LINEARS, config=config))
    remote, local = open_source("org/awq"), open_checkpoint(tmp_path / "awq")
    with pytest.raises(Unsupported) as from_hub:
        survey(remote)
    with pytest.raises(Unsupported) as from_folder:
        survey(local)
    assert str(from_hub.value) == str(from_folder.value)


def test_a_listed_file_that_is_not_there(made):
    made.files = {}
    made.listed = {FIRST: (made.root / FIRST).stat().st_size}
    (made.root / FIRST).unlink()
    fails("org/m", f"{FIRST}: the Hub lists the file, but does not have it")


def test_names_that_no_folder_could_hold_are_only_names(made):
    made.files = {f"{'x' * 300}.txt": b"", "a\x1b[31m.txt": b""}
    checkpoint = open_source("org/m")
    assert {*made.files, "tokenizer.json"} == set(checkpoint.side_files)
    assert set(made.files) < checkpoint.absent


def test_shards_numbered_to_be_more_than_there_are(made):
    (made.root / INDEX).unlink()
    (made.root / FIRST).unlink()
    fails("org/m", f"org/m: 1 of 3 shards are not here, .*: {FIRST}", hint="incomplete")


def test_a_cache_that_cannot_be_written(hub, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    error = fails(f"org/{SHARDED}", "not a folder", IOFailed, "HF_HOME")
    assert error.exit_code == 6


# --- names


@pytest.mark.parametrize(
    "source",
    ["/no/where", "./org/name", "../name", "org/name/more", "name", "", "~/name", "org/", "org//n",
     "x" * 5000, "org/../name", "org/name/@main", "https://huggingface.co/org/name", "\0", "/"[:0]],
)  # fmt: skip
def test_what_is_neither_there_nor_a_repositorys_name(source):
    error = fails(source, "no such directory", hint="ORG/NAME@REVISION")
    assert (error.what, error.exit_code) == ("no such directory", 3)
    assert "a checkpoint directory" in error.hint


@pytest.mark.parametrize(
    "source",
    ["org/na me", "org/na\x1bme", "org/name\n", "org/näme", "org/.name", "-org/name", "org/a--b",
     "org/a..b", "org/name.git", f"org/{'x' * 97}", "org/name?x", "org/%2e%2e", "org/\0", "o:g/n",
     "org/‮name"],
)  # fmt: skip
def test_names_no_repository_has(source):
    assert fails(source, "not the name of a repository", hint="ORG/NAME").exit_code == 3


@pytest.mark.parametrize(
    "revision",
    ["", "../x", "a/../b", "a..b", "/main", "main/", "a//b", "a b", "a\x00b", "a\nb", "\x1b[31m",
     ".hidden", "a/.b", "x" * 251, "ma?in", "ö", "a\\b"],
)  # fmt: skip
def test_revisions_that_are_none(revision):
    assert fails(f"org/name@{revision}", "not usable as a revision").exit_code == 3
    with pytest.raises(InvalidCheckpoint, match="not usable as a revision"):
        open_source("org/name", revision=revision)


def test_a_revision_that_cannot_apply(tmp_path):
    with pytest.raises(UsageError, match="a directory has no revisions"):
        open_source(str(tmp_path), revision="main")
    with pytest.raises(UsageError, match="given twice: found a and b"):
        open_source("org/name@a", revision="b")


def test_a_dangling_link_is_local(tmp_path, monkeypatch, hub):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / SHARDED).symlink_to(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    fails(f"org/{SHARDED}", "no such directory", hint="hf download")
    assert hub.seen == []


# --- without the network, without the library


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_offline_a_snapshot_is_enough(hub, offline):
    snapshot(FIXTURES / SHARDED, f"org/{SHARDED}")
    expected = facts(open_checkpoint(FIXTURES / SHARDED))
    for source in (f"org/{SHARDED}", f"org/{SHARDED}@main", f"org/{SHARDED}@{COMMIT}"):
        checkpoint = open_source(source)
        assert facts(checkpoint) == expected
        assert (checkpoint.repo, checkpoint.commit) == (f"org/{SHARDED}", COMMIT)
        assert checkpoint.absent == frozenset()
    assert hub.seen == []


def test_offline_without_a_snapshot(offline):
    error = fails(
        "org/m", "HF_HUB_OFFLINE is set, and the cache has no config.json of its revision main",
        IOFailed, "hf download org/m`",
    )  # fmt: skip
    assert error.exit_code == 6
    snapshot(FIXTURES / SHARDED, "org/m", ref="v1")
    fails("org/m", f"revision main: found the commits {COMMIT}", IOFailed)
    fails("org/m@v2", "of its revision v2", IOFailed, "hf download org/m --revision v2")
    assert open_source("org/m@v1").commit == COMMIT


def test_offline_with_a_part_of_a_snapshot(offline):
    snapshot(FIXTURES / SHARDED, "org/m", names=["config.json", INDEX, FIRST])
    error = fails("org/m", "2 of 3 files it names are not here", hint="HF_HUB_OFFLINE is set")
    assert "model-00002-of-00003.safetensors" in str(error)
    shutil.rmtree(constants.HF_HUB_CACHE)
    snapshot(FIXTURES / SHARDED, "org/m", names=["config.json", FIRST])
    fails("org/m", "2 of 3 shards are not here", hint="HF_HUB_OFFLINE is set")
    shutil.rmtree(constants.HF_HUB_CACHE)
    snapshot(FIXTURES / SHARDED, "org/m", names=["config.json"])
    fails("org/m", "no .safetensors file", hint="HF_HUB_OFFLINE is set")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = fails("org/m", "needs huggingface_hub: found none", Unsupported)
    assert error.hint == "pip install 'mxfp4prep[hub]'"
    assert error.exit_code == 4


def test_with_a_library_that_is_too_old(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "__version__", "0.36.2")
    fails("org/m", "found 0.36.2, expected 1.0 or newer", Unsupported, "mxfp4prep[hub]")


# --- what a remote checkpoint must not become


def test_a_remote_checkpoint_is_never_converted(hub, tmp_path):
    from mxfp4prep.convert import convert
    from mxfp4prep.plan import make_plan
    from mxfp4prep.survey import survey

    checkpoint = open_source(f"org/{SHARDED}")
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    shards = {shard.name for shard in checkpoint.shards}
    assert checkpoint.absent == {*names, *shards, "chat_template.jinja"}
    with pytest.raises(Unsupported, match=r"on the Hub only") as caught:
        checkpoint.require_local()
    hint = f"download it first: hf download org/{SHARDED} --revision {COMMIT}"
    assert caught.value.hint == hint
    with pytest.raises(Unsupported, match=r"1 \(chat_template.jinja\) on the Hub only"):
        checkpoint.require_local(["chat_template.jinja", "config.json"])
    with pytest.raises(Unsupported, match="on the Hub only"):
        convert(make_plan(survey(checkpoint), (1,)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_token_that_is_none_is_named(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "\u00e9\u2603")
    with pytest.raises(IOFailed, match="HF_TOKEN holds characters that no token has"):
        open_source(f"org/{SHARDED}")


# --- a program of its own: the environment as people set it


def run(code, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**clean, "NO_PROXY": "*", **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


CODE = """
import sys
from mxfp4prep.errors import Mxfp4PrepError
from mxfp4prep.hub import open_source
assert "huggingface_hub" not in sys.modules
try:
    checkpoint = open_source("org/llama-w4a4-file2file")
    print(len(checkpoint.tensors), checkpoint.repo, checkpoint.commit, checkpoint.root)
except Mxfp4PrepError as error:
    print(type(error).__name__, error)
print("torch" in sys.modules)
"""


def test_the_environment_is_honoured(hub, tmp_path):
    hub.token, hub.cdn = "hf_abc", True
    home = tmp_path / "home"
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    said, torch = run(CODE, HF_TOKEN="hf_abc", **environment)
    root = home / "hub" / f"models--org--{SHARDED}" / "snapshots" / COMMIT
    assert said == f"35 org/{SHARDED} {COMMIT} {root}"
    assert torch == "False"
    assert {s.authorization for s in hub.seen if s.server == "cdn"} == {None}
    said, _ = run(CODE, **environment)
    assert said.startswith("InvalidCheckpoint org/")
    hub.seen.clear()
    said, _ = run(CODE, HF_HUB_OFFLINE="1", **environment)
    assert f"no config.json of its revision main: found the commits {COMMIT}" in said
    other = {**environment, "HF_HUB_CACHE": str(tmp_path / "other")}
    said, _ = run(CODE, HF_HUB_OFFLINE="1", **other)
    assert "the cache has no config.json" in said
    snapshot(FIXTURES / SHARDED, f"org/{SHARDED}")
    said, _ = run(CODE, HF_HUB_OFFLINE="1", HF_HUB_CACHE=constants.HF_HUB_CACHE)
    assert said.startswith("35 org/")
    assert hub.seen == []


@pytest.mark.parametrize("name", ["qwen2moe-w4a4-shared-expert", "qwen2-w4a4-misaligned-tied"])
def test_the_audit_says_the_same_of_a_repository_and_of_a_directory(serve, tmp_path, name):
    hub = serve(FIXTURES / name, cdn=True)
    home = tmp_path / "home"
    said = []
    for source in (f"org/{name}", str(FIXTURES / name)):
        code = (
            f"import sys; sys.argv = ['mxfp4prep', 'audit', {source!r}, '--format', 'json', "
            "'--fail-on', 'never', '--no-progress']\n"
            "from mxfp4prep.cli import main\n"
            "try:\n    main()\nexcept SystemExit as exit:\n    assert not exit.code, exit.code\n"
            "assert 'torch' not in sys.modules\n"
        )
        lines = run(code, HF_ENDPOINT=hub.url, HF_HOME=str(home))
        document = json.loads("\n".join(lines))
        for fact in ("repo", "commit"):
            document["source"].pop(fact, None)
        said.append(document)
    assert said[0] == said[1]
    assert len(said[0]["layers"]) > 5
    assert hub.body_nbytes(".safetensors") < 300_000
