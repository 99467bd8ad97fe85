"""Every MXFP4 layer with its role, its cut and its verdict per tensor-parallel degree.

The survey is what audit prints and what the plan decides from.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mxfp4prep.alignment import Verdict, demoted, judge_group, judge_layer, stricter
from mxfp4prep.checkpoint import Checkpoint
from mxfp4prep.collector import collector_paused
from mxfp4prep.deployment import TENSOR_PARALLEL, Deployment, Placement
from mxfp4prep.errors import UsageError
from mxfp4prep.findings import Finding
from mxfp4prep.parallel import Cut, Parallel, Role, Topology, assign_roles, cut_of
from mxfp4prep.quark import Classified, QuarkLayer, classify
from mxfp4prep.shared_experts import SharedBlock, SharedDecision, decide, shared_blocks

DEFAULT_TP = (1, 2, 4, 8)
MAX_TP = 1024


# Tens of thousands are made, and a frozen dataclass takes thrice as long.
class LayerSurvey(NamedTuple):
    """One layer: what it is, how engines cut it, and the verdict on its own stored tensor.

    cut          how tensor parallelism cuts it; `cut_at` counts its placement in
    placements   per degree, how the ranks share it
    whole        expert parallelism: routed experts are not cut
    """

    layer: QuarkLayer
    role: Role
    cut: Cut
    placements: Mapping[int, Placement]
    verdicts: Mapping[int, Verdict]
    whole: bool

    def cut_at(self, tp: int) -> Cut:
        """What is cut at degree `tp`: nothing where the ranks hold it whole."""
        return _cut_at(self.cut, self.placements[tp], self.whole)


@dataclass(frozen=True, slots=True)
class GroupSurvey:
    """One fused projection: the verdict on the concatenation of its members' pieces.

    mixed   members have different schemes (or some are not MXFP4): not fusable
    """

    name: str
    members: tuple[str, ...]
    mixed: bool
    verdicts: Mapping[int, Verdict]


@dataclass(frozen=True, slots=True)
class SharedSurvey:
    """One shared expert with the decision at every degree."""

    block: SharedBlock
    decisions: Mapping[int, SharedDecision]


@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint's layers, groups and shared experts, judged at every degree of `tp`."""

    checkpoint: Checkpoint
    topology: Topology
    classified: Classified
    tp: tuple[int, ...]
    rules: tuple[tuple[str, Parallel], ...]
    deployment: Deployment
    layers: tuple[LayerSurvey, ...]
    groups: tuple[GroupSurvey, ...]
    shared: tuple[SharedSurvey, ...]
    findings: tuple[Finding, ...]

    def decided(self, tp: int) -> dict[str, Verdict]:
        """What each layer can be at degree `tp`, its fused group counted in, by layer name."""
        decided = {item.layer.name: item.verdicts[tp] for item in self.layers}
        for group in self.groups:
            if not group.mixed:
                own = [decided[member] for member in group.members]
                verdicts = together(own, group.verdicts[tp])
                decided.update(zip(group.members, verdicts, strict=True))
        return decided


def together(own: Sequence[Verdict], group: Verdict) -> tuple[Verdict, ...]:
    """What the parts of a fused group can be, from their own verdicts and the group's.

    The stricter of the two; and all parts go one way, so a part that could be asm is triton
    ("group_part") when another part cannot.
    """
    parts = tuple(stricter(verdict, group) for verdict in own)
    if all(verdict.path == "asm" for verdict in parts):
        return parts
    return tuple(
        demoted(verdict, "group_part") if verdict.path == "asm" else verdict for verdict in parts
    )


@collector_paused()
def survey(
    checkpoint: Checkpoint,
    tp: Sequence[int] = DEFAULT_TP,
    rules: Sequence[tuple[str, Parallel]] = (),
    deployment: Deployment = TENSOR_PARALLEL,
) -> Survey:
    """Judges every layer and fused group of `checkpoint` at every degree in `tp`.

    deployment   what an operator chooses beside the degree

    Raises what `classify` raises for a checkpoint that is not Quark MXFP4.
    """
    degrees = check_tp(tp)
    topology = Topology.from_config(checkpoint.config)
    classified = classify(checkpoint.tensors, checkpoint.config, topology)
    names = [layer.name for layer in classified.layers]
    for pattern, kind in rules:
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"--parallel {pattern}={kind}",
                "matches no MXFP4 layer",
                hint=f"patterns match the whole name, for example '*{pattern.strip('*')}={kind}'",
            )
    roles = assign_roles([*names, *classified.others], rules, topology.model_type)
    shared = _survey_shared(classified, degrees, deployment)
    layers = tuple(_survey_layers(classified.layers, roles, topology, degrees, shared, deployment))
    groups = tuple(_survey_groups(layers, classified.others, roles, degrees))
    findings = [*checkpoint.findings, *classified.findings]
    findings += _role_findings(layers, topology, degrees)
    findings += _group_findings(groups)
    findings += _shared_findings(shared.values(), deployment)
    return Survey(
        checkpoint=checkpoint,
        topology=topology,
        classified=classified,
        tp=degrees,
        rules=tuple(rules),
        deployment=deployment,
        layers=layers,
        groups=groups,
        shared=tuple(shared.values()),
        findings=tuple(findings),
    )


def check_tp(tp: Iterable[int]) -> tuple[int, ...]:
    """Tensor-parallel degrees, sorted and unique. Raises UsageError outside 1..MAX_TP."""
    degrees = tuple(sorted(set(tp)))
    if not degrees or degrees[0] < 1 or degrees[-1] > MAX_TP:
        raise UsageError(
            "--tp",
            "not a tensor-parallel degree",
            found=", ".join(map(str, degrees)) or "nothing",
            expected=f"whole numbers from 1 to {MAX_TP}",
        )
    return degrees


def _survey_shared(
    classified: Classified, degrees: tuple[int, ...], deployment: Deployment
) -> dict[str, SharedSurvey]:
    """Every shared expert, by module name; equal ones share their decisions."""
    known: dict[tuple[int, bool], dict[int, SharedDecision]] = {}
    shared = {}
    for name, block in shared_blocks(classified.layers, classified.others).items():
        key = (block.width, block.fusable)
        if key not in known:
            known[key] = {tp: decide(block, tp, deployment) for tp in degrees}
        shared[name] = SharedSurvey(block, known[key])
    return shared


def _survey_layers(
    layers: Sequence[QuarkLayer],
    roles: Mapping[str, Role],
    topology: Topology,
    degrees: tuple[int, ...],
    shared: Mapping[str, SharedSurvey],
    deployment: Deployment,
) -> Iterable[LayerSurvey]:
    placements = _Placements(degrees, shared, deployment)
    known: dict[tuple[Cut, int, int, bool, int, bool], dict[int, Verdict]] = {}
    whole = deployment.expert_parallel
    for layer in layers:
        role = roles[layer.name]
        cut = cut_of(role, layer.n, topology, layer.gate_up == "interleaved")
        placed = placements.of(layer, role)
        alone = _is_dense_a4w4(layer) and role.group is None
        key = (cut, layer.n, layer.k, layer.is_matrix, id(placed), alone)
        verdicts = known.get(key)
        if verdicts is None:
            verdicts = {
                tp: judge_layer(
                    _cut_at(cut, placed[tp], whole),
                    layer.n,
                    layer.k,
                    tp,
                    layer.is_matrix,
                    alone and placed[tp] != "fused",
                )
                for tp in degrees
            }
            known[key] = verdicts
        yield LayerSurvey(layer, role, cut, placed, verdicts, whole)


def _is_dense_a4w4(layer: QuarkLayer) -> bool:
    """Whether AITER's dense W4A4 GEMM runs it, by itself or in a fused projection."""
    return layer.scheme == "w4a4" and layer.kind != "expert"


def _cut_at(cut: Cut, placement: Placement, whole_experts: bool) -> Cut:
    if placement in ("replicated", "distributed") or (placement == "fused" and whole_experts):
        return Cut("none")
    return cut


class _Placements:
    """Placements per degree, one mapping for all layers that are placed alike."""

    def __init__(
        self,
        degrees: tuple[int, ...],
        shared: Mapping[str, SharedSurvey],
        deployment: Deployment,
    ) -> None:
        self._sliced: dict[int, Placement] = dict.fromkeys(degrees, "sliced")
        self._replicated: dict[int, Placement] = dict.fromkeys(degrees, "replicated")
        experts: dict[int, Placement] = {
            tp: "sliced" if tp == 1 else "distributed" for tp in degrees
        }
        self._experts = experts if deployment.expert_parallel else self._sliced
        by_decisions: dict[int, dict[int, Placement]] = {}
        self._shared: dict[str, dict[int, Placement]] = {}
        for item in shared.values():
            placed = by_decisions.get(id(item.decisions))
            if placed is None:
                placed = {
                    tp: "sliced" if made.decision == "impossible" else made.decision
                    for tp, made in item.decisions.items()
                }
                by_decisions[id(item.decisions)] = placed
            self._shared.update(dict.fromkeys(item.block.members, placed))

    def of(self, layer: QuarkLayer, role: Role) -> Mapping[int, Placement]:
        """How the ranks share `layer`, per degree."""
        if layer.kind == "shared_expert":
            return self._shared.get(layer.name, self._sliced)
        if role.parallel == "expert":
            return self._experts
        if role.parallel in ("replicated", "unknown"):
            return self._replicated
        return self._sliced


def _survey_groups(
    layers: Sequence[LayerSurvey],
    others: Mapping[str, str],
    roles: Mapping[str, Role],
    degrees: tuple[int, ...],
) -> Iterable[GroupSurvey]:
    members: dict[str, list[LayerSurvey]] = {}
    for item in layers:
        if item.role.group is not None:
            members.setdefault(item.role.group, []).append(item)
    strangers = {roles[name].group for name in others if roles[name].group is not None}
    shared: dict[tuple[object, ...], dict[int, Verdict]] = {}
    for name, items in members.items():
        first = items[0].layer
        mixed = name in strangers or any(
            (item.layer.scheme, item.layer.activation, item.layer.k, item.layer.experts)
            != (first.scheme, first.activation, first.k, first.experts)
            for item in items
        )
        names = tuple(item.layer.name for item in items)
        if mixed:
            worst = {tp: _strictest([item.verdicts[tp] for item in items]) for tp in degrees}
            yield GroupSurvey(name, names, True, worst)
            continue
        dense = _is_dense_a4w4(first)
        key = (*((item.cut, item.layer.n, id(item.placements)) for item in items), first.k, dense)
        verdicts = shared.get(key)
        if verdicts is None:
            verdicts = {
                tp: judge_group(
                    [(item.cut_at(tp), item.layer.n) for item in items],
                    first.k,
                    tp,
                    dense and items[0].placements[tp] != "fused",
                )
                for tp in degrees
            }
            shared[key] = verdicts
        yield GroupSurvey(name, names, False, verdicts)


def _strictest(verdicts: Sequence[Verdict]) -> Verdict:
    """The strictest verdict of a group that cannot be fused, marked as such."""
    worst = verdicts[0]
    for verdict in verdicts[1:]:
        worst = stricter(worst, verdict)
    path = "triton" if worst.path == "asm" else worst.path
    return worst._replace(
        path=path, reasons=(*worst.reasons, "mixed_group"), scale_shard=None, hazards=()
    )


def _replication_findings(
    layers: Sequence[LayerSurvey], topology: Topology, degrees: tuple[int, ...]
) -> list[Finding]:
    """With more ranks than KV heads, ranks share heads, and their rows count on each of them."""
    shared = [tp for tp in degrees if topology.kv_heads and tp % topology.kv_heads == 0]
    shared = [tp for tp in shared if tp > topology.kv_heads]
    heads = [item for item in layers if any(block.replicate for block in item.cut.blocks)]
    if not shared or not heads:
        return []
    counts = ", ".join(f"{tp // topology.kv_heads} ranks at tp {tp}" for tp in shared)
    return [
        Finding(
            "kv_replicated",
            "note",
            heads[0].layer.name,
            f"each of the {topology.kv_heads} KV heads is held by {counts}: the verdict counts its "
            f"rows on every one of them ({len(heads)} layers)",
        )
    ]


def _role_findings(
    layers: Sequence[LayerSurvey], topology: Topology, degrees: tuple[int, ...]
) -> list[Finding]:
    findings = []
    unknown = [item.layer.name for item in layers if item.role.parallel == "unknown"]
    if unknown:
        findings.append(
            Finding(
                "unknown_parallel",
                "note",
                unknown[0],
                f"{len(unknown)} layers have names that no rule knows: judged unsharded; "
                "say how they are cut with --parallel 'PATTERN=KIND'",
            )
        )
    findings += _replication_findings(layers, topology, degrees)
    headless = [item.layer.name for item in layers if item.role.parallel == "qkv"]
    if headless and not topology.heads:
        findings.append(
            Finding(
                "no_head_counts",
                "warning",
                headless[0],
                "config.json has no num_attention_heads: attention is cut by rows, heads unknown",
            )
        )
    return findings


def _group_findings(groups: Sequence[GroupSurvey]) -> list[Finding]:
    mixed = [group.name for group in groups if group.mixed]
    if not mixed:
        return []
    return [
        Finding(
            "mixed_group",
            "warning",
            mixed[0],
            f"{len(mixed)} fused projections have parts of different schemes: converted part by "
            "part, and an engine that fuses them will refuse",
        )
    ]


def _shared_findings(shared: Iterable[SharedSurvey], deployment: Deployment) -> list[Finding]:
    """Shared experts that were to be fused and cannot be."""
    if deployment.shared_experts != "fused":
        return []
    apart = [item.block for item in shared if not item.block.fusable]
    if not apart:
        return []
    return [
        Finding(
            "shared_expert_apart",
            "warning",
            apart[0].name,
            f"{len(apart)} shared experts cannot be fused into the routed ones: {apart[0].why}",
        )
    ]
