"""Tiny models that engines can build, as AMD Quark stores them: random MXFP4, sensible numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quark_factory import quant_config, quant_layer
from safetensors.torch import save_file

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.survey import survey

VOCAB = 320

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 640,
    },
    # with one more layer for a draft of the next token but one
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 256,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
}
COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB,
}


def write_model(
    root: Path, family: str, *, seed: int = 0, weights_only: bool = False, **changes: Any
) -> Path:
    """A Quark checkpoint in new directory `root`.

    family         a name of FAMILIES
    weights_only   W4A16, else W4A4
    changes        of config.json; "quantization_config" replaces Quark's
    """
    config = {**COMMON, **FAMILIES[family], **changes}
    layers = range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    exclude = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]
    gates = [name.replace("mlp.gate", "mlp.shared_expert_gate") for name in exclude[1:]]
    if family == "glm4_moe":
        exclude.append(f"model.layers.{layers[-1]}.eh_proj")
    everywhere = quant_layer(inputs=None) if weights_only else quant_layer()
    quantization = quant_config(exclude=exclude + gates, global_quant_config=everywhere)
    config.setdefault("quantization_config", quantization)
    tensors = model_tensors(config, torch.Generator().manual_seed(seed))
    root.mkdir(parents=True)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(config, indent=2))
    return root


def prepare(source: Path, out: Path, tp: Sequence[int] = (1,), **options: Any) -> Path:
    """`source` prepared for degrees `tp`; options as make_plan has them."""
    plan = make_plan(survey(open_checkpoint(source), surveyed_degrees(tp)), tp, **options)
    return convert(plan, out, workers=1).out


def model_tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Every tensor of the model of `config` by name."""
    family, hidden = config["model_type"], config["hidden_size"]
    head = config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        values = torch.randn(shape, generator=generator) * std + mean
        tensors[name] = values.to(torch.bfloat16)

    def linear(name: str, n: int, k: int, bias: bool = False) -> None:
        """Codes have a spread of 2.9, so that a scale of about 1 / (2.9 sqrt(k)) keeps sizes."""
        packed = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
        middle = 127 - round(1.55 + 0.5 * torch.tensor(k).log2().item())
        span = (middle - 1, middle + 2)
        scale = torch.randint(*span, (n, k // 32), generator=generator, dtype=torch.uint8)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = packed, scale
        if bias:
            normal(f"{name}.bias", n, std=0.5)

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj", width, hidden)
        linear(f"{name}.up_proj", width, hidden)
        linear(f"{name}.down_proj", hidden, width)

    tied = config["tie_word_embeddings"]
    normal("model.embed_tokens.weight", config["vocab_size"], hidden, std=0.06 if tied else 1.0)
    drafts = config.get("num_nextn_predict_layers", 0)
    for layer in range(config["num_hidden_layers"] + drafts):
        at = f"model.layers.{layer}"
        bias = family.startswith("qwen2")
        linear(f"{at}.self_attn.q_proj", q, hidden, bias)
        linear(f"{at}.self_attn.k_proj", kv, hidden, bias)
        linear(f"{at}.self_attn.v_proj", kv, hidden, bias)
        linear(f"{at}.self_attn.o_proj", hidden, q)
        if family == "qwen3_moe":
            normal(f"{at}.self_attn.q_norm.weight", head, std=0.1, mean=1)
            normal(f"{at}.self_attn.k_norm.weight", head, std=0.1, mean=1)
        if family.endswith("_moe"):
            experts = config.get("num_experts") or config["n_routed_experts"]
            normal(f"{at}.mlp.gate.weight", experts, hidden, std=0.1)
            for expert in range(experts):
                mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
            if family == "qwen2_moe":
                mlp(f"{at}.mlp.shared_expert", config["shared_expert_intermediate_size"])
                normal(f"{at}.mlp.shared_expert_gate.weight", 1, hidden, std=0.1)
            if family == "glm4_moe":
                tensors[f"{at}.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
                mlp(f"{at}.mlp.shared_experts", config["moe_intermediate_size"])
        else:
            mlp(f"{at}.mlp", config["intermediate_size"])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            normal(f"{at}.{norm}.weight", hidden, std=0.1, mean=1)
    if drafts:  # its embeddings and its head are the model's, and not stored once more
        normal(f"{at}.eh_proj.weight", hidden, 2 * hidden, std=0.04)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            normal(f"{at}.{norm}.weight", hidden, std=0.1, mean=1)
    normal("model.norm.weight", hidden, std=0.1, mean=1)
    if not tied:
        normal("lm_head.weight", config["vocab_size"], hidden, std=0.06)
    return tensors
