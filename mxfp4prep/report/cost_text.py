"""What each degree costs a rank, for people: bytes held, shares of bytes and FLOPs, padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mxfp4prep.cost import Cost, assumptions
from mxfp4prep.report.screen import Row, Screen, human
from mxfp4prep.report.tally import PATHS

if TYPE_CHECKING:
    from mxfp4prep.alignment import Path
    from mxfp4prep.survey import Survey

_HEADS: Mapping[Path, str] = {"asm": "asm", "triton": "triton", "impossible": "no split"}


def cost_lines(survey: Survey, costs: Mapping[int, Cost], screen: Screen) -> list[str]:
    """Lines of the cost table, and of what its numbers rest on."""
    shown = [
        path
        for path in PATHS
        if path != "impossible" or any(cost.paths[path].nbytes for cost in costs.values())
    ]
    rows = [
        Row(
            (
                f"tp {tp}",
                human(cost.rank_nbytes),
                human(cost.rank_mxfp4_nbytes),
                *(_shares(cost, path) for path in shown),
                f"+{human(cost.padding_nbytes)}" if cost.padding_nbytes else "-",
            )
        )
        for tp, cost in costs.items()
    ]
    head = ("a rank", "tensors", "MXFP4", *(_HEADS[path] for path in shown), "padding")
    lines = screen.wrap(
        "What the fullest rank holds, and how much of its MXFP4 bytes / FLOPs per token takes "
        "each path:"
    )
    lines += screen.table(head, rows, right=range(1, len(head)))
    if "impossible" in shown:
        lines += screen.wrap(
            "no split: layers that cannot be split, in neither sum; their share is of a tp-th each"
        )
    if any(cost.padding_nbytes for cost in costs.values()):
        lines += screen.wrap(
            "padding: what a rank would hold more with its triton layers zero-padded for ASM: "
            "columns, and rows that miss, to multiples of 256"
        )
    for sentence in assumptions(survey):
        lines += screen.wrap(sentence)
    return lines


def flops_share(cost: Cost, path: Path) -> float:
    """The part of a rank's MXFP4 FLOPs per token that takes `path`, 0 to 1."""
    return _part(cost.paths[path].flops, sum(part.flops for part in cost.paths.values()))


def nbytes_share(cost: Cost, path: Path) -> float:
    """The part of a rank's MXFP4 bytes that takes `path`, 0 to 1."""
    return _part(cost.paths[path].nbytes, sum(part.nbytes for part in cost.paths.values()))


def percent(part: float) -> str:
    """`67%`; `0%` and `100%` only for nothing and for all, `<1%` and `>99%` beside them."""
    if part <= 0:
        return "0%"
    if part >= 1:
        return "100%"
    rounded = round(100 * part)
    return "<1%" if rounded < 1 else ">99%" if rounded > 99 else f"{rounded}%"


def _shares(cost: Cost, path: Path) -> str:
    if not cost.paths[path].nbytes:
        return "-"
    return f"{percent(nbytes_share(cost, path))} / {percent(flops_share(cost, path))}"


def _part(some: int, whole: int) -> float:
    return some / whole if whole else 0.0
