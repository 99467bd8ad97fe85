"""Stored weights with their float64 values, quantized inputs and error bounds, for kernel tests.

Kernels run on the GPU where there is one (`ported`), and in Triton's interpreter elsewhere.

Triton's interpreter has no bfloat16 of its own. Triton 3.9.0's conversions from float32 truncate
where GPUs round to nearest even, and lose the leading bit of subnormal numbers in either direction:
2^-127 becomes zero. `true_bfloat16` puts conversions and products in their place that do what the
GPUs do; without it, scale bytes 0 and 1 and every bfloat16 output would be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from prepared_factory import LAYOUT_IDS, decode64, lay_out
from torch import Tensor

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Half a unit in the last place of a result, over the result."""

ACCUMULATION = 2.0**-22
"""Times sqrt(k) and the sum of magnitudes: what float32 accumulation in any order may lose."""

FP8_MAX = 448.0
MX = {
    # element type, its largest exponent, the mantissa (in [0.5, 1)) from which a maximum counts as
    # the next power of two
    "mxfp4": (ml_dtypes.float4_e2m1fn, 2, 0.875),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 2, 0.96875),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 4, 0.9375),
}
INPUT_QUANTS = (
    "none",
    "mxfp4",
    "fp8_static",
    "fp8_tensor",
    "fp8_token",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
)

GUARD = 4096
"""Elements of poison before and after a tensor."""


@dataclass
class Stored:
    """A matrix as `path` stores it, between bytes of poison, and its values (n, k) in float64."""

    path: str
    n: int
    k: int
    weight: Tensor
    scale: Tensor
    dense: Tensor


def stored(path: str, packed: Tensor, scale: Tensor, k: int) -> Stored:
    """From codes (n, ceil(k / 2)) and scale bytes (n, ceil(k / 32)); what lies around is NaN."""
    weight_layout, scale_layout = LAYOUT_IDS[path]
    weight, scales = lay_out(packed, weight_layout), lay_out(scale, scale_layout)
    dense = decode64(packed, scale, k).float().double()  # from 2^128 on they are infinite
    return Stored(path, packed.shape[0], k, guarded(weight, 0xFF), guarded(scales, 0xFF), dense)


def random_stored(
    path: str, n: int, k: int, generator: torch.Generator, low: int = 118, high: int = 130
) -> Stored:
    packed = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, high, (n, -(-k // 32)), dtype=torch.uint8, generator=generator)
    return stored(path, packed, scale, k)


def guarded(tensor: Tensor, poison: float) -> Tensor:
    """The same values, contiguous, in the middle of a buffer full of poison."""
    buffer = torch.full((tensor.numel() + 2 * GUARD,), poison, dtype=tensor.dtype)
    inside = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


def between_nans(x: Tensor, left: int = 2, right: int = 30) -> Tensor:
    """x as a strided view: NaN before and after each row, above and below."""
    rows, columns = x.shape
    buffer = torch.full((rows + 40, left + columns + right), torch.nan, dtype=x.dtype)
    buffer[8 : 8 + rows, left : left + columns] = x
    return buffer[8 : 8 + rows, left : left + columns]


CANARY = -12288.0


class Target:
    """An output full of NaN, between canaries."""

    def __init__(self, m: int, n: int, dtype: torch.dtype) -> None:
        self.out = guarded(torch.full((m, n), torch.nan, dtype=dtype), CANARY)
        self.buffer = self.out.as_strided((m * n + 2 * GUARD,), (1,), 0)

    def untouched(self) -> bool:
        around = torch.cat((self.buffer[:GUARD], self.buffer[GUARD + self.out.numel() :]))
        return bool((around == CANARY).all())


def mx64(x: Tensor, name: str) -> Tensor:
    """x (..., k), finite, as MX holds it, float64: blocks of 32, scale mode EVEN, ties to even."""
    element, top, up = MX[name]
    values = x.double().numpy()
    result = np.empty_like(values)
    for start in range(0, values.shape[-1], 32):
        block = values[..., start : start + 32]
        amax = np.abs(block).max(axis=-1, keepdims=True)
        mantissa, exponent = np.frexp(amax)
        power = np.where(amax == 0, -127, np.clip(exponent - 1 + (mantissa >= up) - top, -127, 127))
        largest = float(ml_dtypes.finfo(element).max)
        scaled = np.clip(np.ldexp(block, -power), -largest, largest)
        rounded = scaled.astype(np.float32).astype(element).astype(np.float64)
        result[..., start : start + 32] = np.ldexp(rounded, power)
    return torch.from_numpy(result)


def fp8_codes64(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, divided in float32, rounded to float8_e4m3fn, saturating: float64."""
    quotient = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).numpy()
    return torch.from_numpy(quotient.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))


def quantized64(x: Tensor, input_quant: str, static: float) -> Tensor:
    """A finite x as `input_quant` makes it, float64."""
    if input_quant == "none":
        return x.double()
    if input_quant in MX:
        return mx64(x, input_quant)
    if input_quant == "fp8_static":
        scale = torch.tensor([[static]])
    else:
        largest = x.float().abs().amax(-1, keepdim=True)
        largest = largest.amax() if input_quant == "fp8_tensor" else largest
        scale = torch.where(largest == 0, 1.0, largest / FP8_MAX)
    return fp8_codes64(x, scale) * scale.double()


def assert_product(
    y: Tensor, inputs: Tensor, dense: Tensor, bias: Tensor | None, what: object = ""
) -> None:
    """y is inputs @ dense.T + bias, all float64, but for the rounding of y and of its sums."""
    expected, magnitude = inputs @ dense.T, inputs.abs() @ dense.abs().T
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    assert y.shape == expected.shape
    allowed = ACCUMULATION * math.sqrt(inputs.shape[1]) * magnitude
    allowed += ROUNDING[y.dtype] * (expected.abs() + allowed) + 2.0**-25
    wrong = ~((y.double() - expected).abs() <= allowed)  # a NaN is not <= anything
    where = wrong.nonzero()[:3].tolist()
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {where}"


def assert_same_values(found: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, but for the sign of zero and the kind of NaN."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    same = (found == expected) | (found.isnan() & expected.isnan())
    where = (~same).nonzero()[:3].tolist()
    assert same.all(), f"{int((~same).sum())} values differ, first at {where}"


def bfloat16_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 as the bits of the nearest bfloat16, uint16."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def float32_of(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bfloat16 bits (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def ported(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, on the GPU where there is one: what it takes goes there and comes back.

    Whole storages travel, so that strides stay, and what lies around a tensor lies around it there.
    """
    if not torch.cuda.is_available():
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        taken: dict[Any, tuple[Tensor, Tensor]] = {}

        def there(value: Any) -> Any:
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(there, value))
            if not isinstance(value, Tensor):
                return value
            storage = value.untyped_storage()
            key = storage.data_ptr(), value.dtype
            if key not in taken:
                count = storage.nbytes() // value.element_size()
                whole = value.new_empty(0).set_(storage, 0, (count,), (1,))
                taken[key] = whole, whole.cuda()
            return taken[key][1].as_strided(value.shape, value.stride(), value.storage_offset())

        def here(value: Any) -> Any:
            if isinstance(value, tuple):
                parts = map(here, value)
                return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
            return value.cpu() if isinstance(value, Tensor) else value

        result = function(*map(there, args), **{key: there(v) for key, v in kwargs.items()})
        for before, after in taken.values():
            before.copy_(after)
        return here(result)

    return call


def true_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter convert and multiply bfloat16 as GPUs do; they need nothing."""
    if torch.cuda.is_available():
        return
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    wrong = interpreter._convert_float
    builder = interpreter.interpreter_builder
    plain: Callable[..., Any] = builder.create_fmul

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (float32, bfloat16):
            return bfloat16_of(np.asarray(values, dtype=np.float32))
        if (source, target) == (bfloat16, float32):
            return float32_of(np.asarray(values)).view(np.uint32)
        return wrong(values, source, target, rounding)

    def multiply(left: Any, right: Any) -> Any:
        if left.dtype.scalar != bfloat16:
            return plain(left, right)
        with np.errstate(over="ignore", invalid="ignore"):
            product = float32_of(left.data) * float32_of(right.data)
        return interpreter.TensorHandle(bfloat16_of(product), bfloat16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(builder, "create_fmul", multiply, raising=False)


def in_order(monkeypatch: pytest.MonkeyPatch, order: Callable[[Sequence[int]], list[int]]) -> None:
    """Makes the interpreter run a launch's programs in another order than 0, 1, 2, ...

    order   the numbers of all programs -> the same in the order to run them
    """
    if torch.cuda.is_available():
        pytest.skip("a GPU runs programs in the order it likes")
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    plain = type(builder).set_grid_idx

    def set_grid_idx(x: int, y: int, z: int) -> None:
        across, down, deep = builder.grid_dim
        number = order(range(across * down * deep))[(x * down + y) * deep + z]
        plain(builder, number // deep // down, number // deep % down, number % deep)

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx, raising=False)
