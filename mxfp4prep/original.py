"""A shard of the source, read along while the prepared one is taken back."""

from __future__ import annotations

from pathlib import Path

from mxfp4prep import io
from mxfp4prep.plan import TensorPlan
from mxfp4prep.stream import Piece


class SourceShard:
    """One shard of the source, compared piece by piece with what comes back from ours."""

    def __init__(self, fd: int, data_start: int, name: str) -> None:
        self._fd = fd
        self._start = data_start
        self._name = name
        self._offset = data_start
        self._found = bytearray()
        self._bad: list[int] = []

    @classmethod
    def open(cls, path: Path, header: bytes, nbytes: int) -> SourceShard | str:
        """The source's shard at `path`, or what is wrong with it.

        header, nbytes   its header as it was prepared from, and how much data must follow
        """
        if not path.is_file():
            return f"the source has no {path.name}"
        fd = io.open_read(path)
        try:
            found = bytearray(len(header))
            size = io.file_size(fd, path)
            if size == len(header) + nbytes:
                io.pread_into(fd, memoryview(found), 0, path)
        except BaseException:
            io.close(fd, path)
            raise
        if size != len(header) + nbytes or found != header:
            io.close(fd, path)
            return "the source's header is not the one that was prepared"
        return cls(fd, len(header), str(path))

    def compare(self, piece: Piece) -> None:
        """Compares one restored piece with the source's bytes at the same place."""
        nbytes = len(piece.made)
        if len(self._found) != nbytes:
            self._found = bytearray(nbytes)
        io.pread_into(self._fd, memoryview(self._found), self._offset, self._name)
        if self._found != piece.made:  # one memcmp; two memoryviews compare item by item
            self._bad.append(self._offset - self._start)
        self._offset += nbytes

    def different(self, tensors: list[TensorPlan]) -> list[str]:
        """Names of the tensors in which a difference was seen."""
        return [
            tensor.source.name
            for tensor in tensors
            if any(tensor.source.begin <= at < tensor.source.end for at in self._bad)
        ]

    def close(self) -> None:
        """Closes the file."""
        io.close(self._fd, self._name)
