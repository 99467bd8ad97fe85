"""What is done to a layer's input before its GEMM, by name: the activation half of a scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mxfp4prep import mxfp4
from mxfp4prep.errors import Unsupported, UsageError
from mxfp4prep.prepared import VERIFY_HINT

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.manifest import ActivationRecord


def _fp8_static(x: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        raise UsageError("input_quant fp8_static", "needs an input_scale")
    return mxfp4.fake_quantize_fp8(x, scale)


INPUT_QUANT: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "none": lambda x, _: x,
    "mxfp4": lambda x, _: mxfp4.fake_quantize(x),
    "fp8_static": _fp8_static,
    "fp8_tensor": lambda x, _: mxfp4.fake_quantize_fp8_per_tensor(x),
    "fp8_token": lambda x, _: mxfp4.fake_quantize_fp8_per_token(x),
    "mxfp6_e2m3": lambda x, _: mxfp4.fake_quantize(x, "fp6_e2m3"),
    "mxfp6_e3m2": lambda x, _: mxfp4.fake_quantize(x, "fp6_e3m2"),
}
"""Name -> x (..., k) float32 and a static scale or None -> x quantized and decoded, float32."""

_BY_ACTIVATION: dict[tuple[str, str | None, bool], str] = {
    # (scheme, dtype, static) as a manifest records them
    ("w4a16", None, False): "none",
    ("w4a4", "fp4", False): "mxfp4",
    ("w4a8", "fp8_e4m3", True): "fp8_static",
    ("w4a8", "fp8_e4m3", False): "fp8_token",
    ("w4a6", "fp6_e2m3", False): "mxfp6_e2m3",
    ("w4a6", "fp6_e3m2", False): "mxfp6_e3m2",
}


def input_quant_of(scheme: str, activation: ActivationRecord, where: str) -> str:
    """The name in INPUT_QUANT of what a layer's scheme does to its input.

    Raises Unsupported for a scheme and activation that do not go together, and for MX inputs with
    another scale mode than EVEN.
    """
    name = _BY_ACTIVATION.get((scheme, activation.dtype, activation.static))
    if name is None:
        kind = "static" if activation.static else "dynamic"
        what = f"scheme {scheme} with {kind} {activation.dtype} inputs"
        raise Unsupported(where, what, hint=VERIFY_HINT)
    if name == "fp8_token":
        modes = {None: "fp8_token", "per_token": "fp8_token", "per_tensor": "fp8_tensor"}
        if activation.scale_mode not in modes:
            what = "the scale mode of its inputs"
            found, expected = activation.scale_mode, "per_token or per_tensor"
            raise Unsupported(where, what, found=found, expected=expected, hint=VERIFY_HINT)
        return modes[activation.scale_mode]
    if name.startswith("mx") and activation.scale_mode not in (None, "even"):
        what = "the scale mode of its inputs"
        found = activation.scale_mode
        raise Unsupported(where, what, found=found, expected="even", hint=VERIFY_HINT)
    return name
