"""What the engine of `convert --for` can take: asm where it runs that, else layers as they were.

mxfp4prep's own runtime and its vLLM plugin take both paths in one model. SGLang and ATOM read
weights and scales as they were wherever they do not run the ASM GEMM, and which linears they run
on it is what `engines` knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mxfp4prep.engines import ENGINES, predict
from mxfp4prep.engines.modules import bank_of
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.padding import added_nbytes, pads_of
from mxfp4prep.engines.rules import ExpertRule
from mxfp4prep.errors import UsageError
from mxfp4prep.findings import Finding
from mxfp4prep.manifest import EngineName
from mxfp4prep.survey import LayerSurvey, Survey


@dataclass(frozen=True, slots=True)
class Target:
    """One word of --for.

    table       the engine whose rules decide, in ENGINES; "" where the plan's own do
    asm         switches of it that ask for the ASM GEMM
    plain       switch of it without which it does not run linears as they were, or ""
    one_choice  all linears but heads take one path
    """

    name: EngineName
    label: str
    table: str = ""
    asm: Mapping[str, str] = field(default_factory=dict)
    plain: str = ""
    one_choice: bool = False


TARGETS: dict[EngineName, Target] = {
    target.name: target
    for target in (
        Target("mxfp4prep", "mxfp4prep"),
        Target("vllm", "vLLM"),
        Target("sglang", "SGLang", "sglang-0.5", asm={"SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM": "1"}),
        Target(
            "atom",
            "ATOM",
            "atom",
            plain="ATOM_USE_FP4_NON_SHUFFLE_TRITON_GEMM",
            one_choice=True,
        ),
    )
}
"""Every word of --for."""

Reasons = Mapping[str, tuple[str, ...]]
"""Codes of REASONS per layer name; none for a layer that can be asm."""


def check_layout(target: Target, layout: str) -> None:
    """Nothing; raises UsageError for a --layout that the engine of `target` does not read."""
    if target.table and layout == "triton":
        raise UsageError(
            "--layout triton",
            f"{target.label} reads the scale as it was, not transposed as this path stores it",
            hint=f"leave --layout out: what {target.label} does not run on the ASM GEMM stays as "
            "it was; --keep '*' leaves every layer so",
        )


def left_for(target: Target, survey: Survey, tp: Sequence[int], stopped: Reasons) -> Reasons:
    """The layers that are left as they were for the engine of `target`, and why; the rest is asm.

    stopped   what keeps layers from the ASM path whatever the engine
    returns   per layer that is left, its own reasons and those of the engine. Empty for an engine
              that takes every layer on the path that its reasons lead to
    """
    if not target.table:
        return {}
    outcomes = predict(target.table, survey, switches=target.asm).outcomes
    rule = ENGINES[target.table].experts
    left: dict[str, tuple[str, ...]] = {}
    together: dict[str, list[str]] = {}
    for item in survey.layers:
        name = item.layer.name
        expert = item.role.parallel == "expert"
        if expert:
            together.setdefault(bank_of(name) or name, []).append(name)
        elif target.one_choice and item.role.part != "vocab":  # a head is no linear of ATOM's
            together.setdefault("", []).append(name)
        code = _code(item, tp, outcomes[name], rule if expert else None)
        if stopped[name] or code:
            left[name] = (*stopped[name], code or "engine")
    for names in together.values():
        if not left.keys().isdisjoint(names):
            left |= {name: (*stopped[name], "engine_all") for name in names if name not in left}
    return left


def _code(
    item: LayerSurvey, tp: Sequence[int], outcomes: Mapping[int, Outcome], rule: ExpertRule | None
) -> str:
    """Why the engine does not take the layer as asm, as a code of REASONS; "" where it does.

    rule   that of experts; None for a linear
    """
    path = "asm" if rule is None else "moe-aiter"
    if any(outcomes[degree][:2] != ("ok", path) for degree in tp):
        return "engine"
    pads = None if rule is None else pads_of(rule, path)
    return "engine_pad" if any(added_nbytes(item, degree, pads) for degree in tp) else ""


def target_findings(target: Target, survey: Survey, left: Reasons) -> list[Finding]:
    """What whoever serves the result has to know: who reads it, and with which switches."""
    if not target.table:
        return []
    linears = {i.layer.name for i in survey.layers if i.role.parallel != "expert"}
    switches: dict[str, str] = {}
    if linears - left.keys():
        switches |= target.asm
    elif target.plain:
        switches[target.plain] = "1"
    to_set = "".join(f", to run with {name}={value}" for name, value in switches.items())
    return [
        Finding(
            "engine",
            "warning",
            target.label,
            f"laid out as {ENGINES[target.table].version} would hold it{to_set}, for a loader of "
            "your own: as released it has none for prepared checkpoints, and serves what "
            "`mxfp4prep restore` gives back",
        )
    ]
