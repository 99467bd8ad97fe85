"""The way back from a prepared shard: where each tensor came from, and the source's header."""

from __future__ import annotations

import hashlib

from mxfp4prep import io
from mxfp4prep.documents import JSON_LIMIT
from mxfp4prep.errors import IntegrityError, InvalidManifest
from mxfp4prep.layouts import LAYOUTS
from mxfp4prep.manifest import (
    HEADER_SUFFIX,
    SOURCE_DIR,
    FileRecord,
    LayerRecord,
    Manifest,
    StoredTensor,
)
from mxfp4prep.plan import TensorPlan
from mxfp4prep.prepared import PreparedFiles
from mxfp4prep.safefile import Header, TensorEntry, encode_header, read_header


def shard_tensors(prepared: PreparedFiles, record: FileRecord) -> tuple[Header, list[TensorPlan]]:
    """The header of one prepared shard and how each of its tensors goes back.

    Raises InvalidManifest where header and manifest disagree on names, shapes or layouts.
    """
    header = read_header(prepared.root / record.name, name=record.name)
    layers = _stored_by_name(prepared.manifest, record.name)
    plans = []
    for entry in header.tensors:
        found = layers.pop(entry.name, None)
        if found is None:
            plans.append(TensorPlan(entry, entry, None, 1, 1, entry.nbytes))
            continue
        layer, stored, is_scale = found
        plans.append(_plan(entry, layer, stored, is_scale, record.name))
    if layers:
        raise InvalidManifest(record.name, f"tensor {next(iter(layers))} is missing")
    return header, plans


def _stored_by_name(
    manifest: Manifest, file: str
) -> dict[str, tuple[LayerRecord, StoredTensor, bool]]:
    found: dict[str, tuple[LayerRecord, StoredTensor, bool]] = {}
    for layer in manifest.layers:
        for stored, is_scale in ((layer.weight, False), (layer.scale, True)):
            if stored.file == file:
                found[stored.tensor] = (layer, stored, is_scale)
    return found


def _plan(
    entry: TensorEntry, layer: LayerRecord, stored: StoredTensor, is_scale: bool, file: str
) -> TensorPlan:
    rows = layer.n
    cols = -(-layer.k // 32) if is_scale else layer.k // 2
    source = entry._replace(shape=tuple(stored.source_shape))
    if stored.layout != "raw":
        matrix = LAYOUTS[stored.layout].stored_shape(rows, cols)
        expected: tuple[int, ...] = matrix if layer.experts is None else (layer.experts, *matrix)
    else:
        expected = source.shape
    if not (entry.shape == tuple(stored.shape) == expected):
        raise InvalidManifest(
            f"{file}: {entry.name}",
            f"stored shape for layout {stored.layout}",
            found=f"{list(entry.shape)} in the file, {stored.shape} in the manifest",
            expected=list(expected),
        )
    return TensorPlan(
        source, entry, stored.layout, layer.experts or 1, rows, cols, is_scale=is_scale
    )


def source_header(
    prepared: PreparedFiles, record: FileRecord, header: Header, tensors: list[TensorPlan]
) -> bytes:
    """The safetensors header, length bytes and all, that this shard had in the source."""
    if record.source_header == "stored":
        name = f"{SOURCE_DIR}/{record.name}{HEADER_SUFFIX}"
        raw = io.read_bytes(prepared.root / name, limit=JSON_LIMIT)
        expected = {original.name: original.sha256 for original in prepared.files("original")}
        found = hashlib.sha256(raw).hexdigest()
        if found != expected.get(name):
            raise IntegrityError(
                name,
                "is not the header that was kept: sha256",
                found=found,
                expected=expected.get(name),
            )
        return raw
    metadata = None if record.source_header == "no_metadata" else header.metadata
    return encode_header([tensor.source for tensor in tensors], metadata)
