"""Runs AITER's own Triton kernels in Triton's interpreter, called by our backend; a child process.

python aiter_interpreter.py SITE CASES: SITE is where amd-aiter was installed, CASES a JSON list of
[path, m, n, k]. Prints a JSON object: what the quantizer, the shuffles and each case answered.

Nothing of AITER's kernels is replaced. What is: its package's __init__, which builds HIP modules;
the name of the GPU; and of Triton's interpreter dot_scaled, which it does not have, and two calls
that do not go with today's numpy.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language as tl
from prepared_factory import LAYOUT_IDS, decode64, fake_quantize64, lay_out
from triton.runtime import interpreter

from mxfp4prep.errors import BackendUnavailable
from mxfp4prep.layouts import LAYOUTS
from mxfp4prep.runtime.backends import aiter_backend
from mxfp4prep.runtime.backends.aiter_functions import Bound, read_functions

VERSION = "0.1.7.post2.dev18"


def dot_scaled(a, a_scales, a_format, b, b_scales, b_format, acc=None):
    """(M, N) float32 from (M, K / 2), (M, K / 32), (K / 2, N), (N, K / 32) bytes."""
    assert a_format == b_format == "e2m1"
    k = 2 * a.shape[1]
    left, right, left_scales, right_scales = (
        torch.from_numpy(operand.handle.data.astype("uint8"))
        for operand in (a, b, a_scales, b_scales)
    )
    right = right.T.contiguous()
    product = decode64(left, left_scales, k) @ decode64(right, right_scales, k).T
    if acc is not None:
        product += torch.from_numpy(acc.handle.data)
    handle = interpreter.TensorHandle(product.float().numpy(), tl.float32)
    return tl.core.tensor(handle, tl.block_type(tl.float32, list(product.shape)))


def prepare_interpreter() -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    tl.tensor.floor = lambda self: tl.math.floor(self)
    tl.dot_scaled = dot_scaled


def real_functions(site: Path) -> Bound:
    """The backend's view of AITER, with its real Triton functions; the others need HIP."""
    package = types.ModuleType("aiter")
    package.__path__ = [str(site / "aiter")]
    sys.modules["aiter"] = package
    sys.path.insert(0, str(site))
    chip_info = types.ModuleType("aiter.jit.utils.chip_info")
    chip_info.get_gfx = lambda: "gfx950"
    sys.modules["aiter.jit.utils.chip_info"] = chip_info
    known = read_functions(site / "aiter", VERSION)
    import aiter.ops.triton.utils._triton.arch_info as arch_info

    arch_info.get_arch = lambda: "gfx950"
    __import__(known.preshuffle.module)
    __import__(known.quantize.module)
    gemms, quant = sys.modules[known.preshuffle.module], sys.modules[known.quantize.module]
    return Bound(
        known,
        gemm_a4w4=None,
        preshuffle=getattr(gemms, known.preshuffle.name),
        plain=getattr(gemms, known.plain.name),
        quantize=getattr(quant, known.quantize.name),
        fused_moe=None,
        config=gemms._get_config,
        activation_type=None,
        quant_type=None,
    )


def untied(m: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """(m, k) bfloat16 that no FP4 rounding finds half way: 1/32 off what FP4 holds."""
    return (fake_quantize64(torch.randn((m, k), generator=generator)) * (1 + 1 / 32)).bfloat16()


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m + n + k)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118, 130, (n, k // 32), dtype=torch.uint8, generator=generator)
    return untied(m, k, generator), packed, scale


def run(path: str, m: int, n: int, k: int) -> dict[str, float]:
    """The largest error, in units of what may be lost, and how many NaN.

    The interpreter cuts float32 to bfloat16 instead of rounding it, which loses 2^-7 of a value.
    """
    x, packed, scale = operands(m, n, k)
    weight, scales = (
        lay_out(matrix, layout)
        for matrix, layout in zip((packed, scale), LAYOUT_IDS[path], strict=True)
    )
    y = aiter_backend.gemm(x, weight, scales, n, path, "mxfp4", bias=None, input_scale=None)
    assert y.shape == (m, n)
    assert y.dtype == x.dtype
    inputs, dense = fake_quantize64(x), decode64(packed, scale, k)
    expected = inputs @ dense.T
    allowed = 2.0**-7 * expected.abs() + 2.0**-20 * (inputs.abs() @ dense.abs().T)
    error = ((y.double() - expected).abs() / allowed).nan_to_num(0.0)
    return {"error": float(error.max()), "nan": int(y.isnan().sum())}


def nan_of_plain(functions: Bound, k: int) -> int:
    """How many NaN gemm_afp4wfp4 answers when it is called with this k, and what lies behind the
    scales in memory is NaN too (byte 255)."""
    x, packed, scale = operands(5, 32, k)
    codes, scales = functions.quantize(x, scaling_mode="even")
    return int(functions.plain(codes, packed, before_nan(scales), before_nan(scale)).isnan().sum())


def before_nan(scale: torch.Tensor) -> torch.Tensor:
    """The same (rows, groups) bytes, stored transposed, with bytes 255 behind them."""
    rows, groups = scale.shape
    memory = torch.full((groups + 64, rows), 255, dtype=torch.uint8)
    memory[:groups] = scale.T
    return memory[:groups].T


def shuffles(functions: Bound) -> dict[str, bool]:
    """Whether AITER's own shuffles make the bytes of our layouts, and of our input scales."""
    from aiter.ops.shuffle import shuffle_weight
    from aiter.utility.fp4_utils import e8m0_shuffle

    x, packed, scale = operands(33, 96, 512)
    experts = torch.stack([packed, packed.flip(0)])
    shuffled = shuffle_weight(packed)
    tiled = e8m0_shuffle(scale)[:96]
    _, plain = functions.quantize(torch.nn.functional.pad(x, (0, 0, 0, 31)), scaling_mode="even")
    _, ours = aiter_backend._quantize_tiled(functions, x)
    return {
        "weight": torch.equal(shuffled.flatten(), LAYOUTS["tile16x16"].forward(packed).flatten()),
        "experts": torch.equal(
            shuffle_weight(experts).flatten(), LAYOUTS["tile16x16"].forward(experts).flatten()
        ),
        "is_shuffled": shuffled.is_shuffled,
        "scale": torch.equal(tiled.flatten(), LAYOUTS["tile32x8"].forward(scale).flatten()),
        "input_scale": torch.equal(e8m0_shuffle(plain)[:64], ours),
    }


def quantizer(functions: Bound) -> dict[str, float]:
    """Where dynamic_mxfp4_quant differs from EVEN with ties to even, and where not by a tie."""
    x = torch.randn((64, 512), generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = functions.quantize(x, scaling_mode="even")
    found, expected = decode64(codes, scales.contiguous(), 512), fake_quantize64(x)
    wrong = found != expected
    half_way = (found - x.double()).abs() == (expected - x.double()).abs()
    return {
        "differs": float(wrong.double().mean()),
        "not_tied": float((wrong & ~half_way).double().mean()),
        "scale_strides": list(scales.stride()),
    }


def main(site: str, cases: str) -> None:
    prepare_interpreter()
    functions = real_functions(Path(site))
    aiter_backend.load = lambda: functions
    answers = {}
    for path, m, n, k in json.loads(cases):
        try:
            answers[f"{path} {m} {n} {k}"] = run(path, m, n, k)
        except BackendUnavailable as error:
            answers[f"{path} {m} {n} {k}"] = {"refused": error.what}
    report = {
        "quantizer": quantizer(functions),
        "shuffles": shuffles(functions),
        "nan_of_plain": {k: nan_of_plain(functions, k) for k in (512, 544, 640)},
        "cases": answers,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
