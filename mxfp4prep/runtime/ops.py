"""The custom operators torch.ops.mxfp4prep.gemm and .fused_moe.

Each is one function with one signature. The fake that torch.compile traces is made from that same
signature, so the two cannot differ in an argument's name, order or default. On meta tensors the
fake is what runs. Both refuse operands that are not what the words say, whatever the backend: a
kernel would read beyond them. Neither has a gradient, see registering.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mxfp4prep.errors import UsageError
from mxfp4prep.layouts import PATHS
from mxfp4prep.runtime.backends import implementation
from mxfp4prep.runtime.gating import check_names, checked_limit
from mxfp4prep.runtime.input_quant import INPUT_QUANT
from mxfp4prep.runtime.operands import (
    AS_ROUTED,
    AS_STORED,
    check_routing_kinds,
    check_rows,
    check_stored,
    check_vector,
    refuse,
)
from mxfp4prep.runtime.registering import Output, register


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
    weight, scale uint8, as `path` of PATHS stores an (n, k) matrix. Values from 2^128 on, which
                  float32 does not have, are infinite: a product with zero is NaN then
    input_quant   what is done to x first: a name of INPUT_QUANT
    bias          (n,) floating, added in float32
    input_scale   one float32, for input_quant "fp8_static"
    backend       a name that `backends()` lists

    Raises UsageError for an unknown path, input_quant or backend and for operands of other shapes,
    dtypes or devices, LayoutError (an InvalidCheckpoint) for a weight or scale of another shape.
    """
    _check_gemm(x, weight, scale, n, path, input_quant, bias, input_scale)
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

    Raises UsageError for words that are none of those, for a clamp that is none (negative, NaN),
    for padding that leaves nothing and for operands of other shapes, dtypes or devices, LayoutError
    for banks of another shape; UsageError for another id in the reference, where a kernel on a GPU
    does not look.
    """
    _check_moe(locals())
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


def _check_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    n: int,
    path: str,
    input_quant: str,
    bias: Tensor | None,
    input_scale: Tensor | None,
) -> None:
    """Raises UsageError or LayoutError for operands that are not what the words say."""
    _check_words("gemm", input_quant, path)
    check_rows("gemm", x, weight)
    check_stored("gemm", (weight, scale), n, x.shape[1], path)
    check_vector("gemm: bias", bias, (n,), x)
    check_vector("gemm: input_scale", input_scale, (), x)
    _check_static("gemm", input_quant, input_scale)


def _check_moe(call: Mapping[str, Any]) -> None:
    """Raises UsageError or LayoutError for operands that are not what the words say.

    call   the arguments of `fused_moe` by name
    """
    x, w13, intermediate = call["x"], call["w13"], call["intermediate"]
    input_quant, paths = call["input_quant"], (call["w13_path"], call["w2_path"])
    _check_words("fused_moe", input_quant, *paths)
    check_names("fused_moe", call["activation"], call["gate_up"])
    _check_banks(x, (w13, call["w13_scale"]), (call["w2"], call["w2_scale"]), intermediate, *paths)
    pads = call["hidden_pad"], intermediate, call["intermediate_pad"]
    _check_sizes(call["limit"], x.shape[1], *pads)
    _check_routing(x, call["topk_weights"], call["topk_ids"])
    biases, scales = (call["bias1"], call["bias2"]), (call["a1_scale"], call["a2_scale"])
    _check_vectors(x, w13, intermediate, input_quant, biases, scales)


def _check_banks(
    x: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
    intermediate: int,
    w13_path: str,
    w2_path: str,
) -> None:
    """Raises UsageError for an x that is none, LayoutError for banks that are not for it."""
    check_rows("fused_moe", x, w13[0])
    held, hidden = w13[0].shape[:1], x.shape[1]
    check_stored("fused_moe: w13", w13, 2 * intermediate, hidden, w13_path, *held)
    check_stored("fused_moe: w2", w2, hidden, intermediate, w2_path, *held)


def _check_routing(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    """Raises UsageError for weights and ids that are not (t, top), floating and integer."""
    weights, ids = topk_weights.shape, topk_ids.shape
    if (
        (len(weights), len(ids)) != (2, 2)
        or not _may_be(weights[1], ids[1])
        or not _may_be(weights[0], x.shape[0])
        or not _may_be(ids[0], x.shape[0])
    ):
        found = f"topk_weights {tuple(weights)}, topk_ids {tuple(ids)}"
        refuse("fused_moe", "the routing's shape", found, f"both ({x.shape[0]}, top)", AS_ROUTED)
    check_routing_kinds("fused_moe", x, topk_weights, topk_ids)


def _check_vectors(
    x: Tensor,
    w13: Tensor,
    intermediate: int,
    input_quant: str,
    biases: tuple[Tensor | None, Tensor | None],
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Raises UsageError for biases or scales of another shape, dtype or device."""
    experts = w13.shape[0]
    check_vector("fused_moe: bias1", biases[0], (experts, 2 * intermediate), x)
    check_vector("fused_moe: bias2", biases[1], (experts, x.shape[1]), x)
    for name, scale in zip(("a1_scale", "a2_scale"), scales, strict=True):
        check_vector(f"fused_moe: {name}", scale, (experts,), x)
        _check_static("fused_moe", input_quant, scale)


def _check_static(where: str, input_quant: str, scale: Tensor | None) -> None:
    if input_quant == "fp8_static" and scale is None:
        refuse(
            where, "input_quant fp8_static without a scale", None, "its static scales", AS_STORED
        )


def _may_be(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are one; of symbols whose sizes are not known, whether they can be."""
    if isinstance(size, int) and isinstance(other, int):
        return size == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not statically_known_true(size != other)


def _gemm_output(call: Mapping[str, Any]) -> Output:
    _check_gemm(**{name: value for name, value in call.items() if name != "backend"})
    return Output((call["x"].shape[0], call["n"]), call["x"])


def _fused_moe_output(call: Mapping[str, Any]) -> Output:
    _check_moe(call)
    return Output(tuple(call["x"].shape), call["x"])


register(gemm, _gemm_output)
register(fused_moe, _fused_moe_output)
