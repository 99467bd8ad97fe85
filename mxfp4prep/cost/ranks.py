"""The cost of a checkpoint at each degree, on its fullest rank.

Bytes are those of the stored tensors. What engines add is not counted: a padded vocabulary, padded
experts, the key-value cache, activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from mxfp4prep.alignment import Path
from mxfp4prep.collector import collector_paused
from mxfp4prep.cost.banks import banks_of
from mxfp4prep.cost.copied import copied_nbytes
from mxfp4prep.cost.layers import layer_costs, layer_kinds
from mxfp4prep.decisions import Decisions
from mxfp4prep.survey import Survey


class PathCost(NamedTuple):
    """MXFP4 bytes (weights and scales) and FLOPs per token of one rank on one path."""

    nbytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What one degree costs.

    Bytes are of the fullest rank: the first, which has no fewer experts than any other and no
    shorter piece of the vocabulary. KV heads that several ranks hold, and layers that every rank
    holds whole, count in full. Of a bank of E experts that are spread over the ranks (expert
    parallelism) it holds ceil(E / tp).

    FLOPs are per token of text: 2 * n * k for each MXFP4 matrix that the token passes, of the
    rank's piece. Of routed experts a token passes experts_per_token; where they are spread over the
    ranks, a rank does its average, 1 / tp. So it does of a shared expert that it holds whole beside
    them. No FLOPs: embeddings, vision towers, and draft (MTP) layers, which are loaded as a second
    model and whose bytes do count.

    rank_nbytes         all tensors, copied ones too
    rank_mxfp4_nbytes   weights and scales of the MXFP4 layers
    padding_nbytes      what zero-padding each triton layer for ASM would add: its columns to a
                        multiple of 256, its rows (where they miss ASM's rule) to one of 256
    paths               by the path that is decided for a layer. A layer that is impossible to split
                        is in neither sum above; here it counts as a tp-th of its bytes and FLOPs
    """

    rank_nbytes: int
    rank_mxfp4_nbytes: int
    padding_nbytes: int
    paths: Mapping[Path, PathCost]


@collector_paused()
def costs(
    survey: Survey, decisions: Decisions, banks: Mapping[str, int] | None = None
) -> dict[int, Cost]:
    """The cost at each degree of the survey.

    banks   what `banks_of` says, where the caller knows it
    """
    banks = banks_of(survey) if banks is None else banks
    kinds = layer_kinds(survey, decisions, banks)
    copied = copied_nbytes(survey, banks)
    result = {}
    for tp in survey.tp:
        zero = Fraction(0)
        nbytes: dict[Path, Fraction] = {"asm": zero, "triton": zero, "impossible": zero}
        flops: dict[Path, Fraction] = dict(nbytes)
        padding = zero
        for cost in layer_costs(kinds, tp, survey.deployment):
            nbytes[cost.path] += cost.nbytes
            flops[cost.path] += cost.flops
            padding += cost.padding
        paths = {path: PathCost(_up(nbytes[path]), _up(flops[path])) for path in nbytes}
        mxfp4 = paths["asm"].nbytes + paths["triton"].nbytes
        result[tp] = Cost(copied[tp] + mxfp4, mxfp4, _up(padding), paths)
    return result


def counts_all_experts(survey: Survey) -> bool:
    """Whether FLOPs count every routed expert, since config.json does not say how many run."""
    return not survey.topology.experts_per_token and _has_experts(survey)


def assumptions(survey: Survey) -> tuple[str, ...]:
    """What the costs of this checkpoint rest on that its reader may want to know, as sentences."""
    said = []
    if counts_all_experts(survey):
        said.append(
            "config.json does not say how many experts a token takes: FLOPs count all of them"
        )
    elif _has_experts(survey):
        per_token = survey.topology.experts_per_token
        said.append(f"FLOPs: a token takes {per_token} routed experts of each MoE layer")
    if any(label == "mtp" for label in survey.classified.labels.values()):
        said.append(
            "draft (MTP) layers are loaded as a second model: bytes count them, FLOPs do not"
        )
    return tuple(said)


def _has_experts(survey: Survey) -> bool:
    return any(item.layer.kind == "expert" for item in survey.layers)


def _up(size: Fraction) -> int:
    return -(-size.numerator // size.denominator)
