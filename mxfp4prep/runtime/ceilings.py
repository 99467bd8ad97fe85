"""What a device can do at most, measured on it, and the time that a GEMM cannot be faster than."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from mxfp4prep.runtime.devices import cache_nbytes, free_nbytes
from mxfp4prep.runtime.timing import Timing, measure

if TYPE_CHECKING:
    from torch import Tensor

COPY_NBYTES = {"cpu": 256 << 20}
"""Bytes of the tensor that is copied to measure the bandwidth, but 4 caches at least."""
COPY_NBYTES_ELSEWHERE = 1 << 30

SQUARE = {"cpu": 1024}
"""Rows and columns of the bfloat16 matrices that are multiplied."""
SQUARE_ELSEWHERE = 8192

Bound = Literal["memory", "arithmetic"]


class Ceilings(NamedTuple):
    """bandwidth: bytes per second, read and written, of a copy that no cache holds · rate: bfloat16
    operations per second of a square matrix product, of which m * n * k is 2 * m * n * k. Both of
    the fastest run: what else the machine does moves no ceiling."""

    bandwidth: float
    rate: float


class Floor(NamedTuple):
    """The least time of a GEMM at a device's ceilings, and which of them it is."""

    microseconds: float
    bound: Bound


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copies a large tensor and multiplies two bfloat16 matrices on the device.

    Both tensors of a copy take at most half of what is free.
    """
    nbytes = max(COPY_NBYTES.get(device.type, COPY_NBYTES_ELSEWHERE), 4 * cache_nbytes(device))
    free = free_nbytes(device)
    nbytes = nbytes if free is None else max(1, min(nbytes, free // 4))
    copied = _copying(nbytes, device)
    size = SQUARE.get(device.type, SQUARE_ELSEWHERE)
    a, b = (random_bf16((size, size), device) for _ in range(2))
    multiplied = measure([lambda: a @ b], device)
    seconds = copied.fastest_us / 1e6, multiplied.fastest_us / 1e6
    return Ceilings(2 * nbytes / seconds[0], 2 * size**3 / seconds[1])


def _copying(nbytes: int, device: torch.device) -> Timing:
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return measure([lambda: target.copy_(source)], device)


def floor_of(nbytes: float, operations: float, ceilings: Ceilings) -> Floor:
    """The larger of the times that the bytes and the operations take at the ceilings.

    nbytes       what must move: weights and scales that are used, input and output, each once
    """
    moving, computing = nbytes / ceilings.bandwidth, operations / ceilings.rate
    if moving >= computing:
        return Floor(moving * 1e6, "memory")
    return Floor(computing * 1e6, "arithmetic")


def random_bf16(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Normal values of variance 1: zeros draw less power, and a GPU then clocks higher."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
