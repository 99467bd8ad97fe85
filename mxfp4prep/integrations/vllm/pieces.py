"""The piece of each stored matrix that a module of vLLM holds, and the path that the pieces take.

vLLM's module says how it is cut; the runtime's rules say whether the stored layout can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mxfp4prep.alignment import REASONS, judge_matrix
from mxfp4prep.errors import CannotShard, Unsupported
from mxfp4prep.manifest import LayerRecord
from mxfp4prep.parallel import SCALE_GROUP, Shard
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.slices import path_of_piece


@dataclass(frozen=True, slots=True)
class Partition:
    """One logical output of a module: how many rows there are, and which of them are here.

    rows        in the whole matrix
    start, stop on this rank
    """

    rows: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored matrix, what this rank holds of it, and the partitions that it is made of.

    partitions   first, and the one after the last
    """

    record: LayerRecord
    shard: Shard
    partitions: tuple[int, int]


def pieces(
    where: str,
    members: Sequence[LayerRecord],
    partitions: Sequence[Partition],
    columns: tuple[int, int],
) -> tuple[Piece, ...]:
    """Each member's piece: members take the partitions in order, each one or several.

    columns   this rank's, of the input

    Raises Unsupported where members and partitions do not cover each other, CannotShard for
    columns that cut through a group of 32.
    """
    found = []
    first = 0
    for record in members:
        last, base = first, 0
        rows: list[tuple[int, int]] = []
        while last < len(partitions) and base < record.n:
            part = partitions[last]
            if part.stop > part.rows:
                what = f"vLLM expects more rows on this rank than {record.name} has"
                raise Unsupported(where, what, found=part.rows, expected=part.stop)
            rows.append((base + part.start, base + part.stop))
            base += part.rows
            last += 1
        if base != record.n:
            raise Unsupported(
                where,
                f"vLLM expects other rows than {record.name} has",
                found=record.n,
                expected=", ".join(str(part.rows) for part in partitions),
            )
        found.append(Piece(record, Shard(tuple(rows), columns), (first, last)))
        first = last
    if first != len(partitions):
        raise Unsupported(where, "vLLM expects more rows than the stored layers have")
    for piece in found:
        check_columns(piece.record, columns)
    return tuple(found)


def check_columns(record: LayerRecord, columns: tuple[int, int]) -> None:
    """Nothing; raises CannotShard for columns that are not whole groups of 32, or not there."""
    start, stop = columns
    if columns == (0, record.k):
        return
    if stop > record.k or start % SCALE_GROUP or stop % SCALE_GROUP:
        degrees = [degree for degree, path in record.verdict.items() if path != "impossible"]
        raise CannotShard(
            record.name,
            f"no whole 32-groups on a rank: columns {start}..{stop} of {record.k} = "
            f"{(stop - start) / SCALE_GROUP:g} groups",
            reason="split_groups",
            hint=f"it can be cut at --tensor-parallel-size {', '.join(degrees) or '1'}",
        )


def check_alike(where: str, records: Iterable[LayerRecord]) -> None:
    """Nothing; raises Unsupported for layers that one GEMM cannot run together."""
    kinds = {(record.scheme, record.activation.model_dump_json()) for record in records}
    if len(kinds) > 1:
        found = "; ".join(sorted(f"{scheme} {activation}" for scheme, activation in kinds))
        raise Unsupported(where, REASONS["mixed_group"], found=found)


def path_of(
    shards: Iterable[tuple[LayerRecord, Shard]], rows: int | None = None
) -> tuple[str, tuple[str, ...]]:
    """The path that matrices take together, and why it is not the one they are stored for.

    rows   of the matrix that their pieces make when they are put one below the other; None for
           matrices that stay apart
    """
    kinds = {
        (path_name(record), record.n, record.k, shard): record.name for record, shard in shards
    }
    choices = {path_of_piece(*kind) for kind in kinds}
    paths = {path for path, _ in choices}
    reasons = sorted({why for _, why in choices if why is not None})
    if paths == {"asm"} and rows is not None:
        (k,) = {shard.k for _, _, _, shard in kinds}
        verdict = judge_matrix(rows, k)
        if verdict.path != "asm":
            paths = {"triton"}
            why = "; ".join(REASONS[reason] for reason in verdict.reasons)
            reasons = [f"the {rows} x {k} matrix that vLLM makes of its parts: {why}"]
    if len(paths) > 1 and not reasons:
        reasons = [f"its matrices are stored for different paths ({', '.join(sorted(paths))})"]
    return (paths.pop() if len(paths) == 1 else "triton"), tuple(reasons)
