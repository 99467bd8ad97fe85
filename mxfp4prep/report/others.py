"""Modules whose weight is not MXFP4, thousands of them in few lines that still name each one.

Families for people leave out what is too long to read. These leave out nothing: a line stands for
every combination of the numbers in its name, so that another audit can be asked about one module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING

from mxfp4prep.report.families import NUMBER

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

# As `join_modules` writes numbers: `{0..93}`, `{0,2,5..7}`, or one that stands alone.
_NUMBERS = re.compile(r"(?<![^.])(\{[0-9.,]+\}|0|[1-9][0-9]{0,8})(?![^.])")
_RUN = re.compile(r"(0|[1-9][0-9]{0,8})(?:\.\.(0|[1-9][0-9]{0,8}))?")


def join_modules(dtypes: Mapping[str, str]) -> list[c.OtherDocument]:
    """Lines for `dtypes` (module -> dtype), in order of first appearance, none standing twice."""
    alike: dict[tuple[tuple[str, ...], str], set[tuple[int, ...]]] = {}
    for name, dtype in dtypes.items():
        # a name that has braces itself could be misread together with others
        pieces = [name] if "{" in name else NUMBER.split(name)
        numbers = tuple(map(int, pieces[1::2]))
        alike.setdefault((tuple(pieces[::2]), dtype), set()).add(numbers)
    return [
        {
            "name": _spell(literals, factors),
            "dtype": dtype,
            "count": math.prod(map(len, factors)),
        }
        for (literals, dtype), points in alike.items()
        for factors in _products(points)
    ]


def each_module(line: c.OtherDocument) -> Iterator[str]:
    """Every module that a line of `join_modules` stands for.

    Raises ValueError, before the first, where the name does not stand for `count` modules.
    """
    if line["count"] == 1:
        yield line["name"]
        return
    pieces = _NUMBERS.split(line["name"])
    runs = [_read_runs(text) for text in pieces[1::2]]
    if math.prod(sum(map(len, parts)) for parts in runs) != line["count"]:
        raise ValueError(f"{line['name']} does not stand for {line['count']} modules")
    literals = pieces[::2]
    for numbers in product(*([n for part in parts for n in part] for parts in runs)):
        yield _weave(literals, map(str, numbers))


def _products(points: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """`points` as few sets of numbers per place whose combinations are exactly the points."""
    if points == {()}:
        return [()]
    rests: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in points:
        rests.setdefault(first, set()).add(tuple(rest))
    firsts: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first in sorted(rests):
        firsts.setdefault(frozenset(rests[first]), []).append(first)
    return [
        (tuple(numbers), *factors)
        for rest, numbers in firsts.items()
        for factors in _products(set(rest))
    ]


def _spell(literals: Sequence[str], factors: Iterable[Sequence[int]]) -> str:
    return _weave(literals, map(_spell_runs, factors))


def _spell_runs(numbers: Sequence[int]) -> str:
    """`7`, `{0..93}` or `{0,2,5..7}` for sorted numbers, every run spelled out."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}")
    return "{" + ",".join(runs) + "}"


def _read_runs(text: str) -> list[range]:
    runs = []
    for word in text.strip("{}").split(","):
        found = _RUN.fullmatch(word)
        if found is None:
            raise ValueError(f"{text} is no list of numbers")
        first = int(found[1])
        runs.append(range(first, int(found[2] or first) + 1))
    return runs


def _weave(literals: Sequence[str], numbers: Iterable[str]) -> str:
    pieces = [literals[0]]
    for number, literal in zip(numbers, literals[1:], strict=True):
        pieces += (number, literal)
    return "".join(pieces)
