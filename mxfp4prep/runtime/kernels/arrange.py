"""Activations as the GEMM kernels read them: quantized, as sums of bfloat16 pieces."""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4prep.runtime.kernels.rounding import mx_exponent, nearest, power_of_two


@triton.jit
def mx_values(
    x, BM: tl.constexpr, BK: tl.constexpr, MANT: tl.constexpr, LOW: tl.constexpr, TOP: tl.constexpr
):
    """(BM, BK) float32 rounded to MX per 32 columns, scale mode EVEN; NaN makes its group NaN."""
    groups = tl.reshape(x, (BM, BK // 32, 32))
    magnitude = tl.abs(groups)
    amax = tl.max(magnitude, axis=2, keep_dims=True)
    bad = tl.max((groups != groups).to(tl.int32), axis=2, keep_dims=True) != 0
    exponent = mx_exponent(tl.where(bad, 0.0, amax), MANT, TOP)
    largest: tl.constexpr = (2.0 - 0.5**MANT) * 2.0**TOP
    value = nearest(magnitude * power_of_two(-exponent), MANT, LOW, largest)
    value = value * power_of_two(exponent)
    value = tl.where(groups < 0, -value, value)
    value = tl.where(bad, float("nan"), value)
    return tl.reshape(value, (BM, BK))


@triton.jit
def _fp8_values(x, scale):
    """float32 rounded to float8_e4m3fn at a scale, in units of that scale."""
    scaled = tl.div_rn(x, scale)
    value = nearest(tl.abs(scaled), 3, -6, 448.0)
    value = tl.where(scaled < 0, -value, value)
    return tl.where(scaled != scaled, scaled, value)


@triton.jit
def bfloat16_part(x):
    """The leading eight significand bits of float32 x, as float32; infinities and NaN are kept."""
    bits = x.to(tl.int32, bitcast=True)
    part = (bits & -65536).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, part)


@triton.jit(do_not_specialize=["M"])
def arrange(
    x,
    out,
    row_scale,
    M,
    K,
    x_stride,
    width,
    piece_stride,
    KIND: tl.constexpr,
    MANT: tl.constexpr,
    LOW: tl.constexpr,
    TOP: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Fills `out`, PIECES times (M, width) bfloat16 whose sum is the quantized x; zero from K on.

    x           (M, K) float, rows x_stride apart
    row_scale   (M,) float32, for KIND "fp8": out is then in units of it
    KIND        "none", "mx" (of MANT mantissa bits, exponents LOW..TOP) or "fp8"
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    address = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    if KIND == "mx":
        value = mx_values(value, BM, BK, MANT, LOW, TOP)
    if KIND == "fp8":
        scale = tl.load(row_scale + row, mask=row < M, other=1.0)
        value = _fp8_values(value, scale[:, None])
        value = tl.where(inside, value, 0.0)  # zero over a scale of zero would be NaN
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    kept = (row < M)[:, None] & (column < width)[None, :]
    for _ in tl.static_range(PIECES):
        if PIECES == 1:
            part = value
        else:
            part = bfloat16_part(value)
            rest = value - part
            value = tl.where(rest != rest, 0.0, rest)  # inf - inf: all of it is in the first piece
        tl.store(target, part.to(tl.bfloat16), mask=kept)
        target += piece_stride  # not a multiple of it, which int32 might not hold


@triton.jit
def encode(
    x,
    codes,
    scales,
    M,
    K,
    x_stride,
    P,
    C,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """x as MXFP4 codes (M, P) uint8 and scale bytes (M, C) uint8, scale mode EVEN; zero from K on.

    P, C   K / 2 and K / 32, rounded up by the caller to whatever its tiles need

    A group with a NaN gets scale byte 255.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    address = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    groups = tl.reshape(value, (BM, BK // 32, 32))
    magnitude = tl.abs(groups)
    bad = tl.max((groups != groups).to(tl.int32), axis=2, keep_dims=True) != 0
    amax = tl.where(bad, 0.0, tl.max(magnitude, axis=2, keep_dims=True))
    exponent = mx_exponent(amax, 1, 2)
    rounded = nearest(magnitude * power_of_two(-exponent), 1, 0, 6.0)
    # 0, .5, 1, 1.5, 2, 3, 4, 6 are codes 0..7: bits 22.. of value + 1 ulp steps of its binade
    code = tl.where(
        rounded < 2.0, rounded * 2.0, tl.where(rounded < 4.0, rounded + 2.0, rounded * 0.5 + 4.0)
    ).to(tl.int32)
    negative = (groups.to(tl.int32, bitcast=True) >> 31) & 8
    code = tl.reshape(code | negative, (BM, BK // 2, 2))
    low, high = tl.split(code)
    byte = (low | high << 4).to(tl.uint8)
    packed_column = tl.program_id(1) * (BK // 2) + tl.arange(0, BK // 2)
    kept = (row < M)[:, None] & (packed_column < P)[None, :]
    tl.store(codes + row.to(tl.int64)[:, None] * P + packed_column[None, :], byte, mask=kept)
    scale = tl.reshape(tl.where(bad, 255, exponent + 127), (BM, BK // 32)).to(tl.uint8)
    group = tl.program_id(1) * (BK // 32) + tl.arange(0, BK // 32)
    kept = (row < M)[:, None] & (group < C)[None, :]
    tl.store(scales + row.to(tl.int64)[:, None] * C + group[None, :], scale, mask=kept)
