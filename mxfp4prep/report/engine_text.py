"""What one engine does with the original checkpoint, for people: a row per family of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mxfp4prep.decisions import distinct
from mxfp4prep.report.families import gather
from mxfp4prep.report.joining import listed, merge_siblings
from mxfp4prep.report.screen import Screen, human

if TYPE_CHECKING:
    from mxfp4prep.auditing import Audit
    from mxfp4prep.engines import Outcome, Prediction

SHOWN = {"crash": "CRASH", "corrupt": "CORRUPT", "unknown": "unknown"}
"""Outcomes that stand in a cell in place of the engine's path."""


def engine_lines(audit: Audit, screen: Screen) -> list[str]:
    """Lines of the engine's table and of what it rests on; none when no engine was asked about."""
    prediction = audit.prediction
    if prediction is None:
        return []
    engine = prediction.engine
    degrees = audit.survey.tp
    what = "once the checkpoint is prepared" if engine.own else "with the original checkpoint"
    lines = screen.wrap(f"{engine.name} ({engine.version}) {what}:")
    head = ("layer", "layers", *(f"tp {tp}" for tp in degrees))
    lines += screen.table(head, merge_siblings(_rows(audit, prediction), screen), right=(1,))
    lines += _legend(prediction, screen)
    zeros = [f"{human(nbytes)} at tp {tp}" for tp, nbytes in prediction.padding.items() if nbytes]
    if zeros:
        text = f"zeros that pad the experts add to a rank: {', '.join(zeros)}"
        lines += screen.wrap(text, rest="  ")
    facts = [f"{name}={value}" for name, value in prediction.switches.items()]
    if facts:
        lines += screen.wrap(screen.name(", ".join(facts)), "switches: ", "  ")
    for assumption in prediction.assumptions:
        lines += screen.wrap(screen.name(assumption), "assumed: ", "  ")
    for source in engine.sources:
        lines += screen.wrap(source, "source: ", "  ")
    return ["", *lines]


def _legend(prediction: Prediction, screen: Screen) -> list[str]:
    """What each path that occurs is."""
    from mxfp4prep.engines import PATHS

    outcomes = distinct(prediction.outcomes.values())
    paths = {made.path for mapping in outcomes for made in mapping.values()} - {None}
    known = [(path, words) for path, words in PATHS.items() if path in paths]
    return [line for path, words in known for line in screen.wrap(words, f"  {path}: ", "    ")]


def _rows(
    audit: Audit, prediction: Prediction
) -> Iterator[tuple[str, int, tuple[str, ...], tuple[str, ...]]]:
    def items() -> Iterator[tuple[str, int, Mapping[int, Outcome]]]:
        for item in audit.survey.layers:
            outcomes = prediction.outcomes[item.layer.name]
            yield item.layer.name, id(outcomes), outcomes

    for family in gather(items()):
        outcomes = family.first
        cells = tuple(SHOWN.get(made.outcome, made.path or "-") for made in outcomes.values())
        yield family.name, family.count, cells, _notes(outcomes)


def _notes(outcomes: Mapping[int, Outcome]) -> tuple[str, ...]:
    """What the engine says or does at which degrees, the same words together."""
    alike: dict[str, list[int]] = {}
    for tp, made in outcomes.items():
        if made.message:
            alike.setdefault(made.message, []).append(tp)
    return tuple(f"tp {listed(degrees)}: {message}" for message, degrees in alike.items())
