"""Checkpoints of any size whose data are holes: headers, an index and a config, and no bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from quark_factory import model_config

NBYTES = {"U8": 1, "BF16": 2}

Shape = tuple[int, ...]


def linear(name: str, n: int, k: int, experts: int | None = None) -> dict[str, Shape]:
    """Weight and scale of one MXFP4 linear, or of a bank of them: {tensor: shape}, all U8."""
    lead = () if experts is None else (experts,)
    return {f"{name}.weight": (*lead, n, k // 2), f"{name}.weight_scale": (*lead, n, -(-k // 32))}


def write_sparse(
    root: Path, shards: Sequence[Mapping[str, Shape]], bf16: Mapping[str, Shape] | None = None
) -> Path:
    """A checkpoint with the given U8 tensors, shard by shard; `bf16` ones stand in the last."""
    root.mkdir(parents=True)
    weight_map, total = {}, 0
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        kinds = [("U8", shapes), ("BF16", bf16 or {} if number == len(shards) else {})]
        offset = 0
        for dtype, tensors in kinds:
            for name, shape in tensors.items():
                end = offset + math.prod(shape) * NBYTES[dtype]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
                weight_map[name] = file
                offset = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (root / file).open("wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.truncate(8 + len(raw) + offset)
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(model_config(), indent=2))
    return root
