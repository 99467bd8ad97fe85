"""A tiny Quark checkpoint with aligned and misaligned layers, and every verb tried on it.

The tensors are random, the format is real: W4A4 as Quark 0.13 writes it, in two shards.
"""

from __future__ import annotations

import filecmp
import json
import math
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxfp4prep.errors import IntegrityError, UnsafeOutput

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = 256
INTERMEDIATE = 640
"""Scale columns of down_proj: 640 / 32 = 20, and 20 % 8 = 4. Like the layer of vLLM PR 55213."""

HEADS, KV_HEADS, HEAD_DIM = 32, 4, 24
"""K and V have 4 * 24 = 96 rows, the tile that the ASM kernel gets wrong (AITER issue 5931)."""

VOCAB = 512
LAYERS = 2
SEED = 20

_SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
_BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

_SIDE_FILES = {
    "README.md": "# Demo\n\nA tiny checkpoint with random weights, made by `mxfp4prep demo`.\n",
    "chat_template.jinja": "{{ messages[0]['content'] }}\n",
    "generation_config.json": '{\n  "do_sample": false\n}\n',
    "tokenizer/vocab.txt": "<pad>\n<bos>\n<eos>\n",
}

Run = Callable[[list[str]], int]
"""Runs one command line of ours and returns its exit code."""


def build(root: Path) -> None:
    """Writes the checkpoint into the new directory `root`: the same bytes every time."""
    root.mkdir(parents=True)
    tensors = dict(_tensors())
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    # The border lies between a weight and its scale, as it does in real checkpoints.
    border = list(tensors).index("model.layers.1.mlp.up_proj.weight_scale")
    weight_map: dict[str, str] = {}
    for number, names in ((1, list(tensors)[:border]), (2, list(tensors)[border:])):
        file = f"model-{number:05}-of-00002.safetensors"
        _write_shard(root / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(root / "model.safetensors.index.json", index)
    _write_json(root / "config.json", _config())
    for name, text in _SIDE_FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    import torch

    from mxfp4prep.safefile import TensorEntry, encode_header

    kinds = {torch.uint8: "U8", torch.bfloat16: "BF16"}
    entries, parts, offset = [], [], 0
    for name, tensor in tensors.items():
        part = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        end = offset + len(part)
        entries.append(TensorEntry(name, kinds[tensor.dtype], tuple(tensor.shape), offset, end))
        parts.append(part)
        offset = end
    path.write_bytes(encode_header(entries, {"format": "pt"}) + b"".join(parts))


def _tensors() -> Iterator[tuple[str, Tensor]]:
    import torch

    from mxfp4prep.mxfp4 import quantize

    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        return values.to(torch.bfloat16)

    yield "model.embed_tokens.weight", normal(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, (n, k) in _SHAPES.items():
            weight, scale = quantize(normal(n, k))
            yield f"{prefix}.{name}.weight", weight
            yield f"{prefix}.{name}.weight_scale", scale
            if name in _BIASED:
                yield f"{prefix}.{name}.bias", normal(n)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield "lm_head.weight", normal(VOCAB, HIDDEN)


def _config() -> dict[str, Any]:
    weight = {
        "dtype": "fp4",
        "is_dynamic": False,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 32,
        "symmetric": None,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
        "observer_cls": "PerBlockMXObserver",
    }
    layer = {
        "weight": weight,
        "input_tensors": {**weight, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }
    return {
        "architectures": ["Qwen2ForCausalLM"],  # q, k and v have biases, o has none
        "model_type": "qwen2",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "quantization_config": {
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "version": "0.13",
            "global_quant_config": layer,
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head"],
            "kv_cache_quant_config": {},
            "algo_config": None,
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        },
    }


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def walk(root: Path, run: Run, say: Callable[[str], None]) -> int:
    """Builds the checkpoint in `root`/model and runs every verb on it; returns the exit code.

    run   runs a command line of ours · say   prints a line

    Raises UnsafeOutput when one of the three directories exists already.
    """
    model, prepared, restored = (root / name for name in ("model", "prepared", "restored"))
    for path in (model, prepared, restored):
        if path.exists():
            raise UnsafeOutput(path, "exists already", hint="give the demo an empty directory")
    say(f"# a tiny Quark W4A4 checkpoint: {LAYERS} layers, some of them misaligned")
    build(model)
    steps: tuple[tuple[str, list[str], int], ...] = (
        ("which layers can take the ASM path, and at which degree", ["audit", str(model)], 1),
        (
            "store each layer for the best path it can take",
            ["convert", str(model), str(prepared)],
            0,
        ),
        ("what was done to each layer", ["show", str(prepared)], 0),
        ("prove it", ["verify", str(prepared), "--source", str(model)], 0),
        ("undo it", ["restore", str(prepared), str(restored)], 0),
    )
    for purpose, words, expected in steps:
        code = _step(purpose, words, run, say)
        if code != expected:
            return code or 1
        if code:
            say("# exit code 1: at tp 8 a layer cannot be split. At tp 1 every layer works.")
    _compare(model, restored, say)
    _load_and_run(prepared, say)
    return _step("one layer of every shape against float64", ["selfcheck", str(prepared)], run, say)


def _step(purpose: str, words: list[str], run: Run, say: Callable[[str], None]) -> int:
    say(f"\n# {purpose}\n$ mxfp4prep {shlex.join(words)}")
    return run(words)


def _compare(model: Path, restored: Path, say: Callable[[str], None]) -> None:
    say(f"\n# is it the same?\n$ diff -r {shlex.quote(str(model))} {shlex.quote(str(restored))}")
    found, expected = (
        sorted(str(p.relative_to(top)) for p in top.rglob("*") if p.is_file())
        for top in (restored, model)
    )
    if found != expected:
        raise IntegrityError(
            restored, "other files than the source", found=found, expected=expected
        )
    for name in expected:
        if not filecmp.cmp(model / name, restored / name, shallow=False):
            raise IntegrityError(restored / name, "differs from the source")
    say(f"# {len(expected)} files, all of them byte for byte the same")


def _load_and_run(prepared: Path, say: Callable[[str], None]) -> None:
    """Loads one aligned and one misaligned layer and runs them on random activations."""
    import torch

    from mxfp4prep import load

    say(f"\n# load and run\n>>> prepared = mxfp4prep.load({str(prepared)!r})")
    layers = load(prepared)
    generator = torch.Generator().manual_seed(SEED)
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"):
        layer = layers[name]
        x = torch.randn(4, layer.in_features, generator=generator).to(torch.bfloat16)
        say(f">>> prepared[{name!r}](x)  # x {tuple(x.shape)} bfloat16")
        y = layer(x)
        say(f"{y.dtype} {tuple(y.shape)}, all finite: {bool(y.isfinite().all())}")
