"""The GEMM kernel for GPUs that multiply MXFP4 as it is (gfx950, Blackwell): tl.dot_scaled."""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4prep.runtime.kernels.gemm import finish, rows_of_block
from mxfp4prep.runtime.kernels.tiles import load_codes, load_scales


@triton.jit(do_not_specialize=["M", "steps", "top", "E"])
def scaled(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    partial,
    counters,
    block_rows,
    block_expert,
    M,
    N,
    NS,
    K,
    P,
    C,
    x_stride,
    x_groups,
    steps,
    top,
    E,
    ENCODED: tl.constexpr,
    TILED: tl.constexpr,
    SCALES: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ODD_K: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As gemm.many, with the weights as they are stored and

    x        ENCODED: (M, x_stride) uint8 and x_scale (M, x_groups) uint8, as arrange.encode makes
             them, zero from K on; otherwise (M, x_stride) bfloat16 and no scales
    """
    BP: tl.constexpr = BK // 2
    BC: tl.constexpr = BK // 32
    blocks_n = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    row = tile % blocks_n * BN
    m, source, expert = rows_of_block(block_rows, block_expert, tile // blocks_n, top, GROUPED, BM)
    if GROUPED:
        if (expert < 0) | (expert >= E):
            return
        weight += expert.to(tl.int64) * NS * P
        scale += expert.to(tl.int64) * NS * C
        bias += expert.to(tl.int64) * NS
    start = tl.program_id(1) * (steps * BK)
    x_row = x + source.to(tl.int64)[:, None] * x_stride
    scale_row = x_scale + source.to(tl.int64)[:, None] * x_groups
    m_ok = (m < M)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        column = start + step * BK
        codes = load_codes(
            weight, row, column // 2, N, K, P, TILED, True, WHOLE_N, WHOLE_K, ODD_K, BN, BP
        )
        bytes_ = load_scales(
            scale, row, column // 32, N, NS, K, C, SCALES, WHOLE_N, WHOLE_K, BN, BC
        )
        if ENCODED:
            left = tl.load(x_row + (column // 2 + tl.arange(0, BP))[None, :], mask=m_ok, other=0)
            groups = column // 32 + tl.arange(0, BC)
            left_scale = tl.load(scale_row + groups[None, :], mask=m_ok, other=0)
            acc = tl.dot_scaled(left, left_scale, "e2m1", tl.trans(codes), bytes_, "e2m1", acc)
        else:
            k = column + tl.arange(0, BK)
            left = tl.load(x_row + k[None, :], mask=m_ok & (k < K)[None, :], other=0.0)
            acc = tl.dot_scaled(left, None, "bf16", tl.trans(codes), bytes_, "e2m1", acc)
    finish(
        acc, out, bias, x, partial, counters, m, row + tl.arange(0, BN), M, N,
        tile, BIAS, False, SPLITS, BM, BN,
    )  # fmt: skip
