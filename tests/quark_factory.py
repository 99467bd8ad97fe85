"""Quark-style checkpoints made on the spot, written with the safetensors library itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FP4_WEIGHT: dict[str, Any] = {
    "ch_axis": -1,
    "dtype": "fp4",
    "group_size": 32,
    "is_dynamic": False,
    "qscheme": "per_group",
    "round_method": "half_even",
    "scale_calculation_mode": "even",
    "scale_format": "e8m0",
    "scale_type": "float",
    "symmetric": None,
}
FP4_INPUT = {**FP4_WEIGHT, "is_dynamic": True}
FP8_WEIGHT: dict[str, Any] = {
    "ch_axis": 0,
    "dtype": "fp8_e4m3",
    "group_size": None,
    "is_dynamic": False,
    "qscheme": "per_channel",
    "scale_format": None,
    "scale_type": "float",
}


def quant_layer(
    weight: Any = FP4_WEIGHT, inputs: Any = FP4_INPUT, outputs: Any = None
) -> dict[str, Any]:
    """One QLayer of a Quark config."""
    return copy.deepcopy(
        {"weight": weight, "input_tensors": inputs, "output_tensors": outputs, "bias": None}
    )


def quant_config(**changes: Any) -> dict[str, Any]:
    """A Quark 0.13 quantization_config for W4A4, with `changes` on top."""
    return {
        "quant_method": "quark",
        "version": "0.13",
        "quant_mode": "eager_mode",
        "global_quant_config": quant_layer(),
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {
            "kv_cache_group": [],
            "pack_method": "reorder",
            "weight_format": "real_quantized",
        },
        **changes,
    }


def model_config(quantization: Any = None, **changes: Any) -> dict[str, Any]:
    """A Llama-like config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "quantization_config": quant_config() if quantization is None else quantization,
        **changes,
    }


def mxfp4_tensors(
    name: str,
    n: int,
    k: int,
    *,
    generator: torch.Generator,
    scale_name: str = "weight_scale",
    experts: int | None = None,
    scale_dtype: torch.dtype = torch.uint8,
) -> dict[str, torch.Tensor]:
    """Random weight and scale of one linear; scale bytes 1..254, so that positions differ."""
    lead = () if experts is None else (experts,)
    weight = torch.randint(0, 256, (*lead, n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(1, 255, (*lead, n, -(-k // 32)), generator=generator, dtype=torch.uint8)
    return {f"{name}.weight": weight, f"{name}.{scale_name}": scale.view(scale_dtype)}


def write_checkpoint(
    root: Path,
    linears: Mapping[str, tuple[int, int]],
    *,
    config: Mapping[str, Any] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
    shards: int = 1,
    index: bool | None = None,
    metadata: dict[str, str] | None = None,
    seed: int = 0,
    scale_name: str = "weight_scale",
    side_files: Mapping[str, bytes] | None = None,
) -> Path:
    """A checkpoint directory with the given MXFP4 linears {name: (n, k)} and other tensors.

    Tensors are dealt over the shards in turn, so weights and scales part ways when shards > 1.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (n, k) in linears.items():
        tensors |= mxfp4_tensors(name, n, k, generator=generator, scale_name=scale_name)
    tensors |= dict(extra or {"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)})
    root.mkdir(parents=True)
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    weight_map = write_shards(root, tensors, names, metadata)
    if index if index is not None else shards > 1:
        write_index(root, tensors, weight_map)
    (root / "config.json").write_text(json.dumps(config or model_config(), indent=2))
    for name, content in (side_files or {"tokenizer.json": b"{}"}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def write_shards(
    root: Path,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    metadata: dict[str, str] | None = None,
) -> dict[str, str]:
    """Deals `tensors` over the files in turn; returns tensor -> file."""
    weight_map = {name: names[i % len(names)] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: t.contiguous() for name, t in tensors.items() if weight_map[name] == file}
        save_file(part, root / file, metadata=metadata or {"format": "pt"})
    return weight_map


def write_index(
    root: Path, tensors: Mapping[str, torch.Tensor], weight_map: Mapping[str, str]
) -> None:
    """The index as transformers writes it."""
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    document = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    path = root / "model.safetensors.index.json"
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
