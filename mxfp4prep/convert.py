"""Carries a plan out: every file streamed once into a staging folder, then published in one step.

Order: shards, side files, originals, index, config, digests, SHA256SUMS, and the manifest last.
Each tensor is read once; source and prepared bytes are digested on the way (xxh3 per tensor,
sha256 per file), so the manifest proves what was written without reading it again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxfp4prep import __version__, io
from mxfp4prep.alignment import RULE_VERSION
from mxfp4prep.checkpoint import Checkpoint, hub_origin
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME, format_object
from mxfp4prep.errors import IOFailed, Unsupported
from mxfp4prep.findings import Finding
from mxfp4prep.manifest import (
    DigestsRecord,
    FileRecord,
    Manifest,
    SourceRecord,
    TargetRecord,
    dump,
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
from mxfp4prep.plan import Plan, ShardPlan
from mxfp4prep.records import copied_records, finding_records, layer_records
from mxfp4prep.rewrite import copy_file, part_path, record, rewrite, settle, write_file
from mxfp4prep.safefile import Header, encode_header, read_header
from mxfp4prep.staging import check_output, staged
from mxfp4prep.sums import format_sums
from mxfp4prep.workers import Cancel, Progress, run_jobs, worker_count

TARGET_GFX = "gfx950"
SPARE_NBYTES = 64 << 20
"""Room that must be left on the disk beyond the copy itself."""


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """Where the prepared checkpoint stands, its manifest, and what was noticed."""

    out: Path
    manifest: Manifest
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Written:
    """What stands in the staging folder so far. Workers add whole entries only."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    nan_scales: dict[str, int] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)

    def add(self, *records: FileRecord) -> None:
        self.files.update((r.name, r) for r in records)


def default_output(model_dir: Path) -> Path:
    """`<MODEL_DIR>-mxfp4prep` beside it; for a Hub cache snapshot, in the current directory."""
    root = model_dir.resolve()
    repo, _ = hub_origin(root)
    if repo is not None:
        return Path.cwd() / f"{repo.rpartition('/')[2]}-mxfp4prep"
    return root.parent / f"{root.name}-mxfp4prep"


def convert(
    plan: Plan,
    out: Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Writes the prepared checkpoint that `plan` describes to `out`, whole or not at all.

    workers    shards written at a time; None takes one per core
    overwrite  replace `out` if it is a prepared checkpoint

    Raises UnsafeOutput before anything is written, IOFailed when the disk or the source fails.
    """
    checkpoint = plan.survey.checkpoint
    count = worker_count(workers)
    check_output(out, checkpoint.root, overwrite=overwrite)
    _refuse_reserved_names(checkpoint)
    _check_free_space(out, plan, checkpoint)
    written = _Written()
    cancel = Cancel(progress)
    with staged(out, replace=overwrite) as stage:
        jobs = [
            _shard_job(shard, stage, written, cancel)
            for shard in sorted(plan.shards, key=lambda shard: (-shard.nbytes, shard.shard.name))
        ]
        run_jobs(jobs, count, cancel)
        copying = Cancel(progress)
        for name in checkpoint.side_files:
            if name == SUMS_NAME:
                continue
            written.add(copy_file(checkpoint.root / name, stage, name, "side", copying))
        _write_json_files(plan, stage, written)
        manifest = _write_manifest(plan, stage, written)
    return ConvertResult(out, manifest, tuple(plan.findings) + _nan_findings(written))


def _shard_job(
    plan: ShardPlan, stage: Path, written: _Written, cancel: Cancel
) -> Callable[[], None]:
    def job() -> None:
        shard = plan.shard
        header = read_header(shard.path, name=shard.name, keep_raw=True)
        if header.tensors != shard.header.tensors:
            raise IOFailed(shard.name, "changed since it was planned", hint="run convert again")
        spelling = _header_spelling(header)
        nbytes, sha256, digests = rewrite(
            shard.path,
            shard.name,
            header.data_start,
            plan.tensors,
            encode_header([t.stored for t in plan.tensors], header.metadata or {"format": "pt"}),
            part_path(stage, shard.name),
            inverse=False,
            cancel=cancel,
        )
        settle(stage, shard.name)
        written.digests.update(
            (name, (read, digests.made[name])) for name, read in digests.read.items()
        )
        written.nan_scales.update(digests.nan_scales)
        if spelling == "stored":
            written.headers[shard.name] = header.raw
        written.add(record(shard.name, nbytes, sha256, "shard", spelling))

    return job


def _header_spelling(header: Header) -> str:
    """How the source's header follows from the prepared one; see FileRecord.source_header."""
    if header.metadata == {} or encode_header(header.tensors, header.metadata) != header.raw:
        return "stored"
    return "same" if header.metadata is not None else "no_metadata"


def _write_json_files(plan: Plan, stage: Path, written: _Written) -> None:
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


def _write_manifest(plan: Plan, stage: Path, written: _Written) -> Manifest:
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
            name=checkpoint.name,
            repo=repo,
            commit=commit,
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
        findings=finding_records([*plan.findings, *_nan_findings(written)]),
    )
    content = dump(manifest)
    sums = {r.name: r.sha256 for r in written.files.values()} | {MANIFEST_NAME: _sha256(content)}
    write_file(stage, SUMS_NAME, format_sums(sums), "side")
    write_file(stage, MANIFEST_NAME, content, "side")
    return manifest


def _nan_findings(written: _Written) -> tuple[Finding, ...]:
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


def _refuse_reserved_names(checkpoint: Checkpoint) -> None:
    """The output needs a few names of its own; a source that uses them cannot be undone."""
    names = [*checkpoint.side_files, *(shard.name for shard in checkpoint.shards)]
    for name in names:
        if name == DIGESTS_NAME or name.partition("/")[0] == SOURCE_DIR:
            raise Unsupported(
                name,
                "the prepared checkpoint needs this name for itself",
                hint="move it out of the source directory",
            )


def _check_free_space(out: Path, plan: Plan, checkpoint: Checkpoint) -> None:
    side = sum(io.path_size(checkpoint.root / name) for name in checkpoint.side_files)
    needed = plan.nbytes + side + SPARE_NBYTES
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise IOFailed(
            out.parent,
            "not enough room for the output",
            found=f"{free / 1e6:,.0f} MB free",
            expected=f"{needed / 1e6:,.0f} MB, of which {SPARE_NBYTES / 1e6:,.0f} are to spare",
            hint="choose another disk with -o",
        )


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
