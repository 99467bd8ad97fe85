"""The JSON document of an audit: every layer and fused group with its verdict per degree.

Tens of thousands of layers share a handful of verdicts, so their parts are made once and shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mxfp4prep.alignment import RULE, Verdict
from mxfp4prep.collector import collector_paused
from mxfp4prep.decisions import Decisions
from mxfp4prep.deployment import Placement
from mxfp4prep.report.families import gather
from mxfp4prep.report.others import join_modules
from mxfp4prep.report.payload import findings, source
from mxfp4prep.report.recommendation import recommend
from mxfp4prep.report.tally import ASM_ONLY, PATHS, POSSIBLE, degrees_of, shares

if TYPE_CHECKING:
    from mxfp4prep.auditing import Audit
    from mxfp4prep.cost import Cost
    from mxfp4prep.engines import Outcome, Prediction
    from mxfp4prep.quark import Activation
    from mxfp4prep.report import contract as c
    from mxfp4prep.survey import LayerSurvey, Survey
    from mxfp4prep.values import ScaleValues

OUTCOMES: tuple[c.EngineOutcome, ...] = ("ok", "crash", "corrupt", "unknown")


@collector_paused()
def audit_document(audit: Audit) -> c.AuditDocument:
    """The audit of a checkpoint: every layer and fused group with its verdict per degree."""
    survey, decisions, prediction = audit.survey, audit.decisions, audit.prediction
    checkpoint, made = survey.checkpoint, _Parts()
    outcomes = None if prediction is None else prediction.outcomes
    layers = [_layer(item, decisions, outcomes, made) for item in survey.layers]
    severities = [finding.severity for finding in audit.findings]
    mxfp4 = sum(layer["nbytes"] for layer in layers)
    return {
        "schema_version": 1,
        "source": source(checkpoint),
        "rule": RULE,
        "tp": list(survey.tp),
        "deployment": {
            "expert_parallel": survey.deployment.expert_parallel,
            "sequence_parallel": survey.deployment.sequence_parallel,
            "shared_experts": survey.deployment.shared_experts,
        },
        "layers": layers,
        "groups": [
            {
                "name": group.name,
                "members": list(group.members),
                "mixed": group.mixed,
                "verdict": made.verdicts(group.verdicts),
            }
            for group in survey.groups
        ],
        "shared_experts": _shared_experts(survey),
        "others": join_modules(survey.classified.others),
        "patterns": [
            {
                "key": key,
                "text": use.text,
                "kind": use.kind,
                "reading": use.reading,
                "modules": use.modules,
            }
            for key, uses in survey.classified.patterns.items()
            for use in uses
        ],
        "cost": {str(tp): _cost(cost) for tp, cost in audit.costs.items()},
        "engine": None if prediction is None else _engine(prediction, survey.tp),
        "values": None if audit.values is None else _values(audit.values),
        "findings": findings(audit.findings),
        "summary": {
            "layers": len(layers),
            "groups": len(survey.groups),
            "mxfp4_nbytes": mxfp4,
            "copied_nbytes": sum(t.nbytes for t in checkpoint.tensors.values()) - mxfp4,
            "tp": {str(tp): share for tp, share in shares(survey, decisions).items()},
            "asm_tp": degrees_of(decisions, survey.tp, ASM_ONLY),
            "possible_tp": degrees_of(decisions, survey.tp, POSSIBLE),
            "largest_clean_tp": audit.largest_clean,
            "recommendation": recommend(audit),
            "findings": {s: severities.count(s) for s in ("error", "warning", "note")},
        },
    }


def _layer(
    item: LayerSurvey,
    decisions: Decisions,
    outcomes: Mapping[str, Mapping[int, Outcome]] | None,
    made: _Parts,
) -> c.LayerDocument:
    layer = item.layer
    scale_shape = [layer.n, -(-layer.k // 32)]
    document: c.LayerDocument = {
        "name": layer.name,
        "kind": layer.kind,
        "parallel": item.role.parallel,
        "group": item.role.group,
        "scheme": layer.scheme,
        "activation": made.activation(layer.activation),
        "n": layer.n,
        "k": layer.k,
        "experts": layer.experts,
        "scale_shape": scale_shape if layer.experts is None else [layer.experts, *scale_shape],
        "nbytes": layer.weight.nbytes + layer.scale.nbytes,
        "verdict": made.verdicts(item.verdicts),
        "decided": made.paths(decisions[layer.name]),
    }
    placement = made.placement(item.placements)
    if placement is not None:
        document["placement"] = placement
    if outcomes is not None:
        document["engine"] = made.outcomes(outcomes[layer.name])
    return document


def _cost(cost: Cost) -> c.CostDocument:
    nbytes = sum(part.nbytes for part in cost.paths.values()) or 1
    flops = sum(part.flops for part in cost.paths.values()) or 1
    asm, triton, impossible = (
        _share(cost.paths[path].nbytes / nbytes, cost.paths[path].flops / flops) for path in PATHS
    )
    return {
        "rank_nbytes": cost.rank_nbytes,
        "rank_mxfp4_nbytes": cost.rank_mxfp4_nbytes,
        "padding_nbytes": cost.padding_nbytes,
        "paths": {"asm": asm, "triton": triton, "impossible": impossible},
    }


def _share(nbytes: float, flops: float) -> c.CostShareDocument:
    return {"nbytes": round(nbytes, 6), "flops": round(flops, 6)}


def _engine(prediction: Prediction, degrees: tuple[int, ...]) -> c.EngineDocument:
    engine = prediction.engine
    totals = {
        str(tp): Counter(mapping[tp].outcome for mapping in prediction.outcomes.values())
        for tp in degrees
    }
    return {
        "name": engine.name,
        "version": engine.version,
        "sources": list(engine.sources),
        "switches": dict(prediction.switches),
        "assumptions": list(prediction.assumptions),
        "outcomes": {
            tp: {outcome: total[outcome] for outcome in OUTCOMES} for tp, total in totals.items()
        },
        "padding_nbytes": {str(tp): nbytes for tp, nbytes in prediction.padding.items()},
    }


def _values(values: ScaleValues) -> c.ValuesDocument:
    return {
        "nbytes": values.nbytes,
        "scales": values.scales,
        "nan": values.nan,
        "zero_blocks": values.zero_blocks,
        "minimum": values.minimum,
        "maximum": values.maximum,
        "layers": [
            {
                "layer": layer.layer,
                "nan": layer.nan,
                "nan_places": [list(place) for place in layer.nan_places],
                "zero_blocks": layer.zero_blocks,
                "minimum": layer.minimum,
                "maximum": layer.maximum,
            }
            for layer in values.layers
        ],
    }


def _shared_experts(survey: Survey) -> list[c.SharedExpertDocument]:
    """Shared experts that differ only in their numbers as one."""
    items = (
        (item.block.name, (item.block.why, item.block.width, id(item.decisions)), item)
        for item in survey.shared
    )
    return [
        {
            "name": family.name,
            "blocks": family.count,
            "width": family.first.block.width,
            "fusable": family.first.block.fusable,
            "why": family.first.block.why,
            "decision": {str(tp): made.decision for tp, made in family.first.decisions.items()},
            "message": {
                str(tp): made.message for tp, made in family.first.decisions.items() if made.message
            },
        }
        for family in gather(items)
    ]


class _Parts:
    """Documents of verdicts and the like, made once for each mapping that layers share."""

    def __init__(self) -> None:
        self._verdicts: dict[int, dict[str, c.VerdictDocument]] = {}
        self._paths: dict[int, dict[str, c.Path]] = {}
        self._placements: dict[int, dict[str, c.Placement] | None] = {}
        self._outcomes: dict[int, dict[str, c.EngineVerdictDocument]] = {}
        self._activations: dict[int, c.ActivationDocument] = {}

    # Mappings are known by their identity, so they must outlive this object. They do: the audit
    # holds them.
    def verdicts(self, verdicts: Mapping[int, Verdict]) -> dict[str, c.VerdictDocument]:
        """One document per degree."""
        known = self._verdicts.get(id(verdicts))
        if known is None:
            known = {str(tp): _verdict(verdict) for tp, verdict in verdicts.items()}
            self._verdicts[id(verdicts)] = known
        return known

    def paths(self, verdicts: Mapping[int, Verdict]) -> dict[str, c.Path]:
        """Only the path per degree."""
        known = self._paths.get(id(verdicts))
        if known is None:
            known = {str(tp): verdict.path for tp, verdict in verdicts.items()}
            self._paths[id(verdicts)] = known
        return known

    def placement(self, placements: Mapping[int, Placement]) -> dict[str, c.Placement] | None:
        """The placement per degree, None where it is sliced at all of them."""
        if id(placements) not in self._placements:
            named: dict[str, c.Placement] = {str(tp): p for tp, p in placements.items()}
            sliced = set(named.values()) == {"sliced"}
            self._placements[id(placements)] = None if sliced else named
        return self._placements[id(placements)]

    def activation(self, activation: Activation) -> c.ActivationDocument:
        """How inputs are quantized."""
        known = self._activations.get(id(activation))
        if known is None:
            known = self._activations[id(activation)] = {
                "dtype": activation.dtype,
                "scale_mode": activation.scale_mode,
                "static": activation.static,
            }
        return known

    def outcomes(self, outcomes: Mapping[int, Outcome]) -> dict[str, c.EngineVerdictDocument]:
        """What the engine does per degree."""
        known = self._outcomes.get(id(outcomes))
        if known is None:
            known = {
                str(tp): {"outcome": made.outcome, "path": made.path, "message": made.message}
                for tp, made in outcomes.items()
            }
            self._outcomes[id(outcomes)] = known
        return known


def _verdict(verdict: Verdict) -> c.VerdictDocument:
    document: c.VerdictDocument = {
        "path": verdict.path,
        "scale_shard": None if verdict.scale_shard is None else list(verdict.scale_shard),
        "reasons": list(verdict.reasons),
        "hazards": list(verdict.hazards),
    }
    if verdict.detail:
        document["detail"] = verdict.detail
    return document
