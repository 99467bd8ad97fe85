"""A case: what happens to a layer at every degree. Thousands of layers share a few cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mxfp4prep.alignment import ASM_HAZARDS

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

PATHS = ("asm", "triton", "impossible")
LETTERS = {"asm": "A", "triton": "T", "impossible": "X"}
WORDS = {"asm": "asm", "triton": "Triton", "impossible": "impossible"}
"""Paths from the fastest to the worst; how a cell and a sentence say them."""

MARKS = {"crash": "!", "corrupt": "‼"}
"""What the asked engine does where it does not run: said beside the letter."""


class Degree(NamedTuple):
    """One degree of a case.

    shard     rows and columns of the scales on one rank, None where they cannot be cut
    joined    the fused projection that this is about where it decides, else ""
    outcome   of the asked engine: (outcome, path, message), None when none was asked
    """

    tp: str
    path: str
    codes: tuple[str, ...]
    hazards: tuple[str, ...]
    shard: tuple[int, ...] | None
    detail: str
    joined: str
    placement: str
    outcome: tuple[str, str, str] | None

    @property
    def letter(self) -> str:
        """What stands in the cell."""
        return LETTERS.get(self.path, "?")

    @property
    def mark(self) -> str:
        """`*` for a hazard, and what the engine does where it does not run."""
        outcome = "" if self.outcome is None else MARKS.get(self.outcome[0], "")
        return ("*" if self.hazards else "") + outcome


@dataclass(frozen=True, slots=True)
class Case:
    """What is stored, and what happens to it at each degree. parts: of a fused projection."""

    kind: str
    parallel: str
    scheme: str
    n: int
    k: int
    experts: int | None
    degrees: tuple[Degree, ...]
    parts: str = ""

    @property
    def worst(self) -> int:
        """The index in PATHS of the worst degree."""
        return max((rank_of(degree.path) for degree in self.degrees), default=0)


def rank_of(path: str) -> int:
    """0 for asm, 2 for impossible and for a path that is not known."""
    return PATHS.index(path) if path in PATHS else len(PATHS) - 1


class Cases:
    """Cases of layers and groups: equal ones are one object."""

    def __init__(self, document: c.AuditDocument, degrees: Sequence[str]) -> None:
        self._degrees = degrees
        self._groups = {
            group["name"]: (group["verdict"], group["name"].rpartition(".")[2])
            for group in document["groups"]
        }
        self._known: dict[tuple[object, ...], Case] = {}
        self._equal: dict[Case, Case] = {}

    # The document's parts are known by their identity while it lives: comparing them by their
    # content for 36,000 layers would take longer than all the rest.
    def of(self, layer: c.LayerDocument) -> Case:
        """The case of a layer, its fused group counted in."""
        joined, leaf = self._groups.get(layer["group"] or "", (None, ""))
        placement, engine = layer.get("placement"), layer.get("engine")
        key = (
            id(layer["verdict"]),
            id(layer["decided"]),
            id(placement),
            id(engine),
            id(joined),
            leaf,
            layer["kind"],
            layer["parallel"],
            layer["scheme"],
            layer["n"],
            layer["k"],
            layer["experts"],
        )
        case = self._known.get(key)
        if case is None:
            degrees = tuple(
                _degree(
                    tp,
                    layer["decided"].get(tp, "?"),
                    layer["verdict"].get(tp),
                    None if joined is None else joined.get(tp),
                    leaf,
                    (placement or {}).get(tp, "sliced"),
                    None if engine is None else engine.get(tp),
                )
                for tp in self._degrees
            )
            case = self._intern(
                Case(
                    layer["kind"],
                    layer["parallel"],
                    layer["scheme"],
                    layer["n"],
                    layer["k"],
                    layer["experts"],
                    degrees,
                )
            )
            self._known[key] = case
        return case

    def of_group(self, group: c.GroupDocument, parts: Mapping[str, Case]) -> Case:
        """The case of a fused projection. parts: the case of each member that is known."""
        members = [parts[member] for member in group["members"] if member in parts]
        first = members[0] if members else None
        degrees = []
        for place, tp in enumerate(self._degrees):
            verdict = group["verdict"].get(tp)
            path = "?" if verdict is None else verdict["path"]
            alone = all(member.degrees[place].path == "asm" for member in members)
            if path == "asm" and not alone:
                path = "triton"
            degrees.append(_degree(tp, path, verdict, None, "", "sliced", None))
        return self._intern(
            Case(
                kind=first.kind if first else "linear",
                parallel="mixed schemes" if group["mixed"] else "fused",
                scheme=first.scheme if first else "",
                n=sum(member.n for member in members),
                k=first.k if first else 0,
                experts=first.experts if first else None,
                degrees=tuple(degrees),
                parts=" + ".join(member.rpartition(".")[2] for member in group["members"]),
            )
        )

    def _intern(self, case: Case) -> Case:
        return self._equal.setdefault(case, case)


def _degree(
    tp: str,
    path: str,
    own: c.VerdictDocument | None,
    joined: c.VerdictDocument | None,
    leaf: str,
    placement: str,
    outcome: Mapping[str, Any] | None,
) -> Degree:
    verdict, where, codes = own, "", None
    if own is None or own["path"] != path:
        if joined is not None and joined["path"] == path:
            verdict, where = joined, leaf
        else:
            # Another part of the whole keeps this one from the path that it could take.
            where, codes = leaf, ("group_part",)
    said = None
    if outcome is not None:
        said = (outcome["outcome"], outcome["path"] or "", outcome["message"])
    if verdict is None:
        return Degree(tp, path, codes or (), (), None, "", where, placement, said)
    shard = verdict["scale_shard"]
    return Degree(
        tp,
        path,
        tuple(verdict["reasons"]) if codes is None else codes,
        tuple(h for h in verdict["hazards"] if path == "asm" or h not in ASM_HAZARDS),
        None if shard is None else tuple(shard),
        verdict.get("detail", ""),
        where,
        placement,
        said,
    )
