"""Every MXFP4 layer with its role, its cut and its verdict per tensor-parallel degree.

The survey is what audit prints and what the plan decides from.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxfp4prep.alignment import Verdict, judge_group, judge_layer, stricter
from mxfp4prep.checkpoint import Checkpoint
from mxfp4prep.collector import collector_paused
from mxfp4prep.errors import UsageError
from mxfp4prep.findings import Finding
from mxfp4prep.parallel import Cut, Parallel, Role, Topology, assign_roles, cut_of
from mxfp4prep.quark import Classified, QuarkLayer, classify

DEFAULT_TP = (1, 2, 4, 8)
MAX_TP = 1024


@dataclass(frozen=True, slots=True)
class LayerSurvey:
    """One layer: what it is, how engines cut it, and the verdict on its own stored tensor."""

    layer: QuarkLayer
    role: Role
    cut: Cut
    verdicts: Mapping[int, Verdict]


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
class Survey:
    """A checkpoint's layers and groups, judged at every degree of `tp`."""

    checkpoint: Checkpoint
    topology: Topology
    classified: Classified
    tp: tuple[int, ...]
    rules: tuple[tuple[str, Parallel], ...]
    layers: tuple[LayerSurvey, ...]
    groups: tuple[GroupSurvey, ...]
    findings: tuple[Finding, ...]

    def decided(self, tp: int) -> dict[str, Verdict]:
        """What each layer can be at degree `tp`, its fused group counted in, by layer name.

        The stricter of the layer's own verdict and its group's; and all parts of a group go one
        way, so a part that could be asm is triton ("group_part") when another part cannot.
        """
        decided = {item.layer.name: item.verdicts[tp] for item in self.layers}
        for group in self.groups:
            if group.mixed:
                continue
            parts = {
                member: stricter(decided[member], group.verdicts[tp]) for member in group.members
            }
            if any(verdict.path != "asm" for verdict in parts.values()):
                for member, verdict in parts.items():
                    if verdict.path == "asm":
                        parts[member] = verdict._replace(path="triton", reasons=("group_part",))
            decided |= parts
        return decided


@collector_paused()
def survey(
    checkpoint: Checkpoint,
    tp: Sequence[int] = DEFAULT_TP,
    rules: Sequence[tuple[str, Parallel]] = (),
) -> Survey:
    """Judges every layer and fused group of `checkpoint` at every degree in `tp`.

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
    roles = assign_roles([*names, *classified.others], rules)
    layers = tuple(_survey_layers(classified.layers, roles, topology, degrees))
    groups = tuple(_survey_groups(layers, classified.others, roles, degrees))
    findings = [*checkpoint.findings, *classified.findings]
    findings += _role_findings(layers, topology, degrees)
    findings += _group_findings(groups)
    return Survey(
        checkpoint, topology, classified, degrees, tuple(rules), layers, groups, tuple(findings)
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


def _survey_layers(
    layers: Sequence[QuarkLayer],
    roles: Mapping[str, Role],
    topology: Topology,
    degrees: tuple[int, ...],
) -> Iterable[LayerSurvey]:
    shared: dict[tuple[Cut, int, int, bool], dict[int, Verdict]] = {}
    for layer in layers:
        role = roles[layer.name]
        cut = cut_of(role, layer.n, topology, layer.gate_up == "interleaved")
        key = (cut, layer.n, layer.k, layer.is_matrix)
        verdicts = shared.get(key)
        if verdicts is None:
            verdicts = {
                tp: judge_layer(cut, layer.n, layer.k, tp, layer.is_matrix) for tp in degrees
            }
            shared[key] = verdicts
        yield LayerSurvey(layer, role, cut, verdicts)


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
    shared: dict[tuple[tuple[Cut, int], ...], dict[int, Verdict]] = {}
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
        parts = tuple((item.cut, item.layer.n) for item in items)
        key = (*parts, (Cut("none"), first.k))
        verdicts = shared.get(key)
        if verdicts is None:
            verdicts = {tp: judge_group(parts, first.k, tp) for tp in degrees}
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
