"""Names that differ only in numbers, as one: `model.layers.{0..93}.mlp.experts.{0..127}.w2`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_SPANS = 4
"""Runs of numbers that are spelled out before the rest becomes `...`."""

# A whole dotted part that is a number as Python prints it: 7, not 07.
NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")


@dataclass(slots=True)
class Family(Generic[T]):
    """Items whose names share `literals` around their numbers; `first` stands for all of them.

    numbers   for each number in the name, the digits that occur there
    """

    first: T
    literals: tuple[str, ...]
    numbers: tuple[dict[str, None], ...]
    count: int = 1

    @property
    def name(self) -> str:
        """The names as one, each number spelled as the runs that occur."""
        pieces = [self.literals[0]]
        for seen, literal in zip(self.numbers, self.literals[1:], strict=True):
            pieces += (spell_runs([int(digits) for digits in seen]), literal)
        return "".join(pieces)


def gather(items: Iterable[tuple[str, Hashable, T]]) -> list[Family[T]]:
    """Families of items (name, key, item) in order of first appearance.

    Items of one family have the same name but for its numbers, and equal keys.
    """
    split = NUMBER.split
    families: dict[tuple[Hashable, ...], Family[T]] = {}
    for name, key, item in items:
        pieces = split(name)
        literals = tuple(pieces[::2])
        family = families.get((literals, key))
        if family is None:
            numbers = tuple({digits: None} for digits in pieces[1::2])
            families[(literals, key)] = Family(item, literals, numbers)
            continue
        family.count += 1
        for seen, digits in zip(family.numbers, pieces[1::2], strict=True):
            seen[digits] = None
    return list(families.values())


def spell_runs(numbers: Sequence[int]) -> str:
    """`7`, `{0..93}` or `{0..2,5,7..9}`; past MAX_SPANS runs the middle is `...`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return str(runs[0][0])
    spelled = [_spell(first, last) for first, last in runs]
    if len(spelled) > MAX_SPANS:
        spelled[MAX_SPANS - 1 : -1] = ["..."]
    return "{" + ",".join(spelled) + "}"


def _spell(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first},{last}" if last == first + 1 else f"{first}..{last}"
