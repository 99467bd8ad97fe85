"""Activations as kernels read them: MX and FP8 roundings, sums of bfloat16 pieces, MXFP4 codes."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import (
    MX,
    Target,
    assert_same_values,
    between_nans,
    fp8_codes64,
    guarded,
    mx64,
    ported,
    true_bfloat16,
)
from prepared_factory import decode64, fake_quantize64
from safetensors import safe_open
from safetensors.torch import load_file

pytest.importorskip("triton")

from mxfp4prep.runtime.kernels import launch
from mxfp4prep.runtime.kernels.arrange import arrange, encode

arranged = ported(launch.arranged)

pytestmark = [  # numpy says of infinities what GPUs do in silence
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DATA = Path(__file__).parent / "data"
VECTORS_FILE = DATA / "fixtures" / "quark_pack_vectors.safetensors"
VECTORS = load_file(VECTORS_FILE)
with safe_open(VECTORS_FILE, "pt") as _file:
    ROWS = json.loads(_file.metadata()["rows"])
GOLDEN = load_file(DATA / "golden" / "aiter_layouts.safetensors")
ACTIVATIONS = sorted(name[:-2] for name in GOLDEN if name.endswith(".x"))

NAN, INF = math.nan, math.inf
PARAMETERS = {"mxfp4": (1, 0, 2), "mxfp6_e2m3": (3, 0, 2), "mxfp6_e3m2": (2, -2, 4)}
"""Mantissa bits, exponents of the smallest and the largest normal number (OCP MX 1.0, 5.3)."""


@pytest.fixture(autouse=True)
def _true_bfloat16(monkeypatch):
    true_bfloat16(monkeypatch)


def encoded(x, p=None, c=None, bm=1, bk=256):
    """The kernel's codes and scale bytes of x, p and c bytes a row; buffers of poison around."""
    m, k = x.shape
    p, c = -(-k // 2) if p is None else p, -(-k // 32) if c is None else c
    codes = guarded(torch.full((m, p), 0xAA, dtype=torch.uint8), 0x55)
    scales = guarded(torch.full((m, c), 0xAA, dtype=torch.uint8), 0x55)
    grid = (-(-m // bm), -(-max(2 * p, 32 * c) // bk))
    ported(encode[grid])(x, codes, scales, m, k, x.stride(0), p, c, BM=bm, BK=bk)
    for tensor in (codes, scales):
        start, size = tensor.storage_offset(), tensor.numel()
        buffer = tensor.as_strided((2 * start + size,), (1,), 0)
        assert (buffer[:start] == 0x55).all()
        assert (buffer[start + size :] == 0x55).all()
    return codes, scales


def no_negative_zero(codes):
    low, high = codes & 15, codes >> 4
    low, high = (torch.where(part == 8, 0, part) for part in (low, high))
    return low | high << 4


# Codes.


@pytest.mark.parametrize("bm", [1, 2])
@pytest.mark.parametrize("stem", ACTIVATIONS)
def test_encode_as_aiter(stem, bm):
    codes, scales = encoded(GOLDEN[f"{stem}.x"], bm=bm)
    assert torch.equal(codes, GOLDEN[f"{stem}.even.q"])
    assert torch.equal(scales, GOLDEN[f"{stem}.even.scale"])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_encode_as_quark(kind):
    """But for what differs by intent between weights and activations: Quark's scale bytes are 1 at
    least, its zeros have no sign, and an infinity is code 6."""
    x, packed, scale = (
        VECTORS[name] for name in (f"input_{kind}", f"packed_{kind}_even", f"scale_{kind}_even")
    )
    codes, scales = encoded(x)
    same_scale = (scale[:, 0] > 1) | (scales[:, 0] == 1)
    assert sum(same_scale.tolist()) >= 50
    assert torch.equal(scales.clamp(min=1), scale)
    codes = no_negative_zero(codes)
    infinite = x.isinf().any(1)
    assert set(infinite.tolist()) == {False, True}
    compared = same_scale & ~infinite
    different = (codes != packed).any(1) & compared
    assert [name for name, wrong in zip(ROWS, different.tolist(), strict=True) if wrong] == []
    unpacked = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    assert (unpacked[x == INF] == 7).all()
    assert (unpacked[x == -INF] == 15).all()


@pytest.mark.parametrize("name", ["w48x640", "w4x80"])
def test_encode_a_matrix_as_quark(name):
    codes, scales = encoded(VECTORS[name], bm=2)
    assert torch.equal(no_negative_zero(codes), VECTORS[f"{name}_packed"])
    assert torch.equal(scales, VECTORS[f"{name}_scale"])


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 81, 256, 289])
def test_codes_are_zero_from_k_on(k):
    """Two groups and more beyond the last one; what lies beside x is not read."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn((3, k), generator=generator)
    p, c = -(-k // 64) * 32 + 64, -(-k // 32) + 4
    codes, scales = encoded(between_nans(x), p, c, bm=2)
    groups = -(-k // 32)
    if k % 2:
        assert not (codes[:, k // 2] >> 4).any()
    assert not codes[:, -(-k // 2) :].any()
    assert not scales[:, groups:].any()
    found = decode64(codes[:, : -(-k // 2)], scales[:, :groups], k)
    assert torch.equal(found, fake_quantize64(x))


def test_zero_keeps_its_sign():
    x = torch.tensor([[0.0, -0.0, 1.0, -1e-9, 1e-9]])
    codes, scales = encoded(x)
    assert codes.tolist() == [[0x80, 0x86, 0x00]]  # scale 2^-2: 1.0 is code 6, 4 * 2^-2
    assert scales.tolist() == [[125]]
    codes, scales = encoded(torch.tensor([[0.0, -0.0]]))
    assert (codes.tolist(), scales.tolist()) == ([[0x80]], [[0]])


def test_ties_go_to_the_even_code():
    """Midpoints of neighbouring codes, and both float32 next to each, at scale 1 (a 6 in front)."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    midpoints = torch.tensor([(a + b) / 2 for a, b in pairwise(values)])
    below, above = (torch.nextafter(midpoints, torch.tensor(to)) for to in (-INF, INF))
    rows = torch.stack((midpoints, below, above, -midpoints))
    codes, scales = encoded(torch.cat((torch.full((4, 1), 6.0), rows), 1))
    assert (scales == 127).all()
    unpacked = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, 1:8]
    assert unpacked.tolist() == [
        [0, 2, 2, 4, 4, 6, 6],
        [0, 1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7],
        [8, 10, 10, 12, 12, 14, 14],
    ]


def test_a_nan_is_scale_byte_255_of_its_group_alone():
    x = torch.randn((4, 96), generator=torch.Generator().manual_seed(0))
    x[1, 40], x[2, 95], x[2, 64], x[3, 31] = NAN, NAN, INF, -NAN
    _, scales = encoded(x, bm=2)
    is_nan = scales == 255
    assert is_nan.nonzero().tolist() == [[1, 1], [2, 2], [3, 0]]


def test_infinities_are_code_seven_at_the_largest_scale():
    x = torch.zeros((1, 32))
    x[0, :4] = torch.tensor([INF, -INF, 2.0**127, 1.0])
    codes, scales = encoded(x)
    assert scales.tolist() == [[254]]
    assert codes[0, :2].tolist() == [0xF7, 0x02]


# MX values.


def edges(top):
    """float32 rows of 32 with what rounding may stumble on."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for exponent in (-149, -140, -130, -127, -126, -125, -100, -8, 0, 9, 100, 120):
        row = torch.randn(32, generator=generator).double() * 2.0**exponent
        rows.append(row.float())
    for mantissa in (1.0, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.984375, 2.0):
        for nudge in (0, -1, 1):  # maxima at and beside where they count as the next power of two
            row = torch.randn(32, generator=generator) / 4
            bits = torch.tensor(mantissa * 2.0**top).view(torch.int32) + nudge
            row[5] = -bits.view(torch.float32)
            rows.append(row)
    step = torch.arange(32) / 32.0  # all ties of the smaller elements, at scale 1
    rows += [step, -step, step * 4, torch.zeros(32), -torch.zeros(32)]
    rows.append(torch.full((32,), torch.finfo(torch.float32).max))
    return torch.stack(rows)


@pytest.mark.parametrize("name", list(MX))
def test_mx_values_are_exact(name):
    x = edges(PARAMETERS[name][2])
    found = arranged(x, name, None, 32).tensor
    assert found.shape == (1, len(x), 32)
    assert_same_values(found[0].double(), mx64(x, name).float().double())
    assert not found[0, -2].any()


def test_mx_values_of_fp4_are_those_of_the_other_oracle():
    x = edges(2)[12:-1]
    assert torch.equal(arranged(x, "mxfp4", None, 32).tensor[0].double(), fake_quantize64(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "m", "k"), [
    ("mxfp4", 3, 81), ("mxfp6_e2m3", 1, 33), ("mxfp6_e3m2", 33, 31), ("mxfp4", 257, 1),
    ("mxfp6_e2m3", 70, 96), ("mxfp4", 2, 300),
])  # fmt: skip
def test_mx_values_of_any_shape(name, m, k, dtype):
    x = torch.randn((m, k), generator=torch.Generator().manual_seed(m)).to(dtype)
    width = -(-k // 64) * 64 + 32
    found = arranged(between_nans(x), name, None, width).tensor[0]
    assert torch.equal(found[:, :k].double(), mx64(x, name))
    assert not found[:, k:].any()


@pytest.mark.parametrize("name", list(MX))
def test_nan_and_infinity_in_mx(name):
    x = torch.ones((4, 64))
    x[0, 3], x[1, 40], x[2, 1], x[2, 2], x[3, 63] = NAN, INF, -INF, NAN, -INF
    found = arranged(x, name, None, 64).tensor[0]
    assert found.isnan().nonzero().tolist() == [
        *([0, column] for column in range(32)),
        *([2, column] for column in range(32)),
    ]
    expected = torch.ones((4, 64), dtype=torch.bfloat16)
    expected[1, 32:], expected[3, 32:] = 0.0, 0.0  # 1 at a scale of 2^127
    expected[1, 40], expected[3, 63] = INF, -INF
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[3], expected[3])


# FP8 values.


def test_fp8_values_are_exact():
    """Every float8_e4m3fn, every midpoint of two, and float32 beside those, at scale 1."""
    exact = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = torch.from_numpy(np.concatenate((exact, (exact[1:] + exact[:-1]) / 2)))
    nudged = [torch.nextafter(values, torch.tensor(to)) for to in (-1e9, 1e9)]
    x = torch.cat((values, *nudged, torch.tensor([448.1, 480.0, 1e30, 1e-30, 2.0**-10]))).view(
        1, -1
    )
    for sign in (1.0, -1.0):
        scale = torch.ones(1)
        found = arranged(sign * x, "fp8_static", scale, x.shape[1])
        assert torch.equal(found.row_scale, scale)
        assert torch.equal(found.tensor[0].double(), fp8_codes64(sign * x, scale))


@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 81), (33, 33), (257, 31)])
def test_fp8_values_are_in_units_of_their_rows_scale(m, k):
    generator = torch.Generator().manual_seed(m)
    x = torch.randn((m, k), generator=generator)
    scale = torch.rand(m, generator=generator) / 100 + 1e-3
    found = arranged(between_nans(x), "fp8_token", scale, 96).tensor[0]
    assert torch.equal(found[:, :k].double(), fp8_codes64(x, scale[:, None]))
    assert not found[:, k:].any()


def test_nan_and_infinity_in_fp8():
    x = torch.tensor([[NAN, INF, -INF, 1.0]])
    found = arranged(x, "fp8_static", torch.ones(1), 4).tensor[0]
    assert found[0, 0].isnan()
    assert found[0, 1:].tolist() == [448.0, -448.0, 1.0]  # saturated


# Pieces.


def pieces_of(x):
    tensor = arranged(x, "none", None, x.shape[1]).tensor
    assert tensor.dtype == torch.bfloat16
    return tensor


def test_float32_is_the_sum_of_three_pieces():
    x = torch.tensor([[1.0 + 2.0**-23, 1.0 + 2.0**-8, -(2.0 - 2.0**-23), 1.0 + 2.0**-16]])
    assert pieces_of(x).squeeze(1).T.tolist() == [
        [1.0, 2.0**-23, 0.0],
        [1.0, 2.0**-8, 0.0],
        [-(2.0 - 2.0**-7), -(2.0**-7 - 2.0**-15), -(2.0**-15 - 2.0**-23)],
        [1.0, 2.0**-16, 0.0],
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_sum_of_the_pieces_is_exact(dtype):
    """float16: every finite number. float32: down to where bfloat16 ends, at 2^-133."""
    if dtype == torch.float16:
        x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).view(256, -1)
        x = torch.where(x.isfinite(), x, 0)
    else:
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**31), 2**31, (64, 256), generator=generator).to(torch.int32)
        x = bits.view(torch.float32)
        x = torch.where(x.isfinite() & (x.abs() >= 2.0**-110), x, 0)
        assert (x != 0).sum() > 10000
    found = pieces_of(x)
    assert found.shape[0] == {torch.float16: 2, torch.float32: 3}[dtype]
    assert torch.equal(found.double().sum(0), x.double())


def test_what_bfloat16_cannot_hold_of_tiny_float32_is_left():
    x = torch.tensor([[2.0**-149, 2.0**-133, 3 * 2.0**-134, 2.0**-120 + 2.0**-143, -(2.0**-127)]])
    left = (pieces_of(x).double().sum(0) - x.double()).abs()
    assert (left <= 2.0**-133).all()
    assert left[0, [1, 4]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_and_infinity_in_pieces(dtype):
    """All of it is in the first piece: inf - inf must not make a NaN of the sum."""
    x = torch.tensor([[INF, -INF, NAN, 1.0]], dtype=dtype)
    found = pieces_of(x).squeeze(1)
    assert found[0, :2].tolist() == [INF, -INF]
    assert found[0, 2].isnan()
    assert not found[1:].any()
    assert torch.equal(found[0, 3:], torch.ones(1, dtype=torch.bfloat16))


def test_the_largest_float32_does_not_become_infinite():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, -largest, torch.finfo(torch.float32).tiny, 0.0]])
    found = pieces_of(x)
    assert found.isfinite().all()
    assert torch.equal(found.double().sum(0), x.double())


# Memory.


@pytest.mark.parametrize(("m", "k", "width", "bm"), [
    (1, 1, 128, 1), (3, 33, 64, 2), (5, 300, 384, 2), (17, 257, 257, 16),
])  # fmt: skip
@pytest.mark.parametrize("name", ["none", "mxfp4", "fp8_token"])
def test_every_number_is_written_and_nothing_else(name, m, k, width, bm):
    x = torch.randn((m, k), generator=torch.Generator().manual_seed(m))
    pieces = 3 if name == "none" else 1
    target = Target(pieces * m, width, torch.bfloat16)
    out = target.out.view(pieces, m, width)
    source = between_nans(x, left=1, right=5)
    mantissa, low, top = PARAMETERS["mxfp4"]
    ported(arrange[(-(-m // bm), -(-width // 256))])(
        source, out, torch.ones(m), m, k, source.stride(0), width, m * width,
        KIND={"none": "none", "mxfp4": "mx", "fp8_token": "fp8"}[name],
        MANT=mantissa, LOW=low, TOP=top, PIECES=pieces, PDL=False, BM=bm, BK=256,
    )  # fmt: skip
    assert target.untouched()
    assert not out.isnan().any()
    assert not out[:, :, k:].any()
    expected = {
        "none": x.double(), "mxfp4": fake_quantize64(x), "fp8_token": fp8_codes64(x, torch.ones(1)),
    }[name]  # fmt: skip
    assert torch.equal(out.double().sum(0)[:, :k], expected)


# numpy, in which Triton's interpreter computes, warns of what a GPU does without a word
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
def test_a_scale_of_zero_does_not_reach_the_columns_behind_k():
    x, scale = torch.ones((2, 33)), torch.zeros(2)
    rows = arranged(x, "fp8_static", scale, 128).tensor[0]
    assert torch.equal(rows[:, 33:], torch.zeros((2, 95), dtype=torch.bfloat16))
    assert not rows.isnan().any()
