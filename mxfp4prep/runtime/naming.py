"""Names that a checkpoint does not have, and those it has that are like them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches

from mxfp4prep.errors import UsageError

MOST_NEAR = 3
"""Names that an error shows."""

_DIGITS = re.compile(r"\d+")


class UnknownName(UsageError, KeyError):
    """A name that the checkpoint does not have; a KeyError too, as a mapping has to raise."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError's own shows the text as a literal


def unknown_name(
    name: object, what: str, known: Collection[str], listed: str, instead: str | None = None
) -> UnknownName:
    """The error for a name that is none of `known`.

    what     what it was to be
    listed   the expression that has all of `known`
    instead  the call that takes this name, where there is one
    """
    count = len(known)
    hint = f"{listed} lists all {count}" if count else f"{listed} is empty here"
    if instead is not None:
        return UnknownName(_shown(name), what, expected=instead, hint=hint)
    near = near_names(name, known) if isinstance(name, str) else []
    expected = " or ".join(near) if near else f"one of {count}" if count else "none"
    return UnknownName(_shown(name), what, expected=f"{expected}; {hint}", hint=hint)


def _shown(name: object) -> str:
    return name if isinstance(name, str) and name else repr(name)


def near_names(name: str, known: Collection[str]) -> list[str]:
    """The few of `known` that are most like `name`, the nearest first.

    70,000 names of a model differ in their numbers only, so that first the name without its numbers
    is looked for, then the numbers.
    """
    forms: dict[str, list[str]] = {}
    for one in known:
        forms.setdefault(_DIGITS.sub("0", one), []).append(one)
    wanted = _DIGITS.sub("0", name)
    inside = [form for form in forms if form.endswith(f".{wanted}") or f"{wanted}." in form]
    like = get_close_matches(wanted, forms, n=MOST_NEAR)
    nearest = dict.fromkeys([*like, *sorted(inside, key=len)])
    return [
        min(forms[form], key=lambda one: tuple(_distances(name, one)))
        for form in list(nearest)[:MOST_NEAR]
    ]


def _distances(name: str, other: str) -> Iterator[int]:
    for mine, theirs in zip(_DIGITS.findall(name), _DIGITS.findall(other), strict=False):
        yield abs(int(mine[:18]) - int(theirs[:18]))
