"""The `quantization_config` that AMD Quark wrote, checked and with its schemes named.

Keys may be missing or null as in older releases; a value of another type than Quark writes is an
error that names the key, because a config that is half understood decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxfp4prep.errors import Unsupported
from mxfp4prep.quark.schemes import CONFIG_NAME, UNQUANTIZED, Scheme, layer_scheme, refuse

_ROOT = "quantization_config"


@dataclass(frozen=True, slots=True)
class QuarkConfig:
    """A parsed `quantization_config` of quant_method "quark".

    exclude   names and patterns, as written
    layers    (pattern as written, scheme), in file order
    types     class name -> scheme
    default   the scheme of everything else
    """

    exclude: tuple[str, ...]
    layers: tuple[tuple[str, Scheme], ...]
    types: dict[str, Scheme]
    default: Scheme

    def schemes(self) -> Iterator[Scheme]:
        """Every scheme the config names, the global one first."""
        yield self.default
        yield from self.types.values()
        for _, scheme in self.layers:
            yield scheme


def read_config(config: Mapping[str, Any]) -> QuarkConfig:
    """The Quark part of a checkpoint's config.json.

    Raises Unsupported where the checkpoint is not Quark's or its weights are not packed, and
    InvalidCheckpoint, naming the key, where a value has another type than Quark writes.
    """
    section = config.get(_ROOT)
    if section is None:
        nested = config.get("text_config")
        if isinstance(nested, Mapping) and nested.get(_ROOT) is not None:
            raise Unsupported(
                CONFIG_NAME, f"{_ROOT} stands under text_config", expected="it at the top level"
            )
        raise Unsupported(
            CONFIG_NAME,
            f"no {_ROOT}: the checkpoint is not quantized",
            hint="mxfp4prep reads MXFP4 checkpoints written by AMD Quark",
        )
    if not isinstance(section, Mapping):
        refuse(_ROOT, section, "an object")
    _check_method(section)
    _check_format(section)
    return _parse(section)


def scheme_of_config(quantization_config: Mapping[str, Any]) -> str:
    """One word for what a `quantization_config` describes: w4a4, nvfp4, fp8, ...

    Several weight schemes are joined with "+", the global one first. Raises InvalidCheckpoint
    where a value has another type than Quark writes.
    """
    method = _method(quantization_config)
    if method != "quark":
        return method
    weight_format = _weight_format(quantization_config)
    if weight_format != "real_quantized":
        return weight_format
    names = dict.fromkeys(scheme.name for scheme in _parse(quantization_config).schemes())
    names.pop("unquantized", None)
    return "+".join(names) or "unquantized"


def _method(section: Mapping[str, Any]) -> str:
    method = section.get("quant_method")
    if not isinstance(method, str):
        refuse(f"{_ROOT}.quant_method", method, 'a string, "quark"')
    return method


def _check_method(section: Mapping[str, Any]) -> None:
    method = _method(section)
    if method == "mxfp4prep":
        raise Unsupported(
            CONFIG_NAME,
            "the checkpoint is prepared already",
            hint="mxfp4prep show says what it holds, mxfp4prep restore gives the original back",
        )
    if method != "quark":
        raise Unsupported(
            CONFIG_NAME,
            f"the checkpoint is {method}, not AMD Quark MXFP4",
            found=f"quant_method {method}",
            expected="quark",
        )


def _check_format(section: Mapping[str, Any]) -> None:
    weight_format = _weight_format(section)
    if weight_format != "real_quantized":
        raise Unsupported(
            CONFIG_NAME,
            f"the weights are {weight_format}: stored as floats, not packed",
            hint="export again with weight_format real_quantized",
        )


def _weight_format(section: Mapping[str, Any]) -> str:
    export = _mapping(section, "export")
    value = export.get("weight_format")
    if value is None:
        return "real_quantized"
    if not isinstance(value, str):
        refuse(f"{_ROOT}.export.weight_format", value, "a string")
    return value


def _parse(section: Mapping[str, Any]) -> QuarkConfig:
    exclude = section.get("exclude")
    if exclude is None:
        exclude = []
    if not isinstance(exclude, list):
        refuse(f"{_ROOT}.exclude", exclude, "a list of names or patterns")
    for i, entry in enumerate(exclude):
        if not isinstance(entry, str):
            refuse(f"{_ROOT}.exclude[{i}]", entry, "a name or a pattern")
    layers = _mapping(section, "layer_quant_config")
    types = _mapping(section, "layer_type_quant_config")
    default = section.get("global_quant_config")
    _mapping(section, "kv_cache_quant_config")
    return QuarkConfig(
        exclude=tuple(exclude),
        layers=tuple(
            (key, layer_scheme(value, f"{_ROOT}.layer_quant_config[{key!r}]"))
            for key, value in layers.items()
        ),
        types={
            key: layer_scheme(value, f"{_ROOT}.layer_type_quant_config[{key!r}]")
            for key, value in types.items()
        },
        default=UNQUANTIZED
        if default is None
        else layer_scheme(default, f"{_ROOT}.global_quant_config"),
    )


def _mapping(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = section.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(f"{_ROOT}.{key}", value, "an object or null")
    return value
