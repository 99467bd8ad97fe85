"""The custom operators torch.ops.mxfp4prep.gemm and .fused_moe.

Each is one function with one signature. The fake that torch.compile traces is made from that same
signature, so the two cannot differ in an argument's name, order or default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxfp4prep.runtime.backends import implementation


class Output(NamedTuple):
    """What an operator returns: a new contiguous tensor of `shape`, with `like`'s dtype, there."""

    shape: tuple[int | torch.SymInt, ...]
    like: Tensor


def fake_of(
    real: Callable[..., Tensor], output: Callable[[Mapping[str, Any]], Output]
) -> Callable[..., Tensor]:
    """A function with `real`'s signature that only makes the tensor that `real` would return.

    output   what `real` returns, from its arguments by name, defaults filled in
    """
    signature = inspect.signature(real)

    def fake(*args: object, **kwargs: object) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        shape, like = output(bound.arguments)
        return like.new_empty(shape)

    fake.__signature__ = signature  # type: ignore[attr-defined]
    fake.__name__ = f"{real.__name__}_fake"
    return fake


def register(real: Callable[..., Tensor], output: Callable[[Mapping[str, Any]], Output]) -> None:
    """Registers `real` as torch.ops.mxfp4prep.<its name> together with its fake."""
    fake = FAKES[real.__name__] = fake_of(real, output)
    operator = torch.library.custom_op(f"mxfp4prep::{real.__name__}", real, mutates_args=())
    operator.register_fake(fake)


FAKES: dict[str, Callable[..., Tensor]] = {}
"""Operator name -> its fake, for tests that compare signatures."""


def gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    n: int,
    path: str,
    input_quant: str,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """x @ weight.T + bias, (m, n) in x's dtype.

    x             (m, k) bfloat16, float16 or float32; m may be 0
    weight, scale uint8, as `path` of PATHS stores an (n, k) matrix
    input_quant   what is done to x first: a name of INPUT_QUANT
    bias          (n,) floating, added in float32
    input_scale   one float32, for input_quant "fp8_static"
    backend       a name that `backends()` lists
    """
    with torch.autocast(x.device.type, enabled=False):
        return implementation(backend).gemm(
            x, weight, scale, n, path, input_quant, bias=bias, input_scale=input_scale
        )


def fused_moe(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate: int,
    w13_path: str,
    w2_path: str,
    input_quant: str,
    activation: str = "silu",
    limit: float | None = None,
    gate_up: str = "concatenated",
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """For each token the weighted sum of its experts' down(act(gate) * up), (t, h) in x's dtype.

    x                (t, h) bfloat16, float16 or float32; t may be 0
    w13, w13_scale   banks of e gate-up matrices (2 * intermediate, h), as `w13_path` stores them
    w2, w2_scale     banks of e down matrices (h, intermediate), as `w2_path` stores them
    topk_weights     (t, top) floating; topk_ids (t, top) integers in 0..e-1
    input_quant      what is done to the input of both GEMMs: a name of INPUT_QUANT
    limit            clamps gate and up before the activation; None: no clamp
    gate_up          order of w13's rows: "concatenated" or "interleaved"
    hidden_pad       how many of the last h columns are padding: ignored in x, zero in the result
    intermediate_pad how many of the last `intermediate` values are padding: ignored
    bias1, bias2     (e, 2 * intermediate), (e, h) floating
    a1_scale, a2_scale  (e,) float32, for input_quant "fp8_static"
    """
    with torch.autocast(x.device.type, enabled=False):
        return implementation(backend).fused_moe(
            x,
            w13,
            w13_scale,
            w2,
            w2_scale,
            topk_weights,
            topk_ids,
            intermediate,
            w13_path,
            w2_path,
            input_quant,
            activation=activation,
            limit=limit,
            gate_up=gate_up,
            hidden_pad=hidden_pad,
            intermediate_pad=intermediate_pad,
            bias1=bias1,
            bias2=bias2,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
        )


def _gemm_output(call: Mapping[str, Any]) -> Output:
    return Output((call["x"].shape[0], call["n"]), call["x"])


def _fused_moe_output(call: Mapping[str, Any]) -> Output:
    return Output(tuple(call["x"].shape), call["x"])


register(gemm, _gemm_output)
register(fused_moe, _fused_moe_output)
