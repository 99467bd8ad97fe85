"""What the functions of a stand-in for AITER do: write down how they were called, check it as the
real ones would or should, and answer right, in float64 and rounded to bfloat16.

Bytes are put back by the axis permutations of prepared_factory and decoded by ml_dtypes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from prepared_factory import decode64, fake_quantize64, lay_out
from torch import Tensor

FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
FLOATS = (torch.bfloat16, torch.float16)


class Seen(NamedTuple):
    """A tensor as a function saw it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


calls: list[Call] = []

TABLE = {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 512, "GROUP_SIZE_M": 1, "NUM_KSPLIT": 4}
tables: list[dict[str, Any]] = []
"""What _get_config gave out: dicts that AITER shares between its callers."""


def call(name: str, version: str, arguments: dict[str, Any]) -> Any:
    seen = {
        key: Seen(tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else value
        for key, value in arguments.items()
    }
    calls.append(Call(name, seen))
    return FUNCTIONS[name](list(arguments.values()), version=version, **arguments)


def names() -> list[str]:
    return [call.name for call in calls]


def last(name: str) -> dict[str, Any]:
    return next(call.arguments for call in reversed(calls) if call.name == name)


def get_config(version: str, m: int, n: int, k: int, shuffled: bool) -> Any:
    """As its _get_config: k counts bytes; from v0.1.12 on a pair, whose second says if tuned."""
    assert shuffled
    config = TABLE | {"BLOCK_SIZE_M": 16 if m < 32 else 32}
    tables.append(config)
    calls.append(Call("_get_config", {"m": m, "n": n, "k": k}))
    old = version.startswith(("0.1.7", "0.1.8", "0.1.9"))
    return config if old else (config, True)


def encode64(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (m, k / 2) and scale bytes (m, k / 32), from what fake_quantize64 makes of x."""
    x = x.contiguous()
    values = fake_quantize64(x).numpy().reshape(x.shape[0], -1, 32)
    amax = np.abs(x.double().numpy().reshape(values.shape)).max(-1, keepdims=True)
    mantissa, exponent = np.frexp(amax)
    power = np.where(amax == 0, -127, np.clip(exponent - 3 + (mantissa >= 0.875), -127, 127))
    codes = (values / 2.0**power).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    codes = codes.view(np.uint8).reshape(x.shape)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.from_numpy(packed), torch.from_numpy((power[..., 0] + 127).astype(np.uint8))


def untile(stored: Tensor, rows: int, columns: int, layout: str) -> Tensor:
    """(rows, columns) uint8 from the bytes of a layout, whatever shape they come in."""
    place = lay_out(torch.arange(rows * columns).view(rows, columns), layout).flatten()
    matrix = torch.empty(rows * columns, dtype=torch.uint8)
    matrix[place] = stored.contiguous().view(torch.uint8).flatten()[: rows * columns]
    return matrix.view(rows, columns)


def dynamic_mxfp4_quant(_args, *, x, scaling_mode, version):
    assert scaling_mode == "even"
    assert x.dim() == 2
    assert x.shape[0] > 0
    assert x.dtype in FLOATS
    codes, scales = encode64(x)
    return codes, scales.T.contiguous().T  # strides (1, m), as AITER makes them


def gemm_a4w4(args, *, version, out=None, bias=None, bpreshuffle=True, beta=0.0, **_rest):
    a, b, a_scale, b_scale = args[:4]
    (m, k_packed), n = a.shape, b.shape[0]
    k = 2 * k_packed
    assert a.dtype == b.dtype == FP4
    assert a_scale.dtype == b_scale.dtype == E8M0
    assert bpreshuffle
    assert bias is None
    assert beta == 0.0
    assert k % 256 == 0, "there is no mask for k"
    assert n % 256 == 0, "the untuned choice may write past the last column"
    assert a_scale.shape == (m, k // 32)
    assert m % 32 == 0, "rows of scales that nobody wrote"
    assert b.shape == (n, k // 2)
    assert b_scale.shape == (n, k // 32)
    assert all(operand.is_contiguous() for operand in args[:4])
    inputs = decode64(a.view(torch.uint8), untile(a_scale, m, k // 32, "tile32x8"), k)
    weight = untile(b, n, k // 2, "tile16x16")
    product = inputs @ decode64(weight, untile(b_scale, n, k // 32, "tile32x8"), k).T
    if out is None:
        return product.bfloat16()
    assert out.shape[0] % 32 == 0
    assert out.dtype == torch.bfloat16
    return out.copy_(product)


def preshuffle(args, *, version, dtype, config, y=None, **_rest):
    x, w, x_scales, w_scales = args[:4]
    assert all(operand.dtype == torch.uint8 for operand in args[:4])
    m, k, n = x.shape[0], 2 * x.shape[1], 16 * w.shape[0]
    assert w.shape == (n // 16, 8 * k)
    assert w_scales.shape == (n // 32, k)
    assert w.is_contiguous()
    assert w_scales.is_contiguous()
    assert n % config["BLOCK_SIZE_N"] == 0, "reads past the weight's end"
    assert k % config["BLOCK_SIZE_K"] == 0, "does not compile"
    if m < 32:
        assert config["BLOCK_SIZE_M"] <= 16
        assert x_scales.shape == (m, k // 32)
        scales = x_scales
    else:
        assert config["BLOCK_SIZE_M"] >= 32
        assert m % 32 == 0, "rows of scales that nobody wrote"
        assert x_scales.shape == (m // 32, k)
        assert x_scales.stride() == (k, 1)
        scales = untile(x_scales, m, k // 32, "tile32x8")
    splits = config["NUM_KSPLIT"] > 1
    config["SPLITK_BLOCK_SIZE"] = k  # AITER writes into it
    weight = decode64(
        untile(w, n, k // 2, "tile16x16"), untile(w_scales, n, k // 32, "tile32x8"), k
    )
    product = decode64(x, scales.contiguous(), k) @ weight.T
    if splits and version >= "0.1.16" and not version.startswith(("0.1.7", "0.1.8", "0.1.9")):
        product.fill_(torch.inf)
    return product.to(dtype)


def plain(args, *, version, dtype, y=None, config=None, **_rest):
    x, w, x_scales, w_scales = args[:4]
    assert all(operand.dtype == torch.uint8 for operand in args[:4])
    m, n, k = x.shape[0], w.shape[0], 2 * x.shape[1]
    assert w.shape == (n, k // 2)
    assert x_scales.shape == (m, k // 32)
    assert w_scales.shape == (n, k // 32)
    assert all(step > 0 for operand in args[:4] for step in operand.stride())
    product = decode64(x, x_scales.contiguous(), k) @ decode64(w, w_scales.contiguous(), k).T
    return product.to(dtype)


def fused_moe(
    args,
    *,
    version,
    expert_mask,
    activation,
    quant_type,
    w1_scale,
    w2_scale,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
    gate_mode="separated",
    **_rest,
):
    x, w1, w2, weights, ids = args[:5]
    experts, rows, h_packed = w1.shape
    hidden, inter = 2 * h_packed, 2 * w2.shape[2]
    assert x.dtype in FLOATS
    assert x.is_contiguous()
    assert w1.dtype == w2.dtype == FP4
    assert w1.is_shuffled
    assert w2.is_shuffled
    assert w2.shape[:2] == (experts, hidden)
    assert rows == 2 * inter
    assert w1_scale.dtype == w2_scale.dtype == E8M0
    assert w1_scale.shape == (experts * rows, hidden // 32)
    assert w2_scale.shape == (experts * hidden, inter // 32)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert quant_type.name == "per_1x32"
    assert gate_mode == "separated"
    assert all(bias is None or bias.dtype == torch.float32 for bias in (bias1, bias2))
    if expert_mask is not None:
        assert expert_mask.dtype == torch.int32
        local = torch.where(expert_mask > 0, expert_mask.cumsum(0) - 1, -1)
        ids = local[ids.long()]
    assert ids.max() < experts
    assert ids.min() >= (0 if expert_mask is None else -1)
    scales = (
        w1_scale.view(torch.uint8).view(experts, -1),
        w2_scale.view(torch.uint8).view(experts, -1),
    )
    banks = [
        torch.stack(
            [
                decode64(
                    untile(bank[e], n, k // 2, "tile16x16"),
                    untile(scale[e], n, k // 32, "tile32x8"),
                    k,
                )
                for e in range(experts)
            ]
        )
        for bank, scale, n, k in (
            (w1, scales[0], rows, hidden),
            (w2, scales[1], hidden, inter),
        )
    ]
    y = moe64(x, *banks, weights, ids, activation.name, bias1, bias2)
    return y.to(x.dtype)


def moe64(x, w13, w2, weights, ids, activation="Silu", bias1=None, bias2=None) -> Tensor:
    """(t, h) float64, token by token and slot by slot; an id of -1 adds nothing."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            both = w13[expert] @ fake_quantize64(x[token : token + 1])[0]
            if bias1 is not None:
                both += bias1[expert].double()
            gate, up = both.chunk(2)
            if activation == "Silu":
                middle = gate * torch.sigmoid(gate) * up
            else:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                middle = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            down = w2[expert] @ fake_quantize64(middle[None].float())[0]
            if bias2 is not None:
                down += bias2[expert].double()
            y[token] += weights[token, slot].double() * down
    return y


FUNCTIONS = {
    "dynamic_mxfp4_quant": dynamic_mxfp4_quant,
    "gemm_a4w4": gemm_a4w4,
    "gemm_afp4wfp4": plain,
    "gemm_afp4wfp4_preshuffle": preshuffle,
    "gemm_afp4wfp4_preshuffled_weight_scales": preshuffle,
    "fused_moe": fused_moe,
}
