"""The audit for people: repeated layers in one row, reasons in words, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mxfp4prep.alignment import (
    HAZARDS,
    REASONS,
    RULE,
    SCALE_COLUMN_MULTIPLE,
    SCALE_ROW_MULTIPLE,
    Path,
    Verdict,
    demoted,
)
from mxfp4prep.decisions import Decisions, distinct
from mxfp4prep.findings import Finding
from mxfp4prep.report.caveats import EXPERTS
from mxfp4prep.report.cost_text import cost_lines
from mxfp4prep.report.engine_text import engine_lines
from mxfp4prep.report.families import Family, gather
from mxfp4prep.report.joining import listed, merge_siblings
from mxfp4prep.report.recommendation import best_degree, recommendation_lines
from mxfp4prep.report.screen import Row, Screen, counted, human
from mxfp4prep.report.shared_text import shared_lines
from mxfp4prep.report.tally import ASM_ONLY, PATHS, POSSIBLE, degrees_of, shares

if TYPE_CHECKING:
    from mxfp4prep.auditing import Audit
    from mxfp4prep.checkpoint import Checkpoint
    from mxfp4prep.deployment import Deployment
    from mxfp4prep.survey import GroupSurvey, LayerSurvey, Survey
    from mxfp4prep.values import ScaleValues

_Verdicts = Mapping[int, Verdict]

_TRITON_ONLY: frozenset[Path] = frozenset({"triton"})
_SEVERITIES = ("error", "warning", "note")

SHOWN = {"asm": "asm", "triton": "triton", "impossible": "IMPOSSIBLE"}


def audit_text(audit: Audit, screen: Screen, command: str) -> list[str]:
    """Lines of the audit. `command` is how the checkpoint is named in the command to run next."""
    survey, decisions = audit.survey, audit.decisions
    lines = source_lines(survey.checkpoint, len(survey.layers), screen)
    lines += screen.wrap(
        f"ASM needs scales with {RULE} on every rank; anything else runs on Triton."
    )
    lines += _deployment_lines(survey.deployment, screen)
    if audit.prediction is None and any(item.role.parallel == "expert" for item in survey.layers):
        lines += screen.wrap(EXPERTS)
    lines += _short_lines(survey, decisions, screen)
    lines += ["", *_layer_table(survey, decisions, screen)]
    groups = _group_families(survey, decisions)
    if groups:
        lines += ["", *_group_table(survey, groups, screen)]
    seen = [v for mapping in distinct(decisions.values()) for v in mapping.values()]
    seen += [verdict for family in groups for verdict in family.first[1].values()]
    lines += legend(
        (reason for v in seen for reason in v.reasons), (h for v in seen for h in v.hazards), screen
    )
    lines += shared_lines(survey, screen)
    lines += engine_lines(audit, screen)
    if audit.values is not None:
        lines += ["", *_value_lines(audit.values, screen)]
    if audit.findings:
        lines += ["", "findings"]
        worst_first = sorted(audit.findings, key=lambda f: _SEVERITIES.index(f.severity))
        lines += [line for finding in worst_first for line in finding_lines(finding, screen)]
    lines += ["", *_share_table(survey, decisions, screen)]
    lines += ["", *cost_lines(survey, audit.costs, screen)]
    lines += ["", *recommendation_lines(audit, screen)]
    lines += ["", _next(audit, command)]
    return lines


def _deployment_lines(deployment: Deployment, screen: Screen) -> list[str]:
    """How the ranks share the model where that is not tensor parallelism alone."""
    words = []
    if deployment.expert_parallel:
        words.append("expert parallelism: whole routed experts are spread over the ranks")
    if deployment.sequence_parallel:
        words.append("sequence parallelism in the MoE blocks")
    if deployment.shared_experts != "auto":
        words.append(f"shared experts {deployment.shared_experts}")
    return screen.wrap(f"With {', '.join(words)}.") if words else []


def _short_lines(survey: Survey, decisions: Decisions, screen: Screen) -> list[str]:
    """The degrees by the worst that happens there, in one line."""
    clean = degrees_of(decisions, survey.tp, ASM_ONLY)
    possible = degrees_of(decisions, survey.tp, POSSIBLE)
    none = degrees_of(decisions, survey.tp, _TRITON_ONLY)
    kinds = (
        ("all layers on ASM", clean),
        ("some on Triton", [tp for tp in possible if tp not in (*clean, *none)]),
        ("all on Triton", none),
        ("some that cannot be split", [tp for tp in survey.tp if tp not in possible]),
    )
    words = [f"{what} at tp {listed(degrees)}" for what, degrees in kinds if degrees]
    return screen.wrap(f"In short: {'; '.join(words)}.")


def _value_lines(values: ScaleValues, screen: Screen) -> list[str]:
    """What the scale bytes hold."""
    return screen.wrap(
        f"scale bytes: {values.scales:,} read ({human(values.nbytes)}), {values.nan:,} are 255 "
        f"(NaN), {values.zero_blocks:,} are 0 or 1 (blocks of zeros, or as small), the others are "
        f"{values.minimum} to {values.maximum} (2^{values.minimum - 127} to "
        f"2^{values.maximum - 127})"
    )


def source_lines(checkpoint: Checkpoint, layers: int, screen: Screen) -> list[str]:
    """One sentence about the checkpoint."""
    nbytes = sum(entry.nbytes for entry in checkpoint.tensors.values())
    model_type = checkpoint.config.get("model_type")
    facts = [
        screen.name(model_type) if isinstance(model_type, str) else "model type not stated",
        counted(len(checkpoint.shards), "safetensors file"),
        counted(len(checkpoint.tensors), "tensor"),
        human(nbytes),
        counted(layers, "MXFP4 layer"),
    ]
    return screen.wrap(f"{screen.name(checkpoint.name)}: {', '.join(facts)}")


def shape_of(n: int, k: int, experts: int | None) -> str:
    """`2560x640`, or `128x2560x640` for a bank of 128 experts."""
    return f"{n}x{k}" if experts is None else f"{experts}x{n}x{k}"


def legend(reasons: Iterable[str], hazards: Iterable[str], screen: Screen) -> list[str]:
    """What each code that occurs means, after an empty line; nothing when none occurs."""
    meanings = [(code, REASONS) for code in sorted(set(reasons))]
    meanings += [(code, HAZARDS) for code in sorted(set(hazards))]
    words = {screen.name(code): screen.name(table.get(code, code)) for code, table in meanings}
    if not words:
        return []
    width = max(map(len, words))
    lines = ["", "reasons"]
    for code, meaning in words.items():
        lines += screen.wrap(meaning, f"  {code:<{width}}  ")
    return lines


def finding_lines(finding: Finding, screen: Screen, indent: str = "  ") -> list[str]:
    """`warning: WHERE: message [code]`."""
    words = [screen.name(word) for word in (finding.where, finding.message, finding.code)]
    text = f"{words[0]}: {words[1]} [{words[2]}]"
    return screen.wrap(f"{screen.paint(finding.severity)}: {text}", indent, indent + "  ")


def _layer_table(survey: Survey, decisions: Decisions, screen: Screen) -> list[str]:
    def items() -> Iterator[tuple[str, tuple[object, ...], LayerSurvey]]:
        for item in survey.layers:
            layer = item.layer
            key = (layer.scheme, layer.n, layer.k, layer.experts, id(decisions[layer.name]))
            yield layer.name, (*key, id(item.verdicts)), item

    rows = []
    for family in gather(items()):
        layer = family.first.layer
        verdicts = decisions[layer.name]
        cells = (shape_of(layer.n, layer.k, layer.experts), layer.scheme)
        notes = _notes(verdicts, family.first.verdicts, family.first.role.group)
        rows.append((family.name, family.count, (*cells, *_verdict_cells(verdicts)), notes))
    head = ("layer", "layers", "shape", "scheme", *(f"tp {tp}" for tp in survey.tp))
    return screen.table(head, merge_siblings(rows, screen), right=(1,))


def _group_families(
    survey: Survey, decisions: Decisions
) -> list[Family[tuple[GroupSurvey, _Verdicts]]]:
    """Fused projections that differ only in numbers as one, with what is decided for them."""

    def items() -> Iterator[tuple[str, tuple[object, ...], tuple[GroupSurvey, _Verdicts]]]:
        for group in survey.groups:
            verdicts = _group_decision(group, decisions)
            key = (_parts(group), group.mixed, *verdicts.values())
            yield group.name, key, (group, verdicts)

    return gather(items())


def _group_table(
    survey: Survey, families: list[Family[tuple[GroupSurvey, _Verdicts]]], screen: Screen
) -> list[str]:
    rows = []
    for family in families:
        group, verdicts = family.first
        parts = screen.name(" + ".join(_parts(group)))
        name = screen.name(family.name)
        rows.append(Row((name, *_verdict_cells(verdicts)), (parts, *_notes(verdicts))))
    lines = screen.wrap(
        "Engines join these parts into one matrix. Prepared part by part, it takes the ASM path "
        "only where each part could, too:"
    )
    return lines + screen.table(("fused", *(f"tp {tp}" for tp in survey.tp)), rows)


def _group_decision(group: GroupSurvey, decisions: Decisions) -> _Verdicts:
    """The group's verdicts, and triton where a part by itself keeps the whole from being asm."""
    decided = {}
    for tp, verdict in group.verdicts.items():
        alone = all(decisions[member][tp].path == "asm" for member in group.members)
        if verdict.path == "asm" and not alone:
            verdict = demoted(verdict, "group_part")
        decided[tp] = verdict
    return decided


def _parts(group: GroupSurvey) -> tuple[str, ...]:
    return tuple(member.rpartition(".")[2] for member in group.members)


def _verdict_cells(verdicts: Mapping[int, Verdict]) -> tuple[str, ...]:
    return tuple(SHOWN[verdict.path] for verdict in verdicts.values())


def _notes(
    verdicts: Mapping[int, Verdict],
    own: Mapping[int, Verdict] | None = None,
    group: str | None = None,
) -> tuple[str, ...]:
    """Why not asm, degrees with the same reasons together; `own` leaves the fused `group` out."""
    alike: dict[tuple[bool, tuple[object, ...]], list[int]] = {}
    for tp, verdict in verdicts.items():
        if verdict.reasons or verdict.hazards:
            joined = own is not None and own[tp] != verdict
            key = (verdict.path == "impossible", verdict.reasons, verdict.hazards)
            alike.setdefault((joined, key), []).append(tp)
    notes = []
    for (joined, _), degrees in alike.items():
        text = _explain([(tp, verdicts[tp]) for tp in degrees])
        whole = f"joined in {group.rpartition('.')[2]}, " if joined and group else ""
        notes.append(f"tp {listed(degrees)}: {whole}{text}")
    return tuple(notes)


def _explain(verdicts: Sequence[tuple[int, Verdict]]) -> str:
    """The reasons that all `verdicts` share, with the numbers that make them so.

    For example `scale_cols (20, 10, 5 columns % 8 = 4, 2, 5)`.
    """
    tp, first = verdicts[0]
    if first.path == "impossible":
        arithmetic = first.detail.replace(f" at tp {tp}:", ":")
        more = ", ..." if len(verdicts) > 1 else ""
        return f"{', '.join(first.reasons)} ({arithmetic}{more})"
    shards = [v.scale_shard for _, v in verdicts if v.scale_shard is not None]
    rows = [shard[0] for shard in shards]
    columns = [shard[1] for shard in shards]
    explained = []
    for reason in (*first.reasons, *first.hazards):
        if reason == "scale_rows" and rows:
            explained.append(f"scale_rows ({_remainders(rows, 'rows', SCALE_ROW_MULTIPLE)})")
        elif reason == "scale_cols" and any(count % SCALE_COLUMN_MULTIPLE for count in columns):
            text = _remainders(columns, "columns", SCALE_COLUMN_MULTIPLE)
            explained.append(f"scale_cols ({text})")
        else:
            explained.append(reason)
    return ", ".join(explained)


def _remainders(counts: Sequence[int], noun: str, multiple: int) -> str:
    """`20, 10 columns % 8 = 4, 2`; one number where all are the same."""
    distinct = list(dict.fromkeys(counts))
    return f"{listed(distinct)} {noun} % {multiple} = {listed([c % multiple for c in distinct])}"


def _share_table(survey: Survey, decisions: Decisions, screen: Screen) -> list[str]:
    rows = []
    for tp, share in shares(survey, decisions).items():
        counts = (share["asm"], share["triton"], share["impossible"])
        cells = [
            f"{count['layers']:,} ({human(count['nbytes'])})" if count["layers"] else "-"
            for count in counts
        ]
        rows.append(Row((f"tp {tp}", *cells)))
    return screen.table(("layers", *(SHOWN[path] for path in PATHS)), rows)


def _next(audit: Audit, command: str) -> str:
    """The command to run next."""
    best = best_degree(audit)
    if best is None:
        return f"next: mxfp4prep audit {command} --tp {audit.largest_clean or 1}"
    ep = " --ep" if audit.survey.deployment.expert_parallel else ""
    return f"next: mxfp4prep convert {command} --tp {best}{ep}"
