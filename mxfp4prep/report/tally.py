"""How much takes which path: what an engine decides per layer and degree, counted in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mxfp4prep.alignment import Path, Verdict
from mxfp4prep.decisions import Decisions, distinct

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c
    from mxfp4prep.survey import Survey

PATHS: tuple[Path, ...] = ("asm", "triton", "impossible")


def shares(survey: Survey, decisions: Decisions) -> dict[int, c.PathsDocument]:
    """Layers and bytes per path at every degree."""
    sums: dict[int, list[int]] = {}
    mappings: dict[int, Mapping[int, Verdict]] = {}
    for item in survey.layers:
        mapping = decisions[item.layer.name]
        total = sums.get(id(mapping))
        if total is None:
            total = sums[id(mapping)] = [0, 0]
            mappings[id(mapping)] = mapping
        total[0] += 1
        total[1] += item.layer.weight.nbytes + item.layer.scale.nbytes
    result = {}
    for tp in survey.tp:
        counts = {path: [0, 0] for path in PATHS}
        for key, (layers, nbytes) in sums.items():
            count = counts[mappings[key][tp].path]
            count[0] += layers
            count[1] += nbytes
        asm, triton, impossible = (_share(*counts[path]) for path in PATHS)
        document: c.PathsDocument = {"asm": asm, "triton": triton, "impossible": impossible}
        result[tp] = document
    return result


def degrees_of(decisions: Decisions, tp: Iterable[int], paths: frozenset[Path]) -> list[int]:
    """The degrees of `tp` at which every layer takes one of `paths`."""
    made = list(distinct(decisions.values()))
    return [degree for degree in tp if all(mapping[degree].path in paths for mapping in made)]


ASM_ONLY: frozenset[Path] = frozenset({"asm"})
POSSIBLE: frozenset[Path] = frozenset({"asm", "triton"})


def stored_shares(layers: Iterable[tuple[str, Iterable[str], int]]) -> c.StoredPathsDocument:
    """Layers and bytes per stored path, from (path, reasons, nbytes) of each layer."""
    counts = {path: [0, 0] for path in ("asm", "triton", "kept")}
    for path, reasons, nbytes in layers:
        count = counts["kept" if "kept" in reasons else path]
        count[0] += 1
        count[1] += nbytes
    asm, triton, kept = (_share(*counts[path]) for path in ("asm", "triton", "kept"))
    return {"asm": asm, "triton": triton, "kept": kept}


def _share(layers: int, nbytes: int) -> c.ShareDocument:
    return {"layers": layers, "nbytes": nbytes}
