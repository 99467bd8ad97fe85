"""PreparedExperts: the routed experts of one MoE layer as two banks of MXFP4 matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.exact import ExactScales
from mxfp4prep.runtime.gating import check_names
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.linear import check_input, check_stored

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.manifest import ActivationRecord


class PreparedExperts(ExactScales):
    """For each token the weighted sum of its experts' down(act(gate) * up).

    experts, hidden, intermediate   sizes of what this module holds; under tensor parallelism
                       intermediate is the rank's share, and the ranks' results add up
    w13, w13_scale     banks of gate-up matrices (2 * intermediate, hidden), in `w13_path`'s layouts
    w2, w2_scale       banks of down matrices (hidden, intermediate), in `w2_path`'s layouts
    gate_up            order of w13's rows: "concatenated" or "interleaved"
    activation, limit  the function between the two GEMMs, a name of GATES, and its clamp
    bias1, bias2       (experts, 2 * intermediate), (experts, hidden), or None
    a1_scale, a2_scale (experts,) float32 for static FP8 inputs, or None
    """

    exact_buffers: ClassVar[tuple[str, ...]] = ("a1_scale", "a2_scale")

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    bias1: Tensor | None
    bias2: Tensor | None
    a1_scale: Tensor | None
    a2_scale: Tensor | None

    def __init__(
        self,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        *,
        hidden: int,
        intermediate: int,
        w13_path: str,
        w2_path: str,
        scheme: str,
        input_activation: ActivationRecord,
        gate_up: str = "concatenated",
        activation: str = "silu",
        limit: float | None = None,
        bias1: Tensor | None = None,
        bias2: Tensor | None = None,
        a1_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        backend: str = "torch",
        name: str = "experts",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__()
        check_names(name, activation, gate_up)
        self.experts = w13.shape[0]
        rows = 2 * intermediate
        check_stored(name, (w13, w13_scale), rows, hidden, w13_path, self.experts)
        check_stored(name, (w2, w2_scale), hidden, intermediate, w2_path, self.experts)
        self.hidden, self.intermediate = hidden, intermediate
        self.w13_path, self.w2_path = w13_path, w2_path
        self.scheme = scheme
        self.input_activation = input_activation
        self.input_quant = input_quant_of(scheme, input_activation, name)
        self.quantize_activations = True
        self.gate_up, self.activation, self.limit = gate_up, activation, limit
        self.backend = backend
        self.name = name
        self.tp_rank, self.tp_size = tp_rank, tp_size
        for buffer, tensor in (
            ("w13", w13),
            ("w13_scale", w13_scale),
            ("w2", w2),
            ("w2_scale", w2_scale),
            ("bias1", bias1),
            ("bias2", bias2),
            ("a1_scale", a1_scale),
            ("a2_scale", a2_scale),
        ):
            self.register_buffer(buffer, tensor)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths a backend must handle, of w13 and of w2."""
        return self.w13_path, self.w2_path

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """(..., hidden) in x's dtype.

        x              (..., hidden) bfloat16, float16 or float32
        topk_weights   (..., top) floating, as the router wants them summed
        topk_ids       (..., top) integers in 0..experts-1

        Raises UsageError for shapes, dtypes or devices that do not fit.
        """
        check_input(self.name, x, self.hidden, self.w13)
        self._check_routing(x, topk_weights, topk_ids)
        top = topk_ids.shape[-1]
        y: Tensor = torch.ops.mxfp4prep.fused_moe(
            x.reshape(-1, self.hidden),
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            topk_weights.reshape(-1, top),
            topk_ids.reshape(-1, top),
            self.intermediate,
            self.w13_path,
            self.w2_path,
            self.input_quant if self.quantize_activations else "none",
            activation=self.activation,
            limit=self.limit,
            gate_up=self.gate_up,
            bias1=self.bias1,
            bias2=self.bias2,
            a1_scale=self.a1_scale,
            a2_scale=self.a2_scale,
            backend=self.backend,
        )
        return y.reshape(x.shape)

    def _check_routing(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
        if topk_ids.shape != topk_weights.shape or topk_ids.shape[:-1] != x.shape[:-1]:
            raise UsageError(
                self.name,
                "the routing's shape",
                found=f"topk_weights {tuple(topk_weights.shape)}, topk_ids {tuple(topk_ids.shape)}",
                expected=f"both ({', '.join(str(size) for size in x.shape[:-1])}, top)",
            )
        integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        if topk_ids.dim() == 0 or topk_ids.shape[-1] == 0:
            raise UsageError(self.name, "the routing names no expert", expected="top >= 1")
        if topk_ids.dtype not in integers or not topk_weights.is_floating_point():
            raise UsageError(
                self.name,
                "the routing's dtypes",
                found=f"topk_weights {topk_weights.dtype}, topk_ids {topk_ids.dtype}",
                expected="floating weights and integer ids",
            )
        if topk_ids.device != x.device or topk_weights.device != x.device:
            what = "the routing is on another device"
            raise UsageError(self.name, what, found=topk_ids.device, expected=x.device)

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, hidden={self.hidden}, intermediate={self.intermediate}, "
            f"paths={self.w13_path}+{self.w2_path}, scheme={self.scheme}, "
            f"activation={self.activation}, gate_up={self.gate_up}, backend={self.backend}"
        )
