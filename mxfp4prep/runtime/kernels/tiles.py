"""Tiles of stored weights and scales: where their bytes lie, and how codes become numbers.

A tile is BN rows by BK columns. Its codes come as (BN, BK / 2) bytes in logical order, whatever the
stored layout. A byte holds two neighbouring columns; they are kept apart as two (BN, BK / 2)
arrays, `even` and `odd`, because putting them next to each other would cost a move between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

SUBNORMAL_STEP = tl.constexpr(2.0**126)
"""What unpacked codes are multiplied by: their three magnitude bits are put where bfloat16 and
float32 have the last two exponent bits and the first mantissa bit, so a code 1 is subnormal."""


@triton.jit
def load_codes(
    weight,
    row,
    column,
    N,
    K,
    P,
    TILED: tl.constexpr,
    BY_ROWS: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ODD_K: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    """The codes of a tile, (BN, BP) uint8 in logical order: zero from K on; for rows from N on,
    whose products nobody keeps, those of the last row or strip again.

    row, column   the tile's first row and byte column
    P             byte columns of the stored matrix
    BY_ROWS       which threads read a tiled weight: neighbours along a row, which is the order that
                  a product's second operand is written to shared memory in; otherwise neighbours in
                  memory, which takes fewer cache lines
    """
    columns = column + tl.arange(0, BP)
    if TILED and not BY_ROWS:  # strips of 16 rows, chunks of 16 columns: 256 contiguous bytes
        strip = row // 16 + tl.arange(0, BN // 16)
        if not WHOLE_N:
            strip = tl.minimum(strip, (N - 1) // 16)
        chunk = column + tl.arange(0, BP // 16) * 16
        byte = tl.arange(0, 256)
        start = strip.to(tl.int64)[:, None] * P * 16 + chunk[None, :] * 16
        address = weight + start[:, :, None] + byte[None, None, :]
        if WHOLE_K:
            stored = tl.load(address)
        else:
            place = chunk[None, :, None] + (byte % 16)[None, None, :]
            stored = tl.load(address, mask=place * 2 < K, other=0)
        stored = tl.reshape(stored, (BN // 16, BP // 16, 16, 16))
        codes = tl.reshape(tl.permute(stored, (0, 2, 1, 3)), (BN, BP))
    else:
        rows = row + tl.arange(0, BN)
        if not WHOLE_N:
            rows = tl.minimum(rows, N - 1)
        if TILED:
            tile = (rows // 16).to(tl.int64)[:, None] * P * 16 + (rows % 16 * 16)[:, None]
            address = weight + tile + (columns // 16 * 256 + columns % 16)[None, :]
            # 16 bytes of a row are contiguous, which the compiler does not see through divisions
            address = tl.max_contiguous(tl.multiple_of(address, (1, 16)), (1, 16))
        else:
            address = weight + rows.to(tl.int64)[:, None] * P + columns[None, :]
        if WHOLE_K:
            codes = tl.load(address)
        else:
            codes = tl.load(address, mask=(columns * 2 < K)[None, :], other=0)
    if ODD_K:  # the last byte's high code is padding
        codes = tl.where((columns == K // 2)[None, :], codes & 15, codes)
    return codes


@triton.jit
def load_scales(
    scale,
    row,
    group,
    N,
    NS,
    K,
    C,
    LAYOUT: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """The scale bytes of a tile, (BN, BC) uint8.

    row, group   the tile's first row and group of 32 columns
    LAYOUT       "tile32x8" (BN % 32 == 0, BC 2, 4 or a multiple of 8), "transposed" or "raw"
    NS, C        rows and columns of the stored matrix; from K on the byte is 0, which is 2^-127 and
                 not NaN
    """
    rows = row + tl.arange(0, BN)
    groups = group + tl.arange(0, BC)
    if LAYOUT == "tile32x8":
        bytes_ = _tiled_scales(scale, row, group, N, C, WHOLE_N, WHOLE_K, BN, BC)
        if not WHOLE_K:
            bytes_ = tl.where((groups * 32 < K)[None, :], bytes_, 0)
    elif LAYOUT == "transposed":
        address = scale + groups.to(tl.int64)[:, None] * NS + rows[None, :]
        if WHOLE_N and WHOLE_K:
            bytes_ = tl.trans(tl.load(address))
        else:
            mask = (groups * 32 < K)[:, None] & (rows < N)[None, :]
            bytes_ = tl.trans(tl.load(address, mask=mask, other=0))
    else:
        if not WHOLE_N:
            rows = tl.minimum(rows, N - 1)
        address = scale + rows.to(tl.int64)[:, None] * C + groups[None, :]
        if WHOLE_K:
            bytes_ = tl.load(address)
        else:
            bytes_ = tl.load(address, mask=(groups * 32 < K)[None, :], other=0)
    return bytes_


@triton.jit
def _tiled_scales(
    scale,
    row,
    group,
    N,
    C,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """(BN, BC) bytes of a scale in tile32x8: blocks in memory order, put right in registers."""
    BLOCKS: tl.constexpr = (BC + 7) // 8
    place = tl.arange(0, BN * BLOCKS * 8)
    band = row // 32 + place // (BLOCKS * 256)
    if not WHOLE_N:
        band = tl.minimum(band, (N - 1) // 32)
    within = group // 8 * 256 + place % (BLOCKS * 256)
    address = scale + band.to(tl.int64) * 32 * C + within
    if WHOLE_K:
        stored = tl.load(address)
    else:
        stored = tl.load(address, mask=within < C * 32, other=0)
    # of a 32 x 8 block: column % 4, row % 16, column // 4, row // 16
    stored = tl.reshape(stored, (BN // 32, BLOCKS, 4, 16, 2, 2))
    if BC < 8:  # half a block
        halves = tl.reshape(tl.permute(stored, (0, 5, 3, 1, 2, 4)), (BN, 4, 2))
        low, high = tl.split(halves)
        bytes_ = tl.where(group // 4 % 2 == 0, low, high)
        if BC == 2:  # a quarter
            quarters = tl.permute(tl.reshape(bytes_, (BN, 2, 2)), (0, 2, 1))
            low, high = tl.split(quarters)
            bytes_ = tl.where(group // 2 % 2 == 0, low, high)
    else:
        bytes_ = tl.reshape(tl.permute(stored, (0, 5, 3, 1, 4, 2)), (BN, BC))
    return bytes_


UNPACK_PTX = tl.constexpr("""
{
.reg .b32 w, t;
prmt.b32 w, $4, 0, 0x3120;
and.b32 t, w, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 $0, t, 0x81C081C0;
and.b32 t, w, 0x00F000F0;
mul.lo.u32 t, t, 0x0104;
and.b32 $2, t, 0x81C081C0;
shr.u32 w, w, 8;
and.b32 t, w, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 $1, t, 0x81C081C0;
and.b32 t, w, 0x00F000F0;
mul.lo.u32 t, t, 0x0104;
and.b32 $3, t, 0x81C081C0;
}
""")
"""The four bytes in $4 to their low codes in $0, $1 and their high codes in $2, $3, two bfloat16 a
register. With the middle bytes exchanged, codes of neighbouring bytes stand half a register apart;
one multiplication then puts a code's sign at bit 15 (31) and its other three bits at bits 6 to 8
(22 to 24), and what else it makes is masked off: 1.75 instructions a value."""


@triton.jit
def _unpack_ptx(codes, scales, BN: tl.constexpr, BC: tl.constexpr):
    """`even` and `odd` in the instructions of NVIDIA's GPUs, two values a register."""
    even, odd = tl.inline_asm_elementwise(
        UNPACK_PTX,
        "=r,=r,=r,=r,r",
        [codes],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    bits = tl.maximum(scales.to(tl.int32) << 7, 0x0040)  # byte 0 is 2^-127, subnormal
    bits = tl.where(bits == 0x7F80, 0x7FC0, bits).to(tl.uint16)  # byte 255 is NaN
    factor = _spread(bits.to(tl.bfloat16, bitcast=True), BN, BC)
    step = tl.full((1, 1), SUBNORMAL_STEP, tl.bfloat16)  # two factors: one would leave the range
    return (even * step) * factor, (odd * step) * factor


@triton.jit
def scale_values(byte):
    """2^(byte - 127) as float32: byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = tl.maximum(byte.to(tl.int32) << 23, 1 << 22)
    return tl.where(bits == 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def code_values(code):
    """The values of E2M1 codes (int32, 0..15), times 2^-126, as float32."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _unpack(codes, scales, BN: tl.constexpr, BC: tl.constexpr):
    """`even` and `odd` by way of float32, for GPUs without bfloat16 arithmetic."""
    factor = _spread(scale_values(scales), BN, BC)
    codes = codes.to(tl.int32)
    even = code_values(codes & 15) * SUBNORMAL_STEP * factor
    odd = code_values(codes >> 4) * SUBNORMAL_STEP * factor
    return _upper_half(even), _upper_half(odd)


@triton.jit
def _upper_half(value):
    """float32 that bfloat16 holds, as bfloat16: nothing is rounded, so nothing is compared."""
    bits = value.to(tl.int32, bitcast=True) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _spread(scales, BN: tl.constexpr, BC: tl.constexpr):
    """(BN, BC) scales of 32 columns each -> (BN, 16 * BC), one per byte."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (BN, BC, 16)), (BN, BC * 16))


@triton.jit
def decoded(
    weight,
    scale,
    row,
    column,
    N,
    NS,
    K,
    P,
    C,
    TILED: tl.constexpr,
    BY_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    ODD_K: tl.constexpr,
    PTX: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile's numbers: `even` and `odd`, (BN, BK / 2) bfloat16.

    row, column   the tile's first row and column
    N, K          rows and columns of the matrix that count; zero from K on
    NS, P, C      the stored matrix' rows, byte columns and groups
    """
    BC: tl.constexpr = BK // 32
    codes = load_codes(
        weight, row, column // 2, N, K, P, TILED, BY_ROWS, WHOLE_N, WHOLE_K, ODD_K, BN, BK // 2
    )
    bytes_ = load_scales(scale, row, column // 32, N, NS, K, C, SCALES, WHOLE_N, WHOLE_K, BN, BC)
    if PTX:
        return _unpack_ptx(codes, bytes_, BN, BC)
    return _unpack(codes, bytes_, BN, BC)
