"""Patterns bound to the modules of one checkpoint: what each covers, and what covers each.

Patterns that match nothing as they stand get three more readings, each recorded: as the parent of
modules, as a fused projection that engines build from several modules, and under another root
("model.language_model." for "language_model.model." and the like). A pattern that would match
under several roots at once is ambiguous and covers nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mxfp4prep.parallel import FUSED_LEAVES
from mxfp4prep.quark.patterns import WILD, Pattern, PatternKind, PatternSet

Reading = Literal["literal", "parent", "fused", "renamed", "ambiguous", "unmatched"]

_FUSED_LEAVES = {**FUSED_LEAVES, "qkv": "qkv_proj"}
"""The table of parallel, and vision towers, which store q, k and v as one and name it so."""

_ROOTS = re.compile(r"(?:(?:model|language_model)\.)+(?=.)")


class PatternUse(NamedTuple):
    """What became of a pattern: how it was read, and how many modules it covers."""

    text: str
    kind: PatternKind
    reading: Reading
    modules: int


@dataclass(frozen=True, slots=True)
class Binding:
    """Patterns applied to modules.

    hits    module -> positions of the patterns that cover it, in file order; only covered modules
    below   module -> position of an exact pattern that names its parent. Quark up to 0.11 reads
            such an entry as the parent alone, 0.12 as everything below: what is stored decides
    uses    one per pattern, in order
    """

    hits: dict[str, tuple[int, ...]]
    below: dict[str, int]
    uses: tuple[PatternUse, ...]


def bind(patterns: Sequence[Pattern], modules: Sequence[str], *, parents: bool) -> Binding:
    """What each pattern covers among `modules`.

    parents   whether an exact pattern that matches nothing may name a module above others
    """
    find = PatternSet(patterns).find
    hits: dict[str, tuple[int, ...]] = {}
    counts = [0] * len(patterns)
    if patterns:
        for module in modules:
            found = find(module)
            if found:
                hits[module] = found
                for position in found:
                    counts[position] += 1
    readings: list[Reading] = ["literal" if count else "unmatched" for count in counts]
    below: dict[str, int] = {}
    open_ends = [i for i, count in enumerate(counts) if not count]
    if open_ends and parents:
        for module, position in _read_as_parents(patterns, open_ends, modules):
            below[module] = position
            readings[position] = "parent"
            counts[position] += 1
        open_ends = [i for i in open_ends if readings[i] == "unmatched"]
    if open_ends:
        for position, reading, names in _read_otherwise(patterns, open_ends, modules):
            readings[position] = reading
            if reading == "ambiguous":
                continue
            counts[position] = len(names)
            for name in names:
                hits[name] = tuple(sorted((*hits.get(name, ()), position)))
    uses = (
        PatternUse(pattern.text, pattern.kind, reading, count)
        for pattern, reading, count in zip(patterns, readings, counts, strict=True)
    )
    return Binding(hits, below, tuple(uses))


def _read_as_parents(
    patterns: Sequence[Pattern], positions: Iterable[int], modules: Sequence[str]
) -> Iterator[tuple[str, int]]:
    """(module, position of an exact pattern that names a module above it)."""
    parents = {patterns[i].text: i for i in positions if patterns[i].kind == "exact"}
    depths = sorted({text.count(".") + 1 for text in parents})
    for module in modules if parents else ():
        parts = module.split(".")
        for depth in depths:
            if depth >= len(parts):
                break
            position = parents.get(".".join(parts[:depth]))
            if position is not None:
                yield module, position


def _read_otherwise(
    patterns: Sequence[Pattern], positions: Sequence[int], modules: Sequence[str]
) -> list[tuple[int, Reading, list[str]]]:
    """(position, reading, modules) of the patterns that match fused or re-rooted names."""
    fused = PatternSet([patterns[i] for i in positions]).find
    bare = PatternSet([_without_root(patterns[i]) for i in positions]).find
    as_fused: dict[int, list[str]] = {}
    as_renamed: dict[int, dict[str, None]] = {}
    roots: dict[int, set[str]] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        names = [module]
        if leaf in _FUSED_LEAVES and parent:
            names.append(f"{parent}.{_FUSED_LEAVES[leaf]}")
            for i in fused(names[1]):
                as_fused.setdefault(i, []).append(module)
        for name in names:
            root = _ROOTS.match(name)
            for i in bare(name[root.end() :] if root else name):
                as_renamed.setdefault(i, {})[module] = None
                roots.setdefault(i, set()).add(root.group() if root else "")
    result: list[tuple[int, Reading, list[str]]] = []
    for i, position in enumerate(positions):
        if i in as_fused:
            result.append((position, "fused", as_fused[i]))
        elif i in as_renamed:
            reading: Reading = "ambiguous" if len(roots[i]) > 1 else "renamed"
            result.append((position, reading, list(as_renamed[i])))
    return result


def _without_root(pattern: Pattern) -> Pattern:
    """`pattern` less a leading known root; regular expressions and bare wildcards stay."""
    text = _ROOTS.sub("", pattern.text, count=1) if _ROOTS.match(pattern.text) else pattern.text
    if pattern.kind == "regex" or WILD.match(text):
        return pattern
    return pattern._replace(text=text)
