"""The commands on an original checkpoint: audit and convert.

A command reads its words, calls one verb and prints what it returns. What the verb needs is
imported when it runs: `--help`, completion and `audit` never load torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mxfp4prep import options as o
from mxfp4prep.errors import UsageError, printable

if TYPE_CHECKING:
    from mxfp4prep.plan import Plan
    from mxfp4prep.report.voice import Voice

AUDIT_TP = (1, 2, 4, 8)
CONVERT_TP = (1,)


def audit(
    ctx: typer.Context,
    source: o.SourceArg,
    tp: o.TpOpt = None,
    parallel: o.ParallelOpt = None,
    format: o.FormatOpt = o.Format.text,
    fail_on: o.FailOnOpt = o.FailOn.impossible,
) -> None:
    """Say which layers can run on the ASM GEMM at each degree, and what stops the others.

    Reads headers only. The degrees are 1, 2, 4 and 8 unless --tp names others.
    """
    from mxfp4prep.checkpoint import open_checkpoint
    from mxfp4prep.parallel import parse_rules
    from mxfp4prep.report.tally import decide
    from mxfp4prep.survey import check_tp, survey

    voice: Voice = ctx.obj
    degrees = check_tp(o.parse_numbers("--tp", tp, "a tensor-parallel degree") or AUDIT_TP)
    rules = parse_rules(parallel or ())
    found = survey(open_checkpoint(source), degrees, rules)
    decisions = decide(found)
    if format is o.Format.json:
        from mxfp4prep.report import payload

        voice.print_json(payload.audit(found, decisions))
    else:
        from mxfp4prep.report.audit_text import audit_text

        words = " ".join([_word(source), *(f"--parallel {shlex.quote(r)}" for r in parallel or ())])
        voice.print_text(lambda screen: audit_text(found, decisions, screen, printable(words)))
    paths = {verdict.path for verdicts in decisions.values() for verdict in verdicts.values()}
    bad = {"impossible": {"impossible"}, "triton": {"impossible", "triton"}, "never": set()}
    errors = fail_on is not o.FailOn.never and any(f.severity == "error" for f in found.findings)
    if errors or paths & bad[fail_on.value]:
        raise typer.Exit(o.EXIT_NO)


def convert(
    ctx: typer.Context,
    model_dir: o.ModelArg,
    out: o.OutArg = None,
    output: o.OutputOpt = None,
    tp: o.TpOpt = None,
    layout: o.LayoutOpt = o.LayoutChoice.auto,
    keep: o.KeepOpt = None,
    parallel: o.ParallelOpt = None,
    dry_run: o.DryRunOpt = False,
    format: o.FormatOpt = o.Format.text,
    workers: o.WorkersOpt = None,
    overwrite: o.OverwriteOpt = False,
    no_progress: o.NoProgressOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Write a prepared checkpoint beside the original: whole, or not at all.

    A layer is stored for the ASM GEMM if that is legal at every degree of --tp (1 if left out).
    """
    voice: Voice = ctx.obj
    if out is not None and output is not None and out != output:
        raise UsageError("--output", "OUT is given twice", found=f"{out} and {output}")
    plan = _plan(model_dir, tp, layout, keep, parallel)

    from mxfp4prep.convert import convert as carry_out
    from mxfp4prep.convert import default_output
    from mxfp4prep.report import payload
    from mxfp4prep.staging import check_output

    target = out or output or default_output(model_dir)
    check_output(target, plan.survey.checkpoint.root, overwrite=overwrite)
    if dry_run:
        _print_plan(voice, plan, target, format)
        findings = plan.findings
    else:
        silent = quiet or no_progress
        with voice.progress("converting", lambda: plan.nbytes, silent=silent) as advance:
            result = carry_out(plan, target, workers=workers, overwrite=overwrite, progress=advance)
        findings = result.findings
        document = payload.convert(result)
        if format is o.Format.json:
            voice.print_json(document)
        elif not quiet:
            from mxfp4prep.report.outcome_text import convert_text

            words = _word(model_dir), _word(target)
            voice.print_text(lambda screen: convert_text(document, screen, *words))
    if not quiet:
        voice.tell_findings(findings)


def _plan(
    model_dir: Path,
    tp: list[str] | None,
    layout: o.LayoutChoice,
    keep: list[str] | None,
    parallel: list[str] | None,
) -> Plan:
    from mxfp4prep.checkpoint import open_checkpoint
    from mxfp4prep.parallel import parse_rules
    from mxfp4prep.plan import make_plan, surveyed_degrees
    from mxfp4prep.survey import check_tp, survey

    degrees = check_tp(o.parse_numbers("--tp", tp, "a tensor-parallel degree") or CONVERT_TP)
    rules = parse_rules(parallel or ())
    found = survey(open_checkpoint(model_dir), surveyed_degrees(degrees), rules)
    return make_plan(found, degrees, layout.value, keep or ())


def _print_plan(voice: Voice, plan: Plan, target: Path, format: o.Format) -> None:
    if format is o.Format.json:
        from mxfp4prep.report import payload

        voice.print_json(payload.plan(plan, target))
    else:
        from mxfp4prep.report.stored_text import plan_text

        voice.print_text(lambda screen: plan_text(plan, target, screen))


def _word(path: Path) -> str:
    """`path` as a word of the next command."""
    return printable(shlex.quote(str(path)))
