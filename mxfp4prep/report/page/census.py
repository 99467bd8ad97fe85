"""All layers of an audit, counted once: families of like names, and what stands at each depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mxfp4prep.report.families import NUMBER, Family, gather
from mxfp4prep.report.page.cases import Case, Cases

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

Literals = tuple[str, ...]


class Row(NamedTuple):
    """Families of one case and place that differ in their last word, as one row of the map.

    anchor   names the row in links; unique on the page but for those of `Census.rest`
    total    layers that it stands for, or fused projections
    """

    anchor: str
    name: str
    total: int
    nbytes: int
    case: Case
    noun: str = "layer"


@dataclass(slots=True)
class _Counted:
    """A family, the bytes of its layers, and its case."""

    family: Family[str]
    case: Case
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Census:
    """Every layer in its family, and in its place.

    rows     of the map of families, in order of appearance
    rest     what the map has no room for, none of it worse off than a row
    anchors  (literals of the name, case) -> the row's anchor, for those that have a row
    places   (literals, first number) -> case -> the other numbers of each layer
    kinds    literals -> linear, expert or shared_expert
    cases    name -> case of each layer that is part of a fused projection
    loose    layers without a number in their name
    """

    rows: tuple[Row, ...]
    rest: tuple[Row, ...]
    anchors: Mapping[tuple[Literals, Case], str]
    places: Mapping[tuple[Literals, int], Mapping[Case, Sequence[Sequence[str]]]]
    kinds: Mapping[Literals, str]
    cases: Mapping[str, Case]
    loose: int


def take_census(layers: Iterable[c.LayerDocument], cases: Cases, most_rows: int) -> Census:
    """Counts `layers`; at most `most_rows` rows, the rest is told apart."""
    split = NUMBER.split
    counted: dict[tuple[Literals, int], _Counted] = {}
    places: dict[tuple[Literals, int], dict[int, list[Sequence[str]]]] = {}
    kinds: dict[Literals, str] = {}
    by_id: dict[int, Case] = {}
    parts: dict[str, Case] = {}
    loose = 0
    for layer in layers:
        case = cases.of(layer)
        name = layer["name"]
        pieces = split(name)
        literals, digits = tuple(pieces[::2]), pieces[1::2]
        item = counted.get((literals, id(case)))
        if item is None:
            family = Family(name, literals, tuple({number: None} for number in digits))
            item = counted[(literals, id(case))] = _Counted(family, case)
            kinds.setdefault(literals, layer["kind"])
            by_id[id(case)] = case
        else:
            item.family.count += 1
            for seen, number in zip(item.family.numbers, digits, strict=True):
                seen[number] = None
        item.nbytes += layer["nbytes"]
        if layer["group"] is not None:
            parts[name] = case
        if digits:
            place = places.setdefault((literals, int(digits[0])), {})
            place.setdefault(id(case), []).append(digits[1:])
        else:
            loose += 1
    rows, rest, anchors = _rows(counted.values(), most_rows)
    return Census(
        rows=rows,
        rest=rest,
        anchors=anchors,
        places={
            key: {by_id[case]: numbers for case, numbers in found.items()}
            for key, found in places.items()
        },
        kinds=kinds,
        cases=parts,
        loose=loose,
    )


def _rows(
    counted: Iterable[_Counted], most: int
) -> tuple[tuple[Row, ...], tuple[Row, ...], dict[tuple[Literals, Case], str]]:
    """Siblings of one case joined, then the worst-off `most` kept in their order."""
    joined: dict[tuple[str, int, int], list[tuple[str, _Counted]]] = {}
    for item in counted:
        name = item.family.name
        leaf = item.family.literals[-1].rpartition(".")[2]  # "" where the name ends in a number
        parent = name[: len(name) - len(leaf)]
        joined.setdefault((parent, item.family.count, id(item.case)), []).append((leaf, item))
    every = list(joined.items())
    worst_first = sorted(range(len(every)), key=lambda place: -every[place][1][0][1].case.worst)
    kept = set(worst_first[:most])
    rows: list[Row] = []
    rest: list[Row] = []
    anchors = {}
    for place, ((parent, _, _), leaves) in enumerate(every):
        words = [leaf for leaf, _ in leaves]
        items = [item for _, item in leaves]
        row = Row(
            anchor=f"f{len(rows)}" if place in kept else "rest",
            name=parent + (words[0] if len(words) == 1 else "{" + ",".join(words) + "}"),
            total=sum(item.family.count for item in items),
            nbytes=sum(item.nbytes for item in items),
            case=items[0].case,
        )
        if place in kept:
            rows.append(row)
            for item in items:
                anchors[(item.family.literals, item.case)] = row.anchor
        else:
            rest.append(row)
    return tuple(rows), tuple(rest), anchors


def fused_rows(
    groups: Iterable[c.GroupDocument], cases: Cases, parts: Mapping[str, Case], most: int
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Rows of the fused projections, and the rows that there is no room for."""
    known: dict[tuple[object, ...], Case] = {}

    def items() -> Iterator[tuple[str, int, Case]]:
        for group in groups:
            members = tuple([id(parts.get(member)) for member in group["members"]])
            leaf = group["members"][0].rpartition(".")[2] if group["members"] else ""
            key = (id(group["verdict"]), group["mixed"], members, leaf)
            case = known.get(key)
            if case is None:
                case = known[key] = cases.of_group(group, parts)
            yield group["name"], id(case), case

    rows = [
        Row(f"g{place}", family.name, family.count, 0, family.first, "fused projection")
        for place, family in enumerate(gather(items()))
    ]
    worst_first = sorted(rows, key=lambda row: -row.case.worst)
    kept = {row.anchor for row in worst_first[:most]}
    return (
        tuple(row for row in rows if row.anchor in kept),
        tuple(row._replace(anchor="grest") for row in rows if row.anchor not in kept),
    )
