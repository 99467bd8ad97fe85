"""What letters and marks mean, and the filters that the script shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mxfp4prep.report.page.cases import LETTERS, MARKS, Case
from mxfp4prep.report.page.layer_map import CLASSES
from mxfp4prep.report.page.markup import Html, el, void

_KEY = {
    "asm": "asm: the fast tiled GEMM",
    "triton": "Triton: any shape, slower",
    "impossible": "impossible: cannot be split at this degree",
}

_KINDS = {
    "": "all kinds",
    "linear": "linear",
    "expert": "expert",
    "shared_expert": "shared expert",
}


def key(cases: Iterable[Case]) -> Html:
    """What letters, colours and marks mean, next to where they are first seen."""
    marks = {mark for case in cases for degree in case.degrees for mark in degree.mark}
    said = [
        el("span", el("span", LETTERS[path], class_=f"chip {CLASSES[path]}"), " ", words)
        for path, words in _KEY.items()
    ]
    words = {"*": "a hazard", **{mark: f"the engine: {outcome}" for outcome, mark in MARKS.items()}}
    said += [
        el("span", el("b", mark), " ", meaning) for mark, meaning in words.items() if mark in marks
    ]
    hint = el(
        "span",
        "A cell leads to its arithmetic. Arrow keys move from cell to cell.",
        class_="script",
        hidden=True,
    )
    return el("p", said, hint, class_="keys")


def filters(degrees: Sequence[str]) -> Html:
    """Controls that the script shows; without it all rows are there."""
    paths = [
        el(
            "label",
            void("input", type="checkbox", name="path", value=look, checked=True),
            el("span", LETTERS[path], class_=f"chip {look}"),
            el("span", f" {path}", class_="word"),
        )
        for path, look in CLASSES.items()
    ]
    return el(
        "form",
        el(
            "label", "Name or reason", void("input", type="search", name="text", autocomplete="off")
        ),
        el("fieldset", el("legend", "Path"), paths),
        el(
            "label",
            "at",
            el(
                "select",
                el("option", "any degree", value=""),
                (el("option", f"tp {tp}", value=place) for place, tp in enumerate(degrees)),
                name="degree",
            ),
        ),
        el(
            "label",
            "Kind",
            el(
                "select",
                (el("option", words, value=kind) for kind, words in _KINDS.items()),
                name="kind",
            ),
        ),
        el("button", "Reset", type="reset"),
        el("output", name="count", aria_live="polite"),
        id="filters",
        aria_label="Filter the maps",
        hidden=True,
    )
