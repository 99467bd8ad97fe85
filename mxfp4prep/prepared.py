"""A prepared checkpoint directory opened: manifest and config that agree, and its digests.

Nothing here reads a tensor or a header, and nothing imports torch: the loader, verify, restore and
show all begin here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4prep import io
from mxfp4prep.documents import CONFIG_NAME, JSON_LIMIT, parse_object, read_object
from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest, naming
from mxfp4prep.manifest import (
    FileRecord,
    Manifest,
    parse,
)
from mxfp4prep.marks import (
    DIGEST_ALGORITHM,
    FORMAT_VERSION,
    MANIFEST_NAME,
    QUANT_METHOD,
)

CONVERT_HINT = "prepare the Quark checkpoint again with `mxfp4prep convert`"
VERIFY_HINT = "`mxfp4prep verify` lists everything that differs; copy the checkpoint again"


@dataclass(frozen=True, slots=True)
class PreparedFiles:
    """The directory, its manifest and its config.json."""

    root: Path
    manifest: Manifest
    manifest_bytes: bytes
    config: dict[str, Any]

    def files(self, *roles: str) -> Iterator[FileRecord]:
        """The manifest's files with one of `roles`."""
        return (record for record in self.manifest.files if record.role in roles)


def open_prepared(path: Path) -> PreparedFiles:
    """The prepared checkpoint at `path`, its manifest and config read and cross-checked.

    Raises InvalidManifest or InvalidCheckpoint; a directory that was never prepared says so.
    """
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "no such directory"
        raise InvalidCheckpoint(
            path,
            what,
            expected="a directory that `mxfp4prep convert` wrote",
            hint=f"give the directory: {path.parent}" if path.exists() else "check the path",
        )
    with naming(path):
        config = _read_config(path)
        raw = io.read_bytes(path / MANIFEST_NAME, limit=JSON_LIMIT)
        manifest = parse(raw)
        _check_names(manifest)
    return PreparedFiles(path, manifest, raw, config)


def _read_config(root: Path) -> dict[str, Any]:
    """config.json, after checking that it declares this format."""
    has_manifest = (root / MANIFEST_NAME).is_file()
    if not (root / CONFIG_NAME).is_file():
        what = "not a prepared checkpoint: no " + (CONFIG_NAME if has_manifest else MANIFEST_NAME)
        raise InvalidManifest(root, what, hint=CONVERT_HINT)
    _, config = read_object(root / CONFIG_NAME, CONFIG_NAME)
    declared = config.get("quantization_config")
    declared = declared if isinstance(declared, Mapping) else {}
    if declared.get("quant_method") == "quark":
        what = "not a prepared checkpoint but a Quark checkpoint"
        hint = f"prepare it first: mxfp4prep convert {root}"
        if has_manifest:
            what += f", although {MANIFEST_NAME} is there: config.json was replaced"
            hint = f"put back the {CONFIG_NAME} that convert wrote, or copy the checkpoint again"
        raise InvalidManifest(root, what, hint=hint)
    if not has_manifest:
        raise InvalidManifest(
            root, f"not a prepared checkpoint: no {MANIFEST_NAME}", hint=CONVERT_HINT
        )
    check_marks(declared)
    return config


def check_marks(declared: Mapping[str, object]) -> None:
    """Raises InvalidManifest unless config.json's `quantization_config` is of this version."""
    marks = (("quant_method", QUANT_METHOD), ("format_version", FORMAT_VERSION))
    for key, expected in (*marks, ("manifest", MANIFEST_NAME)):
        found = declared.get(key)
        if found != expected or isinstance(found, bool):
            raise InvalidManifest(
                f"{CONFIG_NAME}: quantization_config.{key}",
                "not what this version of mxfp4prep reads",
                found=repr(found),
                expected=repr(expected),
                hint=f"install the mxfp4prep that wrote it, or {CONVERT_HINT}",
            )


def _check_names(manifest: Manifest) -> None:
    """File names come from a file: none may lead out of the directory."""
    for name in [record.name for record in manifest.files] + [manifest.digests.name]:
        parts = name.split("/")
        if "\0" in name or {"", ".", ".."} & set(parts):
            raise InvalidManifest(
                MANIFEST_NAME, "a file name", found=repr(name), expected="a path inside"
            )


def require_files(prepared: PreparedFiles, *roles: str) -> None:
    """Raises InvalidCheckpoint when a file with one of `roles` is not there."""
    for record in prepared.files(*roles):
        if not (prepared.root / record.name).exists():
            raise InvalidCheckpoint(
                record.name, "the manifest lists it, but it is not there", hint=VERIFY_HINT
            )


def read_digests(prepared: PreparedFiles) -> dict[str, tuple[str, str]]:
    """(source, prepared) xxh3_128 of every tensor.

    Raises InvalidManifest when the file is not the one the manifest was written with.
    """
    record = prepared.manifest.digests
    if not (prepared.root / record.name).is_file():
        raise InvalidCheckpoint(record.name, "the digests are not there", hint=VERIFY_HINT)
    raw = io.read_bytes(prepared.root / record.name, limit=JSON_LIMIT)
    found = hashlib.sha256(raw).hexdigest()
    if found != record.sha256:
        raise InvalidManifest(
            record.name, "sha256", found=found, expected=record.sha256, hint=VERIFY_HINT
        )
    document = parse_object(raw, record.name)
    pairs = document.get("tensors")
    if document.get("algorithm") != DIGEST_ALGORITHM or not isinstance(pairs, dict):
        raise InvalidManifest(record.name, "algorithm", expected=DIGEST_ALGORITHM)
    try:
        return {name: (str(source), str(prepared)) for name, (source, prepared) in pairs.items()}
    except (TypeError, ValueError):
        raise InvalidManifest(record.name, "not a digest pair for every tensor") from None
