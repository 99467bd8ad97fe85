"""Quark-style checkpoints of real size: with bytes for convert, header-only for audit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

SPEC = {
    "ch_axis": -1,
    "dtype": "fp4",
    "group_size": 32,
    "is_dynamic": False,
    "qscheme": "per_group",
    "scale_calculation_mode": "even",
    "scale_format": "e8m0",
    "scale_type": "float",
    "symmetric": None,
}
QUANTIZATION = {
    "quant_method": "quark",
    "version": "0.13",
    "quant_mode": "eager_mode",
    "global_quant_config": {
        "weight": SPEC,
        "input_tensors": {**SPEC, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["lm_head"],
    "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
}


def dense_layers(count: int) -> Iterator[tuple[str, int, int]]:
    """(name, n, k) of the linears of `count` Llama-3.1-70B layers, one of ten with a K that is
    not a multiple of 256, so that both paths are measured."""
    for i in range(count):
        at = f"model.layers.{i}"
        yield f"{at}.self_attn.q_proj", 8192, 8192
        yield f"{at}.self_attn.k_proj", 1024, 8192
        yield f"{at}.self_attn.v_proj", 1024, 8192
        yield f"{at}.self_attn.o_proj", 8192, 8192
        yield f"{at}.mlp.gate_proj", 28672, 8192
        yield f"{at}.mlp.up_proj", 28672, 8192
        yield f"{at}.mlp.down_proj", 8192, 28672 if i % 10 else 28672 - 32


def expert_layers(
    layers: int, experts: int, hidden: int, width: int
) -> Iterator[tuple[str, int, int]]:
    """(name, n, k) of per-expert linears."""
    for i in range(layers):
        for e in range(experts):
            at = f"model.layers.{i}.mlp.experts.{e}"
            yield f"{at}.gate_proj", width, hidden
            yield f"{at}.up_proj", width, hidden
            yield f"{at}.down_proj", hidden, width


def write(
    root: Path,
    linears: Iterator[tuple[str, int, int]],
    *,
    shard_nbytes: int | None = None,
    tensors_per_shard: int | None = None,
    fill: bool,
    model_type: str = "llama",
) -> dict[str, int]:
    """A checkpoint directory, its data a hole unless `fill`. Returns bytes, tensors, shards."""
    root.mkdir(parents=True)
    tensors = [
        item
        for name, n, k in linears
        for item in ((f"{name}.weight", [n, k // 2]), (f"{name}.weight_scale", [n, -(-k // 32)]))
    ]
    shards: list[list[tuple[str, list[int]]]] = [[]]
    size = 0
    for name, shape in tensors:
        nbytes = shape[0] * shape[1]
        full = (shard_nbytes is not None and size + nbytes > shard_nbytes) or (
            tensors_per_shard is not None and len(shards[-1]) >= tensors_per_shard
        )
        if full and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += nbytes
    weight_map = {}
    total = 0
    noise = os.urandom(1 << 20) * 16
    for i, part in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in part:
            end = offset + shape[0] * shape[1]
            header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [offset, end]}
            weight_map[name] = file
            offset = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (root / file).open("wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            if fill:
                for start in range(0, offset, len(noise)):
                    handle.write(noise[: min(len(noise), offset - start)])
            handle.truncate(8 + len(raw) + offset)
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": model_type,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 8192,
        "quantization_config": QUANTIZATION,
    }
    (root / "config.json").write_text(json.dumps(config))
    largest = max(shape[0] * shape[1] for _, shape in tensors)
    return {
        "nbytes": total,
        "tensors": len(tensors),
        "shards": len(shards),
        "largest_tensor_nbytes": largest,
    }
