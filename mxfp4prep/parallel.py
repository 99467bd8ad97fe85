"""How engines cut each layer over ranks: a table of names, and the cut that a role makes.

A *role* is what an engine does with a module: column- or row-parallel, part of a fused
projection, replicated, one expert's matrix. It comes from the module's name, the names beside it
and the head counts in config.json. A *cut* is the arithmetic of that role: which rows and columns
a rank gets. Audit, plan and runtime all use the same cut, so they cannot disagree.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast, get_args

from mxfp4prep.errors import CannotShard, InvalidCheckpoint, UsageError

Parallel = Literal["column", "row", "qkv", "merged", "replicated", "expert", "unknown"]
Kind = Literal["linear", "expert", "shared_expert"]
GateUp = Literal["interleaved", "concatenated"]

SCALE_GROUP = 32
"""Values along K that share one E8M0 scale (OCP MX v1.0, section 5.1)."""

VOCAB_PAD = 64
"""Engines pad the vocabulary to a multiple of this before they split it.

Source: vLLM DEFAULT_VOCAB_PADDING_SIZE, model_executor/layers/vocab_parallel_embedding.py.
"""


class Topology(NamedTuple):
    """Head counts that decide where attention layers may be cut; 0 where config.json is silent."""

    model_type: str = ""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Topology:
        """The text model's head counts from a Hugging Face config.json (nested text_config too).

        Raises InvalidCheckpoint for a count that is none.
        """
        nested = config.get("text_config")
        text = nested if isinstance(nested, Mapping) else config

        def count(key: str) -> int:
            value = text.get(key)
            if value is None:
                return 0
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidCheckpoint(
                    f"config.json: {key}", "not a count", found=repr(value), expected="a number"
                )
            return value

        heads = count("num_attention_heads")
        model_type = text.get("model_type", config.get("model_type"))
        return cls(
            model_type=model_type if isinstance(model_type, str) else "",
            heads=heads,
            kv_heads=count("num_key_value_heads") or heads,
            head_dim=count("head_dim") or (count("hidden_size") // heads if heads else 0),
            linear_key_heads=count("linear_num_key_heads"),
            linear_value_heads=count("linear_num_value_heads"),
            linear_key_dim=count("linear_key_head_dim"),
            linear_value_dim=count("linear_value_head_dim"),
        )


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


# The table. Leaf name -> (parallel kind, part, fused projection built from its siblings).
# Sources: the packed_modules_mapping and *ParallelLinear uses of vLLM 0.33 and SGLang 0.5.23.
_LEAVES: dict[str, tuple[Parallel, str, str | None]] = {
    "q_proj": ("qkv", "q", "qkv_proj"),
    "k_proj": ("qkv", "k", "qkv_proj"),
    "v_proj": ("qkv", "v", "qkv_proj"),
    "qkv_proj": ("qkv", "qkv", None),
    "o_proj": ("row", "", None),
    "out_proj": ("row", "", None),
    "gate_proj": ("merged", "gate", "gate_up_proj"),
    "up_proj": ("merged", "up", "gate_up_proj"),
    "gate_up_proj": ("merged", "gate_up", None),
    "down_proj": ("row", "down", None),
    "w1": ("merged", "gate", "w13"),
    "w3": ("merged", "up", "w13"),
    "w13": ("merged", "gate_up", None),
    "w2": ("row", "down", None),
    "q_a_proj": ("replicated", "q_a", "fused_qkv_a_proj"),
    "kv_a_proj_with_mqa": ("replicated", "kv_a", "fused_qkv_a_proj"),
    "q_b_proj": ("column", "heads", None),
    "kv_b_proj": ("column", "heads", None),
    "in_proj_qkv": ("merged", "linear_qkv", "in_proj_qkvz"),
    "in_proj_z": ("merged", "linear_value", "in_proj_qkvz"),
    "in_proj_b": ("merged", "linear_value", "in_proj_ba"),
    "in_proj_a": ("merged", "linear_value", "in_proj_ba"),
    "in_proj_qkvz": ("column", "linear_key", None),
    "in_proj_ba": ("column", "linear_key", None),
    "lm_head": ("column", "vocab", None),
    "embed_tokens": ("column", "vocab", None),
    "gate": ("replicated", "", None),
    "router": ("replicated", "", None),
    "shared_expert_gate": ("replicated", "", None),
    "eh_proj": ("replicated", "", None),
    "fc1": ("column", "", None),
    "fc2": ("row", "", None),
}

FUSED_LEAVES: dict[str, str] = {
    leaf: fused for leaf, (_, _, fused) in _LEAVES.items() if fused is not None
}
"""Leaf of a stored module -> leaf of the projection that engines build from it and its siblings."""

_EXPERT = re.compile(r"(?:^|\.)experts\.(?:\d+\.)?[^.]+$")
_SHARED = re.compile(r"(?:^|\.)shared_experts?\.")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|vision_encoder|audio_tower)\.")

# gpt-oss stores gate rows even and up rows odd; everybody else first all gate, then all up rows.
_INTERLEAVED_MODEL_TYPES = frozenset({"gpt_oss"})


def kind_of(name: str) -> Kind:
    """Whether module `name` is a routed expert, part of a shared expert, or a plain linear."""
    if _EXPERT.search(name):
        return "expert"
    if _SHARED.search(name):
        return "shared_expert"
    return "linear"


def gate_up_order(name: str, topology: Topology) -> GateUp | None:
    """How gate and up rows are stored in one tensor: "interleaved", "concatenated" or None."""
    leaf = name.rpartition(".")[2]
    if leaf not in ("gate_up_proj", "w13"):
        return None
    return "interleaved" if topology.model_type in _INTERLEAVED_MODEL_TYPES else "concatenated"


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
    names: Sequence[str], rules: Sequence[tuple[str, Parallel]] = ()
) -> dict[str, Role]:
    """The role of every module in `names`; unknown names get parallel "unknown".

    names   all modules that own a weight, quantized or not: a fused group exists only where at
            least two of its members do
    rules   user rules from `parse_rules`; the first that matches wins over the table
    """
    roles: dict[str, Role] = {}
    group_sizes: dict[str, int] = {}
    for name in names:
        role = _role(name, rules)
        roles[name] = role
        if role.group is not None:
            group_sizes[role.group] = group_sizes.get(role.group, 0) + 1
    for name, role in roles.items():
        if role.group is not None and group_sizes[role.group] < 2:
            alone: Parallel = "column" if role.parallel in ("qkv", "merged") else role.parallel
            roles[name] = role._replace(group=None, parallel=alone)
    return roles


def _role(name: str, rules: Sequence[tuple[str, Parallel]]) -> Role:
    role = _table_role(name)
    for pattern, kind in rules:
        if fnmatch.fnmatchcase(name, pattern):
            # A rule that says what the table says keeps what else the table knows.
            return role if role.parallel == kind else Role(kind)
    return role


def _table_role(name: str) -> Role:
    parent, _, leaf = name.rpartition(".")
    entry = _LEAVES.get(leaf)
    if entry is None or _VISION.search(name):
        return Role("unknown")
    parallel, part, fused = entry
    group = f"{parent}.{fused}" if fused is not None and parent else fused
    if kind_of(name) == "expert":
        if part not in ("gate", "up", "down", "gate_up"):
            return Role("unknown")
        return Role("expert", part, group)
    return Role(parallel, part, group)


@lru_cache(maxsize=65536)
def cut_of(role: Role, n: int, topology: Topology, interleaved: bool = False) -> Cut:
    """The cut that `role` makes in a matrix of `n` rows.

    interleaved   gate and up rows alternate (gpt-oss), so a contiguous slice keeps pairs together
    """
    parallel, part = role.parallel, role.part
    if parallel in ("replicated", "unknown"):
        return Cut("none")
    if parallel == "row" or part == "down":
        return Cut("columns")
    t = topology
    if part in ("q", "heads") and t.heads and n % t.heads == 0:
        return Cut("rows", (Block(n, t.heads),))
    if part in ("k", "v") and t.kv_heads and n % t.kv_heads == 0:
        return Cut("rows", (Block(n, t.kv_heads, replicate=True),))
    if part == "qkv" and t.heads and t.kv_heads and t.head_dim:
        kv_rows = t.kv_heads * t.head_dim
        q_rows = n - 2 * kv_rows
        if q_rows > 0 and q_rows % t.heads == 0:
            kv = Block(kv_rows, t.kv_heads, replicate=True)
            return Cut("rows", (Block(q_rows, t.heads), kv, kv))
    if part == "gate_up" and n % 2 == 0:
        if interleaved:
            return Cut("rows", (Block(n, n // 2),))
        return Cut("rows", (Block(n // 2, n // 2), Block(n // 2, n // 2)))
    if part == "linear_qkv" and t.linear_key_heads and t.linear_value_heads:
        key_rows = t.linear_key_heads * t.linear_key_dim
        value_rows = t.linear_value_heads * t.linear_value_dim
        if key_rows and 2 * key_rows + value_rows == n:
            key = Block(key_rows, t.linear_key_heads)
            return Cut("rows", (key, key, Block(value_rows, t.linear_value_heads)))
    if part == "linear_value" and t.linear_value_heads and n % t.linear_value_heads == 0:
        return Cut("rows", (Block(n, t.linear_value_heads),))
    if part == "linear_key" and t.linear_key_heads and n % t.linear_key_heads == 0:
        return Cut("rows", (Block(n, t.linear_key_heads),))
    if part == "vocab":
        return Cut("rows", (Block(n, n, vocab=True),))
    return Cut("rows", (Block(n, n),))


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
    what = "rows" if block.units == block.rows else f"heads of {block.rows // block.units} rows"
    raise CannotShard(
        "layer", reason="split_rows", what=f"{block.units} {what} do not divide by {tp_size} ranks"
    )
