"""The parts of the transformers integration that no small checkpoint of the fixtures has."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quark_factory import FP8_WEIGHT, quant_layer
from test_transformers import (
    FIXTURES,
    MIXED,
    TOLERANCE,
    files_of,
    loaded,
    logits_of,
    prepare,
)
from test_transformers_moe import IDS, quark_like, qwen3_moe
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.base import HfQuantizer

import mxfp4prep
from mxfp4prep.integrations.hf.cutting import check_cut, slicing_of
from mxfp4prep.integrations.hf.fp8 import Fp8Linear, inputs_of_fp8
from mxfp4prep.integrations.hf.linear import StoredLinear
from mxfp4prep.integrations.hf.parallelism import check

FP8_INPUT = {**FP8_WEIGHT, "qscheme": "per_tensor", "ch_axis": None}


def spec(**inputs):
    return quant_layer(FP8_WEIGHT, {**FP8_INPUT, **inputs} if inputs else None)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, "none"),
        ({"is_dynamic": False}, "static"),
        ({"is_dynamic": True}, "tensor"),
        ({"is_dynamic": True, "qscheme": "per_channel", "ch_axis": 1}, "token"),
    ],
)
def test_what_an_fp8_layer_does_to_its_input(inputs, expected):
    config = {"layer_quant_config": {"*other*": spec(is_dynamic=True), "*q_proj": spec(**inputs)}}
    assert inputs_of_fp8(config, ["model.q_proj"]) == {"model.q_proj": expected}
    as_default = {"layer_quant_config": None, "global_quant_config": spec(**inputs)}
    assert inputs_of_fp8(as_default, ["model.q_proj"]) == {"model.q_proj": expected}


@pytest.mark.parametrize(
    "inputs",
    [
        {"is_dynamic": True, "qscheme": "per_channel", "ch_axis": 0},
        {"is_dynamic": False, "qscheme": "per_group"},
        {"is_dynamic": True, "dtype": "int8"},
    ],
)
def test_fp8_layers_that_are_not_known(inputs):
    with pytest.raises(mxfp4prep.Unsupported, match="not known here"):
        inputs_of_fp8({"global_quant_config": spec(**inputs)}, ["m.q_proj"])
    with pytest.raises(mxfp4prep.Unsupported, match="does not explain"):
        inputs_of_fp8({"global_quant_config": quant_layer()}, ["m.q_proj"])


@pytest.mark.parametrize("odd", [[], "fp8", 3], ids=repr)
@pytest.mark.parametrize(
    "place", ["layer_quant_config", "global_quant_config", "layer_quant_config.*q_proj"]
)
def test_a_source_config_whose_parts_are_no_objects(place, odd):
    key, _, pattern = place.partition(".")
    config = {"global_quant_config": spec(), key: {pattern: odd} if pattern else odd}
    with pytest.raises(
        mxfp4prep.InvalidCheckpoint, match=r"config\.json: .*: not an object"
    ) as raised:
        inputs_of_fp8(config, ["model.q_proj"])
    assert (pattern or key) in str(raised.value)


@pytest.mark.parametrize("odd", [[], {}, 3, "per_head"], ids=repr)
def test_an_fp8_layer_whose_scheme_is_no_name(odd):
    config = {"global_quant_config": spec(qscheme=odd, is_dynamic=True)}
    with pytest.raises(mxfp4prep.Unsupported, match="not known here"):
        inputs_of_fp8(config, ["model.q_proj"])


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("inputs", ["none", "static", "tensor", "token"])
def test_an_fp8_layers_arithmetic(inputs, per_row):
    """Against float64, with the input rounded by torch's own cast."""
    generator = torch.Generator().manual_seed(2)
    n, k = 24, 40
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(n if per_row else 1, generator=generator) + 0.5
    scale = scale.reshape(-1) if per_row else scale.reshape(())
    static, x = torch.tensor(0.03), torch.randn(2, 5, k, generator=generator)
    places = {
        f"m.{name}": SimpleNamespace(entry=SimpleNamespace(shape=tuple(t.shape), dtype=dtype))
        for name, t, dtype in (
            ("weight", weight, "F8_E4M3"),
            ("weight_scale", scale, "F32"),
            ("input_scale", static, "F32"),
        )
    }
    with torch.device("meta"):
        linear = nn.Linear(k, n, bias=True)
    layer = Fp8Linear(linear, "m", inputs, SimpleNamespace(places=places))
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    bias = torch.randn(n, generator=generator)
    layer.weight, layer.weight_scale = (nn.Parameter(t, False) for t in (weight, scale))
    layer.bias = nn.Parameter(bias)
    if inputs == "static":
        layer.input_scale = static
    step = {
        "none": None,
        "static": static,
        "tensor": x.abs().max() / 448,
        "token": x.abs().amax((0, 2), keepdim=True) / 448,
    }[inputs]
    rounded = x if step is None else (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    rounded = rounded.double() * (1 if step is None else step.double())
    expected = rounded @ (weight.double() * scale.double().reshape(-1, 1)).T + bias.double()
    with torch.no_grad():
        assert torch.allclose(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_fp8_scales_of_another_shape_are_refused(tmp_path):
    """One in a block of 128 rows and columns, as DeepSeek has them."""
    places = {
        "m.weight": SimpleNamespace(entry=SimpleNamespace(shape=(256, 256), dtype="F8_E4M3")),
        "m.weight_scale": SimpleNamespace(entry=SimpleNamespace(shape=(2, 2), dtype="F32")),
    }
    with pytest.raises(mxfp4prep.Unsupported, match="FP8 scales of this shape"):
        Fp8Linear(nn.Linear(256, 256), "m", "none", SimpleNamespace(places=places))


def test_a_quantized_head_is_not_tied(tmp_path, caplog):
    """Whatever config.json says: the embedding is no place for MXFP4 bytes, nor the other way."""
    plain = quark_like(tmp_path / "quark", qwen3_moe(), plain=())
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))
    model = loaded(path)
    assert "specifies to tie" not in caplog.text  # nor was transformers left to find out
    assert isinstance(model.lm_head, StoredLinear)
    assert (logits_of(model, IDS) - logits_of(plain, IDS)).abs().max() <= TOLERANCE


def test_draft_layers_that_transformers_leaves_out(tmp_path, monkeypatch):
    """A class says which tensors of a checkpoint it ignores; those are no error, others are."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    plain = quark_like(tmp_path / "quark", qwen3_moe(num_hidden_layers=3))
    config = json.loads((tmp_path / "quark/config.json").read_text())
    config["num_hidden_layers"] = 2
    (tmp_path / "quark/config.json").write_text(json.dumps(config))
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    with pytest.raises(mxfp4prep.InvalidCheckpoint, match=r"model\.layers\.2.*no such module"):
        AutoModelForCausalLM.from_pretrained(path)
    monkeypatch.setattr(
        Qwen3MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."]
    )
    del plain.model.layers[2]
    model = loaded(path)
    assert (logits_of(model, IDS) - logits_of(plain, IDS)).abs().max() <= TOLERANCE
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(path)


def rewritten(tmp_path: Path, change) -> Path:
    """The mixed fixture with changed tensors, prepared."""
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    for file, content in files_of(FIXTURES / MIXED).items():
        source.mkdir(exist_ok=True)
        (source / file).write_bytes(content)
    tensors = change(load_file(source / "model.safetensors"))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return prepare(source, tmp_path / "prepared")


def reconfigured(path: Path, change) -> Path:
    """config.json's quantization_config changed."""
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_quantization_config": []}, "does not explain"),
        ({"source_quantization_config": "quark"}, "does not explain"),
        ({"source_quantization_config": {"layer_quant_config": []}}, "no.* object"),
        ({"manifest": ["mxfp4prep.json"]}, r"quantization_config\.manifest"),
        ({"format_version": [1]}, "format_version"),
        ({"format_version": None}, "format_version"),
    ],
    ids=repr,
)
def test_a_config_of_other_types_is_refused(tmp_path, change, message):
    path = rewritten(tmp_path, dict)
    changed = reconfigured(path, lambda config: config.update(change))
    with pytest.raises(mxfp4prep.Mxfp4PrepError, match=message):
        AutoModelForCausalLM.from_pretrained(changed)


@pytest.mark.parametrize("key", ["format_version", "manifest"])
def test_a_config_without_a_key_is_refused(tmp_path, key):
    path = rewritten(tmp_path, dict)
    changed = reconfigured(path, lambda config: config.pop(key))
    with pytest.raises(mxfp4prep.Mxfp4PrepError, match=key):
        AutoModelForCausalLM.from_pretrained(changed)


def test_online_rotations_are_refused(tmp_path):
    name = "model.layers.0.mlp.down_proj.input_rotation"
    path = rewritten(tmp_path, lambda tensors: tensors | {name: torch.eye(4)})
    with pytest.raises(mxfp4prep.Unsupported, match="online rotation"):
        AutoModelForCausalLM.from_pretrained(path)


def test_other_quantized_tensors_are_refused(tmp_path):
    def change(tensors):
        name = "model.layers.0.self_attn.o_proj"
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].view(torch.int8)
        return tensors

    path = rewritten(tmp_path, change)
    with pytest.raises(mxfp4prep.Unsupported, match="a quantized tensor that is not MXFP4"):
        AutoModelForCausalLM.from_pretrained(path)


def test_another_module_than_a_linear_one(tmp_path, monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    class Other(nn.Linear):
        """A linear layer that does something else besides."""

    quark_like(tmp_path / "quark", qwen3_moe())
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    original = modeling_qwen3_moe.Qwen3MoeAttention.__init__

    def changed(self, config, layer_idx):
        original(self, config, layer_idx)
        self.o_proj = Other(self.o_proj.in_features, self.o_proj.out_features, bias=False)

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeAttention, "__init__", changed)
    with pytest.raises(mxfp4prep.Unsupported, match="another module there than a linear layer"):
        AutoModelForCausalLM.from_pretrained(path)


def test_ranks_need_a_transformers_that_knows_plans(monkeypatch):
    monkeypatch.delattr(HfQuantizer, "update_parallel_plan", raising=False)
    config = SimpleNamespace(tp_size=1, ep_size=1)
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=config))
    check(model)
    config.ep_size = 2
    with pytest.raises(mxfp4prep.Unsupported, match="over ranks"):
        check(model)


@pytest.mark.parametrize(
    ("path", "n", "k", "axis", "size", "dims"),
    [
        ("asm", 128, 512, "rows", 2, (0, 0)),
        ("asm", 128, 512, "columns", 2, (1, 1)),
        ("asm", 128, 256, "columns", 2, None),
        ("asm", 96, 512, "rows", 2, None),
        ("asm", 192, 512, "rows", 2, None),
        ("triton", 96, 320, "rows", 2, (0, 1)),
        ("triton", 96, 320, "columns", 2, (1, 0)),
        ("kept", 96, 320, "columns", 2, (1, 1)),
    ],
)
def test_along_which_dimension_a_stored_tensor_is_sliced(path, n, k, axis, size, dims):
    assert slicing_of(path, n, k, axis, size) == dims


@pytest.mark.parametrize(("axis", "reason"), [("rows", "split_rows"), ("columns", "split_cols")])
def test_pieces_that_are_none(axis, reason):
    with pytest.raises(mxfp4prep.CannotShard) as raised:
        check_cut("m", axis, (33, 33), 2)
    assert raised.value.reason == reason
    with pytest.raises(mxfp4prep.CannotShard, match="no whole 32-groups"):
        check_cut("m", "columns", (64, 96), 2)
    check_cut("m", "columns", (64, 96), 2, group=1)
