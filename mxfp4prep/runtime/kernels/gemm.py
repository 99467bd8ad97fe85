"""The GEMM kernels: activations times stored MXFP4 weights, dense or grouped by expert.

`few` is for a handful of rows, where the weights' bytes decide: the product is taken transposed, so
that decoded weights go to the matrix units straight from the registers they were decoded in. `many`
is for more rows: weights are decoded in the order they were read in and go to the matrix units
through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4prep.runtime.kernels.tiles import decoded


@triton.jit
def rows_of_block(block_rows, block_expert, block, top, GROUPED: tl.constexpr, BM: tl.constexpr):
    """Rows of out and of x that a block takes, and its expert (without a bank: any)."""
    m = block * BM + tl.arange(0, BM)
    source = m
    expert = block
    if GROUPED:
        m = tl.load(block_rows + m)
        source = m // top
        expert = tl.load(block_expert + block)
    return m, source, expert


@triton.jit
def finish(
    acc,
    out,
    bias,
    row_scale,
    partial,
    counters,
    m,
    n,
    M,
    N,
    tile,
    BIAS: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Sums up the splits of K, scales, adds the bias and writes rows m, columns n of `out`.

    Each program of a tile leaves its partial sums in `partial`; the one that comes last adds them
    in the order of the splits, so that a result does not depend on who was last, and sets the
    tile's counter back to zero for the next launch.
    """
    last = True
    if SPLITS > 1:
        inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        place = partial + tile.to(tl.int64) * (SPLITS * BM * BN) + inside
        tl.store(place + tl.program_id(1).to(tl.int64) * (BM * BN), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        last = arrived == SPLITS - 1
        if last:
            acc = tl.load(place, cache_modifier=".cg")  # others wrote it: not from L1
            for split in tl.static_range(1, SPLITS):
                acc += tl.load(place + split * (BM * BN), cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        if ROW_SCALE:
            acc *= tl.load(row_scale + m, mask=m < M, other=0.0)[:, None]
        if BIAS:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        address = out + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(address, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M", "steps", "top", "E"])
def few(
    x,
    weight,
    scale,
    bias,
    row_scale,
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
    piece_stride,
    steps,
    top,
    E,
    PIECES: tl.constexpr,
    TILED: tl.constexpr,
    SCALES: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ODD_K: tl.constexpr,
    BIAS: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPED: tl.constexpr,
    PTX: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[m, n] = row_scale[m] * sum over k of x[m, k] * w[n, k], + bias[n].

    x        PIECES times (M, x_stride) int32, piece_stride apart: each two bfloat16 of a row, zero
             from K on; x is the sum of the pieces
    N, K     rows and columns of the weights that count, the others are padding; NS, P and C are
             the stored matrices' rows, byte columns and groups
    steps    tiles of BK columns that a program takes; SPLITS programs share a tile of out
    GROUPED  rows of x and out are picked: block b takes rows `block_rows[b * BM + i] // top` of x,
             writes rows `block_rows[...]` of out (those of M and more are padding), and multiplies
             by matrix `block_expert[b]` of the bank's E; a block of another number is nobody's
    WIDE     multiply in float32, for Triton's interpreter, which has no bfloat16
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    BP: tl.constexpr = BK // 2
    x_row = x + source.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        column = start + step * BK
        even, odd = decoded(
            weight, scale, row, column, N, NS, K, P, C,
            TILED, False, SCALES, WHOLE_N, WHOLE_K, ODD_K, PTX, BN, BK,
        )  # fmt: skip
        address = x_row + (column // 2 + tl.arange(0, BP))[None, :]
        for piece in tl.static_range(PIECES):
            word = tl.load(
                address + tl.full((), piece, tl.int64) * piece_stride,
                mask=(m < M)[:, None],
                other=0,
            )
            low = (word & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
            acc = _product(even, tl.trans(low), acc, WIDE)
            acc = _product(odd, tl.trans(high), acc, WIDE)
    finish(
        tl.trans(acc), out, bias, row_scale, partial, counters, m, row + tl.arange(0, BN), M, N,
        tile, BIAS, ROW_SCALE, SPLITS, BM, BN,
    )  # fmt: skip


@triton.jit
def _product(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit(do_not_specialize=["M", "steps", "top", "E"])
def many(
    x,
    weight,
    scale,
    bias,
    row_scale,
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
    piece_stride,
    steps,
    top,
    E,
    PIECES: tl.constexpr,
    TILED: tl.constexpr,
    SCALES: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ODD_K: tl.constexpr,
    BIAS: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPED: tl.constexpr,
    PTX: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `few`, with x PIECES times (M, x_stride) bfloat16."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    acc = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        column = start + step * BK
        even, odd = decoded(
            weight, scale, row, column, N, NS, K, P, C,
            TILED, True, SCALES, WHOLE_N, WHOLE_K, ODD_K, PTX, BN, BK,
        )  # fmt: skip
        weights = tl.reshape(tl.join(even, odd), (BN, BK))
        k = column + tl.arange(0, BK)
        inside = (m < M)[:, None]
        if not WHOLE_K:
            inside = inside & (k < K)[None, :]
        for piece in tl.static_range(PIECES):
            first = x_row + tl.full((), piece, tl.int64) * piece_stride
            part = tl.load(first + k[None, :], mask=inside, other=0.0)
            acc = _product(part, tl.trans(weights), acc, WIDE)
    finish(
        acc, out, bias, row_scale, partial, counters, m, row + tl.arange(0, BN), M, N,
        tile, BIAS, ROW_SCALE, SPLITS, BM, BN,
    )  # fmt: skip
