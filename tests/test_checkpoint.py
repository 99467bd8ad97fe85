"""Directories that lie, miss files or are not what they seem: one clear error each."""

from __future__ import annotations

import json
import os

import pytest
import torch
from quark_factory import model_config, write_checkpoint, write_shards

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.documents import parse_object
from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, Unsupported

LINEARS = {"model.layers.0.mlp.down_proj": (64, 256), "model.layers.0.mlp.up_proj": (32, 256)}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path / "m", LINEARS, shards=3)


def codes(root):
    return [finding.code for finding in open_checkpoint(root).findings]


def edit_index(root, change):
    path = root / INDEX
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def fails(root, match, kind=InvalidCheckpoint):
    with pytest.raises(kind, match=match) as caught:
        open_checkpoint(root)
    assert "\n" not in str(caught.value)
    return caught.value


def test_real_checkpoints_open_with_every_tensor(mxfp4_fixture):
    checkpoint = open_checkpoint(mxfp4_fixture)
    files = {
        p.relative_to(mxfp4_fixture).as_posix() for p in mxfp4_fixture.rglob("*") if p.is_file()
    }
    assert files == {s.name for s in checkpoint.shards} | set(checkpoint.side_files) | {
        "config.json"
    } | ({INDEX} & files)
    assert set(checkpoint.tensors) == set(checkpoint.shard_of)


def test_weight_and_scale_in_different_shards(sharded):
    checkpoint = open_checkpoint(sharded)
    name = "model.layers.0.mlp.down_proj"
    assert checkpoint.shard_of[f"{name}.weight"] is not checkpoint.shard_of[f"{name}.weight_scale"]
    assert checkpoint.findings == ()


def test_not_a_directory_and_not_there(sharded, tmp_path):
    assert "give the directory" in (fails(sharded / "config.json", "is a file").hint or "")
    assert "hf download" in (fails(tmp_path / "org/name", "no such directory").hint or "")


def test_p65_index_names_a_shard_that_is_not_there(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    fails(sharded, r"1 of 3 files it names are not here: model-00002-of-00003.safetensors")


def test_p66_stray_shard_is_named_and_not_read(sharded):
    write_shards(sharded, {"stray": torch.ones(2)}, ["model.safetensors"])
    checkpoint = open_checkpoint(sharded)
    assert [(f.code, f.where) for f in checkpoint.findings] == [("stray_file", "model.safetensors")]
    assert "stray" not in checkpoint.tensors
    assert "model.safetensors" in checkpoint.side_files


def test_p67_two_sets_of_shards(sharded):
    tensors = {name: torch.ones(1) for name in open_checkpoint(sharded).tensors}
    write_shards(
        sharded, tensors, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    )
    assert codes(sharded) == ["stray_file"]
    (sharded / INDEX).unlink()
    fails(sharded, "stands in .* too")


def test_p70_truncated_shard_names_file_and_bytes(sharded):
    path = sharded / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    fails(sharded, r"model-00001-of-00003.safetensors.*4096")


def test_p72_git_lfs_pointer(sharded):
    path = sharded / "model-00001-of-00003.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    assert "git lfs pull" in (fails(sharded, "git-lfs").hint or "")


def test_p75_pickled_weights_are_never_opened(tmp_path):
    root = write_checkpoint(tmp_path / "m", LINEARS)
    (root / "model.safetensors").rename(root / "pytorch_model.bin")
    fails(root, "no .safetensors file: found pytorch_model.bin, which is not safetensors")


def test_p76_links_are_followed_and_dangling_ones_named(tmp_path):
    root = write_checkpoint(tmp_path / "blobs", LINEARS)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in root.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert set(open_checkpoint(snapshot).tensors) == set(open_checkpoint(root).tensors)
    (root / "tokenizer.json").unlink()
    fails(snapshot, r"tokenizer.json: a link to a file that is not there: .*blobs/tokenizer.json")


def test_p78_missing_tensor_messages_tell_three_cases_apart(sharded):
    edit_index(
        sharded, lambda d: d["weight_map"].update({"ghost": "model-00001-of-00003.safetensors"})
    )
    fails(sharded, "tensor ghost is not in model-00001-of-00003.safetensors, nor in any other")
    edit_index(sharded, lambda d: d["weight_map"].pop("ghost"))
    edit_index(
        sharded,
        lambda d: d["weight_map"].update({"model.norm.weight": "model-00001-of-00003.safetensors"}),
    )
    fails(sharded, "tensor model.norm.weight: found in model-00002.*expected in model-00001")
    edit_index(sharded, lambda d: d["weight_map"].update({"model.norm.weight": "gone.safetensors"}))
    fails(sharded, "files it names are not here: gone.safetensors")


def test_p47_tensor_outside_the_index_is_kept_and_reported(sharded):
    edit_index(sharded, lambda d: d["weight_map"].pop("model.norm.weight"))
    checkpoint = open_checkpoint(sharded)
    assert "model.norm.weight" in checkpoint.tensors
    assert [f.code for f in checkpoint.findings] == ["not_in_index"]


def test_p47_sidecar_shard_of_another_name(tmp_path):
    root = write_checkpoint(tmp_path / "m", LINEARS, shards=2)
    write_shards(root, {"mtp.fc.weight": torch.ones(2)}, ["model_mtp.safetensors"])
    edit_index(root, lambda d: d["weight_map"].update({"mtp.fc.weight": "model_mtp.safetensors"}))
    assert "mtp.fc.weight" in open_checkpoint(root).tensors


def test_wrong_total_size_is_a_note(sharded):
    edit_index(sharded, lambda d: d["metadata"].update(total_size=3))
    assert codes(sharded) == ["total_size"]


@pytest.mark.parametrize(
    "name",
    [
        "../m.safetensors",
        "/etc/m.safetensors",
        "a//b.safetensors",
        "m.bin",
        "a\\b.safetensors",
        "\x1b.safetensors",
        5,
    ],
)
def test_index_entries_that_leave_the_directory(sharded, name):
    edit_index(sharded, lambda d: d["weight_map"].update({"model.norm.weight": name}))
    message = str(fails(sharded, "weight_map entry of model.norm.weight"))
    assert "\x1b" not in message


@pytest.mark.parametrize(
    "raw", [b"[]", b"{", b'{"a":1,"a":2}', b"\xff", b"{}", b'{"weight_map": []}']
)
def test_index_that_is_no_index(sharded, raw):
    (sharded / INDEX).write_bytes(raw)
    fails(sharded, INDEX)


@pytest.mark.parametrize("raw", [b"[]", b"{", b'{"a":1,"a":2}', b"\xff\xfe"])
def test_config_that_is_no_config(sharded, raw):
    (sharded / "config.json").write_bytes(raw)
    fails(sharded, "config.json")


def test_config_missing(sharded):
    (sharded / "config.json").unlink()
    fails(sharded, r"no config\.json in it")


FIRST, SECOND, THIRD = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
NORM = "model.norm.weight"


def listing(**changes):
    """The index with other entries in its weight_map."""
    return lambda root: edit_index(root, lambda d: d["weight_map"].update(changes))


def without(name):
    return lambda root: edit_index(root, lambda d: d["weight_map"].pop(name))


def instead(raw):
    return lambda root: (root / INDEX).write_bytes(raw)


def sized(value):
    return lambda root: edit_index(root, lambda d: d["metadata"].update(total_size=value))


def renamed(old, new):
    return lambda root: (root / old).rename(root / new)


def another(name, **tensors):
    """One more file of tensors, which the index does not know."""
    made = {key: torch.ones(value) for key, value in tensors.items()}
    return lambda root: write_shards(root, made, [name])


def both(*changes):
    return lambda root: [change(root) for change in changes]


INDEX_LIES = {  # what was done, the finding's code or what is said
    "true": (both(), ()),
    "a shard is missing": (
        lambda root: (root / SECOND).unlink(),
        "1 of 3 files .* not here: model-00002",
    ),
    "every shard is missing": (
        lambda root: [(root / name).unlink() for name in (FIRST, SECOND, THIRD)],
        "3 of 3 files it names are not here",
    ),
    "a shard in another case": (renamed(SECOND, SECOND.upper()), "not here: model-00002"),
    "the index in another case": (renamed(INDEX, INDEX.upper()), ()),
    "a stray shard": (another("model.safetensors", stray=2), ("stray_file",)),
    "two stray shards": (
        both(another("a.safetensors", stray=2), another("b.safetensors", other=2)),
        ("stray_file",),
    ),
    "a shard of an older set": (
        another("model-00001-of-00002.safetensors", **{NORM: 2}),
        ("stray_file",),
    ),
    "a tensor that is nowhere": (listing(ghost=FIRST), "tensor ghost is not in model-00001"),
    "a tensor elsewhere": (
        listing(**{NORM: FIRST}),
        "tensor model.norm.weight: found in model-00002",
    ),
    "a tensor in another case": (
        both(without(NORM), listing(**{NORM.upper(): SECOND})),
        "tensor MODEL.NORM.WEIGHT is not in",
    ),
    "a tensor not listed": (without(NORM), ("not_in_index",)),
    "a tensor twice": (
        both(another("x.safetensors", x=1, **{NORM: 1}), listing(x="x.safetensors")),
        "tensor model.norm.weight stands in model-00002.* too",
    ),
    "a tensor listed twice": (
        instead(b'{"weight_map":{"a":"b.safetensors","a":"b.safetensors"}}'),
        "key 'a' stands twice",
    ),
    "an empty shard listed by none": (another("empty.safetensors"), ("stray_file",)),
    "total_size of less": (sized(3), ("total_size",)),
    "total_size of nothing": (sized(0), ("total_size",)),
    "total_size below zero": (sized(-1), ("total_size",)),
    "total_size as text": (sized("big"), ("total_size",)),
    "total_size of 1e400": (sized(1e400), ("total_size",)),
    "total_size a list": (sized([1]), ("total_size",)),
    "no metadata": (lambda root: edit_index(root, lambda d: d.pop("metadata")), ("total_size",)),
    "metadata a list": (
        lambda root: edit_index(root, lambda d: d.update(metadata=[])),
        ("total_size",),
    ),
    "an empty map": (
        instead(b'{"metadata":{},"weight_map":{}}'),
        "weight_map: found dict, expected tensor",
    ),
    "no map": (instead(b"{}"), "weight_map: found NoneType"),
    "the map a list": (instead(b'{"weight_map":[]}'), "weight_map: found list"),
    "a file outside": (
        listing(**{NORM: f"../{FIRST}"}),
        "weight_map entry of model.norm.weight: found '../",
    ),
    "an absolute file": (listing(**{NORM: f"/{FIRST}"}), "weight_map entry of .*: found '/model"),
    "the file itself, by a detour": (
        listing(**{NORM: f"./{SECOND}"}),
        "weight_map entry of .*: found './",
    ),
    "a file of another kind": (
        listing(**{NORM: "config.json"}),
        "weight_map entry of .*: found 'config",
    ),
    "no file": (listing(**{NORM: None}), "weight_map entry of .*: found None"),
    "a file with an escape": (
        listing(**{NORM: "\x1b.safetensors"}),
        r"weight_map entry of .*: found '\\x1b",
    ),
    "not JSON": (instead(b"{"), "index.json: not valid JSON"),
    "not an object": (instead(b"[]"), "index.json: not a JSON object"),
    "empty": (instead(b""), "index.json: not valid JSON: Expecting value"),
    "not text": (instead(b"\xff"), "index.json: not valid JSON: 'utf-8'"),
    "a single file and no index": (lambda root: (root / INDEX).unlink(), ()),
    "no index and a gap": (
        both(lambda root: (root / INDEX).unlink(), lambda root: (root / SECOND).unlink()),
        "1 of 3 shards are not here, by the names of the others",
    ),
    "no index and two sets": (
        both(lambda root: (root / INDEX).unlink(), another("model.safetensors", **{NORM: 1})),
        "tensor model.norm.weight stands in model-00002.* too",
    ),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_an_index_that_lies(sharded, lie, tried):
    change, expected = INDEX_LIES[lie]
    change(sharded)
    if isinstance(expected, tuple):
        findings = open_checkpoint(sharded).findings
        assert tuple(finding.code for finding in findings) == expected
        assert all(finding.message.isprintable() for finding in findings)
    else:
        error = fails(sharded, expected)
        assert error.exit_code == 3
        assert str(error).isprintable()
    if expected:
        tried("I1")


def test_duplicate_tensor_across_shards(sharded):
    tensors = {name: torch.ones(1) for name in ("model.norm.weight", "other")}
    write_shards(sharded, tensors, ["extra.safetensors"])
    edit_index(sharded, lambda d: d["weight_map"].update(other="extra.safetensors"))
    fails(sharded, "tensor model.norm.weight stands in .* too")


def test_p22_prepared_directory_is_refused(sharded):
    (sharded / "mxfp4prep.json").write_text("{}")
    assert fails(sharded, "already prepared", Unsupported).exit_code == 4
    (sharded / "mxfp4prep.json").unlink()
    (sharded / "config.json").write_text(json.dumps(model_config({"quant_method": "mxfp4prep"})))
    fails(sharded, "already prepared", Unsupported)


def test_fifo_socket_and_linked_folder_are_refused(sharded, tmp_path):
    os.mkfifo(sharded / "pipe")
    fails(sharded, "pipe: not a regular file")
    (sharded / "pipe").unlink()
    (sharded / "loop").symlink_to(sharded)
    fails(sharded, "loop: a linked folder")


def test_a_file_name_that_is_not_utf8(sharded):
    (sharded / os.fsdecode(b"bad\xff.txt")).write_text("x")
    error = fails(sharded, r"bad.*is not UTF-8", Unsupported)
    str(error).encode()


def test_a_locale_that_reads_utf8_names_otherwise(sharded, monkeypatch):
    """There two letters would stand in the manifest for one."""
    (sharded / "\u00e9.txt").write_text("x")
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    error = fails(sharded, "is not UTF-8", Unsupported)
    assert "PYTHONUTF8=1" in error.hint


def test_bookkeeping_folders_are_left_out(sharded):
    for folder in (".git", ".cache"):
        (sharded / folder).mkdir()
        (sharded / folder / "x").write_text("x")
    (sharded / "sub").mkdir()
    (sharded / "sub" / "code.py").write_text("x")
    assert open_checkpoint(sharded).side_files == ("sub/code.py", "tokenizer.json")


def test_folder_without_permission(sharded):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (sharded / "sub").mkdir(mode=0)
    with pytest.raises(Mxfp4PrepError, match="permission"):
        open_checkpoint(sharded)


def test_p65_without_an_index_the_names_say_how_many_shards_there_are(sharded):
    (sharded / INDEX).unlink()
    assert len(open_checkpoint(sharded).shards) == 3
    (sharded / "model-00002-of-00003.safetensors").unlink()
    error = fails(sharded, r"(?m)1 of 3 shards are not here, .*: model-00002-of-00003.safetensors$")
    assert error.hint == "download the checkpoint again"
    (sharded / "model-00003-of-00003.safetensors").rename(sharded / "b-00007-of-99999.safetensors")
    (sharded / "model-00001-of-00003.safetensors").rename(sharded / "a-00001-of-00001.safetensors")
    names = ", ".join(f"b-{n:05d}-of-99999.safetensors" for n in (1, 2, 3, 4, 5))
    fails(sharded, rf"(?m)99998 of 99999 shards are not here, .*: {names}, \.\.\.$")


def test_numbers_in_other_names_count_nothing(sharded):
    for i in (1, 2, 3):
        old = sharded / f"model-{i:05d}-of-00003.safetensors"
        old.rename(sharded / f"model-{i}-of-4.safetensors")
    (sharded / INDEX).unlink()
    assert len(open_checkpoint(sharded).shards) == 3


def test_a_directory_lacks_nothing_and_knows_its_origin_in_the_cache(tmp_path):
    commit = "0123456789abcdef" * 2 + "01234567"
    root = tmp_path / "models--org--name-x" / "snapshots" / commit
    checkpoint = open_checkpoint(write_checkpoint(root, LINEARS))
    assert (checkpoint.repo, checkpoint.commit) == ("org/name-x", commit)
    assert (checkpoint.name, checkpoint.absent) == ("name-x", frozenset())
    checkpoint.require_local()
    elsewhere = open_checkpoint(write_checkpoint(tmp_path / "models--org--name", LINEARS))
    assert (elsewhere.repo, elsewhere.commit) == (None, None)


def test_long_facts_are_cut_in_errors() -> None:
    error = InvalidCheckpoint("x", "odd", found="9" * 5000, expected="a" * 301)
    assert str(error) == (
        f"x: odd: found {'9' * 300}... (5000 characters), expected {'a' * 300}... (301 characters)"
    )
    assert str(InvalidCheckpoint("x", "odd", found="9" * 300)) == f"x: odd: found {'9' * 300}"


@pytest.mark.timeout(20)
def test_a_repeated_key_among_many_is_named() -> None:
    keys = ",".join(f'"k{i}":1' for i in range(200_000))
    with pytest.raises(InvalidCheckpoint, match="key 'z' stands twice"):
        parse_object(f'{{{keys},"z":1,"z":2}}'.encode(), "config.json")
