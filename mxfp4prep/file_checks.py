"""What is wrong with one file of a prepared checkpoint, at one level of a verification.

Nothing stops at the first fault: every one is noted in the run. What files say of each other is
`verify`'s.
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
from mxfp4prep.consistency import damaged_entries
from mxfp4prep.directory import is_utf8
from mxfp4prep.errors import Mxfp4PrepError, printable
from mxfp4prep.manifest import FileRecord, Manifest
from mxfp4prep.marks import (
    HEADER_SUFFIX,
    SOURCE_DIR,
)
from mxfp4prep.original import SourceShard
from mxfp4prep.plan import TensorPlan
from mxfp4prep.prepared import PreparedFiles
from mxfp4prep.rewrite import TensorDigests, digested
from mxfp4prep.safefile import Header, read_raw_header
from mxfp4prep.stream import PIECE_NBYTES, Scratch
from mxfp4prep.undo import Stored, shard_tensors, source_header, stored_by_file
from mxfp4prep.workers import Cancel, Progress

Level = Literal["quick", "full", "deep"]
MOST_NAMED = 20
"""Tensors of one shard that are named when its header is damaged: more, and it is another file."""


class Problem(NamedTuple):
    """One thing that is not as it should be: where, and what."""

    file: str
    tensor: str | None
    what: str


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


def new_run(
    files: PreparedFiles,
    level: Level,
    source: Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """A verification of `files` that has not looked at anything yet."""
    stored, listed = stored_by_file(files.manifest), _listed_by_file(files.manifest)
    return Run(files, level, source, {}, Cancel(progress), stored, listed)


def file_job(run: Run, record: FileRecord) -> Callable[[], None]:
    """The check of one file, which notes in `run` whatever is wrong."""

    def job() -> None:
        try:
            if record.role == "shard":
                _check_shard(run, record)
            elif run.level != "quick":
                _check_file(run, record)
        except Mxfp4PrepError as error:
            run.say(record.name, *placed(error, record.name))
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


def placed(error: Mxfp4PrepError, file: str) -> tuple[str, str | None]:
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
    named = source_name(record)
    if run.level != "deep" or run.source is None or named is None:
        return
    original = run.source / named
    if not original.is_file():
        run.say(record.name, f"the source has no {named}")
    elif _sha256(run, original, named) != record.sha256:
        run.say(record.name, f"differs from {named} of the source")


def source_name(record: FileRecord) -> str | None:
    """What the file is called in the source, whose bytes it must have; None: it has others."""
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
        io.require_end(fd, size, name)
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
    path = run.files.root / record.name
    try:
        with io.reading(path, record.name) as fd:
            # safetensors takes no path that is not UTF-8, though Linux has such folders
            readable = path if is_utf8(str(path)) else f"/proc/self/fd/{fd}"
            with safe_open(readable, framework="pt") as opened:
                names = opened.keys()
                found = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
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
