"""Modules that two checkpoints name differently: the same tree under another root.

Multimodal wrappers and exporters move `model.layers` to `language_model.model.layers` or to
`model.language_model.layers`. Only roots are exchanged; what follows them must be the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_NUMBERED = re.compile(r"(?:^|(?<=\.))[^.]+\.[0-9]+(?=\.)")

_MAX_HEADS = 8
"""Roots under which one and the same rest of a name is looked for; more are no root's work."""


class Rename(NamedTuple):
    """The beginning `a` of names in A is `b` in B; each empty or with its dot."""

    a: str
    b: str


@dataclass(frozen=True)
class Renames:
    """The roots that moved, and A's name -> B's name for every module that moved with one.

    counts   modules per root
    """

    modules: dict[str, str]
    counts: dict[Rename, int]

    def module(self, name: str) -> str:
        """What B calls A's module `name`."""
        return self.modules.get(name, name)

    def text(self, text: str) -> str:
        """`text` of A with every name in it as B has it, as far as its root tells."""
        if text in self.modules:
            return self.modules[text]
        for pattern, rename in self._patterns:
            text = pattern.sub(lambda _, new=rename.b: new, text)  # type: ignore[misc]
        return text

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Rename]]:
        patterns = []
        for rename in self.counts:
            start = len(rename.a)
            heads = {
                name[start:].partition(".")[0]
                for name, new in self.modules.items()
                if new == rename.b + name[start:]
            }
            following = "|".join(map(re.escape, sorted(heads)))
            pattern = rf"(?<![\w.-]){re.escape(rename.a)}(?=(?:{following})\.[\w{{])"
            patterns.append((re.compile(pattern), rename))
        return patterns


def match_names(a: Collection[str], b: Collection[str]) -> Renames:
    """The modules of A that B has under another root.

    a, b   all module names of each; looked up, so best a set or a dict
    """
    only_a = [name for name in a if name not in b]
    only_b = {name for name in b if name not in a}
    modules: dict[str, str] = {}
    counts: dict[Rename, int] = {}
    for rename in _roots(only_a, only_b):
        start = len(rename.a)
        moved = {
            name: new
            for name in only_a
            if name.startswith(rename.a)
            and name not in modules
            and (new := rename.b + name[start:]) in only_b
        }
        if moved:
            modules |= moved
            only_b.difference_update(moved.values())
            counts[rename] = len(moved)
    return Renames(modules, counts)


def _roots(only_a: Iterable[str], only_b: Iterable[str]) -> list[Rename]:
    """Pairs of roots under which most of the numbered names (`layers.0...`) are the same."""
    heads_a, totals_a = _split(only_a)
    heads_b, totals_b = _split(only_b)
    shared: Counter[tuple[str, str]] = Counter()
    for tail, heads in heads_a.items():
        others = heads_b.get(tail, [])
        if len(heads) <= _MAX_HEADS and len(others) <= _MAX_HEADS:
            shared.update((head, other) for head in heads for other in others)
    by_count = sorted(shared.items(), key=lambda item: (-item[1], item[0]))
    roots = [
        _without_common_end(head, other)
        for (head, other), count in by_count
        if 2 * count > max(totals_a[head], totals_b[other])
    ]
    return list(dict.fromkeys(roots))


def _split(names: Iterable[str]) -> tuple[dict[str, list[str]], Counter[str]]:
    """The heads of every tail, and the tails of every head: `model.` and `layers.0.mlp.gate`."""
    heads: dict[str, list[str]] = {}
    totals: Counter[str] = Counter()
    for name in names:
        found = _NUMBERED.search(name)
        if found is not None:
            head = name[: found.start()]
            heads.setdefault(name[found.start() :], []).append(head)
            totals[head] += 1
    return heads, totals


def _without_common_end(a: str, b: str) -> Rename:
    """`model.` and `language_model.model.` -> nothing and `language_model.`."""
    parts_a, parts_b = a.split(".")[:-1], b.split(".")[:-1]
    while parts_a and parts_b and parts_a[-1] == parts_b[-1]:
        parts_a.pop()
        parts_b.pop()
    return Rename("".join(f"{part}." for part in parts_a), "".join(f"{part}." for part in parts_b))
