"""An audit that was kept: the JSON of `audit --format json`, believed only as far as it is checked.

The file may come from anywhere. Its types are checked against the contract, and then what types do
not say: that every degree is there for every layer, that numbers are sizes, that names are unique.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mxfp4prep.collector import collector_paused
from mxfp4prep.documents import read_object
from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.report.others import each_module

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from mxfp4prep.report import contract as c

SCHEMA_VERSION = 1
EXPECTED = "the JSON of `mxfp4prep audit --format json`"
HINT = "mxfp4prep audit MODEL --format json > FILE"

MAX_SIZE = (1 << 63) - 1
"""Largest size and count: what a file system and a tensor's shape can have."""
MAX_MODULES = 2_000_000
"""Modules that are not MXFP4. The largest safetensors header holds 1.3 million tensors."""
MAX_CHARACTERS = 100_000_000
"""Characters of all their names: the largest header is 100 MB."""
MAX_TP = 1024

_ADDED: dict[str, Any] = {
    "deployment": {
        "expert_parallel": False,
        "sequence_parallel": False,
        "shared_experts": "separate",
    },
    "shared_experts": [],
    "cost": {},
    "engine": None,
    "values": None,
}
"""Keys that schema version 1 did not have from its start, as an audit without them means them."""
_ADDED_TO_SUMMARY: dict[str, Any] = {"largest_clean_tp": None, "recommendation": ""}


@collector_paused()
def read_audit(path: Path) -> c.AuditDocument:
    """The audit in the file at `path`.

    Raises InvalidCheckpoint for anything that is not a whole audit, and Unsupported for one of a
    schema version that is newer than this program.
    """
    where = str(path)
    try:
        _, document = read_object(path, where)
    except InvalidCheckpoint as error:
        if error.hint is None:
            error.hint = f"expected {EXPECTED}, or a checkpoint directory"
        raise
    _check_kind(document, where)
    audit = _typed({**_ADDED, **document}, where)
    _check(audit, _Checks(where))
    return audit


def _check_kind(document: Mapping[str, Any], where: str) -> None:
    """Raises unless `document` looks like an audit of a version that is known."""
    version = document.get("schema_version")
    if not {"schema_version", "source", "layers", "groups", "findings"} <= document.keys():
        keys = ", ".join(sorted(document)[:6])
        _refuse(where, "not an audit", found=f"an object with {keys}" if keys else "an empty one")
    if type(version) is int and version > SCHEMA_VERSION:
        raise Unsupported(
            where,
            "an audit of a newer mxfp4prep",
            found=f"schema_version {version}",
            expected=f"at most {SCHEMA_VERSION}",
            hint="update mxfp4prep, or audit the checkpoint with this one",
        )
    if type(version) is not int or version != SCHEMA_VERSION:
        _refuse(where, "schema_version", found=repr(version), expected=str(SCHEMA_VERSION))


def _typed(document: dict[str, Any], where: str) -> c.AuditDocument:
    """`document` with the contract's types throughout, and without keys that are not in it."""
    from pydantic import ValidationError

    if isinstance(document.get("summary"), dict):
        document["summary"] = {**_ADDED_TO_SUMMARY, **document["summary"]}
    try:
        return _adapter().validate_python(document, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            _refuse(where, f"{place} is missing")
        found = type(first["input"]).__name__
        if isinstance(first["input"], str | int | float):
            found = repr(first["input"])[:80]
        _refuse(where, f"{place}: {first['msg']}", found=found)


@cache
def _adapter() -> TypeAdapter[c.AuditDocument]:
    from pydantic import TypeAdapter

    from mxfp4prep.report import contract

    return TypeAdapter(contract.AuditDocument)


class _Checks:
    """What types do not say, checked at a place in the file `where`."""

    def __init__(self, where: str) -> None:
        self.where = where

    def size(self, place: str, *numbers: int | None) -> None:
        """Raises unless every number is a size or count."""
        for number in numbers:
            if number is not None and not 0 <= number <= MAX_SIZE:
                _refuse(self.where, place, found=str(number)[:40], expected="a size")

    def shares(self, place: str, *numbers: float) -> None:
        """Raises unless every number is from 0 to 1."""
        for number in numbers:
            if not 0 <= number <= 1:
                _refuse(self.where, place, found=str(number)[:40], expected="a share, 0 to 1")

    def degrees(self, place: str, found: Iterable[str], wanted: set[str]) -> None:
        """Raises unless `found` has every degree of the audit."""
        missing = wanted.difference(found)
        if missing:
            degree = min(missing, key=int)
            _refuse(self.where, f"{place}: nothing about tp {degree}, which the audit names")

    def shard(self, place: str, shard: list[int] | None) -> None:
        """Raises unless `shard` is null or rows and columns."""
        if shard is not None:
            if len(shard) != 2:
                _refuse(self.where, place, found=str(shard)[:40], expected="[rows, columns]")
            self.size(place, *shard)


def _check(audit: c.AuditDocument, at: _Checks) -> None:
    tp = audit["tp"]
    if not tp or len(set(tp)) != len(tp) or not all(1 <= degree <= MAX_TP for degree in tp):
        _refuse(at.where, "tp", found=str(tp)[:40], expected=f"degrees from 1 to {MAX_TP}")
    degrees = set(map(str, tp))
    source = audit["source"]
    at.size("source", source["files"], source["tensors"], source["nbytes"])
    _check_layers(audit, degrees, at)
    names = set()
    for group in audit["groups"]:
        place = f"group {group['name']}"
        names.add(group["name"])
        at.degrees(place, group["verdict"], degrees)
        for verdict in group["verdict"].values():
            at.shard(place, verdict["scale_shard"])
    if len(names) != len(audit["groups"]):
        _refuse(at.where, "groups: a name stands twice")
    for shared in audit["shared_experts"]:
        at.size(f"shared expert {shared['name']}", shared["blocks"], shared["width"])
        at.degrees(f"shared expert {shared['name']}", shared["decision"], degrees)
    _check_sums(audit, degrees, at)
    _check_others(audit, at)


def _check_layers(audit: c.AuditDocument, degrees: set[str], at: _Checks) -> None:
    names = set()
    asked = audit["engine"] is not None
    for layer in audit["layers"]:
        name = layer["name"]
        if name in names:
            _refuse(at.where, f"layer {name} stands twice")
        names.add(name)
        at.size(name, layer["n"], layer["k"], layer["experts"], layer["nbytes"])
        at.degrees(name, layer["verdict"], degrees)
        at.degrees(name, layer["decided"], degrees)
        for verdict in layer["verdict"].values():
            at.shard(name, verdict["scale_shard"])
        if "placement" in layer:
            at.degrees(name, layer["placement"], degrees)
        if asked:
            at.degrees(f"{name}: engine", layer.get("engine", ()), degrees)


def _check_sums(audit: c.AuditDocument, degrees: set[str], at: _Checks) -> None:
    summary = audit["summary"]
    at.size("summary", summary["mxfp4_nbytes"], summary["copied_nbytes"])
    at.degrees("summary", summary["tp"], degrees)
    for paths in summary["tp"].values():
        for share in (paths["asm"], paths["triton"], paths["impossible"]):
            at.size("summary", share["layers"], share["nbytes"])
    for cost in audit["cost"].values():
        nbytes = cost["rank_nbytes"], cost["rank_mxfp4_nbytes"], cost["padding_nbytes"]
        at.size("cost", *nbytes)
        parts = cost["paths"]
        for part in (parts["asm"], parts["triton"], parts["impossible"]):
            at.shares("cost", part["nbytes"], part["flops"])
    if audit["engine"] is not None:
        at.degrees("engine", audit["engine"]["outcomes"], degrees)
        for outcomes in audit["engine"]["outcomes"].values():
            at.size("engine", *outcomes.values())


def _check_others(audit: c.AuditDocument, at: _Checks) -> None:
    """Raises unless every line is what its count says, all of them a sane number of modules."""
    seen = {layer["name"] for layer in audit["layers"]}
    for line in audit.get("others", ()):
        at.size("others", line["count"])
    if sum(line["count"] for line in audit.get("others", ())) > MAX_MODULES:
        _refuse(at.where, "others", expected=f"at most {MAX_MODULES} modules")
    if sum(len(line["name"]) * line["count"] for line in audit.get("others", ())) > MAX_CHARACTERS:
        _refuse(at.where, "others", expected=f"names of at most {MAX_CHARACTERS} characters in all")
    for line in audit.get("others", ()):
        try:
            names = list(each_module(line))
        except ValueError as error:
            _refuse(at.where, f"others: {error}")
        for name in names:
            if name in seen:
                _refuse(at.where, f"others: {name} stands twice")
            seen.add(name)


def _refuse(
    where: str, what: str, *, found: str | None = None, expected: str = EXPECTED
) -> NoReturn:
    raise InvalidCheckpoint(where, what, found=found, expected=expected, hint=HINT)
