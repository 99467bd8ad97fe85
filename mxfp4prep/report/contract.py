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


class FindingDocument(TypedDict):
    """One remark. `where` names a file, tensor or layer."""

    code: str
    severity: Literal["error", "warning", "note"]
    where: str
    message: str


class SourceDocument(TypedDict):
    """The checkpoint that was read. `nbytes` counts tensor bytes, `files` safetensors files."""

    name: str
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


class LayerDocument(TypedDict):
    """One MXFP4 layer. `verdict` is about its own tensor, `decided` counts its fused group in."""

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


class AuditSummary(TypedDict):
    """`asm_tp`: degrees at which every layer is asm. `possible_tp`: at which every layer splits."""

    layers: int
    groups: int
    mxfp4_nbytes: int
    copied_nbytes: int
    tp: dict[str, PathsDocument]
    asm_tp: list[int]
    possible_tp: list[int]
    findings: dict[str, int]


class AuditDocument(TypedDict):
    """`mxfp4prep audit --format json`."""

    schema_version: SchemaVersion
    source: SourceDocument
    rule: str
    tp: list[int]
    layers: list[LayerDocument]
    groups: list[GroupDocument]
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
