"""The E2M1 / E8M0 codec against ml_dtypes, torch, and bytes recorded from Quark and AITER."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mxfp4prep import mxfp4
from mxfp4prep.errors import LayoutError

TESTS = Path(__file__).parent
VECTORS_FILE = TESTS / "data" / "fixtures" / "quark_pack_vectors.safetensors"
VECTORS = load_file(VECTORS_FILE)
with safe_open(VECTORS_FILE, "pt") as _file:
    ROWS = json.loads(_file.metadata()["rows"])
GOLDEN = load_file(TESTS / "data" / "golden" / "aiter_layouts.safetensors")
ACTIVATIONS = sorted(name[:-2] for name in GOLDEN if name.endswith(".x"))

ALL_BYTES = np.arange(256, dtype=np.uint8)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E8M0 = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Float32 bit patterns, every NaN as one."""
    assert values.dtype == torch.float32
    return torch.where(values.isnan(), 0x7FC00000, values.contiguous().view(torch.int32))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    wrong = (bits(actual) != bits(expected)).nonzero()
    assert not len(wrong), f"{len(wrong)} values differ, first at {wrong[0].tolist()}"


def every_product() -> torch.Tensor:
    """(256 scale bytes, 16 codes) float32: products in float64, rounded once."""
    with np.errstate(over="ignore"):
        return torch.from_numpy((E8M0[:, None] * E2M1).astype(np.float32))


def every_pair(low_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 twice, 32 a row, under each scale byte; in one row order or the other."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    if not low_first:
        codes = codes.flip(0)
    packed = codes[0::2] | (codes[1::2] << 4)
    return packed.expand(256, 16).contiguous(), torch.arange(256, dtype=torch.uint8).view(256, 1)


# Decoding.


@pytest.mark.parametrize("low_first", [True, False])
def test_every_code_under_every_scale(low_first, tried):
    packed, scale = every_pair(low_first)
    expected = every_product().repeat(1, 2)
    if not low_first:
        expected = expected.flip(1)
    assert_same_bits(mxfp4.decode(packed, scale, 32), expected)
    tried("N1", 256 * 16)


def test_scale_byte_zero_is_the_subnormal():
    ones = torch.full((1, 16), 0x22, dtype=torch.uint8)
    value = mxfp4.decode(ones, torch.zeros(1, 1, dtype=torch.uint8), 32)
    assert value.view(torch.int32).tolist() == [[0x00400000] * 32]
    assert value[0, 0].item() == 2.0**-127


def test_the_nan_of_scale_byte_255_is_the_quiet_one():
    ones = torch.full((1, 16), 0xA2, dtype=torch.uint8)
    scale = torch.full((1, 1), 255, dtype=torch.uint8)
    values = mxfp4.decode(ones, scale, 32)
    assert values.view(torch.int32).tolist() == [[0x7FC00000] * 32]


def test_scale_bytes_are_torchs_float8_e8m0fnu():
    ones = torch.full((256, 16), 0x22, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    expected = scale.view(torch.float8_e8m0fnu).to(torch.float32)
    assert_same_bits(mxfp4.decode(ones, scale, 32), expected.expand(256, 32))


def test_nothing_is_flushed_where_subnormals_are_off():
    packed, scale = every_pair(True)
    expected = every_product().repeat(1, 2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        mxfp4._pairs.cache_clear()
        values = mxfp4.decode(packed, scale, 32)
        half = mxfp4.decode(packed, scale, 32, torch.bfloat16)
    finally:
        torch.set_flush_denormal(False)
        mxfp4._pairs.cache_clear()
    assert_same_bits(values, expected)
    assert_same_bits(half.float(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_other_dtypes(dtype):
    packed, scale = every_pair(True)
    values = mxfp4.decode(packed, scale, 32, dtype)
    assert values.dtype == dtype
    expected = every_product().repeat(1, 2)
    if dtype != torch.float16:  # float16 does not hold them all
        assert_same_bits(values.to(torch.float32), expected)
    assert torch.equal(values.nan_to_num(nan=7), expected.to(dtype).nan_to_num(nan=7))


def test_every_byte_as_quark_unpacks_it():
    packed = VECTORS["all_bytes"]
    scale = torch.full((16, 1), 127, dtype=torch.uint8)
    assert_same_bits(mxfp4.decode(packed, scale, 32), VECTORS["all_bytes_decoded"])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_decode_as_quark_dequantizes(kind):
    packed, scale = VECTORS[f"packed_{kind}_even"], VECTORS[f"scale_{kind}_even"]
    assert_same_bits(mxfp4.decode(packed, scale, 32), VECTORS[f"dequant_{kind}_even"])


def loop_decode(packed: torch.Tensor, scale: torch.Tensor, k: int) -> torch.Tensor:
    """One value at a time, with ml_dtypes' tables."""
    rows = []
    for codes, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        nibbles = [n for byte in codes for n in (byte & 15, byte >> 4)]
        rows.append([float(E2M1[nibbles[j]] * E8M0[scales[j // 32]]) for j in range(k)])
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32)


@pytest.mark.parametrize("k", [1, 2, 30, 31, 32, 33, 34, 63, 64, 80, 96, 640])
def test_groups_and_short_last_groups(k):
    generator = torch.Generator().manual_seed(k)
    packed = torch.randint(0, 256, (5, -(-k // 2)), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 255, (5, -(-k // 32)), dtype=torch.uint8, generator=generator)
    values = mxfp4.decode(packed, scale, k)
    assert values.is_contiguous()
    assert_same_bits(values, loop_decode(packed, scale, k))


@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 4), (2, 3, 4), (0,), (0, 5)])
def test_leading_dimensions_and_strides(lead):
    generator = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (*lead, 48), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 140, (*lead, 3), dtype=torch.uint8, generator=generator)
    values = mxfp4.decode(packed, scale, 96)
    assert values.shape == (*lead, 96)
    expected = loop_decode(
        packed.reshape(-1, 48) if packed.numel() else packed.view(0, 48),
        scale.reshape(-1, 3) if scale.numel() else scale.view(0, 3),
        96,
    )
    assert_same_bits(values.flatten(), expected.flatten())
    if packed.dim() == 3:
        by_row = packed.transpose(0, 1).contiguous().transpose(0, 1)
        by_column = scale.transpose(1, 2).contiguous().transpose(1, 2)
        assert_same_bits(mxfp4.decode(by_row, by_column, 96), values)


def test_decoding_in_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(6)
    packed = torch.randint(0, 256, (101, 40), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (101, 3), dtype=torch.uint8, generator=generator)
    whole = mxfp4.decode(packed, scale, 80)
    assert packed.numel() < mxfp4._CHUNK_BYTES
    for rows in (1, 7, 100):
        monkeypatch.setattr(mxfp4, "_CHUNK_BYTES", rows * 40)
        assert_same_bits(mxfp4.decode(packed, scale, 80), whole)
    monkeypatch.setattr(mxfp4, "_CHUNK_BYTES", 1)
    assert_same_bits(mxfp4.decode(packed, scale, 80), whole)


def test_what_is_decoded_at_a_time_does_not_grow(monkeypatch):
    sizes = []
    real = torch.index_select

    def counted(table, dim, index, out):
        sizes.append(index.numel())
        return real(table, dim, index, out=out)

    monkeypatch.setattr(torch, "index_select", counted)
    monkeypatch.setattr(mxfp4, "_CHUNK_BYTES", 100)
    mxfp4.decode(
        torch.zeros((7, 40), dtype=torch.uint8), torch.zeros((7, 3), dtype=torch.uint8), 80
    )
    assert sizes == [80, 80, 80, 40]


@pytest.mark.parametrize(
    ("packed", "scale", "k", "message"),
    [
        (
            (4, 16),
            (4, 1),
            64,
            r"^packed codes: wrong shape for 64 values a row: found \(4, 16\), expected \(4, 32\)",
        ),
        ((4, 32), (4, 1), 64, r"scales: .*found \(4, 1\), expected \(4, 2\)"),
        ((4, 40), (4, 2), 80, r"scales: .*found \(4, 2\), expected \(4, 3\)"),
        ((4, 32), (3, 2), 64, r"scales: .*found \(3, 2\), expected \(4, 2\)"),
        ((2, 4, 32), (8, 2), 64, r"scales: .*found \(8, 2\), expected \(2, 4, 2\)"),
    ],
)
def test_decode_refuses_wrong_shapes(packed, scale, k, message):
    with pytest.raises(LayoutError, match=message):
        mxfp4.decode(torch.zeros(packed).byte(), torch.zeros(scale).byte(), k)


def test_decode_refuses_wrong_dtypes():
    packed, scale = torch.zeros(1, 16).byte(), torch.zeros(1, 1).byte()
    with pytest.raises(LayoutError, match=r"packed codes: need bytes: found torch\.int8"):
        mxfp4.decode(packed.view(torch.int8), scale, 32)
    with pytest.raises(LayoutError, match=r"scales: need bytes: found torch\.float32"):
        mxfp4.decode(packed, scale.float(), 32)


# Quantizing.


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_quantize_as_quark(kind):
    packed, scale = mxfp4.quantize(VECTORS[f"input_{kind}"])
    assert len(ROWS) == len(packed) == 60
    expected = VECTORS[f"packed_{kind}_even"], VECTORS[f"scale_{kind}_even"]
    wrong = [
        name
        for row, name in enumerate(ROWS)
        if not torch.equal(packed[row], expected[0][row])
        or not torch.equal(scale[row], expected[1][row])
    ]
    assert wrong == []


def test_the_vectors_hold_the_edge_cases():
    """The edges this file claims to cover are really among the rows."""
    scale = {name: VECTORS["scale_f32_even"][row].item() for row, name in enumerate(ROWS)}
    assert scale["all zero"] == 1
    assert scale["subnormal amax 1e-40"] == scale["smallest subnormal"] == 1
    assert scale["amax 2^-125 (scale clamps, byte 1)"] == 1
    assert scale["+inf"] == scale["-inf"] == scale["amax 1.75*2^127 (rounds to 2^128)"] == 254
    assert "e2m1 midpoints, amax 6" in ROWS


@pytest.mark.parametrize(("name", "columns"), [("w48x640", 20), ("w4x80", 3)])
def test_quantize_a_matrix_as_quark(name, columns):
    packed, scale = mxfp4.quantize(VECTORS[name])
    assert scale.shape[1] == columns
    assert torch.equal(packed, VECTORS[f"{name}_packed"])
    assert torch.equal(scale, VECTORS[f"{name}_scale"])
    stacked = mxfp4.quantize(VECTORS[name].unflatten(0, (2, -1)))
    assert torch.equal(stacked[0].flatten(0, 1), packed)
    assert torch.equal(stacked[1].flatten(0, 1), scale)


@pytest.mark.parametrize("stem", ACTIVATIONS)
def test_quantize_activations_as_aiter(stem):
    packed, scale = mxfp4.quantize(GOLDEN[f"{stem}.x"], activation=True)
    assert torch.equal(packed, GOLDEN[f"{stem}.even.q"])
    assert torch.equal(scale, GOLDEN[f"{stem}.even.scale"])
    assert scale[0, 0] == 0  # the all-zero block
    weights = mxfp4.quantize(GOLDEN[f"{stem}.x"])
    assert weights[1][0, 0] == 1
    assert not ((weights[0] & 15 == 8) | (weights[0] >> 4 == 8)).any()
    assert ((packed & 15 == 8) | (packed >> 4 == 8)).any()


def test_the_activation_vectors_are_all_there():
    assert ACTIVATIONS == ["act.m1_k256", "act.m33_k512", "act.m40_k320", "act.m5_k64"]


def test_odd_columns():
    x = torch.tensor([[1.0, -6.0, 3.0]])
    packed, scale = mxfp4.quantize(x)
    assert packed.tolist() == [[0xF2, 0x05]]
    assert scale.tolist() == [[127]]
    assert torch.equal(mxfp4.decode(packed, scale, 3), x)


@pytest.mark.parametrize("activation", [False, True])
def test_nan_marks_its_group_and_no_other(activation):
    x = torch.ones(2, 64)
    x[1, 40] = torch.nan
    packed, scale = mxfp4.quantize(x, activation=activation)
    assert scale.tolist() == [[125, 125], [125, 255]]
    assert not packed[1, 16:].any()
    values = mxfp4.decode(packed, scale, 64)
    assert values[1, 32:].isnan().all()
    assert torch.equal(values[0], x[0])
    assert torch.equal(values[1, :32], x[1, :32])


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF])
def test_any_nan(pattern):
    x = torch.zeros(32)
    x.view(torch.int32)[3] = pattern
    assert x[3].isnan()
    assert mxfp4.quantize(x)[1].tolist() == [255]
    assert mxfp4.fake_quantize(x).isnan().all()


@pytest.mark.parametrize(("activation", "code"), [(False, 6), (True, 7)])
def test_infinity_saturates(activation, code):
    x = torch.zeros(32)
    x[0], x[1], x[2] = torch.inf, -torch.inf, 1.0
    packed, scale = mxfp4.quantize(x, activation=activation)
    assert packed.tolist() == [(code | 8) << 4 | code] + [0] * 15
    assert scale.tolist() == [254]
    assert torch.equal(mxfp4.decode(packed, scale, 32)[:2], x[:2])


def test_quantizing_decoded_values_changes_nothing():
    """Every group whose absmax is 4 or 6 comes back bit for bit; so do scale and codes."""
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(0, 16, (64, 32), dtype=torch.uint8, generator=generator)
    codes[codes == 8] = 0
    codes[:, 5] = torch.tensor([6, 7]).repeat(32)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scale = torch.arange(1, 65, dtype=torch.uint8).view(64, 1) * 3
    again = mxfp4.quantize(mxfp4.decode(packed, scale, 32))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


@pytest.mark.parametrize("bad", [torch.tensor(1.0), torch.ones(4, 32, dtype=torch.int32)])
def test_quantize_refuses_what_is_no_row_of_floats(bad):
    for call in (mxfp4.quantize, mxfp4.fake_quantize):
        with pytest.raises(
            LayoutError,
            match=r"^input: cannot be quantized: found [02] dimensions of torch\.\w+, "
            r"expected floats in rows$",
        ):
            call(bad)


# Fake quantization.

MX_ORACLES = {
    "fp4": (ml_dtypes.float4_e2m1fn, 2, 1, 6.0),
    "fp6_e2m3": (ml_dtypes.float6_e2m3fn, 2, 3, 7.5),
    "fp6_e3m2": (ml_dtypes.float6_e3m2fn, 4, 2, 28.0),
}
each_element = pytest.mark.parametrize("element", MX_ORACLES)


def mx_oracle(x: np.ndarray, element: str) -> np.ndarray:
    """Group by group in float64, elements rounded by ml_dtypes."""
    dtype, emax, mantissa_bits, largest = MX_ORACLES[element]
    result = np.zeros(x.shape, dtype=np.float64)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            group = x[row, start : start + 32].astype(np.float64)
            absmax = np.abs(group).max()
            fraction, exponent = np.frexp(absmax)  # absmax = 2 * fraction * 2^(exponent - 1)
            shared = -127
            if absmax:
                rounds_up = 2 * fraction >= 2 - 0.5 ** (mantissa_bits + 1)
                shared = int(np.clip(exponent - 1 + rounds_up - emax, -127, 127))
                if exponent - 1 + rounds_up == 128:  # the rounded absmax is infinite in float32
                    shared = 127
            scaled = np.clip(np.ldexp(group, -shared), -largest, largest)
            result[row, start : start + 32] = np.ldexp(
                scaled.astype(dtype).astype(np.float64), shared
            )
    with np.errstate(over="ignore"):
        return result.astype(np.float32)


def wide_noise(rows: int, k: int, seed: int) -> torch.Tensor:
    """Rows of very different size, values of very different size in a row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    x *= torch.exp2(torch.randint(-6, 3, (rows, k), generator=generator))
    return x * torch.exp2(torch.linspace(-120, 118, rows)).view(-1, 1)


@each_element
@pytest.mark.parametrize("k", [32, 80, 256])
def test_fake_quantize_is_the_oracles(element, k):
    x = wide_noise(97, k, seed=k)
    assert_same_bits(
        mxfp4.fake_quantize(x, element), torch.from_numpy(mx_oracle(x.numpy(), element))
    )


@each_element
def test_every_bfloat16_below_the_largest_element(element):
    """One group each: the largest element (which sets scale 1) and 31 of all bfloat16 values."""
    largest = MX_ORACLES[element][3]
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() <= largest]
    values = values[: len(values) // 31 * 31].view(-1, 31)
    assert len(values) > 1000
    x = torch.cat((torch.full((len(values), 1), largest), values), dim=1)
    expected = x.numpy().astype(MX_ORACLES[element][0]).astype(np.float32)
    assert_same_bits(mxfp4.fake_quantize(x, element), torch.from_numpy(expected))


@each_element
def test_ties_and_their_neighbours(element):
    """Midpoints between neighbouring element values, and one float32 to either side."""
    dtype, _, _, largest = MX_ORACLES[element]
    count = 8 if element == "fp4" else 32
    grid = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    points = np.concatenate([grid, middle, np.nextafter(middle, 99, dtype=np.float32)])
    points = np.concatenate([points, np.nextafter(middle, 0, dtype=np.float32)])
    for sign in (1, -1):
        x = np.full((len(points), 32), sign * largest, dtype=np.float32)
        x[:, 1] = sign * points
        expected = torch.from_numpy(x.astype(dtype).astype(np.float32))
        assert_same_bits(mxfp4.fake_quantize(torch.from_numpy(x), element), expected)


@each_element
def test_scale_thresholds(element):
    """The shared exponent steps up exactly where the absmax's mantissa says, at any magnitude."""
    _, _, mantissa_bits, _ = MX_ORACLES[element]
    threshold = np.float32(2 - 0.5 ** (mantissa_bits + 1))
    at = [np.nextafter(threshold, np.float32(0)), threshold, np.float32(1), np.float32(1.5)]
    at.append(np.nextafter(np.float32(2), np.float32(0)))
    exponents = [-126, -125, -124, -123, -122, -121, -60, -1, 0, 1, 60, 125, 126, 127]
    amax = np.array([np.ldexp(a, e) for e in exponents for a in at], dtype=np.float32)
    x = np.zeros((len(amax), 32), dtype=np.float32)
    x[:, 7], x[:, 8] = amax, -amax / 3
    expected = torch.from_numpy(mx_oracle(x, element))
    assert_same_bits(mxfp4.fake_quantize(torch.from_numpy(x), element), expected)


@pytest.mark.parametrize("stem", ACTIVATIONS)
def test_fp4_fake_quantization_is_decode_of_quantize(stem):
    x = GOLDEN[f"{stem}.x"]
    expected = mxfp4.decode(GOLDEN[f"{stem}.even.q"], GOLDEN[f"{stem}.even.scale"], x.shape[1])
    assert_same_bits(mxfp4.fake_quantize(x), expected)


def test_fp4_fake_quantization_is_decode_of_quantize_at_any_size():
    tiny = torch.randn(60, 80, generator=torch.Generator().manual_seed(5))
    tiny *= 2.0**-100
    tiny *= torch.exp2(-torch.arange(60)).view(-1, 1)
    x = torch.cat((wide_noise(97, 80, seed=4), tiny, torch.zeros(1, 80), -torch.zeros(1, 80)))
    packed, scale = mxfp4.quantize(x, activation=True)
    assert {0, 1, 2} <= set(scale.flatten().tolist())
    assert_same_bits(mxfp4.fake_quantize(x), mxfp4.decode(packed, scale, 80))


def test_fake_quantize_keeps_its_input_shape_and_leading_dimensions():
    x = wide_noise(12, 80, seed=3)
    kept = x.clone()
    whole = mxfp4.fake_quantize(x)
    assert_same_bits(mxfp4.fake_quantize(x.view(3, 4, 80)).flatten(0, 1), whole)
    assert_same_bits(mxfp4.fake_quantize(x.t().contiguous().t()), whole)
    assert_same_bits(mxfp4.fake_quantize(x[2]), whole[2])
    assert mxfp4.fake_quantize(x[:0]).shape == (0, 80)
    assert torch.equal(x, kept)
    mxfp4.quantize(x)
    assert torch.equal(x, kept)


@each_element
def test_fake_quantize_of_infinity_and_nan(element):
    x = torch.ones(3, 32)
    x[1, 4], x[2, 4] = -torch.inf, torch.nan
    values = mxfp4.fake_quantize(x, element)
    assert torch.equal(values[0], x[0])
    assert values[1, 4] == -torch.inf
    assert (values[1, :4] == 0).all()
    assert values[2].isnan().all()


# FP8 activations.


def fp8_oracle(scaled: np.ndarray) -> np.ndarray:
    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.0371, 2.0**-20, 3.0])
def test_static_fp8(dtype, scale):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = (values[values.isfinite()].float() * scale).to(dtype).view(-1, 64)
    x = x[x.isfinite().all(-1)]
    expected = fp8_oracle(x.float().numpy() / np.float32(scale)) * np.float32(scale)
    for given in (scale, torch.tensor(scale), torch.tensor([scale])):
        assert_same_bits(mxfp4.fake_quantize_fp8(x, given), torch.from_numpy(expected))


def test_static_fp8_saturates_and_keeps_nan():
    x = torch.tensor([1000.0, -1000.0, torch.inf, -torch.inf, torch.nan, 448.0, 0.0])
    expected = torch.tensor([224.0, -224.0, 224.0, -224.0, torch.nan, 224.0, 0.0])
    assert_same_bits(mxfp4.fake_quantize_fp8(x, 0.5), expected)
    scale = torch.tensor(0.0371).bfloat16()  # as the checkpoint stores it
    assert mxfp4.fake_quantize_fp8(torch.tensor([1e9]), scale).item() == 448 * scale.item()


def test_fp8_per_token():
    x = wide_noise(60, 96, seed=9)[10:50]
    x[7] = 0
    scale = np.abs(x.numpy()).max(axis=1, keepdims=True) / np.float32(448)
    scale[scale == 0] = 1
    expected = torch.from_numpy(fp8_oracle(x.numpy() / scale) * scale)
    assert_same_bits(mxfp4.fake_quantize_fp8_per_token(x), expected)
    assert not mxfp4.fake_quantize_fp8_per_token(x)[7].any()
    assert_same_bits(mxfp4.fake_quantize_fp8_per_token(x.view(5, 8, 96)).flatten(0, 1), expected)
    for row in (0, 20):  # each row by itself
        assert_same_bits(mxfp4.fake_quantize_fp8_per_token(x[row]), expected[row])


def test_fp8_per_tensor():
    x = wide_noise(60, 96, seed=9)[10:50]
    scale = np.abs(x.numpy()).max() / np.float32(448)
    expected = torch.from_numpy(fp8_oracle(x.numpy() / scale) * scale)
    assert_same_bits(mxfp4.fake_quantize_fp8_per_tensor(x), expected)
    assert not mxfp4.fake_quantize_fp8_per_tensor(torch.zeros(2, 32)).any()
    assert mxfp4.fake_quantize_fp8_per_tensor(torch.zeros(0, 32)).shape == (0, 32)


def test_element_limits():
    assert {name: e.largest for name, e in mxfp4.ELEMENTS.items()} == {
        name: float(ml_dtypes.finfo(dtype).max) for name, (dtype, *_) in MX_ORACLES.items()
    }
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max) == mxfp4.FP8_MAX


@pytest.mark.parametrize("shape", [(4, 0), (0, 64), (2, 3, 0), (2, 0, 64), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_decodes_to_nothing(shape, dtype):
    *rows, k = shape
    packed, scale = (torch.zeros((*rows, k // size), dtype=torch.uint8) for size in (2, 32))
    found = mxfp4.decode(packed, scale, k, dtype)
    assert found.shape == shape
    assert found.dtype == dtype
