"""The strict header reader and the header writer, against safetensors and a table of lies."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import random
import re
import struct
import tracemalloc
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from mxfp4prep import safefile
from mxfp4prep.errors import InvalidCheckpoint, IOFailed
from mxfp4prep.safefile import (
    DTYPE_BITS,
    TensorEntry,
    encode_header,
    header_length,
    parse_header,
    read_header,
)

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.rglob("*.safetensors"))
KIB = b"\1" * 1024
AGAIN = "download the file again"
LONG = "n" * 65536
NINES = "9" * 5000
BEYOND_FLOATS = 2**53 + 1  # what is read as a float becomes 2^53


def file_of(header: str | bytes, data: bytes = b"") -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(dtype: str = "U8", shape: str = "[4]", offsets: str = "[0,4]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def only(dtype: str = "U8", shape: str = "[4]", offsets: str = "[0,4]") -> str:
    return f'{{"a":{tensor(dtype, shape, offsets)}}}'


def opened(path: Path) -> tuple[dict[str, tuple[str, list[int]]], dict[str, str] | None]:
    """What safetensors itself makes of a file: dtype and shape by name, metadata."""
    with safe_open(path, "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return {k: (v.get_dtype(), v.get_shape()) for k, v in slices.items()}, file.metadata()


def read(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return read_header(path)


# Valid files


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DATA)))
def test_recorded_files_read_as_safetensors_reads_them_and_encode_to_their_own_bytes(
    path: Path,
) -> None:
    header = read_header(path, keep_raw=True)
    content = path.read_bytes()
    tensors, metadata = opened(path)
    assert {e.name: (e.dtype, list(e.shape)) for e in header.tensors} == tensors
    assert header.metadata == metadata
    assert header.file_nbytes == len(content)
    assert header.raw == content[: header.data_start]
    assert encode_header(header.tensors, header.metadata) == header.raw
    assert read_header(path).raw == b""
    for name, stored in safetensors.deserialize(content)[:5]:
        entry = next(e for e in header.tensors if e.name == name)
        start = header.data_start
        assert content[start + entry.begin : start + entry.end] == bytes(stored["data"])
        assert entry.nbytes == len(stored["data"])


def test_all_recorded_checkpoints_were_read() -> None:
    assert len(FILES) >= 16


TORCH_DTYPES = re.findall(
    r"\w+",
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool "
    "complex64 float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz "
    "float4_e2m1fn_x2",
)
METADATA: list[dict[str, str] | None] = [
    None,
    {},
    {"format": "pt"},
    {'k"\\/\b\f\n\r\t\x01\x1f\x7fé\u2028😀': 'v"\\/\b\f\n\r\t\x00\x1f\x7fé\u2029😀'},
]


@pytest.mark.parametrize("metadata", METADATA, ids=["none", "empty", "pt", "escapes"])
def test_encode_equals_the_writer_of_safetensors_for_every_torch_dtype(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    tensors = {
        f"layer.{i}.{name}": torch.zeros(16 * i, dtype=torch.uint8).view(getattr(torch, name))
        for i, name in enumerate(TORCH_DTYPES)
    } | {'a"\\/\b\f\n\r\t\x01\x1f\x7fé\u2028😀..': torch.zeros(2, 3), "scalar": torch.tensor(1.0)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata)
    header = read_header(tmp_path / "model.safetensors", keep_raw=True)
    assert {e.name for e in header.tensors} == set(tensors)
    assert {e.dtype for e in header.tensors} == set(DTYPE_BITS) - {"F6_E2M3", "F6_E3M2"}
    assert next(e for e in header.tensors if e.name == "scalar").shape == ()
    assert header.metadata == metadata
    assert encode_header(header.tensors, header.metadata) == header.raw


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        unique=True,
        max_size=6,
    ),
    metadata=st.none()
    | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text(st.characters(exclude_categories=["Cs"])),
        min_size=1,
        max_size=1,
    ),
)
def test_encode_equals_the_writer_of_safetensors_for_any_names(
    names: list[str], metadata: dict[str, str] | None
) -> None:
    arrays = {name: np.zeros(len(name), np.uint8) for name in names if name != "__metadata__"}
    content = safetensors.numpy.save(arrays, metadata)
    length = header_length(content[:512], len(content), "f")
    raw, data_nbytes = content[: 8 + length], len(content) - 8 - length
    tensors, found = parse_header(raw[8:], data_nbytes, "f")
    assert {entry.name for entry in tensors} == set(arrays)
    assert found == metadata
    assert encode_header(tensors, found) == raw


def test_encode_keeps_the_order_it_is_given(tmp_path: Path) -> None:
    entries = (
        TensorEntry("z", "U8", (2, 2), 4, 8),
        TensorEntry("a", "F32", (1,), 0, 4),
        TensorEntry("empty", "F4", (0, 3), 4, 4),
    )
    metadata = {"z": "1", "a": "2"}
    raw = encode_header(entries, metadata)
    header = read(tmp_path / "f", raw + b"\1" * 8)
    assert header.tensors == entries
    assert list(header.metadata) == ["z", "a"]
    assert len(raw) % 8 == 0
    assert opened(tmp_path / "f")[0]["empty"] == ("F4", [0, 3])


@pytest.mark.parametrize("name", ["", "__metadata__", "a\0b", "twice", "\ud800"])
def test_encode_refuses_names_that_cannot_stand_in_a_header(name: str) -> None:
    entries = [TensorEntry("twice", "U8", (0,), 0, 0), TensorEntry(name, "U8", (0,), 0, 0)]
    with pytest.raises(InvalidCheckpoint):
        encode_header(entries, None)


def test_p73_encode_never_makes_a_header_that_no_reader_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [TensorEntry("x", "U8", (0,), 0, 0)]
    nbytes = len(encode_header(entries, None)) - 8
    monkeypatch.setattr(safefile, "MAX_HEADER_NBYTES", nbytes)
    encode_header(entries, None)
    monkeypatch.setattr(safefile, "MAX_HEADER_NBYTES", nbytes - 1)
    with pytest.raises(InvalidCheckpoint, match="too many tensors for one file") as caught:
        encode_header(entries, None)
    assert "more files" in (caught.value.hint or "")


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items())
def test_sizes_of_dtypes_are_those_of_safetensors(tmp_path: Path, dtype: str, bits: int) -> None:
    path = tmp_path / "f.safetensors"
    read(path, file_of(only(dtype, "[8]", f"[0,{bits}]"), bytes(bits)))
    assert opened(path)[0] == {"a": (dtype, [8])}
    wrong = file_of(only(dtype, "[8]", f"[0,{bits + 1}]"), bytes(bits + 1))
    with pytest.raises(InvalidCheckpoint, match=rf"f.safetensors: a: .*expected {bits}$"):
        read(path, wrong)
    with pytest.raises(SafetensorError):
        opened(path)


def test_floats_are_those_that_torch_computes_with() -> None:
    assert {"BF16", "F16", "F32"} == safefile.FLOAT_DTYPES


def test_dtypes_are_all_that_safetensors_knows(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(file_of(only("NONE"), bytes(4)))
    with pytest.raises(SafetensorError) as caught:
        opened(tmp_path / "f")
    known = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert {name.strip("`") for name in known.split(", ")} == set(DTYPE_BITS)


VALID = {
    "no tensors": ("{}", b""),
    "no tensors, padded": ("{}      ", b""),
    "empty metadata": ('{"__metadata__":{}}', b""),
    "metadata last": (f'{{"a":{tensor()},"__metadata__":{{"k":"v"}}}}', b"1234"),
    "metadata like a tensor": (
        '{"__metadata__":{"dtype":"a","shape":"b","data_offsets":"c"}}',
        b"",
    ),
    "tensors named like fields": (
        f'{{"dtype":{tensor()},"shape":{tensor(offsets="[4,8]")},'
        f'"data_offsets":{tensor(offsets="[8,12]")}}}',
        b"12345678abcd",
    ),
    "fields in another order": ('{"a":{"shape":[4],"data_offsets":[0,4],"dtype":"U8"}}', b"1234"),
    "whitespace within": (
        '{ "a"\t:\r\n{"dtype": "U8" ,"shape":[ 4 ],"data_offsets":[0, 4]} } ',
        b"1234",
    ),
    "scalar": (only("F32", "[]"), b"1234"),
    "empty tensors": (
        f'{{"a":{tensor(shape="[0]", offsets="[0,0]")},"b":{tensor()},'
        f'"c":{tensor(shape="[3,0]", offsets="[4,4]")}}}',
        b"1234",
    ),
    "tensors out of order": (
        f'{{"b":{tensor(offsets="[4,8]")},"a":{tensor(offsets="[0,4]")}}}',
        b"12345678",
    ),
    "negative zero in a name": (f'{{"a-0,-0]-0":{tensor()}}}', b"1234"),
    "escaped surrogate pair": (f'{{"\\ud83d\\ude00":{tensor()}}}', b"1234"),
    "escaped backslash before ud": (f'{{"a\\\\ud800":{tensor()}}}', b"1234"),
    "control characters": (f'{{"a\\u001b[31m\\n\\u202e":{tensor()}}}', b"1234"),
    "long name": (f'{{"{LONG}":{tensor()}}}', b"1234"),
    "escaped ascii": (f'{{"\\u0061":{tensor()}}}', b"1234"),
    "dangerous path": (f'{{"../../etc/passwd":{tensor()}}}', b"1234"),
    "largest size": (only(shape=f"[0,{2**63 - 1}]", offsets="[0,0]"), b""),
    "whole F4 bytes": (only("F4", "[2,4]"), b"1234"),
}


@pytest.mark.parametrize("case", VALID)
def test_valid_headers_are_read_as_safetensors_reads_them(tmp_path: Path, case: str) -> None:
    header = read(tmp_path / "f", file_of(*VALID[case]))
    tensors, metadata = opened(tmp_path / "f")
    assert {e.name: (e.dtype, list(e.shape)) for e in header.tensors} == tensors
    assert header.metadata == metadata
    if "out of order" in case:
        assert [e.begin for e in header.tensors] == [4, 0]


# Malformed headers: the JSON text, the data, a piece of the message

A = tensor()
MALFORMED: dict[str, tuple[str | bytes, bytes, str]] = {
    # JSON
    "not JSON": ("{nonsense}", b"", "not valid JSON"),
    "cut JSON": (f'{{"a":{A}', b"1234", "not valid JSON"),
    "unclosed string": ('{"a', b"", "not valid JSON"),
    "two objects": (f'{{"a":{A}}}{{}}', b"1234", "not valid JSON"),
    "trailing comma": (f'{{"a":{A},}}', b"1234", "not valid JSON"),
    "single quotes": ("{'a':{}}", b"", "not valid JSON"),
    "raw newline in a name": (f'{{"a\nb":{A}}}', b"1234", "not valid JSON"),
    "bad escape": (f'{{"\\x41":{A}}}', b"1234", "not valid JSON"),
    "comment": (f'{{"a":{A}/**/}}', b"1234", "not valid JSON"),
    "leading zero": (only(shape="[04]"), b"1234", "not valid JSON"),
    "plus sign": (only(shape="[+4]"), b"1234", "not valid JSON"),
    "not UTF-8": (b'{"\xff":{}}', b"", "not UTF-8"),
    "UTF-8 surrogate": (b'{"\xed\xa0\x80":{}}', b"", "not UTF-8"),
    "overlong UTF-8": (b'{"\xc0\x80":{}}', b"", "not UTF-8"),
    "UTF-16": ("{ ".encode("utf-16-le"), b"", "not valid JSON"),
    "lone surrogate": (f'{{"\\ud800":{A}}}', b"1234", "f: \\ud800: lone surrogate"),
    "lone low surrogate": (f'{{"x\\uDC00":{A}}}', b"1234", "lone surrogate"),
    "surrogate in metadata": ('{"__metadata__":{"a":"\\uD83D"}}', b"", "lone surrogate"),
    "surrogate in a metadata key": ('{"__metadata__":{"\\udfff":"a"}}', b"", "lone surrogate"),
    "depth 1e5": ('{"a":' + "[" * 100_000, b"", "nested too deeply"),
    "depth 1e5 of objects": ('{"a":' * 100_000, b"", "nested too deeply"),
    "depth 900 in a shape": (
        only(shape="[" * 900 + "]" * 900),
        b"",
        "f: a: shape is wrong: found [[...]]",
    ),
    "depth 300 of objects": ('{"a":' * 300 + "1" + "}" * 300, b"", "f: a: unknown field 'a'"),
    "list in place of the object": ("[]", b"", "begins wrong"),
    "string": ('"text"', b"", "begins wrong"),
    "null": ("null", b"", "begins wrong"),
    "leading space": (f' {{"a":{A}}}', b"1234", "begins wrong"),
    "byte order mark": (b"\xef\xbb\xbf{}", b"", "begins wrong"),
    "newline padding": (f'{{"a":{A}}}\n', b"1234", "padded with spaces only: found '\\n'"),
    "tab padding": (f'{{"a":{A}}} \t', b"1234", "padded with spaces only"),
    "NUL padding": (f'{{"a":{A}}}\0\0', b"1234", "padded with spaces only: found '\\x00'"),
    "carriage return, then space": (f'{{"a":{A}}}\r ', b"1234", "padded with spaces only"),
    # Keys
    "tensor twice": (f'{{"a":{A},"a":{A}}}', b"1234", "f: a: is there twice"),
    "tensor twice, once wrong": (
        f'{{"a":{tensor("X")},"a":{A}}}',
        b"1234",
        "f: a: is there twice",
    ),
    "tensor twice, spelled otherwise": (f'{{"a":{A},"\\u0061":{A}}}', b"1234", "is there twice"),
    "field twice": (
        '{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b"1234",
        "f: a: the field 'dtype' is there twice",
    ),
    "field twice in place of another": (
        '{"a":{"dtype":"U8","shape":[4],"shape":[4]}}',
        b"1234",
        "the field 'shape' is there twice",
    ),
    "metadata twice": (
        '{"__metadata__":{},"__metadata__":{}}',
        b"",
        "__metadata__: is there twice",
    ),
    "metadata key twice": ('{"__metadata__":{"a":"1","a":"2"}}', b"", "the key 'a' is there twice"),
    "unknown field": (
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}}',
        b"1234",
        "f: a: unknown field 'x'",
    ),
    "misspelled field": (
        '{"a":{"dtype":"U8","Shape":[4],"data_offsets":[0,4]}}',
        b"1234",
        "'Shape'",
    ),
    "no dtype": ('{"a":{"shape":[4],"data_offsets":[0,4]}}', b"1234", "f: a: dtype is missing"),
    "no shape": ('{"a":{"dtype":"U8","data_offsets":[0,4]}}', b"1234", "f: a: shape is missing"),
    "no offsets": ('{"a":{"dtype":"U8","shape":[4]}}', b"1234", "data_offsets is missing"),
    "no fields": ('{"a":{}}', b"", "f: a: dtype is missing"),
    "empty name": (f'{{"":{A}}}', b"1234", "f: (empty name): a tensor's name must not be empty"),
    "NUL in a name": (f'{{"a\\u0000b":{A}}}', b"1234", "f: a\\x00b: a tensor's name must not"),
    "offsets twice": (
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4]}}',
        b"1234",
        "f: a: the field 'data_offsets' is there twice",
    ),
    "field twice, spelled otherwise": (
        '{"a":{"dtype":"U8","dt\\u0079pe":"U8","shape":[4],"data_offsets":[0,4]}}',
        b"1234",
        "f: a: the field 'dtype' is there twice",
    ),
    "metadata key twice, spelled otherwise": (
        '{"__metadata__":{"a":"1","\\u0061":"1"}}',
        b"",
        "the key 'a' is there twice",
    ),
    "metadata twice, spelled otherwise": (
        '{"__metadata__":{},"__metadata_\\u005f":{}}',
        b"",
        "__metadata__: is there twice",
    ),
    "64 KiB name twice": (f'{{"{LONG}":{A},"{LONG}":{A}}}', b"1234", "is there twice"),
    "64 KiB name in a duplicate field": (
        f'{{"a":{{"{LONG}":1,"{LONG}":1}}}}',
        b"1234",
        "f: a: the field 'nnn",
    ),
    "lone surrogate of a wrong tensor": (f'{{"\\ud800":{tensor("X")}}}', b"1234", "f: \\ud800: "),
    "surrogates the wrong way round": (f'{{"\\udc00\\ud800":{A}}}', b"1234", "lone surrogate"),
    # Types
    "tensor is an array": ('{"a":["U8",[4],[0,4]]}', b"1234", "f: a: not a JSON object"),
    "tensor is null": ('{"a":null}', b"", "f: a: not a JSON object: found None"),
    "tensor is a number": ('{"a":1}', b"", "f: a: not a JSON object: found 1"),
    "tensor is an empty array": ('{"a":[]}', b"", "f: a: not a JSON object: found []"),
    "top object is a tensor": (A, b"1234", "f: dtype: not a JSON object: found 'U8'"),
    "metadata null": ('{"__metadata__":null}', b"", "__metadata__: not a JSON object"),
    "metadata array": ('{"__metadata__":[]}', b"", "__metadata__: not a JSON object"),
    "metadata number": ('{"__metadata__":{"a":1}}', b"", "'a' is not a string: found 1"),
    "metadata null value": ('{"__metadata__":{"a":null}}', b"", "'a' is not a string"),
    "metadata nested": ('{"__metadata__":{"a":{}}}', b"", "'a' is not a string"),
    "metadata is a tensor": (f'{{"__metadata__":{A}}}', b"", "'shape' is not a string: found [4]"),
    "dtype unknown": (only("F31"), b"1234", "f: a: unknown dtype: found 'F31'"),
    "dtype lower case": (only("u8"), b"1234", "unknown dtype"),
    "dtype number": (
        '{"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}',
        b"1234",
        "unknown dtype",
    ),
    "dtype list": ('{"a":{"dtype":[],"shape":[4],"data_offsets":[0,4]}}', b"1234", "found []"),
    "dtype object": ('{"a":{"dtype":{},"shape":[4],"data_offsets":[0,4]}}', b"", "a JSON object"),
    "dtype NaN": ('{"a":{"dtype":NaN,"shape":[4],"data_offsets":[0,4]}}', b"", "found nan"),
    "tensor is Infinity": ('{"a":Infinity}', b"", "f: a: not a JSON object: found inf"),
    "metadata NaN": ('{"__metadata__":{"a":NaN}}', b"", "'a' is not a string: found nan"),
    "metadata 2^64": (f'{{"__metadata__":{{"a":{2**64}}}}}', b"", f"found {2**64}"),
    "dtype null": ('{"a":{"dtype":null,"shape":[4],"data_offsets":[0,4]}}', b"1234", "dtype"),
    "shape null": (only(shape="null"), b"1234", "f: a: shape is wrong: found None"),
    "shape number": (only(shape="4"), b"1234", "f: a: shape is wrong: found 4"),
    "shape object": (
        only(shape="{}"),
        b"1234",
        "shape is wrong: found a JSON object",
    ),
    "shape string": (only(shape='"4"'), b"1234", "shape is wrong: found '4'"),
    "shape float": (only(shape="[4.0]"), b"1234", "shape is wrong: found [4.0]"),
    "shape exponent": (only(shape="[4e0]"), b"1234", "shape is wrong"),
    "shape 1e400": (only(shape="[1e400]"), b"1234", "shape is wrong: found [inf]"),
    "shape NaN": (only(shape="[NaN]"), b"1234", "f: a: shape is wrong: found [nan]"),
    "shape Infinity": (only(shape="[Infinity]"), b"1234", "shape is wrong"),
    "shape bool": (only(shape="[4,true]"), b"1234", "found [4, True]"),
    "shape nested": (only(shape="[[4]]"), b"1234", "shape is wrong: found [[...]]"),
    "shape negative": (only(shape="[-4]"), b"1234", "shape is wrong: found [-4]"),
    "shape twice negative": (only(shape="[-2,-2]"), b"1234", "shape is wrong"),
    "shape -0": (only(shape="[-0]", offsets="[0,0]"), b"", "shape is wrong"),
    "shape -Infinity": (only(shape="[-Infinity]"), b"1234", "shape is wrong: found [-inf]"),
    "shape 1e400 negative": (only(shape="[-1e400]"), b"1234", "shape is wrong: found [-inf]"),
    "shape 1e-400": (only(shape="[1e-400]", offsets="[0,0]"), b"", "found [0.0]"),
    "shape -0.0": (only(shape="[-0.0]", offsets="[0,0]"), b"", "found [-0.0]"),
    "shape 2^53 + 1": (
        only(shape=f"[{BEYOND_FLOATS}]"),
        b"1234",
        f"found 4 bytes, expected {BEYOND_FLOATS}",
    ),
    "shape 2^53 + 1 as a float": (only(shape=f"[{BEYOND_FLOATS}.0]"), b"1234", "shape is wrong"),
    "shape 2^63": (
        only(shape=f"[0,{2**63}]", offsets="[0,0]"),
        b"",
        "shape is wrong",
    ),
    "shape 2^64": (only(shape=f"[{2**64}]"), b"1234", "shape is wrong"),
    "shape 2^64 + 4": (only(shape=f"[{2**64 + 4}]"), b"1234", "shape is wrong"),
    "shape overflows": (
        only(shape=f"[{2**32},{2**32}]", offsets="[0,0]"),
        b"",
        "f: a: shape overflows",
    ),
    "shape overflows, then 0": (
        only(shape=f"[{2**40},{2**40},0]", offsets="[0,0]"),
        b"",
        "shape overflows",
    ),
    "shape of 5000 digits": (
        only(shape=f"[{NINES}]"),
        b"1234",
        "absurdly long",
    ),
    "shape of 4000 digits": (
        only(shape=f"[{NINES[:4000]}]"),
        b"1234",
        "(4000 characters)",
    ),
    "offsets null": (only(offsets="null"), b"1234", "data_offsets are wrong"),
    "offsets one": (only(offsets="[4]"), b"1234", "data_offsets are wrong"),
    "offsets three": (only(offsets="[0,4,4]"), b"1234", "found [0, 4, 4]"),
    "offsets object": (only(offsets="{}"), b"1234", "data_offsets are wrong"),
    "offsets float": (only(offsets="[0,4.0]"), b"1234", "found [0, 4.0]"),
    "offsets bool": (
        only(shape="[1]", offsets="[false,1]"),
        b"1",
        "found [False, 1]",
    ),
    "offsets string": (only(offsets='["0","4"]'), b"1234", "found ['0', '4']"),
    "offsets negative": (only(offsets="[-4,0]"), b"1234", "found [-4, 0]"),
    "offsets NaN": (only(offsets="[NaN,4]"), b"1234", "found [nan, 4]"),
    "offsets Infinity": (only(offsets="[0,Infinity]"), b"1234", "found [0, inf]"),
    "offsets 1e400": (only(offsets="[0,1e400]"), b"1234", "found [0, inf]"),
    "offsets 2^53 + 1": (
        only(offsets=f"[{BEYOND_FLOATS},{BEYOND_FLOATS + 4}]"),
        b"1234",
        f"f: a: {BEYOND_FLOATS} bytes before the tensor belong to none",
    ),
    "offsets of 5000 digits": (only(offsets=f"[0,{NINES}]"), b"1234", "f: a: a number in"),
    "offsets -0": (only(offsets="[-0,4]"), b"1234", "found [-0.0, 4]"),
    "offsets reversed": (only(offsets="[4,0]"), b"1234", "found [4, 0]"),
    "offsets 2^63": (
        only(shape="[0]", offsets=f"[{2**63},{2**63}]"),
        b"",
        "data_offsets are wrong",
    ),
    "offsets 2^64": (only(offsets=f"[{2**64},{2**64 + 4}]"), b"1234", "are wrong"),
    # Sizes
    "size too small": (only(shape="[5]"), b"1234", "found 4 bytes, expected 5"),
    "size too large": (only("BF16", "[3]", "[0,8]"), b"12345678", "fit BF16 [3]"),
    "size of the second": (
        f'{{"a":{A},"b":{tensor(offsets="[4,7]")}}}',
        b"1234567",
        "f: b: data_offsets do not fit U8 [4]: found 3 bytes, expected 4",
    ),
    "F4 of odd count": (only("F4", "[3,3]"), b"1234", "F4 [3, 3] is not a whole"),
    "F6 of odd count": (only("F6_E2M3", "[5]"), b"1234", "whole number of bytes"),
    "F4 counted as bytes": (only("F4", "[4]"), b"1234", "found 4 bytes, expected 2"),
    "hole at the start": (
        only(offsets="[1,5]"),
        b"12345",
        "f: a: 1 bytes before the tensor belong to none",
    ),
    "hole between": (
        f'{{"a":{A},"b":{tensor(offsets="[6,10]")}}}',
        b"1234567890",
        "f: b: 2 bytes before the tensor",
    ),
    "overlap": (
        f'{{"a":{A},"b":{tensor(offsets="[3,7]")}}}',
        b"1234567",
        "f: b: overlaps a: found begin 3, expected 4",
    ),
    "alias": (f'{{"a":{A},"b":{A}}}', b"1234", "overlaps a"),
    "inside": (
        f'{{"a":{A},"b":{tensor(shape="[2]", offsets="[1,3]")}}}',
        b"1234",
        "f: b: overlaps a",
    ),
    "empty tensor inside": (
        f'{{"a":{A},"b":{tensor(shape="[0]", offsets="[2,2]")}}}',
        b"1234",
        "f: b: overlaps a",
    ),
    "empty tensor beyond": (
        f'{{"a":{A},"b":{tensor(shape="[0]", offsets="[5,5]")}}}',
        b"1234",
        "f: b: 1 bytes before the tensor",
    ),
    "trailing byte": (only(), b"12345", "f: 1 bytes after the last tensor belong to none"),
    "data without tensors": ("{}", b"1", "1 bytes after the last tensor"),
    "missing byte": (only(), b"123", "f: a: truncated from this tensor on: 1 bytes"),
    "missing tensors": (
        f'{{"c":{tensor(offsets="[8,12]")},"b":{tensor(offsets="[4,8]")},"a":{A}}}',
        b"12345",
        "f: b: truncated from this tensor on: 7 bytes are missing",
    ),
    "absurd offsets": (
        only(shape=f"[{2**59}]", offsets=f"[0,{2**59}]"),
        b"1234",
        f"{2**59 - 4} bytes are missing",
    ),
    "hostile name": (f'{{"\\u001b[2J\\u202e\\n":{tensor("X")}}}', b"1234", "\\x1b[2J\\u202e\\n"),
    "endless name": (f'{{"{LONG}":{tensor("X")}}}', b"1234", "n... (65536 characters): unk"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers_are_refused_by_name(tmp_path: Path, case: str, tried: Any) -> None:
    header, data, fragment = MALFORMED[case]
    with pytest.raises(InvalidCheckpoint) as caught:
        read(tmp_path / "f", file_of(header, data))
    message = str(caught.value)
    assert fragment in message
    assert message.startswith("f: ")
    assert message.isprintable()
    assert len(message) < 700
    assert caught.value.exit_code == 3
    place = caught.value.where.removeprefix("f").removeprefix(": ")
    assert bool(place) is (case not in NO_TENSOR), "the tensor is named where there is one"
    tried("H1")


NO_TENSOR = re.findall(
    r"\S.*\S",
    """not JSON
    cut JSON
    unclosed string
    two objects
    trailing comma
    single quotes
    raw newline in a name
    bad escape
    comment
    not UTF-8
    UTF-8 surrogate
    overlong UTF-8
    UTF-16
    depth 1e5
    depth 1e5 of objects
    list in place of the object
    string
    null
    leading space
    byte order mark
    newline padding
    tab padding
    NUL padding
    carriage return, then space
    trailing byte
    data without tensors""",
)
"""Cases that are wrong outside of any tensor's entry, or where no entry can be made out."""


def test_cases_without_a_tensor_are_cases() -> None:
    assert set(NO_TENSOR) < set(MALFORMED)


def test_errors_use_the_name_that_the_caller_gives(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(file_of(only(), b"123"))
    with pytest.raises(InvalidCheckpoint, match=r"^sub/model\.safetensors: a: truncated"):
        read_header(tmp_path / "f", name="sub/model.safetensors")


# Other files

OTHER: dict[str, tuple[bytes, str, str]] = {  # content, what is said, the hint
    "empty": (b"", "too short for a safetensors file: found 0 bytes", "download"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n",
        "git-lfs pointer",
        "git lfs pull",
    ),
    "zip": (b"PK\x03\x04\x00\x00\x08\x08" + KIB, "not safetensors, but a zip archive", "convert"),
    "pickle 2": (pickle.dumps({"a": [1] * 50}, 2), "not safetensors, but a pickle", "convert"),
    "pickle 4": (pickle.dumps({"a": [1] * 50}, 4), "not safetensors, but a pickle", "convert"),
    "short pickle": (b"\x80\x02}q\x00.", "not safetensors, but a pickle", "convert"),
    "HTML": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "HTML", "download"),
    "HTML after a newline": (b"\n <HTML>Forbidden</HTML>", "HTML", "download"),
    "short HTML": (b"<html>", "HTML", "download"),
    "JSON": (b'{"error":"Entry not found"}', "plain JSON text", "download"),
    "GGUF of 123 tensors": (b"GGUF\x03\x00\x00\x00{" + KIB, "GGUF", "safetensors"),
    "gzip that begins like a length": (gzip.compress(KIB, mtime=0), "gzip", "decompress"),
    "8 bytes like a pickle": (
        struct.pack("<Q", 0x280),
        "truncated within the header: 640 bytes are missing",
        "download",
    ),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + KIB, "GGUF", "safetensors"),
    "NumPy": (b"\x93NUMPY\x01\x00v\x00" + KIB, "NumPy", "convert"),
    "gzip": (gzip.compress(KIB), "gzip", "decompress"),
    "zeros": (bytes(4096), "the header is empty", "download"),
    "8 zeros": (bytes(8), "the header is empty", "download"),
    "short": (b"\1\0\0", "too short for a safetensors file: found 3 bytes", "download"),
    "noise": (bytes(range(200, 256)) * 8, "this is not safetensors", "download"),
    "length 2^60": (struct.pack("<Q", 2**60) + b"{" + KIB, f"found {2**60} bytes", "split"),
    "length 2^64 - 1": (b"\xff" * 8 + b"{" + KIB, f"found {2**64 - 1} bytes", "split"),
    "length 100,000,001": (
        struct.pack("<Q", 100_000_001) + b"{}",
        "larger than the format",
        "split",
    ),
    "length 100,000,000": (
        struct.pack("<Q", 10**8) + b"{}",
        "99999998 bytes are missing",
        "download",
    ),
    "length 3 of 2": (
        struct.pack("<Q", 3) + b"{}",
        "1 bytes are missing: found 10 bytes, expected at least 11",
        "download",
    ),
    "plausible noise": (struct.pack("<Q", 20) + KIB, "begins wrong: found b'\\x01'", "download"),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_files_are_recognised(tmp_path: Path, case: str, tried: Any) -> None:
    content, fragment, hint = OTHER[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidCheckpoint) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # an absurd length allocates nothing
    finally:
        tracemalloc.stop()
    assert fragment in str(caught.value)
    assert str(caught.value).startswith("model.safetensors: ")
    assert hint in (caught.value.hint or "")
    tried("H1")


REFUSED_BY_LENGTH = [
    (b"12345", "too short for a safetensors file: found 5 bytes, expected at least 8", AGAIN),
    (bytes(16), "the header is empty", AGAIN),
    (
        struct.pack("<Q", 100_000_001) + b"{" + bytes(64),
        "the header is larger than the format allows, or this is not safetensors: found 100000001 "
        "bytes, expected at most 100000000",
        f"if it is real, split the checkpoint into more files; else {AGAIN}",
    ),
    (
        b"GGUF" + bytes(60),
        "not safetensors, but GGUF",
        "use the safetensors checkpoint of this model",
    ),
]


@pytest.mark.parametrize(("content", "message", "hint"), REFUSED_BY_LENGTH)
def test_a_refusal_by_the_first_bytes_is_told_whole(
    tmp_path: Path, content: bytes, message: str, hint: str
) -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        read(tmp_path / "f", content)
    assert str(caught.value) == f"f: {message}"
    assert caught.value.hint == hint


@pytest.mark.parametrize("reader", [read_header, safefile.read_raw_header])
def test_no_file_stays_open(tmp_path: Path, reader: Any) -> None:
    (tmp_path / "f").write_bytes(small_file())
    (tmp_path / "bad").write_bytes(b"12345")
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(3):
        assert reader(tmp_path / "f")
        with contextlib.suppress(InvalidCheckpoint):
            reader(tmp_path / "bad")
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_a_header_length_that_begins_like_a_pickle_is_still_a_header(tmp_path: Path) -> None:
    header = "{}" + " " * (0x280 - 2)
    content = file_of(header)
    assert content.startswith(b"\x80\x02")
    assert read(tmp_path / "f", content).data_start == 8 + 0x280


def test_a_real_header_above_the_limit_says_so(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 110_000_000) + b'{"a":')
        file.truncate(120_000_000)
    with pytest.raises(
        InvalidCheckpoint, match="found 110000000 bytes, expected at most 100000000"
    ):
        read_header(path)


def test_a_folder_or_nothing_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="not a regular file"):
        read_header(tmp_path)
    with pytest.raises(IOFailed, match="no such file"):
        read_header(tmp_path / "absent.safetensors")


# Truncation


def small_file() -> bytes:
    arrays = {"b": np.arange(6, dtype=np.float32), "a": np.arange(7, dtype=np.uint8)}
    return safetensors.numpy.save({**arrays, "e": np.zeros((0, 2), np.int64)}, {"format": "pt"})


def test_truncation_at_every_byte_is_refused_with_the_count(tmp_path: Path, tried: Any) -> None:
    arrays = {f"model.layers.{i}.weight": np.arange(40 + i, dtype=np.uint8) for i in range(32)}
    content = safetensors.numpy.save({**arrays, "e": np.zeros((0, 2), np.int64)}, {"format": "pt"})
    whole = read(tmp_path / "whole", content)
    lengths = random.Random(0).sample(range(whole.data_start, len(content)), 256)
    tried("H4", whole.data_start + len(lengths))
    (tmp_path / "f").write_bytes(content)
    for nbytes in [*sorted(lengths, reverse=True), *reversed(range(whole.data_start))]:
        os.truncate(tmp_path / "f", nbytes)
        with pytest.raises(InvalidCheckpoint) as caught:
            read_header(tmp_path / "f")
        message = str(caught.value)
        if nbytes >= whole.data_start:
            assert f"{len(content) - nbytes} bytes are missing" in message
            at = nbytes - whole.data_start
            cut = next(e.name for e in whole.tensors if e.begin <= at < e.end)
            assert message.startswith(f"f: {cut}: truncated")
        elif nbytes >= 8:
            assert f"{whole.data_start - nbytes} bytes are missing" in message
        else:
            assert f"too short for a safetensors file: found {nbytes} bytes" in message


def test_flipped_header_bits_are_refused_or_mean_the_same_to_safetensors(tmp_path: Path) -> None:
    content = small_file()
    start = read(tmp_path / "f", content).data_start
    refused, bits = 0, range(0, start * 8, 3)  # a third of them, each position of a byte in turn
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        refused += not agrees_with_safetensors(tmp_path / "f", bytes(flipped))
    assert (
        0.7 * len(bits) < refused < len(bits)
    )  # the rest: other names, dtypes of the same width, metadata


# Against safetensors: what we accept, it accepts with the same meaning

# What we refuse and safetensors reads: the whole list, by our message.
STRICTER = (
    "is there twice",
    "unknown field",
    "not a JSON object",  # null metadata; an array in place of a tensor's object
    "padded with spaces only",
    "begins wrong",  # whitespace before the object
    "a tensor's name must not be empty or hold a NUL",
    "shape is wrong",  # a size of 2^63 and more, in an empty tensor
    "shape overflows",
)


def refusal(path: Path, content: bytes) -> str | None:
    """Our message, None if we accept."""
    try:
        read(path, content)
    except InvalidCheckpoint as error:
        return str(error)
    return None


def agrees_with_safetensors(path: Path, content: bytes) -> bool:
    """Whether we accept; if we do, asserts that safetensors does and sees the same."""
    message = refusal(path, content)
    if message is not None:
        try:
            opened(path)
        except SafetensorError:
            return False
        assert any(words in message for words in STRICTER), message
        return False
    header = read_header(path)
    tensors, metadata = opened(path)
    assert {e.name: (e.dtype, list(e.shape)) for e in header.tensors} == tensors
    assert len(header.tensors) == len(tensors)
    assert header.metadata == metadata
    for name, stored in safetensors.deserialize(content):
        entry = next(e for e in header.tensors if e.name == name)
        begin = header.data_start + entry.begin
        assert content[begin : begin + entry.nbytes] == bytes(stored["data"])
    return True


FRAGMENTS = re.findall(
    r"\S+|\s",
    r"""0 1 2 3 4 5 7 8 24 31 -0 -1 1.0 1e1 9223372036854775807 9223372036854775808 true null NaN
    "" "U8" "I8" "F32" "F4" "F6_E2M3" "F8_E8M0" "C64" "shape" "dtype" "data_offsets" "a" "b" "c"
    [] [0] [1] [6] [7] [24] [2,3] [12,4] [0,7] [7,31] [24,31] [0,24] [31,31] [0,31] {} [[]]
    "__metadata__" {"a":"b"} {"a":1} \u0061 "\ud800" 18446744073709551616 , : { } [ ] é"""
    + "\t\0\x7f",
)
TOKENS = re.findall(
    r"\S+", '{ } [ ] : , "a" "b" "c" "dtype" "shape" "data_offsets" "U8" "F32" 24 31'
)


KINDS = ["byte", "token", "insert", "remove", "copy", "data", *["swap", "harmless"] * 3]
HARMLESS = [
    ('"U8"', '"I8"'),
    ('"U8"', '"BOOL"'),
    ('"F32"', '"I32"'),
    ('"dtype":"F32","shape":[6]', '"dtype":"F4","shape":[4,12]'),
    ('"dtype":"F32","shape":[6]', '"dtype":"F6_E3M2","shape":[32]'),
    ('"dtype":"F32","shape":[6]', '"dtype":"C64","shape":[3]'),
    ("[6]", "[2,3]"),
    ("[7]", "[7,1,1]"),
    ('"a"', '"\\u0061"'),
    ('"a"', '"\\ud83d\\ude00"'),
    ('"b"', '"é\x7f"'),
    ('"b"', '"c"'),
    (",", " ,\n\t"),
    (":", ":\r "),
    ("[", "[ "),
    ('"pt"', '"np"'),
    ('"format"', '""'),
    ("}}", "}}" + " " * 40),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A small valid file after one to four changes to the bytes or the JSON of its header."""
    arrays = {"a": np.arange(7, dtype=np.uint8), "b": np.arange(6, dtype=np.float32)}
    if draw(st.booleans()):
        arrays["c"] = np.zeros((0, 3), np.float32)
    content = safetensors.numpy.save(arrays, draw(st.sampled_from([None, {"format": "pt"}])))
    length = header_length(content[:512], len(content), "f")
    header, data = bytearray(content[8 : 8 + length]), bytearray(content[8 + length :])
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3, 4]))):
        kind = draw(st.sampled_from(KINDS))
        at = draw(st.integers(0, max(0, len(header) - 1)))
        to = min(len(header), at + draw(st.integers(1, 60)))
        fragment = draw(st.sampled_from(FRAGMENTS)).encode()
        if kind == "byte":
            header[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "token":
            found = [t for t in TOKENS if t.encode() in header]
            if found:
                old = draw(st.sampled_from(found)).encode()
                header = header.replace(old, fragment, draw(st.integers(1, 2)))
        elif kind == "insert":
            header[at:at] = fragment
        elif kind == "remove":
            del header[at:to]
        elif kind == "copy":
            header[at:at] = header[at:to]
        elif kind == "harmless":
            old, new = draw(st.sampled_from(HARMLESS))
            header = bytearray(header.decode(errors="replace").replace(old, new, 1).encode())
        elif kind == "swap":
            header = bytearray(swapped(draw, bytes(header)))
        else:
            data += b"\0" * draw(st.integers(0, 8))
            del data[: draw(st.integers(0, 8))]
    length = len(header) + draw(st.sampled_from([*[0] * 12, -1, 1, 8]))
    return struct.pack("<Q", max(0, length)) + bytes(header) + bytes(data)


def swapped(draw: st.DrawFn, header: bytes) -> bytes:
    """The same JSON with tensors and fields in another order, where it still is JSON."""
    try:
        value = json.loads(header)
        return json.dumps(
            {
                key: dict(draw(st.permutations(list(value[key].items()))))
                for key in draw(st.permutations(list(value)))
            },
            ensure_ascii=draw(st.booleans()),
        ).encode()
    except (ValueError, AttributeError):
        return header


def test_what_we_accept_safetensors_reads_the_same(tmp_path: Path, tried: Any) -> None:
    accepted: list[bool] = []

    @settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=2000,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(content=mutated())
    def check(content: bytes) -> None:
        accepted.append(agrees_with_safetensors(tmp_path / "f", content))

    check()
    assert 0.2 < sum(accepted) / len(accepted) < 0.8
    tried("H2", len(accepted))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a", "b", "é"]),
            inner,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(value=st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=4), ascii=st.booleans())
def test_any_json_is_read_or_refused_with_our_error(value: Any, ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii).encode()
    try:
        tensors, metadata = parse_header(raw, 0, "f")
    except InvalidCheckpoint as error:
        message = str(error)
    else:
        message = "f: "
        assert len(tensors) + (metadata is not None) == len(value)
    assert message.startswith("f: ")
    assert message.isprintable()


def test_the_cases_we_refuse_and_safetensors_reads_are_the_listed_ones(tmp_path: Path) -> None:
    read_anyway = set()
    for header, data, fragment in MALFORMED.values():
        (tmp_path / "f").write_bytes(file_of(header, data))
        try:
            opened(tmp_path / "f")
        except SafetensorError:
            continue
        with pytest.raises(InvalidCheckpoint) as caught:
            read_header(tmp_path / "f")
        found = [words for words in STRICTER if words in str(caught.value)]
        assert found, fragment
        read_anyway.update(found)
    assert read_anyway == set(STRICTER) - {"shape overflows"}


# Size


def test_a_header_of_many_tensors_is_read_whole_in_little_memory(tmp_path: Path) -> None:
    count = 20_000
    entries = [
        TensorEntry(f"layers.{i // 99}.experts.{i}.weight", "U8", (2, 3), 6 * i, 6 * i + 6)
        for i in range(count)
    ]
    raw = encode_header(entries, None)
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + 6 * count)
    tracemalloc.start()
    try:
        header = read_header(path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert header.tensors == tuple(entries)
    assert len({id(entry.dtype) for entry in header.tensors}) == 1
    assert held < 500 * count  # bytes
    assert peak < 1000 * count


# Whole messages

MESSAGES: list[tuple[str, int, str, str | None]] = [  # header, bytes of data, message, hint
    (
        only(shape=f"[{2**62},4]"),
        4,
        "a: shape overflows: found [4611686018427387904, 4], expected fewer than 2^63 bits",
        None,
    ),
    (
        only(shape="[-1]"),
        4,
        "a: shape is wrong: found [-1], expected integers from 0 to 2^63 - 1",
        None,
    ),
    (
        only(),
        3,
        "a: truncated from this tensor on: 1 bytes are missing: found 3 bytes of data, expected 4",
        AGAIN,
    ),
    (
        only(offsets="[1,5]"),
        5,
        "a: 1 bytes before the tensor belong to none: found begin 1, expected 0",
        None,
    ),
    (f'{{"a":{A},"b":{A}}}', 4, "b: overlaps a: found begin 0, expected 4", None),
    (
        only(),
        6,
        "2 bytes after the last tensor belong to none: found 6 bytes of data, expected 4",
        None,
    ),
    (
        only("X"),
        4,
        "a: unknown dtype: found 'X', expected one of F4 F6_E2M3 F6_E3M2 BOOL U8 I8 F8_E4M3 "
        "F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 I64 U64 F64 C64",
        None,
    ),
    (
        only("F4", "[3]", "[0,1]"),
        1,
        "a: F4 [3] is not a whole number of bytes: found 12 bits",
        None,
    ),
    (
        only(offsets="[4,0]"),
        4,
        "a: data_offsets are wrong: found [4, 0], expected integers, 0 <= begin <= end < 2^63",
        None,
    ),
    (
        only(offsets="[0,3]"),
        3,
        "a: data_offsets do not fit U8 [4]: found 3 bytes, expected 4",
        None,
    ),
    ('{"a":{"x":1}}', 4, "a: unknown field 'x': expected dtype, shape, data_offsets", None),
    (
        '{"a":{"shape":4,"dtype":"U8","data_offsets":[0,4]}}',
        4,
        "a: shape is wrong: found 4, expected a list of integers",
        None,
    ),
    (
        '{"a":{"shape":[4],"dtype":"U8","data_offsets":[0]}}',
        4,
        "a: data_offsets are wrong: found [0], expected two integers",
        None,
    ),
    (
        only(shape="[1]", offsets="[-1,0]"),
        4,
        "a: data_offsets are wrong: found [-1, 0], expected integers, 0 <= begin <= end < 2^63",
        None,
    ),
    (
        only(shape="[1]", offsets=f"[{2**63 - 2},{2**63 - 1}]"),
        4,
        f"a: {2**63 - 2} bytes before the tensor belong to none: found begin {2**63 - 2}, "
        "expected 0",
        None,
    ),
    (
        '{"__metadata__":{"x":"1","y":"2","x":"1"}}',
        0,
        "__metadata__: the key 'x' is there twice",
        None,
    ),
    (
        f'{{"void":{tensor(shape="[0]", offsets="[8,8]")},"a":{tensor()},'
        f'"b":{tensor(offsets="[4,8]")}}}',
        7,
        "b: truncated from this tensor on: 1 bytes are missing: found 7 bytes of data, expected 8",
        AGAIN,
    ),
    ("{}_", 0, "the header is not valid JSON: Extra data: line 1 column 3 (char 2)", None),
    ("x", 4, "not safetensors: its header begins wrong: found b'x', expected '{'", AGAIN),
    ("", 4, "not safetensors: its header begins wrong: found b'', expected '{'", AGAIN),
]


@pytest.mark.parametrize(("header", "nbytes", "message", "hint"), MESSAGES)
def test_a_refusal_says_place_found_expected_and_way_out(
    header: str, nbytes: int, message: str, hint: str | None
) -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        parse_header(header.encode(), nbytes, "f")
    assert str(caught.value) == f"f: {message}"
    assert caught.value.hint == hint


def message_of(raw: bytes) -> str:
    with pytest.raises(InvalidCheckpoint) as caught:
        parse_header(raw, 0, "f")
    return str(caught.value)


def test_a_byte_that_is_not_utf8_is_told_by_its_place() -> None:
    message = "f: the header is not UTF-8: invalid start byte at byte 2"
    assert message_of(b'{"\xff":{}}') == message


def test_names_of_200_characters_are_told_whole() -> None:
    for length, told in (
        (200, "n" * 200),
        (201, "n" * 150 + "... (201 characters)"),
    ):
        message = message_of(f'{{"{"n" * length}":{tensor("X")}}}'.encode())
        assert message.startswith(f"f: {told}: unknown dtype")


def test_a_syntax_error_names_the_entry_that_it_stands_in() -> None:
    wrong = "the header is not valid JSON: "
    for header, entry in (
        ('{"a":{"dtype":"U8",}}', "a: "),
        ('{"a":{},"b" : {"dtype":!}}', "b: "),
        ('{"a":{!', "a: "),
        ('{"a":{"dtype":"U8"},}', ""),
        ('{"a":{}!', ""),
        ('{"a":1,}', ""),
    ):
        assert message_of(header.encode()).startswith(f"f: {entry}{wrong}"), header


def test_an_entry_is_looked_for_within_a_mebibyte() -> None:
    opening = '"n":{'
    for spaces, entry in ((1 << 20, "n: "), ((1 << 20) + 1, "")):
        header = "{" + opening + " " * (spaces - len(opening)) + "!"
        assert message_of(header.encode()).startswith(f"f: {entry}the header is not valid JSON")


@pytest.mark.parametrize(
    ("mark", "most"), [("{", 2_500_000), ("[", 2_500_000), (":", 4_500_000), (",", 10_000_000)]
)
def test_more_values_than_a_million_tensors_have_are_refused_unread(mark: str, most: int) -> None:
    known = int(mark == "{")
    enough = b"{" + mark.encode() * (most - known)
    assert "not valid JSON" in message_of(enough)
    with pytest.raises(InvalidCheckpoint) as caught:
        parse_header(enough + mark.encode(), 0, "f")
    found = f"found {most + 1} times {mark!r}, expected at most {most}"
    assert str(caught.value) == f"f: too many values in the header: {found}"
    assert caught.value.hint == "split the checkpoint into more files"


def test_a_name_that_cannot_be_written_is_told() -> None:
    entries = [TensorEntry("twice", "U8", (0,), 0, 0)] * 2
    with pytest.raises(InvalidCheckpoint) as caught:
        encode_header(entries, None)
    assert str(caught.value) == "header: twice: not usable as a tensor's name, or used twice"
    with pytest.raises(InvalidCheckpoint) as caught:
        encode_header([TensorEntry("\ud800", "U8", (0,), 0, 0)], None)
    assert str(caught.value) == "header: a name or metadata holds a lone surrogate"


def test_a_header_cannot_be_changed(tmp_path: Path) -> None:
    header = read(tmp_path / "f", file_of("{}"))
    with pytest.raises(FrozenInstanceError):
        header.data_start = 9


def test_of_a_long_list_eight_items_are_told() -> None:
    for sizes, told in (
        ('1,1,1,1,1,1,1,"x"', "[1, 1, 1, 1, 1, 1, 1, 'x']"),
        ('1,1,1,1,1,1,1,2,"x"', "[1, 1, 1, 1, 1, 1, 1, 2, ...]"),
    ):
        message = message_of(only(shape=f"[{sizes}]").encode())
        assert message.startswith(f"f: a: shape is wrong: found {told}, expected"), message


def test_the_raw_header_is_what_stands_before_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raw(content: bytes) -> bytes:
        (tmp_path / "f").write_bytes(content)
        return safefile.read_raw_header(tmp_path / "f")

    assert raw(file_of("no JSON", b"1234")) == b"no JSON"
    assert raw(file_of("no JSON")) == b"no JSON"
    assert raw(file_of("no JSON")[:-1]) == b""  # the length makes no sense
    assert raw(struct.pack("<Q", 7 | 1 << 56) + b"no JSON") == b""
    assert raw(b"") == raw(b"1234567") == raw(bytes(8)) == b""
    monkeypatch.setattr(safefile, "MAX_HEADER_NBYTES", 7)
    assert raw(file_of("no JSON", b"1234")) == b"no JSON"
    monkeypatch.setattr(safefile, "MAX_HEADER_NBYTES", 6)
    assert raw(file_of("no JSON", b"1234")) == b""


def test_a_header_too_long_to_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safefile, "MAX_HEADER_NBYTES", 8)
    with pytest.raises(InvalidCheckpoint) as caught:
        encode_header([TensorEntry("a", "U8", (0,), 0, 0)], None)
    found = "found a header of 56 bytes, expected at most 8"
    assert str(caught.value) == f"header: too many tensors for one file: {found}"
    assert caught.value.hint == "split the checkpoint into more files"
