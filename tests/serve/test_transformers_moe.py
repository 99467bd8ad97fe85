"""Mixture-of-experts models as transformers 5 lays them out: one bank for all experts of a layer.

Every model is transformers' own, in float32, with MXFP4 values in its weights. The same values are
written as Quark would, prepared, and loaded: logits must be those of the float model. Inputs are
not quantized (W4A16), so that both compute the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quark_factory import FP8_WEIGHT, quant_config, quant_layer, write_index, write_shards
from safetensors.torch import load_file, save_file
from test_transformers import TOLERANCE, files_of, loaded, logits_of, prepare
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe import modeling_qwen3_moe

import mxfp4prep
from mxfp4prep.integrations.hf.experts import StoredExperts
from mxfp4prep.integrations.hf.linear import StoredLinear

SMALL = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8_INPUT = {**FP8_WEIGHT, "qscheme": "per_tensor", "ch_axis": None}
FP8_PER_TENSOR = {**FP8_INPUT, "is_dynamic": True}
FP8_PER_TOKEN = {**FP8_PER_TENSOR, "qscheme": "per_channel", "ch_axis": 1}
IDS = torch.randint(0, 128, (2, 7), generator=torch.Generator().manual_seed(3))


def mixtral(width=256):
    return MixtralConfig(**SMALL, intermediate_size=width, num_local_experts=4)


def qwen3_moe(width=256, **changes):
    return Qwen3MoeConfig(
        **{**SMALL, **changes},
        head_dim=64,
        moe_intermediate_size=width,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


def gpt_oss(width=256):
    return GptOssConfig(
        **SMALL, head_dim=64, intermediate_size=width, num_local_experts=4, num_experts_per_tok=2
    )


def deepseek(width=256):
    return DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        intermediate_size=320,
        moe_intermediate_size=width,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,
    )


class Writer:
    """Puts MXFP4 values into a model, and the same as Quark stores them into `tensors`."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.input_scale: float | None = None  # for static FP8 inputs

    def matrix(self, name: str, n: int, k: int) -> torch.Tensor:
        """Random bytes under `name`; what they mean, (n, k) float32."""
        packed = torch.randint(0, 256, (n, k // 2), generator=self.generator, dtype=torch.uint8)
        scale = torch.randint(118, 123, (n, k // 32), generator=self.generator, dtype=torch.uint8)
        self.tensors |= {f"{name}.weight": packed, f"{name}.weight_scale": scale}
        if self.input_scale is not None:
            self.tensors[f"{name}.input_scale"] = torch.tensor(self.input_scale)
        values = torch.stack((FP4[(packed & 15).long()], FP4[(packed >> 4).long()]), dim=-1)
        step = torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
        return values.reshape(n, k) * step

    def rest(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """A BF16 tensor."""
        value = torch.randn(parameter.shape, generator=self.generator) * 0.2
        value = (value + 1 if "norm" in name else value).bfloat16()
        self.tensors[name] = value
        return value.float()

    def experts(self, name: str, module: nn.Module, leaves: tuple[str, ...]) -> None:
        """Each expert's matrices; gpt-oss keeps (in, out), and gate and up in one."""
        transposed = len(leaves) == 2
        experts, rows, columns = module.gate_up_proj.shape
        n, k = (columns, rows) if transposed else (rows, columns)
        for e in range(experts):
            where = f"{name}.{e}"
            if self.input_scale is not None:
                self.input_scale = 0.02 * (e + 1)
            if transposed:
                both = self.matrix(f"{where}.{leaves[0]}", n, k).T
                for param, leaf in zip(("gate_up_proj", "down_proj"), leaves, strict=True):
                    bias = getattr(module, f"{param}_bias")
                    bias[e] = self.rest(f"{where}.{leaf}.bias", bias[e])
            else:
                halves = [self.matrix(f"{where}.{leaf}", n // 2, k) for leaf in leaves[:2]]
                both = torch.cat(halves)
            module.gate_up_proj[e] = both
            down = self.matrix(f"{where}.{leaves[-1]}", k, n // 2)
            module.down_proj[e] = down.T if transposed else down


@torch.no_grad()
def quark_like(
    root: Path,
    config,
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    rename: Callable[[str], str] = lambda name: name,
    plain: tuple[str, ...] = ("lm_head",),
    inputs: dict | None = None,
) -> nn.Module:
    """A W4A16 checkpoint at `root`; the float model that it means.

    plain    what stays BF16, by any part of its name
    inputs   W4A8 instead, as this spec says; static inputs have a scale for each layer and expert
    """
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer, done = Writer(), set()
    writer.input_scale = 0.03 if inputs == FP8_INPUT else None
    for name, module in model.named_modules():
        if any(part in name for part in plain):
            continue
        stored = rename(name)
        if type(module) is nn.Linear:
            n, k = module.weight.shape
            module.weight.copy_(writer.matrix(stored, n, k))
            done.add(f"{name}.weight")
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            writer.experts(stored, module, leaves)
            done |= {f"{name}.{key}" for key, _ in module.named_parameters()}
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name in done or "inv_freq" in name:
            continue
        parent, _, leaf = name.rpartition(".")
        if leaf in ("gate_up_proj", "down_proj"):  # the experts that stay BF16
            halves = leaves[:2] if leaf == "gate_up_proj" else leaves[2:]
            for e, bank in enumerate(parameter):
                for half, rows in zip(halves, bank.chunk(len(halves)), strict=True):
                    rows.copy_(writer.rest(f"{rename(parent)}.{e}.{half}.weight", rows))
        else:
            parameter.copy_(writer.rest(rename(name), parameter))
    root.mkdir(parents=True)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_index(root, writer.tensors, write_shards(root, writer.tensors, names))
    document = json.loads(config.to_json_string())
    document["architectures"] = [type(model).__name__]
    document["quantization_config"] = quant_config(
        global_quant_config=quant_layer(inputs=inputs), exclude=list(plain)
    )
    (root / "config.json").write_text(json.dumps(document))
    return model


FAMILIES = {
    "mixtral": (
        mixtral,
        ("w1", "w3", "w2"),
        lambda name: name.replace(".mlp", ".block_sparse_moe"),
    ),
    "qwen3_moe": (qwen3_moe, ("gate_proj", "up_proj", "down_proj"), lambda name: name),
    "gpt_oss": (gpt_oss, ("gate_up_proj", "down_proj"), lambda name: name),
    "deepseek_v3": (deepseek, ("gate_proj", "up_proj", "down_proj"), lambda name: name),
}


@pytest.mark.parametrize("width", [256, 96], ids=["asm", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_float_models(tmp_path, family, width):
    config, leaves, rename = FAMILIES[family]
    plain = quark_like(tmp_path / "quark", config(width), leaves, rename)
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    model = loaded(path)
    banks = [module for module in model.modules() if isinstance(module, StoredExperts)]
    assert len(banks) == (1 if family == "deepseek_v3" else 2)
    assert {p for bank in banks for p in bank.paths.values()} == (
        {"asm"} if width == 256 else {"triton", "asm"} if family == "gpt_oss" else {"triton"}
    )
    expected, got = logits_of(plain, IDS), logits_of(model, IDS)
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= TOLERANCE
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(path)


def test_experts_of_one_layer_left_in_bf16(tmp_path):
    """transformers' own converter merges those, ours the others."""
    names = ("lm_head", "layers.1.mlp.experts")
    plain = quark_like(tmp_path / "quark", qwen3_moe(), plain=names)
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    model = loaded(path)
    kinds = [isinstance(layer.mlp.experts, StoredExperts) for layer in model.model.layers]
    assert kinds == [True, False]
    assert (logits_of(model, IDS) - logits_of(plain, IDS)).abs().max() <= TOLERANCE
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(path)


def test_experts_stored_for_different_paths(tmp_path):
    plain = quark_like(tmp_path / "quark", qwen3_moe())
    keep = ("*.experts.2.*",)
    path = prepare(tmp_path / "quark", tmp_path / "prepared", keep=keep)
    with pytest.warns(
        mxfp4prep.RepackWarning, match=r"experts: gate_up_proj and down_proj repacked"
    ):
        model = loaded(path)
    assert (logits_of(model, IDS) - logits_of(plain, IDS)).abs().max() <= TOLERANCE


def test_static_inputs_of_experts(tmp_path):
    """Each expert has its own scale; the runtime's bank of the same checkpoint is the reference."""
    quark_like(tmp_path / "quark", qwen3_moe(), inputs=FP8_INPUT)
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    mine = loaded(path).model.layers[0].mlp.experts
    theirs = mxfp4prep.load(path).experts("model.layers.0.mlp.experts")
    scales = torch.tensor([0.02, 0.04, 0.06, 0.08])
    assert torch.equal(mine.gate_up_proj_input_scale, scales)
    assert torch.equal(mine.down_proj_input_scale, scales)
    generator = torch.Generator().manual_seed(6)
    x, weights = torch.randn(9, 256, generator=generator), torch.rand(9, 2, generator=generator)
    ids = torch.randint(0, 4, (9, 2), generator=generator)
    with torch.no_grad():
        assert torch.equal(mine(x, ids, weights), theirs(x, weights, ids))


def test_gate_and_up_that_contradict(tmp_path):
    """One input has one scale; transformers would say that there was some issue."""
    quark_like(tmp_path / "quark", qwen3_moe(), inputs=FP8_INPUT)
    name = "model.layers.1.mlp.experts.3.up_proj.input_scale"
    for shard in (tmp_path / "quark").glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            save_file(tensors | {name: tensors[name] * 2}, shard, metadata={"format": "pt"})
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    with pytest.raises(mxfp4prep.InvalidCheckpoint, match="gate and up have different input sca"):
        AutoModelForCausalLM.from_pretrained(path)


def spoil(root: Path, change: Callable[[dict], None]) -> Path:
    document = json.loads((root / "config.json").read_text())
    change(document)
    (root / "config.json").write_text(json.dumps(document))
    return root


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_experts": 5, "num_local_experts": 5},
            "not the size that config.json gives the experts",
        ),
        ({"moe_intermediate_size": 128}, "not the size that config.json gives the experts"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_act": "gelu"}, None),
    ],
    ids=["experts", "width", "unknown activation", "other activation"],
)
def test_experts_that_config_json_describes_otherwise(tmp_path, change, message):
    quark_like(tmp_path / "quark", qwen3_moe())
    spoil(tmp_path / "quark", lambda document: document.update(change))
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    if message is None:
        assert loaded(path).model.layers[0].mlp.experts.gate.activation == "gelu"
        return
    with pytest.raises(mxfp4prep.Mxfp4PrepError, match=message):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_class_that_combines_gate_and_up_in_its_own_way(tmp_path, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    quark_like(tmp_path / "quark", qwen3_moe())
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    usual = Qwen3MoeExperts._apply_gate
    clamped = lambda self, both: usual(self, both).clamp(max=7)  # noqa: E731
    monkeypatch.setattr(Qwen3MoeExperts, "_apply_gate", clamped)
    with pytest.raises(mxfp4prep.Unsupported, match="combines gate and up in another way"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_class_that_is_called_otherwise(tmp_path, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    quark_like(tmp_path / "quark", qwen3_moe())
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda self, hidden_states, routing: None)
    with pytest.raises(mxfp4prep.Unsupported, match="called in a way that is not known"):
        AutoModelForCausalLM.from_pretrained(path)


def stack_experts(root: Path, form: str) -> None:
    """Rewrites a checkpoint of single experts: one tensor for all of them in each layer.

    form   "fused" puts gate and up into gate_up_proj, "apart" does not; "bare" is "fused", or a
           gate_up_proj already, without ".weight" in its names
    """
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted(root.glob("*.safetensors")):
        stored |= load_file(shard)
    banks: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in stored if ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        number, _, tail = rest.partition(".")
        banks.setdefault(f"{prefix}.experts.{tail}", {})[int(number)] = stored.pop(name)
    whole = {name: torch.stack([bank[e] for e in range(4)]) for name, bank in banks.items()}
    for name in [name for name in whole if ".gate_proj." in name and form != "apart"]:
        halves = whole.pop(name), whole.pop(name.replace(".gate_proj.", ".up_proj."))
        rows = halves[0] if name.endswith("input_scale") else torch.cat(halves, dim=1)
        whole[name.replace(".gate_proj.", ".gate_up_proj.")] = rows
    for name, bank in whole.items():
        leaf = name.rpartition(".")[2]
        ending = {"weight": ""}.get(leaf, "_" + leaf.removeprefix("weight_"))
        stored[name.removesuffix(f".{leaf}") + ending if form == "bare" else name] = bank
    names = sorted(path.name for path in root.glob("*.safetensors"))
    write_index(root, stored, write_shards(root, stored, names))


@pytest.mark.parametrize("width", [256, 96], ids=["asm", "triton"])
@pytest.mark.parametrize(
    ("config", "leaves", "form"),
    [
        (qwen3_moe, ("gate_proj", "up_proj", "down_proj"), "fused"),
        (qwen3_moe, ("gate_proj", "up_proj", "down_proj"), "apart"),
        (gpt_oss, ("gate_up_proj", "down_proj"), "bare"),
    ],
    ids=["gate_up_proj.weight", "gate_proj.weight and up_proj.weight", "gate_up_proj with biases"],
)
def test_banks_stored_as_one_tensor(tmp_path, config, leaves, form, width):
    plain = quark_like(tmp_path / "quark", config(width), leaves)
    stack_experts(tmp_path / "quark", form)
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    experts = [layer for layer in mxfp4prep.load(path).manifest.layers if ".experts." in layer.name]
    assert {layer.experts for layer in experts} == {4}
    model = loaded(path)
    assert all(isinstance(layer.mlp.experts, StoredExperts) for layer in model.model.layers)
    assert (logits_of(model, IDS) - logits_of(plain, IDS)).abs().max() <= TOLERANCE
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(path)


@pytest.mark.parametrize("form", ["one for each expert", "one for all"])
def test_static_inputs_of_banks_stored_as_one_tensor(tmp_path, form):
    quark_like(tmp_path / "quark", qwen3_moe(), inputs=FP8_INPUT)
    stack_experts(tmp_path / "quark", "fused")
    scales = torch.tensor([0.02, 0.04, 0.06, 0.08])
    if form == "one for all":
        scales = scales[3].expand(4)
        for shard in (tmp_path / "quark").glob("*.safetensors"):
            one = {
                name: tensor[3].clone() if ".experts." in name and "input_scale" in name else tensor
                for name, tensor in load_file(shard).items()
            }
            save_file(one, shard, metadata={"format": "pt"})
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    mine = loaded(path).model.layers[0].mlp.experts
    theirs = mxfp4prep.load(path).experts("model.layers.0.mlp.experts")
    assert torch.equal(mine.gate_up_proj_input_scale, scales)
    assert torch.equal(mine.down_proj_input_scale, scales)
    generator = torch.Generator().manual_seed(6)
    x, weights = torch.randn(9, 256, generator=generator), torch.rand(9, 2, generator=generator)
    ids = torch.randint(0, 4, (9, 2), generator=generator)
    with torch.no_grad():
        assert torch.equal(mine(x, ids, weights), theirs(x, weights, ids))


class ListedExperts(nn.ModuleList):
    """A module for each expert, as models of one's own may have them."""

    def __init__(self, config):
        expert = modeling_qwen3_moe.Qwen3MoeMLP
        width = config.moe_intermediate_size
        super().__init__(expert(config, width) for _ in range(config.num_experts))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e, expert in enumerate(self):
            weight = (top_k_weights * (top_k_index == e)).sum(-1, keepdim=True)
            out += weight * expert(hidden_states)
        return out


class ListedConfig(Qwen3MoeConfig):
    model_type = "listed_moe"  # transformers merges the experts of those that it knows


class Listed(modeling_qwen3_moe.Qwen3MoeForCausalLM):
    config_class = ListedConfig


def test_experts_that_are_modules_of_a_list(tmp_path, monkeypatch):
    plain = quark_like(tmp_path / "quark", qwen3_moe())
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", ListedExperts)
    model = loaded(path, kind=Listed)
    for layer in model.model.layers:
        for expert in layer.mlp.experts:
            matrices = expert.gate_proj, expert.up_proj, expert.down_proj
            assert {type(matrix) for matrix in matrices} == {StoredLinear}
    assert (logits_of(model, IDS) - logits_of(plain, IDS)).abs().max() <= TOLERANCE
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(path)


@pytest.mark.parametrize("form", ["fused", "apart"])
def test_a_bank_for_a_list_of_experts(tmp_path, monkeypatch, form):
    quark_like(tmp_path / "quark", qwen3_moe())
    stack_experts(tmp_path / "quark", form)
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", ListedExperts)
    with pytest.raises(mxfp4prep.Unsupported, match="stored as a bank of experts"):
        Listed.from_pretrained(path)


def test_a_linear_layer_that_is_named_as_a_bank(tmp_path):
    """Without ".weight": transformers would not find it."""
    quark_like(tmp_path / "quark", qwen3_moe())
    name = "model.layers.1.self_attn.q_proj"
    new = {f"{name}.weight": name, f"{name}.weight_scale": f"{name}_scale"}
    paths = sorted((tmp_path / "quark").glob("*.safetensors"))
    stored = {
        new.get(old, old): tensor for path in paths for old, tensor in load_file(path).items()
    }
    shards = write_shards(tmp_path / "quark", stored, [path.name for path in paths])
    write_index(tmp_path / "quark", stored, shards)
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    with pytest.raises(mxfp4prep.Unsupported, match=rf"{name}: stored as a bank of experts"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_class_without_banks(tmp_path, monkeypatch):
    class Other(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    quark_like(tmp_path / "quark", qwen3_moe())
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", Other)
    with pytest.raises(mxfp4prep.Unsupported, match="Other has no gate_up_proj for all experts"):
        Listed.from_pretrained(path)
