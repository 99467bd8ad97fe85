"""How much one page may hold. A report of any size stays a page that opens at once."""

from __future__ import annotations

MAX_DEGREES = 64
"""Degrees on the page: nobody serves at more."""

MAX_DEGREE_LINES = 1000
"""Rows of the map of families times degrees: about 500 bytes each."""

MAX_ROWS, MIN_ROWS = 160, 12

MAX_CELLS = 12_000
"""Cells of the map by depth, all degrees together: about 35 bytes each."""

MAX_BREAKDOWNS, MAX_PARTS = 100, 6
"""Sets of experts that are told apart, and kinds in one of them."""

MAX_CHIPS = 3000
"""Letters in them: a kind has one a degree."""

MAX_FINDINGS = 300

MAX_LISTED = 100
"""Shared experts, fused projections, layers with odd values."""


def rows_for(degrees: int) -> int:
    """Rows of the map of families for this many degrees."""
    return max(MIN_ROWS, min(MAX_ROWS, MAX_DEGREE_LINES // max(1, degrees)))


def breakdowns_for(degrees: int) -> int:
    """Sets of experts that are told apart for this many degrees."""
    return max(1, min(MAX_BREAKDOWNS, MAX_CHIPS // (MAX_PARTS * max(1, degrees))))
