"""MXFP4 values: E2M1 codes, two a byte, with one E8M0 scale byte per 32; and activation formats.

The codec is the reference that GEMMs are checked against, so it is exact: decoding is table
look-up alone (no float operation that could flush a subnormal), encoding agrees with Quark and
AITER bit for bit. Column 2j stands in the low nibble of byte j. A last group may be short.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mxfp4prep.errors import LayoutError
from mxfp4prep.parallel import SCALE_GROUP

PACKED_GROUP = SCALE_GROUP // 2
"""Bytes of E2M1 codes that share a scale byte."""

SCALE_BIAS = 127
SCALE_NAN = 255
"""E8M0 (OCP MX 1.0, 5.4.1): the value is 2^(byte - 127); byte 255 is NaN."""

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""

_CHUNK_BYTES = 1 << 18
"""Packed bytes decoded at a time: 1 MiB of table indices beside 2 MiB of float32 values."""


class Element(NamedTuple):
    """A small float without infinities: mantissa bits and the exponents of its normal numbers."""

    mantissa_bits: int
    smallest_exponent: int
    largest_exponent: int

    @property
    def largest(self) -> float:
        return (2.0 - 0.5**self.mantissa_bits) * 2.0**self.largest_exponent


ELEMENTS: dict[str, Element] = {
    "fp4": Element(1, 0, 2),
    "fp6_e2m3": Element(3, 0, 2),
    "fp6_e3m2": Element(2, -2, 4),
}
"""Elements of MX blocks by Quark's dtype names (OCP MX 1.0, 5.3)."""


def decode(packed: Tensor, scale: Tensor, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that codes and scales stand for: (..., n, k) dtype.

    packed   (..., n, ceil(k / 2)) uint8
    scale    (..., n, ceil(k / 32)) uint8. Byte 255 makes its group NaN, byte 0 is 2^-127, kept
             although it is subnormal; what float32 cannot hold (from 2^128 on) is infinite
    dtype    float32 and bfloat16 hold every other value exactly

    Raises LayoutError when shapes or dtypes are not these.
    """
    _check_pair(packed, scale, k)
    k_packed = packed.shape[-1]
    count = packed.shape[:-1].numel()
    codes, scales = packed.reshape(count, k_packed), scale.reshape(count, scale.shape[-1])
    table = _pairs(dtype, packed.device)
    values = torch.empty(
        (*packed.shape[:-1], 2 * k_packed), dtype=dtype, device=packed.device
    )  # (..., n, 2 * k_packed): one more column than asked for when k is odd
    if not values.numel():
        return values[..., :k]
    pairs = values.view(table.dtype).view(-1)
    rows = max(1, _CHUNK_BYTES // max(1, k_packed))
    for start in range(0, count, rows):
        part = codes[start : start + rows]
        index = scales[start : start + rows].to(torch.int32).bitwise_left_shift_(8)
        index = index.unsqueeze(-1).expand(-1, -1, PACKED_GROUP).flatten(1)[:, :k_packed]
        index = (index | part).view(-1)
        place = pairs[start * k_packed : start * k_packed + index.numel()]
        torch.index_select(table, 0, index, out=place)
    return values if k % 2 == 0 else values[..., :k].contiguous()


def quantize(x: Tensor, *, activation: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x`, scale mode EVEN, ties to the even code.

    x            (..., k), any float dtype, read as float32
    activation   False: as Quark writes weights: a scale byte is at least 1, zero is code 0
                 True: as AITER's dynamic_mxfp4_quant: byte 0 for groups near zero (all-zero ones
                 among them), zero keeps its sign
    returns      (..., ceil(k / 2)) uint8 and (..., ceil(k / 32)) uint8; columns past k are zero

    A group with a NaN gets scale byte 255. A group with an infinity gets 254, and the infinity
    code 6 (Quark) or 7 (activation): either decodes to infinity.
    Raises LayoutError when x is not a float tensor with a last dimension.
    Source: vectors recorded from Quark 0.13 and from AITER at e4048607.
    """
    blocks = _blocks(x)
    exponents, is_nan = _shared_exponents(blocks, ELEMENTS["fp4"])
    steps, binade = _nearest(blocks.abs() * _power_of_two(-exponents), ELEMENTS["fp4"])
    codes = (steps + 2 * binade).to(torch.uint8)  # a binade has two codes
    is_negative = torch.signbit(blocks)
    if not activation:
        codes.masked_fill_(blocks.isinf(), 6)
        is_negative &= codes != 0
        exponents = exponents.clamp(min=1 - SCALE_BIAS)
    codes |= is_negative.to(torch.uint8) << 3
    k = x.shape[-1]
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(-2)[..., : -(-k // 2)]
    scale = (exponents + SCALE_BIAS).masked_fill_(is_nan, SCALE_NAN).to(torch.uint8)
    return packed.contiguous(), scale.squeeze(-1)


def fake_quantize(x: Tensor, element: Literal["fp4", "fp6_e2m3", "fp6_e3m2"] = "fp4") -> Tensor:
    """`x` rounded to MX along its last dimension, per 32, scale mode EVEN: (..., k) float32.

    For fp4 this is `decode` of `quantize(x, activation=True)`. A group with a NaN becomes NaN.
    Raises LayoutError when x is not a float tensor with a last dimension.
    """
    blocks, kind = _blocks(x), ELEMENTS[element]
    exponents, is_nan = _shared_exponents(blocks, kind)
    steps, binade = _nearest(blocks.abs() * _power_of_two(-exponents), kind)
    values = steps * _power_of_two(binade + kind.smallest_exponent - kind.mantissa_bits)
    values *= _power_of_two(exponents)
    values = values.copysign_(blocks).masked_fill_(is_nan, torch.nan)
    return values.flatten(-2)[..., : x.shape[-1]].contiguous()


def fake_quantize_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """`x` rounded to float8_e4m3fn at a static scale, saturating at 448 * scale: (..., k) float32.

    scale   of the whole tensor, or anything that broadcasts with x; read as float32
    """
    step = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    # clamped, because not every torch release saturates in the cast
    scaled = (x.to(torch.float32) / step).clamp_(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).to(torch.float32) * step


def fake_quantize_fp8_per_token(x: Tensor) -> Tensor:
    """`x` rounded to float8_e4m3fn, each row at its own scale absmax / 448: (..., k) float32."""
    values = x.to(torch.float32)
    return fake_quantize_fp8(values, dynamic_fp8_scale(values.abs().amax(-1, keepdim=True)))


def fake_quantize_fp8_per_tensor(x: Tensor) -> Tensor:
    """`x` rounded to float8_e4m3fn at one scale for all of it, absmax / 448: (..., k) float32."""
    values = x.to(torch.float32)
    if values.numel() == 0:
        return values
    return fake_quantize_fp8(values, dynamic_fp8_scale(values.abs().amax()))


def dynamic_fp8_scale(largest: Tensor) -> Tensor:
    """absmax / 448, rounded as IEEE 754 divides, on every device; float32 as `largest`.

    Where all is zero the scale is the smallest step at one, so that zeros stay zero.
    """
    # GPUs multiply by the reciprocal of a number that the host holds, which is an ulp off
    scale = largest / largest.new_full((), FP8_MAX)
    return torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)


def _check_pair(packed: Tensor, scale: Tensor, k: int) -> None:
    for what, tensor, per_column in (("packed codes", packed, 2), ("scales", scale, SCALE_GROUP)):
        if tensor.dtype != torch.uint8:
            raise LayoutError(what, "need bytes", found=tensor.dtype, expected=torch.uint8)
        expected = (*packed.shape[:-1], -(-k // per_column))
        if tuple(tensor.shape) != expected:
            what_for = f"wrong shape for {k} values a row"
            raise LayoutError(what, what_for, found=tuple(tensor.shape), expected=expected)


@lru_cache(maxsize=16)
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two values of every (scale byte, code byte): (65536,) words of two `dtype`.

    Float32 bit patterns made with integers: 512 KiB, of which a tensor uses the few scales it has.
    """
    exponent = torch.arange(256, dtype=torch.int32).view(-1, 1) - SCALE_BIAS  # (256, 1)
    code = torch.arange(16, dtype=torch.int32)
    half_binade = (code & 7) >> 1  # magnitude code: 0, 1 below one, then two a binade
    mantissa = torch.where(half_binade > 0, 2 + (code & 1), code & 1)  # in halves
    power = exponent + (half_binade - 1).clamp(min=0)  # value: mantissa * 2^(power - 1)
    top = power - (mantissa == 1).to(torch.int32)  # exponent of the leading bit
    normal = ((top + 127) << 23) | ((mantissa == 3).to(torch.int32) << 22)
    subnormal = mantissa << (power - 1 + 149).clamp(0, 28)  # float32's last place is 2^-149
    bits = torch.where(top >= -126, normal, subnormal).masked_fill_(top > 127, 0x7F800000)
    bits.masked_fill_(mantissa == 0, 0).bitwise_or_((code & 8) << 28)
    bits[SCALE_NAN] = 0x7FC00000
    values = bits.view(torch.float32).to(dtype)
    byte = torch.arange(256)
    pairs = torch.stack((values[:, byte & 15], values[:, byte >> 4]), dim=-1)
    word = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
    return pairs.view(-1).view(word).to(device)


def _blocks(x: Tensor) -> Tensor:
    """(..., k) as (..., ceil(k / 32), 32) float32, the last group filled up with zeros."""
    if x.dim() < 1 or not x.is_floating_point():
        found = f"{x.dim()} dimensions of {x.dtype}"
        raise LayoutError("input", "cannot be quantized", found=found, expected="floats in rows")
    values = x.to(torch.float32)
    short = -x.shape[-1] % SCALE_GROUP
    if short:
        values = torch.nn.functional.pad(values, (0, short))
    return values.view(*x.shape[:-1], values.shape[-1] // SCALE_GROUP, SCALE_GROUP)


def _shared_exponents(blocks: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Scale exponents, -127..127, and which groups hold a NaN: (..., groups, 1) int32 and bool.

    EVEN: the absmax rounds up to the next power of two where its mantissa would round up to it in
    the element's precision, then 2^largest_exponent is taken off. An absmax that is or
    becomes infinite gives 127.
    """
    absmax = blocks.abs().amax(-1, keepdim=True)
    rounded = (absmax.view(torch.int32) + (1 << (22 - element.mantissa_bits))) >> 23
    exponents = (rounded - 127 - element.largest_exponent).clamp_(-SCALE_BIAS, SCALE_BIAS)
    return exponents.masked_fill_(rounded >= 255, SCALE_BIAS), absmax.isnan()


def _nearest(magnitude: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """The element value nearest to each magnitude, ties to even, as steps and binade.

    The value is steps * 2^(binade + smallest_exponent - mantissa_bits), steps a whole float32;
    binade (int32) is 0 for the subnormal and the first normal binade. Saturates; NaN becomes 0.
    """
    magnitude = magnitude.nan_to_num(nan=0.0).clamp_(max=element.largest)
    binade = ((magnitude.view(torch.int32) >> 23) - 127 - element.smallest_exponent).clamp_(min=0)
    unit = element.mantissa_bits - element.smallest_exponent
    return torch.round(magnitude * _power_of_two(unit - binade)), binade


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents exactly, for int32 exponents in -127..127: 2^-127 is subnormal in float32."""
    bits = (exponents + 127).bitwise_left_shift_(23).masked_fill_(exponents == -127, 1 << 22)
    return bits.view(torch.float32)
