"""Header-only checkpoints of real size: the models of data/models.json as AMD Quark stores them.

Every tensor is there with its real name, dtype and shape; its bytes are a hole in a sparse file.
Fused projections are stored part by part, experts matrix by matrix. Where models.json does not
know whether a layer is quantized ("unknown"), it is here: so every kind of layer is judged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FACTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "models.json").read_text()
)
"""Public facts on real models, each with the addresses it is from."""

TENSORS_PER_SHARD = 4096
NBYTES = {"U8": 1, "BF16": 2}

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""
Layers = Callable[[str], Iterable[int]]
"""A module's name without what stands before the layer's number and that -> numbers of layers."""


class Linear(NamedTuple):
    """One linear layer; `expert` is its number among the routed ones."""

    name: str
    n: int
    k: int
    quantized: bool
    expert: int | None = None


@dataclass(frozen=True)
class Model:
    """What models.json does not say of one of its models.

    fact      position in models.json
    root      what stands before "layers.<i>."
    layers    which layers have a module; None for all of them
    experts   routed experts of a MoE layer, 0 for a dense model
    router    the router's module, without root and number; its weight is a plain BF16 parameter
    unlisted  more modules of one row, BF16, as the router's
    whole     projections that are stored fused
    biases    every linear has one
    nested    the counts stand in text_config
    counts    keys of config.json that "dims" lacks
    """

    fact: int
    model_type: str
    root: str = "model."
    layers: Layers | None = None
    experts: int = 0
    router: str = ""
    unlisted: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    biases: bool = False
    nested: bool = False
    counts: tuple[tuple[str, int], ...] = ()

    @property
    def dims(self) -> dict[str, Any]:
        return FACTS[self.fact]["dims"]

    @property
    def head(self) -> str:
        """Name of the head's module: beside the innermost "model."."""
        return "language_model.lm_head" if self.root.startswith("language_model") else "lm_head"

    def numbers(self, rest: str) -> Iterable[int]:
        """The layers that have a module `rest`."""
        return self.layers(rest) if self.layers else range(self.dims["num_hidden_layers"])


def dense_first(dense: int, layers: int) -> Layers:
    """Attention everywhere, one MLP in the first layers, experts in the others."""

    def numbers(rest: str) -> Iterable[int]:
        if rest.startswith("self_attn"):
            return range(layers)
        is_dense = rest in ("mlp.gate_up_proj", "mlp.down_proj")
        return range(dense) if is_dense else range(dense, layers)

    return numbers


def every_fourth(rest: str) -> Iterable[int]:
    """Full attention in every fourth of 48 layers, linear attention in the others."""
    if rest.startswith("self_attn"):
        return range(3, 48, 4)
    if rest.startswith("linear_attn"):
        return [layer for layer in range(48) if layer % 4 != 3]
    return range(48)


MODELS = {
    "llama-405b": Model(0, "llama"),
    "llama4-scout": Model(
        1,
        "llama4_text",
        root="language_model.model.",
        experts=16,
        router="feed_forward.router",
        nested=True,
    ),
    "deepseek-r1": Model(
        2,
        "deepseek_v3",
        layers=dense_first(3, 61),
        experts=256,
        router="mlp.gate",
        counts=(("num_key_value_heads", 128), ("num_experts_per_tok", 8)),
    ),
    "kimi-k2.5": Model(
        3,
        "kimi_k2",
        root="language_model.model.",
        layers=dense_first(1, 61),
        experts=384,
        router="mlp.gate",
        nested=True,
        counts=(("num_key_value_heads", 64), ("num_experts_per_token", 8)),
    ),
    "qwen3-235b": Model(4, "qwen3_moe", experts=128, router="mlp.gate"),
    "qwen3-next": Model(5, "qwen3_next", layers=every_fourth, experts=512, router="mlp.gate"),
    # The model_type on its card was not seen: hyper-connections, n-gram embedding and sparse
    # attention, which models.json leaves out, are what transformers knows as qwen4_exp.
    "qwen3.8-flash-next": Model(
        6,
        "qwen4_exp_text",
        root="model.language_model.",
        layers=every_fourth,
        experts=512,
        router="mlp.gate",
        unlisted=("mlp.shared_expert_gate",),
        nested=True,
    ),
    "minimax-m2.1": Model(7, "minimax_m2", experts=256, router="block_sparse_moe.gate"),
    "gpt-oss-120b": Model(
        8,
        "gpt_oss",
        experts=128,
        router="mlp.router",
        whole=("gate_up_proj",),
        biases=True,
        counts=(("num_experts_per_tok", 4),),
    ),
    "qwen3-32b": Model(9, "qwen3"),
}


def write(root: Path, model: Model, *, stacked: bool = False) -> dict[str, int]:
    """A checkpoint directory of `model`. Returns its numbers of bytes, tensors and shards.

    stacked   experts as one tensor (experts, rows, columns) per projection, without ".weight"
    """
    root.mkdir(parents=True)
    layers = list(linears(model))
    tensors = [*_unquantized(model), *_tensors_of(model, layers, stacked)]
    shards = -(-len(tensors) // TENSORS_PER_SHARD)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        part = tensors[number * TENSORS_PER_SHARD : (number + 1) * TENSORS_PER_SHARD]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        total += _write_shard(root / file, part)
        weight_map.update((name, file) for name, _, _ in part)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(_config(model, layers), indent=2))
    return {"nbytes": total, "tensors": len(tensors), "shards": shards}


def linears(model: Model) -> Iterator[Linear]:
    """Every linear of models.json, as it is stored."""
    for layer in FACTS[model.fact]["layers"]:
        pattern, k = layer["name_pattern"], layer["in_features"]
        quantized = layer["quantized"] is not False
        rest = pattern.partition("layers.*.")[2]
        if not rest:
            yield Linear(pattern, layer["out_features"], k, quantized)
            continue
        parent, _, leaf = rest.removesuffix(".*").rpartition(".")
        parts = [(leaf, layer["out_features"])]
        if "parts" in layer and leaf not in model.whole:
            parts = [(part["name"], part["out_features"]) for part in layer["parts"]]
        bank = parent.removesuffix(".*")
        is_bank = bank.endswith("experts") and not bank.endswith("shared_experts")
        for i in model.numbers(rest):
            if not is_bank:
                for name, n in parts:
                    yield Linear(f"{model.root}layers.{i}.{parent}.{name}", n, k, quantized)
                continue
            for expert in range(model.experts):
                at = f"{model.root}layers.{i}.{bank}.{expert}"
                for name, n in parts:
                    yield Linear(f"{at}.{name}", n, k, quantized, expert)


def _unquantized(model: Model) -> Iterator[Tensor]:
    """Embedding, norms, head and routers: what models.json does not list."""
    hidden, vocabulary, at = model.dims["hidden_size"], model.dims["vocab_size"], model.root
    yield f"{at}embed_tokens.weight", "BF16", (vocabulary, hidden)
    yield f"{at}norm.weight", "BF16", (hidden,)
    if not any(layer["name_pattern"] == "lm_head" for layer in FACTS[model.fact]["layers"]):
        yield f"{model.head}.weight", "BF16", (vocabulary, hidden)
    for i in range(model.dims["num_hidden_layers"]):
        yield f"{at}layers.{i}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{at}layers.{i}.post_attention_layernorm.weight", "BF16", (hidden,)
    listed = {layer["name_pattern"] for layer in FACTS[model.fact]["layers"]}
    for rest, rows in ((model.router, model.experts), *((rest, 1) for rest in model.unlisted)):
        if rest and f"{at}layers.*.{rest}" not in listed:
            for i in model.numbers(rest):
                yield f"{at}layers.{i}.{rest}.weight", "BF16", (rows, hidden)


def _tensors_of(model: Model, layers: Iterable[Linear], stacked: bool) -> Iterator[Tensor]:
    for name, n, k, quantized, expert in layers:
        if stacked and expert is not None:
            if expert == 0:
                bank = name.replace(".experts.0.", ".experts.")
                yield bank, "U8", (model.experts, n, k // 2)
                yield f"{bank}_scale", "U8", (model.experts, n, k // 32)
                yield f"{bank}_bias", "BF16", (model.experts, n)
        elif quantized:
            yield f"{name}.weight", "U8", (n, k // 2)
            yield f"{name}.weight_scale", "U8", (n, k // 32)
        else:
            yield f"{name}.weight", "BF16", (n, k)
        if model.biases and not (stacked and expert is not None):
            yield f"{name}.bias", "BF16", (n,)


def _write_shard(path: Path, tensors: Iterable[Tensor]) -> int:
    """One file: a header and a hole. Returns the hole's size in bytes."""
    entries = ['"__metadata__":{"format":"pt"}']
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + NBYTES[dtype] * math.prod(shape)
        sizes = ",".join(map(str, shape))
        entries.append(
            f'"{name}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{offset},{end}]}}'
        )
        offset = end
    raw = ("{" + ",".join(entries) + "}").encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as handle:
        handle.write(len(raw).to_bytes(8, "little") + raw)
        handle.truncate(8 + len(raw) + offset)
    return offset


def _config(model: Model, layers: Iterable[Linear]) -> dict[str, Any]:
    counts = {"model_type": model.model_type, **model.dims, **dict(model.counts)}
    if model.nested:
        counts = {"model_type": model.model_type.removesuffix("_text"), "text_config": counts}
    return {**counts, "quantization_config": _quantization(model, layers)}


def _quantization(model: Model, layers: Iterable[Linear]) -> dict[str, Any]:
    """W4A4 for all but what is not quantized, excluded by full name as Quark writes it."""
    fp4 = {
        "ch_axis": -1,
        "dtype": "fp4",
        "group_size": 32,
        "is_dynamic": False,
        "qscheme": "per_group",
        "scale_calculation_mode": "even",
        "scale_format": "e8m0",
        "scale_type": "float",
    }
    layer = {
        "weight": fp4,
        "input_tensors": {**fp4, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
    }
    excluded = {linear.name for linear in layers if not linear.quantized}
    if not any(linear.name == "lm_head" for linear in layers):
        excluded.add(model.head)
    return {
        "quant_method": "quark",
        "version": "0.13",
        "quant_mode": "eager_mode",
        "global_quant_config": layer,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": sorted(excluded),
        "export": {
            "kv_cache_group": [],
            "pack_method": "reorder",
            "weight_format": "real_quantized",
        },
    }
