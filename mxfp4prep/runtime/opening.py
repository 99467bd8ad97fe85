"""A prepared checkpoint opened for serving: manifest, config and headers that agree, or an error.

Only small files and headers are read. Whatever is missing, unknown or contradictory is refused
here, before any weight is: a layout that is guessed wrong answers nonsense without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4prep import io
from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest, naming
from mxfp4prep.manifest import (
    LayerRecord,
    Manifest,
)
from mxfp4prep.marks import MANIFEST_NAME, SUMS_NAME
from mxfp4prep.parallel import Topology
from mxfp4prep.prepared import (
    CONVERT_HINT,
    VERIFY_HINT,
    PreparedFiles,
    open_prepared,
    read_digests,
    require_files,
)
from mxfp4prep.runtime.agreement import Place, check_layer
from mxfp4prep.runtime.belonging import check_inputs, check_names, check_tensors
from mxfp4prep.safefile import read_header

CHANGED_HINT = (
    "put the file of the conversion back (`mxfp4prep verify` lists all that differs); a change "
    "that you want: tell what loads the model (vLLM: --hf-overrides), or change the original and "
    "convert again"
)

SUMS_LIMIT = 1 << 24
"""Bytes: a line is some 100, and no checkpoint has 100,000 files."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What the small files of a prepared checkpoint say. `digests` is None unless asked for.

    signatures   of the shards, by file name, as their headers were read: see `io.signature`
    """

    root: Path
    config: dict[str, Any]
    manifest: Manifest
    layers: dict[str, LayerRecord]
    places: dict[str, Place]
    digests: dict[str, str] | None
    signatures: dict[str, tuple[int, int]]


def open_for_serving(path: Path, *, verify: bool) -> Opened:
    """The prepared checkpoint in directory `path`; with `verify`, its digest of every tensor too,
    and config.json must be the one that the manifest has the digest of.

    Raises InvalidManifest, InvalidCheckpoint or Unsupported for whatever does not agree.
    """
    with naming(path, VERIFY_HINT):
        return checked_for_serving(open_prepared(path), verify=verify)


def checked_for_serving(prepared: PreparedFiles, *, verify: bool) -> Opened:
    """`open_for_serving` of a checkpoint whose manifest and config have been read already."""
    with naming(prepared.root, VERIFY_HINT):
        return _checked(prepared, verify=verify)


def _checked(prepared: PreparedFiles, *, verify: bool) -> Opened:
    manifest = prepared.manifest
    require_files(prepared, "shard")
    places, signatures = _read_headers(prepared.root, manifest)
    layers = {record.name: record for record in manifest.layers}
    for record in manifest.layers:
        check_layer(record, places)
        check_tensors(record, places)
    _check_accounts(manifest, places)
    check_names(manifest, Topology.from_config(prepared.config))
    check_inputs(manifest, prepared.config)
    _check_sum(prepared)
    digests = None
    if verify:
        _check_config(prepared)
        digests = {name: stored for name, (_, stored) in read_digests(prepared).items()}
    return Opened(prepared.root, prepared.config, manifest, layers, places, digests, signatures)


def _check_config(prepared: PreparedFiles) -> None:
    """Refuses a config.json that is not the one convert wrote: an activation or a number of experts
    that was changed there shows in the answers only."""
    for record in prepared.files("config"):
        found = hashlib.sha256(io.read_bytes(prepared.root / record.name))
        if found.hexdigest() != record.sha256:
            raise InvalidCheckpoint(
                record.name,
                "not the one that convert wrote",
                found=f"sha256 {found.hexdigest()}",
                expected=record.sha256,
                hint=CHANGED_HINT,
            )


def _check_sum(prepared: PreparedFiles) -> None:
    """Refuses a manifest that is not the one SHA256SUMS was written with. Which of several kinds of
    inputs a layer has is said nowhere else; a copy without that file (engines fetch *.json only) is
    not asked."""
    sums = prepared.root / SUMS_NAME
    if not sums.is_file():
        return
    found = hashlib.sha256(prepared.manifest_bytes).hexdigest()
    for line in io.read_bytes(sums, limit=SUMS_LIMIT).decode("utf-8", "replace").splitlines():
        expected, _, name = line.partition("  ")
        if name == MANIFEST_NAME and expected != found:
            raise InvalidManifest(
                MANIFEST_NAME,
                f"not the one that {SUMS_NAME} was written with",
                found=f"sha256 {found}",
                expected=expected,
                hint=VERIFY_HINT,
            )


def _read_headers(
    root: Path, manifest: Manifest
) -> tuple[dict[str, Place], dict[str, tuple[int, int]]]:
    places: dict[str, Place] = {}
    signatures = {}
    for record in manifest.files:
        if record.role != "shard":
            continue
        with io.reading(root / record.name, record.name) as fd:
            signatures[record.name] = io.signature(fd, record.name)  # first: see transfer.Files
        header = read_header(root / record.name, name=record.name)
        if header.file_nbytes != record.nbytes:
            raise InvalidCheckpoint(
                record.name,
                "the file's size",
                found=f"{header.file_nbytes} bytes",
                expected=f"{record.nbytes}",
                hint=VERIFY_HINT,
            )
        for entry in header.tensors:
            place = Place(record.name, entry, header.data_start + entry.begin)
            other = places.setdefault(entry.name, place)
            if other is not place:
                what = f"tensor {entry.name} stands in {other.file} too"
                raise InvalidCheckpoint(record.name, what, hint=VERIFY_HINT)
    return places, signatures


def _check_accounts(manifest: Manifest, places: Mapping[str, Place]) -> None:
    """Refuses a tensor that the manifest lists and no file has, or the other way round."""
    rest = set(places)
    for name, file in _accounted(manifest):
        place = places.get(name)
        if place is None or place.file != file:
            raise InvalidCheckpoint(f"{file}: {name}", "the tensor is missing", hint=VERIFY_HINT)
        rest.discard(name)
    if rest:
        name = min(rest)
        what = f"the manifest does not say what tensor {name} is"
        raise InvalidManifest(places[name].file, what, hint=CONVERT_HINT)


def _accounted(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for record in manifest.layers:
        yield record.weight.tensor, record.weight.file
        yield record.scale.tensor, record.scale.file
    for copied in manifest.tensors:
        yield copied.name, copied.file
