"""The header of a safetensors file: a strict reader, and a writer that spells as safetensors does.

The format: 8 bytes little-endian length; a JSON object of that length, padding included, that maps
tensor names to dtype, shape and data_offsets, and `__metadata__` to strings; then the data.

Two readers that disagree about a file are how wrong bytes get served, so what the specification
forbids or leaves open is refused here even where safetensors reads it: duplicate keys, other fields
than the three, arrays in place of objects, null metadata, whitespace before the object, padding
other than spaces, shapes beyond 2^63 bits, an empty tensor name or one with a NUL. Names with other
control characters are accepted, since the format has them; messages show them escaped.

Source: https://github.com/huggingface/safetensors (README, "Format"), and its reader at 0.8.0.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from mxfp4prep import io
from mxfp4prep.collector import collector_paused
from mxfp4prep.header_json import (
    AGAIN,
    FIELDS,
    brief,
    first_twice,
    flaw,
    load_object,
    pairs_of,
    short,
)
from mxfp4prep.lookalikes import recognise

MAX_HEADER_NBYTES = 100_000_000  # safetensors reads no larger one: about a million tensors a file
DTYPE_BITS: dict[str, int] = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "I16 U16 F16 BF16",
        32: "I32 U32 F32",
        64: "I64 U64 F64 C64",
    }.items()
    for name in names.split()
}

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
"""Dtypes that a bias or an activation scale may have."""

_METADATA = "__metadata__"
_MAX_INT = 2**63 - 1  # the largest size that files and torch can express
_PREFIX_NBYTES = 512  # enough to see what a file is instead


class TensorEntry(NamedTuple):
    """One tensor of a file; `begin` and `end` are byte offsets within the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: its tensors, in header order, cover the data section exactly once."""

    tensors: tuple[TensorEntry, ...]
    metadata: dict[str, str] | None  # None: there is none, which is not the same as {}
    data_start: int
    file_nbytes: int
    raw: bytes = b""  # the length bytes, the JSON and its padding, if they were asked for


def read_header(path: Path, *, name: str | None = None, keep_raw: bool = False) -> Header:
    """The header of the safetensors file at `path`; of the data, only the size is looked at.

    name      what errors call the file; its own name by default
    keep_raw  keep the header's bytes too

    Raises InvalidCheckpoint, naming file and tensor, for any violation of the format; IOFailed when
    reading fails.
    """
    name = path.name if name is None else name
    fd = io.open_read(path)
    try:
        file_nbytes = io.file_size(fd, path)
        prefix = bytearray(min(file_nbytes, _PREFIX_NBYTES))
        io.pread_into(fd, memoryview(prefix), 0, path)
        data_start = 8 + header_length(prefix, file_nbytes, name)
        content = bytearray(data_start)
        io.pread_into(fd, memoryview(content), 0, path)
    finally:
        io.close(fd, path)
    raw = bytes(content) if keep_raw else b""
    del content[:8]
    tensors, metadata = parse_header(content, file_nbytes - data_start, name)
    return Header(tensors, metadata, data_start, file_nbytes, raw)


def read_raw_header(path: Path) -> bytes:
    """The bytes between a file's length bytes and its data, whatever they are.

    Nothing where the length makes no sense.
    """
    fd = io.open_read(path)
    try:
        file_nbytes = io.file_size(fd, path)
        prefix = bytearray(min(file_nbytes, 8))
        io.pread_into(fd, memoryview(prefix), 0, path)
        length = int.from_bytes(prefix, "little")
        content = bytearray(length if length <= min(file_nbytes - 8, MAX_HEADER_NBYTES) else 0)
        io.pread_into(fd, memoryview(content), 8, path)
    finally:
        io.close(fd, path)
    return bytes(content)


def header_length(prefix: bytes | bytearray, file_nbytes: int, name: str) -> int:
    """The header's length without its 8 length bytes, from a file's first bytes and its size.

    `prefix` is the whole file or at least 9 bytes of it; 512 suffice to recognise other formats.

    Raises InvalidCheckpoint when the file cannot hold such a header.
    """
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_NBYTES or prefix[8:9] not in (b"{", b""):
        _refuse_lookalike(bytes(prefix), name)
    if file_nbytes < 8:
        found = f"{file_nbytes} bytes"
        raise flaw(name, None, "too short for a safetensors file", found, "at least 8", AGAIN)
    if length > MAX_HEADER_NBYTES:
        what = "the header is larger than the format allows, or this is not safetensors"
        hint = f"if it is real, split the checkpoint into more files; else {AGAIN}"
        raise flaw(name, None, what, f"{length} bytes", f"at most {MAX_HEADER_NBYTES}", hint)
    if length == 0:
        raise flaw(name, None, "the header is empty", hint=AGAIN)
    missing = 8 + length - file_nbytes
    if missing > 0:
        what = f"truncated within the header: {missing} bytes are missing"
        raise flaw(name, None, what, f"{file_nbytes} bytes", f"at least {8 + length}", AGAIN)
    return length


def _refuse_lookalike(prefix: bytes, name: str) -> None:
    found = recognise(prefix)
    if found is not None:
        what, hint = found
        raise flaw(name, None, what, hint=hint)


@collector_paused()
def parse_header(
    raw_json: bytes | bytearray, data_nbytes: int, name: str
) -> tuple[tuple[TensorEntry, ...], dict[str, str] | None]:
    """Tensors in header order and metadata, from a header without its 8 length bytes.

    Raises InvalidCheckpoint unless it is valid and describes exactly `data_nbytes` bytes.
    """
    pairs = load_object(raw_json, name)
    values = dict(pairs)
    if len(values) < len(pairs):
        raise flaw(name, first_twice(pairs), "is there twice")
    metadata = _metadata(values.pop(_METADATA), name) if _METADATA in values else None
    tensors = tuple(_entry(key, value, name) for key, value in values.items())
    if b"\\ud" in raw_json or b"\\uD" in raw_json:
        _refuse_surrogates([*values, *(metadata or {}), *(metadata or {}).values()], name)
    _check_coverage(tensors, data_nbytes, name)
    return tensors, metadata


def _metadata(value: object, file: str) -> dict[str, str]:
    pairs = pairs_of(value)
    if pairs is None:
        raise flaw(file, _METADATA, "not a JSON object", brief(value))
    metadata = dict(pairs)
    if len(metadata) < len(pairs):
        raise flaw(file, _METADATA, f"the key {brief(first_twice(pairs))} is there twice")
    for key, text in metadata.items():
        if type(text) is not str:
            raise flaw(file, _METADATA, f"{brief(key)} is not a string", brief(text))
    return metadata


def _entry(name: str, value: object, file: str) -> TensorEntry:
    """One tensor's entry, checked but for its place among the others."""
    if not name or "\0" in name:
        raise flaw(file, name, "a tensor's name must not be empty or hold a NUL character")
    dtype, shape, begin, end = value if type(value) is tuple else _fields(name, value, file)
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        raise flaw(file, name, "unknown dtype", brief(dtype), "one of " + " ".join(DTYPE_BITS))
    nbits = bits
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_INT:
            raise flaw(file, name, "shape is wrong", brief(shape), "integers from 0 to 2^63 - 1")
        nbits *= size
        if nbits > _MAX_INT:
            raise flaw(file, name, "shape overflows", brief(shape), "fewer than 2^63 bits")
    if nbits % 8:
        what = f"{dtype} {brief(shape)} is not a whole number of bytes"
        raise flaw(file, name, what, f"{nbits} bits")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= _MAX_INT:
        expected = "integers, 0 <= begin <= end < 2^63"
        raise flaw(file, name, "data_offsets are wrong", brief((begin, end)), expected)
    if end - begin != nbits // 8:
        what = f"data_offsets do not fit {dtype} {brief(shape)}"
        raise flaw(file, name, what, f"{end - begin} bytes", str(nbits // 8))
    return TensorEntry(name, sys.intern(dtype), shape, begin, end)


def _fields(name: str, value: object, file: str) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """dtype, shape, begin and end of a tensor's object whose fields stand in another order."""
    pairs = pairs_of(value)
    if pairs is None:
        raise flaw(file, name, "not a JSON object", brief(value))
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise flaw(file, name, f"the field {brief(first_twice(pairs))} is there twice")
    for key in fields:
        if key not in FIELDS:
            raise flaw(file, name, f"unknown field {brief(key)}", expected=", ".join(FIELDS))
    for key in FIELDS:
        if key not in fields:
            raise flaw(file, name, f"{key} is missing")
    dtype, shape, offsets = (fields[key] for key in FIELDS)
    if type(shape) is not list:
        raise flaw(file, name, "shape is wrong", brief(shape), "a list of integers")
    if type(offsets) is not list or len(offsets) != 2:
        raise flaw(file, name, "data_offsets are wrong", brief(offsets), "two integers")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _refuse_surrogates(texts: Iterable[str], file: str) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise flaw(file, text, "lone surrogate in a name or in metadata") from error


def _check_coverage(tensors: Sequence[TensorEntry], data_nbytes: int, file: str) -> None:
    """Refuses overlaps, holes, missing and surplus bytes."""
    position, before = 0, ""
    for entry in sorted(tensors, key=itemgetter(3, 4)):
        if entry.begin > position:
            what = f"{entry.begin - position} bytes before the tensor belong to none"
            raise flaw(file, entry.name, what, f"begin {entry.begin}", str(position))
        if entry.begin < position:
            what = f"overlaps {short(before)}"
            raise flaw(file, entry.name, what, f"begin {entry.begin}", str(position))
        position, before = entry.end, entry.name
    found, expected = f"{data_nbytes} bytes of data", str(position)
    if position > data_nbytes:
        cut = min((e for e in tensors if e.end > data_nbytes), key=itemgetter(3))
        what = f"truncated from this tensor on: {position - data_nbytes} bytes are missing"
        raise flaw(file, cut.name, what, found, expected, AGAIN)
    if position < data_nbytes:
        what = f"{data_nbytes - position} bytes after the last tensor belong to none"
        raise flaw(file, None, what, found, expected)


def encode_header(tensors: Sequence[TensorEntry], metadata: Mapping[str, str] | None) -> bytes:
    """The length bytes, the JSON and its padding to 8, byte for byte as safetensors writes them.

    The order given is kept. (safetensors itself puts wide dtypes first, then goes by name, and
    shuffles metadata of several keys.)

    Raises InvalidCheckpoint for names that cannot stand in a header or stand there twice, and for a
    header above the format's limit, which nobody could read.
    """
    spell = json.JSONEncoder(ensure_ascii=False).encode
    items = []
    if metadata is not None:
        pairs = ",".join(f"{spell(key)}:{spell(text)}" for key, text in metadata.items())
        items.append(f'"{_METADATA}":{{{pairs}}}')
    seen = {"", _METADATA}
    for name, dtype, shape, begin, end in tensors:
        if name in seen or "\0" in name:
            raise flaw("header", name, "not usable as a tensor's name, or used twice")
        seen.add(name)
        sizes = ",".join(map(str, shape))
        items.append(
            f'{spell(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'
        )
    try:
        content = f"{{{','.join(items)}}}".encode()
    except UnicodeEncodeError as error:
        raise flaw("header", None, "a name or metadata holds a lone surrogate") from error
    content += b" " * (-len(content) % 8)
    if len(content) > MAX_HEADER_NBYTES:
        what, hint = "too many tensors for one file", "split the checkpoint into more files"
        found, expected = f"a header of {len(content)} bytes", f"at most {MAX_HEADER_NBYTES}"
        raise flaw("header", None, what, found, expected, hint)
    return struct.pack("<Q", len(content)) + content
