"""Staging: how bytes get from host memory to a device while the host goes on reading.

To a GPU they go through pinned buffers: while the device fetches one, the next is filled, and a
buffer is filled again only after its copies have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mxfp4prep.runtime import memory

BUFFERS = 2
"""Staging buffers of each thread: one is filled while the other is fetched."""

Pair = tuple[Tensor, Tensor]
"""A target, and what belongs there, of the same shape."""

HOST = torch.device("cpu")


class Lane(NamedTuple):
    """How bytes get from host memory to their place while the host goes on reading.

    buffer   nbytes -> (nbytes,) uint8 in host memory
    send     begins to copy pairs; returns a function that waits until they have all arrived
    direct   the places are in host memory themselves, to be read into without a buffer
    """

    buffer: Callable[[int], Tensor]
    send: Callable[[Sequence[Pair]], Callable[[], None]]
    direct: bool = False


def lane_to(device: torch.device) -> Lane:
    """A lane to a device, to be asked for on the thread whose current stream made the targets."""
    return cuda_lane(device) if device.type == "cuda" else host_lane()


def host_lane() -> Lane:
    """Copies at once: there is nothing to overlap on one kind of memory."""

    def send(pairs: Sequence[Pair]) -> Callable[[], None]:
        for target, piece in pairs:
            target.copy_(piece)
        return _nothing

    return Lane(lambda nbytes: memory.empty((nbytes,), HOST), send, direct=True)


def cuda_lane(device: torch.device) -> Lane:
    """Pinned buffers and a stream of their own.

    The stream begins behind the current one: what ran there before may still use the memory that
    the targets were given.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))

    def send(pairs: Sequence[Pair]) -> Callable[[], None]:
        with torch.cuda.stream(stream):
            for target, piece in pairs:
                target.copy_(piece, non_blocking=True)
            # blocking: to wait must not take a core from those who read
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(stream)
        return arrived.synchronize

    def buffer(nbytes: int) -> Tensor:
        with torch.cuda.device(stream.device):  # another device would get a context too
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    return Lane(buffer, send)


def _nothing() -> None:
    pass


class _Slot:
    """A staging buffer, what was last sent from it, and how to wait for that."""

    __slots__ = ("buffer", "pairs", "wait")

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.pairs: Sequence[Pair] = ()
        self.wait: Callable[[], None] = _nothing


class Ring:
    """The staging buffers of one thread, filled in turn.

    capacity   bytes of a buffer, made when it is first needed; a larger one where more is asked for
    """

    def __init__(self, lane: Lane, capacity: int, count: int = BUFFERS) -> None:
        self._lane, self._capacity = lane, capacity
        self._slots = [_Slot() for _ in range(count)]
        self._turn = 0

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 that may be overwritten: all that was sent from it has arrived."""
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        self._settle(slot)
        if slot.buffer is None or slot.buffer.numel() < nbytes:
            slot.buffer = None  # let go of the old one first
            slot.buffer = self._lane.buffer(max(nbytes, self._capacity))
        return slot.buffer[:nbytes]

    def send(self, pairs: Sequence[Pair]) -> None:
        """Begins to copy pairs; pieces lie in what `take` gave last, or in memory of their own."""
        slot = self._slots[self._turn]
        self._settle(slot)
        slot.pairs, slot.wait = pairs, self._lane.send(pairs)

    def drain(self) -> None:
        """Returns once everything has arrived."""
        for slot in self._slots:
            self._settle(slot)

    def _settle(self, slot: _Slot) -> None:
        slot.wait()
        slot.wait, slot.pairs = _nothing, ()
