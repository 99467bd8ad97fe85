"""PreparedExperts: the experts of one MoE layer as two banks of MXFP4 matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.backends import Needs
from mxfp4prep.runtime.exact import ExactScales
from mxfp4prep.runtime.gating import check_names, checked_limit
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.operands import check_input, check_routing, check_stored
from mxfp4prep.runtime.spreading import EVERY_ROW, Turn

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mxfp4prep.manifest import ActivationRecord
    from mxfp4prep.runtime.shared_expert import SharedExpert

MOST = 2**31 - 1
"""The largest id that backends are given."""


class PreparedExperts(ExactScales):
    """For each token the weighted sum of its experts' down(act(gate) * up).

    Under tensor parallelism `intermediate` is the rank's share; under expert parallelism the banks
    hold the rank's experts, whole. Either way the results of all ranks, for the same input, add up
    to that of the layer.

    experts            routed experts of the layer, on all ranks: what ids count
    hidden, intermediate   sizes of an expert here
    expert_map         (experts,) int32, each one's place in the banks, or -1 where another rank
                       has it; None where all are here
    shared_slots       how many of the banks' last matrices are the shared expert
    shared             the shared expert, where it stands apart; None otherwise
    shared_gate        from x (m, hidden) to (m, 1): the shared expert counts sigmoid of that; None
                       for 1. A factor on routed experts (DeepSeek's routed_scaling_factor) is in
                       the router's weights and does not touch the shared one
    shared_name        its module in the checkpoint, or None without one
    turn               the rows to which this rank adds the shared expert
    ep_rank, ep_size   which block of whole experts this is, of how many
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
    expert_map: Tensor | None

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
        expert_map: Tensor | None = None,
        shared_slots: int = 0,
        shared: SharedExpert | None = None,
        shared_gate: nn.Module | None = None,
        shared_name: str | None = None,
        turn: Turn = EVERY_ROW,
        ep_rank: int = 0,
        ep_size: int = 1,
    ) -> None:
        super().__init__()
        check_names(name, activation, gate_up)
        held = w13.shape[0]
        rows = 2 * intermediate
        check_stored(name, (w13, w13_scale), rows, hidden, w13_path, held)
        check_stored(name, (w2, w2_scale), hidden, intermediate, w2_path, held)
        self.experts = held - shared_slots if expert_map is None else expert_map.numel()
        self.shared_slots, self.turn = shared_slots, turn
        self.hidden, self.intermediate = hidden, intermediate
        self.w13_path, self.w2_path = w13_path, w2_path
        self.scheme = scheme
        self.input_activation = input_activation
        self.input_quant = input_quant_of(scheme, input_activation, name)
        self.quantize_activations = True
        self.gate_up, self.activation = gate_up, activation
        # torch.compile(dynamic=True) makes a symbol of a module's float and then compiles again
        # without it; a string is a constant to it.
        limit = checked_limit(f"{name}: limit", limit)
        self._limit = None if limit is None else repr(limit)
        self.backend = backend
        self.name = name
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.ep_rank, self.ep_size = ep_rank, ep_size
        for buffer, tensor in (
            ("w13", w13),
            ("w13_scale", w13_scale),
            ("w2", w2),
            ("w2_scale", w2_scale),
            ("bias1", bias1),
            ("bias2", bias2),
            ("a1_scale", a1_scale),
            ("a2_scale", a2_scale),
            ("expert_map", expert_map),
        ):
            self.register_buffer(buffer, tensor)
        self.shared, self.shared_gate, self.shared_name = shared, shared_gate, shared_name

    @property
    def limit(self) -> float | None:
        """The clamp of gate and up, or None."""
        return None if self._limit is None else float(self._limit)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths a backend must handle, of w13 and of w2."""
        return self.w13_path, self.w2_path

    @property
    def needs(self) -> Needs:
        """What else a backend must handle."""
        has_bias = self.bias1 is not None or self.bias2 is not None
        columns = self.hidden, self.intermediate
        return Needs(columns, self.gate_up, self.activation, self.limit, has_bias)

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """(..., hidden) in x's dtype.

        x              (..., hidden) bfloat16, float16 or float32
        topk_weights   (..., top) floating, as the router wants them summed
        topk_ids       (..., top) integers in 0..experts-1, or -1 for a slot to leave out

        The shared expert's weight is taken from x; ids name routed experts only.

        Raises UsageError for shapes, dtypes or devices that do not fit.
        """
        check_input(self.name, x, self.hidden, self.w13)
        check_routing(self.name, x, topk_weights, topk_ids)
        top = topk_ids.shape[-1]
        rows = x.reshape(-1, self.hidden)
        weights, ids = topk_weights.reshape(-1, top), topk_ids.reshape(-1, top)
        if self.expert_map is not None or self.shared_slots:
            ids = self._places(ids)
        if self.shared_slots:
            weights, ids = self._with_slots(rows, weights, ids)
        y: Tensor = torch.ops.mxfp4prep.fused_moe(
            rows,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            weights,
            ids,
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
        if self.shared is not None:
            y = self._plus_shared(self.shared, rows, y)
        return y.reshape(x.shape)

    def _places(self, ids: Tensor) -> Tensor:
        """(m, top) int32: each expert's place in the banks, -1 for one that is elsewhere. An id
        that no expert has is none in the banks either, so that it is not taken for a shared slot.
        """
        ids = ids.long()
        known = (ids >= 0) & (ids < self.experts)
        here = ids
        if self.expert_map is not None:
            here = self.expert_map[ids.clamp(0, self.experts - 1)].long()
        unknown = torch.where(ids < 0, ids.clamp(min=-2), ids.clamp(self.w13.shape[0], MOST))
        return torch.where(known, here, unknown).int()

    def _with_slots(self, rows: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The routing with the shared expert's slots, float32 and int32."""
        count, held = rows.shape[0], self.w13.shape[0]
        slots = torch.arange(held - self.shared_slots, held, dtype=torch.int32, device=ids.device)
        slots = slots.expand(count, -1)
        if self.turn.of > 1:
            mine = torch.arange(count, device=ids.device) % self.turn.of == self.turn.mine
            slots = slots.where(mine.unsqueeze(-1), -1)
        shared = self._shared_weight(rows).expand(-1, self.shared_slots)
        return torch.cat((weights.float(), shared), dim=-1), torch.cat((ids, slots), dim=-1)

    def _shared_weight(self, rows: Tensor) -> Tensor:
        """(m, 1) float32."""
        if self.shared_gate is None:
            return rows.new_ones((rows.shape[0], 1), dtype=torch.float32)
        return torch.sigmoid(self.shared_gate(rows).float())

    def _plus_shared(self, shared: SharedExpert, rows: Tensor, routed: Tensor) -> Tensor:
        """`routed` with the shared expert added in float32, where it is this rank's turn."""
        y = routed.float()
        mine, of = self.turn.mine, self.turn.of
        if of > 1:
            rows = rows[mine::of]
            y[mine::of] += self._shared_weight(rows) * shared(rows)
        else:
            y = y + self._shared_weight(rows) * shared(rows)
        return y.to(routed.dtype)

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, hidden={self.hidden}, intermediate={self.intermediate}, "
            f"paths={self.w13_path}+{self.w2_path}, scheme={self.scheme}, "
            f"activation={self.activation}, gate_up={self.gate_up}, backend={self.backend}"
            f"{self._beyond()}"
        )

    def _beyond(self) -> str:
        """What is said of other ranks and of the shared expert."""
        said = [f"tp={self.tp_rank}/{self.tp_size}"] if self.tp_size > 1 else []
        if self.expert_map is not None:
            said.append(f"here={self.w13.shape[0] - self.shared_slots}")
        if self.shared_slots:
            said.append(f"shared_slots={self.shared_slots}")
        if self.turn.of > 1:
            said.append(f"turn={self.turn.mine}/{self.turn.of}")
        return "".join(f", {word}" for word in said)
