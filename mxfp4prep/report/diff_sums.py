"""What differs between two audits in numbers: the checkpoints, paths, cost and engine outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mxfp4prep.report.audit_text import SHOWN
from mxfp4prep.report.screen import Row, Screen, human

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

_WORDS = {
    "model_type": "model type",
    "quark_version": "Quark version",
    "files": "safetensors files",
    "tensors": "tensors",
    "nbytes": "bytes",
    "config_sha256": "config.json",
    "index_sha256": "index",
    "asm_tp": "every layer ASM at tp",
    "possible_tp": "every layer splits at tp",
    "largest_clean_tp": "largest clean tp",
    "expert_parallel": "expert parallelism",
    "sequence_parallel": "sequence parallelism",
    "shared_experts": "shared experts",
    "rule": "ASM rule",
    "scales": "scale bytes",
    "nan": "NaN scales",
    "zero_blocks": "zero scales",
    "minimum": "smallest scale byte",
    "maximum": "largest scale byte",
}
"""Facts as people call them."""

_SHAPE = frozenset({"n", "k", "experts"})
_DIGEST_DIGITS = 12
NOTHING = "-"


def fact_lines(document: c.DiffDocument, screen: Screen) -> list[str]:
    """The two checkpoints, and what follows for all their layers together."""
    facts = (*document["source"], *document["summary"], *document["values"])
    rows = []
    for fact in facts:
        values = (screen.name(value_of(fact, value)) for value in (fact["a"], fact["b"]))
        rows.append(Row((_WORDS.get(fact["fact"], fact["fact"]), *values)))
    return screen.table(("checkpoint", "A", "B"), rows) if rows else []


def value_of(fact: c.DiffFactDocument, value: c.Fact) -> str:
    """A fact's value in few characters, but never the same for two that differ."""
    if value is None or value == []:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int):
        sizes = [human(x) if isinstance(x, int) else None for x in (fact["a"], fact["b"])]
        if fact["fact"] == "nbytes" and sizes[0] != sizes[1]:
            return human(value)
        return str(value) if fact["fact"] in _SHAPE else f"{value:,}"
    if fact["fact"].endswith("_sha256"):
        heads = [str(x)[:_DIGEST_DIGITS] for x in (fact["a"], fact["b"])]
        return value if heads[0] == heads[1] else value[:_DIGEST_DIGITS]
    return value


def fact_words(fact: c.DiffFactDocument) -> str:
    """`scheme w4a4 -> w4a16`."""
    word = _WORDS.get(fact["fact"], fact["fact"])
    return f"{word} {value_of(fact, fact['a'])} -> {value_of(fact, fact['b'])}"


def path_lines(paths: Mapping[str, c.DiffPathsDocument], screen: Screen) -> list[str]:
    """How many layers and bytes take each path, where that differs."""
    rows = []
    for degree, pair in paths.items():
        for path, shown in SHOWN.items():
            x, y = pair["a"][path], pair["b"][path]  # type: ignore[literal-required]
            if x != y:
                arrow = f"{x['layers']:,} -> {y['layers']:,} layers"
                sizes = f"{human(x['nbytes'])} -> {human(y['nbytes'])}"
                rows.append(Row((f"tp {degree}", shown, arrow, sizes)))
    return screen.table(("paths", "", "layers", "bytes"), rows) if rows else []


def cost_lines(costs: Mapping[str, c.DiffCostDocument], screen: Screen) -> list[str]:
    """What a rank holds, and how much of its work is fast."""
    rows = []
    for degree, pair in costs.items():
        a, b = pair["a"], pair["b"]
        sizes = ("rank_nbytes", "rank_mxfp4_nbytes", "padding_nbytes")
        cells = [_arrow(*(human(x[key]) for x in (a, b))) for key in sizes]  # type: ignore[literal-required]
        flops = [f"{x['paths']['asm']['flops']:.1%}" for x in (a, b)]
        rows.append(Row((f"tp {degree}", *cells, _arrow(*flops))))
    head = ("per rank", "bytes", "MXFP4", "padding", "FLOPs on asm")
    return screen.table(head, rows) if rows else []


def _arrow(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"


def outcome_lines(
    outcomes: Mapping[str, c.DiffOutcomesDocument], engine: str, screen: Screen
) -> list[str]:
    """How many layers end how on the engine of that name."""
    rows = []
    for degree, pair in outcomes.items():
        words = [
            f"{outcome} {pair['a'].get(outcome, 0):,} -> {pair['b'].get(outcome, 0):,}"
            for outcome in dict.fromkeys((*pair["a"], *pair["b"]))
            if pair["a"].get(outcome, 0) != pair["b"].get(outcome, 0)
        ]
        rows.append(Row((f"tp {degree}", ", ".join(words))))
    return screen.table((screen.name(engine), "layers"), rows) if rows else []
