"""One audit: a checkpoint opened, surveyed and judged, with all that was asked beside it.

The verdicts and the cost always; an engine's view, and what the scale bytes hold, when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxfp4prep.checkpoint import AGAIN, Checkpoint
from mxfp4prep.cost import Cost, Shapes, banks_of, costs, largest_clean, shapes_of
from mxfp4prep.decisions import Decisions, decide
from mxfp4prep.deployment import TENSOR_PARALLEL, Deployment
from mxfp4prep.errors import naming
from mxfp4prep.findings import Finding
from mxfp4prep.hub import Progress, open_source
from mxfp4prep.parallel import Parallel
from mxfp4prep.survey import DEFAULT_TP, Survey, survey

if TYPE_CHECKING:
    from mxfp4prep.engines import Prediction
    from mxfp4prep.values import ScaleValues

    _Ask = Callable[[Survey, Decisions], Prediction]


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found.

    costs           per degree of the survey
    shapes          the distinct shapes, for trying other degrees and deployments
    largest_clean   the largest degree at which every layer is asm, tried beyond the asked ones
    prediction      what one engine does with the checkpoint, None when none was asked about
    values          what the scale bytes hold, None when they were not read
    findings        of the survey, the engine and the values
    """

    survey: Survey
    decisions: Decisions
    costs: Mapping[int, Cost]
    shapes: Shapes
    largest_clean: int | None
    prediction: Prediction | None
    values: ScaleValues | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class EngineQuestion:
    """Which engine to ask about: its name, its switches as NAME=VALUE, AITER's tuned tables."""

    name: str
    switches: tuple[str, ...] = ()
    tables: Path | None = None


Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None] | None]]
"""Shows progress of (what is done, how much in all); yields what to call with each step."""


def run_audit(
    source: str,
    tp: Sequence[int] = DEFAULT_TP,
    rules: Sequence[tuple[str, Parallel]] = (),
    deployment: Deployment = TENSOR_PARALLEL,
    engine: EngineQuestion | None = None,
    *,
    values: bool = False,
    watch: Watch | None = None,
    headers: Progress | None = None,
) -> Audit:
    """Audits `source`, a checkpoint directory or `org/name[@revision]` on the Hub.

    Reads headers only, and with `values` all scale bytes. Raises what opening, classifying and
    reading raise, and UsageError for an engine or switch that does not exist.

    watch     shows how far the reading of scale bytes is
    headers   called as headers come from the Hub
    """
    ask = _prepare(engine)  # a wrong word is said before the checkpoint is read
    checkpoint = open_source(source, progress=headers)
    with naming(Path(source), AGAIN):
        return _audit(checkpoint, tp, rules, deployment, ask, values, watch)


def audit_checkpoint(
    checkpoint: Checkpoint,
    tp: Sequence[int] = DEFAULT_TP,
    rules: Sequence[tuple[str, Parallel]] = (),
    deployment: Deployment = TENSOR_PARALLEL,
    engine: EngineQuestion | None = None,
    *,
    values: bool = False,
    watch: Watch | None = None,
) -> Audit:
    """`run_audit` of a checkpoint that is open already."""
    return _audit(checkpoint, tp, rules, deployment, _prepare(engine), values, watch)


def _audit(
    checkpoint: Checkpoint,
    tp: Sequence[int],
    rules: Sequence[tuple[str, Parallel]],
    deployment: Deployment,
    ask: _Ask | None,
    values: bool,
    watch: Watch | None,
) -> Audit:
    found = survey(checkpoint, tp, rules, deployment)
    decisions = decide(found)
    prediction = None if ask is None else ask(found, decisions)
    read = _read_values(found, watch) if values else None
    findings = found.findings
    if prediction is not None:
        findings += prediction.findings
    if read is not None:
        from mxfp4prep.values import value_findings

        findings += value_findings(read)
    banks = banks_of(found)
    shapes = shapes_of(found, banks)
    return Audit(
        survey=found,
        decisions=decisions,
        costs=costs(found, decisions, banks),
        shapes=shapes,
        largest_clean=largest_clean(found, shapes=shapes),
        prediction=prediction,
        values=read,
        findings=findings,
    )


def _prepare(question: EngineQuestion | None) -> _Ask | None:
    """The question ready to be asked, its words checked and AITER's tables read."""
    if question is None:
        return None
    from mxfp4prep.engines import find_tuned, parse_switches, predict

    switches = parse_switches(question.name, question.switches)
    tuned = find_tuned(question.tables)
    return lambda found, decisions: predict(
        question.name, found, switches=switches, tuned=tuned, decisions=decisions
    )


def _read_values(found: Survey, watch: Watch | None) -> ScaleValues:
    from mxfp4prep.values import read_values

    layers = [item.layer for item in found.layers]
    total = sum(layer.scale.nbytes for layer in layers)
    with nullcontext() if watch is None else watch("reading scales", total) as advance:
        return read_values(found.checkpoint, layers, advance)
