"""What users do with a model that transformers loaded: it works as with any, or says why not."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_transformers import (
    DENSE,
    FIXTURES,
    MIXED,
    MOE,
    TOLERANCE,
    files_of,
    loaded,
    logits_of,
    prepare,
    reference,
)
from test_transformers_moe import IDS, gpt_oss, quark_like, qwen3_moe, stack_experts
from test_transformers_placement import needs_accelerate
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    QuantoConfig,
    pipeline,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

import mxfp4prep
from mxfp4prep.demo import build


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A function: the prepared checkpoint of a fixture, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = prepare(FIXTURES / name, tmp_path_factory.mktemp("use") / "prepared")
        return made[name]

    return get


def is_quarks(model, name: str) -> bool:
    expected = reference(name)
    difference = logits_of(model, expected["input_ids"]) - expected["logits"]
    return bool(difference.abs().max() <= TOLERANCE)


# ---- loading


@pytest.mark.parametrize(
    "wishes",
    [
        {"torch_dtype": torch.float32, "dtype": None},
        {"dtype": "float32"},
        {"low_cpu_mem_usage": True},
        {"token": "hf_secret", "revision": "main"},
        {"attn_implementation": "sdpa"},
        {"experts_implementation": "grouped_mm"},
        {"key_mapping": {r"^transformer\.": "model."}},
        {"trust_remote_code": True},
    ],
    ids=lambda wishes: " ".join(wishes),
)
def test_arguments_of_from_pretrained(prepared, wishes):
    assert is_quarks(loaded(prepared(MOE), **wishes), MOE)


def test_a_subfolder(prepared, tmp_path):
    shutil.copytree(prepared(DENSE), tmp_path / "inner")
    assert is_quarks(loaded(tmp_path, subfolder="inner"), DENSE)


@needs_accelerate
def test_a_device_map_within_given_memory(prepared, tmp_path):
    limits = {"max_memory": {"cpu": 1_400_000}, "offload_folder": str(tmp_path / "offload")}
    model = loaded(prepared(DENSE), device_map="auto", **limits)
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert is_quarks(model, DENSE)


def test_a_pipeline_that_is_given_the_directory(prepared):
    tokens = pipeline("text-generation", model=str(prepared(MOE)), dtype=torch.float32)
    (said,) = tokens("hello", max_new_tokens=4, do_sample=False, return_tensors=True)
    ids = tokens.tokenizer("hello", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(prepared(MOE), dtype=torch.float32)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=3)
    assert said["generated_token_ids"] == expected[0].tolist()


@pytest.mark.parametrize(
    "kind", [AutoModelForSequenceClassification, AutoModelForQuestionAnswering]
)
def test_a_head_that_the_checkpoint_lacks(prepared, kind):
    """transformers would make one up, for training, which there is none of here."""
    with pytest.raises(mxfp4prep.InvalidCheckpoint) as raised:
        kind.from_pretrained(prepared(DENSE))
    assert "config.json names LlamaForCausalLM: load that" in raised.value.hint


def test_another_quantization_is_refused(prepared):
    with pytest.raises(ValueError, match="Mxfp4PrepConfig but you are passing a QuantoConfig"):
        loaded(prepared(DENSE), quantization_config=QuantoConfig(weights="int8"))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """A prepared Llama whose tensors are called otherwise than transformers' Llama has them."""
    source = tmp_path_factory.mktemp("renamed") / "source"
    shutil.copytree(FIXTURES / DENSE, source)
    (source / "model.safetensors.index.json").unlink()
    tensors = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            tensors[name.replace("model.", "decoder.stack.", 1)] = tensor
        shard.unlink()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return prepare(source, source.parent / "prepared")


def test_names_that_only_a_key_mapping_knows(renamed):
    mapping = {r"^decoder\.stack\.": "model."}
    with pytest.raises(mxfp4prep.InvalidCheckpoint, match="no such module") as raised:
        loaded(renamed, key_mapping=mapping)
    assert "register_checkpoint_conversion_mapping" in raised.value.hint


def test_names_that_were_registered(renamed, tmp_path, monkeypatch):
    from transformers import conversion_mapping

    register_checkpoint_conversion_mapping("llama", [])  # so that there is a cache to put back
    cache = copy.copy(conversion_mapping._checkpoint_conversion_mapping_cache)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", cache)
    renaming = WeightRenaming(r"^decoder\.stack\.", "model.")
    register_checkpoint_conversion_mapping("LlamaForCausalLM", [renaming], overwrite=True)
    model = loaded(renamed)
    assert is_quarks(model, DENSE)
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(renamed)


def test_a_key_mapping_that_moves_stored_layers(prepared):
    """Both layers have the same size: nothing else would notice."""
    mapping = {r"self_attn\.q_proj": "self_attn.o_proj", r"self_attn\.o_proj": "self_attn.q_proj"}
    with pytest.raises(mxfp4prep.Unsupported, match="renamed by a key_mapping"):
        loaded(prepared(DENSE), key_mapping=mapping)


# ---- the model


def test_casts(prepared):
    """A cast layer is the layer of a model that was loaded so."""
    expected = AutoModelForCausalLM.from_pretrained(prepared(MIXED), dtype=torch.bfloat16)
    model = loaded(prepared(MIXED))
    with pytest.raises(ValueError, match=r"half.*not supported for quantized"):
        model.half()
    assert is_quarks(model, MIXED)
    model.to(torch.bfloat16)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        ours, theirs = (one.get_submodule(f"model.layers.1.{name}") for one in (model, expected))
        x = torch.randn(2, 3, ours.in_features, generator=torch.Generator().manual_seed(4))
        assert torch.equal(ours(x.bfloat16()), theirs(x.bfloat16()))
    model.to(torch.float64)
    with pytest.raises(mxfp4prep.UsageError, match=r"dtype: found torch\.float64"):
        model.model.layers[1].mlp.down_proj(x.double())


@pytest.mark.parametrize("name", [MOE, MIXED])
def test_copies_and_state(prepared, tmp_path, name):
    path = prepared(name)
    model = loaded(path)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [torch.load(stream, weights_only=False)]
    if name == MOE:  # torch's own pickling knows no FP8
        copies.append(pickle.loads(pickle.dumps(model)))
    other = loaded(path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not is_quarks(other, name)
    other.load_state_dict(model.state_dict())
    for one in (*copies, other):
        assert is_quarks(one, name)
        one.save_pretrained(tmp_path / "saved")
        assert files_of(tmp_path / "saved") == files_of(path)


def test_other_embeddings(prepared, tmp_path):
    model, expected = loaded(prepared(DENSE)), reference(DENSE)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    got = logits_of(model, expected["input_ids"])
    assert got.shape[-1] == size + 8
    assert (got[..., :size] - expected["logits"]).abs().max() <= TOLERANCE
    with pytest.raises(mxfp4prep.UsageError, match="cannot be saved with changes"):
        model.save_pretrained(tmp_path / "out")


def test_what_can_be_trained_and_what_cannot(prepared):
    """A head on what the model computes; nothing that lies before a stored layer."""
    model, ids = loaded(prepared(DENSE)), reference(DENSE)["input_ids"]
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(mxfp4prep.Unsupported, match="has no gradient"):
        model(ids, labels=ids).loss.backward()


@needs_accelerate
def test_offloaded_after_loading(prepared, tmp_path):
    import accelerate

    expected = reference(MOE)
    for offload in (
        lambda model: accelerate.cpu_offload(model, execution_device="cpu"),
        lambda model: accelerate.disk_offload(model, str(tmp_path), execution_device="cpu"),
    ):
        got = logits_of(offload(loaded(prepared(MOE))), expected["input_ids"])
        assert (got - expected["logits"]).abs().max() <= TOLERANCE


# ---- saving


def test_uploading_and_names_of_ones_own_are_refused(prepared, tmp_path):
    model = loaded(prepared(DENSE))
    with pytest.raises(mxfp4prep.UsageError, match="push_to_hub") as raised:
        model.push_to_hub("org/model")
    assert "hf upload" in raised.value.hint
    for wish in ({"variant": "fp16"}, {"distributed_checkpoint": True}):
        with pytest.raises(mxfp4prep.UsageError, match=f"save_pretrained: {next(iter(wish))}"):
            model.save_pretrained(tmp_path / "out", **wish)
    assert not (tmp_path / "out").exists()


def test_shards_of_another_size_are_not_made_and_that_is_said(prepared, tmp_path):
    model = loaded(prepared(DENSE))
    with pytest.warns(UserWarning, match=r"max_shard_size 1KB .*model-00001"):
        model.save_pretrained(tmp_path / "small", max_shard_size="1KB")
    model.save_pretrained(tmp_path / "large", max_shard_size="5GB")
    for out in ("small", "large"):
        assert files_of(tmp_path / out) == files_of(prepared(DENSE))


def flip(model, module: str, param: str, at: int) -> None:
    getattr(model.get_submodule(module), param).data.reshape(-1)[at] ^= 1


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize(
    ("name", "module", "param", "stored"),
    [
        (DENSE, "up_proj", "weight", ("up_proj.weight",) * 2),
        (DENSE, "up_proj", "weight_scale", ("up_proj.weight_scale",) * 2),
        (MOE, "experts", "gate_up_proj", ("0.gate_proj.weight", "7.up_proj.weight")),
        (MOE, "experts", "gate_up_proj_scale", ("0.gate_proj.weight_s", "7.up_proj.weight_s")),
        (MOE, "experts", "down_proj", ("0.down_proj.weight", "7.down_proj.weight")),
        (MOE, "experts", "down_proj_scale", ("0.down_proj.weight_s", "7.down_proj.weight_s")),
    ],
)
def test_changed_bytes_are_not_saved_as_the_checkpoint(
    prepared, tmp_path, name, module, param, stored, at
):
    model = loaded(prepared(name))
    flip(model, f"model.layers.1.mlp.{module}", param, at)
    with pytest.raises(mxfp4prep.UsageError, match="has other bytes") as raised:
        model.save_pretrained(tmp_path / "out")
    assert stored[at] in str(raised.value)
    flip(model, f"model.layers.1.mlp.{module}", param, at)
    model.save_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "form"), [(qwen3_moe, "fused"), (qwen3_moe, "apart"), (gpt_oss, "bare")]
)
def test_changed_bytes_of_a_bank_stored_as_one_tensor(tmp_path, config, form):
    leaves = (
        ("gate_up_proj", "down_proj") if form == "bare" else ("gate_proj", "up_proj", "down_proj")
    )
    quark_like(tmp_path / "quark", config(96), leaves)
    stack_experts(tmp_path / "quark", form)
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    model = loaded(path)
    assert logits_of(model, IDS).std() > 0
    for param in ("gate_up_proj", "gate_up_proj_scale", "down_proj", "down_proj_scale"):
        flip(model, "model.layers.1.mlp.experts", param, -1)
        with pytest.raises(
            mxfp4prep.UsageError, match=r"layers\.1\.mlp\.experts.* has other bytes"
        ):
            model.save_pretrained(tmp_path / "out")
        flip(model, "model.layers.1.mlp.experts", param, -1)


def test_the_checkpoint_of_the_demo(tmp_path):
    """What the README walks through can be served, too."""
    build(tmp_path / "model")
    model = loaded(prepare(tmp_path / "model", tmp_path / "prepared"), dtype="auto")
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2).shape == (1, 5)
