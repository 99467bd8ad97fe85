"""The command `diff`: two audits, or two checkpoints that are audited alike first."""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mxfp4prep import options as o
from mxfp4prep.errors import Mxfp4PrepError, UsageError

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c
    from mxfp4prep.report.voice import Voice

EXAMPLES = (
    "diff amd/Qwen3-MXFP4@v1 amd/Qwen3-MXFP4@v2",
    "diff before.json Qwen3-MXFP4",
    "diff Qwen3-MXFP4 Qwen3-MXFP4-new --tp 4,8 --format json",
)

_SIDE_HELP = (
    "{}: the file that `audit --format json` wrote, a checkpoint directory, or "
    "ORG/NAME[@REVISION] on the Hub."
)
AArg = Annotated[str, typer.Argument(metavar="A", help=_SIDE_HELP.format("The first"))]
BArg = Annotated[str, typer.Argument(metavar="B", help=_SIDE_HELP.format("The second"))]


def diff(
    ctx: typer.Context,
    a: AArg,
    b: BArg,
    tp: o.TpOpt = None,
    ep: o.EpOpt = False,
    sp: o.SpOpt = False,
    shared_experts: o.SharedExpertsOpt = o.SharedExperts.auto,
    parallel: o.ParallelOpt = None,
    format: o.FormatOpt = o.Format.text,
) -> None:
    """Say what differs between two audits or two revisions. Exits with 1 if anything does.

    A checkpoint is audited first, from headers alone: at the degrees and with the options given
    here, or as the audit beside it was made. Only degrees that both have are compared.
    """
    from mxfp4prep.comparison import compare

    voice: Voice = ctx.obj
    kept = [_kept_audit(word) for word in (a, b)]
    question = _Question(tp, ep, sp, shared_experts, parallel)
    if None not in kept and (flag := question.flag()) is not None:
        raise UsageError(
            flag,
            "has no effect: A and B are audits that are made already",
            hint="give the checkpoints themselves",
        )
    left = kept[0] or _ask(question, voice, "A", a, kept[1])
    right = kept[1] or _ask(question, voice, "B", b, kept[0])
    if not set(left["tp"]) & set(right["tp"]):
        from mxfp4prep.report.joining import listed

        raise UsageError(
            "--tp",
            "A and B have no degree in common",
            found=f"tp {listed(left['tp'])} and tp {listed(right['tp'])}",
            hint="audit both at the same degrees",
        )
    document = compare(left, right)
    if format is o.Format.json:
        voice.print_json(document)
    else:
        from mxfp4prep.report.diff_text import diff_text

        voice.print_text(lambda screen: diff_text(document, screen, a, b))
    if not document["same"]:
        raise typer.Exit(o.EXIT_NO)


def _kept_audit(word: str) -> c.AuditDocument | None:
    """The audit in the file that `word` names, None where it names a checkpoint."""
    path = Path(word)
    if os.path.lexists(word):  # Path.exists fails on names that no file can have
        if path.is_dir():
            return None
    elif not word.endswith(".json"):
        return None
    from mxfp4prep.comparison import read_audit

    return read_audit(path)


def _ask(
    question: _Question, voice: Voice, letter: str, source: str, beside: c.AuditDocument | None
) -> c.AuditDocument:
    """`question.ask`; errors name files that both checkpoints have, so say which one it is."""
    try:
        return question.ask(source, beside)
    except Mxfp4PrepError:
        voice.say(f"{letter} is {source}:")
        raise


class _Question(NamedTuple):
    """How checkpoints are audited, as the command line has it."""

    tp: list[str] | None
    ep: bool
    sp: bool
    shared_experts: o.SharedExperts
    parallel: list[str] | None

    def flag(self) -> str | None:
        """A flag that was given, None where there is none."""
        given = {
            "--tp": self.tp,
            "--ep": self.ep,
            "--sp": self.sp,
            "--shared-experts": self.shared_experts is not o.SharedExperts.auto,
            "--parallel": self.parallel,
        }
        return next((flag for flag, value in given.items() if value), None)

    def ask(self, source: str, beside: c.AuditDocument | None) -> c.AuditDocument:
        """The audit of the checkpoint `source`, made as `beside` was where nothing else is said."""
        from mxfp4prep.auditing import run_audit
        from mxfp4prep.deployment import Deployment
        from mxfp4prep.parallel import parse_rules
        from mxfp4prep.report.audit_document import audit_document
        from mxfp4prep.survey import DEFAULT_TP, check_tp

        degrees = o.parse_numbers("--tp", self.tp, "a tensor-parallel degree")
        deployment = Deployment(self.ep, self.sp, self.shared_experts.value)
        if beside is not None:
            degrees = degrees or tuple(beside["tp"])
            if deployment == Deployment():
                deployment = Deployment(**beside["deployment"])
        rules = parse_rules(self.parallel or ())
        return audit_document(run_audit(source, check_tp(degrees or DEFAULT_TP), rules, deployment))
