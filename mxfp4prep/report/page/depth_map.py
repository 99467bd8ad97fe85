"""The map by depth: a row per transformer layer, a column per projection, one table per degree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from mxfp4prep.report.page.budget import MAX_CELLS, MAX_PARTS, breakdowns_for
from mxfp4prep.report.page.cases import LETTERS
from mxfp4prep.report.page.depth import Cell, Column, Depth, Stack
from mxfp4prep.report.page.layer_map import CLASSES
from mxfp4prep.report.page.markup import Html, el, join, name, text, void
from mxfp4prep.report.screen import counted

FEW, MANY = 18, 10
"""Columns that fit in 64 rem with their heads upright, and with their heads lying."""


@dataclass(slots=True)
class _Breakdowns:
    """Cells whose layers differ, told apart once for all places where they differ alike."""

    most: int
    places: dict[tuple[str, Cell], tuple[int, list[str]]] = field(default_factory=dict)
    anchors: dict[int, str] = field(default_factory=dict)

    def of(self, place: str, column: str, cell: Cell) -> str:
        """The anchor of what tells the layers of `cell` apart."""
        known = self.anchors.get(id(cell))  # the same cell comes again at every degree
        if known is not None:
            return known
        number, places = self.places.setdefault((column, cell), (len(self.places), []))
        places.append(place)
        anchor = f"e{number}" if number < self.most else "erest"
        self.anchors[id(cell)] = anchor
        return anchor


@dataclass(frozen=True, slots=True)
class DepthMap:
    """The markup, and the rules that show the chosen degree without a script."""

    markup: Html
    styles: str


def depth_map(depth: Depth, degrees: Sequence[str]) -> DepthMap:
    """All stacks at every degree that there is room for; nothing where there is no stack."""
    if not depth.stacks:
        return DepthMap(Html(""), "")
    per_degree = sum(len(stack.rows) * len(stack.columns) for stack in depth.stacks)
    shown = degrees[: max(1, MAX_CELLS // max(1, per_degree))]
    chosen = _first_worth_seeing(depth, shown)
    breakdowns = _Breakdowns(breakdowns_for(len(degrees)))
    panels = [
        el(
            "div",
            el("h3", f"tp {tp}"),
            _tables(depth.stacks, place, tp, breakdowns, MAX_CELLS // len(shown)),
            class_="panel",
            id=f"p{place}",
            data_tp=tp,
        )
        for place, tp in enumerate(shown)
    ]
    notes = []
    if len(shown) < len(degrees):
        notes.append(f"There is room for tp {', '.join(shown)} only; the map above has the others.")
    if depth.left_out:
        notes.append(
            f"{counted(depth.left_out, 'layer')} of further stacks or projections left out."
        )
    markup = join(
        (
            _chooser(shown, chosen),
            (el("p", note, class_="note") for note in notes),
            panels,
            _told_apart(breakdowns, degrees),
        )
    )
    rules = [f"#depth:has(#d{place}:checked) #p{place}" for place in range(len(shown))]
    return DepthMap(markup, ",".join(rules) + "{display:block}")


def _first_worth_seeing(depth: Depth, degrees: Sequence[str]) -> int:
    """The first degree at which something is not asm, else the last."""
    for place in range(len(degrees)):
        for stack in depth.stacks:
            for row in stack.rows.values():
                for cell in row.values():
                    if any(part.case.degrees[place].path != "asm" for part in cell.parts):
                        return place
    return len(degrees) - 1


def _chooser(degrees: Sequence[str], chosen: int) -> Html:
    return el(
        "fieldset",
        el("legend", "Degree"),
        (
            el(
                "label",
                void(
                    "input",
                    type="radio",
                    name="degree",
                    id=f"d{place}",
                    value=tp,
                    checked=place == chosen,
                ),
                el("span", f"tp {tp}"),
            )
            for place, tp in enumerate(degrees)
        ),
        el(
            "label",
            void("input", type="checkbox", id="fold"),
            el("span", "fold layers like the one above"),
            class_="fold",
        ),
        class_="chooser",
    )


def _tables(
    stacks: Sequence[Stack], place: int, tp: str, breakdowns: _Breakdowns, room: int
) -> Html:
    made: list[Html] = []
    for stack in stacks:
        rows = list(stack.rows.items())[: max(0, room) // max(1, len(stack.columns))]
        room -= len(rows) * len(stack.columns)
        caption = f"{text(stack.prefix or 'numbered layers', 200)} at tp {tp}"
        if not rows:
            made.append(el("p", f"No room for {stack.prefix}.", class_="note"))
            continue
        table = el(
            "table",
            el("caption", Html(caption)),
            el("thead", _heads(stack.columns)),
            el("tbody", _rows(stack, rows, place, tp, breakdowns)),
            class_=_look(len(stack.columns)),
        )
        made.append(
            el("div", table, class_="scroll", tabindex="0", role="region", aria_label=Html(caption))
        )
        if len(rows) < len(stack.rows):
            left = len(stack.rows) - len(rows)
            made.append(el("p", f"No room for {left:,} more rows.", class_="note"))
    return join(made)


def _look(columns: int) -> str:
    """Classes: `few` columns fit on a wide screen, `many` only with their heads upright."""
    return f"map fine{' few' if columns <= FEW else ''}{' many' if columns > MANY else ''}"


def _heads(columns: Sequence[Column]) -> Html:
    spans = [
        el("th", name(parent or "·"), scope="colgroup", colspan=len(list(members)))
        for parent, members in groupby(columns, lambda column: column.parent)
    ]
    leaves = [
        el("th", el("span", name(column.leaf)), scope="col", data_kind=column.kind)
        for column in columns
    ]
    corner = el("th", "layer", scope="col", rowspan=2)
    return join((el("tr", corner, spans), el("tr", leaves)))


def _rows(
    stack: Stack,
    rows: Sequence[tuple[int, dict[int, Cell]]],
    place: int,
    tp: str,
    breakdowns: _Breakdowns,
) -> Html:
    """Rows with the end of each run of like rows in its first, for when the others are folded."""
    cells = [
        (number, "".join(_cells(stack, number, row, place, tp, breakdowns))) for number, row in rows
    ]
    made = []
    for markup, run in groupby(cells, lambda item: item[1]):
        numbers = [number for number, _ in run]
        for number in numbers:
            more = ""
            if number == numbers[0] and len(numbers) > 1:
                more = f"<span class=run>…{numbers[-1]}</span>"
            mark = "" if number == numbers[0] else " class=s"
            made.append(f"<tr{mark}><th scope=row>{number}{more}{markup}")
    return Html("".join(made))


# A page has thousands of these: end tags and quotes that HTML does not ask for are left out.
def _cells(
    stack: Stack,
    number: int,
    row: dict[int, Cell],
    place: int,
    tp: str,
    breakdowns: _Breakdowns,
) -> list[str]:
    made = []
    for index, column in enumerate(stack.columns):
        cell = row.get(index)
        if cell is None:
            made.append("<td>")
            continue
        worst, like, layers = cell.worst(place)
        path = worst.case.degrees[place].path
        letter = LETTERS.get(path, "?")
        if len(cell.parts) > 1:
            at = f"{stack.prefix}.{number}".strip(".")
            label = f"{column.parent}.{column.leaf}".strip(".")
            anchor = breakdowns.of(at, label, cell)
            letter += f"<small>{like}/{layers}</small>" if like < layers else "<small>≠</small>"
        else:
            letter += f"<sup>{mark}</sup>" if (mark := worst.case.degrees[place].mark) else ""
            anchor = worst.anchor if worst.anchor == "rest" else f"{worst.anchor}-{tp}"
        made.append(f"<td class={CLASSES.get(path, 'x')}><a href=#{anchor}>{letter}</a>")
    return made


def _told_apart(breakdowns: _Breakdowns, degrees: Sequence[str]) -> Html | None:
    """Which layers of a cell differ, and where to read why."""
    if not breakdowns.places:
        return None
    items = list(breakdowns.places.items())
    blocks = [
        _breakdown(column, cell, f"e{number}", places, degrees)
        for (column, cell), (number, places) in items[: breakdowns.most]
    ]
    if len(items) > breakdowns.most:
        more = (
            f"{len(items) - breakdowns.most:,} more sets of layers that differ have no room here."
        )
        blocks.append(
            el(
                "p",
                f"{more} --format csv or --format json has every layer.",
                class_="note",
                id="erest",
            )
        )
    return el(
        "div",
        el("h3", "Where layers of one cell differ"),
        el(
            "p",
            "3/128: so many of them take the path of the cell, the others a better one. "
            "≠: all take it, but not by the same numbers.",
            class_="note",
        ),
        blocks,
        class_="apart",
    )


def _breakdown(
    column: str, cell: Cell, anchor: str, places: Sequence[str], degrees: Sequence[str]
) -> Html:
    where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more like it"
    total = sum(part.layers for part in cell.parts)
    lines = []
    for part in cell.parts[:MAX_PARTS]:
        chips = [
            el(
                "span",
                degree.letter,
                class_=f"chip {CLASSES.get(degree.path, 'x')}",
                title=f"tp {tp}",
            )
            for tp, degree in zip(degrees, part.case.degrees, strict=True)
        ]
        which = f"{part.layers} of {total}" + (f": {part.numbers}" if part.numbers else "")
        link = el("a", f"{part.case.n} × {part.case.k}", href=f"#{part.anchor}")
        lines.append(el("li", chips, " ", which, ", ", link))
    if len(cell.parts) > MAX_PARTS:
        left = cell.parts[MAX_PARTS:]
        layers = sum(part.layers for part in left)
        lines.append(el("li", f"{len(left)} more kinds, {counted(layers, 'layer')}"))
    head = el("summary", name(column), f" in {len(cell.parts)} kinds at ", name(where))
    return el("details", head, el("ul", lines), id=anchor)
