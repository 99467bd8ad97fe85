"""Reading tensors and pieces: every dtype, bytes counted, and places that are none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from prepared_factory import Layer, build, edit_manifest, lay_out

import mxfp4prep
from mxfp4prep.errors import LayoutError, Unsupported
from mxfp4prep.layouts import LAYOUTS
from mxfp4prep.runtime.opening import open_for_serving
from mxfp4prep.runtime.reading import DTYPES, Batch, Operand, Reader, Target, place_piece

TENSORS = {
    "BOOL": torch.tensor([True, False]),
    "U8": torch.arange(3, dtype=torch.uint8),
    "I16": torch.arange(-2, 2, dtype=torch.int16),
    "I64": torch.arange(-2, 2),
    "F16": torch.rand(2, 3).half(),
    "BF16": torch.rand(2, 3).bfloat16(),
    "F32": torch.rand(2, 3),
    "F64": torch.rand(1, 2).double(),
    "F8_E4M3": torch.rand(4).to(torch.float8_e4m3fn),
    "F8_E5M2": torch.rand(4).to(torch.float8_e5m2),
    "F8_E8M0": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 5),
}
LAYER = Layer("fc1", 64, 256)
CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path) -> Path:
    build(tmp_path, [LAYER], copied=TENSORS)
    return tmp_path


@pytest.mark.parametrize("verify", [False, True])
def test_tensors_of_every_dtype(root, verify):
    prepared = mxfp4prep.load(root, verify=verify)
    for name, tensor in TENSORS.items():
        found = prepared.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        if tensor.numel():
            assert torch.equal(
                found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            )
    assert set(TENSORS) - {"scalar", "empty"} <= set(DTYPES)
    assert prepared.bytes_read == sum(t.numel() * t.element_size() for t in TENSORS.values())


def test_a_dtype_that_torch_does_not_have(root):
    shard = root / "model-00001-of-00001.safetensors"
    raw = shard.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header["U8"] |= {"dtype": "F6_E2M3", "shape": [4]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    shard.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    size = shard.stat().st_size
    edit_manifest(root, lambda d: d["files"][0].update(nbytes=size))
    prepared = mxfp4prep.load(root)
    with pytest.raises(Unsupported, match="F6_E2M3"):
        prepared.tensor("U8")
    assert prepared["fc1"] is not None


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("layout", ["tile32x8", "transposed"])
def test_a_piece_is_put_between_others(root, layout, verify):
    """Rows 32..64 of the scale, its columns, as rows 32..64 of a matrix of 96, from asm bytes."""
    operand = Operand("fc1.weight_scale", LAYOUTS["tile32x8"], 64, 8)
    target = LAYOUTS[layout]
    out = torch.zeros(target.stored_shape(96, 8), dtype=torch.uint8)
    with Batch(Reader(open_for_serving(root, verify=verify)), CPU) as batch:
        place_piece(batch, operand, 0, ((32, 64),), (0, 8), Target(target, out, 96, 32))
        assert not out.any(), "nothing is read before the batch is run"
        batch.run()
    expected = torch.zeros((96, 8), dtype=torch.uint8)
    expected[32:64] = LAYER.scale[32:64]
    assert torch.equal(out, lay_out(expected, layout))


def test_a_place_between_tiles_is_refused(root):
    operand = Operand("fc1.weight_scale", LAYOUTS["tile32x8"], 64, 8)
    out = torch.zeros((2, 256), dtype=torch.uint8)
    target = Target(LAYOUTS["tile32x8"], out, 64, 16)
    reader = Reader(open_for_serving(root, verify=False))
    with Batch(reader, CPU) as batch, pytest.raises(LayoutError, match="no place"):
        place_piece(batch, operand, 0, ((0, 32),), (0, 8), target)


def test_files_are_closed(root):
    before = len(list(Path("/proc/self/fd").iterdir()))
    prepared = mxfp4prep.load(root)
    prepared["fc1"]
    prepared.tensor("F32")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
