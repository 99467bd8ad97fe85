"""The JSON that the verbs print: one TypedDict per document, the source of the shipped schemas.

A key is never renamed or dropped within a schema version; new keys may appear.
"""

from __future__ import annotations

from typing import Literal, NotRequired

# pydantic takes typing's own TypedDict from Python 3.12 on only
from typing_extensions import TypedDict

Path = Literal["asm", "triton", "impossible"]
StoredPath = Literal["asm", "triton"]
Kind = Literal["linear", "expert", "shared_expert"]
Parallel = Literal["column", "row", "qkv", "merged", "replicated", "expert", "unknown"]
Scheme = Literal["w4a4", "w4a16", "w4a8", "w4a6"]
Layout = Literal["raw", "tile16x16", "tile32x8", "transposed"]
SchemaVersion = Literal[1]
Placement = Literal["sliced", "replicated", "distributed", "fused"]
EngineOutcome = Literal["ok", "crash", "corrupt", "unknown"]


class FindingDocument(TypedDict):
    """One remark. `where` names a file, tensor or layer."""

    code: str
    severity: Literal["error", "warning", "note"]
    where: str
    message: str


class SourceDocument(TypedDict):
    """The checkpoint that was read. `nbytes` counts tensor bytes, `files` safetensors files.

    repo and commit: where it comes from on the Hub, null where that is not known.
    """

    name: str
    repo: NotRequired[str | None]
    commit: NotRequired[str | None]
    model_type: str | None
    quark_version: str | None
    files: int
    tensors: int
    nbytes: int
    config_sha256: str
    index_sha256: str | None


class ActivationDocument(TypedDict):
    """How a layer's input is quantized; dtype null means not at all."""

    dtype: str | None
    scale_mode: str | None
    static: bool


class VerdictDocument(TypedDict):
    """The path at one tensor-parallel degree.

    scale_shard is [rows, columns] of the scale on one rank, null where it cannot be cut; detail
    does the arithmetic of a cut that fails.
    """

    path: Path
    scale_shard: list[int] | None
    reasons: list[str]
    hazards: list[str]
    detail: NotRequired[str]


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


class ShareDocument(TypedDict):
    """How much takes one path."""

    layers: int
    nbytes: int


class PathsDocument(TypedDict):
    """Layers and bytes (weights and scales) per path."""

    asm: ShareDocument
    triton: ShareDocument
    impossible: ShareDocument


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

    outcomes: per degree how many layers end in ok, crash, corrupt and unknown.
    """

    name: str
    version: str
    sources: list[str]
    switches: dict[str, str]
    assumptions: list[str]
    outcomes: dict[str, dict[EngineOutcome, int]]


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


class PlannedLayerDocument(TypedDict):
    """What convert does with one layer, and why it is not asm."""

    name: str
    kind: Kind
    group: str | None
    scheme: Scheme
    n: int
    k: int
    experts: int | None
    path: StoredPath
    reasons: list[str]
    hazards: list[str]
    weight_layout: Layout
    scale_layout: Layout
    verdict: dict[str, Path]


class PlannedFileDocument(TypedDict):
    """One safetensors file of the output; `nbytes` counts tensor bytes."""

    name: str
    tensors: int
    nbytes: int


class StoredPathsDocument(TypedDict):
    """Layers and bytes per stored path; `kept` ones are on the triton path with raw layouts."""

    asm: ShareDocument
    triton: ShareDocument
    kept: ShareDocument


class PlanDocument(TypedDict):
    """`mxfp4prep convert --dry-run --format json`."""

    schema_version: SchemaVersion
    source: SourceDocument
    output: str
    tp: list[int]
    expert_parallel: bool
    layout: Literal["auto", "asm", "triton"]
    nbytes: int
    layers: list[PlannedLayerDocument]
    files: list[PlannedFileDocument]
    findings: list[FindingDocument]
    summary: StoredPathsDocument


class ConvertDocument(TypedDict):
    """`mxfp4prep convert --format json`. `nbytes` counts every byte that was written."""

    schema_version: SchemaVersion
    name: str
    output: str
    tp: list[int]
    expert_parallel: bool
    files: int
    nbytes: int
    findings: list[FindingDocument]
    summary: StoredPathsDocument


class ProblemDocument(TypedDict):
    """One thing that is not as the manifest says; `tensor` is null for a whole file."""

    file: str
    tensor: str | None
    what: str


class VerifyDocument(TypedDict):
    """`mxfp4prep verify --format json`. `ok`: no problem at this level; `skipped`: not checked."""

    schema_version: SchemaVersion
    name: str
    level: Literal["quick", "full", "deep"]
    ok: bool
    files: int
    tensors: int
    nbytes: int
    problems: list[ProblemDocument]
    skipped: list[str]


class RestoreDocument(TypedDict):
    """`mxfp4prep restore --format json`. `header_only`: files that differ in header spelling."""

    schema_version: SchemaVersion
    output: str
    files: int
    nbytes: int
    header_only: list[str]


class SelfcheckRow(TypedDict):
    """One layer at one m; errors against float64, null where they are not finite."""

    layer: str
    path: str
    backend: str
    m: int
    max_abs_error: float | None
    max_rel_error: float | None
    nan: int
    milliseconds: float
    ok: bool


class SelfcheckDocument(TypedDict):
    """`mxfp4prep selfcheck --format json`."""

    schema_version: SchemaVersion
    name: str
    device: str
    ok: bool
    rows: list[SelfcheckRow]


Fact = str | bool | int | list[int] | None


class DiffSideDocument(TypedDict):
    """One of the two audits."""

    name: str
    tp: list[int]
    engine: str | None
    layers: int
    mxfp4_nbytes: int


class DiffFactDocument(TypedDict):
    """One fact that is not the same in both."""

    fact: str
    a: Fact
    b: Fact


class DiffRenameDocument(TypedDict):
    """Modules that are compared as the same: `a` in A and `b` in B, and the same rest."""

    a: str
    b: str
    modules: int


class DiffLayersDocument(TypedDict):
    """Layers that are MXFP4 in one audit only. `name` stands for all of `names`.

    other: the dtype that the module has in the other audit, "absent" where it has none there, null
    where that audit does not list what is not MXFP4.
    """

    name: str
    layers: int
    names: list[str]
    kind: Kind
    scheme: Scheme
    n: int
    k: int
    experts: int | None
    other: str | None


class DiffVerdictDocument(TypedDict):
    """A layer at one degree. `path` counts its fused group in, the rest is about its own tensor.

    engine is null where the two audits did not ask about the same engine.
    """

    path: Path
    own_path: Path
    scale_shard: list[int] | None
    reasons: list[str]
    hazards: list[str]
    placement: Placement
    engine: EngineVerdictDocument | None


class DiffVerdictsDocument(TypedDict):
    """The two verdicts at one degree."""

    a: DiffVerdictDocument
    b: DiffVerdictDocument


class DiffChangeDocument(TypedDict):
    """Layers that are MXFP4 in both audits and changed alike. `name` stands for all of `names`.

    Names are A's. facts do not depend on a degree; verdict holds the degrees that differ.
    """

    name: str
    layers: int
    names: list[str]
    facts: list[DiffFactDocument]
    verdict: dict[str, DiffVerdictsDocument]


class DiffOtherDocument(TypedDict):
    """Modules that are MXFP4 in neither audit, with their dtypes; null where there is no weight."""

    name: str
    modules: int
    names: list[str]
    a: str | None
    b: str | None


class DiffGroupDocument(TypedDict):
    """Fused projections of both audits that changed alike: their parts, or whether they are mixed.

    `path.N` is the fact that the verdict at degree N changed.
    """

    name: str
    groups: int
    names: list[str]
    facts: list[DiffFactDocument]


class DiffSharedExpertDocument(TypedDict):
    """What happens to shared experts, null where an audit has none of that name."""

    name: str
    a: SharedExpertDocument | None
    b: SharedExpertDocument | None


class DiffPathsDocument(TypedDict):
    """Layers and bytes per path at one degree."""

    a: PathsDocument
    b: PathsDocument


class DiffCostDocument(TypedDict):
    """The cost of one degree."""

    a: CostDocument
    b: CostDocument


class DiffOutcomesDocument(TypedDict):
    """How many layers end how on the engine at one degree."""

    a: dict[EngineOutcome, int]
    b: dict[EngineOutcome, int]


class DiffDocument(TypedDict):
    """`mxfp4prep diff --format json`: what differs between two audits, at the degrees of both.

    asked: how the two audits were made, where that differs; skipped: what could not be compared.
    Neither makes the audits different. All that follows does; it is empty where `same` is true.
    """

    schema_version: SchemaVersion
    same: bool
    a: DiffSideDocument
    b: DiffSideDocument
    tp: list[int]
    asked: list[DiffFactDocument]
    skipped: list[str]
    source: list[DiffFactDocument]
    renames: list[DiffRenameDocument]
    only_a: list[DiffLayersDocument]
    only_b: list[DiffLayersDocument]
    changed: list[DiffChangeDocument]
    others: list[DiffOtherDocument]
    groups: list[DiffGroupDocument]
    shared_experts: list[DiffSharedExpertDocument]
    findings_a: list[FindingDocument]
    findings_b: list[FindingDocument]
    summary: list[DiffFactDocument]
    paths: dict[str, DiffPathsDocument]
    cost: dict[str, DiffCostDocument]
    engine: dict[str, DiffOutcomesDocument]
    values: list[DiffFactDocument]
