"""How long a regular expression may take: Python's `re` tries every way to match, and some
expressions have more ways than anybody can wait for.

A repeated group that repeats or chooses inside, `(a+)+`, is refused: its ways double with each
letter. Of anything else the ways can be counted before it is tried on a name: each `.*` can end
wherever the text behind it stands. Quark itself writes globs and names; people add an expression.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

_PARSER: Any = import_module(
    "re._parser"
)  # what re.compile itself parses with, Python 3.11 to 3.14
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})
_SINGLE = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN"})
_BACKWARD = frozenset({"GROUPREF", "GROUPREF_EXISTS", "GROUPREF_IGNORE"})

_Items = Sequence[tuple[Any, Any]]


class Gap(NamedTuple):
    """A part that may be of several lengths: at most `most` of them, ending before `then`."""

    most: int
    then: str


class Effort(NamedTuple):
    """In how many ways an expression can be tried: alternatives times the ends of each gap."""

    alternatives: int
    gaps: tuple[Gap, ...]

    def steps(self, name: str) -> int:
        """A bound on the steps that matching `name` takes."""
        ways = self.alternatives
        for most, then in self.gaps:
            ends = name.count(then) if then else len(name)
            ways *= max(1, min(most, ends))
        return ways * (len(name) + 1)


def effort_of(expression: str) -> Effort:
    """How much work `expression` is. Raises ValueError where nobody can say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "possible nested set" and the like
        tree = _PARSER.parse(expression)
    gaps: list[Gap] = []
    exact = not tree.state.flags & (re.IGNORECASE | re.VERBOSE)
    return Effort(_walk(list(_flat(tree)), gaps, exact, last=True), tuple(gaps))


def _walk(items: _Items, gaps: list[Gap], exact: bool, *, last: bool) -> int:
    """The alternatives of a sequence; adds its gaps. `last`: what follows matches anything."""
    alternatives = 1
    for position, (code, value) in enumerate(items):
        rest = items[position + 1 :]
        match str(code):
            case "BRANCH":
                alternatives *= sum(
                    _walk(list(_flat(inner)), gaps, exact, last=False) for inner in value[1]
                )
            case "ASSERT" | "ASSERT_NOT":
                alternatives *= _walk(list(_flat(value[1])), gaps, exact, last=False)
            case "ATOMIC_GROUP":
                alternatives *= _walk(list(_flat(value)), gaps, exact, last=False)
            case "SUBPATTERN":  # with flags of its own
                alternatives *= _walk(list(_flat(value[3])), gaps, False, last=False)
            case name if name in _BACKWARD:
                raise ValueError("it refers to a group")
            case name if name in _REPEATS:
                alternatives *= _repeat(value, rest, gaps, exact, last=last)
    return alternatives


def _repeat(
    value: tuple[Any, Any, Any], rest: _Items, gaps: list[Gap], exact: bool, *, last: bool
) -> int:
    least, most, inner = value
    items = list(_flat(inner))
    choices = int(most) - int(least) + 1
    single = len(items) == 1 and str(items[0][0]) in _SINGLE
    if not single:
        inside: list[Gap] = []
        alternatives = _walk(items, inside, exact, last=False)
        if int(most) > 1 and (inside or alternatives > 1):
            raise ValueError("a repeated group repeats or chooses inside")
        if int(most) <= 1:
            gaps.extend(inside)
            return alternatives * choices
    if choices == 1 or (last and not rest):
        return 1
    then = "".join(_literals(rest)) if exact else ""
    if not (then and single and exact and not _takes(items[0], then[0])):
        gaps.append(Gap(choices, then))
    return 1


def _flat(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The items with those of plain groups in place of the groups."""
    for code, value in items:
        if str(code) == "SUBPATTERN" and not (value[1] or value[2]):
            yield from _flat(value[3])
        else:
            yield code, value


def _literals(items: _Items) -> Iterator[str]:
    for code, value in items:
        if str(code) != "LITERAL":
            return
        yield chr(value)


def _takes(item: tuple[Any, Any], character: str) -> bool:
    """Whether a single item may match a character; True where that takes more than a look."""
    code, value = str(item[0]), item[1]
    if code == "LITERAL":
        return bool(chr(value) == character)
    if code == "NOT_LITERAL":
        return bool(chr(value) != character)
    if code == "ANY":
        return True
    parts = [(str(kind), what) for kind, what in value]
    negated = parts[0][0] == "NEGATE"
    for kind, what in parts[negated:]:
        if kind == "CATEGORY":
            return True if not str(what).endswith("_DIGIT") else character.isdecimal() != negated
        if (kind == "LITERAL" and what == ord(character)) or (
            kind == "RANGE" and what[0] <= ord(character) <= what[1]
        ):
            return not negated
    return negated
