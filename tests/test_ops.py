"""torch.ops.mxfp4prep: real and fake agree, opcheck passes, and torch.compile sees whole graphs."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch._dynamo.testing
from prepared_factory import LAYOUT_IDS, lay_out
from torch._subclasses.fake_tensor import FakeTensorMode

from mxfp4prep.errors import Unsupported, UsageError
from mxfp4prep.manifest import ActivationRecord
from mxfp4prep.runtime import ops, registering
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.shared_expert import SharedExpert, SharedGate
from mxfp4prep.runtime.spreading import Turn

TOKENS = [0, 1, 31, 32, 33, 4097]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
W4A4 = ActivationRecord(dtype="fp4", scale_mode="even", static=False)


def stored(rows: int, k: int, path: str, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + k)
    packed = torch.randint(0, 256, (*lead, rows, k // 2), dtype=torch.uint8, generator=generator)
    shape = (*lead, rows, -(-k // 32))
    scale = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
    weight_layout, scale_layout = LAYOUT_IDS[path]
    return lay_out(packed, weight_layout), lay_out(scale, scale_layout)


def gemm_call(m: int, dtype: torch.dtype, path: str = "asm") -> tuple[tuple, dict]:
    n, k = 64, 256
    weight, scale = stored(n, k, path)
    bias = torch.linspace(-1, 1, n).to(torch.bfloat16)
    x = torch.randn((m, k), generator=torch.Generator().manual_seed(m)).to(dtype)
    return (x, weight, scale, n, path, "mxfp4"), {"bias": bias}


def moe_call(t: int, dtype: torch.dtype) -> tuple[tuple, dict]:
    experts, hidden, intermediate = 3, 256, 64
    generator = torch.Generator().manual_seed(t)
    x = torch.randn((t, hidden), generator=generator).to(dtype)
    weights = torch.rand((t, 2), generator=generator)
    ids = torch.randint(0, experts, (t, 2), generator=generator)
    banks = (*stored(2 * intermediate, hidden, "asm", experts),)
    banks += stored(hidden, intermediate, "triton", experts)
    args = (x, *banks, weights, ids, intermediate, "asm", "triton", "mxfp4")
    bias1 = torch.randn((experts, 2 * intermediate), generator=generator)
    bias2 = torch.randn((experts, hidden), generator=generator)
    return args, {"limit": 7.0, "bias1": bias1, "bias2": bias2, "activation": "swigluoai"}


@pytest.mark.parametrize("make", [gemm_call, moe_call])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", TOKENS)
def test_p25_fake_equals_real(make, dtype, m):
    args, kwargs = make(m, dtype)
    name = "gemm" if make is gemm_call else "fused_moe"
    operator = getattr(torch.ops.mxfp4prep, name)
    real = operator(*args, **kwargs)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        named = {
            k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()
        }
        fake = operator(*faked, **named)
    meta = operator(*on_meta(args), **dict(zip(kwargs, on_meta(kwargs.values()), strict=True)))
    for made in (fake, meta):
        assert made.shape == real.shape
        assert made.dtype == real.dtype == dtype
        assert made.stride() == real.stride()
        assert made.storage_offset() == real.storage_offset() == 0
    assert fake.device == real.device
    assert meta.is_meta
    assert real.shape[0] == m


def on_meta(values):
    return [value.to("meta") if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("make", [gemm_call, moe_call])
def test_strides_of_the_answer_do_not_depend_on_those_of_x(make):
    args, kwargs = make(6, torch.bfloat16)
    operator = getattr(torch.ops.mxfp4prep, "gemm" if make is gemm_call else "fused_moe")
    x = args[0].T.contiguous().T  # column-major
    real = operator(x, *args[1:], **kwargs)
    assert torch.equal(real, operator(*args, **kwargs))
    meta = operator(
        *on_meta((x, *args[1:])), **dict(zip(kwargs, on_meta(kwargs.values()), strict=True))
    )
    assert meta.stride() == real.stride() == (real.shape[1], 1)


@pytest.mark.parametrize("name", ["gemm", "fused_moe"])
def test_p25_real_and_fake_have_one_signature(name):
    real, fake = getattr(ops, name), registering.FAKES[name]
    assert inspect.signature(fake) == inspect.signature(real)
    schema = getattr(torch.ops.mxfp4prep, name).default._schema
    assert [a.name for a in schema.arguments] == list(inspect.signature(real).parameters)


def test_fake_knows_defaults_and_names():
    def real(x: torch.Tensor, n: int = 3, m: int = 5) -> torch.Tensor:
        return x.new_empty((n, m))

    fake = registering.fake_of(
        real, lambda call: registering.Output((call["n"], call["m"]), call["x"])
    )
    x = torch.empty(1, dtype=torch.float16)
    assert fake(x).shape == (3, 5)
    assert fake(x, m=7).shape == (3, 7)
    assert fake(m=7, x=x, n=1).dtype == torch.float16


def test_fake_refuses_what_real_refuses():
    with pytest.raises(TypeError):
        registering.FAKES["gemm"](torch.empty(1, 2), no_such_argument=1)


def test_fused_moe_has_the_padding_and_bias_arguments():
    names = list(inspect.signature(ops.fused_moe).parameters)
    assert {"hidden_pad", "intermediate_pad", "bias1", "bias2"} <= set(names)


@pytest.mark.parametrize("m", [0, 1, 33])
@pytest.mark.parametrize("path", ["asm", "triton", "kept"])
def test_opcheck_gemm(m, path):
    args, kwargs = gemm_call(m, torch.bfloat16, path)
    torch.library.opcheck(torch.ops.mxfp4prep.gemm.default, args, kwargs)


@pytest.mark.parametrize("t", [0, 1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_opcheck_fused_moe(t, dtype):
    args, kwargs = moe_call(t, dtype)
    args[6][:, 1] = -1
    torch.library.opcheck(torch.ops.mxfp4prep.fused_moe.default, args, kwargs)


def test_every_operator_is_checked_above():
    assert set(registering.FAKES) == {"gemm", "fused_moe"}


@pytest.mark.parametrize("make", [gemm_call, moe_call])
def test_there_is_no_gradient_and_it_says_so(make):
    args, kwargs = make(3, torch.float32)
    operator = getattr(torch.ops.mxfp4prep, "gemm" if make is gemm_call else "fused_moe")
    x = args[0].clone().requires_grad_()
    y = operator(x, *args[1:], **kwargs)
    assert torch.equal(y, operator(*args, **kwargs)), "serving such an x is no error"
    with pytest.raises(Unsupported, match="no gradient") as caught:
        y.sum().backward()
    assert "torch.no_grad()" in caught.value.hint
    with torch.no_grad():
        assert not operator(x, *args[1:], **kwargs).requires_grad


def test_compile_of_an_input_that_requires_grad():
    torch._dynamo.reset()
    layer = linear()
    x = torch.ones((3, 256), requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="has no gradient"):
        compiled(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("make", [gemm_call, moe_call])
def test_autocast_changes_nothing(make):
    args, kwargs = make(5, torch.float32)
    operator = getattr(torch.ops.mxfp4prep, "gemm" if make is gemm_call else "fused_moe")
    plain = operator(*args, **kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = operator(*args, **kwargs)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, plain)


def test_unknown_backend_is_refused():
    args, kwargs = gemm_call(1, torch.float32)
    with pytest.raises(UsageError, match="backend"):
        torch.ops.mxfp4prep.gemm(*args, **kwargs, backend="cublas")


def linear(path: str = "asm") -> PreparedLinear:
    weight, scale = stored(64, 256, path)
    bias = torch.linspace(-1, 1, 64).to(torch.bfloat16)
    return PreparedLinear(
        weight, scale, n=64, k=256, path=path, scheme="w4a4", activation=W4A4, bias=bias
    )


# torch 2.13's own inductor still uses torch.jit
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_linear_as_one_graph(compiler):
    torch._dynamo.reset()
    layer = linear()
    compiled = torch.compile(layer, fullgraph=True, backend=compiler, dynamic=True)
    for m in (5, 1, 33, 0):
        x = torch.randn((2, m, 256), generator=torch.Generator().manual_seed(m)).bfloat16()
        assert torch.equal(compiled(x), layer(x))


def test_compile_with_dynamic_m_compiles_once():
    torch._dynamo.reset()
    layer = linear()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for m in (2, 3, 31, 32, 33, 64, 4097):
        assert compiled(torch.zeros(m, 256, dtype=torch.bfloat16)).shape == (m, 64)
    assert counter.frame_count == 1


def experts(kind: str = "routed") -> PreparedExperts:
    """Three experts in the banks: all routed, or one of them or another MLP a shared one."""
    args, kwargs = moe_call(4, torch.bfloat16)
    if kind == "separate":
        up = tuple(plain_linear(64, 256) for _ in range(2))
        kwargs["shared"] = SharedExpert(up, plain_linear(256, 64))
    if kind != "routed":
        kwargs["shared_gate"] = SharedGate(torch.linspace(-1, 1, 256).view(1, 256).bfloat16())
        kwargs["shared_slots"] = int(kind == "fused")
        kwargs["turn"] = Turn(1, 2)
        here = torch.arange(4) if kind == "separate" else torch.arange(4) - 1
        kwargs["expert_map"] = here.where((here >= 0) & (here < 3 - (kind == "fused")), -1).int()
    return PreparedExperts(
        *args[1:5],
        hidden=256,
        intermediate=64,
        w13_path="asm",
        w2_path="triton",
        scheme="w4a4",
        input_activation=W4A4,
        **kwargs,
    )


def plain_linear(n: int, k: int) -> PreparedLinear:
    weight, scale = stored(n, k, "triton")
    return PreparedLinear(weight, scale, n=n, k=k, path="triton", scheme="w4a4", activation=W4A4)


def expert_inputs(t: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    x = torch.randn((t, 256), generator=generator).bfloat16()
    ids = torch.randint(0, experts, (t, 2), generator=generator)
    return x, torch.rand((t, 2), generator=generator), ids


KINDS = ["routed", "fused", "separate"]


@pytest.mark.parametrize("kind", KINDS)
def test_modules_answer_on_meta_and_with_fake_tensors(kind):
    inputs = expert_inputs(5, 3)
    module = experts(kind)
    real = module(*inputs)
    meta = experts(kind).to("meta")(*on_meta(inputs))
    assert meta.is_meta
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = module(*(mode.from_tensor(tensor) for tensor in inputs))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    y = linear().to("meta")(torch.empty((2, 3, 256), dtype=torch.float16, device="meta"))
    assert (y.shape, y.dtype, y.is_meta) == ((2, 3, 64), torch.float16, True)


@pytest.mark.parametrize("kind", KINDS)
def test_compile_experts_once(kind):
    """dynamic=True: one graph from two tokens on; torch specializes sizes of 0 and 1.

    Two ranks take turns at a separate shared expert, so that its layers see one row of two tokens.
    """
    torch._dynamo.reset()
    module = experts(kind)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for t in (31, 4 if kind == "separate" else 2, 32, 33, 4097):
            inputs = expert_inputs(t, module.experts)
            assert torch.equal(compiled(*inputs), module(*inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["linear", *KINDS])
def test_one_graph_for_any_number_of_rows_where_it_is_unbacked(kind):
    """mark_unbacked: 0 and 1 are no special sizes then. A shape_id says that sizes are equal."""
    torch._dynamo.reset()
    module = linear() if kind == "linear" else experts(kind)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    with torch.no_grad():
        for t in (31, 1, 0, 2, 32, 33, 4097):
            inputs = expert_inputs(t, 3 if kind == "linear" else module.experts)
            inputs = inputs[:1] if kind == "linear" else inputs
            wanted = module(*inputs)
            for tensor in inputs:
                torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="tokens")
            assert torch.equal(compiled(*inputs), wanted)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compile_experts_with_inductor():
    torch._dynamo.reset()
    for kind in KINDS:
        module = experts(kind)
        inputs = expert_inputs(5, module.experts)
        compiled = torch.compile(module, fullgraph=True, dynamic=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), module(*inputs))
