"""How layers are stored, for people: the plan before a conversion and the manifest after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from mxfp4prep.findings import Finding
from mxfp4prep.report.audit_text import (
    SHOWN,
    finding_lines,
    legend,
    shape_of,
    source_lines,
)
from mxfp4prep.report.families import gather
from mxfp4prep.report.joining import merge_siblings
from mxfp4prep.report.screen import Row, Screen, counted, human
from mxfp4prep.report.tally import stored_shares
from mxfp4prep.targets import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

    from mxfp4prep.manifest import EngineName, LayerRecord, Manifest
    from mxfp4prep.plan import Plan
    from mxfp4prep.report import contract as c


class Stored(NamedTuple):
    """What the table shows of one layer. Equal ones with alike names share a row."""

    n: int
    k: int
    experts: int | None
    scheme: str
    path: str
    weight_layout: str
    scale_layout: str
    reasons: tuple[str, ...]
    hazards: tuple[str, ...]
    verdict: tuple[tuple[str, str], ...]


def plan_text(plan: Plan, out: Path, screen: Screen) -> list[str]:
    """Lines of a dry run: what would be written where."""
    layers = [
        (
            item.layer.name,
            Stored(
                item.layer.n,
                item.layer.k,
                item.layer.experts,
                item.layer.scheme,
                item.path,
                item.weight_layout,
                item.scale_layout,
                item.reasons,
                item.hazards,
                tuple((str(tp), verdict.path) for tp, verdict in item.verdicts.items()),
            ),
        )
        for item in plan.layers
    ]
    degrees = ", ".join(map(str, plan.tp))
    if plan.survey.deployment.expert_parallel:
        degrees += " with expert parallelism"
    lines = source_lines(plan.survey.checkpoint, len(layers), screen)
    lines += screen.wrap(
        f"would be written to {screen.name(out)} for tp {degrees}{laid_out_for(plan.engine)}, "
        f"layout {plan.layout}"
    )
    lines += ["", *stored_table(layers, screen)]
    lines += ["", *share_lines(_plan_shares(plan), screen)]
    return [*lines, "", *screen.wrap("next: the same command without --dry-run")]


def laid_out_for(engine: EngineName) -> str:
    """`, laid out for SGLang`; nothing for mxfp4prep's own runtime."""
    return "" if engine == "mxfp4prep" else f", laid out for {TARGETS[engine].label}"


def _plan_shares(plan: Plan) -> c.StoredPathsDocument:
    return stored_shares(
        (p.path, p.reasons, p.layer.weight.nbytes + p.layer.scale.nbytes) for p in plan.layers
    )


def show_text(manifest: Manifest, shares: c.StoredPathsDocument, screen: Screen) -> list[str]:
    """Lines of the manifest: where it comes from, how each layer is stored, what was noticed."""
    source, target = manifest.source, manifest.target
    origin = screen.name(source.name)
    if source.repo is not None:
        origin += f" (from {screen.name(source.repo)} at {screen.name(source.commit)})"
    degrees = ", ".join(map(str, target.tp))
    if target.expert_parallel:
        degrees += " with expert parallelism"
    nbytes = human(sum(file.nbytes for file in manifest.files))
    lines = screen.wrap(
        f"{origin}: prepared by mxfp4prep {screen.name(manifest.tool_version)} for "
        f"{screen.name(target.gfx)} at tp {degrees}{laid_out_for(target.engine)}; "
        f"{counted(len(manifest.files), 'file')}, {nbytes}, "
        f"{counted(len(manifest.layers), 'MXFP4 layer')}, "
        f"{counted(len(manifest.tensors), 'copied tensor')}"
    )
    layers = [(record.name, _stored(record)) for record in manifest.layers]
    lines += ["", *stored_table(layers, screen)]
    if manifest.findings:
        lines += ["", "findings"]
        for f in manifest.findings:
            lines += finding_lines(Finding(f.code, f.severity, f.where, f.message), screen)
    return [*lines, "", *share_lines(shares, screen)]


def _stored(record: LayerRecord) -> Stored:
    return Stored(
        record.n,
        record.k,
        record.experts,
        record.scheme,
        record.path,
        record.weight.layout,
        record.scale.layout,
        tuple(record.reasons),
        tuple(record.hazards),
        tuple(record.verdict.items()),
    )


def stored_table(layers: Iterable[tuple[str, Stored]], screen: Screen) -> list[str]:
    """A row per family of layers: path, layouts, reasons and verdicts; then the legend."""
    rows = []
    reasons: set[str] = set()
    hazards: set[str] = set()
    for family in gather((name, stored, stored) for name, stored in layers):
        one = family.first
        path = "kept" if "kept" in one.reasons else one.path
        cells = (shape_of(one.n, one.k, one.experts), one.scheme, path)
        layouts = f"{one.weight_layout} + {one.scale_layout}"
        why = ", ".join((*one.reasons, *one.hazards))
        notes = (*((why,) if why else ()), _verdict_words(one.verdict))
        rows.append((family.name, family.count, (*cells, layouts), notes))
        reasons |= set(one.reasons)
        hazards |= set(one.hazards)
    head = ("layer", "layers", "shape", "scheme", "path", "weight + scale layout")
    lines = screen.table(head, merge_siblings(rows, screen), right=(1,))
    return lines + legend(reasons, hazards, screen)


def _verdict_words(verdict: Iterable[tuple[str, str]]) -> str:
    """`asm at tp 1, 2; IMPOSSIBLE at tp 4, 8`: what each degree would allow."""
    degrees: dict[str, list[str]] = {}
    for tp, path in verdict:
        degrees.setdefault(SHOWN.get(path, path), []).append(tp)
    return "; ".join(f"{path} at tp {', '.join(tps)}" for path, tps in degrees.items())


def share_lines(shares: c.StoredPathsDocument, screen: Screen) -> list[str]:
    """Layers and bytes per stored path."""
    named = {"asm": shares["asm"], "triton": shares["triton"], "kept": shares["kept"]}
    rows = [
        Row((path, f"{share['layers']:,}", human(share["nbytes"])))
        for path, share in named.items()
        if share["layers"] or path != "kept"
    ]
    return screen.table(("path", "layers", "bytes"), rows, right=(1, 2))
