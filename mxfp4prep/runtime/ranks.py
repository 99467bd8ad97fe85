"""Which rank of how many: whole numbers, and none that is left to be guessed."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import NamedTuple, SupportsIndex

from mxfp4prep.errors import UsageError


class Ranks(NamedTuple):
    """The rank among those that cut layers, and among those that whole experts are spread over."""

    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int

    @classmethod
    def make(cls, tp_rank: object, tp_size: object, ep_rank: object, ep_size: object) -> Ranks:
        """The ranks, as `load` is told them; None for a rank is 0 where there is only one.

        Raises UsageError for what is no whole number, and for a missing or impossible rank.
        """
        return cls(*_rank("tp", tp_rank, tp_size), *_rank("ep", ep_rank, ep_size))


def _rank(kind: str, rank: object, size: object) -> tuple[int, int]:
    ranks = _whole(f"{kind}_size", size)
    name = f"{kind}_rank"
    if rank is None and ranks > 1:
        raise UsageError(
            name,
            f"not named, and {kind}_size {ranks} has more than one",
            expected=f"0 <= {name} < {ranks}",
            hint=f"add {name}=..., this process' own: without it every process would be rank 0",
        )
    mine = 0 if rank is None else _whole(name, rank)
    if ranks < 1 or not 0 <= mine < ranks:
        raise UsageError(
            "load",
            "no such rank",
            found=f"{name} {mine}, {kind}_size {ranks}",
            expected=f"0 <= {name} < {kind}_size",
            hint=f"{kind}_size counts the ranks, {name} is this process' own, from 0 on",
        )
    return mine, ranks


def _whole(name: str, value: object) -> int:
    number = None
    with suppress(TypeError):  # of a tensor, say, that has no whole number
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            number = index(value)
    if number is None:
        raise UsageError(
            name,
            "not a whole number",
            found=repr(value),
            expected="an int",
            hint=f"from the environment: {name}=int(...)",
        )
    return number
