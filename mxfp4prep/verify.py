"""Proof that a prepared checkpoint is what its manifest says, and that nothing was lost.

quick   names, sizes, headers, shapes and layouts, and every decision made again; reads no tensor
full    every byte: sha256 of every file, xxh3 of every tensor as stored, and of its inverse, which
        must be the source's digest: lossless even when the source is gone
deep    full, and every byte of the inverse compared with the source itself
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.consistency import ORIGINAL_CONFIG, contradictions
from mxfp4prep.directory import list_files
from mxfp4prep.documents import JSON_LIMIT
from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, UsageError
from mxfp4prep.file_checks import (
    Level,
    Problem,
    Run,
    file_job,
    new_run,
    placed,
    source_name,
)
from mxfp4prep.marks import (
    DIGESTS_NAME,
    MANIFEST_NAME,
    SUMS_NAME,
)
from mxfp4prep.prepared import open_prepared, read_digests
from mxfp4prep.rederive import can_rederive, disagreements
from mxfp4prep.sums import format_sums, parse_sums
from mxfp4prep.workers import Progress, run_jobs, worker_count

__all__ = ["Level", "Problem", "VerifyReport", "verify"]


ADDED = "is not in the manifest: added after the conversion"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked and every problem found; no problem means proven at this level.

    skipped   checks that could not run, never counted as passed
    """

    level: Level
    name: str
    files: int
    tensors: int
    nbytes: int
    problems: tuple[Problem, ...]
    skipped: tuple[str, ...]


def verify(
    prepared: Path,
    level: Level = "full",
    source: Path | None = None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks the prepared directory at `level`; "deep" needs the source directory.

    Raises InvalidManifest or InvalidCheckpoint when there is no readable manifest to check
    against; everything else that is wrong is a Problem in the report.
    """
    if level == "deep" and source is None:
        raise UsageError("--deep", "needs the source", hint="add --source MODEL_DIR")
    if source is not None and not source.is_dir():
        raise InvalidCheckpoint(source, "no such directory", hint="give the original checkpoint")
    files = open_prepared(prepared)
    run = new_run(files, level, source, progress)
    _check_listing(run)
    _check_sums(run)
    try:
        run.digests = read_digests(files)
    except Mxfp4PrepError as error:
        run.digests = None
        name = files.manifest.digests.name
        if all(problem.file != name for problem in run.problems):
            run.say(name, *placed(error, name))
    broken = {problem.file for problem in run.problems}
    whole = [record for record in files.manifest.files if record.name not in broken]
    jobs = [file_job(run, record) for record in sorted(whole, key=lambda r: -r.nbytes)]
    run_jobs(jobs, worker_count(workers), run.cancel)
    _check_coverage(run)
    _check_small_files(run)
    _check_plan(run)
    _check_source_listing(run)
    return VerifyReport(
        level,
        files.manifest.source.name,
        len(files.manifest.files),
        run.tensors,
        run.nbytes,
        tuple(sorted(set(run.problems), key=lambda p: (p.file, p.tensor or "", p.what))),
        _skipped(run),
    )


def _skipped(run: Run) -> tuple[str, ...]:
    skipped = []
    if run.level == "quick":
        skipped.append("tensor bytes and file digests (use --full)")
    if run.level == "full":
        skipped.append("comparison with the source itself (use --source MODEL_DIR)")
    if not can_rederive(run.files):
        manifest = run.files.manifest
        skipped.append(
            "the decisions made again: made by version "
            f"{manifest.target.rule_version} of the rules (mxfp4prep {manifest.tool_version})"
        )
    return tuple(skipped)


def _check_listing(run: Run) -> None:
    """Every file of the manifest is there with its size, and nothing else is."""
    expected = {record.name: record.nbytes for record in run.files.manifest.files}
    present = set(list_files(run.files.root))
    for name, nbytes in expected.items():
        if name not in present:
            run.say(name, "is missing")
            continue
        found = (run.files.root / name).stat().st_size
        if found != nbytes:
            run.say(name, f"size: found {found} bytes, expected {nbytes}")
    for name in sorted(present - expected.keys() - {MANIFEST_NAME, SUMS_NAME}):
        run.say(name, ADDED)


def _check_sums(run: Run) -> None:
    """SHA256SUMS says of every file what the manifest says, and holds the manifest itself."""
    path = run.files.root / SUMS_NAME
    if not path.is_file():
        run.say(SUMS_NAME, "is missing")
        return
    expected = {record.name: record.sha256 for record in run.files.manifest.files}
    expected[MANIFEST_NAME] = hashlib.sha256(run.files.manifest_bytes).hexdigest()
    raw = io.read_bytes(path, limit=JSON_LIMIT)
    if raw == format_sums(expected):
        return
    found = parse_sums(raw)
    if found == expected:
        run.say(SUMS_NAME, "is not spelled as it was written")
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) == found.get(name):
            continue
        listed = found.get(name, "nothing")
        if name == MANIFEST_NAME:
            run.say(name, f"sha256: found {expected[name]}, {SUMS_NAME} has {listed}")
        else:
            run.say(
                SUMS_NAME, f"{name}: found {listed}, the manifest has {expected.get(name, 'none')}"
            )


def _check_coverage(run: Run) -> None:
    """Digests, layers and copied tensors speak of the same set of tensors."""
    if run.digests is None:
        return
    manifest = run.files.manifest
    named = {t.name for t in manifest.tensors}
    for layer in manifest.layers:
        named |= {layer.weight.tensor, layer.scale.tensor}
    for name in sorted(named ^ run.digests.keys()):
        where = "has no digest" if name in named else "has a digest but is not in the manifest"
        run.say(DIGESTS_NAME, where, name)


def _check_small_files(run: Run) -> None:
    """config.json, the index and the roles of files agree with the originals and the shards."""
    shard_of = {
        tensor.stored.name: name for name, (_, tensors) in run.shards.items() for tensor in tensors
    }
    if run.shards.keys() == {record.name for record in run.files.files("shard")}:
        for file, what in contradictions(run.files, shard_of):
            run.say(file, what)


def _check_plan(run: Run) -> None:
    """The manifest says of every layer what planning says again from the headers and config."""
    shards = {record.name for record in run.files.files("shard")}
    if not can_rederive(run.files) or run.shards.keys() != shards:
        return
    if not (run.files.root / ORIGINAL_CONFIG).is_file():
        return  # said already
    try:
        for place in disagreements(run.files, run.shards):
            run.say(MANIFEST_NAME, place.what, place.name)
    except Mxfp4PrepError as error:
        run.say(MANIFEST_NAME, f"its source cannot be planned again: {error}")


def _check_source_listing(run: Run) -> None:
    """Deep: the source has no file that the prepared checkpoint does not account for."""
    if run.level != "deep" or run.source is None:
        return
    known = {record.name for record in run.files.files("shard")}
    known |= {source_name(record) or "" for record in run.files.manifest.files}
    for name in list_files(run.source):
        if name not in known:
            run.say(name, "stands in the source but was not there when it was prepared")
