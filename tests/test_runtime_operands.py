"""Operands that are not what an operator's words say are refused, alike on every backend."""

from __future__ import annotations

import pytest
import torch
from test_ops import gemm_call, linear, moe_call

from mxfp4prep.errors import LayoutError, UsageError
from mxfp4prep.runtime import ops
from mxfp4prep.runtime.backends import torch_backend, triton_backend

BACKENDS = {"torch": torch_backend, "triton": triton_backend}
GEMM = {  # argument -> what it becomes, the error, words of it
    "n less": ("n", lambda n: n - 32, LayoutError, "weight: not a (32, 256) matrix"),
    "n half": ("n", lambda n: n // 2, LayoutError, "weight: not a (32, 256)"),
    "n more": ("n", lambda n: n + 32, LayoutError, "weight: not a (96, 256)"),
    "n 0": ("n", lambda n: 0, LayoutError, "not a (0, 256)"),
    "n -32": ("n", lambda n: -32, LayoutError, "not a (-32, 256)"),
    "k half": ("x", lambda x: x[:, :-128].contiguous(), LayoutError, "cannot be stored"),
    "k more": ("x", lambda x: torch.cat((x, x), 1), LayoutError, "weight: not a (64, 512)"),
    "path": ("path", lambda path: "triton", LayoutError, "weight: not a (64, 256) matrix in"),
    "x 3-D": ("x", lambda x: x[None], UsageError, "input's shape"),
    "x 1-D": ("x", lambda x: x[0], UsageError, "input's shape"),
    "x float64": ("x", lambda x: x.double(), UsageError, "input's dtype: found torch.float64"),
    "x int32": ("x", lambda x: x.int(), UsageError, "input's dtype: found torch.int32"),
    "bias short": ("bias", lambda b: b[:3], UsageError, "bias: does not fit"),
    "bias one": ("bias", lambda b: b[:1], UsageError, "bias: does not fit"),
    "bias 2-D": ("bias", lambda b: b[None], UsageError, "bias: does not fit"),
    "bias int": ("bias", lambda b: b.int(), UsageError, "bias: does not fit"),
    "weight float": ("weight", lambda w: w.float(), LayoutError, "weight: "),
    "weight int8": ("weight", lambda w: w.view(torch.int8), LayoutError, "found torch.int8"),
    "weight rows": ("weight", lambda w: w[:-1], LayoutError, "weight: "),
    "scale": ("scale", lambda s: s[:-1], LayoutError, "scale: "),
    "scale float": ("scale", lambda s: s.float(), LayoutError, "scale: "),
    "input_scale": ("input_scale", lambda _: torch.ones(2), UsageError, "input_scale: does not"),
    "static": ("input_quant", lambda _: "fp8_static", UsageError, "fp8_static without a scale"),
}
MOE = {
    "intermediate": ("intermediate", lambda i: i // 2, LayoutError, "w13: weight: "),
    "x narrow": ("x", lambda x: x[:, :-64].contiguous(), LayoutError, "w13: (128, 6)"),
    "x 3-D": ("x", lambda x: x[None], UsageError, "input's shape"),
    "x float64": ("x", lambda x: x.double(), UsageError, "input's dtype"),
    "w13": ("w13", lambda w: w[:, :-1], LayoutError, "w13: weight: "),
    "w13_scale": ("w13_scale", lambda s: s[:-1], LayoutError, "w13: scale: "),
    "w2": ("w2", lambda w: w[:-1], LayoutError, "w2: weight: "),
    "w2 float": ("w2", lambda w: w.float(), LayoutError, "w2: weight: "),
    "w2_scale": ("w2_scale", lambda s: s[..., :-1], LayoutError, "w2: scale: "),
    "weights rows": ("topk_weights", lambda w: w[:-1], UsageError, "routing's shape"),
    "ids top": ("topk_ids", lambda i: i[:, :1], UsageError, "routing's shape"),
    "ids 1-D": ("topk_ids", lambda i: i[:, 0], UsageError, "routing's shape"),
    "ids float": ("topk_ids", lambda i: i.float(), UsageError, "routing's dtypes"),
    "weights int": ("topk_weights", lambda w: w.int(), UsageError, "routing's dtypes"),
    "bias1": ("bias1", lambda b: b[:, :-1], UsageError, "bias1: does not fit"),
    "bias2": ("bias2", lambda b: b[:-1], UsageError, "bias2: does not fit"),
    "a1_scale": ("a1_scale", lambda _: torch.ones(2), UsageError, "a1_scale: does not fit"),
    "a2_scale": ("a2_scale", lambda _: torch.ones(()), UsageError, "a2_scale: does not fit"),
    "static": ("input_quant", lambda _: "fp8_static", UsageError, "fp8_static without a scale"),
}
CALLS = [("gemm", wrong) for wrong in GEMM] + [("fused_moe", wrong) for wrong in MOE]


def call_of(name: str) -> dict:
    args, kwargs = (gemm_call if name == "gemm" else moe_call)(3, torch.float32)
    names = ops.gemm if name == "gemm" else ops.fused_moe
    order = names.__code__.co_varnames[: names.__code__.co_argcount]
    return (
        dict.fromkeys(("input_scale", "a1_scale", "a2_scale"))
        | dict(zip(order, args, strict=False))
        | kwargs
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "wrong"), CALLS)
def test_refused_before_a_backend_reads_anything(name, wrong, backend, monkeypatch):
    monkeypatch.setattr(BACKENDS[backend], name, lambda *_, **__: pytest.fail("was asked"))
    argument, change, error, words = (GEMM if name == "gemm" else MOE)[wrong]
    call = call_of(name)
    unwanted = ("a1_scale", "a2_scale") if name == "gemm" else ("input_scale",)
    call = {key: value for key, value in call.items() if key not in unwanted}
    call[argument] = change(call[argument])
    operator = getattr(torch.ops.mxfp4prep, name)
    for device in ("cpu", "meta"):  # the fake refuses what the real one does
        there = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in call.items()
        }
        with pytest.raises(error) as caught:
            operator(**there, backend=backend)
        assert words in str(caught.value)
        assert caught.value.where.startswith(name)
        assert caught.value.hint or error is LayoutError


def test_operands_on_two_devices():
    (x, weight, *rest), named = gemm_call(3, torch.float32)
    with pytest.raises(UsageError, match="found meta, expected cpu"):
        ops.gemm(x.to("meta"), weight, *rest, **named)
    with pytest.raises(UsageError, match=r"bias: does not fit: .* on meta, .* on cpu"):
        ops.gemm(x, weight, *rest, bias=named["bias"].to("meta"))


WRONG_INPUTS = {
    "width": (lambda: torch.ones(2, 255), "the input's shape: found (2, 255), expected (..., 256)"),
    "dtype": (lambda: torch.ones(2, 256).double(), "the input's dtype: found torch.float64"),
}


@pytest.mark.parametrize("wrong", WRONG_INPUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_says_what_is_wrong(wrong, dynamic):
    """As one graph it is an error of torch's, with our words; else it is our error."""
    make, words = WRONG_INPUTS[wrong]
    for fullgraph, error in ((True, torch._dynamo.exc.Unsupported), (False, UsageError)):
        torch._dynamo.reset()
        compiled = torch.compile(
            linear(), backend="aot_eager", fullgraph=fullgraph, dynamic=dynamic
        )
        with pytest.raises(error) as caught:
            compiled(make())
        shown = words.partition(": found")[0] if wrong == "width" and fullgraph else words
        assert f"linear: {shown}" in str(caught.value)
        assert words.partition(", expected ")[2] in str(caught.value)


def test_an_operator_in_a_graph_says_what_is_wrong():
    (x, *rest), named = gemm_call(3, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.ops.mxfp4prep.gemm(x, *rest, **named), fullgraph=True)
    with pytest.raises(Exception, match=r"gemm: the input's dtype: found torch\.float64"):
        compiled(x.double())
