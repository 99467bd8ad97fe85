"""Layers that fall short of the ASM path: gathered in families, and named with their reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from mxfp4prep.alignment import (
    REASONS,
    SCALE_COLUMN_MULTIPLE,
    SCALE_ROW_MULTIPLE,
    Path,
    Verdict,
)
from mxfp4prep.report.families import gather
from mxfp4prep.report.joining import listed
from mxfp4prep.report.screen import counted

if TYPE_CHECKING:
    from mxfp4prep.auditing import Audit

MOST_NAMED = 2
"""Families of layers that are named before the rest is only counted."""


class Shortfall(NamedTuple):
    """Layers of one name but for their numbers, with the same verdicts.

    nbytes   weight and scale of the first of them, times how many they are
    """

    name: str
    layers: int
    nbytes: int
    verdicts: Mapping[int, Verdict]

    def degrees(self, path: Path, among: Iterable[int]) -> tuple[int, ...]:
        """The degrees at which they take `path`."""
        return tuple(tp for tp in among if self.verdicts[tp].path == path)


def shortfalls(audit: Audit) -> list[Shortfall]:
    """The layers that do not take the ASM path at every degree asked about."""
    decisions, asked = audit.decisions, audit.survey.tp
    clean: dict[int, bool] = {}

    def items() -> Iterator[tuple[str, int, tuple[Mapping[int, Verdict], int]]]:
        for item in audit.survey.layers:
            layer = item.layer
            verdicts = decisions[layer.name]
            if id(verdicts) not in clean:
                clean[id(verdicts)] = all(verdicts[tp].path == "asm" for tp in asked)
            if not clean[id(verdicts)]:
                nbytes = layer.weight.nbytes + layer.scale.nbytes
                yield layer.name, id(verdicts), (verdicts, nbytes)

    return [
        Shortfall(family.name, family.count, family.first[1] * family.count, family.first[0])
        for family in gather(items())
    ]


def arithmetic(verdicts: Mapping[int, Verdict], degrees: tuple[int, ...]) -> str:
    """Why the first of `degrees` does not divide."""
    tp = degrees[0]
    verdict = verdicts[tp]
    return verdict.detail.replace(f" at tp {tp}:", ":") or ", ".join(verdict.reasons)


def spelled(
    facts: Iterable[tuple[Shortfall, tuple[int, ...]]],
    why: Callable[[Mapping[int, Verdict], tuple[int, ...]], str],
) -> str:
    """`A (94 layers) at tp 4, 8 (why); B at ...; and 12 more layers`, the heaviest first.

    facts   families and the degrees that count; those without any are left out
    """
    siblings: dict[tuple[str, tuple[int, ...], str], list[Shortfall]] = {}
    for family, at in facts:
        if at:
            parent = family.name[: family.name.rfind(".") + 1]
            siblings.setdefault((parent, at, why(family.verdicts, at)), []).append(family)
    heaviest = sorted(siblings.items(), key=lambda item: -sum(f.nbytes for f in item[1]))
    pieces = []
    for (parent, at, text), members in heaviest[:MOST_NAMED]:
        leaves = [family.name[len(parent) :] for family in members]
        leaf = leaves[0] if len(leaves) == 1 else f"{{{','.join(leaves)}}}"
        count = counted(sum(family.layers for family in members), "layer")
        pieces.append(f"{parent}{leaf} ({count}) at tp {listed(at)} ({text})")
    rest = sum(family.layers for _, members in heaviest[MOST_NAMED:] for family in members)
    if rest:
        pieces.append(f"and {counted(rest, 'more layer')}")
    return "; ".join(pieces)


def why_not_asm(verdicts: Mapping[int, Verdict], degrees: tuple[int, ...]) -> str:
    """The reasons at `degrees`, with the numbers that make them so."""
    made = [verdicts[tp] for tp in degrees]
    words = []
    for reason in dict.fromkeys(reason for verdict in made for reason in verdict.reasons):
        shards = [v.scale_shard for v in made if reason in v.reasons and v.scale_shard is not None]
        rows = listed(list(dict.fromkeys(shard[0] for shard in shards)))
        columns = listed(list(dict.fromkeys(shard[-1] for shard in shards)))
        if reason == "scale_cols" and shards:
            words.append(f"{columns} scale columns, not a multiple of {SCALE_COLUMN_MULTIPLE}")
        elif reason == "scale_rows" and shards:
            words.append(f"{rows} scale rows, not a multiple of {SCALE_ROW_MULTIPLE}")
        else:
            words.append(REASONS.get(reason, reason))
    return "; ".join(words)
