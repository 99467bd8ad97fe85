"""The custom operators torch.ops.mxfp4prep.gemm and .fused_moe.

Each is one function with one signature. The fake that torch.compile traces is made from that same
signature, so the two cannot differ in an argument's name, order or default. On meta tensors the
fake is what runs. Neither has a gradient: an x that requires one is served, but a backward pass,
and torch.compile of a graph that would have one, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from mxfp4prep.errors import Unsupported, UsageError
from mxfp4prep.layouts import PATHS
from mxfp4prep.runtime.backends import implementation
from mxfp4prep.runtime.gating import check_names, checked_limit
from mxfp4prep.runtime.input_quant import INPUT_QUANT


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
    name = real.__name__
    fake = FAKES[name] = fake_of(real, output)
    operator = torch.library.custom_op(f"mxfp4prep::{name}", real, mutates_args=())
    operator.register_fake(fake)

    def no_gradient(*_: object) -> NoReturn:
        hint = "run the model under torch.inference_mode() or torch.no_grad()"
        raise Unsupported(f"torch.ops.mxfp4prep.{name}", "has no gradient", hint=hint)

    operator.register_autograd(no_gradient)


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

    Raises UsageError for an unknown path, input_quant or backend.
    """
    _check_words("gemm", input_quant, path)
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
    topk_weights     (t, top) floating
    topk_ids         (t, top) integers in 0..e-1, or -1 for an expert that is elsewhere
    input_quant      what is done to the input of both GEMMs: a name of INPUT_QUANT
    activation       a name of GATES
    limit            clamps gate and up before the activation; None: no clamp
    gate_up          order of w13's rows: "concatenated" or "interleaved"
    hidden_pad       how many of the last h columns are padding: ignored in x, zero in the result
    intermediate_pad how many of the last `intermediate` values are padding: ignored
    bias1, bias2     (e, 2 * intermediate), (e, h) floating
    a1_scale, a2_scale  (e,) float32, for input_quant "fp8_static"
    backend          a name that `backends()` lists

    What backends have in common, for token t and slot s that names expert j. Q is `input_quant`,
    with the expert's a1_scale or a2_scale; all that is not said to be rounded is float32:

        inputs  = Q(x[t, : h - hidden_pad])           from x's values, in blocks from column 0 on
        both    = inputs @ w13[j].T + bias1[j]        rows of padding left out
        gate,up = its halves, or its even and odd values (`gate_up`)
        gate,up = min(gate, limit), min(max(up, -limit), limit)
        middle  = silu(gate) * up                     gate * sigmoid(gate) * up
                  gelu(gate) * up                     by erf; "gelu_tanh" by tanh
                  gate * sigmoid(1.702 * gate) * (up + 1)                         "swigluoai"
        middle  = Q(middle)                           from float32, in blocks from value 0 on
        y[t]   += topk_weights[t, s] * (middle @ w2[j].T + bias2[j])

    y is rounded once, to x's dtype. A slot of -1 adds nothing: neither its weight nor anything of
    an expert is read, so that a NaN there stays out. One expert in two slots counts twice. An
    expert that no slot names is not read. A backend may round `middle` to x's dtype before it is
    quantized; the reference does not. "fp8_tensor" takes its scale over the rows that go to one
    expert, not over all of x.

    Raises UsageError for words that are none of those, for a clamp that is none (negative, NaN) and
    for padding that leaves nothing; for another id in the reference, where a kernel on a GPU does
    not look.
    """
    _check_words("fused_moe", input_quant, w13_path, w2_path)
    check_names("fused_moe", activation, gate_up)
    _check_sizes(limit, x.shape[1], hidden_pad, intermediate, intermediate_pad)
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


def _check_words(where: str, input_quant: str, *paths: str) -> None:
    """Raises UsageError for a name that backends do not know: some would take it for another."""
    words = [("path", path, tuple(PATHS)) for path in paths]
    for what, found, known in (("input_quant", input_quant, tuple(INPUT_QUANT)), *words):
        if found not in known:
            hint = "a layer's own are its input_quant and paths"
            raise UsageError(
                where, f"unknown {what}", found=found, expected=" or ".join(known), hint=hint
            )


def _check_sizes(
    limit: float | None, hidden: int, hidden_pad: int, intermediate: int, intermediate_pad: int
) -> None:
    """Raises UsageError for a clamp below zero or NaN, and for padding that is more than a part."""
    if limit is not None and not limit >= 0:
        checked_limit("fused_moe: limit", limit)
    for what, pad, size in (
        ("hidden_pad", hidden_pad, hidden),
        ("intermediate_pad", intermediate_pad, intermediate),
    ):
        if pad and not 0 <= pad < size:
            raise UsageError(
                "fused_moe",
                f"{what} leaves no value that is no padding",
                found=f"{what} {pad} of {size}",
                expected=f"0 <= {what} < {size}",
                hint="it counts the values at the end that are padding",
            )


def _gemm_output(call: Mapping[str, Any]) -> Output:
    _check_words("gemm", call["input_quant"], call["path"])
    return Output((call["x"].shape[0], call["n"]), call["x"])


def _fused_moe_output(call: Mapping[str, Any]) -> Output:
    _check_words("fused_moe", call["input_quant"], call["w13_path"], call["w2_path"])
    check_names("fused_moe", call["activation"], call["gate_up"])
    pads = call["hidden_pad"], call["intermediate"], call["intermediate_pad"]
    _check_sizes(call["limit"], call["x"].shape[1], *pads)
    return Output(tuple(call["x"].shape), call["x"])


register(gemm, _gemm_output)
register(fused_moe, _fused_moe_output)
