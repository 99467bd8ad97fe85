"""The exact inverse of convert: the original Quark checkpoint back, byte for byte.

Every tensor goes back through the inverse of its layout and must have the digest that the source
had; headers are spelled as the source spelled them. Staged and published like a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mxfp4prep.errors import IntegrityError
from mxfp4prep.manifest import HEADER_SUFFIX, MANIFEST_NAME, SOURCE_DIR, FileRecord
from mxfp4prep.prepared import PreparedFiles, open_prepared, read_digests
from mxfp4prep.rederive import can_rederive, disagreements
from mxfp4prep.rewrite import copy_file, part_path, rewrite, settle
from mxfp4prep.staging import check_output, staged
from mxfp4prep.undo import shard_tensors, source_header
from mxfp4prep.workers import Cancel, Progress, run_jobs, worker_count


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

    Raises IntegrityError when a restored tensor or file has not the source's digest, UnsafeOutput
    when `out` exists, IOFailed when the disk fails. Nothing is left at `out` then.
    """
    count = worker_count(workers)
    files = open_prepared(prepared)
    check_output(out, files.root)
    digests = read_digests(files)
    _refuse_other_plan(files)
    originals = {
        record.name.removeprefix(f"{SOURCE_DIR}/"): record for record in files.files("original")
    }
    written: list[int] = []
    cancel = Cancel(progress)
    with staged(out) as stage:
        shards = sorted(files.files("shard"), key=lambda record: (-record.nbytes, record.name))
        run_jobs(
            [_shard_job(files, shard, stage, digests, written, cancel) for shard in shards],
            count,
            cancel,
        )
        copying = Cancel(progress)
        for record in files.files("side"):
            written.append(_copy_back(files, record, record.name, stage, copying))
        for name, record in originals.items():
            if not name.endswith(HEADER_SUFFIX):
                written.append(_copy_back(files, record, name, stage, copying))
    return RestoreReport(out, len(written), sum(written))


def _refuse_other_plan(files: PreparedFiles) -> None:
    """Raises IntegrityError when the manifest does not describe what planning would have done."""
    if not can_rederive(files):
        return
    shards = {record.name: shard_tensors(files, record) for record in files.files("shard")}
    for place in disagreements(files, shards):
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
    if done.sha256 != record.sha256:
        raise IntegrityError(
            record.name,
            "is not the file that was prepared: sha256",
            found=done.sha256,
            expected=record.sha256,
            hint="find out which files are damaged with `mxfp4prep verify`",
        )
    return done.nbytes


def _shard_job(
    files: PreparedFiles,
    record: FileRecord,
    stage: Path,
    digests: Mapping[str, tuple[str, str]],
    written: list[int],
    cancel: Cancel,
) -> Callable[[], None]:
    def job() -> None:
        header, tensors = shard_tensors(files, record)
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
        settle(stage, record.name)
        written.append(nbytes)

    return job
