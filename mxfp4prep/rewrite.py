"""One safetensors file into another: header first, then every tensor moved in file order.

convert runs it forwards, restore backwards; verify reads without writing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from mxfp4prep import io
from mxfp4prep.errors import IOFailed
from mxfp4prep.manifest import FileRecord
from mxfp4prep.plan import TensorPlan
from mxfp4prep.sink import Different, FileSink
from mxfp4prep.stream import PIECE_NBYTES, Piece, Scratch, TakeBuffer, move
from mxfp4prep.workers import Cancel

PART = ".mxfp4prep.part"
"""What an unfinished file's name ends in: no loader takes it, and no source that has such a file is
converted."""

NAN_SCALE = 255
"""The E8M0 byte that means NaN (OCP MX v1.0, section 5.4.1)."""


@dataclass(slots=True)
class TensorDigests:
    """xxh3_128 of a file's tensors as read and as made, and the NaN scale bytes seen.

    file_sha256   of the whole file as read, on the way back only
    """

    read: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    nan_scales: dict[str, int] = field(default_factory=dict)
    file_sha256: str | None = None


def rewrite(
    source: Path,
    name: str,
    data_start: int,
    tensors: Sequence[TensorPlan],
    header: bytes,
    target: Path,
    *,
    inverse: bool,
    cancel: Cancel,
    finished: int | None = None,
) -> tuple[int, str, TensorDigests]:
    """(bytes, sha256, digests) of the file written at `target`.

    tensors      in any order; read from `source` at data_start + offset
    header       the output's whole header
    inverse      False: source to prepared · True: prepared to source
    finished     `target` is there already, made by that user: it is compared, not written

    Raises IOFailed when `source` changes meanwhile, Different when a finished `target` has one byte
    that would not be written.
    """
    digests = TensorDigests()
    done = 0
    with io.reading(source, name) as fd:
        before = io.signature(fd, name)
        whole = _begin_sha256(fd, data_start, name) if inverse else None
        try:
            with FileSink(target, finished=finished) as sink:
                sink.put(header)
                pieces = digested(
                    fd, name, data_start, tensors, digests, inverse=inverse, take=sink.take
                )
                for piece in pieces:
                    if whole is not None:
                        whole.update(piece.read)
                    sink.put(piece.made, piece.buffer)
                    cancel.done(len(piece.read))
                    done += len(piece.read)
                nbytes, sha256 = sink.finish()
        except Different:
            cancel.done(-done)
            raise
        io.require_unchanged(fd, source, before, name)
    if whole is not None:
        digests.file_sha256 = whole.hexdigest()
    return nbytes, sha256, digests


def _begin_sha256(fd: int, data_start: int, name: str) -> hashlib._Hash:
    header = memoryview(bytearray(data_start))
    io.pread_into(fd, header, 0, name)
    return hashlib.sha256(header)


def digested(
    fd: int,
    name: str,
    data_start: int,
    tensors: Sequence[TensorPlan],
    digests: TensorDigests,
    *,
    inverse: bool,
    take: TakeBuffer,
) -> Iterator[Piece]:
    """Every piece of every tensor in the order of the data, filling `digests` on the way.

    A header may list its tensors in another order than their bytes stand.
    """
    scratch = Scratch()
    for tensor in sorted(tensors, key=lambda tensor: tensor.source.begin):
        read, made = xxhash.xxh3_128(), xxhash.xxh3_128()
        nans = 0
        changed = False
        offset = data_start + tensor.source.begin
        for piece in move(
            fd, offset, tensor, inverse=inverse, scratch=scratch, take=take, where=name
        ):
            read.update(piece.read)
            if piece.made is not piece.read:
                changed = True
                made.update(piece.made)
            if tensor.is_scale:
                nans += bytes(piece.read).count(NAN_SCALE)
            yield piece
        digests.read[tensor.source.name] = read.hexdigest()
        digests.made[tensor.source.name] = made.hexdigest() if changed else read.hexdigest()
        if nans:
            digests.nan_scales[tensor.source.name] = nans


def write_file(stage: Path, name: str, content: bytes, role: str) -> FileRecord:
    """Writes one small file into the staging folder, synced and digested like the large ones."""
    with FileSink(part_path(stage, name)) as sink:
        sink.put(content)
        nbytes, sha256 = sink.finish()
    settle(stage, name)
    return record(name, nbytes, sha256, role)


def copy_file(source: Path, stage: Path, name: str, role: str, cancel: Cancel) -> FileRecord:
    """Copies one file byte for byte into the staging folder."""
    with io.reading(source) as fd:
        before = io.signature(fd, source)
        size = before[0]
        with FileSink(part_path(stage, name)) as sink:
            for start in range(0, size, PIECE_NBYTES):
                count = min(PIECE_NBYTES, size - start)
                buffer = sink.take(count)
                view = memoryview(buffer)[:count]
                io.pread_into(fd, view, start, name)
                sink.put(view, buffer)
                cancel.done(count)
            nbytes, sha256 = sink.finish()
        io.require_unchanged(fd, source, before, name)
        io.require_end(fd, size, name)
    settle(stage, name)
    return record(name, nbytes, sha256, role)


def settle(stage: Path, name: str) -> None:
    """Gives a finished `.part` file its own name.

    Raises IOFailed where a file has that name already, which a disk that takes a and A for one
    says of two that the source can tell apart.
    """
    if io.exists(stage / name):
        raise IOFailed(
            name,
            "another file of this checkpoint has this name already, for the disk of the output",
            hint="choose an output on a disk that tells such names apart",
        )
    io.rename(stage / f"{name}{PART}", stage / name)


def record(
    name: str, nbytes: int, sha256: str, role: str, source_header: str | None = None
) -> FileRecord:
    """A manifest entry for one written file."""
    return FileRecord.model_validate(
        {
            "name": name,
            "nbytes": nbytes,
            "sha256": sha256,
            "role": role,
            "source_header": source_header,
        }
    )


def part_path(stage: Path, name: str) -> Path:
    """Where a file is written before it is whole; makes its folders."""
    path = stage / f"{name}{PART}"
    missing = [p for p in path.parents if p != stage and stage in p.parents and not io.exists(p)]
    for folder in reversed(missing):
        io.mkdir(folder)
    return path
