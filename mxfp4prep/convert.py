"""Carries a plan out: every file streamed once into a staging folder, then published in one step.

Order: shards, side files, originals, index, config, digests, SHA256SUMS, and the manifest last.
Each tensor is read once; source and prepared bytes are digested on the way (xxh3 per tensor,
sha256 per file), so the manifest proves what was written without reading it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mxfp4prep import io
from mxfp4prep.checkpoint import Checkpoint, hub_origin
from mxfp4prep.documents import INDEX_NAME
from mxfp4prep.errors import IOFailed, Unsupported, naming
from mxfp4prep.findings import Finding
from mxfp4prep.inventory import Written, nan_findings, write_documents, write_manifest
from mxfp4prep.leftovers import Leftovers
from mxfp4prep.manifest import Manifest
from mxfp4prep.marks import DIGESTS_NAME, MANIFEST_NAME, SOURCE_DIR, SUMS_NAME
from mxfp4prep.plan import Plan, ShardPlan
from mxfp4prep.rewrite import PART, TensorDigests, copy_file, part_path, record, rewrite, settle
from mxfp4prep.safefile import Header, encode_header, read_header
from mxfp4prep.sink import Different
from mxfp4prep.staging import check_output, staged
from mxfp4prep.workers import Cancel, Progress, run_jobs, worker_count

SPARE_NBYTES = 64 << 20
"""Room that must be left on the disk beyond the copy itself."""

NAME_NBYTES = 255
"""Bytes of the longest name in a folder on Linux (NAME_MAX, limits.h)."""

_OUR_FOLDERS = frozenset({SOURCE_DIR, DIGESTS_NAME})
"""What no file of the source may be called, nor the topmost folder that it is in."""

_OUR_FILES = frozenset({MANIFEST_NAME, SUMS_NAME, INDEX_NAME})
"""What the output has as a file, so that no folder of the source may be called so."""


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """Where the prepared checkpoint stands, its manifest, and what was noticed.

    reused   shards that an earlier run had finished, sorted
    """

    out: Path
    manifest: Manifest
    findings: tuple[Finding, ...]
    reused: tuple[str, ...] = ()


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
    resume: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Writes the prepared checkpoint that `plan` describes to `out`, whole or not at all.

    workers    shards written at a time; None takes one per core
    overwrite  replace `out` if it is a prepared checkpoint
    resume     take over each shard that a killed or failed run has finished, once every byte of it
               was compared with what this plan would write; and keep finished shards, should this
               run fail

    Raises UnsafeOutput, or Unsupported for names of files (see `check_names`), before anything is
    written, IOFailed when the disk or the source fails.
    """
    checkpoint = plan.survey.checkpoint
    count = worker_count(workers)
    check_output(out, checkpoint.root, overwrite=overwrite)
    with naming(checkpoint.root):
        check_names(checkpoint)
    leftovers = Leftovers({shard.shard.name for shard in plan.shards}) if resume else None
    written = Written()
    cancel = Cancel(progress)
    with (
        staged(out, replace=overwrite, leftovers=leftovers) as stage,
        _telling_of_loss(written, leftovers),
        naming(checkpoint.root),
    ):
        _check_free_space(stage.parent, plan, checkpoint, leftovers)
        jobs = [
            _shard_job(shard, stage, written, cancel, leftovers)
            for shard in sorted(plan.shards, key=lambda shard: (-shard.nbytes, shard.shard.name))
        ]
        run_jobs(jobs, count, cancel)
        copying = Cancel(progress)
        for name in checkpoint.side_files:
            if name == SUMS_NAME:
                continue
            written.add(copy_file(checkpoint.root / name, stage, name, "side", copying))
        write_documents(plan, stage, written)
        manifest = write_manifest(plan, stage, written)
    findings = (*plan.findings, *nan_findings(written), *_leftover_findings(leftovers))
    reused = () if leftovers is None else tuple(sorted(leftovers.reused))
    return ConvertResult(out, manifest, findings, reused)


@contextmanager
def _telling_of_loss(written: Written, leftovers: Leftovers | None) -> Iterator[None]:
    """A failure says that finished shards go with it, where --resume would have kept them."""
    try:
        yield
    except BaseException as error:
        count = sum(file.role == "shard" for file in written.files.values())
        if count and leftovers is None:
            error.add_note(
                f"not kept: finished shards ({count}); convert --resume keeps them when it fails"
            )
        raise


def _shard_job(
    plan: ShardPlan, stage: Path, written: Written, cancel: Cancel, leftovers: Leftovers | None
) -> Callable[[], None]:
    def job() -> None:
        shard = plan.shard
        header = read_header(shard.path, name=shard.name, keep_raw=True)
        if header.tensors != shard.header.tensors:
            raise IOFailed(shard.name, "changed since it was planned", hint="run convert again")
        spelling = _header_spelling(header)
        stored = encode_header(
            [t.stored for t in plan.tensors], header.metadata or {"format": "pt"}
        )

        def carry_out(target: Path, finished: int | None) -> tuple[int, str, TensorDigests]:
            return rewrite(
                shard.path,
                shard.name,
                header.data_start,
                plan.tensors,
                stored,
                target,
                inverse=False,
                cancel=cancel,
                finished=finished,
            )

        nbytes, sha256, digests = _taken_over(shard.name, stage, leftovers, carry_out) or carry_out(
            part_path(stage, shard.name), None
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


def _taken_over(
    name: str,
    stage: Path,
    leftovers: Leftovers | None,
    compare: Callable[[Path, int], tuple[int, str, TensorDigests]],
) -> tuple[int, str, TensorDigests] | None:
    """What `compare` gives for a finished file of an earlier run, a part of `stage` then.

    None where there is none with the very bytes that would be written.
    """
    if leftovers is None:
        return None
    ours = io.status(stage)
    for path in leftovers.candidates(name):
        try:
            made = compare(path, ours.st_uid)
        except Different:
            io.unlink(path)  # makes room for the one that is written instead
            leftovers.differ.append(name)
            continue
        part = part_path(stage, name)
        io.rename(path, part)
        io.chmod(part, ours.st_mode & 0o666)  # the umask may be another by now
        leftovers.reused.append(name)
        return made
    return None


def _leftover_findings(leftovers: Leftovers | None) -> tuple[Finding, ...]:
    if leftovers is None:
        return ()
    return tuple(
        Finding(
            "not_reused",
            "warning",
            name,
            "what an earlier run left is not, byte for byte, what is written now: written anew",
        )
        for name in sorted(set(leftovers.differ) - set(leftovers.reused))
    )


def _header_spelling(header: Header) -> str:
    """How the source's header follows from the prepared one; see FileRecord.source_header."""
    if header.metadata == {} or encode_header(header.tensors, header.metadata) != header.raw:
        return "stored"
    return "same" if header.metadata is not None else "no_metadata"


def check_names(checkpoint: Checkpoint) -> None:
    """Nothing; raises Unsupported for a file that an output could not hold, or not give back.

    The output needs a few names of its own, and each file a longer one until it is whole.
    """
    most = NAME_NBYTES - len(PART)
    names = [*checkpoint.side_files, *(shard.name for shard in checkpoint.shards)]
    for name in names:
        folder, inside, _ = name.partition("/")
        reserved = _OUR_FOLDERS if not inside else _OUR_FOLDERS | _OUR_FILES
        if folder in reserved or any(part.endswith(PART) for part in name.split("/")):
            raise Unsupported(
                name,
                "the prepared checkpoint needs this name for itself",
                hint="move it out of the source directory",
            )
        longest = max(len(os.fsencode(part)) for part in name.split("/"))
        if longest > most:
            raise Unsupported(
                name,
                "the name is too long",
                found=f"{longest} bytes",
                expected=f"at most {most}: it is longer while it is being written",
                hint="rename it, or move it out of the source directory",
            )


def _check_free_space(
    folder: Path, plan: Plan, checkpoint: Checkpoint, leftovers: Leftovers | None
) -> None:
    side = sum(io.path_size(checkpoint.root / name) for name in checkpoint.side_files)
    needed = plan.nbytes + side + SPARE_NBYTES - (leftovers.nbytes() if leftovers else 0)
    free = io.free_nbytes(folder)
    if free < needed:
        raise IOFailed(
            folder,
            "not enough room for the output",
            found=f"{free / 1e6:,.0f} MB free",
            expected=f"{needed / 1e6:,.0f} MB, of which {SPARE_NBYTES / 1e6:,.0f} are to spare",
            hint="choose another disk with -o",
        )
