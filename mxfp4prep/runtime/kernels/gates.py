"""What stands between an expert's two GEMMs, in one kernel: gate, quantization, arrangement."""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4prep.runtime.kernels.arrange import bfloat16_part, mx_values


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activated(g, up, ACTIVATION: tl.constexpr):
    """act(gate) * up; ACTIVATION is a name of runtime.gating.GATES."""
    if ACTIVATION == "silu":
        act = g * _sigmoid(g)
    elif ACTIVATION == "swigluoai":
        act = g * _sigmoid(1.702 * g)
        up = up + 1.0
    elif ACTIVATION == "gelu":
        act = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:  # gelu_tanh: tanh(u) = 2 * sigmoid(2 u) - 1
        u = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        act = g * _sigmoid(2.0 * u)
    return act * up


@triton.jit(do_not_specialize=["M"])
def gate(
    both,
    out,
    M,
    both_stride,
    up_start,
    K,
    width,
    piece_stride,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    MANT: tl.constexpr,
    LOW: tl.constexpr,
    TOP: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Fills `out`, PIECES times (M, width) whose sum is act(gate) * up, quantized; zero from K on.

    both       (M, both_stride) float32: gate and up, from columns 0 and up_start on, or INTERLEAVED
    K          values that are no padding
    KIND       "none" or "mx", as in arrange
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    start = tl.program_id(1) * BK
    column = start + tl.arange(0, BK)
    inside = (row < M)[:, None] & (column < K)[None, :]
    source = both + row.to(tl.int64)[:, None] * both_stride
    if INTERLEAVED:
        wide = 2 * start + tl.arange(0, 2 * BK)
        mask = (row < M)[:, None] & (wide < 2 * K)[None, :]
        values = tl.load(source + wide[None, :], mask=mask, other=0.0)
        g, up = tl.split(tl.reshape(values, (BM, BK, 2)))
    else:
        g = tl.load(source + column[None, :], mask=inside, other=0.0)
        up = tl.load(source + (up_start + column)[None, :], mask=inside, other=0.0)
    if LIMITED:  # as torch's clamp: NaN stays
        g = tl.where(g > limit, limit, g)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = tl.where(inside, _activated(g, up, ACTIVATION), 0.0)
    if KIND == "mx":
        value = mx_values(value, BM, BK, MANT, LOW, TOP)
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    kept = (row < M)[:, None] & (column < width)[None, :]
    for piece in tl.static_range(PIECES):
        if PIECES == 1:
            part = value
        else:
            part = bfloat16_part(value) if piece < PIECES - 1 else value
            rest = value - part
            value = tl.where(rest != rest, 0.0, rest)  # inf - inf: all of it is in the first piece
        tl.store(target + piece * piece_stride, part.to(out.dtype.element_ty), mask=kept)
