"""How a verb ended, for people: convert, verify and restore in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxfp4prep.report.screen import Row, Screen, counted, human
from mxfp4prep.report.stored_text import laid_out_for, share_lines
from mxfp4prep.verify import ADDED

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

_PROVEN = {
    "quick": "sizes, headers, shapes and layouts are what the manifest says; no byte was read",
    "full": "every byte is what the manifest says, and its inverse has the source's digests",
    "deep": "every byte is what the manifest says, and its inverse is the source, byte for byte",
}


def convert_text(done: c.ConvertDocument, screen: Screen, source: str, out: str) -> list[str]:
    """Lines after a conversion; `source` and `out` as the next command names them."""
    degrees = ", ".join(map(str, done["tp"]))
    if done["expert_parallel"]:
        degrees += " with expert parallelism"
    lines = screen.wrap(
        f"wrote {screen.name(done['output'])}: {counted(done['files'], 'file')}, "
        f"{human(done['nbytes'])}, for tp {degrees}{laid_out_for(done['engine'])}"
    )
    if done["reused"]:
        count = counted(len(done["reused"]), "shard")
        lines += screen.wrap(f"taken over from an earlier run, every byte compared: {count}")
    lines += ["", *share_lines(done["summary"], screen)]
    return [*lines, "", f"next: mxfp4prep verify {out} --source {source}"]


_MENDING = (
    "copy what is named again from where it is right, or convert the original again; a change that "
    "you want belongs in the original"
)
_MOVING = "move what was added elsewhere"


def verify_text(report: c.VerifyDocument, screen: Screen, given: str) -> list[str]:
    """Lines of a verification: every problem, what was not checked, and the verdict.

    given   the directory as the command names it
    """
    lines = []
    for problem in report["problems"]:
        parts = [problem["file"], *([problem["tensor"]] if problem["tensor"] else [])]
        where = ": ".join(screen.name(part) for part in parts)
        text = f"{screen.paint('error')}: {where}: {screen.name(problem['what'])}"
        lines += screen.wrap(text, rest="  ")
    read = f"{counted(report['files'], 'file')}, {counted(report['tensors'], 'tensor')}"
    head = f"{screen.name(given)}: {report['level']}: {read}, {human(report['nbytes'])} read"
    if report["ok"]:
        verdict = _PROVEN[report["level"]]
    else:
        verdict = f"NOT what was prepared: {counted(len(report['problems']), 'problem')}"
    lines += screen.wrap(f"{head}: {verdict}")
    if not report["ok"]:
        added = {problem["what"] == ADDED for problem in report["problems"]}
        ways = ([_MENDING] if False in added else []) + ([_MOVING] if True in added else [])
        lines += screen.wrap(f"hint: {'; '.join(ways)}")
    for check in report["skipped"]:
        lines += screen.wrap(f"not checked: {screen.name(check)}", rest="  ")
    return lines


def restore_text(report: c.RestoreDocument, screen: Screen) -> list[str]:
    """Lines after a restore."""
    lines = screen.wrap(
        f"restored {screen.name(report['output'])}: {counted(report['files'], 'file')}, "
        f"{human(report['nbytes'])}, every tensor with the source's digest"
    )
    for name in report["header_only"]:
        lines += screen.wrap(
            f"{screen.name(name)}: same tensors, header spelled differently from the source's"
        )
    return lines


def selfcheck_text(report: c.SelfcheckDocument, screen: Screen, given: str) -> list[str]:
    """Lines of a self-check: a row per layer, its error and speed for every m, and the verdict.

    given   the directory as the command names it
    """
    notes: dict[tuple[str, str, str], list[str]] = {}
    for row in report["rows"]:
        error, relative = row["max_abs_error"], row["max_rel_error"]
        off = "not finite" if error is None or relative is None else f"{error:.3g} ({relative:.2%})"
        text = f"m {row['m']}: error {off}, {row['milliseconds']:.3g} ms"
        if row["nan"]:
            text += f", {counted(row['nan'], 'value')} NaN by the scale bytes"
        cells = (screen.name(row["layer"]), row["path"], row["backend"])
        notes.setdefault(cells, []).append(text if row["ok"] else f"{text}, WRONG")
    rows = [Row(cells, tuple(texts)) for cells, texts in notes.items()]
    wrong = sum(not row["ok"] for row in report["rows"])
    total = counted(len(report["rows"]), "GEMM")
    verdict = f"{wrong} of {total} WRONG" if wrong else f"{total}, all within rounding of float64"
    head = screen.wrap(f"{screen.name(given)} on {screen.name(report['device'])}")
    table = screen.table(("layer", "path", "backend"), rows)
    return [*head, "", *table, "", *screen.wrap(verdict)]
