"""The documents of the verbs that write and check: convert, verify, restore, selfcheck."""

from __future__ import annotations

from typing import Literal

# pydantic takes typing's own TypedDict from Python 3.12 on only
from typing_extensions import TypedDict

from mxfp4prep.report.contract.parts import (
    Engine,
    FindingDocument,
    Kind,
    Layout,
    Path,
    SchemaVersion,
    Scheme,
    ShareDocument,
    SourceDocument,
    StoredPath,
)


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
    engine: Engine
    layout: Literal["auto", "asm", "triton"]
    nbytes: int
    layers: list[PlannedLayerDocument]
    files: list[PlannedFileDocument]
    findings: list[FindingDocument]
    summary: StoredPathsDocument


class ConvertDocument(TypedDict):
    """`mxfp4prep convert --format json`. `nbytes` counts every byte of the output; `reused` names
    the shards that --resume has taken over."""

    schema_version: SchemaVersion
    name: str
    output: str
    tp: list[int]
    expert_parallel: bool
    engine: Engine
    files: int
    nbytes: int
    reused: list[str]
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
