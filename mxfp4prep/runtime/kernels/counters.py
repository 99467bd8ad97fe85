"""Zeroed counters for products whose columns are split over programs."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

POOL = 1 << 20
"""Counters per device, 4 MiB. A captured launch keeps its own for ever, since its graph may be
replayed beside anything; others share theirs per stream."""

SHARE = 1 << 13
"""Counters of a stream."""

_pools: dict[torch.device, Pool] = {}
_lock = threading.Lock()


class Pool:
    """The counters of one device. Every kernel leaves those that it used at zero."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(POOL, dtype=torch.int32, device=device)
        if device.type == "cuda":  # other streams take from it too, and do not wait for this one
            torch.cuda.current_stream(device).synchronize()
        self.used = 0
        self.streams: dict[int, int] = {}

    def take(self, count: int) -> Tensor | None:
        if self.used + count > POOL:
            return None
        self.used += count
        return self.tensor[self.used - count : self.used]


def counters(count: int, device: torch.device) -> Tensor:
    """`count` counters that are zero and that no other launch under way uses: int32."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    with _lock:
        found = _from_pool(count, device, capturing)
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found


def _from_pool(count: int, device: torch.device, capturing: bool) -> Tensor | None:
    pool = _pools.get(device)
    if pool is None and not capturing:
        pool = _pools[device] = Pool(device)
    if pool is None:
        return None
    if capturing:
        return pool.take(count)
    if count > SHARE:
        return None
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if stream not in pool.streams and pool.take(SHARE) is not None:
        pool.streams[stream] = pool.used - SHARE
    if stream not in pool.streams:
        return None
    start = pool.streams[stream]
    return pool.tensor[start : start + count]
