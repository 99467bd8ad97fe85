"""Parts that several documents hold: paths, findings, the source, a verdict."""

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
Engine = Literal["mxfp4prep", "vllm", "sglang", "atom"]
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


class ShareDocument(TypedDict):
    """How much takes one path."""

    layers: int
    nbytes: int


class PathsDocument(TypedDict):
    """Layers and bytes (weights and scales) per path."""

    asm: ShareDocument
    triton: ShareDocument
    impossible: ShareDocument
