"""The exact inverse of convert: the original Quark checkpoint back, byte for byte.

Every tensor goes back through the inverse of its layout and must have the digest that the source
had; headers are spelled as the source spelled them. Staged and published like a conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mxfp4prep.consistency import misplaced
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME
from mxfp4prep.errors import IntegrityError, naming
from mxfp4prep.manifest import FileRecord
from mxfp4prep.marks import (
    HEADER_SUFFIX,
    MANIFEST_NAME,
    SOURCE_DIR,
)
from mxfp4prep.plan import TensorPlan
from mxfp4prep.prepared import (
    VERIFY_HINT,
    PreparedFiles,
    open_prepared,
    read_digests,
    require_files,
)
from mxfp4prep.rederive import SHAPES, can_rederive, disagreements
from mxfp4prep.rewrite import copy_file, part_path, rewrite, settle
from mxfp4prep.safefile import Header
from mxfp4prep.staging import check_output, staged
from mxfp4prep.undo import shard_tensors, source_header, stored_by_file
from mxfp4prep.workers import Cancel, Progress, run_jobs, worker_count

Opened = tuple[Header, list[TensorPlan]]
"""A prepared shard's header, and how each of its tensors goes back."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What was written.

    header_only   files whose tensors are exact but whose header is spelled differently from the
                  source's; always empty for checkpoints that this version has prepared
    """

    out: Path
    files: int
    nbytes: int
    header_only: tuple[str, ...] = ()


def restore(
    prepared: Path,
    out: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> RestoreReport:
    """Writes the original checkpoint of the prepared directory `prepared` to `out`.

    Raises InvalidCheckpoint when a file is not there, IntegrityError when a restored tensor or file
    has not the source's digest, UnsafeOutput when `out` exists, IOFailed when the disk fails.
    Nothing is left at `out` then.
    """
    count = worker_count(workers)
    files = open_prepared(prepared)
    check_output(out, files.root)
    with naming(prepared, VERIFY_HINT):
        digests = read_digests(files)
        opened = _opened(files)
    originals = {
        record.name.removeprefix(f"{SOURCE_DIR}/"): record for record in files.files("original")
    }
    written: list[int] = []
    cancel = Cancel(progress)
    with staged(out) as stage, naming(prepared):
        copying = Cancel(progress)  # first: what is not as it was shows before the long work
        for record in files.files("side"):
            written.append(_copy_back(files, record, record.name, stage, copying))
        for name, record in originals.items():
            if not name.endswith(HEADER_SUFFIX):
                written.append(_copy_back(files, record, name, stage, copying))
        shards = sorted(files.files("shard"), key=lambda record: (-record.nbytes, record.name))
        run_jobs(
            [
                _shard_job(files, shard, opened[shard.name], stage, digests, written, cancel)
                for shard in shards
            ],
            count,
            cancel,
        )
    return RestoreReport(out, len(written), sum(written))


def _opened(files: PreparedFiles) -> dict[str, Opened]:
    """Every shard by name, once all files that a restore reads are known to be there."""
    for name, what in misplaced({record.name: record for record in files.manifest.files}):
        raise IntegrityError(name, what, hint="see all that differs with `mxfp4prep verify`")
    require_files(files, "shard", "side", "original")
    stored = stored_by_file(files.manifest)
    opened = {
        record.name: shard_tensors(files, record, stored.get(record.name, {}))
        for record in files.files("shard")
    }
    _refuse_other_shapes(files, opened)
    return opened


def _refuse_other_shapes(files: PreparedFiles, opened: Mapping[str, Opened]) -> None:
    """Raises IntegrityError when a layer's shapes are not those its bytes and config lead to.

    Digests hold the bytes of tensors; the shapes in a restored header come from the manifest.
    Decisions that do not change the way back (how an engine cuts a layer) are not looked at.
    """
    for layer in files.manifest.layers:
        rows = layer.n * (layer.experts or 1)
        for stored, cols in ((layer.weight, layer.k // 2), (layer.scale, -(-layer.k // 32))):
            shape = tuple(stored.source_shape)
            if math.prod(shape) != rows * cols or shape[-1:] != (cols,) or min(shape) < 1:
                raise IntegrityError(
                    MANIFEST_NAME,
                    f"source_shape of {stored.tensor}",
                    found=list(shape),
                    expected=f"{rows} rows of {cols} bytes",
                    hint="see all that differs with `mxfp4prep verify`",
                )
    if not can_rederive(files):
        return
    for place in disagreements(files, opened, SHAPES):
        raise IntegrityError(
            MANIFEST_NAME,
            f"{place.name}: {place.what}",
            hint="see all that differs with `mxfp4prep verify`",
        )


def restored_nbytes(prepared: PreparedFiles) -> int:
    """Bytes that `restore` reads, for a progress bar."""
    return sum(record.nbytes for record in prepared.files("shard", "side", "original"))


def _copy_back(
    files: PreparedFiles, record: FileRecord, name: str, stage: Path, cancel: Cancel
) -> int:
    done = copy_file(files.root / record.name, stage, name, "side", cancel)
    source = files.manifest.source
    known = {CONFIG_NAME: source.config_sha256, INDEX_NAME: source.index_sha256}
    for expected in (record.sha256, known.get(name, record.sha256)):
        if done.sha256 != expected:
            raise _other_file(record, done.sha256)
    return done.nbytes


def _other_file(record: FileRecord, found: str | None) -> IntegrityError:
    return IntegrityError(
        record.name,
        "is not the file that was prepared: sha256",
        found=found,
        expected=record.sha256,
        hint="put the original's file back; all that differs: `mxfp4prep verify`",
    )


def _shard_job(
    files: PreparedFiles,
    record: FileRecord,
    opened: Opened,
    stage: Path,
    digests: Mapping[str, tuple[str, str]],
    written: list[int],
    cancel: Cancel,
) -> Callable[[], None]:
    def job() -> None:
        header, tensors = opened
        nbytes, _, found = rewrite(
            files.root / record.name,
            record.name,
            header.data_start,
            tensors,
            source_header(files, record, header, tensors),
            part_path(stage, record.name),
            inverse=True,
            cancel=cancel,
        )
        for name, digest in found.made.items():
            expected = digests.get(name, ("no digest", ""))[0]
            if digest != expected:
                raise IntegrityError(
                    f"{record.name}: {name}",
                    "does not give the source's bytes back: xxh3",
                    found=digest,
                    expected=expected,
                    hint="find out which files are damaged with `mxfp4prep verify`",
                )
        if found.file_sha256 != record.sha256:
            raise _other_file(record, found.file_sha256)
        settle(stage, record.name)
        written.append(nbytes)

    return job
