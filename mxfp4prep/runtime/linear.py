"""PreparedLinear: one MXFP4 layer, or one rank's piece of it, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from mxfp4prep.layouts import PATHS
from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.backends import Needs
from mxfp4prep.runtime.decoding import decode_matrix
from mxfp4prep.runtime.exact import ExactScales
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.operands import check_input, check_stored

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.manifest import ActivationRecord

__all__ = ["PreparedLinear", "check_input"]


class PreparedLinear(ExactScales):
    """y = x @ weight.T + bias, with weight in MXFP4 and in a kernel's own byte order.

    n, k         out_features and in_features of what this module holds
    path         "asm", "triton" or "kept"; `layouts` are the weight's and the scale's
    weight, scale   uint8 buffers, as path stores an (n, k) matrix
    bias         (n,) floating buffer, or None
    input_scale  one float32, for static FP8 inputs, or None
    input_quant  what is done to x, a name of INPUT_QUANT; `quantize_activations = False` skips it
    """

    exact_buffers: ClassVar[tuple[str, ...]] = ("input_scale",)

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        *,
        n: int,
        k: int,
        path: str,
        scheme: str,
        activation: ActivationRecord,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        backend: str = "torch",
        name: str = "linear",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        check_stored(name, (weight, scale), n, k, path)
        self.n, self.k = n, k
        self.path = path
        self.layouts = PATHS[path]
        self.scheme = scheme
        self.activation = activation
        self.input_quant = input_quant_of(scheme, activation, name)
        self.quantize_activations = True
        self.backend = backend
        self.name = name
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.register_buffer("input_scale", input_scale)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths a backend must handle."""
        return (self.path,)

    @property
    def needs(self) -> Needs:
        """What else a backend must handle."""
        return Needs(k=(self.k,))

    @property
    def in_features(self) -> int:
        """k, by nn.Linear's name for it."""
        return self.k

    @property
    def out_features(self) -> int:
        """n, by nn.Linear's name for it."""
        return self.n

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) in x's dtype, from x (..., k) bfloat16, float16 or float32.

        Raises UsageError for another width, dtype or device.
        """
        check_input(self.name, x, self.k, self.weight)
        rows = x.reshape(-1, self.k)
        y: Tensor = torch.ops.mxfp4prep.gemm(
            rows,
            self.weight,
            self.scale,
            self.n,
            self.path,
            self.input_quant if self.quantize_activations else "none",
            self.bias,
            self.input_scale,
            self.backend,
        )
        return y.reshape(*x.shape[:-1], self.n)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight this module holds, (n, k)."""
        return decode_matrix(self.weight, self.scale, self.n, self.k, self.path, dtype)

    def extra_repr(self) -> str:
        rank = f", rank={self.tp_rank}/{self.tp_size}" if self.tp_size > 1 else ""
        return (
            f"n={self.n}, k={self.k}, path={self.path}, scheme={self.scheme}, "
            f"bias={self.bias is not None}, backend={self.backend}{rank}"
        )
