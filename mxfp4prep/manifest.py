"""The manifest of a prepared checkpoint: versioned, strict, and the same bytes for the same input.

A manifest of up to SPELLED_OUT_LAYERS layers spells every field of every layer. A larger one
leaves out what follows from other fields by `fill`; readers get the whole record either way.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from mxfp4prep.collector import collector_paused
from mxfp4prep.documents import check_size
from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest
from mxfp4prep.layer_defaults import fill, layer_defaults, shorten, spelled
from mxfp4prep.marks import DIGEST_ALGORITHM, FORMAT_VERSION, MANIFEST_NAME

SPELLED_OUT_LAYERS = 10_000
"""Above this many layers, fields that follow from others are left out: a 70,000-layer manifest
that spells them is 49 MB, one that does not is under 30 MB."""

_AGAIN = "copy the checkpoint again, or convert the source again"

LayoutId = Literal["raw", "tile16x16", "tile32x8", "transposed"]
PathName = Literal["asm", "triton"]
VerdictName = Literal["asm", "triton", "impossible"]
Code = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
Degree = Annotated[str, Field(pattern=r"^[1-9][0-9]*$")]
SchemeName = Literal["w4a4", "w4a16", "w4a8", "w4a6"]
EngineName = Literal["mxfp4prep", "vllm", "sglang", "atom"]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


_T = TypeVar("_T", bound=_Record)


class SourceRecord(_Record):
    """Where the checkpoint came from. `name` is the directory's own name, never a path."""

    name: str
    repo: str | None = None
    commit: str | None = None
    config_sha256: str
    index_sha256: str | None = None


class TargetRecord(_Record):
    """What the files were laid out for, and what was asked: enough to plan the same again.

    layout, keep, parallel   as given to convert: --layout, --keep, and --parallel as PATTERN=KIND
    expert_parallel          --ep: routed experts were judged whole, not cut over the ranks
    engine                   --for: whose rules chose the layouts. Not written where it is mxfp4prep
    """

    gfx: str
    tp: list[int]
    rule_version: int
    layouts: list[LayoutId]
    layout: Literal["auto", "asm", "triton"]
    keep: list[str]
    parallel: list[str]
    expert_parallel: bool = False
    engine: EngineName = "mxfp4prep"

    @model_serializer(mode="wrap")
    def _as_before(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the engine where it is our own, as versions wrote that knew no other."""
        document: dict[str, Any] = serialize(self)
        if self.engine == "mxfp4prep":
            del document["engine"]
        return document


class DigestsRecord(_Record):
    """The side file with one digest pair per tensor."""

    name: str
    sha256: str
    algorithm: Annotated[str, Field(pattern=f"^{DIGEST_ALGORITHM}$")]


class FileRecord(_Record):
    """One file of the prepared checkpoint.

    role            shard: tensors, prepared or copied · side: copied byte for byte · config, index:
                    written anew, the original stands under source/ · new_index: the source had
                    none · original: a file under source/ · digests: the per-tensor digests
    source_header   for shards: how the source's safetensors header follows from ours. "same": only
                    shapes differ · "no_metadata": and it had no __metadata__ · "stored": its
                    spelling was its own, kept under source/<name>.header
    """

    name: str
    nbytes: int
    sha256: str
    role: Literal["shard", "side", "config", "index", "new_index", "original", "digests"]
    source_header: Literal["same", "no_metadata", "stored"] | None = None


class ActivationRecord(_Record):
    """How the layer's input is quantized; dtype None means not at all."""

    dtype: str | None
    scale_mode: str | None = None
    static: bool = False


class StoredTensor(_Record):
    """One prepared tensor: where it stands, in which layout, and its shape in the source.

    pad_byte is the byte that fills padding of a scale; None while nothing is padded.
    """

    tensor: str
    file: str
    layout: LayoutId
    shape: list[int]
    source_shape: list[int]
    pad_byte: int | None = None


class LayerRecord(_Record):
    """One MXFP4 layer and what was done with it.

    n, k        out_features, in_features of one matrix; n_padded, k_padded what is stored
    experts     matrices in a stacked 3-D tensor, or None
    gate_up     row order of a tensor that holds gate and up: interleaved | concatenated | None
    verdict     path per tensor-parallel degree, the stricter of layer and fused group
    input_scale name of the static activation scale tensor, or None
    """

    name: str
    kind: Literal["linear", "expert", "shared_expert"]
    parallel: Literal["column", "row", "qkv", "merged", "replicated", "expert", "unknown"]
    group: str | None
    scheme: SchemeName
    activation: ActivationRecord
    n: int
    k: int
    n_padded: int
    k_padded: int
    experts: int | None
    gate_up: Literal["interleaved", "concatenated"] | None
    path: PathName
    reasons: list[Code]
    hazards: list[Code]
    verdict: dict[Degree, VerdictName]
    weight: StoredTensor
    scale: StoredTensor
    bias: str | None
    input_scale: str | None


class CopiedTensor(_Record):
    """A tensor that was copied byte for byte. `label` says what it is where that matters (mtp)."""

    name: str
    file: str
    label: str | None = None


class FindingRecord(_Record):
    """Something noticed while reading the source, kept for whoever serves the result."""

    code: Code
    severity: Literal["error", "warning", "note"]
    where: str
    message: str


class Manifest(_Record):
    """mxfp4prep.json: what a prepared checkpoint holds and how every tensor is stored."""

    schema_version: Literal[1]
    tool_version: str
    source: SourceRecord
    target: TargetRecord
    digests: DigestsRecord
    files: list[FileRecord]
    layers: list[LayerRecord]
    tensors: list[CopiedTensor]
    findings: Annotated[list[FindingRecord], Field(default_factory=list)]

    def layer(self, name: str) -> LayerRecord:
        """The record of layer `name`. Raises KeyError."""
        for record in self.layers:
            if record.name == name:
                return record
        raise KeyError(name)


@collector_paused()
def dump(manifest: Manifest) -> bytes:
    """The manifest's bytes: one line per file, layer and tensor, keys in model order."""
    document = manifest.model_dump(mode="json")
    if len(manifest.layers) > SPELLED_OUT_LAYERS:
        defaults = layer_defaults(document["layers"])
        document["layers"] = [shorten(layer, defaults) for layer in document["layers"]]
        document["layer_defaults"] = defaults
    lines = ["{"]
    keys = list(document)
    for position, key in enumerate(keys):
        value = document[key]
        comma = "," if position < len(keys) - 1 else ""
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{json.dumps(key)}: [")
            lines.append(",\n".join(spelled(item) for item in value))
            lines.append(f"]{comma}")
        else:
            lines.append(f"{json.dumps(key)}: {spelled(value)}{comma}")
    lines.append("}\n")
    return "\n".join(lines).encode()


@collector_paused()
def parse(raw: bytes, where: str = MANIFEST_NAME) -> Manifest:
    """The manifest in `raw`, every record whole.

    Raises InvalidManifest on bad JSON, an unknown schema version, an unknown key, a missing field,
    a wrong type or a name listed twice: an unknown manifest is refused, never guessed at.
    """
    try:
        check_size(raw, where)
        # decoded here: json takes UTF-16 as well, and half characters that no UTF-8 has
        document = json.loads(raw.decode(), object_pairs_hook=_unique)
    except InvalidCheckpoint as error:
        raise InvalidManifest(
            where, error.what, found=error.found, expected=error.expected, hint=_AGAIN
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(where, f"not a manifest: {error}", hint=_AGAIN) from None
    if not isinstance(document, dict):
        found = type(document).__name__
        raise InvalidManifest(where, "not a manifest", found=found, hint=_AGAIN)
    if b"\\ud" in raw or b"\\uD" in raw:
        _refuse_surrogates(document, where)
    version = document.get("schema_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise InvalidManifest(
            where,
            "this version of mxfp4prep cannot read it",
            found=f"schema_version {version!r}",
            expected=FORMAT_VERSION,
            hint="install the mxfp4prep that wrote it, or convert the source again",
        )
    defaults = document.pop("layer_defaults", None)
    if defaults is not None:
        if not isinstance(defaults, dict) or not isinstance(document.get("layers"), list):
            raise InvalidManifest(where, "layer_defaults is not an object", hint=_AGAIN)
        for layer in document["layers"]:
            fill(layer, defaults)
    for key, model in _LISTS.items():
        items = document.get(key)
        if isinstance(items, list):  # one by one: a list of a million faults is never made
            document[key] = [
                _valid(model, item, where, f"{key}.{position}.")
                for position, item in enumerate(items)
            ]
    manifest = _valid(Manifest, document, where)
    for kind, records in (
        ("file", manifest.files),
        ("layer", manifest.layers),
        ("tensor", manifest.tensors),
    ):
        name, count = (
            Counter(record.name for record in records).most_common(1)[0] if records else ("", 1)
        )
        if count > 1:
            raise InvalidManifest(where, f"a {kind} is listed twice", found=name, hint=_AGAIN)
    return manifest


_LISTS: dict[str, type[_Record]] = {
    "files": FileRecord,
    "layers": LayerRecord,
    "tensors": CopiedTensor,
    "findings": FindingRecord,
}


MOST_ITEMS = 100_000
"""Longest list or object within a record: the faults of longer ones would fill the memory."""


def _is_endless(value: object) -> bool:
    inner = value.values() if type(value) is dict else (value,)
    return any(isinstance(item, list | dict) and len(item) > MOST_ITEMS for item in inner)


def _valid(model: type[_T], value: object, where: str, prefix: str = "") -> _T:
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in _LISTS and _is_endless(item):
                raise InvalidManifest(
                    where, f"{prefix}{key}", found=f"more than {MOST_ITEMS} items", hint=_AGAIN
                )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = prefix + ".".join(str(part) for part in first["loc"])
        raise InvalidManifest(
            where,
            f"{place.removesuffix('.')}: {first['msg']}",
            found=None if first["type"] == "missing" else repr(first["input"]),
            hint=_AGAIN,
        ) from None


def utf8(text: str) -> str:
    """`text` as a manifest can hold it: a lone surrogate is spelled out, as \\udcff.

    Such stand in names of folders that are not UTF-8, and in what a config.json escapes.
    """
    return text.encode(errors="backslashreplace").decode()


def _refuse_surrogates(document: dict[str, Any], where: str) -> None:
    """No name, and nothing that is written of one, can hold half a character."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = repr(error.object[error.start : error.end])
        raise InvalidManifest(where, "a lone surrogate", found=found, hint=_AGAIN) from None


def json_schema() -> dict[str, Any]:
    """JSON schema of the spelled-out manifest, generated from the model."""
    schema = Manifest.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "mxfp4prep manifest"
    return schema


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} stands twice")
            seen.add(key)
    return result
