"""Stored MXFP4 weights to bfloat16, for products large enough to be worth the memory."""

from __future__ import annotations

import triton
import triton.language as tl

from mxfp4prep.runtime.kernels.tiles import decoded


@triton.jit
def expand(
    weight,
    scale,
    out,
    N,
    NS,
    K,
    P,
    C,
    TILED: tl.constexpr,
    SCALES: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ODD_K: tl.constexpr,
    PTX: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out (N, K) bfloat16: the numbers of a stored matrix, exactly."""
    row = tl.program_id(0) * BN
    column = tl.program_id(1) * BK
    even, odd = decoded(
        weight, scale, row, column, N, NS, K, P, C,
        TILED, True, SCALES, WHOLE_N, WHOLE_K, ODD_K, PTX, BN, BK,
    )  # fmt: skip
    value = tl.reshape(tl.join(even, odd), (BN, BK))
    rows = row + tl.arange(0, BN)
    columns = column + tl.arange(0, BK)
    address = out + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(address, value, mask=(rows < N)[:, None] & (columns < K)[None, :])
