"""Every layout of the table: a block that can be sliced is exactly that block, laid out."""

from __future__ import annotations

import pytest
import torch

from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.parallel import Shard
from mxfp4prep.runtime.slices import Copy, Rectangle, byte_columns, copies, path_of_piece, rectangle

ROWS, COLS = 192, 96


def matrix() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (ROWS, COLS), dtype=torch.uint8, generator=generator)


def cut(stored: torch.Tensor, block: Rectangle) -> torch.Tensor:
    return stored[block.top : block.bottom, block.left : block.right]


BLOCKS = [
    ((0, 192), (0, 96)),
    ((0, 96), (0, 96)),
    ((96, 192), (0, 96)),
    ((0, 192), (32, 64)),
    ((64, 128), (64, 96)),
    ((32, 64), (0, 32)),
    ((160, 192), (32, 96)),
]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize(("rows", "columns"), BLOCKS)
def test_a_block_on_tile_borders_is_the_block_laid_out(layout, rows, columns):
    raw = matrix()
    stored = layout.forward(raw)
    block = rectangle(layout, (ROWS, COLS), rows, columns)
    assert block is not None
    piece = raw[rows[0] : rows[1], columns[0] : columns[1]].contiguous()
    assert block.nbytes == piece.numel()
    assert torch.equal(cut(stored, block), layout.forward(piece))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((1, 192), (0, 96)),
        ((0, 8), (0, 96)),
        ((8, 40), (0, 96)),
        ((0, 192), (4, 96)),
        ((0, 192), (0, 4)),
    ],
)
def test_a_block_off_tile_borders_is_refused_or_right(layout, rows, columns):
    block = rectangle(layout, (ROWS, COLS), rows, columns)
    if layout.id in ("raw", "transposed"):
        raw = matrix()
        piece = raw[rows[0] : rows[1], columns[0] : columns[1]].contiguous()
        assert torch.equal(cut(layout.forward(raw), block), layout.forward(piece))
    else:
        assert block is None


@pytest.mark.parametrize(
    ("layout", "rows", "columns"),
    [
        ("tile16x16", (0, 17), (0, 32)),
        ("tile16x16", (0, 17), (32, 64)),
        ("tile16x16", (0, 16), (0, 48)),
        ("tile16x16", (0, 16), (16, 32)),
        ("tile32x8", (0, 49), (0, 8)),
        ("tile32x8", (0, 50), (8, 16)),
    ],
)
def test_borders_that_the_size_alone_would_not_betray(layout, rows, columns):
    """First and last byte of these span as many bytes as the block has, but not its bytes."""
    assert rectangle(LAYOUTS[layout], (ROWS, COLS), rows, columns) is None


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_an_empty_block_is_empty(layout):
    assert rectangle(layout, (ROWS, COLS), (96, 96), (0, 96)).nbytes == 0
    assert rectangle(layout, (ROWS, COLS), (5, 5), (0, 96)).nbytes == 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_copies_stack_ranges_from_a_row_on(layout):
    raw = matrix()
    stored = layout.forward(raw)
    ranges, columns = ((128, 160), (0, 64)), (32, 96)
    into = 128, 64
    out = torch.zeros(layout.stored_shape(*into), dtype=torch.uint8)
    steps = copies(layout, (ROWS, COLS), ranges, columns, into, at=32)
    for step in steps:
        cut(out, step.target).copy_(cut(stored, step.source))
    expected = torch.zeros(into, dtype=torch.uint8)
    expected[32:] = torch.cat([raw[128:160, 32:96], raw[0:64, 32:96]])
    assert torch.equal(out, layout.forward(expected))
    assert all(isinstance(step, Copy) for step in steps)


def test_a_part_that_lands_between_tiles_is_refused():
    """16 + 16 rows make a whole tile, but each part is half of one."""
    layout = LAYOUTS["tile32x8"]
    assert copies(layout, (64, 8), ((0, 32), (32, 64)), (0, 8), (64, 8)) is not None
    assert copies(layout, (64, 8), ((0, 16), (32, 48)), (0, 8), (32, 8)) is None
    assert copies(layout, (64, 8), ((0, 32),), (0, 8), (64, 8), at=16) is None


@pytest.mark.parametrize(
    ("operand", "columns", "expected"),
    [
        ("weight", (0, 80), (0, 40)),
        ("scale", (0, 80), (0, 3)),
        ("scale", (512, 1024), (16, 32)),
        ("weight", (512, 1024), (256, 512)),
        ("scale", (0, 32), (0, 1)),
    ],
)
def test_byte_columns(operand, columns, expected):
    assert byte_columns(operand, columns) == expected


@pytest.mark.parametrize(
    ("path", "n", "k", "piece", "expected"),
    [
        ("asm", 64, 512, Shard(((0, 32),), (0, 512)), "asm"),
        ("asm", 64, 512, Shard(((0, 64),), (256, 512)), "asm"),
        ("asm", 64, 512, Shard(((0, 64),), (128, 256)), "triton"),
        ("asm", 64, 512, Shard(((0, 16),), (0, 512)), "triton"),
        ("asm", 64, 512, Shard(((16, 48),), (0, 512)), "triton"),
        ("asm", 64, 512, Shard(((0, 64),), (128, 384)), "triton"),
        ("asm", 96, 512, Shard(((0, 96),), (0, 512)), "triton"),
        ("triton", 7, 96, Shard(((3, 4),), (32, 64)), "triton"),
        ("kept", 7, 96, Shard(((3, 4),), (32, 64)), "kept"),
    ],
)
def test_path_of_piece(path, n, k, piece, expected):
    found, why = path_of_piece(path, n, k, piece)
    assert found == expected
    assert (why is None) == (found == path)


def test_every_path_has_a_weight_and_a_scale_layout():
    for weight, scale in PATHS.values():
        assert "weight" in LAYOUTS[weight].operands
        assert "scale" in LAYOUTS[scale].operands
