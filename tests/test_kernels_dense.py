"""The dense kernels, on a GPU or run by Triton's interpreter on the CPU, against float64.

What is not tried here: the compiler's work (tests that compile do), tensor cores' order of
addition, and on the "scaled" kernel bfloat16 inputs beyond float16's range, which the interpreter
converts them to.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import (
    INPUT_QUANTS,
    Target,
    assert_product,
    assert_same_values,
    between_nans,
    guarded,
    in_order,
    ported,
    quantized64,
    random_stored,
    stored,
    true_bfloat16,
)
from moe_cases import pairwise

pytest.importorskip("triton")

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.backends import triton_backend
from mxfp4prep.runtime.kernels import dense as subject
from mxfp4prep.runtime.kernels.configs import Tile
from mxfp4prep.runtime.kernels.launch import multiplies_mxfp4

dense, gemm = ported(subject.dense), ported(triton_backend.gemm)
by_expanding, row_scales = ported(subject.by_expanding), subject.row_scales

pytestmark = [  # numpy says of infinities what GPUs do in silence
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

STATIC = 0.0125
"""Scale of fp8_static inputs: some of them saturate at 448 * 0.0125."""

TILES = {
    "few8": Tile("few", 8, 64, 128, 2, 4),
    "few16": Tile("few", 16, 32, 256, 2, 3),
    "many16": Tile("many", 16, 32, 128, 4, 3),
    "many64": Tile("many", 64, 64, 256, 4, 3),
    "scaled16": Tile("scaled", 16, 64, 128, 4, 2),
    "scaled32": Tile("scaled", 32, 32, 256, 4, 2),
}
SHAPES = {
    # any path stores these but asm, whose nearest ones are behind them
    (1, 1): (32, 256),
    (50, 31): (32, 512),
    (3, 33): (96, 256),
    (70, 81): (96, 256),
    (33, 300): (64, 512),
    (64, 256): (64, 256),
    (37, 640): (96, 768),
}


@pytest.fixture(autouse=True)
def _true_bfloat16(monkeypatch):
    true_bfloat16(monkeypatch)


def inputs(m, k, dtype, generator):
    x = torch.randn((m, k), generator=generator)
    return x.to(dtype)


def bias_of(kind, n, dtype, generator):
    values = torch.randn(n, generator=generator) * 4
    return None if kind == "no" else values.to(dtype if kind == "own" else torch.float32)


def label(case):
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


CASES = list(
    pairwise(
        path=["asm", "triton", "kept"],
        tile=["few8", "few16", "many16", "many64"],
        shape=list(SHAPES),
        m=[1, 3, 17, 33, 70],
        splits=[1, 2, 3, 4],
        bias=["no", "own", "float32"],
        dtype=[torch.bfloat16, torch.float16, torch.float32],
        quant=INPUT_QUANTS,
    )
)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_products(case):
    generator = torch.Generator().manual_seed(len(label(case)))
    n, k = SHAPES[case["shape"]] if case["path"] == "asm" else case["shape"]
    m, dtype, quant = case["m"], case["dtype"], case["quant"]
    matrix = random_stored(case["path"], n, k, generator)
    x = inputs(m, k, dtype, generator)
    bias = bias_of(case["bias"], n, dtype, generator)
    static = torch.tensor(STATIC) if quant == "fp8_static" else None
    target = Target(m, n, dtype)
    tile = TILES[case["tile"]]._replace(splits=case["splits"])
    dense(
        between_nans(x), matrix.weight, matrix.scale, target.out, case["path"], quant,
        None if bias is None else guarded(bias, math.nan), static, tile,
    )  # fmt: skip
    assert_product(target.out, quantized64(x, quant, STATIC), matrix.dense, bias)
    assert target.untouched()


def test_the_cases_have_splits_that_do_not_divide():
    ragged = set()
    for case in CASES:
        tile = TILES[case["tile"]]._replace(splits=case["splits"])
        k = (SHAPES[case["shape"]] if case["path"] == "asm" else case["shape"])[1]
        each, splits = tile.division(k)
        if splits > 1 and each * splits * tile.bk > -(-k // tile.bk) * tile.bk:
            ragged.add(tile.kernel)
    assert ragged == {"few", "many"}


SCALED_CASES = list(
    pairwise(
        path=["asm", "triton", "kept"],
        tile=["scaled16", "scaled32"],
        shape=list(SHAPES),
        m=[1, 3, 17, 70],
        splits=[1, 2, 3],
        bias=["no", "own", "float32"],
        kind=[
            ("none", torch.bfloat16),
            ("mxfp4", torch.bfloat16),
            ("mxfp4", torch.float16),
            ("mxfp4", torch.float32),
        ],
    )
)


@pytest.mark.parametrize("case", SCALED_CASES, ids=label)
def test_scaled_products(case):
    generator = torch.Generator().manual_seed(len(label(case)))
    n, k = SHAPES[case["shape"]] if case["path"] == "asm" else case["shape"]
    (quant, dtype), m = case["kind"], case["m"]
    matrix = random_stored(case["path"], n, k, generator)
    x = inputs(m, k, dtype, generator)
    bias = bias_of(case["bias"], n, dtype, generator)
    target = Target(m, n, dtype)
    tile = TILES[case["tile"]]._replace(splits=case["splits"])
    dense(
        between_nans(x), matrix.weight, matrix.scale, target.out, case["path"], quant,
        None if bias is None else guarded(bias, math.nan), None, tile,
    )  # fmt: skip
    assert_product(target.out, quantized64(x, quant, STATIC), matrix.dense, bias)
    assert target.untouched()


EXPANDING_CASES = list(
    pairwise(
        path=["asm", "triton", "kept"],
        shape=[(1, 1), (70, 81), (37, 640)],
        m=[1, 70],
        bias=["no", "own"],
        dtype=[torch.bfloat16, torch.float16, torch.float32],
        quant=INPUT_QUANTS,
    )
)


@pytest.mark.parametrize("case", EXPANDING_CASES, ids=label)
def test_products_by_expanding(case):
    generator = torch.Generator().manual_seed(len(label(case)))
    n, k = SHAPES[case["shape"]] if case["path"] == "asm" else case["shape"]
    m, dtype, quant = case["m"], case["dtype"], case["quant"]
    if quant == "none":
        dtype = torch.bfloat16  # others take the kernels: they are more than one piece
    matrix = random_stored(case["path"], n, k, generator)
    x = inputs(m, k, dtype, generator)
    bias = bias_of(case["bias"], n, dtype, generator)
    rows = row_scales(x, quant, torch.tensor(STATIC))
    target = Target(m, n, dtype)
    by_expanding(
        between_nans(x), matrix.weight, matrix.scale, target.out, case["path"], quant, bias, rows
    )
    assert_product(target.out, quantized64(x, quant, STATIC), matrix.dense, bias)
    assert target.untouched()


@pytest.mark.parametrize("quant", ["none", "mxfp4", "fp8_token"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 50, 81), (17, 33, 256), (40, 64, 33), (70, 96, 128), (0, 8, 32)]
)
def test_the_backend_divides_the_work_itself(m, n, k, quant):
    generator = torch.Generator().manual_seed(m)
    for dtype in (torch.bfloat16, torch.float32):
        matrix = random_stored("triton", n, k, generator)
        x = inputs(m, k, dtype, generator)
        y = gemm(x, matrix.weight, matrix.scale, n, "triton", quant, bias=None, input_scale=None)
        assert y.dtype == dtype
        assert y.shape == (m, n)
        if m:
            assert_product(y, quantized64(x, quant, STATIC), matrix.dense, None)


def test_static_fp8_without_a_scale_is_refused():
    matrix = random_stored("kept", 8, 32, torch.Generator().manual_seed(0))
    x, out = torch.ones(1, 32), torch.empty(1, 8)
    with pytest.raises(UsageError, match="input_scale"):
        dense(x, matrix.weight, matrix.scale, out, "kept", "fp8_static", None, None)


# Exactness: a one in each row of x makes the product the weight.


def multiplied(matrix, x, tile, quant="none"):
    """x times the matrix with a Tile, or one of TILES."""
    target = Target(x.shape[0], matrix.n, x.dtype)
    tile = TILES[tile] if isinstance(tile, str) else tile
    dense(x, matrix.weight, matrix.scale, target.out, matrix.path, quant, None, None, tile)
    assert target.untouched()
    return target.out


def skip_where_emulated(kernel):
    here = torch.device("cuda")
    if kernel == "scaled" and torch.cuda.is_available() and not multiplies_mxfp4(here):
        pytest.skip("Triton emulates block-scaled products here, flushing subnormals: not used")


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("few", torch.bfloat16),
        ("few", torch.float32),
        ("many", torch.bfloat16),
        ("many", torch.float32),
        ("scaled", torch.bfloat16),
    ],
)
def test_one_hot_rows_are_every_code_under_every_scale_byte(kernel, dtype):
    """Bytes 0 to 254; what 253 and 254 would make infinite is left out here, since 0 * inf is NaN
    in every column of the row. Both ends of the range have all the other codes."""
    skip_where_emulated(kernel)
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes.flip(0) << 4).repeat(255, 1)
    for byte, most in ((253, 5), (254, 3)):
        low, high = packed[byte] & 15, packed[byte] >> 4
        low, high = (torch.where((part & 7) > most, part & 8, part) for part in (low, high))
        packed[byte] = low | high << 4
    matrix = stored("kept", packed, torch.arange(255, dtype=torch.uint8).view(255, 1), 32)
    assert matrix.dense.isfinite().all()
    found = multiplied(matrix, torch.eye(32, dtype=dtype), Tile(kernel, 16, 64, 32, 2, 2))
    assert torch.equal(found, matrix.dense.T.to(torch.float32).to(dtype))
    assert found[:, 0][found[:, 0] > 0].min().item() == 2.0**-128


@pytest.mark.parametrize("kernel", ["few", "many", "scaled"])
def test_one_hot_rows_are_the_weight_in_tiles(kernel):
    """256 scale bytes of one 32 x 256 matrix, no byte twice (but for three that are not finite)."""
    skip_where_emulated(kernel)
    generator = torch.Generator().manual_seed(5)
    scale = torch.randperm(256, generator=generator).to(torch.uint8).view(32, 8)
    scale = torch.where(scale > 252, scale - 100, scale)
    packed = torch.randint(0, 256, (32, 128), dtype=torch.uint8, generator=generator)
    matrix = stored("asm", packed, scale, 256)
    for rows, bk in ((32, 128), (64, 256)):
        found = multiplied(matrix, torch.eye(256).bfloat16(), Tile(kernel, 64, rows, bk, 2, 2))
        assert torch.equal(found.T.double(), matrix.dense)


@pytest.mark.parametrize("kernel", ["few", "many"])
@pytest.mark.parametrize("path", ["asm", "triton", "kept"])
def test_one_hot_rows_are_the_weight(kernel, path):
    n, k = (96, 512) if path == "asm" else (50, 81)
    matrix = random_stored(path, n, k, torch.Generator().manual_seed(6), low=1, high=250)
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(0))[:80]
    x = torch.zeros((80, k))
    x[torch.arange(80)[: len(columns)], columns] = 1.0
    found = multiplied(matrix, x, Tile(kernel, 32, 64, 256, 2, 2, splits=2))
    assert torch.equal(found.double(), matrix.dense.T[columns])


@pytest.mark.parametrize("tile", list(TILES))
@pytest.mark.parametrize("path", ["asm", "triton", "kept"])
def test_scale_byte_255_is_nan_in_its_rows_alone(path, tile):
    n, k = (96, 512) if path == "asm" else (50, 97)
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118, 130, (n, -(-k // 32)), dtype=torch.uint8, generator=generator)
    scale[0, 0] = scale[17, 1] = scale[n - 1, -1] = 255
    packed[17, 16:32] = 0  # NaN even where all codes are zero
    found = multiplied(stored(path, packed, scale, k), torch.randn(3, k).bfloat16(), tile)
    assert sorted(set(found.isnan().nonzero()[:, 1].tolist())) == [0, 17, n - 1]
    assert found[:, [0, 17, n - 1]].isnan().all()


@pytest.mark.parametrize("tile", ["few8", "few16", "many16", "many64"])
@pytest.mark.parametrize("k", [33, 97])
def test_the_padding_of_an_odd_column_count_is_not_read(k, tile):
    """The last byte's high code would be infinite, and infinity times zero NaN."""
    packed = torch.zeros((5, -(-k // 2)), dtype=torch.uint8)
    packed[:, -1] = 0x72  # 1, and beside it 6
    scale = torch.full((5, -(-k // 32)), 254, dtype=torch.uint8)
    matrix = stored("kept", packed, scale, k)
    x = torch.zeros((2, k))
    x[:, -1] = 1.0
    for splits in (1, 2):
        found = multiplied(matrix, x, TILES[tile]._replace(splits=splits))
        assert torch.equal(found, torch.full((2, 5), 2.0**127))


# Inputs.


@pytest.mark.parametrize("tile", ["few8", "many16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_bit_of_an_input_counts(dtype, tile):
    """Weights are 1 or 0, in one column: y is x, bit for bit."""
    packed = torch.zeros((1, 16), dtype=torch.uint8)
    packed[0, 3] = 0x20  # column 7
    matrix = stored("kept", packed, torch.full((1, 1), 127, dtype=torch.uint8), 32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((64, 32), generator=generator).to(dtype)
    step = torch.finfo(dtype).eps
    x[:4, 7] = torch.tensor([1 + step, -2 + step, 65504.0, 2.0**-24]).to(dtype)
    assert torch.equal(multiplied(matrix, x, tile)[:, 0], x[:, 7])


@pytest.mark.parametrize("tile", ["few8", "few16", "many16", "many64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_and_infinity_behave_as_in_floats(dtype, tile):
    n, k = 50, 81
    matrix = random_stored("triton", n, k, torch.Generator().manual_seed(3))
    x = torch.randn((6, k), generator=torch.Generator().manual_seed(4)).to(dtype)
    x[1, 5], x[2, 80], x[3, 0], x[3, 1] = math.inf, -math.inf, math.inf, -math.inf
    x[4, 44] = math.nan
    found = multiplied(matrix, x, tile)
    expected = x.double() @ matrix.dense.T
    assert not expected[[0, 5]].isnan().any()
    assert expected[1].isnan().any()  # 0 * inf
    assert expected[1].isinf().any()
    plain = expected.isfinite()
    assert_same_values(found[~plain].double(), expected[~plain])
    assert found[plain].isfinite().all()
    assert_product(found[[0, 5]], x[[0, 5]].double(), matrix.dense, None)


@pytest.mark.parametrize("tile", list(TILES))
def test_a_nan_makes_its_rows_nan_after_quantization_too(tile):
    matrix = random_stored("kept", 50, 81, torch.Generator().manual_seed(3))
    x = torch.randn((5, 81), generator=torch.Generator().manual_seed(4))
    x[2, 40] = math.nan
    for quant in ("mxfp4",) if tile.startswith("scaled") else ("mxfp4", "fp8_token", "mxfp6_e3m2"):
        found = multiplied(matrix, x, tile, quant)
        assert found[2].isnan().all(), quant
        assert not found[[0, 1, 3, 4]].isnan().any(), quant


@pytest.mark.parametrize("tile", ["few8", "few16", "many16", "scaled16", "scaled32"])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 30), (1, 30), (2, 31)])
def test_bfloat16_is_read_where_it_lies(tile, left, right):
    """Rows that start at whole words and not, at even and odd strides, k a multiple of the tile."""
    generator = torch.Generator().manual_seed(9)
    matrix = random_stored("triton", 40, 256, generator)
    x = inputs(5, 256, torch.bfloat16, generator)
    found = multiplied(matrix, between_nans(x, left, right), tile)
    assert_product(found, x.double(), matrix.dense, None)
    by_columns = x.T.contiguous().T
    assert by_columns.stride() != x.stride()
    assert torch.equal(multiplied(matrix, by_columns, tile), found)


@pytest.mark.parametrize("tile", ["few8", "many16", "scaled16"])
@pytest.mark.parametrize("quant", ["none", "mxfp4"])
def test_rows_do_not_depend_on_one_another(tile, quant):
    """Batch invariance: a row's bits are the same alone as among others."""
    generator = torch.Generator().manual_seed(10)
    matrix = random_stored("triton", 40, 289, generator)
    x = inputs(19, 289, torch.bfloat16, generator)
    together = multiplied(matrix, x, tile, quant)
    for row in (0, 8, 18):
        assert torch.equal(multiplied(matrix, x[row : row + 1], tile, quant)[0], together[row])


# Splits.


ORDERS = {
    "last first": lambda numbers: list(reversed(numbers)),
    "even first": lambda numbers: [*numbers[0::2], *numbers[1::2]],
    "shuffled": lambda numbers: torch.randperm(
        len(numbers), generator=torch.Generator().manual_seed(1)
    ).tolist(),
}


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("tile", ["few8", "many16", "scaled16"])
def test_splits_are_summed_in_one_order_whoever_comes_last(monkeypatch, tile, order):
    generator = torch.Generator().manual_seed(11)
    matrix = random_stored("kept", 40, 640, generator)
    x = inputs(9, 640, torch.float32, generator)
    split = TILES[tile]._replace(splits=5)
    assert split.division(640)[1] == 5
    quant = "mxfp4" if tile.startswith("scaled") else "none"
    expected = multiplied(matrix, x, split, quant)
    assert_product(expected, quantized64(x, quant, STATIC), matrix.dense, None)
    in_order(monkeypatch, ORDERS[order])
    assert torch.equal(multiplied(matrix, x, split, quant), expected)


def test_operands_that_do_not_lie_side_by_side():
    weight = torch.full((4, 16), 0x22, dtype=torch.uint8)
    scale = torch.arange(126, 130, dtype=torch.uint8).view(1, 4)
    x, bias = torch.ones((2, 32), dtype=torch.float32), torch.arange(8.0)
    expected = 32 * 2.0 ** torch.arange(-1.0, 3.0) + bias[::2]
    for w, s in ((weight, scale), (weight.t().contiguous().t(), scale.repeat(1, 2)[:, :4])):
        y = gemm(x, w, s, 4, "triton", "none", bias=bias[::2], input_scale=None)
        assert torch.equal(y, expected.expand(2, 4))
