"""The kernels around the grouped GEMMs of an MoE layer: who goes where, and the weighted sum."""

from __future__ import annotations

import triton
import triton.language as tl

NOBODY = tl.constexpr(1 << 30)
"""The pair number in a row of a block that no pair has: more than there are pairs."""


@triton.jit
def _chosen(ids, start, end, E, CHUNK: tl.constexpr):
    """The experts of pairs from `start` on, (CHUNK,) int32; -1 from `end` on and for no expert."""
    pair = start + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < end, other=0)
    here = (pair < end) & (expert >= 0) & (expert < E)
    return tl.where(here, expert.to(tl.int32), -1)


@triton.jit
def _count(ids, start, end, E, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the pairs start..end go to each expert, (EXPERTS,) int32."""
    every = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for place in range(start, end, CHUNK):
        chosen = _chosen(ids, place, end, E, CHUNK)
        total += tl.sum((chosen[:, None] == every[None, :]).to(tl.int32), axis=0)
    return total


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
    """counts (programs, EXPERTS) int32: how many of a program's `span` pairs go to each expert."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.program_id(0) * span
    total = _count(ids, start, tl.minimum(start + span, pairs), E, EXPERTS, CHUNK)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=["pairs", "span", "blocks"])
def list_pairs(
    ids,
    counts,
    rows,
    block_expert,
    pairs,
    span,
    blocks,
    E,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lists the (token, slot) pairs of each expert, in order, in blocks of BM.

    ids            (pairs,) the expert of each pair; outside 0..E-1: of none, in no block
    counts         as count_pairs leaves them; not COUNTED: unused, each program counts all pairs
    rows           (blocks * BM,) int32, filled with pair numbers; NOBODY where a block has room
    block_expert   (blocks,) int32, filled with the expert of each block, -1 after the last one
    span           pairs that a program places
    EXPERTS        E rounded up to a power of two
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    every = tl.arange(0, EXPERTS)
    start = program * span
    end = tl.minimum(start + span, pairs)
    if COUNTED:
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for first_part in range(0, programs, 16):
            part = first_part + tl.arange(0, 16)
            address = counts + part[:, None] * EXPERTS + every[None, :]
            count = tl.load(address, mask=(part < programs)[:, None], other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where((part < program)[:, None], count, 0), axis=0)
    else:
        before = _count(ids, 0, start, E, EXPERTS, CHUNK)
        total = before + _count(ids, start, pairs, E, EXPERTS, CHUNK)
    needed = (total + BM - 1) // BM
    ends = tl.cumsum(needed, axis=0)
    base = (ends - needed) * BM
    place = base + before
    number = tl.arange(0, CHUNK)
    for position in range(start, end, CHUNK):
        chosen = _chosen(ids, position, end, E, CHUNK)
        hit = chosen[:, None] == every[None, :]
        earlier = (chosen[:, None] == chosen[None, :]) & (number[None, :] < number[:, None])
        target = tl.sum(tl.where(hit, place[None, :], 0), axis=1)
        target += tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(rows + target, position + number, mask=chosen >= 0)
        place += tl.sum(hit.to(tl.int32), axis=0)
    for room in range(program, BM, programs):
        free = total + room < needed * BM
        tl.store(rows + base + total + room, every * 0 + NOBODY, mask=free)
    last = tl.sum(needed, axis=0)
    for first_block in range(program * CHUNK, blocks, programs * CHUNK):
        block = first_block + number
        expert = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), axis=1)
        expert = tl.where(block < last, expert, -1)
        tl.store(block_expert + block, expert, mask=block < blocks)


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
