"""What verify holds a prepared checkpoint to; test_damage does it all the damage there is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
from quark_factory import write_checkpoint
from test_convert import LINEARS, converted

import mxfp4prep
from mxfp4prep import alignment
from mxfp4prep import manifest as m
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.errors import (
    IntegrityError,
    InvalidCheckpoint,
    InvalidManifest,
    Mxfp4PrepError,
    UsageError,
)
from mxfp4prep.marks import DIGESTS_NAME
from mxfp4prep.parallel import parse_rules
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.restore import restore
from mxfp4prep.safefile import read_header
from mxfp4prep.sums import format_sums, parse_sums
from mxfp4prep.survey import survey
from mxfp4prep.verify import verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    base = tmp_path_factory.mktemp("pristine")
    source = write_checkpoint(base / "m", LINEARS, shards=2)
    return source, converted(source, base / "out").out


@pytest.fixture
def prepared(pristine, tmp_path):
    _, out = pristine
    return shutil.copytree(out, tmp_path / "out")


def test_a_folder_whose_name_is_not_utf8(pristine, tmp_path):
    out = shutil.copytree(pristine[1], tmp_path / os.fsdecode(b"o\xff"))
    assert verify(out).problems == ()


def shard_names(root):
    return sorted(p.name for p in root.glob("*.safetensors"))


def said(report):
    return {(p.file, p.tensor) for p in report.problems}


def test_untouched_is_proven_at_each_level_and_skips_are_said(pristine):
    source, out = pristine
    quick, full, deep = verify(out, "quick"), verify(out, "full"), verify(out, "deep", source)
    assert quick.problems == full.problems == deep.problems == ()
    assert len(quick.skipped) == len(full.skipped) == 1
    assert deep.skipped == ()
    assert full.tensors == 9
    assert full.nbytes > quick.nbytes == 0


def test_p22_p24_a_tensor_laid_out_twice_is_found(prepared):
    import torch

    from mxfp4prep.layouts import LAYOUTS

    name = "model.layers.0.self_attn.o_proj.weight"
    path = next(
        prepared / n
        for n in shard_names(prepared)
        if name in [e.name for e in read_header(prepared / n).tensors]
    )
    header = read_header(path)
    entry = next(e for e in header.tensors if e.name == name)
    raw = bytearray(path.read_bytes())
    at = slice(header.data_start + entry.begin, header.data_start + entry.end)
    once = torch.frombuffer(bytearray(raw[at]), dtype=torch.uint8).view(512, 256)
    raw[at] = bytes(LAYOUTS["tile16x16"].forward(once).flatten().tolist())
    path.write_bytes(raw)
    assert (path.name, name) in said(verify(prepared))


def edit_manifest(root, change):
    path = root / "mxfp4prep.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_bytes(m.dump(m.parse(json.dumps(document).encode())))


def test_edited_manifest_does_not_pass_even_quick(prepared):
    edit_manifest(prepared, lambda d: d["layers"][0].update(reasons=["kept"]))
    assert ("mxfp4prep.json", None) in said(verify(prepared, "quick"))


EDITS = {
    "name": "model.layers.0.mlp.other",
    "kind": "shared_expert",
    "parallel": "column",
    "group": "model.layers.0.mlp.gate_up_proj",
    "scheme": "w4a16",
    "activation": {"dtype": None, "scale_mode": None, "static": False},
    "gate_up": "interleaved",
    "path": "asm",
    "reasons": [],
    "hazards": ["short_group"],
    "verdict": {"1": "asm"},
    "bias": "model.norm.weight",
    "input_scale": "model.norm.weight",
    "weight": {"source_shape": [320, 512]},
    "scale": {"source_shape": [20, 512]},
}


@pytest.mark.parametrize("key", EDITS)
def test_p20_a_manifest_edited_together_with_its_sums_contradicts_the_plan(prepared, tmp_path, key):
    path = prepared / "mxfp4prep.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()

    def edit(document):
        layer = next(x for x in document["layers"] if x["name"].endswith("down_proj"))
        if key in ("weight", "scale"):
            layer[key].update(EDITS[key])
        else:
            assert layer[key] != EDITS[key]
            layer[key] = EDITS[key]

    edit_manifest(prepared, edit)
    sums = prepared / "SHA256SUMS"
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    sums.write_text(sums.read_text().replace(before, after))
    assert said(verify(prepared, "quick"))
    if key in ("weight", "scale"):
        with pytest.raises(Mxfp4PrepError):
            restore(prepared, tmp_path / "back")
        assert not (tmp_path / "back").exists()


def test_what_was_asked_for_is_part_of_the_plan_made_again(pristine, tmp_path):
    source, _ = pristine
    rules = parse_rules(["*.o_proj=column"])
    surveyed = survey(open_checkpoint(source), surveyed_degrees((2,)), rules)
    plan = make_plan(surveyed, (2,), "triton", ["*.up_proj"])
    out = convert(plan, tmp_path / "out").out
    assert verify(out, "quick").problems == ()
    target = m.parse((out / "mxfp4prep.json").read_bytes()).target
    assert (target.layout, target.keep) == ("triton", ["*.up_proj"])
    assert target.parallel == ["*.o_proj=column"]


def rewrite_with_sums(root, name, content):
    """Changes one file, its record in the manifest, and SHA256SUMS, all alike."""
    (root / name).write_bytes(content)

    def record(document):
        for file in document["files"]:
            if file["name"] == name:
                file["sha256"] = hashlib.sha256(content).hexdigest()
                file["nbytes"] = len(content)

    edit_manifest(root, record)
    refresh_sums(root)


def refresh_sums(root):
    names = [line.partition("  ")[2] for line in (root / "SHA256SUMS").read_text().splitlines()]
    sums = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}
    (root / "SHA256SUMS").write_text("".join(f"{sums[n]}  {n}\n" for n in names))


def test_config_that_is_not_what_converting_the_original_gives(prepared):
    config = json.loads((prepared / "config.json").read_text())
    config["num_key_value_heads"] = 4
    rewrite_with_sums(prepared, "config.json", json.dumps(config).encode())
    assert ("config.json", None) in said(verify(prepared, "quick"))


def test_original_config_that_is_another(prepared):
    content = (prepared / "source/config.json").read_bytes() + b" "
    rewrite_with_sums(prepared, "source/config.json", content)
    assert ("source/config.json", None) in said(verify(prepared, "quick"))


def test_restore_knows_the_original_config_by_its_digest(prepared, tmp_path):
    content = (prepared / "source/config.json").read_bytes() + b" "
    rewrite_with_sums(prepared, "source/config.json", content)
    with pytest.raises(IntegrityError, match=r"source/config\.json: is not the file"):
        restore(prepared, tmp_path / "back")


def test_index_that_names_the_wrong_shards(prepared):
    name = "model.safetensors.index.json"
    index = json.loads((prepared / name).read_text())
    first, last = sorted(index["weight_map"])[0], sorted(index["weight_map"])[-1]
    index["weight_map"][first], index["weight_map"][last] = (
        index["weight_map"][last],
        index["weight_map"][first],
    )
    rewrite_with_sums(prepared, name, json.dumps(index).encode())
    assert (name, None) in said(verify(prepared, "quick"))


def test_mended_index_that_names_the_wrong_shards(tmp_path):
    source = write_checkpoint(tmp_path / "m", LINEARS, shards=2)
    name = "model.safetensors.index.json"
    index = json.loads((source / name).read_text())
    index["metadata"]["total_size"] = 1
    (source / name).write_text(json.dumps(index))
    out = converted(source, tmp_path / "out").out
    assert verify(out, "quick").problems == ()
    mended = json.loads((out / name).read_text())
    mended["weight_map"]["model.norm.weight"] = "elsewhere.safetensors"
    rewrite_with_sums(out, name, json.dumps(mended).encode())
    assert said(verify(out, "quick")) == {(name, None)}


def test_sums_with_odd_names_read_back():
    sums = dict.fromkeys(("plain", "back\\slash", "a\\nb", "new\nline", "\\"), "0" * 64)
    assert parse_sums(format_sums(sums)) == sums


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("source/config.json", "digests"),
        ("source/config.json", "side"),
        ("model.safetensors.index.json", "config"),
        ("tokenizer.json", "original"),
        ("config.json", "side"),
    ],
)
def test_a_role_that_would_leave_a_file_out_of_a_restore(prepared, tmp_path, name, role):
    def change(document):
        next(f for f in document["files"] if f["name"] == name)["role"] = role

    edit_manifest(prepared, change)
    refresh_sums(prepared)
    assert (name, None) in said(verify(prepared, "quick"))
    with pytest.raises(Mxfp4PrepError):
        restore(prepared, tmp_path / "back")


def test_a_blank_line_in_the_sums_counts_too(prepared):
    path = prepared / "SHA256SUMS"
    path.write_bytes(path.read_bytes() + b"\n")
    assert said(verify(prepared, "quick")) == {("SHA256SUMS", None)}


def test_codes_are_words_and_degrees_are_numbers(prepared):
    path = prepared / "mxfp4prep.json"
    document = json.loads(path.read_text())
    for key, value in (("reasons", ["\x1b[31m"]), ("hazards", ["a b"]), ("verdict", {"x": "asm"})):
        broken = json.loads(json.dumps(document))
        broken["layers"][0][key] = value
        with pytest.raises(InvalidManifest):
            m.parse(json.dumps(broken).encode())


def with_its_sum(prepared, edit):
    path = prepared / "mxfp4prep.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_manifest(prepared, edit)
    sums = prepared / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(path.read_bytes()).hexdigest()))


def test_earlier_rules_decisions_are_skipped_and_said(prepared, monkeypatch):
    def edit(document):
        document["tool_version"] = "0.0.1"
        document["layers"][0]["hazards"] = ["unheard_of"]

    with_its_sum(prepared, edit)
    assert len(verify(prepared, "quick").problems) == 1  # whoever wrote it, the rules are known
    monkeypatch.setattr(alignment, "RULE_VERSION", 2)
    report = verify(prepared, "quick")
    assert report.problems == ()
    [skipped] = (text for text in report.skipped if "decisions" in text)
    assert skipped.endswith("made by version 1 of the rules (mxfp4prep 0.0.1)")


@pytest.mark.parametrize("version", [-1, 0, 2, 99])
def test_rules_that_nobody_had_yet_are_a_problem(prepared, version):
    with_its_sum(prepared, lambda document: document["target"].update(rule_version=version))
    report = verify(prepared, "quick")
    [problem] = report.problems
    assert (problem.file, problem.tensor) == ("mxfp4prep.json", "target.rule_version")
    assert f"found {version}, mxfp4prep {mxfp4prep.__version__} knows 1" in problem.what
    assert not any("decisions" in text for text in report.skipped)


def test_layout_mark_that_contradicts_the_shape(prepared):
    def relabel(document):
        layer = next(x for x in document["layers"] if x["path"] == "asm")
        layer["scale"]["layout"] = "transposed"

    edit_manifest(prepared, relabel)
    report = verify(prepared, "quick")
    assert any("stored shape for layout transposed" in p.what for p in report.problems)


def test_p20_manifest_without_a_layout_mark_is_no_manifest(prepared):
    path = prepared / "mxfp4prep.json"
    document = json.loads(path.read_text())
    del document["layers"][0]["weight"]["layout"]
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidManifest, match=r"layers\.0\.weight\.layout"):
        verify(prepared)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "source/config.json", "model.safetensors.index.json", "config.json"]
)
def test_other_files_count_too(prepared, name):
    path = prepared / name
    path.write_bytes(path.read_bytes() + b" ")
    assert (name, None) in said(verify(prepared, "quick"))
    raw = bytearray(path.read_bytes()[:-1])
    raw[-1] = ord("\n") if raw[-1] != ord("\n") else ord(" ")
    path.write_bytes(raw)
    assert (name, None) in said(verify(prepared, "full"))


def test_digests_and_sums_are_protected(prepared):
    digests = prepared / "mxfp4prep.digests.json"
    raw = digests.read_bytes()
    digests.write_bytes(raw.replace(b"0", b"1", 1))
    assert "mxfp4prep.digests.json" in {f for f, _ in said(verify(prepared))}
    digests.write_bytes(raw)
    sums = prepared / "SHA256SUMS"
    sums.write_text(sums.read_text().replace("0", "1", 1))
    assert ("SHA256SUMS", None) in said(verify(prepared, "quick"))
    sums.unlink()
    assert ("SHA256SUMS", None) in said(verify(prepared, "quick"))


def test_missing_added_and_shortened_files(prepared):
    (prepared / "extra.bin").write_bytes(b"x")
    (prepared / "tokenizer.json").unlink()
    shard = prepared / shard_names(prepared)[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    report = verify(prepared, "quick")
    assert said(report) >= {("extra.bin", None), ("tokenizer.json", None), (shard.name, None)}


@pytest.mark.parametrize("name", ["tokenizer.json", "x.header"])
def test_an_original_of_what_no_conversion_changes(prepared, tmp_path, name):
    (prepared / "source" / name).write_text("x")
    record = {"name": f"source/{name}", "nbytes": 1, "role": "original"}
    record["sha256"] = hashlib.sha256(b"x").hexdigest()
    edit_manifest(prepared, lambda document: document["files"].append(record))
    assert (f"source/{name}", None) in said(verify(prepared))
    with pytest.raises(IntegrityError, match="is not the original"):
        restore(prepared, tmp_path / "back")


class TestDeep:
    def test_other_source_is_found_out(self, prepared, tmp_path):
        other = write_checkpoint(tmp_path / "other", LINEARS, shards=2, seed=1)
        report = verify(prepared, "deep", other)
        assert len([p for p in report.problems if p.tensor and "differs" in p.what]) == 8

    def test_p44_source_that_changed_its_shapes(self, prepared, tmp_path):
        other = write_checkpoint(
            tmp_path / "o", {**LINEARS, "model.layers.0.self_attn.o_proj": (256, 512)}, shards=2
        )
        report = verify(prepared, "deep", other)
        assert any("header is not the one" in p.what for p in report.problems)

    def test_p83_file_missing_or_added_in_the_source(self, pristine, tmp_path):
        source, out = pristine
        copy = shutil.copytree(source, tmp_path / "m")
        (copy / "tokenizer.json").unlink()
        (copy / "new.txt").write_text("x")
        assert said(verify(out, "deep", copy)) == {("tokenizer.json", None), ("new.txt", None)}

    @pytest.mark.parametrize("role", ["none", "new_index"])
    def test_an_index_that_is_gone_with_all_that_speaks_of_it(self, tmp_path, role):
        index = "model.safetensors.index.json"
        source = write_checkpoint(tmp_path / "m", LINEARS, index=True)
        out = converted(source, tmp_path / "out").out

        def forget(document):
            record = next(file for file in document["files"] if file["name"] == index)
            if role == "none":
                document["files"].remove(record)
                (out / index).unlink()
            else:
                record["role"] = role
            document["source"]["index_sha256"] = None

        edit_manifest(out, forget)
        manifest = m.parse((out / "mxfp4prep.json").read_bytes())
        sums = {record.name: record.sha256 for record in manifest.files}
        sums["mxfp4prep.json"] = hashlib.sha256((out / "mxfp4prep.json").read_bytes()).hexdigest()
        (out / "SHA256SUMS").write_bytes(format_sums(sums))
        assert verify(out).problems == ()
        assert said(verify(out, "deep", source)) == {(index, None)}

    def test_needs_a_source(self, prepared, tmp_path):
        with pytest.raises(UsageError, match="--deep"):
            verify(prepared, "deep")
        with pytest.raises(InvalidCheckpoint, match="no such directory"):
            verify(prepared, "deep", tmp_path / "nope")


def test_not_prepared(pristine, tmp_path):
    source, _ = pristine
    with pytest.raises(InvalidManifest, match="not a prepared checkpoint") as caught:
        verify(source)
    assert "convert" in (caught.value.hint or "")
    with pytest.raises(InvalidCheckpoint, match="no such directory"):
        verify(tmp_path / "nope")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", ""])
def test_file_names_that_leave_the_directory(prepared, name):
    path = prepared / "mxfp4prep.json"
    document = json.loads(path.read_text())
    document["files"][0]["name"] = name
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidManifest, match="file name"):
        verify(prepared)


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "quark"},
        {"format_version": 2},
        {"format_version": True},
        {"manifest": "other.json"},
    ],
)
def test_config_that_contradicts_the_manifest(prepared, change):
    path = prepared / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidManifest, match=r"config\.json"):
        verify(prepared)


def test_digests_that_are_missing_are_one_problem(prepared):
    (prepared / DIGESTS_NAME).unlink()
    assert said(verify(prepared, "full")) == {(DIGESTS_NAME, None)}
    assert len(verify(prepared, "full").problems) == 1


def test_a_config_that_was_replaced_has_to_come_back(prepared):
    shutil.copy(prepared / "source" / "config.json", prepared / "config.json")
    with pytest.raises(InvalidManifest, match=r"config\.json was replaced") as caught:
        verify(prepared, "quick")
    assert "put back the config.json" in caught.value.hint


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d.update(hidden_size=7), "hidden_size: found 7, expected "),
        (lambda d: d.update(extra="x"), 'extra: found "x", expected nothing'),
        (lambda d: d.pop("model_type"), "model_type: found nothing, expected "),
        (
            lambda d: d["quantization_config"]["source_quantization_config"].pop("exclude"),
            "quantization_config.source_quantization_config.exclude: found nothing, expected [",
        ),
        (lambda d: d.update(extra="x" * 500), f'extra: found "{"x" * 149}... (502 characters), '),
        (lambda d: d.update(hidden_size=True), "hidden_size: found true, expected "),
        (lambda d: None, "the same values, spelled otherwise"),
    ],
)
def test_an_edited_config_says_which_value(prepared, edit, said):
    path = prepared / "config.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    whats = [problem.what for problem in verify(prepared, "quick").problems]
    start = "is not what converting source/config.json gives: "
    [what] = (what for what in whats if what.startswith(start))
    assert what.removeprefix(start).startswith(said)
