"""What an engine does with a part of a shared expert: one more routed expert, whole, or cut.

Fusion comes first, as in the engines: only a shared expert that stays apart is cut by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from mxfp4prep.engines.experts import run_expert
from mxfp4prep.engines.linears import run_linear
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.rules import SchemeWord
from mxfp4prep.engines.setting import Setting
from mxfp4prep.parallel import SCALE_GROUP
from mxfp4prep.shared_experts import SharedBlock
from mxfp4prep.survey import LayerSurvey


def run_shared(
    setting: Setting, parts: Sequence[LayerSurvey], block: SharedBlock, word: SchemeWord, tp: int
) -> Outcome:
    """The outcome of one linear of the shared expert `block`, built from `parts`."""
    label, fusion = setting.engine.label, setting.engine.shared.fusion
    mode = setting.deployment.shared_experts
    apart = _apart(setting, parts, block, word, tp)
    if not block.fusable or mode == "separate":
        return apart
    if fusion is not None and not setting.on.issuperset(fusion):
        return apart
    fused = _fused(setting, parts, block, word, tp)
    if fusion is not None or mode == "fused" or fused == apart:
        return fused
    if fused.outcome == apart.outcome == "ok":
        return apart._replace(message=f"or {fused.path}, where {label} fuses it")
    return Outcome(
        "unknown",
        None,
        f"not known whether {label} fuses it: fused, {_said(fused)}; apart, {_said(apart)}",
    )


def _fused(
    setting: Setting, parts: Sequence[LayerSurvey], block: SharedBlock, word: SchemeWord, tp: int
) -> Outcome:
    layer, part = parts[0].layer, parts[0].role.part
    whole = setting.deployment.expert_parallel
    return run_expert(
        setting,
        word,
        part=part,
        width=block.width // block.slots,
        hidden=layer.n if part == "down" else layer.k,
        ranks=1 if whole else tp,
        spread=tp if whole else 1,
    )


def _apart(
    setting: Setting, parts: Sequence[LayerSurvey], block: SharedBlock, word: SchemeWord, tp: int
) -> Outcome:
    rule, deployment, width = setting.engine.shared, setting.deployment, block.width
    if deployment.sequence_parallel and setting.family in rule.whole_under_sp:
        return run_linear(setting, parts, word, tp, whole=True)
    even = width % tp == 0 and width // tp % SCALE_GROUP == 0
    if even or setting.family not in rule.replicates:
        return run_linear(setting, parts, word, tp)
    if deployment.expert_parallel or deployment.sequence_parallel:
        made = run_linear(setting, parts, word, tp, whole=True)
        return made._replace(message=made.message or "whole on every rank")
    if width % tp:
        return Outcome(
            "crash",
            None,
            f"ValueError: shared-expert intermediate size {width} must be divisible by "
            f"tensor-parallel size {tp}",
        )
    return Outcome(
        "crash",
        None,
        f"ValueError: the shared expert cannot be tensor-parallelized: {width} / {tp} = "
        f"{width // tp}, not divisible by the group size {SCALE_GROUP}; choose another tp or "
        "enable expert parallelism",
    )


def _said(outcome: Outcome) -> str:
    return f"{outcome.outcome} ({outcome.path})" if outcome.path else outcome.outcome
