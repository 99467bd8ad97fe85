"""Patterns over module names: what an `exclude` or `layer_quant_config` entry matches.

An entry is of one of three kinds. `re:EXPRESSION` is a regular expression that has to match at the
start of the name (re.match, as vLLM reads it). An entry with `*`, `?` or `[` is a glob over the
whole name, case-sensitive, where `*` crosses dots (fnmatch, as Quark reads it). Everything else is
exact: it equals a name. Nothing ever matches a substring or half a path part. Commas separate
several patterns in one entry.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.quark.expressions import Effort, effort_of

PatternKind = Literal["exact", "glob", "regex"]

_DIGITS = str.maketrans("123456789", "000000000")
WILD = re.compile(r"[*?\[]")


MOST_STEPS = 1_000_000_000
"""Steps that all expressions of a list may take on all names, some ten seconds: real ones take
thousands of times fewer."""


class Pattern(NamedTuple):
    """One pattern; `entry` counts the entries of the list or map that it came from."""

    text: str
    kind: PatternKind
    entry: int


def similar(name: str) -> str:
    """`name` with every digit replaced by 0: equal for the same module of different layers."""
    return name.translate(_DIGITS)


def parse_patterns(entries: Sequence[str], where: str) -> tuple[Pattern, ...]:
    """The patterns in `entries`; `where` is their key in config.json.

    Raises InvalidCheckpoint, naming the entry, on a bad regular expression.
    """
    patterns: list[Pattern] = []
    for position, entry in enumerate(entries):
        for text in _split(entry):
            if text.startswith("re:"):
                _compile(text, where)
                patterns.append(Pattern(text, "regex", position))
            else:
                kind: PatternKind = "glob" if WILD.search(text) else "exact"
                patterns.append(Pattern(text, kind, position))
    return tuple(patterns)


class PatternSet:
    """Patterns ready to be asked about many names.

    Exact ones are one dict look-up. Patterns that cannot tell digits apart are tried once per
    `similar` name, of which a model has some dozens. Other globs are indexed by the longest run of
    whole path parts they demand, so 5,000 of them cost no more than the few that can match.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._exact: dict[str, tuple[int, ...]] = {}
        self._blind: list[tuple[int, _Test]] = []
        self._known: dict[str, tuple[int, ...]] = {}
        self._runs: dict[int, dict[str, list[tuple[int, _Test]]]] = {}
        self._scan: list[tuple[int, _Test]] = []
        patience = _Patience()
        for position, pattern in enumerate(patterns):
            if pattern.kind == "exact":
                self._exact[pattern.text] = (*self._exact.get(pattern.text, ()), position)
                continue
            item = (position, _Test(pattern, patience))
            run = _demanded_run(pattern)
            if _is_digit_blind(pattern):
                self._blind.append(item)
            elif run:
                self._runs.setdefault(len(run), {}).setdefault(".".join(run), []).append(item)
            else:
                self._scan.append(item)

    def find(self, name: str) -> tuple[int, ...]:
        """Positions of all patterns that match `name`, ascending."""
        hits = self._exact.get(name, ())
        if self._blind:
            key = name.translate(_DIGITS)
            blind = self._known.get(key)
            if blind is None:
                blind = tuple(position for position, test in self._blind if test(key))
                self._known[key] = blind
            hits += blind
        if self._scan:
            hits += tuple(position for position, test in self._scan if test(name))
        if self._runs:
            hits += self._find_runs(name)
        return tuple(sorted(hits)) if len(hits) > 1 else hits

    def _find_runs(self, name: str) -> tuple[int, ...]:
        parts = name.split(".")
        hits: set[int] = set()
        for length, table in self._runs.items():
            for start in range(len(parts) - length + 1):
                for position, test in table.get(".".join(parts[start : start + length]), ()):
                    if test(name):
                        hits.add(position)
        return tuple(hits)


class _Patience:
    """Counts the steps that expressions may take, before they take them."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def spend(self, effort: Effort, pattern: Pattern, name: str) -> None:
        """Raises InvalidCheckpoint when it is used up."""
        self._left -= effort.steps(name)
        if self._left < 0:
            raise InvalidCheckpoint(
                "config.json",
                "a regular expression of quantization_config would take too long",
                found=f"{pattern.text} on names such as {name[:60]}",
                expected="a glob or a module name",
            )


class _Test:
    """Whether a glob or regex matches a name; compiled when first asked."""

    __slots__ = ("_effort", "_match", "_patience", "_pattern")

    def __init__(self, pattern: Pattern, patience: _Patience) -> None:
        self._pattern = pattern
        self._patience = patience
        self._effort: Effort | None = None
        self._match: Callable[[str], object] | None = None

    def __call__(self, name: str) -> bool:
        if self._match is None:
            if self._pattern.kind == "regex":
                self._match = _compile(self._pattern.text, "").match
                self._effort = effort_of(self._pattern.text.removeprefix("re:"))
            else:
                self._match = re.compile(fnmatch.translate(self._pattern.text)).match
        if self._effort is not None:
            self._patience.spend(self._effort, self._pattern, name)
        return self._match(name) is not None


def _split(entry: str) -> list[str]:
    """The comma-separated patterns of an entry; commas inside a regular expression stay."""
    pieces: list[str] = []
    for piece in entry.split(","):
        text = piece.strip()
        if pieces and pieces[-1].startswith("re:") and not text.startswith("re:"):
            pieces[-1] += f",{piece}"
        else:
            pieces.append(text)
    return [piece for piece in pieces if piece] or [""]


def _compile(text: str, where: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible nested set" and the like
            compiled = re.compile(text.removeprefix("re:"))
            effort_of(text.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise InvalidCheckpoint(
            "config.json",
            f"quantization_config.{where} holds a bad regular expression ({error})",
            found=text,
            expected="re:EXPRESSION, a glob or a module name",
        ) from None
    return compiled


def _is_digit_blind(pattern: Pattern) -> bool:
    """Whether the pattern treats all digits alike.

    It does when it names none: a range in a class holds all ten or none unless it ends in one, and
    escapes by number hold digits themselves.
    """
    text = pattern.text
    if any("0" <= c <= "9" for c in text):
        return False
    return pattern.kind == "glob" or ("(?" not in text.replace("(?:", "") and r"\N" not in text)


def _demanded_run(pattern: Pattern) -> list[str]:
    """The longest run of whole path parts that every matching name holds."""
    if pattern.kind == "regex":
        pieces, closed_end = [_regex_head(pattern.text.removeprefix("re:"))], False
    elif "[" in pattern.text:
        pieces, closed_end = [WILD.split(pattern.text, maxsplit=1)[0]], False
    else:
        pieces, closed_end = re.split(r"[*?]", pattern.text), True
    runs = []
    for i, piece in enumerate(pieces):
        parts = piece.split(".")
        closed = closed_end and i == len(pieces) - 1
        runs.append(parts[(0 if i == 0 else 1) : (len(parts) if closed else -1)])
    return max(runs, key=len)


def _regex_head(expression: str) -> str:
    """Literal text that every match starts with; "" where that is not plain to see."""
    if "|" in expression:
        return ""
    head: list[str] = []
    rest = iter(expression)
    for c in rest:
        if c == "\\":
            c = next(rest, "")
            if c.isalnum() or not c.isascii():
                break
            head.append(c)
        elif c.isalnum() or c == "_":
            head.append(c)
        else:
            if c in "*?{+" and head:
                head.pop()
            break
    return "".join(head)
