"""Names that say the same, together: those that differ only in their numbers are one line."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mxfp4prep.report.families import gather

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Alike(Generic[K]):
    """`names` that differ only in their numbers, with one key; `name` stands for them."""

    name: str
    names: list[str]
    key: K


def gather_alike(items: Iterable[tuple[str, K]]) -> list[Alike[K]]:
    """Items (name, key) in order of first appearance, alike ones as one."""
    members: dict[tuple[tuple[str, ...], K], list[str]] = {}
    for name, key in items:
        (single,) = gather([(name, None, None)])
        members.setdefault((single.literals, key), []).append(name)
    found = []
    for (_, key), names in members.items():
        (family,) = gather((name, None, None) for name in names)
        found.append(Alike(family.name, names, key))
    return found
