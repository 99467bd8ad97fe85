"""What an engine's zero padding of routed experts adds to a rank's memory."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from mxfp4prep.cost import banks_of
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.rules import ExpertRule
from mxfp4prep.parallel import SCALE_GROUP
from mxfp4prep.survey import LayerSurvey, Survey


def pads_of(rule: ExpertRule, path: str | None) -> tuple[int, int] | None:
    """What the intermediate and the hidden size are padded to multiples of; None: not known."""
    return (rule.pad, rule.pad_hidden) if path == "moe-aiter" else rule.other_pads.get(path or "")


def padding_nbytes(
    rule: ExpertRule, survey: Survey, outcomes: Mapping[str, Mapping[int, Outcome]]
) -> dict[int, int]:
    """Bytes of zeros, weights and scales, that the fullest rank holds for its experts, per degree.

    Layers that the engine does not get to run count nothing, nor do paths whose padding is not
    known.
    """
    counts: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], LayerSurvey] = {}
    key: tuple[object, ...]
    for item in survey.layers:
        if item.role.parallel == "expert":
            layer = item.layer
            ends = id(outcomes[layer.name])
            key = (item.role.part, layer.n, layer.k, layer.experts, id(item.placements), ends)
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, item)
    if not counts:
        return {}
    single = max(banks_of(survey).values(), default=1)
    totals = {}
    for tp in survey.tp:
        total = Fraction(0)
        for key, count in counts.items():
            item = first[key]
            held = Fraction(item.layer.experts or 1)
            if item.placements[tp] == "distributed":
                experts = item.layer.experts or single
                held *= Fraction(-(-experts // tp), experts)
            pads = pads_of(rule, outcomes[item.layer.name][tp].path)
            total += count * held * added_nbytes(item, tp, pads)
        totals[tp] = -(-total.numerator // total.denominator)
    return totals


def added_nbytes(item: LayerSurvey, tp: int, pads: tuple[int, int] | None) -> int:
    """Bytes that padding adds to one matrix of experts on one rank at degree `tp`.

    pads   what `pads_of` says of the path that runs it
    """
    if pads is None:
        return 0
    ranks = 1 if item.placements[tp] in ("distributed", "replicated") else tp
    parts = 2 if item.role.part == "gate_up" else 1
    down = item.role.part == "down"
    width = (item.layer.k if down else item.layer.n // parts) // ranks
    hidden = item.layer.n if down else item.layer.k
    wide, deep = (-(-size // pad) * pad for size, pad in zip((width, hidden), pads, strict=True))
    values = parts * (wide * deep - width * hidden)
    return values // 2 + values // SCALE_GROUP
