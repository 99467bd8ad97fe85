"""The verdict that counts per layer and degree: its own, with its fused group counted in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from mxfp4prep.alignment import Verdict
from mxfp4prep.survey import Survey, together

T = TypeVar("T")

Decisions = Mapping[str, Mapping[int, Verdict]]
"""Per layer and degree the verdict that counts; layers with equal verdicts share one mapping."""


def distinct(mappings: Iterable[Mapping[int, T]]) -> Iterable[Mapping[int, T]]:
    """Each of the mappings once: tens of thousands of layers share a handful."""
    return {id(mapping): mapping for mapping in mappings}.values()


def decide(survey: Survey) -> Decisions:
    """The verdict per layer and degree with the layer's fused group counted in.

    What `Survey.decided` says, at every degree at once: tens of thousands of layers and groups
    share a handful of mappings, and only distinct ones are worked out.
    """
    equal: dict[tuple[Verdict, ...], Mapping[int, Verdict]] = {}
    merged: dict[int, Mapping[int, Verdict]] = {}

    def shared(verdicts: Mapping[int, Verdict]) -> Mapping[int, Verdict]:
        known = merged.get(id(verdicts))
        if known is None:
            known = merged[id(verdicts)] = equal.setdefault(tuple(verdicts.values()), verdicts)
        return known

    decisions = {item.layer.name: shared(item.verdicts) for item in survey.layers}
    known: dict[tuple[int, ...], Sequence[Mapping[int, Verdict]]] = {}
    for group in survey.groups:
        if group.mixed:
            continue
        own = [decisions[name] for name in group.members]
        key = (id(group.verdicts), *map(id, own))
        made = known.get(key)
        if made is None:
            per_tp = [together([v[tp] for v in own], group.verdicts[tp]) for tp in survey.tp]
            made = known[key] = [
                equal.setdefault(verdicts, dict(zip(survey.tp, verdicts, strict=True)))
                for verdicts in zip(*per_tp, strict=True)
            ]
        decisions.update(zip(group.members, made, strict=True))
    return decisions
