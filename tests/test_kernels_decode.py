"""Stored bytes to numbers in kernels: every code under every scale byte, both ways of unpacking."""

from __future__ import annotations

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import (
    Target,
    assert_same_values,
    bfloat16_of,
    ported,
    random_stored,
    stored,
    true_bfloat16,
)

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from mxfp4prep.layouts import PATHS
from mxfp4prep.runtime.kernels import launch
from mxfp4prep.runtime.kernels.expand import expand
from mxfp4prep.runtime.kernels.tiles import UNPACK_PTX

expanded = ported(launch.expanded)

pytestmark = [  # numpy says of infinities what GPUs do in silence
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

HALF = 0xFFFF
STEP = 2.0**-126
"""What a code's value is multiplied by in an unpacked register."""

Registers = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _true_bfloat16(monkeypatch):
    true_bfloat16(monkeypatch)


def test_why_conversions_are_replaced(monkeypatch):
    """Fails where an interpreter converts as GPUs do: then kernel_cases.true_bfloat16 can go."""
    monkeypatch.undo()
    values = np.array([1 + 2.0**-8 + 2.0**-16, 2.0**-127], dtype=np.float32)
    found = interpreter_builder.cast_impl(TensorHandle(values, tl.float32), tl.bfloat16).data
    assert bfloat16_of(values).tolist() == [0x3F81, 0x0040]
    assert found.tolist() == [0x3F80, 0x0000]  # truncated, and flushed


# The inline assembly, which the interpreter does not run.


def operand(text: str, registers: Registers) -> np.ndarray:
    if text in registers:
        return registers[text]
    return np.uint64(int(text, 0))  # a name that nothing was written to is no number: ValueError


def permuted(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt.b32: byte i of the result is the byte that nibble i of the selector names, 0 to 7."""
    result = np.uint64(0)
    both = low | high << np.uint64(32)
    for place in range(4):
        chosen = int(selector) >> 4 * place & 15
        assert chosen < 8, "bit 3 copies a sign bit, which the emulator does not"
        result = result | (both >> np.uint64(8 * chosen) & np.uint64(255)) << np.uint64(8 * place)
    return result


def emulated(assembly: str, registers: Registers) -> Registers:
    """The registers after a block of PTX, each an array of 32-bit numbers in uint64.

    Source: PTX ISA 8.x, instructions prmt, and, mul.lo, shr.
    """
    registers = dict(registers)
    declared = set()
    lines = [line.strip() for line in assembly.strip().splitlines()]
    assert (lines[0], lines[-1]) == ("{", "}")
    for line in lines[1:-1]:
        instruction, _, rest = line.rstrip(";").partition(" ")
        assert line.endswith(";")
        if instruction == ".reg":
            declared |= set(re.split(r",\s*", rest.removeprefix(".b32 ")))
            continue
        target, *names = re.split(r",\s*", rest)
        assert target in declared or target in {"$0", "$1", "$2", "$3"}, line
        values = [operand(name, registers) for name in names]
        match instruction:
            case "prmt.b32":
                result = permuted(*values)
            case "and.b32":
                result = values[0] & values[1]
            case "mul.lo.u32":
                result = values[0] * values[1] & np.uint64(0xFFFFFFFF)
            case "shr.u32":
                result = values[0] >> values[1]
            case _:
                raise AssertionError(f"the emulator has no {instruction}")
        registers[target] = result
    return registers


def unpacked(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes (..., 4), those of one register, to bfloat16 bits (..., 4) of low and high codes.

    Register and half are those of inline_asm_elementwise: element i of four is in the low half of a
    result's first register, then the high half, then the same of the second.
    """
    word = sum(codes[..., i].astype(np.uint64) << np.uint64(8 * i) for i in range(4))
    after = emulated(UNPACK_PTX.value, {"$4": word})
    halves = [
        after[f"${register}"] >> np.uint64(shift) & np.uint64(HALF)
        for register in range(4)
        for shift in (0, 16)
    ]
    low, high = np.stack(halves[:4], axis=-1), np.stack(halves[4:], axis=-1)
    return low.astype(np.uint16), high.astype(np.uint16)


def bits_of(codes: np.ndarray) -> np.ndarray:
    """The values of codes 0..15 times 2^-126, as bfloat16 bits, by ml_dtypes."""
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64) * STEP
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("first", range(4))
def test_ptx_unpacks_every_pair_of_bytes(first):
    """All 65536 pairs in two neighbouring places, the last and the first among them."""
    generator = np.random.default_rng(first)
    codes = generator.integers(0, 256, (65536, 4), dtype=np.uint8)
    codes[:, first] = np.arange(65536) % 256
    codes[:, (first + 1) % 4] = np.arange(65536) // 256
    low, high = unpacked(codes)
    assert np.array_equal(low, bits_of(codes & 15))
    assert np.array_equal(high, bits_of(codes >> 4))


def test_the_emulator_knows_what_it_does_not_know():
    with pytest.raises(AssertionError, match="no lop3"):
        emulated("{\nlop3.b32 $0, $4, $4, $4, 0xC0;\n}", {"$4": np.zeros(1, np.uint64)})
    with pytest.raises(ValueError, match="invalid literal"):
        emulated("{\n.reg .b32 t;\nand.b32 $0, t, 1;\n}", {"$4": np.zeros(1, np.uint64)})


# Whole matrices.


def inline_assembly(assembly, constraints, values, types, pure, pack):
    """The interpreter's inline assembly, by the emulator: for UNPACK_PTX's operands alone."""
    assert (constraints, pack, len(values), len(types)) == ("=r,=r,=r,=r,r", 4, 1, 2)
    assert assembly == UNPACK_PTX.value
    codes = values[0].data
    results = [part.reshape(codes.shape) for part in unpacked(codes.reshape(-1, 4))]
    return SimpleNamespace(get_result=lambda i: TensorHandle(results[i], types[i].scalar))


def expanded_by_ptx(matrix, n, k):
    """launch.expanded as it is on NVIDIA's GPUs."""
    weight_layout, scale_layout = PATHS[matrix.path]
    out = torch.full((n, k), torch.nan, dtype=torch.bfloat16)
    ported(expand[(-(-n // 32), -(-k // 256))])(
        matrix.weight, matrix.scale, out, n, n, k, -(-k // 2), -(-k // 32),
        TILED=weight_layout == "tile16x16", SCALES=scale_layout, WHOLE_N=n % 32 == 0,
        WHOLE_K=k % 256 == 0, ODD_K=k % 2 == 1, PTX=True, BN=32, BK=256,
    )  # fmt: skip
    return out


@pytest.fixture(params=["float32", "ptx"])
def unpack(request, monkeypatch):
    """A stored matrix to bfloat16, by each of the two ways to unpack codes."""
    if request.param == "float32":
        return lambda matrix: expanded(matrix.weight, matrix.scale, matrix.n, matrix.k, matrix.path)
    monkeypatch.setattr(interpreter_builder, "create_inline_asm", inline_assembly)
    return lambda matrix: expanded_by_ptx(matrix, matrix.n, matrix.k)


def values_of(matrix):
    """float64 -> float32 -> bfloat16: both exact but for what is infinite in either."""
    return matrix.dense.float().bfloat16()


@pytest.mark.parametrize("path", ["triton", "kept"])
def test_every_code_under_every_scale_byte(unpack, path, tried):
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes.flip(0) << 4).expand(256, 16).contiguous()  # all, in either nibble
    matrix = stored(path, packed, torch.arange(256, dtype=torch.uint8).view(256, 1), 32)
    found = unpack(matrix)
    assert_same_values(found, values_of(matrix))
    assert found[255].isnan().all()
    assert not found[:255].isnan().any()
    smallest = found[0][matrix.dense[0] != 0].abs().double().min()
    assert smallest == 2.0**-128  # subnormal in bfloat16, and not flushed
    tried("N4")


def test_every_code_on_either_side_under_every_scale_byte_of_tiles(unpack):
    """256 scales, each byte once, over 32 x 256 columns; all 256 code bytes under each."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        scale = torch.randperm(256, generator=generator).to(torch.uint8).view(32, 8)
        packed = torch.randint(0, 256, (32, 128), dtype=torch.uint8, generator=generator)
        matrix = stored("asm", packed, scale, 256)
        assert_same_values(unpack(matrix), values_of(matrix))


@pytest.mark.parametrize(
    ("path", "n", "k"),
    [
        ("asm", 32, 256),
        ("asm", 96, 768),
        ("triton", 50, 320),
        ("triton", 1, 1),
        ("triton", 33, 81),
        ("kept", 50, 320),
        ("kept", 1, 1),
        ("kept", 3, 31),
        ("kept", 35, 289),
        ("kept", 64, 33),
    ],
)
def test_expanded(unpack, path, n, k, tried):
    matrix = random_stored(path, n, k, torch.Generator().manual_seed(n + k), low=0, high=256)
    assert_same_values(unpack(matrix), values_of(matrix))
    tried("N4")


def test_expanding_writes_the_matrix_and_nothing_else():
    matrix = random_stored("kept", 35, 81, torch.Generator().manual_seed(1))
    target = Target(35, 81, torch.bfloat16)
    ported(expand[(2, 1)])(
        matrix.weight, matrix.scale, target.out, 35, 35, 81, 41, 3, TILED=False, SCALES="raw",
        WHOLE_N=False, WHOLE_K=False, ODD_K=True, PTX=False, BN=32, BK=256,
    )  # fmt: skip
    assert torch.equal(target.out, values_of(matrix))
    assert target.untouched()
