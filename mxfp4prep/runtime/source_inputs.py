"""How the source's own config says that inputs are quantized: a witness beside the manifest.

config.json keeps Quark's config word for word. Which layer is meant by which of its parts is for
the converter to say; here it is only asked whether any part names what the manifest does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.prepared import VERIFY_HINT


class Inputs(NamedTuple):
    """Inputs of a layer as a manifest records them; dtype None for none that are quantized."""

    dtype: str | None
    scale_mode: str | None
    static: bool

    def __str__(self) -> str:
        if self.dtype is None:
            return "unquantized"
        return " ".join(
            filter(None, (self.dtype, "static" if self.static else "dynamic", self.scale_mode))
        )


def named_inputs(config: Mapping[str, Any]) -> frozenset[Inputs]:
    """Every kind of inputs that some part of the source's config names; empty if it has none.

    config   config.json of a prepared checkpoint

    Raises InvalidCheckpoint where a part names its inputs by something else than a name.
    """
    declared = config.get("quantization_config")
    source = declared.get("source_quantization_config") if isinstance(declared, Mapping) else None
    return frozenset(_inputs(part) for part in _parts(source))


def _parts(source: object) -> Iterator[Mapping[str, Any]]:
    """What Quark wrote for all layers, for patterns of names and for types of layers."""
    if not isinstance(source, Mapping):
        return
    parts = [source.get("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        section = source.get(key)
        parts += section.values() if isinstance(section, Mapping) else []
    for part in parts:
        if isinstance(part, Mapping) and part.get("weight"):
            yield part


def _inputs(part: Mapping[str, Any]) -> Inputs:
    spec = part.get("input_tensors")
    if not isinstance(spec, Mapping):  # a list is of another scheme than MXFP4
        return Inputs(None, None, static=False)
    flags = (spec.get("is_dynamic"), spec.get("dynamic"))
    static = not next((flag for flag in flags if flag is not None), False)
    dtype, mode = (_name(spec, key) for key in ("dtype", "scale_calculation_mode"))
    if dtype is not None and dtype.startswith("fp8"):
        by_token = spec.get("qscheme") == "per_channel"
        mode = None if static else "per_token" if by_token else "per_tensor"
    return Inputs(dtype, mode, static)


def _name(spec: Mapping[str, Any], key: str) -> str | None:
    value = spec.get(key)
    if value is None or isinstance(value, str):
        return value
    raise InvalidCheckpoint(
        f"config.json: quantization_config.source_quantization_config: input_tensors.{key}",
        "not a name",
        found=repr(value),
        expected="a string or null",
        hint=VERIFY_HINT,
    )
