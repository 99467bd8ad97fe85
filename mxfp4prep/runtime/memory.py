"""Memory for weights, uninitialised: on huge pages on the host, and seen there as bytes."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HUGE_PAGE = 2 << 20
"""Bytes; tensors from this size on are put on huge pages.

Measured on 2 cores of an AMD EPYC, 2 GiB from the page cache into new memory: 3.8 GB/s on pages of
4 KiB, each of which is a fault; 11.9 GB/s on huge ones. Transparent huge pages on x86-64 and on
Arm with pages of 4 KiB have 2 MiB.
"""


def empty(shape: Sequence[int], device: torch.device) -> Tensor:
    """An uninitialised uint8 tensor, contiguous, on the CPU on huge pages where Linux has them."""
    nbytes = math.prod(shape)
    if device.type != "cpu" or nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=torch.uint8, device=device)
    # Memory of no file, so nothing can shrink it. Unlike malloc's it begins on a page, from
    # Linux 6.7 on a huge one. The tensor keeps it alive.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(tuple(shape))


def view(tensor: Tensor, nbytes: int | None = None) -> memoryview:
    """A host tensor's memory from its first element on; valid while the tensor lives.

    nbytes   all of a contiguous tensor by default
    """
    length = tensor.nbytes if nbytes is None else nbytes
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * length).from_address(tensor.data_ptr())).cast("B")
