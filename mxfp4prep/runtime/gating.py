"""Gate and up to one hidden vector: what stands between the two GEMMs of an expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from mxfp4prep.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from torch import Tensor

SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0
"""The sigmoid's slope and the clamp of gpt-oss' gate (transformers GptOssExperts)."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swigluoai": lambda gate: gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate),
}
"""Activation name -> the function of the gate half."""

GATE_UP_ORDERS = ("concatenated", "interleaved")

_HIDDEN_ACT = {  # config.json's hidden_act -> our name
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

NAME_IT = "name it yourself: prepared.experts(prefix, activation=..., limit=...)"

_LIMITS_BY_LAYER = ("swiglu_limits", "swiglu_limits_shared")
"""Step-3.5 clamps in some layers only, and after the activation instead of before it."""


def gated(gate_up: Tensor, order: str, activation: str, limit: float | None) -> Tensor:
    """act(gate) * up, (..., i), from (..., 2 i) rows of a gate-up GEMM.

    order       "concatenated": all gate, then all up · "interleaved": gate even, up odd
    activation  a name of GATES; swigluoai is gate * sigmoid(1.702 gate) * (up + 1)
    limit       gate is clamped from above, up from both sides; None: not at all
    """
    if order == "interleaved":
        return combined(gate_up[..., 0::2], gate_up[..., 1::2], activation, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    return combined(gate, up, activation, limit)


def combined(gate: Tensor, up: Tensor, activation: str, limit: float | None) -> Tensor:
    """As `gated`, from gate and up apart."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swigluoai":
        up = up + 1
    return GATES[activation](gate) * up


def check_names(where: str, activation: str, order: str) -> None:
    """Raises UsageError for a name that `gated` does not know."""
    for what, name, known in (
        ("activation", activation, tuple(GATES)),
        ("gate_up order", order, GATE_UP_ORDERS),
    ):
        if name not in known:
            raise UsageError(
                where,
                f"unknown {what}",
                found=name,
                expected=" or ".join(known),
                hint=f"name one of them, or leave {what.partition(' ')[0]} out",
            )


def checked_limit(where: str, limit: object) -> float | None:
    """A clamp as a float, or None for none. Raises UsageError for what cannot be one."""
    if limit is None:
        return None
    number = float(limit) if isinstance(limit, Real) and not isinstance(limit, bool) else math.nan
    if not number >= 0:  # neither is a NaN
        raise UsageError(
            where,
            "not a clamp of gate and up",
            found=repr(limit),
            expected="a number >= 0, or None",
            hint="limit=None clamps nothing",
        )
    return number


def activation_of_config(config: Mapping[str, Any], where: str) -> tuple[str, float | None]:
    """The experts' activation and its limit, as config.json names them.

    Raises Unsupported for one that is not in GATES, for a limit that is none, or for limits that
    differ from layer to layer.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    for name in _LIMITS_BY_LAYER:
        limits = text.get(name)
        if isinstance(limits, Sequence) and any(limits):
            raise Unsupported(
                where,
                f"config.json's {name}: clamps that differ from layer to layer",
                hint="load its layers one by one with prepared[name]",
            )
    limit = _limit_of_config(text.get("swiglu_limit"), where)
    if text.get("model_type") == "gpt_oss":
        return "swigluoai", SWIGLUOAI_LIMIT if limit is None else limit
    named = text.get("hidden_act", text.get("hidden_activation", "silu"))
    if not isinstance(named, str) or named not in _HIDDEN_ACT:
        raise Unsupported(
            where,
            f"config.json's hidden_act {named}",
            expected=" or ".join(_HIDDEN_ACT),
            hint=NAME_IT,
        )
    return _HIDDEN_ACT[named], limit


def _limit_of_config(limit: object, where: str) -> float | None:
    try:
        return checked_limit(where, limit or None)
    except UsageError as error:
        what = f"config.json's swiglu_limit {limit}"
        raise Unsupported(where, what, expected=error.expected, hint=NAME_IT) from None
