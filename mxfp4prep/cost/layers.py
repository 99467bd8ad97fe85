"""MXFP4 layers that cost the same, as one; and what one of them costs the fullest rank.

Tens of thousands of layers have a handful of shapes. Each is counted once per degree, times how
many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from mxfp4prep.alignment import (
    BAD_SCALE_ROWS,
    SCALE_COLUMN_MULTIPLE,
    SCALE_ROW_MULTIPLE,
    Path,
    Verdict,
    scale_columns,
)
from mxfp4prep.architectures import OTHER_TOWERS
from mxfp4prep.cost.banks import bank_of
from mxfp4prep.decisions import Decisions
from mxfp4prep.deployment import Deployment
from mxfp4prep.parallel import SCALE_GROUP, shard
from mxfp4prep.survey import LayerSurvey, Survey

PADDED_ROWS = 256
"""Rows that miss ASM's rule are padded to a multiple of this.

32 would satisfy the rule, but AITER's 256-row tile writes whole tiles without looking where the
rows end, and SGLang and ATOM pad experts to 256 too. Source: hsa/gfx950/f4gemm of AITER at
e4048607; SGLang PR 18684.
"""

PADDED_COLUMNS = SCALE_COLUMN_MULTIPLE * SCALE_GROUP
"""Columns are padded to a multiple of this: ASM's loop over K has no tail."""


@dataclass(slots=True)
class LayerKind:
    """`count` layers that cost the same; `first` stands for all of them.

    verdicts   the verdict that counts, per degree
    experts    experts of the bank that each of them stands in; 1 outside banks
    active     the part of all tokens that pass through one of its matrices
    """

    first: LayerSurvey
    verdicts: Mapping[int, Verdict]
    experts: int
    active: Fraction
    count: int = 0


class LayerCost(NamedTuple):
    """What layers cost the fullest rank. Fractions are of a bank's experts over the ranks."""

    path: Path
    nbytes: Fraction
    flops: Fraction
    padding: Fraction


def layer_kinds(survey: Survey, decisions: Decisions, banks: Mapping[str, int]) -> list[LayerKind]:
    """The survey's layers by what they cost.

    banks   experts in each bank of single experts, from `count_experts`
    """
    kinds: dict[tuple[object, ...], LayerKind] = {}
    labels = survey.classified.labels
    per_token = survey.topology.experts_per_token
    for item in survey.layers:
        layer = item.layer
        name = layer.name
        verdicts = decisions[name]
        routed = layer.kind == "expert"
        experts = 1
        if routed:
            experts = layer.experts or banks[bank_of(name)]
        idle = labels.get(layer.weight.name) == "mtp" or (not routed and _is_aside(name))
        key = (
            *(item.cut, layer.n, layer.k, layer.experts, layer.is_matrix, layer.kind),
            *(experts, idle, id(item.placements), id(verdicts)),
        )
        kind = kinds.get(key)
        if kind is None:
            active = Fraction(0 if idle else 1)
            if routed and per_token:
                active *= Fraction(min(per_token, experts), experts)
            kind = kinds[key] = LayerKind(item, verdicts, experts, active)
        kind.count += 1
    return list(kinds.values())


def layer_costs(kinds: list[LayerKind], tp: int, deployment: Deployment) -> Iterator[LayerCost]:
    """What each kind costs at degree `tp`, all its layers together."""
    for kind in kinds:
        path, nbytes, flops, padding = _cost(kind, tp, deployment)
        count = kind.count
        yield LayerCost(path, nbytes * count, flops * count, padding * count)


def _cost(kind: LayerKind, tp: int, deployment: Deployment) -> LayerCost:
    item, layer = kind.first, kind.first.layer
    matrices = layer.experts or 1
    path = kind.verdicts[tp].path
    flops = 2 * layer.n * layer.k * matrices * kind.active
    if path == "impossible":
        whole = Fraction(matrices * _nbytes(layer.n, layer.k))
        return LayerCost(path, whole / tp, flops / tp, Fraction(0))
    held, tokens = Fraction(matrices), Fraction(1)
    placement = item.placements[tp]
    if placement == "distributed":
        held *= Fraction(-(-kind.experts // tp), kind.experts)
        tokens /= tp
    elif layer.kind == "shared_expert" and (
        (placement == "fused" and deployment.expert_parallel)
        or (placement == "replicated" and deployment.sequence_parallel)
    ):
        # Each rank holds it whole and runs it for its own tokens. Source: init_aiter_topK_meta_data
        # of vLLM and ATOM, which gives the slot every tp-th token.
        tokens /= tp
    piece = shard(item.cut_at(tp), layer.n, layer.k, tp)
    flops = 2 * piece.n * piece.k * matrices * kind.active * tokens
    padding = _padding(piece.n, piece.k) if layer.is_matrix else 0  # an asm layer needs none
    return LayerCost(path, held * _nbytes(piece.n, piece.k), flops, held * padding)


def _nbytes(n: int, k: int) -> int:
    """Bytes of an (n, k) matrix with its scale."""
    return n * (k // 2) + n * scale_columns(k)


def _padding(n: int, k: int) -> int:
    """What zero-padding an (n, k) matrix to ASM's multiples adds."""
    legal = n % SCALE_ROW_MULTIPLE == 0 and n not in BAD_SCALE_ROWS
    rows = n if legal else _ceil(n, PADDED_ROWS)
    return _nbytes(rows, _ceil(k, PADDED_COLUMNS)) - _nbytes(n, k)


def _ceil(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _is_aside(name: str) -> bool:
    """Whether no token of text multiplies by this layer: a lookup table, or another tower."""
    leaf = name[name.rfind(".") + 1 :]
    return "embed" in leaf or leaf in ("wte", "wpe") or OTHER_TOWERS.search(name) is not None
