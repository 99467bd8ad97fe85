"""The files that stand beside the shards of a prepared checkpoint: documents, digests, manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxfp4prep import __version__, io
from mxfp4prep.alignment import RULE_VERSION
from mxfp4prep.checkpoint import Checkpoint, hub_origin
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME, format_object
from mxfp4prep.findings import Finding
from mxfp4prep.manifest import (
    DigestsRecord,
    FileRecord,
    Manifest,
    SourceRecord,
    TargetRecord,
    dump,
    utf8,
)
from mxfp4prep.marks import (
    DIGEST_ALGORITHM,
    DIGESTS_NAME,
    FORMAT_VERSION,
    HEADER_SUFFIX,
    MANIFEST_NAME,
    QUANT_METHOD,
    SOURCE_DIR,
    SUMS_NAME,
)
from mxfp4prep.plan import Plan
from mxfp4prep.records import copied_records, finding_records, layer_records
from mxfp4prep.rewrite import write_file
from mxfp4prep.sums import format_sums

TARGET_GFX = "gfx950"


@dataclass(slots=True)
class Written:
    """What stands in the staging folder so far. Workers add whole entries only."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    nan_scales: dict[str, int] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)

    def add(self, *records: FileRecord) -> None:
        """Notes files that are whole."""
        self.files.update((r.name, r) for r in records)


def write_documents(plan: Plan, stage: Path, written: Written) -> None:
    """config.json, the index, and under source/ the originals of what had to change."""
    checkpoint = plan.survey.checkpoint
    originals = {CONFIG_NAME: checkpoint.config_bytes}
    written.add(write_file(stage, CONFIG_NAME, prepared_config(checkpoint.config), "config"))
    index = _prepared_index(checkpoint)
    if index is not None:
        if checkpoint.index_bytes is None:
            written.add(write_file(stage, INDEX_NAME, index, "new_index"))
        elif index == checkpoint.index_bytes:
            written.add(write_file(stage, INDEX_NAME, index, "side"))
        else:
            originals[INDEX_NAME] = checkpoint.index_bytes
            written.add(write_file(stage, INDEX_NAME, index, "index"))
    if SUMS_NAME in checkpoint.side_files:
        originals[SUMS_NAME] = io.read_bytes(checkpoint.root / SUMS_NAME)
    for name, raw in sorted(written.headers.items()):
        originals[name + HEADER_SUFFIX] = raw
    for name, raw in originals.items():
        written.add(write_file(stage, f"{SOURCE_DIR}/{name}", raw, "original"))


def prepared_config(config: Mapping[str, Any]) -> bytes:
    """config.json with our quantization_config, the original nested in it, all else as it was."""
    document = dict(config)
    document["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "manifest": MANIFEST_NAME,
        "source_quantization_config": config["quantization_config"],
    }
    return format_object(document)


def _prepared_index(checkpoint: Checkpoint) -> bytes | None:
    """The index to write: the source's own bytes if they are right, None if none is needed."""
    total = sum(entry.nbytes for entry in checkpoint.tensors.values())
    complete = checkpoint.indexed.keys() == checkpoint.tensors.keys()
    if checkpoint.index_bytes is None and len(checkpoint.shards) < 2:
        return None
    if complete and checkpoint.index_metadata.get("total_size") == total:
        return checkpoint.index_bytes
    document = {
        "metadata": {**checkpoint.index_metadata, "total_size": total},
        "weight_map": {name: checkpoint.shard_of[name].name for name in sorted(checkpoint.tensors)},
    }
    return format_object(document)


def write_manifest(plan: Plan, stage: Path, written: Written) -> Manifest:
    """Digests, SHA256SUMS and, last of all, the manifest of what stands in `stage`."""
    digests = {
        "algorithm": DIGEST_ALGORITHM,
        "tensors": {name: list(written.digests[name]) for name in sorted(written.digests)},
    }
    raw = json.dumps(digests, separators=(",", ":")).replace("],", "],\n").encode() + b"\n"
    digests_file = write_file(stage, DIGESTS_NAME, raw, "digests")
    written.add(digests_file)
    checkpoint = plan.survey.checkpoint
    repo, commit = hub_origin(checkpoint.root)
    index = checkpoint.index_bytes
    manifest = Manifest(
        schema_version=1,
        tool_version=__version__,
        source=SourceRecord(
            name=utf8(checkpoint.name),
            repo=None if repo is None else utf8(repo),
            commit=None if commit is None else utf8(commit),
            config_sha256=_sha256(checkpoint.config_bytes),
            index_sha256=None if index is None else _sha256(index),
        ),
        target=TargetRecord(
            gfx=TARGET_GFX,
            tp=list(plan.tp),
            rule_version=RULE_VERSION,
            layouts=sorted({x for p in plan.layers for x in (p.weight_layout, p.scale_layout)}),
            layout=plan.layout,
            keep=list(plan.keep),
            parallel=[f"{pattern}={kind}" for pattern, kind in plan.survey.rules],
            expert_parallel=plan.survey.deployment.expert_parallel,
            engine=plan.engine,
        ),
        digests=DigestsRecord(
            name=DIGESTS_NAME, sha256=digests_file.sha256, algorithm=DIGEST_ALGORITHM
        ),
        files=[written.files[name] for name in sorted(written.files)],
        layers=layer_records(plan, written.nan_scales),
        tensors=copied_records(plan),
        findings=finding_records([*plan.findings, *nan_findings(written)]),
    )
    content = dump(manifest)
    sums = {r.name: r.sha256 for r in written.files.values()} | {MANIFEST_NAME: _sha256(content)}
    write_file(stage, SUMS_NAME, format_sums(sums), "side")
    write_file(stage, MANIFEST_NAME, content, "side")
    return manifest


def nan_findings(written: Written) -> tuple[Finding, ...]:
    """One remark about all NaN scales, if there are any."""
    if not written.nan_scales:
        return ()
    first = min(written.nan_scales)
    count = sum(written.nan_scales.values())
    return (
        Finding(
            "nan_scale",
            "warning",
            first,
            f"{count} scale bytes are 255 (NaN) in {len(written.nan_scales)} tensors: kept as they "
            "are, their blocks decode to NaN",
        ),
    )


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
