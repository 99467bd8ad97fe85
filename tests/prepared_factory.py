"""Tiny prepared checkpoints, built by hand from random bytes: no converter, no layouts module.

The byte orders are written down here once more, as reshapes and axis permutations, and values are
decoded with ml_dtypes: what the tests compare with shares no code with what they test.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from mxfp4prep import manifest as m
from mxfp4prep.parallel import Topology, assign_roles, gate_up_order, kind_of

LAYOUT_IDS = {
    "asm": ("tile16x16", "tile32x8"),
    "triton": ("raw", "transposed"),
    "kept": ("raw", "raw"),
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "w4a4": {"dtype": "fp4", "scale_mode": "even", "static": False},
    "w4a16": {"dtype": None, "scale_mode": None, "static": False},
    "w4a8": {"dtype": "fp8_e4m3", "scale_mode": None, "static": False},
    "w4a6": {"dtype": "fp6_e2m3", "scale_mode": "even", "static": False},
}


def lay_out(raw: Tensor, layout: str) -> Tensor:
    """(rows, cols) uint8 in the stored shape of `layout`; leading dimensions are experts."""
    if raw.dim() == 3:
        return torch.stack([lay_out(matrix, layout) for matrix in raw])
    rows, cols = raw.shape
    if layout == "tile16x16":
        tiles = raw.view(rows // 16, 16, cols // 32, 2, 16).permute(0, 2, 3, 1, 4)
        return tiles.reshape(rows // 16, 16 * cols)
    if layout == "tile32x8":
        tiles = raw.view(rows // 32, 2, 16, cols // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
        return tiles.reshape(rows // 32, 32 * cols)
    return raw.t().contiguous() if layout == "transposed" else raw.contiguous()


def decode64(packed: Tensor, scale: Tensor, k: int) -> Tensor:
    """(n, k) float64 by ml_dtypes: low nibble first, one E8M0 byte per 32 columns."""
    nibbles = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1)
    codes = nibbles.reshape(*packed.shape[:-1], -1).astype(np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)[..., :k]
    powers = scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return torch.from_numpy(values * np.repeat(powers, 32, axis=-1)[..., :k])


def fake_quantize64(x: Tensor) -> Tensor:
    """x (..., k) as MXFP4 would hold it (EVEN, ties to even), float64; blocks of 32, last short."""
    values = x.double().numpy()
    result = np.empty_like(values)
    for start in range(0, values.shape[-1], 32):
        block = values[..., start : start + 32]
        amax = np.abs(block).max(axis=-1, keepdims=True)
        mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
        power = exponent - 1 + (mantissa >= 0.875) - 2
        power = np.where(amax == 0, -127, np.clip(power, -127, 127)).astype(np.float64)
        scaled = np.clip(block / 2.0**power, -6, 6)
        codes = scaled.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
        result[..., start : start + 32] = codes * 2.0**power
    return torch.from_numpy(result)


@dataclass
class Layer:
    """One layer to make. `path` is how it is stored; `raw` may be given, else it is random."""

    name: str
    n: int
    k: int
    path: str = "asm"
    scheme: str = "w4a4"
    experts: int | None = None
    bias: bool = False
    input_scale: float | None = None
    parallel: str | None = None
    gate_up: str | None = None
    activation: dict[str, Any] | None = None
    packed: Tensor | None = None
    scale: Tensor | None = None
    bias_values: Tensor | None = None
    reasons: list[str] = field(default_factory=list)

    def fill(self, generator: torch.Generator) -> None:
        lead = () if self.experts is None else (self.experts,)
        groups = -(-self.k // 32)
        if self.packed is None:
            shape = (*lead, self.n, self.k // 2)
            self.packed = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if self.scale is None:
            shape = (*lead, self.n, groups)
            self.scale = torch.randint(118, 130, shape, dtype=torch.uint8, generator=generator)
        if self.bias and self.bias_values is None:
            values = torch.randn((*lead, self.n), generator=generator)
            self.bias_values = values.to(torch.bfloat16)

    @property
    def dense(self) -> Tensor:
        """The decoded weight, (experts,) n, k, float64."""
        return decode64(self.packed, self.scale, self.k)


def build(
    root: Path,
    layers: list[Layer],
    *,
    copied: dict[str, Tensor] | None = None,
    config: dict[str, Any] | None = None,
    shards: int = 1,
    seed: int = 0,
) -> dict[str, Layer]:
    """Writes a prepared checkpoint to `root`; the layers by name, with their raw bytes filled in.

    With several shards, tensors go round robin: a weight and its scale are in different files.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    extra = dict(copied or {})
    for layer in layers:
        layer.fill(generator)
        weight, scale = LAYOUT_IDS[layer.path]
        tensors[f"{layer.name}.weight"] = lay_out(layer.packed, weight)
        tensors[f"{layer.name}.weight_scale"] = lay_out(layer.scale, scale)
        if layer.bias_values is not None:
            extra[f"{layer.name}.bias"] = layer.bias_values
        if layer.input_scale is not None:
            extra[f"{layer.name}.input_scale"] = torch.tensor(
                layer.input_scale, dtype=torch.bfloat16
            )
    root.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "hidden_act": "silu", **(config or {})}
    config["quantization_config"] = {
        "quant_method": "mxfp4prep",
        "format_version": 1,
        "manifest": "mxfp4prep.json",
        "source_quantization_config": {"quant_method": "quark"},
    }
    (root / "config.json").write_text(json.dumps(config))
    file_of = _write_shards(root, tensors | extra, shards)
    _write_records(root, layers, tensors, extra, file_of, config)
    return {layer.name: layer for layer in layers}


def _write_shards(root: Path, tensors: dict[str, Tensor], shards: int) -> dict[str, str]:
    file_of = {}
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for position, (name, tensor) in enumerate(tensors.items()):
        part = position % shards
        parts[part][name] = tensor.contiguous()
        file_of[name] = f"model-{part + 1:05d}-of-{shards:05d}.safetensors"
    for part, content in enumerate(parts):
        path = root / f"model-{part + 1:05d}-of-{shards:05d}.safetensors"
        save_file(content, path, metadata={"format": "pt"})
    return file_of


def _write_records(
    root: Path,
    layers: list[Layer],
    tensors: dict[str, Tensor],
    extra: dict[str, Tensor],
    file_of: dict[str, str],
    config: dict[str, Any],
) -> None:
    digests = {
        name: ["0" * 32, xxhash.xxh3_128(_bytes(tensor)).hexdigest()]
        for name, tensor in (tensors | extra).items()
    }
    side = json.dumps({"algorithm": "xxh3_128", "tensors": digests}).encode()
    (root / "mxfp4prep.digests.json").write_bytes(side)
    roles = assign_roles([layer.name for layer in layers])
    topology = Topology.from_config(config)
    records = [_record(layer, tensors, file_of, roles[layer.name], topology) for layer in layers]
    files = [
        m.FileRecord(
            name=name,
            nbytes=(root / name).stat().st_size,
            sha256=hashlib.sha256((root / name).read_bytes()).hexdigest(),
            role="shard",
            source_header="same",
        )
        for name in sorted(set(file_of.values()))
    ]
    raw = (root / "config.json").read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    files.append(m.FileRecord(name="config.json", nbytes=len(raw), sha256=digest, role="config"))
    document = m.Manifest(
        schema_version=1,
        tool_version="test",
        source=m.SourceRecord(name="source", config_sha256="0" * 64),
        target=m.TargetRecord(
            gfx="gfx950",
            tp=[1],
            rule_version=1,
            layouts=["raw"],
            layout="auto",
            keep=[],
            parallel=[],
        ),
        digests=m.DigestsRecord(
            name="mxfp4prep.digests.json",
            sha256=hashlib.sha256(side).hexdigest(),
            algorithm="xxh3_128",
        ),
        files=files,
        layers=records,
        tensors=[m.CopiedTensor(name=name, file=file_of[name]) for name in extra],
        findings=[],
    )
    (root / "mxfp4prep.json").write_bytes(m.dump(document))


def _record(
    layer: Layer, tensors: dict[str, Tensor], file_of: dict[str, str], role: Any, topology: Topology
) -> m.LayerRecord:
    weight, scale = LAYOUT_IDS[layer.path]

    def stored(suffix: str, layout: str, source: Tensor) -> dict[str, Any]:
        name = f"{layer.name}.{suffix}"
        return {
            "tensor": name,
            "file": file_of[name],
            "layout": layout,
            "shape": list(tensors[name].shape),
            "source_shape": list(source.shape),
        }

    static = layer.input_scale is not None
    default = ACTIVATIONS[layer.scheme] | {"static": static}
    if layer.scheme == "w4a8" and not static:
        default["scale_mode"] = "per_token"  # a converter always names one of several
    activation = layer.activation or default
    return m.LayerRecord.model_validate(
        {
            "name": layer.name,
            "kind": kind_of(layer.name),
            "parallel": layer.parallel or role.parallel,
            "group": role.group,
            "scheme": layer.scheme,
            "activation": activation,
            "n": layer.n,
            "k": layer.k,
            "n_padded": layer.n,
            "k_padded": layer.k,
            "experts": layer.experts,
            "gate_up": layer.gate_up or gate_up_order(layer.name, topology),
            "path": "triton" if layer.path == "kept" else layer.path,
            "reasons": layer.reasons or (["kept"] if layer.path == "kept" else []),
            "hazards": [],
            "verdict": {"1": "asm", "2": "triton", "8": "impossible"},
            "weight": stored("weight", weight, layer.packed),
            "scale": stored("weight_scale", scale, layer.scale),
            "bias": f"{layer.name}.bias" if layer.bias_values is not None else None,
            "input_scale": f"{layer.name}.input_scale" if static else None,
        }
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def edit_manifest(root: Path, change: Any) -> None:
    """Rewrites mxfp4prep.json after `change(document)` has altered the parsed JSON in place."""
    path = root / "mxfp4prep.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def edit_config(root: Path, change: Any) -> None:
    """Rewrites config.json after `change(document)` has altered it in place."""
    path = root / "config.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
