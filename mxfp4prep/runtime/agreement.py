"""Whether a layer's record, its layouts and its file agree: shape, dtype, place and path.

A kernel that is handed bytes in another order than it reads answers nonsense without an error, so
whatever is not exactly as the manifest and the layout say is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest, LayoutError, Unsupported
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.manifest import LayerRecord, StoredTensor
from mxfp4prep.prepared import CONVERT_HINT, VERIFY_HINT
from mxfp4prep.runtime.slices import byte_columns
from mxfp4prep.safefile import FLOAT_DTYPES, TensorEntry

WEIGHT_DTYPES = frozenset({"U8"})
SCALE_DTYPES = frozenset({"U8", "F8_E8M0"})


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file: `offset` is that of its first byte."""

    file: str
    entry: TensorEntry
    offset: int


def check_layer(record: LayerRecord, places: Mapping[str, Place]) -> None:
    """Nothing; raises where the layer's layouts, shapes, dtypes and tensors do not all agree.

    places   every tensor of the checkpoint by name

    Raises InvalidManifest or InvalidCheckpoint, Unsupported for padding, which is not read yet.
    """
    if (record.n_padded, record.k_padded) != (record.n, record.k):
        raise Unsupported(record.name, "padded layers", hint="install a newer mxfp4prep")
    if record.n < 1 or record.k < 2 or record.k % 2 or record.experts == 0:
        found = f"n {record.n}, k {record.k}, experts {record.experts}"
        raise InvalidManifest(record.name, "its size", found=found, hint=CONVERT_HINT)
    path_name(record)
    for operand, stored, dtypes in (
        ("weight", record.weight, WEIGHT_DTYPES),
        ("scale", record.scale, SCALE_DTYPES),
    ):
        place = places.get(stored.tensor)
        where = f"{stored.file}: {stored.tensor}"
        if place is None or place.file != stored.file:
            raise InvalidCheckpoint(where, "the tensor is missing", hint=VERIFY_HINT)
        _check_dtype(where, place.entry, dtypes)
        _check_shape(record, operand, stored, place.entry.shape, where)
    bank = () if record.experts is None else (record.experts,)
    _check_vector(record.name, record.bias, {(*bank, record.n)}, places)
    _check_vector(record.name, record.input_scale, {(), bank or (1,)}, places)


def path_name(record: LayerRecord) -> str:
    """The name in PATHS that a layer's two layouts belong to: "asm", "triton" or "kept".

    Raises InvalidManifest for a pair of layouts that is not that of the layer's path.
    """
    name = "kept" if "kept" in record.reasons else record.path
    pair = (record.weight.layout, record.scale.layout)
    if name == "kept" and record.path != "triton":
        what = "its reasons say that it was kept as it was"
        found, expected = f"path {record.path}", "path kept, which is recorded as triton"
        raise InvalidManifest(record.name, what, found=found, expected=expected, hint=CONVERT_HINT)
    if pair != PATHS[name]:
        raise InvalidManifest(
            record.name,
            f"layouts that do not belong to path {name}",
            found=" + ".join(pair),
            expected=" + ".join(PATHS[name]),
            hint=CONVERT_HINT,
        )
    return name


def _check_dtype(where: str, entry: TensorEntry, dtypes: frozenset[str]) -> None:
    if entry.dtype not in dtypes:
        expected = " or ".join(sorted(dtypes))
        raise InvalidCheckpoint(
            where, "dtype", found=entry.dtype, expected=expected, hint=VERIFY_HINT
        )


def _check_vector(
    layer: str, name: str | None, shapes: set[tuple[int, ...]], places: Mapping[str, Place]
) -> None:
    """A bias or input scale: there, floating, and of one of `shapes`."""
    if name is None:
        return
    place = places.get(name)
    if place is None:
        raise InvalidCheckpoint(f"{layer}: {name}", "the tensor is missing", hint=VERIFY_HINT)
    _check_dtype(f"{place.file}: {name}", place.entry, FLOAT_DTYPES)
    if place.entry.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in sorted(shapes))
        found = list(place.entry.shape)
        raise InvalidCheckpoint(
            f"{place.file}: {name}", "shape", found=found, expected=expected, hint=VERIFY_HINT
        )


def _check_shape(
    record: LayerRecord, operand: str, stored: StoredTensor, found: tuple[int, ...], where: str
) -> None:
    layout = LAYOUTS[stored.layout]
    columns = byte_columns(operand, (0, record.k))[1]
    try:
        layout.check(record.n, columns, where)
    except LayoutError as error:
        raise InvalidManifest(
            where, error.what, found=error.found, expected=error.expected, hint=CONVERT_HINT
        ) from error
    matrix = layout.stored_shape(record.n, columns)
    expected: tuple[int, ...] = matrix if record.experts is None else (record.experts, *matrix)
    source = tuple(stored.source_shape)
    as_source = stored.layout == "raw" and source[-1:] == (columns,)
    if as_source and math.prod(source) == math.prod(expected):
        expected = source  # raw bytes keep the source's shape, whatever its leading dimensions
    if not (found == tuple(stored.shape) == expected):
        raise InvalidManifest(
            where,
            f"the shape of layout {stored.layout} for n {record.n}, k {record.k}",
            found=f"{list(found)} in the file, {stored.shape} in the manifest",
            expected=list(expected),
            hint=CONVERT_HINT,
        )
    _check_source(where, stored, math.prod(expected), columns)


def _check_source(where: str, stored: StoredTensor, nbytes: int, columns: int) -> None:
    """The source's shape, (..., byte columns) of as many bytes; nothing is padded yet."""
    source = stored.source_shape
    if source[-1:] != [columns] or min(source) < 1 or math.prod(source) != nbytes:
        raise InvalidManifest(
            where,
            "the shape that the source had",
            found=source,
            expected=f"{nbytes} bytes in rows of {columns}",
            hint=CONVERT_HINT,
        )
    if stored.pad_byte is not None:
        what = "a byte that fills padding, where nothing is padded"
        raise InvalidManifest(where, what, found=stored.pad_byte, hint=CONVERT_HINT)
