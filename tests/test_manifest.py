"""The manifest: strict, versioned, the same bytes each time, small when there are many layers."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from pydantic import ValidationError

from mxfp4prep import documents
from mxfp4prep import manifest as m
from mxfp4prep.errors import InvalidManifest


def layer(name: str = "model.layers.0.mlp.down_proj", **changes):
    record = {
        "name": name,
        "kind": "linear",
        "parallel": "row",
        "group": None,
        "scheme": "w4a4",
        "activation": {"dtype": "fp4", "scale_mode": "even", "static": False},
        "n": 64,
        "k": 256,
        "n_padded": 64,
        "k_padded": 256,
        "experts": None,
        "gate_up": None,
        "path": "asm",
        "reasons": [],
        "hazards": [],
        "verdict": {"1": "asm", "2": "triton"},
        "weight": {
            "tensor": f"{name}.weight",
            "file": "model.safetensors",
            "layout": "tile16x16",
            "shape": [4, 2048],
            "source_shape": [64, 128],
            "pad_byte": None,
        },
        "scale": {
            "tensor": f"{name}.weight_scale",
            "file": "model.safetensors",
            "layout": "tile32x8",
            "shape": [2, 256],
            "source_shape": [64, 8],
            "pad_byte": None,
        },
        "bias": None,
        "input_scale": None,
    }
    record.update(changes)
    return record


def document(*layers, **changes):
    return {
        "schema_version": 1,
        "tool_version": "0.1.0",
        "source": {
            "name": "x",
            "repo": None,
            "commit": None,
            "config_sha256": "0" * 64,
            "index_sha256": None,
        },
        "target": {
            "gfx": "gfx950",
            "tp": [1],
            "rule_version": 1,
            "layouts": ["tile16x16"],
            "layout": "auto",
            "keep": [],
            "parallel": [],
            "expert_parallel": False,
        },
        "digests": {"name": "mxfp4prep.digests.json", "sha256": "0" * 64, "algorithm": "xxh3_128"},
        "files": [
            {
                "name": "model.safetensors",
                "nbytes": 5,
                "sha256": "1" * 64,
                "role": "shard",
                "source_header": "same",
            }
        ],
        "layers": list(layers) or [layer()],
        "tensors": [{"name": "model.norm.weight", "file": "model.safetensors", "label": None}],
        "findings": [],
        **changes,
    }


def parse(doc) -> m.Manifest:
    return m.parse(json.dumps(doc).encode())


def test_round_trip_is_byte_stable_and_plain_json():
    manifest = parse(document())
    raw = m.dump(manifest)
    assert json.loads(raw) == document()
    assert m.dump(m.parse(raw)) == raw
    assert raw.count(b"\n") < 30


def test_p19_p20_layouts_are_named_per_tensor_and_unknown_ids_refused():
    broken = layer()
    broken["weight"]["layout"] = "tile16x16_k8"
    with pytest.raises(InvalidManifest, match=r"layers\.0\.weight\.layout"):
        parse(document(broken))
    del broken["weight"]["layout"]
    with pytest.raises(InvalidManifest, match=r"layers\.0\.weight\.layout"):
        parse(document(broken))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "cannot read it: found schema_version 2, expected 1"),
        ({"schema_version": True}, "cannot read it"),
        ({"schema_version": None}, "cannot read it"),
        ({"future": 1}, "future"),
        ({"files": "all"}, "files"),
        ({"layers": [layer(extra=1)]}, r"layers\.0\.extra"),
        ({"layers": [layer(n="64")]}, r"layers\.0\.n"),
        ({"layers": [layer(n=64.0)]}, r"layers\.0\.n"),
        ({"layers": [layer(path="cuda")]}, r"layers\.0\.path"),
        ({"layer_defaults": 3}, "layer_defaults"),
    ],
)
def test_anything_unknown_is_refused(change, message):
    with pytest.raises(InvalidManifest, match=message) as caught:
        parse(document(**change))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000])
def test_not_a_manifest(raw):
    with pytest.raises(InvalidManifest, match=r"mxfp4prep\.json"):
        m.parse(raw)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-32-le"),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.replace("gfx950", "\ud800").encode("utf-8", "surrogatepass"),
    ],
)
def test_a_manifest_is_utf8_and_nothing_else(encode):
    text = m.dump(parse(document(layer()))).decode()
    assert m.parse(text.encode()).layers
    with pytest.raises(InvalidManifest, match="not a manifest"):
        m.parse(encode(text))


@pytest.fixture
def few_spelled_out(monkeypatch):
    monkeypatch.setattr(m, "SPELLED_OUT_LAYERS", 2)


def test_large_manifest_leaves_out_what_follows_and_reads_back_whole(few_spelled_out):
    layers = [layer(f"model.layers.{i}.mlp.down_proj") for i in range(4)]
    layers[1] = layer("odd", bias="odd.bias", reasons=["scale_cols"], path="triton", n_padded=128)
    layers[2]["scale"]["tensor"] = "model.layers.2.mlp.down_proj.weight_quantizer.scale"
    layers[2]["scale"]["file"] = "other.safetensors"
    layers[2]["weight"]["pad_byte"] = 7
    layers[3]["group"] = "g"
    manifest = parse(document(*layers))
    raw = m.dump(manifest)
    assert m.parse(raw) == manifest
    short = json.loads(raw)["layers"][0]
    assert set(short) == {"name", "n", "k", "path", "weight", "scale"}
    assert set(short["weight"]) == {"file", "layout", "shape"}
    assert json.loads(raw)["layers"][1]["n_padded"] == 128


def test_large_manifest_with_a_damaged_layer_is_refused(few_spelled_out):
    manifest = parse(document(*[layer(f"l{i}") for i in range(4)]))
    short = json.loads(m.dump(manifest))
    unlike = {"name": "l0", "n": 64, "k": 256, "weight": {"file": "f"}, "scale": []}
    for damage in (
        {"name": "l0"},
        5,
        None,
        {"name": "l0", "n": "x", "k": None, "weight": []},
        unlike,
    ):
        short["layers"][0] = damage
        with pytest.raises(InvalidManifest, match=r"layers\.0"):
            parse(short)


def test_collector_state_is_left_as_it_was():
    import gc

    assert gc.isenabled()
    parse(document())
    assert gc.isenabled()


def test_layer_lookup():
    manifest = parse(document())
    assert manifest.layer("model.layers.0.mlp.down_proj").n == 64
    with pytest.raises(KeyError):
        manifest.layer("nope")


def test_the_engine_is_written_only_where_it_is_another():
    own, other = parse(document()), document()
    assert own.target.engine == "mxfp4prep"
    other["target"]["engine"] = "mxfp4prep"
    assert m.dump(parse(other)) == m.dump(own)
    other["target"]["engine"] = "atom"
    assert json.loads(m.dump(parse(other))) == other


@pytest.mark.parametrize("engine", ["tgi", "SGLang", "", None, 1])
def test_an_engine_that_is_not_known_is_refused_by_name(engine):
    other = document()
    other["target"]["engine"] = engine
    with pytest.raises(InvalidManifest, match=rf"target\.engine: .* found {engine!r}"):
        parse(other)


# Each word of the format, written out here: what stands in a file somewhere must stay readable.

WORDS = {
    "target.layouts.0": "raw tile16x16 tile32x8 transposed",
    "target.layout": "auto asm triton",
    "target.engine": "vllm sglang atom",
    "files.0.role": "shard side config index new_index original digests",
    "files.0.source_header": "same no_metadata stored",
    "layers.0.kind": "linear expert shared_expert",
    "layers.0.parallel": "column row qkv merged replicated expert unknown",
    "layers.0.scheme": "w4a4 w4a16 w4a8 w4a6",
    "layers.0.gate_up": "interleaved concatenated",
    "layers.0.path": "asm triton",
    "layers.0.verdict.1": "asm triton impossible",
    "layers.0.weight.layout": "raw tile16x16 tile32x8 transposed",
    "layers.0.reasons.0": "scale_rows a_9",
    "findings.0.severity": "error warning note",
}
NO_WORDS = {"layers.0.reasons.0": ("", "Upper", "a-b", "a_9 ", " a")}


def with_value(place: str, value: object):
    """The document with one value, at `a.0.b`, replaced."""
    doc = document()
    doc["layers"][0]["reasons"] = ["x"]
    doc["findings"] = [{"code": "x", "severity": "note", "where": "w", "message": "m"}]
    *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    inner = doc
    for part in path:
        inner = inner[part]
    inner[str(last) if isinstance(inner, dict) else last] = value
    return doc


@pytest.mark.parametrize("place", WORDS)
def test_every_word_of_the_format_is_read_and_no_other(place):
    for word in WORDS[place].split():
        doc = with_value(place, word)
        assert json.loads(m.dump(parse(doc))) == doc
    for word in NO_WORDS.get(place, ("", "asm_", "RAW", 1)):
        with pytest.raises(InvalidManifest, match=f"{re.escape(place)}: "):
            parse(with_value(place, word))


@pytest.mark.parametrize("degree", ["0", "01", "-1", "1 ", "x", ""])
def test_a_degree_is_a_whole_number_from_one_on(degree):
    assert parse(document(layer(verdict={"10": "asm"}))).layers[0].verdict == {"10": "asm"}
    with pytest.raises(InvalidManifest, match=r"layers\.0\.verdict"):
        parse(document(layer(verdict={degree: "asm"})))


def test_records_cannot_be_changed():
    manifest = parse(document())
    with pytest.raises(ValidationError, match="frozen"):
        manifest.layers[0].n = 65


def test_what_older_files_leave_out_means_no():
    doc = document()
    del doc["target"]["expert_parallel"], doc["findings"], doc["layers"][0]["activation"]["static"]
    del doc["files"][0]["source_header"], doc["tensors"][0]["label"], doc["source"]["repo"]
    for part in ("weight", "scale"):
        del doc["layers"][0][part]["pad_byte"]
    manifest = parse(doc)
    assert manifest.target.expert_parallel is False
    assert manifest.target.engine == "mxfp4prep"
    assert manifest.layers[0].activation.static is False
    assert manifest.findings == []
    told = manifest.files[0].source_header, manifest.tensors[0].label, manifest.source.repo
    assert told == (None, None, None)
    assert manifest.layers[0].weight.pad_byte is manifest.layers[0].scale.pad_byte is None


def test_a_manifest_is_lines_of_compact_ascii():
    doc = document(layer("é"), layer("b"))
    lines = m.dump(parse(doc)).decode("ascii").split("\n")
    assert lines[:3] == ["{", '"schema_version": 1,', '"tool_version": "0.1.0",']
    assert lines[3].startswith('"source": {"name":"x","repo":null,')
    assert lines[3].endswith("},")
    at = lines.index('"layers": [')
    assert lines[at - 3 : at] == [
        '"files": [',
        '{"name":"model.safetensors","nbytes":5,"sha256":"' + "1" * 64 + '",'
        '"role":"shard","source_header":"same"}',
        "],",
    ]
    assert lines[at + 1].startswith('{"name":"\\u00e9","kind":"linear",')
    assert lines[at + 1].endswith("},")
    assert [json.loads(line.rstrip(",")) for line in lines[at + 1 : at + 3]] == doc["layers"]
    assert lines[at + 3] == "],"
    assert lines[-3:] == ['"findings": []', "}", ""]


def test_a_refusal_says_what_to_do():
    again = "copy the checkpoint again, or convert the source again"
    later = "install the mxfp4prep that wrote it, or convert the source again"
    cannot = "this version of mxfp4prep cannot read it"
    missing = document()
    del missing["tool_version"]
    for doc, message, hint in (
        ([], "not a manifest: found list", again),
        (document(schema_version=2), f"{cannot}: found schema_version 2, expected 1", later),
        (document(schema_version="1"), f"{cannot}: found schema_version '1', expected 1", later),
        (document(layer_defaults=[]), "layer_defaults is not an object", again),
        (document(layer_defaults={}, layers={}), "layer_defaults is not an object", again),
        (missing, "tool_version: Field required", again),
        (
            document(layer(n="64")),
            "layers.0.n: Input should be a valid integer: found '64'",
            again,
        ),
    ):
        with pytest.raises(InvalidManifest) as caught:
            parse(doc)
        assert str(caught.value) == f"mxfp4prep.json: {message}"
        assert caught.value.hint == hint
    with pytest.raises(InvalidManifest) as caught:
        m.parse(b'{"b":1,"a":1,"a":2}', "sub/mxfp4prep.json")
    assert str(caught.value) == "sub/mxfp4prep.json: not a manifest: key 'a' stands twice"
    assert caught.value.hint == again


def test_layers_are_spelled_out_up_to_a_number_of_them(few_spelled_out):
    assert json.loads(m.dump(parse(document(layer("a"), layer("b")))))["layers"][0]["k_padded"]
    three = json.loads(m.dump(parse(document(layer("a"), layer("b"), layer("c")))))
    assert "k_padded" not in three["layers"][0]


def test_the_number_of_layers_that_are_spelled_out_is_part_of_the_format():
    assert m.SPELLED_OUT_LAYERS == 10_000  # another one writes other bytes for the same input


def test_what_is_left_out_is_the_most_frequent_and_of_equals_the_first(few_spelled_out):
    groups, biases = ["g", "h", "h", None], ["x", "y", "y", "x"]
    layers = [
        layer(f"l{i}", group=group, bias=bias)
        for i, (group, bias) in enumerate(zip(groups, biases, strict=True))
    ]
    written = json.loads(m.dump(parse(document(*layers))))
    common = {key: layers[0][key] for key in COMMON_FIELDS} | {"group": "h", "bias": "x"}
    assert written["layer_defaults"] == common
    assert [record.get("group", "h") for record in written["layers"]] == groups
    assert "bias" not in written["layers"][0]
    assert written["layers"][1]["bias"] == "y"


COMMON_FIELDS = {
    *("kind", "parallel", "group", "scheme", "activation", "experts", "gate_up"),
    *("reasons", "hazards", "verdict", "bias", "input_scale"),
}


@pytest.mark.parametrize(("k", "groups"), [(64, 2), (66, 3), (80, 3), (96, 3)])
def test_shapes_of_a_short_last_group_are_left_out_too(few_spelled_out, k, groups):
    layers = [layer(f"l{i}", n=48, n_padded=48, k=k, k_padded=k) for i in range(3)]
    for record in layers:
        record["weight"]["source_shape"] = [48, k // 2]
        record["scale"]["source_shape"] = [48, groups]
    manifest = parse(document(*layers))
    written = json.loads(m.dump(manifest))
    for record in written["layers"]:
        assert record["weight"].keys() == {"file", "layout", "shape"}
        assert record["scale"].keys() == {"layout", "shape"}
    assert parse(written) == manifest


def test_the_schema_takes_what_is_written_and_nothing_else():
    schema = m.json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "mxfp4prep manifest"
    checker = jsonschema.Draft202012Validator(schema)
    checker.validate(json.loads(m.dump(parse(document()))))
    for place, value in (("layers.0.n", "64"), ("files.0.role", "shard_"), ("extra", 1)):
        assert not checker.is_valid(with_value(place, value))


def refusal(raw: bytes) -> str:
    with pytest.raises(InvalidManifest) as caught:
        m.parse(raw)
    assert str(caught.value).startswith("mxfp4prep.json: ")
    return str(caught.value).removeprefix("mxfp4prep.json: ")


def spelled(**changes) -> bytes:
    return json.dumps(document(**changes)).encode()


def test_a_name_is_listed_once():
    first, second = document(layer("first"), layer("second")), document(layer("second"))
    others = [document()["files"][0] | {"name": name} for name in ("a", "second", "second")]
    tensors = [{"name": name, "file": "f"} for name in ("a", "second", "second")]
    for kind, changes in (
        ("layer", {"layers": first["layers"] + second["layers"]}),
        ("file", {"files": others}),
        ("tensor", {"tensors": tensors}),
    ):
        assert refusal(spelled(**changes)) == f"a {kind} is listed twice: found second"
    empty = m.parse(spelled(files=[], tensors=[]))
    assert (empty.files, empty.tensors) == ([], [])


def test_half_a_character_is_refused_and_a_whole_one_read():
    for half in ("\\ud800", "\\uDC00", "\\ud83d\\ud83d\\ude00"):
        raw = spelled(tool_version="HERE").replace(b"HERE", half.encode())
        code = half[:6].lower()
        assert refusal(raw) == f"a lone surrogate: found '{code}'"
    for whole in ("\\ud83d\\ude00", "\\uD83D\\uDE00"):
        raw = spelled(tool_version="HERE").replace(b"HERE", whole.encode())
        assert m.parse(raw).tool_version == "\U0001f600"


def test_the_first_fault_of_a_record_is_told():
    message = refusal(spelled(layers=[layer("a"), layer("b", n="x", k="y")]))
    assert message == "layers.1.n: Input should be a valid integer: found 'x'"
    message = refusal(spelled(layers=[layer("a"), 5]))
    assert re.fullmatch(r"layers\.1: Input should be .*: found 5", message)


def test_lists_within_a_record_have_an_end():
    limit = 100_000
    target = document()["target"]
    assert len(m.parse(spelled(target=target | {"tp": [1] * limit})).target.tp) == limit
    too_many = f"found more than {limit} items"
    assert refusal(spelled(target=target | {"tp": [1] * (limit + 1)})) == f"target: {too_many}"
    endless = layer("b", reasons=["x"] * (limit + 1))
    assert refusal(spelled(layers=[layer("a"), endless])) == f"layers.1.reasons: {too_many}"


def test_lists_of_records_have_none(monkeypatch):
    monkeypatch.setattr(m, "MOST_ITEMS", 12)  # the target has 10 fields
    finding = {"code": "x", "severity": "note", "where": "w", "message": "m"}
    manifest = m.parse(
        spelled(
            files=[document()["files"][0] | {"name": str(i)} for i in range(20)],
            layers=[layer(str(i), activation={"dtype": None}) for i in range(20)],
            tensors=[{"name": str(i), "file": "f"} for i in range(20)],
            findings=[finding] * 20,
        )
    )
    assert len(manifest.findings) == 20


def test_more_values_than_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(documents, "MEMORY_LIMIT", 3 << 20)
    m.parse(spelled())
    message = refusal(b"[" + b"[],[]," * (1 << 14) + b"[" * 11)
    assert re.fullmatch(
        r"more JSON values than fit: found about \d MiB of them, expected at most 3 MiB", message
    )


def test_a_manifest_that_would_fill_the_memory_has_a_way_out(monkeypatch):
    with pytest.raises(InvalidManifest, match="more than 100000 items") as caught:
        parse({"schema_version": 1, "source": {"x": [0] * 100_001}})
    assert caught.value.hint == "copy the checkpoint again, or convert the source again"
    monkeypatch.setattr(documents, "MEMORY_LIMIT", 10)
    with pytest.raises(InvalidManifest, match="more JSON values than fit") as caught:
        parse({})
    assert caught.value.hint == "copy the checkpoint again, or convert the source again"


def test_half_characters_are_spelled_out():
    assert m.utf8("plain, \u00e9 and \U0001f600") == "plain, \u00e9 and \U0001f600"
    assert m.utf8("o\udcff-\ud83d") == "o\\udcff-\\ud83d"
