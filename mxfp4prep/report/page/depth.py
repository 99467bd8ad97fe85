"""What stands at each depth: transformer layers by projections, the experts of a layer as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mxfp4prep.report.families import spell_runs
from mxfp4prep.report.page.cases import Case, rank_of
from mxfp4prep.report.page.census import Census, Literals

MAX_STACKS, MAX_COLUMNS = 12, 32
"""Stacks of layers, and projections of one; no model has as many."""

REST = "rest"
"""The anchor of what has no row of its own."""


class Column(NamedTuple):
    """One kind of projection: `mlp.experts.*` and `down_proj`."""

    parent: str
    leaf: str
    kind: str


class Part(NamedTuple):
    """Layers of one cell that share a case. numbers: which experts, as runs, "" for no expert."""

    case: Case
    anchor: str
    layers: int
    numbers: str


@dataclass(frozen=True, slots=True)
class Cell:
    """All layers of one kind at one depth, by their case, the worst-off first."""

    parts: tuple[Part, ...]

    def worst(self, degree: int) -> tuple[Part, int, int]:
        """The part with the worst path at the degree with this index; how many layers take that
        path, and how many there are."""
        worst = max(self.parts, key=lambda part: rank_of(part.case.degrees[degree].path))
        path = worst.case.degrees[degree].path
        like = (part for part in self.parts if part.case.degrees[degree].path == path)
        return worst, sum(part.layers for part in like), sum(part.layers for part in self.parts)


@dataclass(slots=True)
class Stack:
    """Layers that are numbered under one prefix, such as `model.layers`. rows: number -> cells."""

    prefix: str
    columns: list[Column] = field(default_factory=list)
    rows: dict[int, dict[int, Cell]] = field(default_factory=dict)


class Depth(NamedTuple):
    """The stacks, and how many layers are left out because their stack or column is."""

    stacks: tuple[Stack, ...]
    left_out: int


def stacks_of(census: Census) -> Depth:
    """Every numbered layer in its stack, row and column; columns of one parent stand together."""
    prefixes = dict.fromkeys(literals[0] for literals, _ in census.places)
    by_stack: dict[str, dict[Literals, Column]] = {prefix: {} for prefix in prefixes}
    for literals, _ in census.places:
        by_stack[literals[0]].setdefault(literals, _column(literals, census.kinds))
    stacks: dict[str, Stack] = {}
    where: dict[Literals, int] = {}
    for prefix, columns in list(by_stack.items())[:MAX_STACKS]:
        order: dict[str, int] = {}
        for column in columns.values():
            order.setdefault(column.parent, len(order))
        ordered = sorted(columns, key=lambda key: order[columns[key].parent])
        stacks[prefix] = Stack(prefix.removesuffix("."))
        for place, literals in enumerate(ordered[:MAX_COLUMNS]):
            stacks[prefix].columns.append(columns[literals])
            where[literals] = place
    left_out = 0
    for (literals, number), cases in census.places.items():
        if literals not in where:
            left_out += sum(map(len, cases.values()))
            continue
        row = stacks[literals[0]].rows.setdefault(number, {})
        row[where[literals]] = _cell(literals, cases, census)
    for stack in stacks.values():
        stack.rows = dict(sorted(stack.rows.items()))
    return Depth(tuple(stacks.values()), left_out)


def _column(literals: Literals, kinds: Mapping[Literals, str]) -> Column:
    words = "*".join(literals[1:]).strip(".")
    parent, _, leaf = words.rpartition(".")
    return Column(parent, leaf or "(the layer itself)", kinds[literals])


def _cell(
    literals: Literals, cases: Mapping[Case, Sequence[Sequence[str]]], census: Census
) -> Cell:
    parts = [
        Part(
            case,
            census.anchors.get((literals, case), REST),
            len(numbers),
            _spelled(numbers) if len(cases) > 1 else "",
        )
        for case, numbers in cases.items()
    ]
    return Cell(tuple(sorted(parts, key=lambda part: -part.case.worst)))


def _spelled(numbers: Iterable[Sequence[str]]) -> str:
    """Which experts: `{0..4,8..127}`; `3.{0,1}` where they are numbered twice."""
    places = list(zip(*numbers, strict=True))
    return ".".join(spell_runs([int(number) for number in seen]) for seen in places)
