"""How engines cut each layer over ranks: the role of a module, and the cut that a role makes.

A *role* is what an engine does with a module: column- or row-parallel, part of a fused
projection, replicated, one expert's matrix. It comes from the module's name, by the table in
architectures, and from the names beside it. A *cut* is the arithmetic of that role with the counts
of config.json: which rows and columns a rank gets. Audit, plan and runtime all use the same cut,
so they cannot disagree.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, cast, get_args

from mxfp4prep.architectures import (
    COMMON,
    INTERLEAVED_GATE_UP,
    Parallel,
    Topology,
    family_of,
    row_of,
)
from mxfp4prep.errors import CannotShard, UsageError

__all__ = [
    "FUSED_LEAVES",
    "SCALE_GROUP",
    "VOCAB_PAD",
    "Block",
    "Cut",
    "GateUp",
    "Kind",
    "Parallel",
    "Role",
    "Shard",
    "Topology",
    "assign_roles",
    "cut_of",
    "gate_up_order",
    "kind_of",
    "parse_rules",
    "shard",
]

Kind = Literal["linear", "expert", "shared_expert"]
GateUp = Literal["interleaved", "concatenated"]

SCALE_GROUP = 32
"""Values along K that share one E8M0 scale (OCP MX v1.0, section 5.1)."""

VOCAB_PAD = 64
"""Engines pad the vocabulary to a multiple of this before they split it.

Source: vLLM DEFAULT_VOCAB_PADDING_SIZE, model_executor/layers/vocab_parallel_embedding.py.
"""


class Role(NamedTuple):
    """What an engine does with one module.

    part    which piece of a fused projection or expert this is ("q", "gate", "down", ...), or ""
    group   name of the fused projection an engine builds from it and its siblings, or None
    """

    parallel: Parallel
    part: str = ""
    group: str | None = None


class Block(NamedTuple):
    """`rows` output rows made of `units` equal pieces that must stay whole on a rank.

    replicate   with more ranks than units, several ranks hold the same unit (KV heads)
    vocab       rows are padded to VOCAB_PAD before the split; the last rank may be short
    """

    rows: int
    units: int
    replicate: bool = False
    vocab: bool = False


class Cut(NamedTuple):
    """Where a matrix (n, k) is cut: by blocks of rows, by columns, or not at all."""

    axis: Literal["rows", "columns", "none"]
    blocks: tuple[Block, ...] = ()


class Shard(NamedTuple):
    """One rank's piece: row ranges (in stored order) and one column range, in elements."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]

    @property
    def n(self) -> int:
        """Rows of the piece."""
        return sum(stop - start for start, stop in self.rows)

    @property
    def k(self) -> int:
        """Columns of the piece, in FP4 elements."""
        return self.columns[1] - self.columns[0]


FUSED_LEAVES: dict[str, str] = {
    leaf: row.fused for leaf, row in COMMON.items() if row.fused is not None
}
"""Leaf of a stored module -> leaf of the projection that engines build from it and its siblings."""

_EXPERT = re.compile(
    r"(?:^|\.)experts\.(?:\d+\.)?[^.]+$|(?:^|\.)block_sparse_moe\.(?:input|output)_linear$"
)
_SHARED = re.compile(r"(?:^|\.)(?:shared_experts?|shared_mlp)\.")
_DIGITS = str.maketrans("123456789", "000000000")


def kind_of(name: str) -> Kind:
    """Whether module `name` is a routed expert, part of a shared expert, or a plain linear."""
    if _EXPERT.search(name):
        return "expert"
    if _SHARED.search(name):
        return "shared_expert"
    return "linear"


def gate_up_order(name: str, topology: Topology) -> GateUp | None:
    """How gate and up rows are stored in one tensor: "interleaved", "concatenated" or None."""
    row = row_of(name, topology.model_type)
    if row is None or row.part != "gate_up":
        return None
    interleaved = family_of(topology.model_type) in INTERLEAVED_GATE_UP
    return "interleaved" if interleaved else "concatenated"


def parse_rules(rules: Iterable[str]) -> tuple[tuple[str, Parallel], ...]:
    """User rules `PATTERN=KIND` (glob over module names) as pairs.

    Raises UsageError on anything else.
    """
    kinds = get_args(Parallel)
    parsed: list[tuple[str, Parallel]] = []
    for rule in rules:
        pattern, equals, kind = rule.rpartition("=")
        if not equals or not pattern or kind not in kinds:
            raise UsageError(
                f"--parallel {rule}",
                "not a rule",
                expected=f"PATTERN=KIND with KIND one of {', '.join(kinds)}",
                hint="for example --parallel 'model.layers.*.mixer.out=row'",
            )
        parsed.append((pattern, cast(Parallel, kind)))
    return tuple(parsed)


def assign_roles(
    names: Sequence[str], rules: Sequence[tuple[str, Parallel]] = (), model_type: str = ""
) -> dict[str, Role]:
    """The role of every module in `names`; unknown names get parallel "unknown".

    names       all modules that own a weight, quantized or not: a fused group exists only where at
                least two of its members do
    rules       user rules from `parse_rules`; the first that matches wins over the table
    model_type  the text model's, as Topology has it: some names mean something else in some models
    """
    roles: dict[str, Role] = {}
    group_sizes: dict[str, int] = {}
    # Layers differ in their numbers, so that the table is asked some dozens of times. The last
    # part of a name keeps its digits: w1, w2 and w3 are not the same.
    known: dict[tuple[str, str], Role] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        key = parent.translate(_DIGITS), leaf
        role = known.get(key)
        if role is None:
            role = known[key] = _table_role(name, model_type)
        fused = role.group
        if fused is not None:
            role = Role(role.parallel, role.part, f"{parent}.{fused}" if parent else fused)
        if rules:
            role = _ruled(name, role, rules)
        roles[name] = role
        if role.group is not None:
            group_sizes[role.group] = group_sizes.get(role.group, 0) + 1
    for name, role in roles.items():
        if role.group is not None and group_sizes[role.group] < 2:
            alone: Parallel = "column" if role.parallel in ("qkv", "merged") else role.parallel
            roles[name] = role._replace(group=None, parallel=alone)
    return roles


def _ruled(name: str, role: Role, rules: Sequence[tuple[str, Parallel]]) -> Role:
    for pattern, kind in rules:
        if fnmatch.fnmatchcase(name, pattern):
            # A rule that says what the table says keeps what else the table knows.
            return role if role.parallel == kind else Role(kind)
    return role


def _table_role(name: str, model_type: str) -> Role:
    """The role by the table alone; its group is the last part of the group's name."""
    row = row_of(name, model_type)
    if row is None:
        return Role("unknown")
    if kind_of(name) == "expert":
        if row.part not in ("gate", "up", "down", "gate_up"):
            return Role("unknown")
        return Role("expert", row.part, row.fused)
    return Role(row.parallel, row.part, row.fused)


def cut_of(role: Role, n: int, topology: Topology, interleaved: bool = False) -> Cut:
    """The cut that `role` makes in a matrix of `n` rows.

    interleaved   gate and up rows alternate (gpt-oss), so a contiguous slice keeps pairs together
    """
    return _cut(role.parallel, role.part, n, topology, interleaved)


@lru_cache(maxsize=4096)
def _cut(parallel: Parallel, part: str, n: int, topology: Topology, interleaved: bool) -> Cut:
    if parallel in ("replicated", "unknown"):
        return Cut("none")
    if parallel == "row" or part == "down":
        return Cut("columns")
    blocks = _blocks(part, n, topology, interleaved)
    return Cut("rows", blocks or (Block(n, n),))


def _blocks(part: str, n: int, t: Topology, interleaved: bool) -> tuple[Block, ...]:
    """What `n` rows of this part are made of; nothing for rows like any other.

    Rows that are several things in one, where config.json does not say how many of each, are one
    piece: a cut in the wrong place would go unnoticed.
    """
    whole = (Block(n, 1),)
    if part == "qkv":
        return _qkv_blocks(n, t) or whole
    if part == "grouped_qkv":
        if t.kv_heads == 1:
            return _qkv_blocks(n, t) or whole
        return _units(n, t.kv_heads) or whole
    if part == "gate_up":
        if n % 2:
            return whole
        if interleaved:
            return (Block(n, n // 2),)
        return Block(n // 2, n // 2), Block(n // 2, n // 2)
    if part == "halves":
        return whole if n % 2 else (Block(n // 2, n // 2), Block(n // 2, n // 2))
    if part == "linear_qkv":
        key_rows = t.linear_key_heads * t.linear_key_dim
        value_rows = t.linear_value_heads * t.linear_value_dim
        if not key_rows or not value_rows or 2 * key_rows + value_rows != n:
            return whole
        key = Block(key_rows, t.linear_key_heads)
        return key, key, Block(value_rows, t.linear_value_heads)
    if part == "linear_key":
        return _units(n, t.linear_key_heads) or whole
    if part == "linear_value":
        return _units(n, t.linear_value_heads)
    if part == "output_groups":
        return _units(n, t.output_groups) or whole
    if part in ("q", "heads"):
        return _units(n, t.heads)
    if part in ("k", "v"):
        return _units(n, t.kv_heads, replicate=True)
    if part == "vocab":
        return (Block(n, n, vocab=True),)
    return ()


def _units(n: int, units: int, replicate: bool = False) -> tuple[Block, ...]:
    """One block of `n` rows in `units` pieces; nothing where the number is unknown or odd."""
    return (Block(n, units, replicate),) if units and n % units == 0 else ()


def _qkv_blocks(n: int, t: Topology) -> tuple[Block, ...]:
    """q, k and v one after the other; with an output gate a q head has twice the rows."""
    q_rows, kv_rows = t.heads * t.head_dim, t.kv_heads * t.head_dim
    left = n - 2 * kv_rows
    if not q_rows or left not in (q_rows, 2 * q_rows):
        return ()
    kv = Block(kv_rows, t.kv_heads, replicate=True)
    return Block(left, t.heads), kv, kv


def shard(cut: Cut, n: int, k: int, tp_size: int, tp_rank: int = 0) -> Shard:
    """The rows and columns of an (n, k) matrix that rank `tp_rank` of `tp_size` holds.

    Raises CannotShard, with `reason` one of split_rows, split_cols, split_groups: never a floor
    division, which is how engines have corrupted scales silently.
    """
    if tp_size == 1 or cut.axis == "none":
        return Shard(((0, n),), (0, k))
    if cut.axis == "columns":
        if k % tp_size:
            raise CannotShard(
                "layer", reason="split_cols", what=f"{k} columns do not divide by {tp_size} ranks"
            )
        width = k // tp_size
        if width % SCALE_GROUP:
            raise CannotShard(
                "layer",
                reason="split_groups",
                what=f"no whole 32-groups at tp {tp_size}: {k} / {tp_size} = {width} columns "
                f"= {width / SCALE_GROUP:g} groups",
            )
        return Shard(((0, n),), (tp_rank * width, (tp_rank + 1) * width))
    ranges: list[tuple[int, int]] = []
    base = 0
    for block in cut.blocks:
        start, stop = _block_range(block, tp_size, tp_rank)
        ranges.append((base + start, base + stop))
        base += block.rows
    return Shard(tuple(ranges), (0, k))


def _block_range(block: Block, tp_size: int, tp_rank: int) -> tuple[int, int]:
    if block.vocab:
        padded = -(-block.rows // VOCAB_PAD) * VOCAB_PAD
        if padded % tp_size:
            raise CannotShard(
                "layer",
                reason="split_rows",
                what=f"the vocabulary of {block.rows}, padded to {padded}, does not divide "
                f"by {tp_size} ranks",
            )
        width = padded // tp_size
        return min(tp_rank * width, block.rows), min((tp_rank + 1) * width, block.rows)
    if block.units % tp_size == 0:
        width = block.rows // tp_size
        return tp_rank * width, (tp_rank + 1) * width
    if block.replicate and tp_size % block.units == 0:
        width = block.rows // block.units
        unit = tp_rank // (tp_size // block.units)
        return unit * width, (unit + 1) * width
    each = block.rows // block.units
    if each == 1:
        what = f"{block.rows} rows"
    elif block.units == 1:
        what = f"{block.rows} rows that stay together (config.json counts no parts of them)"
    elif each == 2:
        what = f"{block.units} pairs of rows"
    else:
        what = f"{block.units} heads of {each} rows"
    raise CannotShard("layer", reason="split_rows", what=f"{what} do not divide by {tp_size} ranks")
