"""`exclude` as an engine reads it: which entries match a module's name, and which never match.

Quark writes full names; people write globs, `re:` expressions and names of parents. Each engine
understands some of these (see NameRule), and none says what it did not understand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mxfp4prep.engines.rules import NameRule
from mxfp4prep.quark.patterns import Pattern, PatternSet

_WILD = re.compile(r"[*?]")
_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")
_BANK = re.compile(r"(?:^|\.)experts(?=\.)")


class Excludes:
    """The entries of `exclude`, ready to be asked about names of an engine's modules.

    `matched` grows with what was asked: positions of entries that matched a name at least once.
    """

    def __init__(self, entries: Sequence[str], rule: NameRule) -> None:
        """`entries` and the names asked about are those of the engine's modules, not the disk's."""
        patterns: list[Pattern] = []
        self._parents: dict[str, int] = {}
        self._below_banks: dict[str, list[int]] = {}
        for position, entry in enumerate(entries):
            if entry.startswith("re:"):
                text = entry if rule.regex == "match" else _anywhere(entry)
                patterns.append(Pattern(text, "regex", position))
                continue
            for bank in _banks_above(entry):
                self._below_banks.setdefault(bank, []).append(position)
            if rule.globs and _WILD.search(entry):
                patterns.append(Pattern(entry, "glob", position))
                patterns.append(Pattern(f"{entry}.*", "glob", position))
                continue
            patterns.append(Pattern(entry, "exact", position))
            if rule.parents:
                self._parents.setdefault(entry, position)
        self._entries = [pattern.entry for pattern in patterns]
        self._find = PatternSet(patterns).find
        self.matched: set[int] = set()

    def match(self, name: str) -> bool:
        """Whether an entry matches the module `name`, by itself or as its parent."""
        hits = {self._entries[position] for position in self._find(name)}
        if self._parents:
            end = name.rfind(".")
            while end > 0:
                parent = self._parents.get(name[:end])
                if parent is not None:
                    hits.add(parent)
                end = name.rfind(".", 0, end)
        self.matched |= hits
        return bool(hits)

    def match_bank(self, bank: str) -> bool:
        """Whether an entry matches a bank of experts: by itself, or by naming anything in it."""
        below = self._below_banks.get(bank, ())
        self.matched.update(below)
        return self.match(bank) or bool(below)


def _anywhere(entry: str) -> str:
    """The `re:` entry that matches at the start of a name where `entry` is found in it."""
    flags = _FLAGS.match(entry, 3)
    start = flags.group() if flags else ""
    # A comment of a verbose expression ends with its line.
    end = "\n)" if "x" in start else ")"
    return f"re:{start}(?:[\\s\\S]*?)(?:{entry[3 + len(start) :]}{end}"


def _banks_above(entry: str) -> Iterable[str]:
    """Every `....experts` that `entry` names something in."""
    return (entry[: match.end()] for match in _BANK.finditer(entry))


def rename(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """`name` with every prefix replaced that it has when its turn comes."""
    for old, new in prefixes:
        if name.startswith(old):
            name = new + name[len(old) :]
    return name
