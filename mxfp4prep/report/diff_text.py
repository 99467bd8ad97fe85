"""What differs between two audits, for people: A on the left, B on the right of every arrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mxfp4prep.report.audit_text import SHOWN, legend, shape_of
from mxfp4prep.report.diff_sums import (
    NOTHING,
    cost_lines,
    fact_lines,
    fact_words,
    outcome_lines,
    path_lines,
    value_of,
)
from mxfp4prep.report.joining import listed, merge_siblings
from mxfp4prep.report.screen import Row, Screen, counted, human

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c


def diff_text(document: c.DiffDocument, screen: Screen, a: str, b: str) -> list[str]:
    """Lines of a comparison. `a` and `b` are the two as the user named them."""
    lines = [*_side(document["a"], "A", a, screen), *_side(document["b"], "B", b, screen)]
    for fact in document["asked"]:
        words = fact_words(fact)
        lines += screen.wrap(f"asked differently: {screen.name(words)}", rest="  ")
    for what in document["skipped"]:
        lines += screen.wrap(f"not compared: {screen.name(what)}", rest="  ")
    sections = (
        fact_lines(document, screen),
        _rename_lines(document["renames"], screen),
        _only_lines(document["only_a"], "MXFP4 in A only", "in B", screen),
        _only_lines(document["only_b"], "MXFP4 in B only", "in A", screen),
        _changed_lines(document["changed"], screen),
        _group_lines(document["groups"], screen),
        _shared_lines(document["shared_experts"], document["tp"], screen),
        _other_lines(document["others"], screen),
        path_lines(document["paths"], screen),
        cost_lines(document["cost"], screen),
        outcome_lines(document["engine"], document["a"]["engine"] or "", screen),
        _finding_lines(document["findings_a"], document["findings_b"], screen),
    )
    for section in sections:
        if section:
            lines += ["", *section]
    verdicts = _verdicts(document["changed"])
    lines += legend(
        (reason for verdict in verdicts for reason in verdict["reasons"]),
        (hazard for verdict in verdicts for hazard in verdict["hazards"]),
        screen,
    )
    return [*lines, "", *screen.wrap(_conclusion(document))]


def _side(side: c.DiffSideDocument, letter: str, given: str, screen: Screen) -> list[str]:
    layers = counted(side["layers"], "MXFP4 layer")
    name = given if given == side["name"] else f"{given} ({side['name']})"
    facts = f"{layers}, {human(side['mxfp4_nbytes'])}, tp {listed(side['tp'])}"
    return screen.wrap(f"{screen.name(name)}: {facts}", f"{letter}  ")


def _rename_lines(renames: Sequence[c.DiffRenameDocument], screen: Screen) -> list[str]:
    lines = []
    for rename in renames:
        a, b = (
            f"under {screen.name(root)}" if root else "at the top level"
            for root in (rename["a"], rename["b"])
        )
        text = f"{counted(rename['modules'], 'module')} {a} in A, {b} in B: compared as the same."
        lines += screen.wrap(text, rest="  ")
    return lines


def _only_lines(
    layers: Sequence[c.DiffLayersDocument], title: str, where: str, screen: Screen
) -> list[str]:
    if not layers:
        return []
    rows = []
    for item in layers:
        other = "not known" if item["other"] is None else item["other"]
        shape = shape_of(item["n"], item["k"], item["experts"])
        cells = (shape, item["scheme"], screen.name(other))
        rows.append((item["name"], item["layers"], cells, ()))
    head = ("layer", "layers", "shape", "scheme", where)
    total = sum(item["layers"] for item in layers)
    lines = screen.wrap(f"{title}: {counted(total, 'layer')}")
    return [*lines, *screen.table(head, merge_siblings(rows, screen), right=(1,))]


def _changed_lines(changes: Sequence[c.DiffChangeDocument], screen: Screen) -> list[str]:
    if not changes:
        return []
    rows = []
    for change in changes:
        notes = (*map(fact_words, change["facts"]), *_verdict_notes(change["verdict"]))
        rows.append((change["name"], change["layers"], (), tuple(map(screen.name, notes))))
    lines = screen.wrap(f"changed: {counted(sum(item['layers'] for item in changes), 'layer')}")
    return [*lines, *screen.table(("layer", "layers"), merge_siblings(rows, screen), right=(1,))]


def _verdict_notes(verdicts: Mapping[str, c.DiffVerdictsDocument]) -> list[str]:
    """What changed at which degrees, those with the same words together."""
    alike: dict[str, list[str]] = {}
    for degree, pair in verdicts.items():
        for words in _verdict_words(pair["a"], pair["b"]):
            alike.setdefault(words, []).append(degree)
    return [f"tp {', '.join(degrees)}: {words}" for words, degrees in alike.items()]


def _verdict_words(a: c.DiffVerdictDocument, b: c.DiffVerdictDocument) -> list[str]:
    """`asm -> triton (scale_cols)`, and what else changed."""
    words = []
    x, y = _path(a), _path(b)
    if x != y:
        words.append(f"{x} -> {y}")
    elif (x := _own_path(a)) != (y := _own_path(b)):
        words.append(f"by itself {x} -> {y}")
    if a["hazards"] != b["hazards"]:
        words.append(f"hazards {_codes(a['hazards'])} -> {_codes(b['hazards'])}")
    if a["placement"] != b["placement"]:
        words.append(f"{a['placement']} -> {b['placement']}")
    if a["engine"] is not None and b["engine"] is not None:
        x, y = _outcome(a["engine"]), _outcome(b["engine"])
        why = b["engine"]["message"] or a["engine"]["message"]
        if x != y:
            words.append(f"engine {x} -> {y}{f': {why}' if why else ''}")
    if a["scale_shard"] != b["scale_shard"] and not words:
        words.append(f"scale per rank {_shard(a)} -> {_shard(b)}")
    return words


def _path(verdict: c.DiffVerdictDocument) -> str:
    if verdict["path"] != verdict["own_path"]:
        return f"{SHOWN[verdict['path']]} (with its group)"
    return _own_path(verdict)


def _own_path(verdict: c.DiffVerdictDocument) -> str:
    reasons = f" ({_codes(verdict['reasons'])})" if verdict["reasons"] else ""
    return SHOWN[verdict["own_path"]] + reasons


def _codes(codes: Sequence[str]) -> str:
    return ", ".join(codes) or "none"


def _outcome(made: c.EngineVerdictDocument) -> str:
    return made["outcome"] if made["path"] is None else f"{made['outcome']} ({made['path']})"


def _shard(verdict: c.DiffVerdictDocument) -> str:
    return "x".join(map(str, verdict["scale_shard"] or (NOTHING,)))


def _group_lines(groups: Sequence[c.DiffGroupDocument], screen: Screen) -> list[str]:
    if not groups:
        return []
    rows = []
    for group in groups:
        notes = []
        for fact in group["facts"]:
            name, _, degree = fact["fact"].partition(".")
            word = f"tp {degree}:" if degree else {"members": "parts"}.get(name, name)
            notes.append(f"{word} {value_of(fact, fact['a'])} -> {value_of(fact, fact['b'])}")
        rows.append((group["name"], group["groups"], (), tuple(map(screen.name, notes))))
    head = ("fused projections", "count")
    return ["changed as a whole", *screen.table(head, merge_siblings(rows, screen), right=(1,))]


def _shared_lines(
    items: Sequence[c.DiffSharedExpertDocument], tp: Sequence[int], screen: Screen
) -> list[str]:
    if not items:
        return []
    rows = []
    for item in items:
        notes = [
            f"{letter}: {_shared_words(side, tp)}"
            for letter, side in (("A", item["a"]), ("B", item["b"]))
        ]
        rows.append(Row((screen.name(item["name"]),), tuple(map(screen.name, notes))))
    return screen.table(("shared experts",), rows)


def _shared_words(item: c.SharedExpertDocument | None, tp: Sequence[int]) -> str:
    """`width 1408, fused at tp 1, 2, 4: same quantization as ...`."""
    if item is None:
        return "none in MXFP4"
    decisions: dict[str, list[str]] = {}
    for degree in map(str, tp):
        decisions.setdefault(item["decision"][degree], []).append(degree)
    words = [f"{decision} at tp {', '.join(found)}" for decision, found in decisions.items()]
    return f"width {item['width']}, {', '.join(words)}; {item['why']}"


def _other_lines(others: Sequence[c.DiffOtherDocument], screen: Screen) -> list[str]:
    if not others:
        return []
    rows = []
    for item in others:
        dtypes = tuple(screen.name(dtype or "absent") for dtype in (item["a"], item["b"]))
        rows.append((item["name"], item["modules"], dtypes, ()))
    total = counted(sum(item["modules"] for item in others), "module")
    head = ("module", "modules", "in A", "in B")
    lines = screen.wrap(f"weights that are MXFP4 in neither: {total}")
    return [*lines, *screen.table(head, merge_siblings(rows, screen), right=(1,))]


def _finding_lines(
    only_a: Sequence[c.FindingDocument], only_b: Sequence[c.FindingDocument], screen: Screen
) -> list[str]:
    """`-` for findings of A, `+` for those of B; of one kind that both have, B's is cut short."""
    lines = []
    rest = list(only_b)
    for finding in only_a:
        lines += _finding(finding, "- ", finding["message"], screen)
        kind = finding["code"], finding["severity"]
        twin = next((item for item in rest if (item["code"], item["severity"]) == kind), None)
        if twin is not None:
            rest.remove(twin)
            message = _after_common_start(finding["message"], twin["message"])
            lines += _finding(twin, "+ ", message, screen)
    for finding in rest:
        lines += _finding(finding, "+ ", finding["message"], screen)
    return ["findings", *lines] if lines else []


def _finding(finding: c.FindingDocument, sign: str, message: str, screen: Screen) -> list[str]:
    text = screen.name(f"{finding['where']}: {message} [{finding['code']}]")
    return screen.wrap(f"{screen.paint(finding['severity'])}: {text}", sign, "    ")


def _after_common_start(first: str, second: str) -> str:
    """`second` from the clause on that differs from `first`."""
    clauses = second.split(": ")
    same = 0
    for x, y in zip(first.split(": "), clauses[:-1], strict=False):
        if x != y:
            break
        same += 1
    return f"... {': '.join(clauses[same:])}" if same else second


def _verdicts(changes: Iterable[c.DiffChangeDocument]) -> list[c.DiffVerdictDocument]:
    return [
        side
        for change in changes
        for pair in change["verdict"].values()
        for side in (pair["a"], pair["b"])
    ]


def _conclusion(document: c.DiffDocument) -> str:
    at = f"at tp {listed(document['tp'])}"
    if document["same"]:
        return f"A and B are the same {at}."
    words = []
    for layers, letter in ((document["only_a"], "A"), (document["only_b"], "B")):
        count = sum(item["layers"] for item in layers)
        if count:
            words.append(f"{counted(count, 'layer')} MXFP4 in {letter} only")
    count = sum(change["layers"] for change in document["changed"])
    if count:
        words.append(f"{counted(count, 'layer')} changed")
    if not words:
        return f"A and B are not the same, but their MXFP4 layers are, {at}."
    return f"A and B, compared {at}, differ: {', '.join(words)}."
