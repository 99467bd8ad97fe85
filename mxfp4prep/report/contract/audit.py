"""The document of an audit: `mxfp4prep audit --format json`."""

from __future__ import annotations

from typing import Literal, NotRequired

# pydantic takes typing's own TypedDict from Python 3.12 on only
from typing_extensions import TypedDict

from mxfp4prep.report.contract.parts import (
    ActivationDocument,
    EngineOutcome,
    FindingDocument,
    Kind,
    Parallel,
    Path,
    PathsDocument,
    Placement,
    SchemaVersion,
    Scheme,
    SourceDocument,
    VerdictDocument,
)


class EngineVerdictDocument(TypedDict):
    """What one engine does with a layer of the original checkpoint at one degree.

    path names the engine's way to run it (asm, triton, moe, ...), null where it does not get there;
    message is the engine's error, what goes wrong, or what the answer assumes.
    """

    outcome: EngineOutcome
    path: str | None
    message: str


class LayerDocument(TypedDict):
    """One MXFP4 layer. `verdict` is about its own tensor, `decided` counts its fused group in.

    placement, per degree, says how the ranks share the layer where that is not "sliced" at all
    degrees: replicated (every rank holds it whole), distributed (whole experts spread over the
    ranks), fused (a shared expert as one more routed expert). engine is there with --engine.
    """

    name: str
    kind: Kind
    parallel: Parallel
    group: str | None
    scheme: Scheme
    activation: ActivationDocument
    n: int
    k: int
    experts: int | None
    scale_shape: list[int]
    nbytes: int
    verdict: dict[str, VerdictDocument]
    decided: dict[str, Path]
    placement: NotRequired[dict[str, Placement]]
    engine: NotRequired[dict[str, EngineVerdictDocument]]


class GroupDocument(TypedDict):
    """One fused projection; `mixed` ones have parts of different schemes and cannot be fused."""

    name: str
    members: list[str]
    mixed: bool
    verdict: dict[str, VerdictDocument]


class DeploymentDocument(TypedDict):
    """How the ranks share what tensor parallelism alone does not decide."""

    expert_parallel: bool
    sequence_parallel: bool
    shared_experts: Literal["auto", "fused", "separate"]


class SharedExpertDocument(TypedDict):
    """What happens to the shared experts of `blocks` like-built blocks (`name` covers them all).

    fusable: may be one more routed expert; why says what decides that. decision and message, per
    degree: message does the arithmetic and names the way out where there is something to change.
    """

    name: str
    blocks: int
    width: int
    fusable: bool
    why: str
    decision: dict[str, Literal["fused", "sliced", "replicated", "impossible"]]
    message: dict[str, str]


class CostShareDocument(TypedDict):
    """Shares, 0 to 1, of the MXFP4 weight bytes of a rank and of its FLOPs per token."""

    nbytes: float
    flops: float


class CostPathsDocument(TypedDict):
    """How much of a rank's MXFP4 work takes each path."""

    asm: CostShareDocument
    triton: CostShareDocument
    impossible: CostShareDocument


class CostDocument(TypedDict):
    """What one degree costs on its fullest rank.

    rank_nbytes counts all tensors, rank_mxfp4_nbytes weights and scales of MXFP4 layers (both
    leave out layers that cannot be split), padding_nbytes what zero-padding every triton layer to
    ASM's multiples would add.
    """

    rank_nbytes: int
    rank_mxfp4_nbytes: int
    padding_nbytes: int
    paths: CostPathsDocument


class EngineDocument(TypedDict):
    """Which engine was asked about, and on what the answer rests.

    outcomes: per degree how many layers end in ok, crash, corrupt and unknown. padding_nbytes: per
    degree the zeros that the fullest rank holds for its routed experts.
    """

    name: str
    version: str
    sources: list[str]
    switches: dict[str, str]
    assumptions: list[str]
    outcomes: dict[str, dict[EngineOutcome, int]]
    padding_nbytes: NotRequired[dict[str, int]]


class ScaleValuesDocument(TypedDict):
    """Scale bytes of one layer that are worth a look; places are [row, column], the first few."""

    layer: str
    nan: int
    nan_places: list[list[int]]
    zero_blocks: int
    minimum: int
    maximum: int


class ValuesDocument(TypedDict):
    """What --values read. `layers` names only layers with NaN scales; totals count all."""

    nbytes: int
    scales: int
    nan: int
    zero_blocks: int
    minimum: int
    maximum: int
    layers: list[ScaleValuesDocument]


class OtherDocument(TypedDict):
    """Modules whose weight is stored in another dtype: bf16, f32, fp8_e4m3, ...

    name stands for exactly `count` modules: all combinations of the numbers in its braces, such as
    `model.layers.{0..2,5}.mlp.gate`.
    """

    name: str
    dtype: str
    count: int


class PatternDocument(TypedDict):
    """What became of one entry of the config's exclude or layer_quant_config.

    kind says how it is written, reading how it was understood (literal, fused, renamed, parent,
    ambiguous or unmatched), modules how many it covers.
    """

    key: str
    text: str
    kind: Literal["exact", "glob", "regex"]
    reading: str
    modules: int


class AuditSummary(TypedDict):
    """`asm_tp`: degrees at which every layer is asm. `possible_tp`: at which every layer splits.

    largest_clean_tp is the largest degree of 1, 2, 4, 8, 16, 32, 64 and the asked ones at which
    every layer is asm; recommendation is a paragraph computed from it all.
    """

    layers: int
    groups: int
    mxfp4_nbytes: int
    copied_nbytes: int
    tp: dict[str, PathsDocument]
    asm_tp: list[int]
    possible_tp: list[int]
    largest_clean_tp: int | None
    recommendation: str
    findings: dict[str, int]


class AuditDocument(TypedDict):
    """`mxfp4prep audit --format json`. others: every module with a weight that is not MXFP4."""

    schema_version: SchemaVersion
    source: SourceDocument
    rule: str
    tp: list[int]
    deployment: DeploymentDocument
    layers: list[LayerDocument]
    groups: list[GroupDocument]
    shared_experts: list[SharedExpertDocument]
    others: NotRequired[list[OtherDocument]]
    patterns: NotRequired[list[PatternDocument]]
    cost: dict[str, CostDocument]
    engine: EngineDocument | None
    values: ValuesDocument | None
    findings: list[FindingDocument]
    summary: AuditSummary
