"""Everything that differs between two audits, at the degrees that both of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxfp4prep.collector import collector_paused
from mxfp4prep.comparison.alike import gather_alike
from mxfp4prep.comparison.layers import changed_groups, changed_layers
from mxfp4prep.comparison.renames import Renames, match_names
from mxfp4prep.report.others import each_module

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

ABSENT = "absent"
"""Stands where a dtype would: there is no weight of that name."""

_SOURCE = (
    "model_type", "quark_version", "files", "tensors", "nbytes", "config_sha256", "index_sha256",
)  # fmt: skip
_VALUES = ("nbytes", "scales", "nan", "zero_blocks", "minimum", "maximum")


@dataclass(frozen=True, slots=True)
class _Side:
    """One audit, its layers and what else has a weight by name; others is None where unknown."""

    audit: c.AuditDocument
    layers: dict[str, c.LayerDocument]
    others: dict[str, str] | None

    @property
    def modules(self) -> dict[str, object]:
        """Every module that is known to have a weight."""
        return {**self.layers, **(self.others or {})}


@collector_paused()
def compare(a: c.AuditDocument, b: c.AuditDocument) -> c.DiffDocument:
    """What differs between two audits, as `audit_document` makes or `read_audit` returns them."""
    tp = [degree for degree in a["tp"] if degree in b["tp"]]
    left, right = _side(a), _side(b)
    renames = match_names(left.modules, right.modules)
    engines = _same_engine(a["engine"], b["engine"])
    pairs = [
        (layer, right.layers[name])
        for layer in left.layers.values()
        if (name := renames.module(layer["name"])) in right.layers
    ]
    backwards = {new: name for name, new in renames.modules.items()}
    findings_a, findings_b = _findings(a, b, renames)
    document: c.DiffDocument = {
        "schema_version": 1,
        "same": False,
        "a": _about(a),
        "b": _about(b),
        "tp": tp,
        "asked": _asked(a, b),
        "skipped": _skipped(left, right, engines),
        "source": _facts(a["source"], b["source"], _SOURCE),
        "renames": [
            {"a": rename.a, "b": rename.b, "modules": count}
            for rename, count in renames.counts.items()
        ],
        "only_a": _only(left, right, renames.modules),
        "only_b": _only(right, left, backwards),
        "changed": changed_layers(pairs, tp, renames, engines=engines),
        "others": _others(left, right, renames),
        "groups": changed_groups(_group_pairs(a, b, renames), tp),
        "shared_experts": _shared_experts(a, b, tp, renames),
        "findings_a": findings_a,
        "findings_b": findings_b,
        "summary": _summary(a, b, tp),
        "paths": {
            degree: {"a": x, "b": y}
            for degree, x, y in _at(a["summary"]["tp"], b["summary"]["tp"], tp)
        },
        "cost": {degree: {"a": x, "b": y} for degree, x, y in _at(a["cost"], b["cost"], tp)},
        "engine": _outcomes(a["engine"], b["engine"], tp) if engines else {},
        "values": _facts(a["values"], b["values"], _VALUES) if a["values"] and b["values"] else [],
    }
    document["same"] = not any(document[key] for key in DIFFERENCES)  # type: ignore[literal-required]
    return document


DIFFERENCES = (
    "source", "renames", "only_a", "only_b", "changed", "others", "groups", "shared_experts",
    "findings_a", "findings_b", "summary", "paths", "cost", "engine", "values",
)  # fmt: skip
"""Keys of the document that are empty when the two audits are the same."""


def _side(audit: c.AuditDocument) -> _Side:
    lines = audit.get("others")
    others = None
    if lines is not None:
        others = {name: line["dtype"] for line in lines for name in each_module(line)}
    return _Side(audit, {layer["name"]: layer for layer in audit["layers"]}, others)


def _about(audit: c.AuditDocument) -> c.DiffSideDocument:
    return {
        "name": audit["source"]["name"],
        "tp": audit["tp"],
        "engine": None if audit["engine"] is None else audit["engine"]["name"],
        "layers": len(audit["layers"]),
        "mxfp4_nbytes": audit["summary"]["mxfp4_nbytes"],
    }


def _facts(
    a: Mapping[str, Any], b: Mapping[str, Any], keys: Iterable[str]
) -> list[c.DiffFactDocument]:
    return [{"fact": key, "a": a[key], "b": b[key]} for key in keys if a[key] != b[key]]


def _asked(a: c.AuditDocument, b: c.AuditDocument) -> list[c.DiffFactDocument]:
    """How the audits were made, where not alike: no difference between checkpoints by itself."""
    facts = _facts(a, b, ("rule",))
    facts += _facts(a["deployment"], b["deployment"], a["deployment"])
    x, y = _asked_engine(a["engine"]), _asked_engine(b["engine"])
    return facts + _facts({"engine": x}, {"engine": y}, ("engine",))


def _asked_engine(engine: c.EngineDocument | None) -> str | None:
    """`vllm-0.32 0.32.0 SWITCH=1`."""
    if engine is None:
        return None
    switches = (f"{name}={value}" for name, value in engine["switches"].items())
    return " ".join([engine["name"], engine["version"], *switches])


def _same_engine(a: c.EngineDocument | None, b: c.EngineDocument | None) -> bool:
    return a is not None and b is not None and a["name"] == b["name"]


def _skipped(left: _Side, right: _Side, engines: bool) -> list[str]:
    """What is not compared because one audit has nothing to compare with."""
    a, b = left.audit, right.audit
    skipped = []
    for letter, audit, other in (("A", a, b), ("B", b, a)):
        alone = [str(degree) for degree in audit["tp"] if degree not in other["tp"]]
        if alone:
            skipped.append(f"tp {', '.join(alone)}: only {letter} was audited there")
    for what, has, x, y in (
        ("weights that are not MXFP4", "lists them", left.others, right.others),
        ("cost", "has it", a["cost"] or None, b["cost"] or None),
        ("scale values", "has them", a["values"], b["values"]),
    ):
        if (x is None) != (y is None):
            skipped.append(f"{what}: only {'A' if y is None else 'B'} {has}")
    if not engines and (a["engine"] is not None or b["engine"] is not None):
        names = [engine["name"] if engine else "none" for engine in (a["engine"], b["engine"])]
        skipped.append(f"engines: A was asked about {names[0]}, B about {names[1]}")
    return skipped


def _only(here: _Side, there: _Side, names: Mapping[str, str]) -> list[c.DiffLayersDocument]:
    """Layers of `here` that are not MXFP4 `there`; `names`: here -> there where they differ."""

    def items() -> Iterator[tuple[str, tuple[Any, ...]]]:
        for name, layer in here.layers.items():
            new = names.get(name, name)
            if new not in there.layers:
                other = None if there.others is None else there.others.get(new, ABSENT)
                yield name, (
                    layer["kind"], layer["scheme"], layer["n"], layer["k"], layer["experts"], other,
                )  # fmt: skip

    found: list[c.DiffLayersDocument] = []
    for alike in gather_alike(items()):
        kind, scheme, n, k, experts, other = alike.key
        found.append(
            {
                "name": alike.name,
                "layers": len(alike.names),
                "names": alike.names,
                "kind": kind,
                "scheme": scheme,
                "n": n,
                "k": k,
                "experts": experts,
                "other": other,
            }
        )
    return found


def _others(left: _Side, right: _Side, renames: Renames) -> list[c.DiffOtherDocument]:
    """Modules with a weight that is MXFP4 in neither audit, and not of one dtype in both."""
    if left.others is None or right.others is None:
        return []
    new = {renames.module(name): name for name in (*left.others, *left.layers)}
    items: list[tuple[str, tuple[str | None, str | None]]] = []
    for name, dtype in left.others.items():
        there = renames.module(name)
        if there not in right.layers and right.others.get(there) != dtype:
            items.append((name, (dtype, right.others.get(there))))
    items += [(name, (None, dtype)) for name, dtype in right.others.items() if name not in new]
    return [
        {
            "name": alike.name,
            "modules": len(alike.names),
            "names": alike.names,
            "a": alike.key[0],
            "b": alike.key[1],
        }
        for alike in gather_alike(items)
    ]


def _group_pairs(
    a: c.AuditDocument, b: c.AuditDocument, renames: Renames
) -> Iterator[tuple[c.GroupDocument, c.GroupDocument]]:
    there = {group["name"]: group for group in b["groups"]}
    for group in a["groups"]:
        found = there.get(group["name"]) or there.get(renames.text(group["name"]))
        if found is not None:
            yield group, found


def _shared_experts(
    a: c.AuditDocument, b: c.AuditDocument, tp: Sequence[int], renames: Renames
) -> list[c.DiffSharedExpertDocument]:
    left = {renames.text(item["name"]): item for item in a["shared_experts"]}
    right = {item["name"]: item for item in b["shared_experts"]}
    found: list[c.DiffSharedExpertDocument] = []
    for name in dict.fromkeys((*left, *right)):
        x, y = left.get(name), right.get(name)
        if x is None or y is None or _shared_facts(x, tp) != _shared_facts(y, tp):
            found.append({"name": x["name"] if x else name, "a": x, "b": y})
    return found


def _shared_facts(item: c.SharedExpertDocument, tp: Sequence[int]) -> tuple[object, ...]:
    decisions = tuple(item["decision"][str(degree)] for degree in tp)
    return item["blocks"], item["width"], item["fusable"], item["why"], decisions


def _findings(
    a: c.AuditDocument, b: c.AuditDocument, renames: Renames
) -> tuple[list[c.FindingDocument], list[c.FindingDocument]]:
    """Findings of one audit only; a name that only moved to another root makes no other finding.

    Messages count degrees in, so audits of other degrees are held together without them.
    """
    alike = set(a["tp"]) == set(b["tp"])

    def key_of(finding: c.FindingDocument, change: Callable[[str], str] = str) -> tuple[str, ...]:
        message = change(finding["message"]) if alike else ""
        return finding["code"], finding["severity"], change(finding["where"]), message

    unmatched = Counter(map(key_of, b["findings"]))
    only_a = []
    for finding in a["findings"]:
        key, moved = key_of(finding), key_of(finding, renames.text)
        same = next((k for k in (key, moved) if unmatched[k] > 0), None)
        if same is None:
            only_a.append(finding)
        else:
            unmatched[same] -= 1
    only_b = []
    for finding in reversed(b["findings"]):
        if unmatched[key_of(finding)] > 0:
            unmatched[key_of(finding)] -= 1
            only_b.append(finding)
    return only_a, only_b[::-1]


def _summary(a: c.AuditDocument, b: c.AuditDocument, tp: Sequence[int]) -> list[c.DiffFactDocument]:
    """Degrees at which every layer is asm, and at which every layer splits, of those compared.

    The largest clean degree was looked for beyond them.
    """
    facts: list[c.DiffFactDocument] = []
    for key, x, y in (
        ("asm_tp", a["summary"]["asm_tp"], b["summary"]["asm_tp"]),
        ("possible_tp", a["summary"]["possible_tp"], b["summary"]["possible_tp"]),
    ):
        left, right = [d for d in x if d in tp], [d for d in y if d in tp]
        if left != right:
            facts.append({"fact": key, "a": left, "b": right})
    largest = a["summary"]["largest_clean_tp"], b["summary"]["largest_clean_tp"]
    if None not in largest and largest[0] != largest[1]:
        facts.append({"fact": "largest_clean_tp", "a": largest[0], "b": largest[1]})
    return facts


def _at(
    a: Mapping[str, Any], b: Mapping[str, Any], tp: Sequence[int]
) -> Iterator[tuple[str, Any, Any]]:
    """(degree, a's, b's) at every degree that both have and where they are not the same."""
    for degree in map(str, tp):
        if degree in a and degree in b and a[degree] != b[degree]:
            yield degree, a[degree], b[degree]


def _outcomes(
    a: c.EngineDocument | None, b: c.EngineDocument | None, tp: Sequence[int]
) -> dict[str, c.DiffOutcomesDocument]:
    if a is None or b is None:
        return {}
    return {degree: {"a": x, "b": y} for degree, x, y in _at(a["outcomes"], b["outcomes"], tp)}
