"""What becomes of shared experts, for people: a row per kind of block, its arithmetic below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mxfp4prep.report.families import gather
from mxfp4prep.report.joining import listed
from mxfp4prep.report.screen import Row, Screen

if TYPE_CHECKING:
    from mxfp4prep.survey import SharedSurvey, Survey

_SHOWN = {"impossible": "IMPOSSIBLE"}


def shared_lines(survey: Survey, screen: Screen) -> list[str]:
    """Lines about shared experts; none where there is none."""
    if not survey.shared:
        return []

    def items() -> Iterator[tuple[str, tuple[object, ...], SharedSurvey]]:
        for item in survey.shared:
            block = item.block
            yield block.name, (block.why, block.width, id(item.decisions)), item

    rows = []
    for family in gather(items()):
        item = family.first
        made = item.decisions
        cells = tuple(_SHOWN.get(d.decision, d.decision) for d in made.values())
        words = "can be fused" if item.block.fusable else "cannot be fused"
        notes = [f"width {item.block.width}, {words}: {item.block.why}"]
        notes += [f"tp {tp}: {d.message}" for tp, d in made.items() if d.message]
        rows.append(
            Row(
                (screen.name(family.name), f"{family.count:,}", *cells),
                tuple(map(screen.name, notes)),
            )
        )
    head = ("shared expert", "blocks", *(f"tp {tp}" for tp in survey.tp))
    apart = survey.deployment.shared_experts == "separate"
    lines = screen.wrap(
        "Shared experts stay apart and are cut by themselves:"
        if apart
        else "A shared expert is fused into the routed ones where it can be; one that stays apart "
        "is cut by itself:"
    )
    lines += screen.table(head, rows, right=(1,))
    fused = [
        tp for tp in survey.tp if any(i.decisions[tp].decision == "fused" for i in survey.shared)
    ]
    if fused:
        lines += screen.wrap(
            f"fused at tp {listed(fused)} only if the engine is told to; --shared-experts separate "
            "shows the other case"
        )
    return ["", *lines]
