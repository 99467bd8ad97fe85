"""The map of layer families by degree: a letter and a colour a cell, reasons under each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mxfp4prep.report.page.cases import LETTERS, PATHS, WORDS, Degree, rank_of
from mxfp4prep.report.page.census import Row
from mxfp4prep.report.page.markup import Html, el, join, name, text
from mxfp4prep.report.page.reasons import (
    PLACEMENTS,
    Summary,
    arithmetic,
    brief,
    engine_lines,
    spell_degrees,
    summaries,
)
from mxfp4prep.report.screen import counted, human

MOST = 300
"""Characters of one explanation."""

CLASSES = {"asm": "a", "triton": "t", "impossible": "x"}
"""Classes that colour a cell."""


def family_map(
    rows: Iterable[Row], rest: Sequence[Row], degrees: Sequence[str], caption: str
) -> Html:
    """The table: one body a row, so that a row and its reasons are shown or hidden together."""
    head = el("th", "layers", scope="col"), (el("th", _degree(tp), scope="col") for tp in degrees)
    return el(
        "div",
        el(
            "table",
            el("caption", caption),
            el("thead", el("tr", head)),
            (_row(row, degrees) for row in rows),
            _rest(rest, degrees) if rest else None,
            class_="map",
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _degree(tp: str) -> Html:
    return join((el("small", "tp "), tp))


def _row(row: Row, degrees: Sequence[str]) -> Html:
    case = row.case
    return el(
        "tbody",
        el(
            "tr",
            el("th", name(row.name), el("small", _facts(row)), scope="row"),
            (_cell(row.anchor, degree) for degree in case.degrees),
        ),
        el("tr", el("td", _reasons(row), colspan=len(degrees) + 1), class_="why"),
        id=row.anchor,
        data_kind=case.kind,
        data_paths="".join(CLASSES.get(degree.path, "x") for degree in case.degrees),
    )


def _facts(row: Row) -> str:
    case = row.case
    sizes = (case.experts, case.n, case.k)
    facts = [
        counted(row.total, row.noun),
        case.parts,
        " × ".join(str(size) for size in sizes if size is not None),
        case.scheme.upper(),
        case.kind.replace("_", " ") if case.kind != "linear" else "",
        case.parallel,
        human(row.nbytes) if row.nbytes else "",
    ]
    # An expert that is cut as one would be called so twice.
    return " · ".join(dict.fromkeys(fact for fact in facts if fact))


def _cell(anchor: str, degree: Degree) -> Html:
    codes = ", ".join((*degree.codes, *degree.hazards))
    label = f"tp {degree.tp}: {WORDS.get(degree.path, degree.path)}{codes and ', '}{codes}"
    if degree.outcome is not None and degree.outcome[0] != "ok":
        label += f", the engine: {degree.outcome[0]}"
    link = el(
        "a",
        degree.letter,
        el("sup", degree.mark) if degree.mark else None,
        href=f"#{anchor}-{degree.tp}",
        aria_label=label,
    )
    return el("td", link, class_=CLASSES.get(degree.path, "x"))


def _reasons(row: Row) -> Html:
    """The reasons in short, and the arithmetic of every degree behind them."""
    short = [_short(summary) for summary in summaries(row.case)]
    for degrees, outcome, _, message in engine_lines(row.case):
        if outcome != "ok":
            words = el("b", outcome), text(f": {message}", MOST) if message else None
            short.append(el("span", _at(degrees), "the engine: ", words, class_="line"))
    lines = short or [el("span", "asm at every degree", class_="line quiet")]
    return el("details", el("summary", lines), _table(row))


def _short(summary: Summary) -> Html:
    codes = join((el("b", code) for code in summary.codes), " ")
    path = "" if summary.path == "triton" else f"{WORDS.get(summary.path, summary.path)}, "
    return el(
        "span", _at(summary.degrees), path, codes, " ", text(summary.words, MOST), class_="line"
    )


def _at(degrees: Sequence[str]) -> Html:
    return join((el("i", spell_degrees(degrees)), " "))


def _table(row: Row) -> Html:
    engine = any(degree.outcome is not None for degree in row.case.degrees)
    heads = ("degree", "path", "on one rank", "why", *(("the engine",) if engine else ()))
    return el(
        "table",
        el("thead", el("tr", (el("th", head, scope="col") for head in heads))),
        el("tbody", (_line(row.anchor, degree) for degree in row.case.degrees)),
        class_="sums",
    )


def _line(anchor: str, degree: Degree) -> Html:
    path = WORDS.get(degree.path, degree.path)
    chip = el("span", degree.letter, class_=f"chip {CLASSES.get(degree.path, 'x')}")
    engine = None
    if degree.outcome is not None:
        outcome, how, message = degree.outcome
        said = f"{outcome}{how and f', {how}'}{message and f': {message}'}"
        engine = el("td", text(said, MOST))
    return el(
        "tr",
        el("th", _degree(degree.tp), scope="row"),
        el("td", chip, " ", path),
        el("td", text(_on_one_rank(degree), MOST)),
        el("td", _why(degree)),
        engine,
        id=f"{anchor}-{degree.tp}",
    )


def _on_one_rank(degree: Degree) -> str:
    placed = PLACEMENTS.get(degree.placement, "")
    return "; ".join(part for part in (placed, arithmetic(degree)) if part)


def _why(degree: Degree) -> Html:
    said: list[Html] = []
    for code in (*degree.codes, *degree.hazards):
        said.append(el("span", el("b", code), " ", brief(code), class_="line"))
    if degree.joined:
        said.insert(0, el("span", "joined in ", name(degree.joined), class_="line"))
    if not said and degree.path == "asm":
        said.append(el("span", "meets the rule", class_="quiet"))
    return join(said)


def _rest(rest: Sequence[Row], degrees: Sequence[str]) -> Html:
    """What the map has no room for, as one row: per degree the worst path and how many take it."""
    anchor, cells, lines = rest[0].anchor, [], []
    for place, tp in enumerate(degrees):
        layers: Counter[str] = Counter()
        for row in rest:
            layers[row.case.degrees[place].path] += row.total
        worst = max(layers, key=rank_of)
        said = ", ".join(f"{layers[path]:,} {WORDS[path]}" for path in PATHS if layers[path])
        cells.append(
            el(
                "td",
                el("a", LETTERS.get(worst, "?"), href=f"#{anchor}", aria_label=said),
                class_=CLASSES.get(worst, "x"),
            )
        )
        lines.append(el("span", _at([tp]), said, class_="line"))
    layers_left = sum(row.total for row in rest)
    title = f"{len(rest):,} more rows, {counted(layers_left, rest[0].noun)}"
    note = "no room here: --format csv or --format json has every layer"
    return el(
        "tbody",
        el("tr", el("th", title, el("small", note), scope="row"), cells),
        el("tr", el("td", lines, colspan=len(degrees) + 1), class_="why"),
        id=anchor,
    )
