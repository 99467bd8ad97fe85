"""Few choices out of many: every pair of values of two axes at least once, not their product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Pair = tuple[str, object, str, object]
"""A value of one axis together with a value of another."""


def covering(
    axes: Mapping[str, Sequence[object]], never: Sequence[Pair] = ()
) -> list[dict[str, object]]:
    """Choices of one value per axis that hold every pair of values, the same ones every time.

    axes    values by axis, each hashable
    never   pairs that no choice may hold; pairs that these leave no room for are left out
    """
    excluded = {frozenset({(a, x), (b, y)}) for a, x, b, y in never}
    open_pairs = dict.fromkeys(
        pair
        for a, b in combinations(axes, 2)
        for x, y in product(axes[a], axes[b])
        if (pair := frozenset({(a, x), (b, y)})) not in excluded
    )
    found = []
    while open_pairs:
        pair = next(iter(open_pairs))
        choice = _completed(dict(pair), axes, excluded, open_pairs)
        held = {pair} if choice is None else set(map(frozenset, combinations(choice.items(), 2)))
        for done in held:
            open_pairs.pop(done, None)
        if choice is not None:
            found.append({axis: choice[axis] for axis in axes})
    return found


def _completed(
    choice: dict[str, object],
    axes: Mapping[str, Sequence[object]],
    excluded: set[frozenset[tuple[str, object]]],
    open_pairs: Mapping[frozenset[tuple[str, object]], None],
) -> dict[str, object] | None:
    """`choice` with a value for each axis, with many open pairs; None where there is none."""
    axis = next((axis for axis in axes if axis not in choice), None)
    if axis is None:
        return choice

    def gain(value: object) -> int:
        return sum(frozenset({(axis, value), item}) in open_pairs for item in choice.items())

    for value in sorted(axes[axis], key=gain, reverse=True):
        if any(frozenset({(axis, value), item}) in excluded for item in choice.items()):
            continue
        full = _completed({**choice, axis: value}, axes, excluded, open_pairs)
        if full is not None:
            return full
    return None
