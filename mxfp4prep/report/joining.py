"""Rows and numbers that say the same, joined: siblings of one module, degrees of one reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mxfp4prep.report.screen import Row, Screen

# Up to the last dot that is not one of a run of numbers, as in `blocks.{0..3}`.
_LAST_PART = re.compile(r".*(?<!\.)\.(?!\.)")


def merge_siblings(
    rows: Iterable[tuple[str, int, tuple[str, ...], tuple[str, ...]]], screen: Screen
) -> list[Row]:
    """Rows of (name, layers, cells, notes) where siblings that say the same become one.

    `mlp.gate_proj` and `mlp.up_proj` become `mlp.{gate_proj,up_proj}`.
    """
    leaves: dict[tuple[str, int, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name, count, cells, notes in rows:
        start = _LAST_PART.search(name)
        cut = 0 if start is None else start.end()
        leaves.setdefault((name[:cut], count, cells, notes), []).append(name[cut:])
    merged = []
    for (parent, count, cells, notes), names in leaves.items():
        name = parent + (names[0] if len(names) == 1 else "{" + ",".join(names) + "}")
        merged.append(Row((screen.name(name), f"{count * len(names):,}", *cells), notes))
    return merged


def listed(numbers: Sequence[int]) -> str:
    """`1, 2, 4`."""
    return ", ".join(map(str, numbers))
