"""The verdict that counts per layer and degree: its own, with its fused group counted in."""

from __future__ import annotations

from collections.abc import Mapping

from mxfp4prep.alignment import Verdict
from mxfp4prep.survey import Survey

Decisions = Mapping[str, Mapping[int, Verdict]]
"""Per layer and degree the verdict that counts; layers with equal verdicts share one mapping."""


def decide(survey: Survey) -> Decisions:
    """The verdict per layer and degree with the layer's fused group counted in."""
    per_tp = [survey.decided(tp) for tp in survey.tp]
    known: dict[tuple[int, ...], Mapping[int, Verdict]] = {}
    equal: dict[tuple[Verdict, ...], Mapping[int, Verdict]] = {}
    decisions: dict[str, Mapping[int, Verdict]] = {}
    for item in survey.layers:
        name = item.layer.name
        verdicts = tuple([decided[name] for decided in per_tp])
        ids = tuple(map(id, verdicts))  # cheaper to look up than nested tuples of text
        mapping = known.get(ids)
        if mapping is None:
            mapping = equal.setdefault(verdicts, dict(zip(survey.tp, verdicts, strict=True)))
            known[ids] = mapping
        decisions[name] = mapping
    return decisions
