"""Proof that a prepared checkpoint is what its manifest says, and that nothing was lost.

quick   names, sizes, headers, shapes and layouts, and every decision made again; reads no tensor
full    every byte: sha256 of every file, xxh3 of every tensor as stored, and of its inverse, which
        must be the source's digest: lossless even when the source is gone
deep    full, and every byte of the inverse compared with the source itself
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from mxfp4prep import io
from mxfp4prep.consistency import contradictions, damaged_entries
from mxfp4prep.directory import list_files
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME, JSON_LIMIT
from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, UsageError, printable
from mxfp4prep.manifest import FileRecord, Manifest
from mxfp4prep.marks import (
    DIGESTS_NAME,
    HEADER_SUFFIX,
    MANIFEST_NAME,
    SOURCE_DIR,
    SUMS_NAME,
)
from mxfp4prep.original import SourceShard
from mxfp4prep.plan import TensorPlan
from mxfp4prep.prepared import PreparedFiles, open_prepared, read_digests
from mxfp4prep.rederive import can_rederive, disagreements
from mxfp4prep.rewrite import TensorDigests, digested
from mxfp4prep.safefile import Header, read_raw_header
from mxfp4prep.stream import PIECE_NBYTES, Scratch
from mxfp4prep.sums import format_sums, parse_sums
from mxfp4prep.undo import Stored, shard_tensors, source_header, stored_by_file
from mxfp4prep.workers import Cancel, Progress, run_jobs, worker_count

Level = Literal["quick", "full", "deep"]
MOST_NAMED = 20
"""Tensors of one shard that are named when its header is damaged: more, and it is another file."""


class Problem(NamedTuple):
    """One thing that is not as it should be: where, and what."""

    file: str
    tensor: str | None
    what: str


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


@dataclass(slots=True)
class Run:
    """A verification under way."""

    files: PreparedFiles
    level: Level
    source: Path | None
    digests: dict[str, tuple[str, str]] | None
    cancel: Cancel
    stored: dict[str, Stored]
    listed: dict[str, list[str]]
    problems: list[Problem] = field(default_factory=list)
    shards: dict[str, tuple[Header, list[TensorPlan]]] = field(default_factory=dict)
    tensors: int = 0
    nbytes: int = 0

    def say(self, file: str, what: str, tensor: str | None = None) -> None:
        self.problems.append(Problem(file, tensor, what))


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
            run.say(name, *_placed(error, name))
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


def new_run(
    files: PreparedFiles,
    level: Level,
    source: Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """A verification of `files` that has not looked at anything yet."""
    stored, listed = stored_by_file(files.manifest), _listed_by_file(files.manifest)
    return Run(files, level, source, {}, Cancel(progress), stored, listed)


def _skipped(run: Run) -> tuple[str, ...]:
    skipped = []
    if run.level == "quick":
        skipped.append("tensor bytes and file digests (use --full)")
    if run.level == "full":
        skipped.append("comparison with the source itself (use --source MODEL_DIR)")
    if not can_rederive(run.files):
        version = run.files.manifest.tool_version
        skipped.append(f"the decisions made again: written by mxfp4prep {version}")
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
        run.say(name, "is not in the manifest: added after the conversion")


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


def file_job(run: Run, record: FileRecord) -> Callable[[], None]:
    """The check of one file, which notes in `run` whatever is wrong."""

    def job() -> None:
        try:
            if record.role == "shard":
                _check_shard(run, record)
            elif run.level != "quick":
                _check_file(run, record)
        except Mxfp4PrepError as error:
            run.say(record.name, *_placed(error, record.name))
            if record.role == "shard":
                _name_damaged_entries(run, record)

    return job


def _listed_by_file(manifest: Manifest) -> dict[str, list[str]]:
    """Every tensor that the manifest knows, by the file that should hold it."""
    files: dict[str, list[str]] = {}
    for layer in manifest.layers:
        for stored in (layer.weight, layer.scale):
            files.setdefault(stored.file, []).append(stored.tensor)
    for copied in manifest.tensors:
        files.setdefault(copied.file, []).append(copied.name)
    return files


def _placed(error: Mxfp4PrepError, file: str) -> tuple[str, str | None]:
    """What an error about `file` says, and the tensor that it names as `FILE: TENSOR`."""
    text, tensor = str(error).removeprefix(f"{printable(file)}: "), None
    if error.where.startswith(f"{file}: "):
        tensor = error.where.removeprefix(f"{file}: ")
        text = text.removeprefix(f"{printable(tensor)}: ")
    return text, tensor


def _name_damaged_entries(run: Run, record: FileRecord) -> None:
    """A header that cannot be used: in the entries of which tensors the damage is."""
    try:
        raw = read_raw_header(run.files.root / record.name)
    except Mxfp4PrepError:
        return  # said already
    damaged = damaged_entries(raw, run.listed.get(record.name, []))
    for name in damaged[:MOST_NAMED]:
        run.say(record.name, "its entry in the header is not as it was written", name)
    if len(damaged) > MOST_NAMED:
        run.say(record.name, f"the entries of {len(damaged)} tensors are not as they were written")


def _check_file(run: Run, record: FileRecord) -> None:
    """A file that is not a shard: its digest, and for deep its source's."""
    found = _sha256(run, run.files.root / record.name, record.name)
    if found != record.sha256:
        run.say(record.name, f"sha256: found {found}, expected {record.sha256}")
    source_name = _source_name(record)
    if run.level != "deep" or run.source is None or source_name is None:
        return
    original = run.source / source_name
    if not original.is_file():
        run.say(record.name, f"the source has no {source_name}")
    elif _sha256(run, original, source_name) != record.sha256:
        run.say(record.name, f"differs from {source_name} of the source")


def _source_name(record: FileRecord) -> str | None:
    if record.role == "side":
        return record.name
    if record.role == "original" and not record.name.endswith(HEADER_SUFFIX):
        return record.name.removeprefix(f"{SOURCE_DIR}/")
    return None


def _sha256(run: Run, path: Path, name: str) -> str:
    fd = io.open_read(path)
    digest = hashlib.sha256()
    try:
        size = io.file_size(fd, name)
        buffer = memoryview(bytearray(min(size, PIECE_NBYTES)))
        for start in range(0, size, PIECE_NBYTES):
            view = buffer[: min(PIECE_NBYTES, size - start)]
            io.pread_into(fd, view, start, name)
            digest.update(view)
            run.nbytes += len(view)
            run.cancel.done(len(view))
    finally:
        io.close(fd, name)
    return digest.hexdigest()


def _check_shard(run: Run, record: FileRecord) -> None:
    header, tensors = shard_tensors(run.files, record, run.stored.get(record.name, {}))
    run.tensors += len(tensors)
    run.shards[record.name] = header, tensors
    found = {tensor.stored.name for tensor in tensors}
    for name in sorted(found.symmetric_difference(run.listed.get(record.name, []))):
        known = "is in the file but not in the manifest" if name in found else "is missing"
        run.say(record.name, known, name)
    _ask_safetensors(run, record, tensors)
    if run.level == "quick":
        return
    digests = TensorDigests()
    sha256 = hashlib.sha256()
    with ExitStack() as opened:
        fd = opened.enter_context(io.reading(run.files.root / record.name, record.name))
        against = _source_shard(run, record, header, tensors)
        if against is not None:
            opened.callback(against.close)
        prefix = memoryview(bytearray(header.data_start))
        io.pread_into(fd, prefix, 0, record.name)
        sha256.update(prefix)
        scratch = Scratch()
        pieces = digested(
            fd,
            record.name,
            header.data_start,
            tensors,
            digests,
            inverse=True,
            take=scratch.take,
        )
        for piece in pieces:
            sha256.update(piece.read)
            if against is not None:
                against.compare(piece)
            run.nbytes += len(piece.read)
            run.cancel.done(len(piece.read))
    _judge_shard(run, record, tensors, digests, sha256.hexdigest())
    if against is not None:
        for name in against.different(tensors):
            run.say(record.name, "the inverse differs from the source's bytes", name)


def _ask_safetensors(run: Run, record: FileRecord, tensors: list[TensorPlan]) -> None:
    """A second reader, the one that everybody uses, finds the same tensors in the file."""
    try:
        with safe_open(run.files.root / record.name, framework="pt") as opened:
            found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        run.say(record.name, f"safetensors cannot read it: {error}")
        return
    if found != {tensor.stored.name: tensor.stored.shape for tensor in tensors}:
        run.say(record.name, "safetensors reads other tensors or shapes than the header says")


def _source_shard(
    run: Run, record: FileRecord, header: Header, tensors: list[TensorPlan]
) -> SourceShard | None:
    """Deep: the source's shard to compare with; a problem is said when there is none."""
    if run.level != "deep" or run.source is None:
        return None
    found = SourceShard.open(
        run.source / record.name,
        source_header(run.files, record, header, tensors),
        sum(tensor.source.nbytes for tensor in tensors),
    )
    if isinstance(found, str):
        run.say(record.name, found)
        return None
    return found


def _judge_shard(
    run: Run,
    record: FileRecord,
    tensors: list[TensorPlan],
    digests: TensorDigests,
    sha256: str,
) -> None:
    damaged, known = False, run.digests or {}
    for tensor in tensors if known else ():
        name = tensor.source.name
        source, stored = known.get(name, ("no digest", "no digest"))
        if digests.read[name] != stored:
            damaged = True
            run.say(record.name, f"bytes: found xxh3 {digests.read[name]}, expected {stored}", name)
        elif digests.made[name] != source:
            damaged = True
            run.say(
                record.name,
                f"inverse: found xxh3 {digests.made[name]}, the source had {source}",
                name,
            )
    if sha256 != record.sha256:
        header = bool(known) and not damaged
        where = " (no tensor is damaged: the header is)" if header else ""
        run.say(record.name, f"sha256: found {sha256}, expected {record.sha256}{where}")


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
    try:
        for place in disagreements(run.files, run.shards):
            run.say(MANIFEST_NAME, place.what, place.name)
    except Mxfp4PrepError as error:
        run.say(MANIFEST_NAME, f"its source cannot be planned again: {error}")


def _check_source_listing(run: Run) -> None:
    """Deep: the source has no file that the prepared checkpoint does not account for."""
    if run.level != "deep" or run.source is None:
        return
    known = {CONFIG_NAME, INDEX_NAME}
    known |= {record.name for record in run.files.files("side", "shard")}
    known |= {_source_name(record) or "" for record in run.files.files("original")}
    for name in list_files(run.source):
        if name not in known:
            run.say(name, "stands in the source but was not there when it was prepared")
