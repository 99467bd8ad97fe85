"""The manifest: strict, versioned, the same bytes each time, small when there are many layers."""

from __future__ import annotations

import json

import pytest

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
    for damage in ({"name": "l0"}, 5, None, {"name": "l0", "n": "x", "k": None, "weight": []}):
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
