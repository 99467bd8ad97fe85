"""torch.ops.mxfp4prep: real and fake agree, opcheck passes, and torch.compile sees whole graphs."""

from __future__ import annotations

import inspect

import pytest
import torch
from prepared_factory import LAYOUT_IDS, lay_out
from torch._subclasses.fake_tensor import FakeTensorMode

from mxfp4prep.errors import UsageError
from mxfp4prep.manifest import ActivationRecord
from mxfp4prep.runtime import ops
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.linear import PreparedLinear

TOKENS = [0, 1, 7, 31, 32, 33]
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
    assert fake.shape == real.shape
    assert fake.dtype == real.dtype == dtype
    assert fake.stride() == real.stride()
    assert fake.device == real.device
    assert real.shape[0] == m


@pytest.mark.parametrize("name", ["gemm", "fused_moe"])
def test_p25_real_and_fake_have_one_signature(name):
    real, fake = getattr(ops, name), ops.FAKES[name]
    assert inspect.signature(fake) == inspect.signature(real)
    schema = getattr(torch.ops.mxfp4prep, name).default._schema
    assert [a.name for a in schema.arguments] == list(inspect.signature(real).parameters)


def test_fake_knows_defaults_and_names():
    def real(x: torch.Tensor, n: int = 3, m: int = 5) -> torch.Tensor:
        return x.new_empty((n, m))

    fake = ops.fake_of(real, lambda call: ops.Output((call["n"], call["m"]), call["x"]))
    x = torch.empty(1, dtype=torch.float16)
    assert fake(x).shape == (3, 5)
    assert fake(x, m=7).shape == (3, 7)
    assert fake(m=7, x=x, n=1).dtype == torch.float16


def test_fake_refuses_what_real_refuses():
    with pytest.raises(TypeError):
        ops.FAKES["gemm"](torch.empty(1, 2), no_such_argument=1)


def test_fused_moe_has_the_padding_and_bias_arguments():
    names = list(inspect.signature(ops.fused_moe).parameters)
    assert {"hidden_pad", "intermediate_pad", "bias1", "bias2"} <= set(names)


@pytest.mark.parametrize("m", [0, 1, 33])
@pytest.mark.parametrize("path", ["asm", "triton", "kept"])
def test_opcheck_gemm(m, path):
    args, kwargs = gemm_call(m, torch.bfloat16, path)
    torch.library.opcheck(torch.ops.mxfp4prep.gemm.default, args, kwargs)


@pytest.mark.parametrize("t", [0, 5])
def test_opcheck_fused_moe(t):
    args, kwargs = moe_call(t, torch.bfloat16)
    torch.library.opcheck(torch.ops.mxfp4prep.fused_moe.default, args, kwargs)


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
    for m in (2, 3, 31, 32, 33, 64):
        assert compiled(torch.zeros(m, 256, dtype=torch.bfloat16)).shape == (m, 64)
    assert counter.frame_count == 1


def test_compile_experts_as_one_graph():
    torch._dynamo.reset()
    args, kwargs = moe_call(4, torch.bfloat16)
    x, w13, w13_scale, w2, w2_scale, weights, ids = args[:7]
    experts = PreparedExperts(
        w13,
        w13_scale,
        w2,
        w2_scale,
        hidden=256,
        intermediate=64,
        w13_path="asm",
        w2_path="triton",
        scheme="w4a4",
        input_activation=W4A4,
        **kwargs,
    )
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x, weights, ids), experts(x, weights, ids))
    assert torch.equal(compiled(x[:3], weights[:3], ids[:3]), experts(x[:3], weights[:3], ids[:3]))
