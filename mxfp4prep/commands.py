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
from mxfp4prep.errors import UsageError, naming, printable

if TYPE_CHECKING:
    from mxfp4prep.auditing import Audit
    from mxfp4prep.plan import Plan
    from mxfp4prep.report.voice import Voice

AUDIT_TP = (1, 2, 4, 8)
CONVERT_TP = (1,)


def audit(
    ctx: typer.Context,
    source: o.SourceArg,
    tp: o.TpOpt = None,
    ep: o.EpOpt = False,
    sp: o.SpOpt = False,
    shared_experts: o.SharedExpertsOpt = o.SharedExperts.auto,
    parallel: o.ParallelOpt = None,
    engine: o.EngineOpt = None,
    switch: o.SwitchOpt = None,
    aiter_configs: o.TablesOpt = None,
    values: o.ValuesOpt = False,
    format: o.AuditFormatOpt = o.AuditFormat.text,
    html: o.HtmlOpt = None,
    fail_on: o.FailOnOpt = o.FailOn.impossible,
    no_progress: o.NoProgressOpt = False,
) -> None:
    """Say what will happen when this checkpoint is served: the path of each layer at each degree.

    Which layers run on the fast ASM GEMM, what stops the others, what cannot be split, what it
    costs and what to do. Reads headers only. The degrees are 1, 2, 4 and 8 unless --tp names
    others.
    """
    from mxfp4prep.auditing import EngineQuestion, run_audit
    from mxfp4prep.deployment import Deployment
    from mxfp4prep.parallel import parse_rules
    from mxfp4prep.report.page_file import check_page_file
    from mxfp4prep.survey import check_tp

    voice: Voice = ctx.obj
    if engine is None and (switch or aiter_configs):
        flag = "--switch" if switch else "--aiter-configs"
        raise UsageError(flag, "needs an engine to be about", hint=f"--engine NAME {flag} ...")
    if html is not None:
        check_page_file(html)
    found = run_audit(
        source,
        check_tp(o.parse_numbers("--tp", tp, "a tensor-parallel degree") or AUDIT_TP),
        parse_rules(parallel or ()),
        Deployment(ep, sp, shared_experts.value),
        None
        if engine is None
        else EngineQuestion(engine.value, tuple(switch or ()), aiter_configs),
        values=values,
        watch=lambda label, total: voice.progress(label, lambda: total, silent=no_progress),
        headers=None if no_progress else voice.count("headers from the Hub"),
    )
    if format is o.AuditFormat.text:
        from mxfp4prep.report.audit_text import audit_text

        rules = (f"--parallel {shlex.quote(rule)}" for rule in parallel or ())
        words = printable(" ".join([shlex.quote(source), *rules]))
        voice.print_text(lambda screen: audit_text(found, screen, words))
    if format is not o.AuditFormat.text or html is not None:
        _write_documents(voice, found, format, html)
    if _answers_no(found, fail_on):
        raise typer.Exit(o.EXIT_NO)


def _write_documents(voice: Voice, found: Audit, format: o.AuditFormat, html: Path | None) -> None:
    from mxfp4prep.report.audit_document import audit_document

    document = audit_document(found)
    if format is o.AuditFormat.json:
        voice.print_json(document)
    elif format is o.AuditFormat.csv:
        from mxfp4prep.report.csv_table import csv_lines

        voice.print_lines(csv_lines(document))
    if html is not None:
        from mxfp4prep.report.html import html_page
        from mxfp4prep.report.page_file import write_page_file

        write_page_file(html, html_page(document))
        voice.say(f"wrote {html}")


def _answers_no(found: Audit, fail_on: o.FailOn) -> bool:
    """Whether a layer is as bad as `fail_on` at any degree, or the checkpoint has an error."""
    from mxfp4prep.decisions import distinct

    if fail_on is o.FailOn.never:
        return False
    bad = {"impossible", "crash", "corrupt"}
    if fail_on is o.FailOn.triton:
        bad.add("triton")
    ends: set[str] = {v.path for m in distinct(found.decisions.values()) for v in m.values()}
    if found.prediction is not None:
        outcomes = distinct(found.prediction.outcomes.values())
        ends |= {made.outcome for mapping in outcomes for made in mapping.values()}
    return bool(ends & bad) or any(finding.severity == "error" for finding in found.findings)


def convert(
    ctx: typer.Context,
    model_dir: o.ModelArg,
    out: o.OutArg = None,
    output: o.OutputOpt = None,
    tp: o.TpOpt = None,
    ep: o.EpOpt = False,
    engine: o.ForOpt = o.ForEngine.mxfp4prep,
    layout: o.LayoutOpt = o.LayoutChoice.auto,
    keep: o.KeepOpt = None,
    parallel: o.ParallelOpt = None,
    dry_run: o.DryRunOpt = False,
    format: o.FormatOpt = o.Format.text,
    workers: o.WorkersOpt = None,
    overwrite: o.OverwriteOpt = False,
    resume: o.ResumeOpt = False,
    no_progress: o.NoProgressOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Write a prepared checkpoint beside the original: whole, or not at all.

    A layer is stored for the ASM GEMM if that is legal at every degree of --tp (1 if left out).
    """
    voice: Voice = ctx.obj
    if out is not None and output is not None and out != output:
        raise UsageError("--output", "OUT is given twice", found=f"{out} and {output}")
    plan = _plan(model_dir, tp, ep, engine, layout, keep, parallel)

    from mxfp4prep.convert import check_names, default_output
    from mxfp4prep.convert import convert as carry_out
    from mxfp4prep.report import payload
    from mxfp4prep.staging import check_output

    target = out or output or default_output(model_dir)
    check_output(target, plan.survey.checkpoint.root, overwrite=overwrite)
    with naming(model_dir):
        check_names(plan.survey.checkpoint)
    if dry_run:
        _print_plan(voice, plan, target, format)
        findings = plan.findings
    if not quiet:
        _tell_leftovers(voice, plan, target, resume)
    if not dry_run:
        silent = quiet or no_progress
        with (
            voice.notes(),
            voice.progress("converting", lambda: plan.nbytes, silent=silent) as advance,
        ):
            result = carry_out(
                plan,
                target,
                workers=workers,
                overwrite=overwrite,
                resume=resume,
                progress=advance,
            )
        findings = result.findings
        document = payload.convert(result)
        if format is o.Format.json:
            voice.print_json(document)
        elif not quiet:
            from mxfp4prep.report.outcome_text import convert_text

            words = _word(model_dir), _word(target)
            voice.print_text(lambda screen: convert_text(document, screen, *words))
    if not quiet:
        voice.tell_findings(findings, _word(model_dir))


def _tell_leftovers(voice: Voice, plan: Plan, target: Path, resume: bool) -> None:
    """What becomes of the shards that earlier runs have finished, before anything does."""
    from mxfp4prep.leftovers import finished

    names = [shard.shard.name for shard in plan.shards]
    count = finished(target.resolve(), names)
    if not count and not resume:
        return
    fate = "each is compared before it is taken over"
    if not resume:
        fate = "without --resume they are removed"
    elif not count:
        fate = "this one starts from the beginning"
    voice.say(f"note: earlier runs have finished {count} of {len(names)} shards: {fate}")


def _plan(
    model_dir: Path,
    tp: list[str] | None,
    ep: bool,
    engine: o.ForEngine,
    layout: o.LayoutChoice,
    keep: list[str] | None,
    parallel: list[str] | None,
) -> Plan:
    from mxfp4prep.checkpoint import AGAIN, open_checkpoint
    from mxfp4prep.deployment import Deployment
    from mxfp4prep.parallel import parse_rules
    from mxfp4prep.plan import make_plan, surveyed_degrees
    from mxfp4prep.survey import check_tp, survey

    degrees = check_tp(o.parse_numbers("--tp", tp, "a tensor-parallel degree") or CONVERT_TP)
    rules = parse_rules(parallel or ())
    checkpoint, deployment = open_checkpoint(model_dir), Deployment(expert_parallel=ep)
    with naming(model_dir, AGAIN):
        found = survey(checkpoint, surveyed_degrees(degrees), rules, deployment)
        return make_plan(found, degrees, layout.value, keep or (), engine.value)


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
