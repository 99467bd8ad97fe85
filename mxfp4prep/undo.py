"""The way back from a prepared shard: where each tensor came from, and the source's header."""

from __future__ import annotations

import hashlib

from mxfp4prep import io
from mxfp4prep.documents import JSON_LIMIT
from mxfp4prep.errors import IntegrityError, InvalidManifest
from mxfp4prep.layouts import LAYOUTS
from mxfp4prep.manifest import (
    FileRecord,
    LayerRecord,
    Manifest,
    StoredTensor,
)
from mxfp4prep.marks import (
    HEADER_SUFFIX,
    SOURCE_DIR,
)
from mxfp4prep.plan import TensorPlan
from mxfp4prep.prepared import PreparedFiles
from mxfp4prep.safefile import Header, TensorEntry, encode_header, read_header

Stored = dict[str, tuple[LayerRecord, StoredTensor, bool]]
"""By tensor name: the layer it belongs to, how it is stored, and whether it is the scale."""


def stored_by_file(manifest: Manifest) -> dict[str, Stored]:
    """Every layer's tensors, by the file that holds them."""
    files: dict[str, Stored] = {}
    for layer in manifest.layers:
        for stored, is_scale in ((layer.weight, False), (layer.scale, True)):
            files.setdefault(stored.file, {})[stored.tensor] = (layer, stored, is_scale)
    return files


def shard_tensors(
    prepared: PreparedFiles, record: FileRecord, stored: Stored
) -> tuple[Header, list[TensorPlan]]:
    """The header of one prepared shard and how each of its tensors goes back.

    stored   this file's entry of `stored_by_file`

    Raises InvalidManifest where header and manifest disagree on names, shapes or layouts.
    """
    header = read_header(prepared.root / record.name, name=record.name)
    missing = stored.keys() - {entry.name for entry in header.tensors}
    if missing:
        raise InvalidManifest(record.name, f"tensor {min(missing)} is missing")
    plans = []
    for entry in header.tensors:
        found = stored.get(entry.name)
        if found is None:
            plans.append(TensorPlan(entry, entry, None, 1, 1, entry.nbytes))
        else:
            plans.append(_plan(entry, *found, record.name))
    return header, plans


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
