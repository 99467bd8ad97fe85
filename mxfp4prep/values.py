"""What the scale bytes of a checkpoint hold, read in bounded memory: NaN, zero blocks, exponents.

Headers cannot tell these. A byte means 2^(byte - 127) for its block of 32 weights and 255 means
NaN (OCP MX v1.0, section 5.4.1). Quark never writes 255. For a block of zeros it writes 0 up to
release 0.11.2 and 1 from 0.12 on. Neither torch nor numpy is needed: bytes are looked up and
counted by methods of `bytearray`, 2 to 3 GB/s a core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mxfp4prep import io
from mxfp4prep.alignment import scale_columns
from mxfp4prep.checkpoint import Checkpoint, Shard
from mxfp4prep.errors import IOFailed
from mxfp4prep.findings import Finding
from mxfp4prep.quark import QuarkLayer

CHUNK_NBYTES = 2 << 20
"""Bytes read at a time; twice that is held."""

NAN_SCALE = 255
"""The byte that means NaN."""

ZERO_SCALES = (0, 1)
"""The bytes that stand for a block of zeros, by Quark release."""

PLACES = 8
"""NaN places kept per layer."""

SHOWN = 3
"""Layers, and places of each, that a finding names."""

_SPECIAL = bytes((*ZERO_SCALES, NAN_SCALE))


@dataclass(frozen=True, slots=True)
class LayerValues:
    """The scale bytes of one layer.

    nan                bytes that are 255
    nan_places         row and column of the first few; in a bank of experts expert * n + row
    zero_blocks        bytes that are 0 or 1
    minimum, maximum   of the ordinary bytes (2 to 254); 0 where there is none
    """

    layer: str
    nan: int
    nan_places: tuple[tuple[int, int], ...]
    zero_blocks: int
    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True)
class ScaleValues:
    """The scale bytes of a checkpoint; counts and extremes as in LayerValues, over all layers.

    nbytes        bytes read
    scales        scales in them, one per block of 32 weights
    layers        those with NaN scales, in the order they were asked for
    zero_layers   layers of which every block is one of zeros; `BANK (expert 3)` for one matrix
    """

    nbytes: int
    scales: int
    nan: int
    zero_blocks: int
    minimum: int
    maximum: int
    layers: tuple[LayerValues, ...]
    zero_layers: tuple[str, ...] = ()


def read_values(
    checkpoint: Checkpoint,
    layers: Iterable[QuarkLayer],
    progress: Callable[[int], None] | None = None,
) -> ScaleValues:
    """Reads every scale byte of `layers`, shard by shard in the order of the data.

    progress   called with the bytes just read; `sum(layer.scale.nbytes)` in all

    Raises Unsupported for a checkpoint whose shards are on the Hub only, and IOFailed for a shard
    that cannot be read or is not the one whose header was read.
    """
    asked = list(layers)
    by_shard: dict[str, list[QuarkLayer]] = {}
    for layer in asked:
        shard = checkpoint.shard_of[layer.scale.name]
        by_shard.setdefault(shard.name, []).append(layer)
    checkpoint.require_local(by_shard)
    span = _Span()
    found: dict[str, _Tally] = {}
    for shard in checkpoint.shards:
        if shard.name in by_shard:
            found |= _read_shard(shard, by_shard[shard.name], span, progress)
    tallies = [found[layer.name] for layer in asked]
    nbytes = sum(layer.scale.nbytes for layer in asked)
    return ScaleValues(
        nbytes=nbytes,
        scales=nbytes,  # a byte each
        nan=sum(tally.nan for tally in tallies),
        zero_blocks=sum(tally.zeros for tally in tallies),
        minimum=span.low,
        maximum=span.high,
        layers=tuple(
            LayerValues(layer.name, tally.nan, tuple(tally.places), tally.zeros, *tally.extremes)
            for layer, tally in zip(asked, tallies, strict=True)
            if tally.nan
        ),
        zero_layers=tuple(name for tally in tallies for name in tally.dead),
    )


class _Span:
    """The ordinary bytes known so far, `low` to `high`, and tables that leave them out.

    Scales of one checkpoint span some twenty exponents: once these are known, one look-up per
    byte says whether a chunk holds anything else.
    """

    def __init__(self) -> None:
        self.low = self.high = 0
        self.known = b""
        self.flags = b"\1" * 256  # 1 for a byte that is special or beyond what is known

    def widen(self, ordinary: set[int]) -> None:
        """Counts more bytes, at least one, as known."""
        ends = {*ordinary, self.low, self.high} - {0}
        self.low, self.high = min(ends), max(ends)
        self.known = bytes(range(self.low, self.high + 1))
        self.flags = bytes(int(not self.low <= byte <= self.high) for byte in range(256))


@dataclass(slots=True)
class _Tally:
    """What was counted in one layer; `dead` names its matrices that hold nothing but zeros."""

    nan: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    zeros: int = 0
    low: int = NAN_SCALE
    high: int = 0
    dead: list[str] = field(default_factory=list)

    @property
    def extremes(self) -> tuple[int, int]:
        """The least and the greatest ordinary byte, zeros where there is none."""
        return (self.low, self.high) if self.high else (0, 0)

    def add(self, chunk: bytearray, span: _Span, columns: int, start: int) -> None:
        """Counts `chunk`, whose first byte is number `start` of the tensor."""
        if 1 in chunk.translate(span.flags):
            rest = chunk.translate(None, span.known)
            new = rest.translate(None, _SPECIAL)
            while new:
                # A few thousand bytes at a time: a set of millions takes as long as reading them.
                span.widen(set(new[:4096]))
                new = new.translate(None, span.known)
            self.zeros += sum(rest.count(byte) for byte in ZERO_SCALES)
            nan = rest.count(NAN_SCALE)
            if nan:
                self.nan += nan
                self._keep_places(chunk, columns, start)
        # memchr passes 30 GB/s and stops at the first hit: cheaper than min() and max().
        known = span.known
        self.low = next((b for b in known if b >= self.low or b in chunk), self.low)
        self.high = next((b for b in reversed(known) if b <= self.high or b in chunk), self.high)

    def _keep_places(self, chunk: bytearray, columns: int, start: int) -> None:
        at = chunk.find(NAN_SCALE)
        while at >= 0 and len(self.places) < PLACES:
            self.places.append(divmod(start + at, columns))
            at = chunk.find(NAN_SCALE, at + 1)


def _read_shard(
    shard: Shard,
    layers: Sequence[QuarkLayer],
    span: _Span,
    progress: Callable[[int], None] | None,
) -> dict[str, _Tally]:
    found: dict[str, _Tally] = {}
    fd = io.open_read(shard.path)
    try:
        before = io.signature(fd, shard.name)
        if before[0] != shard.header.file_nbytes:
            raise _changed(shard, before[0])
        for layer in sorted(layers, key=lambda layer: layer.scale.begin):
            tally = found[layer.name] = _Tally()
            columns = scale_columns(layer.k)
            matrix = layer.n * columns
            for expert in range(layer.experts or 1):
                zeros = tally.zeros
                start = expert * matrix
                for at, nbytes in _chunks(matrix):
                    chunk = bytearray(nbytes)
                    offset = shard.header.data_start + layer.scale.begin + start + at
                    io.pread_into(fd, memoryview(chunk), offset, shard.name)
                    tally.add(chunk, span, columns, start + at)
                    if progress is not None:
                        progress(nbytes)
                if tally.zeros - zeros == matrix:
                    one = "" if layer.experts is None else f" (expert {expert})"
                    tally.dead.append(f"{layer.name}{one}")
        after = io.signature(fd, shard.name)
        if after != before:
            raise _changed(shard, after[0])
    finally:
        io.close(fd, shard.name)
    return found


def _chunks(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the pieces that `nbytes` are read in."""
    for start in range(0, nbytes, CHUNK_NBYTES):
        yield start, min(CHUNK_NBYTES, nbytes - start)


def _changed(shard: Shard, nbytes: int) -> IOFailed:
    return IOFailed(
        shard.name,
        "the file changed since its header was read",
        found=f"{nbytes} bytes",
        expected=f"{shard.header.file_nbytes} bytes, untouched",
        hint="wait until the download or copy is finished, then try again",
    )


def value_findings(values: ScaleValues) -> tuple[Finding, ...]:
    """What is worth telling about the scale bytes."""
    findings = []
    if values.nan:
        places = ", ".join(_places_of(layer) for layer in values.layers[:SHOWN])
        findings.append(
            Finding(
                "nan_scale",
                "warning",
                values.layers[0].layer,
                f"{values.nan:,} scale bytes are 255 (NaN) in {_listed(len(values.layers), places)}"
                "; convert keeps them, and every output that such a block reaches is NaN or "
                "infinite: quantize again",
            )
        )
    if values.zero_layers:
        places = ", ".join(values.zero_layers[:SHOWN])
        findings.append(
            Finding(
                "zero_layer",
                "warning",
                values.zero_layers[0],
                "every scale byte is 0 or 1, so that all weights are zero, in "
                f"{_listed(len(values.zero_layers), places)}; dead by intent, or bytes that were "
                "never written (an unfinished download or copy)",
            )
        )
    if values.zero_blocks:
        findings.append(
            Finding(
                "zero_blocks",
                "note",
                "weight_scale",
                f"{values.zero_blocks:,} of {values.scales:,} scale bytes are 0 or 1, as Quark "
                "writes for blocks of zeros (0 up to 0.11.2, 1 from 0.12 on): no harm in itself. "
                "0 is 2^-127 and not zero, though a kernel that flushes subnormals takes it so",
            )
        )
    return tuple(findings)


def _places_of(layer: LayerValues) -> str:
    """`NAME at [3, 4], [5, 6] and 7 more`."""
    shown = layer.nan_places[:SHOWN]
    text = ", ".join(f"[{row}, {column}]" for row, column in shown)
    more = layer.nan - len(shown)
    return f"{layer.layer} at {text}" + (f" and {more:,} more" if more else "")


def _listed(count: int, places: str) -> str:
    """`5 layers: PLACES and 2 more`."""
    more = f" and {count - SHOWN:,} more" if count > SHOWN else ""
    return f"{count:,} layer{'s' if count != 1 else ''}: {places}{more}"
