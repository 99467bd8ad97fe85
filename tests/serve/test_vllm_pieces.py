"""What the vLLM plugin decides before vLLM loads anything; needs no vLLM."""

from __future__ import annotations

import shutil

import pytest
import torch
from prepared_factory import Layer, build, lay_out

import mxfp4prep
from mxfp4prep import prepared
from mxfp4prep.errors import CannotShard, InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.vllm.pieces import (
    Partition,
    check_alike,
    check_columns,
    path_of,
    pieces,
)
from mxfp4prep.integrations.vllm.receiving import Arrivals, received
from mxfp4prep.integrations.vllm.stored import open_stored
from mxfp4prep.parallel import Shard

AT = "model.layers.0.mlp"
PACKED = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}


@pytest.fixture
def made(tmp_path):
    """Layers -> (their records by the last part of the name, what they were made of, the root)."""

    def make(*layers, **more):
        named = [
            layer if "." in layer.name else _named(layer, f"{AT}.{layer.name}") for layer in layers
        ]
        found = build(tmp_path / "model", named, **more)
        records = mxfp4prep.load(tmp_path / "model").manifest.layers
        return {record.name.rpartition(".")[2]: record for record in records}, found, tmp_path

    return make


def _named(layer, name):
    layer.name = name
    return layer


def rows(*ranges, columns=(0, 512)):
    return Shard(tuple(ranges), columns)


def test_a_layer_that_can_be_sliced_keeps_its_path(made):
    for path in ("asm", "triton"):
        records, *_ = made(Layer("down_proj", 64, 512, path))
        assert path_of([(records["down_proj"], rows((32, 64)))], 32) == (path, ())


def test_columns_that_cut_tiles_of_the_scale(made):
    records, *_ = made(Layer("down_proj", 64, 512))
    path, reasons = path_of([(records["down_proj"], rows((0, 64), columns=(128, 256)))], 64)
    assert path == "triton"
    assert len(reasons) == 1
    assert "64 x 128 piece" in reasons[0]


def test_rows_that_are_right_alone_and_wrong_together(made):
    """Three times 32 rows: the ASM kernel is wrong for 96."""
    names = ("q_proj", "k_proj", "v_proj")
    records, *_ = made(*(Layer(name, 32, 512) for name in names))
    shards = [(records[name], rows((0, 32))) for name in names]
    assert path_of(shards[:2], 64) == ("asm", ())
    path, reasons = path_of(shards, 96)
    assert path == "triton"
    assert "96 x 512" in reasons[0]
    assert path_of(shards) == ("asm", ())  # matrices that stay apart


def test_parts_that_are_stored_differently(made):
    records, *_ = made(Layer("gate_proj", 64, 512), Layer("up_proj", 64, 512, "triton"))
    shards = [(record, rows((0, 64))) for record in records.values()]
    assert path_of(shards, 128) == (
        "triton",
        ("its matrices are stored for different paths (asm, triton)",),
    )


def test_kept_layers_stay_as_they_are(made):
    records, *_ = made(Layer("down_proj", 64, 512, "kept", reasons=["kept"]))
    assert path_of([(records["down_proj"], rows((0, 64), columns=(0, 32)))], 64) == ("kept", ())


def test_one_stored_matrix_for_several_outputs(made):
    """A q|k|v of 128, 64 and 64 rows: rank 1 of 2 has a half of q and k, and v is its own."""
    records, *_ = made(Layer("qkv_proj", 256, 512))
    parts = [Partition(128, 64, 128), Partition(64, 32, 64), Partition(64, 0, 64)]
    (piece,) = pieces("qkv", [records["qkv_proj"]], parts, (0, 512))
    assert piece.shard.rows == ((64, 128), (160, 192), (192, 256))
    assert piece.partitions == (0, 3)


def test_a_stored_matrix_for_each_output(made):
    records, *_ = made(Layer("gate_proj", 64, 512), Layer("up_proj", 64, 512))
    parts = [Partition(64, 0, 32), Partition(64, 0, 32)]
    found = pieces("gate_up", list(records.values()), parts, (0, 512))
    assert [piece.shard.rows for piece in found] == [((0, 32),), ((0, 32),)]
    assert [piece.partitions for piece in found] == [(0, 1), (1, 2)]


def test_outputs_that_stored_rows_do_not_make(made):
    records, *_ = made(Layer("qkv_proj", 256, 512))
    for parts in ([Partition(128, 0, 128)], [Partition(192, 0, 96), Partition(128, 0, 64)]):
        with pytest.raises(Unsupported, match="other rows"):
            pieces("qkv", [records["qkv_proj"]], parts, (0, 512))
    with pytest.raises(Unsupported, match="more rows on this rank"):
        pieces("qkv", [records["qkv_proj"]], [Partition(256, 192, 320)], (0, 512))
    more = [Partition(256, 0, 256), Partition(1, 0, 1)]
    with pytest.raises(Unsupported, match="more rows"):
        pieces("qkv", [records["qkv_proj"]], more, (0, 512))


def test_columns_in_whole_groups_only(made):
    records, *_ = made(Layer("down_proj", 64, 96, "triton"))
    check_columns(records["down_proj"], (0, 96))
    check_columns(records["down_proj"], (32, 64))
    for columns in ((0, 48), (48, 96), (96, 128)):
        with pytest.raises(CannotShard, match="no whole 32-groups"):
            check_columns(records["down_proj"], columns)


def test_layers_of_different_schemes_are_not_fused(made):
    records, *_ = made(Layer("gate_proj", 64, 512), Layer("up_proj", 64, 512, scheme="w4a16"))
    with pytest.raises(Unsupported, match="different schemes"):
        check_alike("gate_up", records.values())
    check_alike("gate", [records["gate_proj"], records["gate_proj"]])


@pytest.mark.parametrize("path", ["asm", "triton", "kept"])
@pytest.mark.parametrize("operand", ["weight", "scale"])
def test_received_bytes(made, path, operand):
    """As stored, and in any other layout of the operand, from what was laid out by hand."""
    records, found, _ = made(
        Layer("down_proj", 64, 512, path, reasons=["kept"] if path == "kept" else [])
    )
    record, layer = records["down_proj"], found[f"{AT}.down_proj"]
    raw = layer.packed if operand == "weight" else layer.scale
    stored = record.weight if operand == "weight" else record.scale
    loaded = lay_out(raw, stored.layout)
    tiles = "tile16x16" if operand == "weight" else "tile32x8"
    for layout in (tiles, "raw") + (("transposed",) if operand == "scale" else ()):
        assert torch.equal(received(record, operand, loaded, layout), lay_out(raw, layout))
    e8m0 = loaded.view(torch.float8_e8m0fnu)
    assert torch.equal(received(record, operand, e8m0, stored.layout), loaded)


def test_received_is_what_the_manifest_describes(made):
    records, found, _ = made(Layer("down_proj", 64, 512))
    raw = found[f"{AT}.down_proj"].packed
    for wrong in (raw, lay_out(raw, "tile16x16").to(torch.int16), lay_out(raw, "tile16x16")[:2]):
        with pytest.raises(InvalidCheckpoint, match="not what the manifest says"):
            received(records["down_proj"], "weight", wrong, "tile16x16")


def test_what_did_not_arrive():
    arrivals = Arrivals("layer", ["a", "b", "c", "d", "e"], "auto")
    arrivals.note("b")
    with pytest.raises(InvalidCheckpoint, match="did not arrive: a, c, d and 1 more"):
        arrivals.check()
    for name in "acde":
        arrivals.note(name)
    arrivals.is_accounted = True
    arrivals.check()
    Arrivals("layer", ["a"], "dummy").check()


def test_a_loader_that_nobody_watched():
    """What it leaves out of the rest of the model would not be noticed."""
    arrivals = Arrivals("layer", ["a"], "theirs")
    arrivals.note("a")
    with pytest.raises(Unsupported, match="--load-format theirs: loads past"):
        arrivals.check()


def renamed(name):
    return None if "drop" in name else name.replace("model.", "language_model.model.", 1)


def test_members_by_vllms_names(made):
    _, _, root = made(
        Layer("gate_proj", 64, 512),
        Layer("up_proj", 64, 512),
        Layer("down_proj", 64, 256),
        Layer("model.layers.0.drop.down_proj", 64, 256),
        Layer("model.layers.0.self_attn.q_proj", 64, 512),
    )
    stored = open_stored(root / "model", renamed)
    at = f"language_model.{AT}"
    names = [record.name for record in stored.members(f"{at}.gate_up_proj", PACKED)]
    assert names == [f"{AT}.gate_proj", f"{AT}.up_proj"]
    assert [record.name for record in stored.members(f"{at}.down_proj", PACKED)] == [
        f"{AT}.down_proj"
    ]
    assert stored.members(f"{AT}.down_proj", PACKED) == ()
    assert len(stored.records) == 4
    with pytest.raises(Unsupported, match="only some are MXFP4"):
        stored.members("language_model.model.layers.0.self_attn.qkv_proj", PACKED)


def test_modules_with_a_plain_weight(made):
    names = ("model.a.q_proj", "model.a.k_proj", "model.a.v_proj", f"{AT}.up_proj")
    copied = {f"{name}.weight": torch.ones(4, 4, dtype=torch.bfloat16) for name in names}
    copied[f"{AT}.gate_proj.weight"] = torch.ones(4, 4).to(torch.float8_e4m3fn)
    copied[f"{AT}.gate_proj.weight_scale"] = torch.ones(1)
    copied["model.a.v_proj.weight_scale"] = torch.ones(1)
    _, _, root = made(Layer("down_proj", 64, 256), copied=copied)
    stored = open_stored(root / "model", str)
    packed = {"qk_proj": ["q_proj", "k_proj"], **PACKED}
    assert stored.is_plain("model.a.qk_proj", packed)
    assert stored.is_plain(f"{AT}.up_proj", packed)
    assert not stored.is_plain("model.a.qkv_proj", packed)
    assert not stored.is_plain(f"{AT}.gate_up_proj", packed)
    assert not stored.is_plain(f"{AT}.down_proj", packed)


def expert_layers(count, width=512, path="asm", **more):
    parts = {"gate_proj": (width, 256), "up_proj": (width, 256), "down_proj": (256, width)}
    return [
        Layer(f"{AT}.experts.{expert}.{part}", n, k, path, parallel="expert", **more)
        for expert in range(count)
        for part, (n, k) in parts.items()
    ]


def test_experts_by_vllms_names(made):
    _, _, root = made(*reversed(expert_layers(3)))
    stored = open_stored(root / "model", renamed)
    found = stored.experts(f"language_model.{AT}.experts")
    assert [member.record.name for stack in found.w2 for member in stack] == [
        f"{AT}.experts.{expert}.down_proj" for expert in range(3)
    ]
    assert [member.record.name.rpartition(".")[2] for member in found.w13[1]] == [
        "gate_proj",
        "up_proj",
    ]
    assert stored.experts(f"{AT}.experts") is None


@pytest.mark.parametrize("leaf", ["bias", "input_scale", "weight_scale"])
def test_a_vector_of_nothing_is_refused(made, leaf):
    """vLLM's models leave it out; a norm's own, or a plain layer's, has its place."""
    ones = torch.ones(4, dtype=torch.bfloat16)
    copied = {"model.norm.weight": ones, f"model.norm.{leaf}": ones.clone()}
    _, _, root = made(Layer("down_proj", 64, 256), copied=copied)
    assert f"model.norm.{leaf}" in open_stored(root / "model", str).tensors
    shutil.rmtree(root / "model")
    del copied["model.norm.weight"]
    made(Layer("down_proj", 64, 256), copied=copied)
    with pytest.raises(InvalidCheckpoint, match=f"model.norm.{leaf}: belongs to no layer"):
        open_stored(root / "model", str)


@pytest.mark.parametrize("load_format", ["runai_streamer_sharded", "sharded_state", "tensorizer"])
def test_formats_with_files_of_their_own_are_refused(load_format):
    with pytest.raises(Unsupported, match=f"--load-format {load_format}"):
        Arrivals("a", ["a.weight"], load_format)


@pytest.mark.parametrize("load_format", ["dummy", "ipc_cache"])
def test_formats_where_nothing_arrives(load_format):
    Arrivals("a", ["a.weight"], load_format).check()


def test_experts_in_one_tensor_are_refused(made):
    _, _, root = made(
        Layer(f"{AT}.experts.gate_up_proj", 1024, 256, experts=2, parallel="expert"),
        Layer(f"{AT}.experts.down_proj", 256, 512, experts=2, parallel="expert"),
    )
    stored = open_stored(root / "model", str)
    with pytest.raises(Unsupported, match="stored in one tensor"):
        stored.experts(f"{AT}.experts")


def test_the_manifest_is_read_once(made, monkeypatch):
    """It is parsed and validated as a whole, which takes its time for a large model."""
    _, _, root = made(Layer("down_proj", 64, 256))
    read = []
    monkeypatch.setattr(
        prepared, "parse", lambda raw, parse=prepared.parse: read.append(raw) or parse(raw)
    )
    open_stored(root / "model", str)
    assert len(read) == 1


def test_weights_that_are_not_there(made):
    """All may be streamed from elsewhere; some are missing, unless vLLM is to fetch them still."""
    _, _, root = made(Layer("down_proj", 64, 256), shards=2)
    first, second = sorted((root / "model").glob("*.safetensors"))
    first.unlink()
    with pytest.raises(InvalidCheckpoint, match="it is not there"):
        open_stored(root / "model", str)
    fetched = open_stored(root / "model", str, is_download=True)
    second.unlink()
    for stored in (fetched, open_stored(root / "model", str)):
        assert list(stored.records) == [f"{AT}.down_proj"]
