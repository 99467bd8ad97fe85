"""SharedExpert: the expert that every token visits, as layers of its own beside the routed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.gating import combined, gated

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.runtime.linear import PreparedLinear


class SharedExpert(nn.Module):
    """down(act(gate) * up), (m, hidden) float32, from three layers or from two.

    up       (gate, up), or (gate_up,) with rows in `gate_up` order
    activation, limit   as of the routed experts

    Where inputs are quantized all between the layers is float32, as in slots of the routed banks:
    bfloat16 there would make the second quantization fall otherwise for some values, and the
    expert would answer differently fused and apart. Where they are not (w4a16), layers get and give
    x's dtype.
    """

    def __init__(
        self,
        up: tuple[PreparedLinear, ...],
        down: PreparedLinear,
        *,
        gate_up: str = "concatenated",
        activation: str = "silu",
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.up = nn.ModuleList(up)
        self.down = down
        self.gate_up, self.activation, self.limit = gate_up, activation, limit

    @property
    def layers(self) -> tuple[PreparedLinear, ...]:
        """Gate and up, or the one layer that is both."""
        return tuple(cast("PreparedLinear", layer) for layer in self.up)

    def forward(self, x: Tensor) -> Tensor:
        """(m, hidden) float32, from x (m, hidden). Raises UsageError, as its layers do."""
        rows = x if self.down.input_quant == "none" else x.float()
        results = [layer(rows).float() for layer in self.up]
        if len(results) == 1:
            middle = gated(results[0], self.gate_up, self.activation, self.limit)
        else:
            middle = combined(results[0], results[1], self.activation, self.limit)
        y: Tensor = self.down(middle.to(rows.dtype))
        return y.float()


class SharedGate(nn.Module):
    """How much of the shared expert a token gets, before the sigmoid: x @ weight.T in float32.

    weight   (1, hidden) floating, as it is stored; Qwen's `shared_expert_gate`
    """

    weight: Tensor

    def __init__(self, weight: Tensor, name: str = "shared_expert_gate") -> None:
        super().__init__()
        if weight.dim() != 2 or weight.shape[0] != 1 or not weight.is_floating_point():
            raise UsageError(
                name,
                "not the weight of a gate",
                found=f"{weight.dtype} {tuple(weight.shape)}",
                expected="one floating row",
            )
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """(m, 1) float32, also under autocast and where matrix products are allowed TF32."""
        return (x.float() * self.weight.float()).sum(-1, keepdim=True)
