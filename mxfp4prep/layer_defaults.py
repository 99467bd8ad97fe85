"""The fields of a manifest's layers that follow from others, which large ones leave out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_COMMON = (
    "kind",
    "parallel",
    "group",
    "scheme",
    "activation",
    "experts",
    "gate_up",
    "reasons",
    "hazards",
    "verdict",
    "bias",
    "input_scale",
)


def spelled(value: object) -> str:
    """JSON on one line, the way the manifest has it."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def layer_defaults(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """For each common field its most frequent value; ties go to the first seen."""
    defaults: dict[str, Any] = {}
    for key in _COMMON:
        counts: dict[str, int] = {}
        for layer in layers:
            text = spelled(layer[key])
            counts[text] = counts.get(text, 0) + 1
        defaults[key] = json.loads(max(counts, key=counts.__getitem__))
    return defaults


def _derived(layer: Mapping[str, Any]) -> tuple[tuple[str, str | None, Any], ...]:
    """(field, subfield, value) that follow from name, n, k and the weight's file."""
    name, n, k = layer["name"], layer["n"], layer["k"]
    return (
        ("n_padded", None, n),
        ("k_padded", None, k),
        ("weight", "tensor", f"{name}.weight"),
        ("weight", "source_shape", [n, k // 2]),
        ("weight", "pad_byte", None),
        ("scale", "tensor", f"{name}.weight_scale"),
        ("scale", "file", layer["weight"]["file"]),
        ("scale", "source_shape", [n, -(-k // 32)]),
        ("scale", "pad_byte", None),
    )


def shorten(layer: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The layer without the fields that `fill` puts back."""
    short = {k: v for k, v in layer.items() if k not in defaults or v != defaults[k]}
    short["weight"], short["scale"] = dict(layer["weight"]), dict(layer["scale"])
    for field, subfield, value in _derived(layer):
        if subfield is None:
            if short[field] == value:
                del short[field]
        elif short[field][subfield] == value:
            del short[field][subfield]
    return short


def fill(layer: Any, defaults: Mapping[str, Any]) -> None:  # noqa: ANN401 - what JSON holds
    """Puts back what `shorten` left out; anything else is left for validation to refuse."""
    try:
        for field, subfield, value in _derived(layer):
            if subfield is None:
                layer.setdefault(field, value)
            else:
                layer[field].setdefault(subfield, value)
        for key, value in defaults.items():
            layer.setdefault(key, value)
    except (TypeError, KeyError, AttributeError):
        return
