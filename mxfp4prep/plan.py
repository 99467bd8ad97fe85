"""What convert will do, decided before a byte moves: one path per layer, one header per shard.

Everything that can be refused is refused here. `convert` only carries the plan out, and a dry
run prints the same plan.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mxfp4prep.alignment import ASM_HAZARDS, Verdict
from mxfp4prep.checkpoint import Shard
from mxfp4prep.collector import collector_paused
from mxfp4prep.errors import InvalidCheckpoint, Unsupported, UsageError
from mxfp4prep.findings import Finding
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.manifest import EngineName, LayoutId, PathName
from mxfp4prep.parallel import Role
from mxfp4prep.quark import QuarkLayer
from mxfp4prep.safefile import FLOAT_DTYPES, TensorEntry
from mxfp4prep.survey import DEFAULT_TP, LayerSurvey, Survey
from mxfp4prep.targets import TARGETS, Target, check_layout, left_for, target_findings

LayoutChoice = Literal["auto", "asm", "triton"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's decision: the stored path and why, with the verdict at every degree."""

    layer: QuarkLayer
    role: Role
    path: PathName
    reasons: tuple[str, ...]
    hazards: tuple[str, ...]
    verdicts: Mapping[int, Verdict]
    weight_layout: LayoutId
    scale_layout: LayoutId


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One stored tensor: `matrices` times (rows, cols) bytes, moved by `layout`.

    A copied tensor has layout None and keeps its shape.
    """

    source: TensorEntry
    stored: TensorEntry
    layout: LayoutId | None
    matrices: int
    rows: int
    cols: int
    is_scale: bool = False


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output file: its tensors in the source's order, at the source's offsets."""

    shard: Shard
    tensors: tuple[TensorPlan, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.stored.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole conversion. `tp` holds the degrees that an asm layer must be legal at, `engine`
    is whose rules chose the layouts."""

    survey: Survey
    tp: tuple[int, ...]
    layout: LayoutChoice
    keep: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    shards: tuple[ShardPlan, ...]
    findings: tuple[Finding, ...]
    engine: EngineName = "mxfp4prep"

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the output."""
        return sum(shard.nbytes for shard in self.shards)


def surveyed_degrees(tp: Sequence[int]) -> tuple[int, ...]:
    """The degrees a manifest records: 1, 2, 4, 8 and the requested ones."""
    return tuple(sorted({*DEFAULT_TP, *tp}))


@collector_paused()
def make_plan(
    survey: Survey,
    tp: Sequence[int] = (1,),
    layout: LayoutChoice = "auto",
    keep: Sequence[str] = (),
    engine: EngineName = "mxfp4prep",
) -> Plan:
    """The plan for a survey that covers every degree in `tp`.

    layout   auto: asm where it is legal at every degree, else triton · asm: the same, but refuse
             when any layer would be triton · triton: every layer triton
    keep     globs over layer names; those layers stay raw
    engine   whose layouts they are: for sglang and atom, layers that are not asm stay raw

    Raises InvalidCheckpoint for a finding that is an error and for a bias or input scale that no
    runtime could use, UsageError for a pattern that matches nothing and for a layout that `engine`
    does not read, Unsupported when `layout` is "asm" and a layer cannot be, or when the files are
    on the Hub only.
    """
    target = TARGETS[engine]
    check_layout(target, layout)
    survey.checkpoint.require_local()
    findings = list(survey.findings)
    for finding in findings:
        if finding.severity == "error":
            raise InvalidCheckpoint(finding.where, finding.message, hint="see `mxfp4prep audit`")
    _check_companions(survey)
    findings += _scale_mode_findings(survey)
    kept = _match_keep(survey, keep)
    decided = {degree: survey.decided(degree) for degree in survey.tp}
    own = {item.layer.name: _own_reasons(item, tp, layout, kept) for item in survey.layers}
    group_reasons = _group_reasons(survey, tp, own)
    mixed = {member for group in survey.groups if group.mixed for member in group.members}
    stopped = {
        name: reasons + tuple(r for r in group_reasons.get(name, ()) if r not in reasons)
        for name, reasons in own.items()
    }
    left = left_for(target, survey, tp, stopped)
    layers = []
    for item in survey.layers:
        name = item.layer.name
        reasons = stopped[name]
        if name in left and name not in kept:
            reasons = (*left[name], "kept")
        path: PathName = "triton" if reasons else "asm"
        weight_layout, scale_layout = PATHS["kept" if "kept" in reasons else path]
        verdicts = {degree: decided[degree][name] for degree in survey.tp}
        noticed = [h for v in item.verdicts.values() for h in v.hazards if h not in ASM_HAZARDS]
        if path == "asm":
            noticed += [h for degree in tp for h in decided[degree][name].hazards]
        noticed += ["mixed_group"] if name in mixed else []
        hazards = tuple(dict.fromkeys(noticed))
        layers.append(
            LayerPlan(
                item.layer, item.role, path, reasons, hazards, verdicts, weight_layout, scale_layout
            )
        )
    if layout == "asm":
        _refuse_triton(layers, target)
    findings += _impossible_findings(survey, decided, tp, target)
    findings += target_findings(target, survey, left)
    return Plan(
        survey=survey,
        tp=tuple(tp),
        layout=layout,
        keep=tuple(keep),
        layers=tuple(layers),
        shards=_plan_shards(survey, layers),
        findings=tuple(findings),
        engine=engine,
    )


def _scale_mode_findings(survey: Survey) -> list[Finding]:
    """MX inputs are rounded EVEN here, as Quark's schemes ask; other modes cannot be loaded."""
    others = [
        item.layer
        for item in survey.layers
        if item.layer.scheme in ("w4a4", "w4a6")
        and item.layer.activation.scale_mode not in (None, "even")
    ]
    if not others:
        return []
    mode = others[0].activation.scale_mode
    return [
        Finding(
            "scale_mode",
            "warning",
            others[0].name,
            f"{len(others)} layers ask for inputs with scale mode {mode}: converted, but this "
            "version's runtime knows only even and will refuse to load them",
        )
    ]


def _check_companions(survey: Survey) -> None:
    """Biases and input scales must be of a dtype and shape that a GEMM can take."""
    tensors = survey.checkpoint.tensors
    for item in survey.layers:
        layer = item.layer
        bank = () if layer.experts is None else (layer.experts,)
        shapes = {(*bank, layer.n)}
        scales = {(), bank or (1,)}
        for name, allowed in ((layer.bias, shapes), (layer.input_scale, scales)):
            entry = tensors.get(name) if name is not None else None
            if entry is None:
                continue
            if entry.dtype not in FLOAT_DTYPES or entry.shape not in allowed:
                raise InvalidCheckpoint(
                    f"{survey.checkpoint.shard_of[entry.name].name}: {entry.name}",
                    "cannot go with its layer",
                    found=f"{entry.dtype} {list(entry.shape)}",
                    expected=f"BF16, F16 or F32 {' or '.join(str(list(s)) for s in allowed)}",
                )


def _own_reasons(
    item: LayerSurvey, tp: Sequence[int], layout: LayoutChoice, kept: frozenset[str]
) -> tuple[str, ...]:
    """Why this layer by itself cannot be stored asm; empty when it can."""
    if item.layer.name in kept:
        return ("kept",)
    if layout == "triton":
        return ("forced",)
    verdicts = [item.verdicts[degree] for degree in tp]
    reasons = [reason for verdict in verdicts for reason in verdict.reasons]
    # The stored tensor is the whole one: its own shape must fit the tiles whatever the degree.
    stored = item.verdicts.get(1)
    if stored is not None and stored.path != "asm":
        reasons += [reason for reason in stored.reasons if reason != "bad_tile"]
    return tuple(dict.fromkeys(reasons))


def _group_reasons(
    survey: Survey, tp: Sequence[int], own: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Reasons that a layer takes from its fused group: all members go one way."""
    reasons: dict[str, tuple[str, ...]] = {}
    for group in survey.groups:
        if group.mixed:
            continue
        fused = tuple(dict.fromkeys(r for degree in tp for r in group.verdicts[degree].reasons))
        for member in group.members:
            others_fail = any(own[other] for other in group.members if other != member)
            reasons[member] = fused + (("group_part",) if others_fail and not own[member] else ())
    return reasons


def _match_keep(survey: Survey, keep: Sequence[str]) -> frozenset[str]:
    kept: set[str] = set()
    names = [item.layer.name for item in survey.layers]
    for pattern in keep:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise UsageError(
                f"--keep {pattern}",
                "matches no MXFP4 layer",
                hint=f"patterns match the whole name, for example '*{pattern.strip('*')}'",
            )
        kept.update(matched)
    return frozenset(kept)


def _refuse_triton(layers: Sequence[LayerPlan], target: Target) -> None:
    misfits = [plan for plan in layers if plan.path != "asm"]
    if not misfits:
        return
    first = misfits[0]
    go = "stay as they were" if target.table else "go to the Triton path"
    if len(misfits) == len(layers):
        hint = f"leave --layout out and all {go}"
    else:
        hint = f"leave --layout out: those layers {go}, the others stay asm"
    clean = [tp for tp in first.verdicts if all(p.verdicts[tp].path == "asm" for p in layers)]
    if clean and not any("kept" in plan.reasons for plan in misfits):
        hint += f"; all are asm at --tp {max(clean)}"
    raise Unsupported(
        first.layer.name,
        f"--layout asm, but {len(misfits)} of {len(layers)} layers cannot take the ASM path",
        found=", ".join(first.reasons),
        hint=f"{hint}; `mxfp4prep audit` says what each lacks",
    )


def _impossible_findings(
    survey: Survey,
    decided: Mapping[int, Mapping[str, Verdict]],
    tp: Sequence[int],
    target: Target,
) -> list[Finding]:
    stuck = {
        degree: [
            item for item in survey.layers if decided[degree][item.layer.name].path == "impossible"
        ]
        for degree in tp
    }
    stuck = {degree: items for degree, items in stuck.items() if items}
    if not stuck:
        return []
    degree, items = next(iter(stuck.items()))
    counts = ", ".join(
        f"{len(items)} layer{'s' if len(items) > 1 else ''} at tp {degree}"
        for degree, items in stuck.items()
    )
    why = decided[degree][items[0].layer.name].detail
    routed = any(item.role.parallel == "expert" for items in stuck.values() for item in items)
    way = "; for expert parallelism convert with --ep" if routed else ""
    return [
        Finding(
            "impossible",
            "warning",
            items[0].layer.name,
            f"cannot be split: {counts} ({why}); stored "
            f"{'as they were' if target.table else 'on the Triton path'}, and loading them at "
            f"those degrees is refused{way}",
        )
    ]


def _plan_shards(survey: Survey, layers: Sequence[LayerPlan]) -> tuple[ShardPlan, ...]:
    moved: dict[str, TensorPlan] = {}
    for plan in layers:
        layer = plan.layer
        k_packed, scale_cols = layer.k // 2, -(-layer.k // 32)
        moved[layer.weight.name] = _move(
            layer.weight, plan.weight_layout, layer.experts, layer.n, k_packed
        )
        moved[layer.scale.name] = replace(
            _move(layer.scale, plan.scale_layout, layer.experts, layer.n, scale_cols), is_scale=True
        )
    return tuple(
        ShardPlan(
            shard,
            tuple(moved.get(entry.name) or _copy(entry) for entry in shard.header.tensors),
        )
        for shard in survey.checkpoint.shards
    )


def _move(
    entry: TensorEntry, layout: LayoutId, experts: int | None, rows: int, cols: int
) -> TensorPlan:
    if layout == "raw":
        stored = entry
    else:
        shape = LAYOUTS[layout].stored_shape(rows, cols)
        stored = entry._replace(shape=shape if experts is None else (experts, *shape))
    return TensorPlan(entry, stored, layout, experts or 1, rows, cols)


def _copy(entry: TensorEntry) -> TensorPlan:
    return TensorPlan(entry, entry, None, 1, 1, entry.nbytes)
