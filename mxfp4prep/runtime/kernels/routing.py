"""The kernels around the grouped GEMMs of an MoE layer: who goes where, and the weighted sum."""

from __future__ import annotations

import triton
import triton.language as tl

NOBODY = tl.constexpr(1 << 30)
"""The pair number in a row of a block that no pair has: more than there are pairs."""


@triton.jit
def _chosen(ids, start, end, E, CHUNK: tl.constexpr):
    """The experts of pairs from `start` on, (CHUNK,) int32; E from `end` on and for no expert."""
    pair = start + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < end, other=0)
    here = (pair < end) & (expert >= 0) & (expert < E)
    return tl.where(here, expert.to(tl.int32), E)


@triton.jit(do_not_specialize=["pairs", "span"])
def count_pairs(
    ids,
    counts,
    pairs,
    span,
    E,
    PDL: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """counts (parts, EXPERTS) int32: how many of each part's `span` pairs go to each expert."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.program_id(0) * span
    total = tl.zeros((EXPERTS,), tl.int32)
    for place in range(start, tl.minimum(start + span, pairs), CHUNK):
        total += tl.histogram(_chosen(ids, place, pairs, E, CHUNK), EXPERTS)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=["pairs", "span", "parts", "blocks"])
def list_pairs(
    ids,
    counts,
    rows,
    block_expert,
    pairs,
    span,
    parts,
    blocks,
    E,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lists an expert's (token, slot) pairs, in order, in blocks of BM; one program per expert and
    part of the pairs, and one more expert that has none, for the blocks that nobody needs.

    ids            (pairs,) the expert of each pair; outside 0..E-1: of none, in no block
    counts         as count_pairs leaves them; not COUNTED: unused, there is one part, of one CHUNK
    rows           (blocks * BM,) int32, filled with pair numbers; NOBODY where a block has room
    block_expert   (blocks,) int32, filled with the expert of each block, -1 after the last one
    span           pairs of a part, a multiple of CHUNK
    EXPERTS        a power of two above E
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mine = tl.program_id(0)
    part = tl.program_id(1)
    every = tl.arange(0, EXPERTS)
    before = 0
    if COUNTED:
        total = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, parts, 16):
            number = first + tl.arange(0, 16)
            address = counts + number[:, None] * EXPERTS + every[None, :]
            count = tl.load(address, mask=(number < parts)[:, None], other=0)
            total += tl.sum(count, axis=0)
            earlier = (number < part)[:, None] & (every == mine)[None, :]
            before += tl.sum(tl.where(earlier, count, 0))
    else:
        total = tl.histogram(_chosen(ids, 0, pairs, E, CHUNK), EXPERTS)
    needed = tl.where(every < E, (total + (BM - 1)) // BM, 0)
    own = tl.sum(tl.where(every == mine, total, 0))
    first_block = tl.sum(tl.where(every < mine, needed, 0))
    if mine == E:
        for place in range(first_block + part * CHUNK, blocks, parts * CHUNK):
            block = place + tl.arange(0, CHUNK)
            tl.store(block_expert + block, tl.full((CHUNK,), -1, tl.int32), mask=block < blocks)
    else:
        base = first_block * BM + before
        start = part * span
        for place in range(start, tl.minimum(start + span, pairs), CHUNK):
            hit = (_chosen(ids, place, pairs, E, CHUNK) == mine).to(tl.int32)
            target = base + tl.cumsum(hit, axis=0) - 1
            tl.store(rows + target, place + tl.arange(0, CHUNK), mask=hit != 0)
            base += tl.sum(hit)
        if part == 0:
            own_blocks = (own + (BM - 1)) // BM
            room = own + tl.arange(0, BM)
            free = room < own_blocks * BM
            tl.store(rows + first_block * BM + room, tl.full((BM,), NOBODY, tl.int32), mask=free)
            for place in range(0, own_blocks, CHUNK):
                block = place + tl.arange(0, CHUNK)
                value = tl.full((CHUNK,), 0, tl.int32) + mine
                tl.store(block_expert + first_block + block, value, mask=block < own_blocks)


@triton.jit
def combine(
    results,
    weights,
    ids,
    out,
    E,
    width,
    H,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out (tokens, H): for each token the sum over its slots of weight * result, in slot order.

    results   (tokens * TOP, width) float32; rows of pairs without an expert of 0..E-1 are not read
    width     columns that are no padding; the others become zero
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP):
        pair = token * TOP + slot
        expert = tl.load(ids + pair)
        here = (expert >= 0) & (expert < E)
        weight = tl.where(here, tl.load(weights + pair).to(tl.float32), 0.0)
        read = tl.where(here, width, 0)
        value = tl.load(results + pair * width + column, mask=column < read, other=0.0)
        total += value * weight
    total = tl.where(column < width, total, 0.0)  # a weight that is infinite or NaN times zero
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)
