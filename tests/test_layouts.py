"""Layouts against recorded AITER bytes, their own index formula and position-unique matrices."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mxfp4prep import layouts
from mxfp4prep.errors import LayoutError
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.manifest import LayoutId

GOLDEN = load_file(Path(__file__).parent / "data" / "golden" / "aiter_layouts.safetensors")

SAME_BYTES = {
    "weight.shuffle_16x16": "tile16x16",
    "weight.gfx1250_wmma": "tile16x16",
    "weight.gfx1250_f4gemm": "tile16x16",
    "weight.guinterleave_gate_up0": "tile16x16",
    "weight.gfx1250_gugu_shuffle_16x16": "tile16x16",
    "weight_scale.swizzle_unpadded": "tile32x8",
    "weight_scale.e8m0_shuffle_zero_pad": "tile32x8",
    "weight_scale.triton_moe_cdna4": "tile32x8",
    "weight_scale.guinterleave_gate_up0": "tile32x8",
    "even.scale_shuffled_zero_fill": "tile32x8",
}
"""What AITER made, by suffix, and the layout that has these bytes."""

OTHER_LAYOUTS = {
    "weight.guinterleave_gate_up1",  # 16-row tiles of gate and up take turns
    "weight_scale.guinterleave_gate_up1",  # row n of gate beside row n of up
    "weight_scale.gfx1250_f4gemm",  # 32 x 4 tiles
    "weight_scale.gfx1250_gemm16x4",  # 16 x 4 tiles
    "weight_scale.gfx1250_n32k4_gugu0",
    "weight_scale.gfx1250_n32k4_gugu1",
}
NOT_LAYOUTS = {"weight", "weight_scale", "x", "weight_scale.e8m0_shuffle_valid"} | {
    "even.scale_shuffled_written",
    *(
        f"{mode}.{part}"
        for mode in ("even", "roundup", "rounddown", "ceil")
        for part in ("q", "scale")
    ),
}


def split(name: str) -> tuple[str, str]:
    """`<group>.<shape>` and the suffix of a golden tensor's name."""
    group, shape, suffix = name.split(".", 2)
    return f"{group}.{shape}", suffix


GOLDEN_CASES = [name for name in sorted(GOLDEN) if split(name)[1] in SAME_BYTES]


def zero_padded(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    padded = torch.zeros(shape, dtype=torch.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return padded


def golden_input(name: str) -> torch.Tensor:
    """What to lay out to get the bytes of golden tensor `name`."""
    stem, suffix = split(name)
    if suffix == "even.scale_shuffled_zero_fill":
        return zero_padded(GOLDEN[f"{stem}.even.scale"], tuple(GOLDEN[name].shape))
    matrix = GOLDEN[f"{stem}.{suffix.split('.')[0]}"]
    if suffix == "weight_scale.e8m0_shuffle_zero_pad":  # experts one below the other, padded once
        return zero_padded(matrix.flatten(0, -2), tuple(GOLDEN[name].shape))
    if suffix == "weight.gfx1250_gugu_shuffle_16x16":  # rows of gate and up take turns
        gate, up = matrix.chunk(2, dim=1)
        return torch.stack((gate, up), dim=2).flatten(1, 2)
    return matrix


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_bytes_of_aiter(name, tried):
    matrix, golden = golden_input(name), GOLDEN[name]
    layout = LAYOUTS[SAME_BYTES[split(name)[1]]]
    stored = layout.forward(matrix)
    assert torch.equal(stored.flatten(), golden.flatten())
    back = layout.inverse(golden.view(stored.shape), *matrix.shape[-2:])
    assert torch.equal(back, matrix)
    tried("N2")


def test_every_golden_tensor_is_accounted_for():
    counts = Counter(split(name)[1] for name in GOLDEN)
    assert set(counts) == set(SAME_BYTES) | OTHER_LAYOUTS | NOT_LAYOUTS
    assert {suffix: counts[suffix] for suffix in SAME_BYTES} == {
        "weight.shuffle_16x16": 9,
        "weight.gfx1250_wmma": 3,
        "weight.gfx1250_f4gemm": 3,
        "weight.guinterleave_gate_up0": 2,
        "weight.gfx1250_gugu_shuffle_16x16": 3,
        "weight_scale.swizzle_unpadded": 3,
        "weight_scale.e8m0_shuffle_zero_pad": 9,
        "weight_scale.triton_moe_cdna4": 2,
        "weight_scale.guinterleave_gate_up0": 2,
        "even.scale_shuffled_zero_fill": 4,
    }
    assert len(GOLDEN_CASES) == 40


@pytest.mark.parametrize("name", [n for n in GOLDEN_CASES if "e8m0_shuffle" in n])
def test_valid_region_of_e8m0_shuffle_is_the_unpadded_layout(name):
    """Where no padding is needed, the first rows of AITER's buffer are our bytes."""
    stem, _ = split(name)
    scale, valid = GOLDEN[f"{stem}.weight_scale"], GOLDEN[f"{stem}.weight_scale.e8m0_shuffle_valid"]
    rows, cols = scale.flatten(0, -2).shape
    is_padded = bool(rows % 32 or cols % 8)
    assert is_padded == (not valid.flatten()[: rows * cols].all())
    if not is_padded:
        stored = LAYOUTS["tile32x8"].forward(scale.flatten(0, -2))
        assert torch.equal(stored.flatten(), GOLDEN[name].flatten()[: rows * cols])
    assert int(valid.sum()) == rows * cols


# Shapes: tile multiples, so that a new layout is covered by being in the table.

TILES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 5), (5, 3), (1, 7), (7, 1), (7, 7)]
TILES += [(4, 8), (8, 4), (1, 32), (32, 1), (9, 16), (16, 9), (13, 20)]
TILES += [(1, 4), (4, 1), (2, 3), (3, 2), (1, 5), (5, 1), (2, 6), (6, 2), (3, 3), (4, 4), (5, 5)]
MANY_EXPERTS = 384
EXPERTS = [(), (1,), (2,), (9,)]


def shapes_of(layout):
    rows, cols = layout.tile
    shapes = [(*e, tall * rows, wide * cols) for e in EXPERTS for tall, wide in TILES]
    return [*shapes, (MANY_EXPERTS, rows, cols)]


CASES = [
    pytest.param(layout, shape, id=f"{layout.id}-{'x'.join(map(str, shape))}")
    for layout in LAYOUTS.values()
    for shape in shapes_of(layout)
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_case = pytest.mark.parametrize(("layout", "shape"), CASES)


def positions(shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def through_bytes(move, numbers):
    """`numbers` moved as three byte planes: every position is distinguishable, none repeats."""
    planes = [move(((numbers >> shift) & 255).to(torch.uint8)) for shift in (0, 8, 16)]
    return sum(plane.to(torch.int64) << (8 * i) for i, plane in enumerate(planes))


def noise(shape):
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


@each_layout
def test_enough_shapes(layout):
    shapes = shapes_of(layout)
    assert len(set(shapes)) == len(shapes) >= 60
    assert layout.tile in shapes
    assert max(torch.Size(shape).numel() for shape in shapes) < 1 << 24


@each_case
def test_every_byte_goes_where_the_formula_says(layout, shape, tried):
    rows, cols = shape[-2:]
    source = positions(shape)
    stored = through_bytes(layout.forward, source)
    assert stored.shape == (*shape[:-2], *layout.stored_shape(rows, cols))
    assert torch.equal(stored.flatten().sort().values, source.flatten())  # a bijection
    where = layout.offset(torch.arange(rows).view(-1, 1), torch.arange(cols), rows, cols)
    assert torch.equal(where.flatten().sort().values, torch.arange(rows * cols))
    flat = stored.view(-1, rows * cols)
    assert torch.equal(flat[:, where], source.view(-1, rows, cols))
    tried("N2")


@each_case
def test_inverse_undoes_forward_and_forward_undoes_inverse(layout, shape):
    rows, cols = shape[-2:]
    source = positions(shape)
    stored = through_bytes(layout.forward, source)
    back = through_bytes(lambda plane: layout.inverse(plane, rows, cols), stored)
    assert torch.equal(back, source)
    stored = positions((*shape[:-2], *layout.stored_shape(rows, cols)))
    matrix = through_bytes(lambda plane: layout.inverse(plane, rows, cols), stored)
    assert torch.equal(through_bytes(layout.forward, matrix), stored)


@each_layout
def test_pieces_larger_than_a_chunk(layout, monkeypatch):
    """Whole chunks and a partial last one give the same bytes as a single chunk."""
    rows, cols = layout.tile[0] * 11, layout.tile[1] * 3
    matrix = noise((3, rows, cols))
    stored = layout.forward(matrix)
    monkeypatch.setattr(layouts, "CHUNK_NBYTES", 4 * layout.tile[0] * cols)
    assert torch.equal(layout.forward(matrix), stored)
    assert torch.equal(layout.inverse(stored, rows, cols), matrix)
    monkeypatch.setattr(layouts, "CHUNK_NBYTES", 1)
    assert torch.equal(layout.forward(matrix), stored)


@each_layout
def test_a_matrix_above_the_real_chunk_size(layout):
    tall, wide = layout.tile
    rows, cols = tall * -(-1920 // tall), wide * -(-1000 // wide)
    matrix = noise((rows, cols))
    assert matrix.numel() > layouts.CHUNK_NBYTES
    where = layout.offset(np.arange(rows)[:, None], np.arange(cols), rows, cols)
    expected = np.empty(rows * cols, dtype=np.uint8)
    expected[where] = matrix.numpy()
    stored = layout.forward(matrix)
    assert np.array_equal(stored.numpy().ravel(), expected)
    assert torch.equal(layout.inverse(stored, rows, cols), matrix)


@each_layout
def test_offset_takes_ints_and_arrays(layout):
    rows, cols = layout.tile[0] * 3, layout.tile[1] * 3
    row, col = np.mgrid[0:rows, 0:cols]
    array = layout.offset(row, col, rows, cols)
    for r, c in ((0, 0), (rows - 1, cols - 1), (rows // 2, cols - 1)):
        assert layout.offset(r, c, rows, cols) == array[r, c]
    assert isinstance(layout.offset(1, 0, rows, cols), int)


def test_transposed_is_numpys_transpose():
    matrix = noise((5, 48, 20))
    assert np.array_equal(
        LAYOUTS["transposed"].forward(matrix).numpy(), matrix.numpy().swapaxes(1, 2)
    )
    assert torch.equal(LAYOUTS["raw"].forward(matrix), matrix)


# What the streaming writer and the loader rely on.

BANDED = [layout for layout in LAYOUTS.values() if layout.band_rows is not None]


@pytest.mark.parametrize("layout", BANDED, ids=[layout.id for layout in BANDED])
def test_bands_are_contiguous_runs(layout):
    band = layout.band_rows
    rows, cols = band * 6, layout.tile[1] * 5
    matrix = noise((rows, cols))
    stored = layout.forward(matrix).flatten()
    for start, stop in ((0, 1), (0, 6), (1, 3), (2, 6), (5, 6)):
        a, b = start * band, stop * band
        run = stored[a * cols : b * cols]
        assert torch.equal(layout.forward(matrix[a:b]).flatten(), run)
        part = run.view(layout.stored_shape(b - a, cols))
        assert torch.equal(layout.inverse(part, b - a, cols), matrix[a:b])


@pytest.mark.parametrize("layout", BANDED, ids=[layout.id for layout in BANDED])
def test_bands_run_on_across_experts(layout):
    matrix = noise((4, layout.band_rows * 3, layout.tile[1] * 2))
    stored = layout.forward(matrix)
    assert torch.equal(layout.forward(matrix.flatten(0, 1)).flatten(), stored.flatten())


@each_layout
def test_tile_aligned_slices_of_the_stored_matrix(layout):
    """A block of rows or columns is a plain slice of the stored 2-D matrix."""
    tall, wide = layout.tile
    matrix = noise((6 * tall, 6 * wide))
    stored = layout.forward(matrix)
    rows, cols = matrix[2 * tall : 5 * tall], matrix[:, wide : 4 * wide]
    along_rows, along_cols = (1, 0) if layout.id == "transposed" else (0, 1)
    per_row, per_col = stored.shape[along_rows] // 6, stored.shape[along_cols] // 6
    assert torch.equal(stored.narrow(along_rows, 2 * per_row, 3 * per_row), layout.forward(rows))
    assert torch.equal(stored.narrow(along_cols, per_col, 3 * per_col), layout.forward(cols))


@each_layout
@pytest.mark.parametrize("experts", EXPERTS)
def test_out_is_filled_and_returned(layout, experts):
    rows, cols = layout.tile[0] * 3, layout.tile[1] * 5
    matrix = noise((*experts, rows, cols))
    kept = matrix.clone()
    stored = layout.forward(matrix)
    out = torch.full_like(stored, 170)
    assert layout.forward(matrix, out=out) is out
    assert torch.equal(out, stored)
    back = torch.full_like(matrix, 170)
    assert layout.inverse(stored, rows, cols, out=back) is back
    assert torch.equal(back, matrix)
    assert torch.equal(stored, out)  # inverse left its input alone
    assert torch.equal(matrix, kept)


@each_layout
def test_results_are_memory_of_their_own(layout):
    rows, cols = layout.tile
    matrix = noise((rows, cols))
    stored = layout.forward(matrix)
    assert stored.is_contiguous()
    back = layout.inverse(stored, rows, cols)
    expected, copy = stored.clone(), back.clone()
    matrix.fill_(0)
    assert torch.equal(stored, expected)
    stored.fill_(0)
    assert torch.equal(back, copy)


def part_of_a_tensor(shape, offset):
    """A contiguous tensor that starts `offset` bytes into its storage."""
    size = torch.Size(shape).numel()
    return torch.full((size + 64,), 170, dtype=torch.uint8)[offset : offset + size].view(shape)


def part_of_a_buffer(shape, offset):
    """The same over foreign memory: the storage offset is 0, the address is not aligned."""
    size = torch.Size(shape).numel()
    buffer = bytearray(b"\xaa" * (size + 64))
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset).view(shape)


@pytest.mark.parametrize("step", [*range(5, 16), *range(17, 24)])
def test_words_are_of_no_other_size(step):
    """Tensors that a word of `step` bytes would fit, and that stand at every alignment."""
    layout = LAYOUTS["tile32x8"]
    expected = noise((1, 64, 16))
    stored = layout.forward(expected)
    buffer = np.zeros(expected.numel() + 8 * step, dtype=np.uint8)
    first = -buffer.ctypes.data % step
    whole = torch.frombuffer(buffer, dtype=torch.uint8, offset=first)
    for offset in range(0, 5 * step, step):
        place = whole[offset : offset + expected.numel()]
        matrix = place.view(expected.shape).copy_(expected)
        assert torch.equal(layout.forward(matrix), stored)
        place.view(stored.shape).copy_(stored)
        assert torch.equal(layout.inverse(place.view(stored.shape), 64, 16), expected)


@each_layout
@pytest.mark.parametrize("place", [part_of_a_tensor, part_of_a_buffer])
@pytest.mark.parametrize(
    "offsets", [(0, 0), (1, 0), (0, 1), (8, 4), (4, 8), (15, 15), (2, 6), (16, 32)]
)
def test_any_alignment(layout, place, offsets, monkeypatch):
    rows, cols = layout.tile[0] * 6, layout.tile[1] * 3
    monkeypatch.setattr(layouts, "CHUNK_NBYTES", 4 * layout.tile[0] * cols)
    expected = noise((2, rows, cols))
    stored = layout.forward(expected)
    matrix = place(expected.shape, offsets[0]).copy_(expected)
    out = place(stored.shape, offsets[1])
    assert torch.equal(layout.forward(matrix, out=out), stored)
    back = place(matrix.shape, offsets[0])
    assert torch.equal(layout.inverse(out, rows, cols, out=back), expected)


def test_alignment_is_of_address_and_storage_offset():
    """The first cannot be seen in results here, yet 16-byte loads may fault on it elsewhere."""
    whole = torch.empty(64, dtype=torch.uint8)
    assert [n for n in range(33) if layouts._is_aligned(whole[n:], 16)] == [0, 16, 32]
    assert [n for n in range(9) if layouts._is_aligned(whole[n:], 4)] == [0, 4, 8]
    shifted = torch.frombuffer(whole.numpy(), dtype=torch.uint8, offset=1)
    assert shifted.storage_offset() == 0
    assert not layouts._is_aligned(shifted, 4)
    assert (shifted[15:].data_ptr() - whole.data_ptr()) == 16
    assert not layouts._is_aligned(shifted[15:], 16)


@each_layout
def test_nothing_outside_out_is_written(layout):
    rows, cols = layout.tile[0] * 3, layout.tile[1] * 3
    matrix = noise((2, rows, cols))
    stored = layout.forward(matrix)
    for begin in (16, 17):
        end = begin + matrix.numel()
        buffer = torch.full((end + 16,), 170, dtype=torch.uint8)
        layout.forward(matrix, out=buffer[begin:end].view(stored.shape))
        assert (buffer[:begin] == 170).all()
        assert (buffer[end:] == 170).all()
        layout.inverse(stored, rows, cols, out=buffer[begin:end].view(matrix.shape))
        assert (buffer[:begin] == 170).all()
        assert (buffer[end:] == 170).all()


@each_layout
def test_any_strides(layout):
    rows, cols = layout.tile[0] * 4, layout.tile[1] * 4
    matrix = noise((3, rows, cols))
    stored = layout.forward(matrix)
    wide = torch.zeros(2, 3, rows, 2 * cols + 1, dtype=torch.uint8)
    even = torch.zeros(3, rows, 2 * cols, dtype=torch.uint8)
    views = [
        matrix.transpose(1, 2).contiguous().transpose(1, 2),
        matrix.transpose(0, 1).contiguous().transpose(0, 1),
        wide[0, :, :, :cols].copy_(matrix),
        wide[1, :, :, 1::2].copy_(matrix),
        even[:, :, ::2].copy_(matrix),  # one step from each element to the next, rows included
    ]
    for view in views:
        assert not view.is_contiguous()
        assert torch.equal(layout.forward(view), stored)
    twice = torch.zeros(3, stored.shape[1], 2 * stored.shape[2], dtype=torch.uint8)
    for strided in (
        stored.transpose(1, 2).contiguous().transpose(1, 2),
        twice[:, :, ::2].copy_(stored),
    ):
        assert torch.equal(layout.inverse(strided, rows, cols), matrix)
    assert torch.equal(layout.forward(matrix[:1].expand(3, -1, -1)), stored[:1].expand(3, -1, -1))


@each_layout
def test_no_experts_and_no_rows(layout):
    rows, cols = layout.tile
    assert layout.forward(noise((0, rows, cols))).shape == (0, *layout.stored_shape(rows, cols))
    empty = layout.forward(noise((0, cols)))
    assert empty.shape == layout.stored_shape(0, cols)
    assert layout.inverse(empty, 0, cols).shape == (0, cols)


# Refusals.

RULES = [
    ("tile16x16", 24, 64, "24 rows", "a multiple of 16"),
    ("tile16x16", 32, 48, "48 byte columns", "a multiple of 32"),
    ("tile32x8", 48, 160, "48 rows", "a multiple of 32"),
    ("tile32x8", 2560, 20, "20 byte columns", "a multiple of 8"),
]


@pytest.mark.parametrize(("layout_id", "rows", "cols", "found", "expected"), RULES)
def test_rule_violations_say_found_and_expected(layout_id, rows, cols, found, expected):
    layout = LAYOUTS[layout_id]
    matrix = noise((rows, cols))
    text = f"cannot be stored as {layout_id}: found {found}, expected {expected}"
    with pytest.raises(LayoutError) as caught:
        layout.check(rows, cols, "model.layers.0.mlp.down_proj.weight_scale")
    assert str(caught.value) == f"model.layers.0.mlp.down_proj.weight_scale: {text}"
    for refused in (
        lambda: layout.forward(matrix),
        lambda: layout.inverse(matrix, rows, cols),
        lambda: layout.stored_shape(rows, cols),
    ):
        with pytest.raises(LayoutError, match=text):
            refused()
    with pytest.raises(LayoutError, match=rf"^\({rows}, {cols}\) matrix: "):
        layout.stored_shape(rows, cols)


@each_layout
def test_check_follows_the_tile(layout):
    tall, wide = layout.tile
    layout.check(3 * tall, 5 * wide, "x")
    for rows, cols in ((tall + 1, wide), (tall, wide + 1), (tall - 1, wide), (tall, 2 * wide - 1)):
        if rows % tall or cols % wide:
            with pytest.raises(LayoutError):
                layout.check(rows, cols, "x")
    if layout.band_rows is not None:
        assert layout.band_rows % tall == 0


@each_layout
def test_wrong_tensors_are_refused(layout):
    rows, cols = layout.tile[0] * 2, layout.tile[1] * 3
    matrix = noise((rows, cols))
    stored = layout.forward(matrix)
    bytes_only = "layouts move bytes: found torch.{}, expected torch.uint8"
    shape, flat = tuple(stored.shape), (rows * cols,)
    cut = (shape[0], shape[1] - 1)
    other = f"is not a ({rows}, {cols}) matrix in {layout.id}: found {cut}, expected {shape}"
    for call, message in (
        (lambda: layout.forward(matrix.float()), f"matrix: {bytes_only.format('float32')}"),
        (
            lambda: layout.forward(matrix.flatten()),
            f"matrix: needs rows and columns: found {flat}, expected 2 or more dimensions",
        ),
        (lambda: layout.inverse(stored[:, :-1], rows, cols), f"stored matrix: {other}"),
        (
            lambda: layout.inverse(stored.view(torch.int8), rows, cols),
            f"stored matrix: {bytes_only.format('int8')}",
        ),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        assert str(caught.value) == message


@each_layout
def test_unusable_out_is_refused(layout):
    rows, cols = layout.tile[0] * 2, layout.tile[1] * 3
    matrix = noise((rows, cols))
    stored = layout.forward(matrix)
    twice = torch.empty(stored.shape[0], stored.shape[1] * 2, dtype=torch.uint8)
    for out, what in (
        (stored.flatten(), "shape"),
        (stored.unsqueeze(0), "shape"),
        (stored.to(torch.int16), "dtype"),
        (stored.to("meta"), "device"),
        (twice[:, ::2], "strides"),
    ):
        with pytest.raises(LayoutError, match=f"^out: has the wrong {what}: found .*, expected"):
            layout.forward(matrix, out=out)
    with pytest.raises(LayoutError, match="out: has the wrong shape"):
        layout.inverse(stored, rows, cols, out=torch.empty(rows + 1, cols, dtype=torch.uint8))


@each_layout
def test_out_that_overlaps_the_input_is_refused(layout):
    rows, cols = layout.tile[0] * 2, layout.tile[1] * 3
    size = rows * cols
    buffer = noise((2 * size,))
    matrix = buffer[:size].view(rows, cols)
    shape = layout.stored_shape(rows, cols)
    with pytest.raises(LayoutError, match=r"^out: overlaps the input: expected memory of its own$"):
        layout.forward(matrix, out=buffer[:size].view(shape))
    with pytest.raises(LayoutError, match="out: overlaps the input"):
        layout.forward(matrix, out=buffer[size - 1 : 2 * size - 1].view(shape))
    expected = layout.forward(matrix)
    beside = layout.forward(matrix, out=buffer[size:].view(shape))
    assert torch.equal(beside, expected)
    buffer[size:] = matrix.flatten()
    matrix = buffer[size:].view(rows, cols)
    with pytest.raises(LayoutError, match="out: overlaps the input"):
        layout.forward(matrix, out=buffer[1 : size + 1].view(shape))
    before = layout.forward(matrix, out=buffer[:size].view(shape))
    assert torch.equal(before, expected)


@each_layout
def test_a_matrix_with_gaps_reaches_to_its_last_byte(layout):
    """Memory is free from right behind the last byte on, and not before."""
    rows, cols = layout.tile[0] * 2, layout.tile[1] * 3
    size = rows * cols
    buffer = noise((rows * (cols + 2) + size,))
    matrix = buffer[: rows * (cols + 2)].view(rows, cols + 2)[:, :cols]
    last = rows * (cols + 2) - 3
    shape = layout.stored_shape(rows, cols)
    for begin in (0, 1, last):
        with pytest.raises(LayoutError, match="out: overlaps the input"):
            layout.forward(matrix, out=buffer[begin : begin + size].view(shape))
    expected = layout.forward(matrix)
    behind = buffer[last + 1 : last + 1 + size].view(shape)
    assert torch.equal(layout.forward(matrix, out=behind), expected)


# The table.


def test_table_and_paths():
    assert set(LAYOUTS) == set(get_args(LayoutId))
    assert all(LAYOUTS[key].id == key for key in LAYOUTS)
    assert set(PATHS) == {"asm", "triton", "kept"}
    for weight, scale in PATHS.values():
        assert "weight" in LAYOUTS[weight].operands
        assert "scale" in LAYOUTS[scale].operands
    assert {key: layout.tile for key, layout in LAYOUTS.items()} == {
        "raw": (1, 1),
        "tile16x16": (16, 32),
        "tile32x8": (32, 8),
        "transposed": (1, 1),
    }
    assert {key: LAYOUTS[key].band_rows for key in ("raw", *PATHS["asm"], "transposed")} == {
        "raw": 1,
        "tile16x16": 16,
        "tile32x8": 32,
        "transposed": None,
    }


@each_layout
def test_a_layout_cannot_be_changed(layout):
    with pytest.raises(FrozenInstanceError):
        layout.band_rows = 7


def test_stored_shapes_of_the_format():
    n, k = 96, 1024
    assert LAYOUTS["tile16x16"].stored_shape(n, k // 2) == (n // 16, 16 * k // 2)
    assert LAYOUTS["tile32x8"].stored_shape(n, k // 32) == (n // 32, k)
    assert LAYOUTS["transposed"].stored_shape(n, k // 32) == (k // 32, n)
    assert LAYOUTS["raw"].stored_shape(n, k // 2) == (n, k // 2)


def test_importing_layouts_imports_no_torch():
    code = "import sys, mxfp4prep.layouts; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
