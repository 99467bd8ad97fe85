"""The method for routed experts: two banks in the stored layouts, one fused GEMM of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import is_weights_pre_processed

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.vllm.banks import VECTORS, Bank, add_bank, add_vectors, arrival
from mxfp4prep.integrations.vllm.messages import tell_backend, tell_repacking
from mxfp4prep.integrations.vllm.pieces import check_columns, path_of
from mxfp4prep.integrations.vllm.receiving import OPERANDS, Arrivals, put, stored_of
from mxfp4prep.integrations.vllm.stored import RESTORE_HINT, Stored
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.parallel import Shard
from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.backends import Needs, choose_backend
from mxfp4prep.runtime.gathering import Gathered
from mxfp4prep.runtime.gating import SWIGLUOAI_LIMIT
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.reading import Batch, Target
from mxfp4prep.runtime.shared_parts import slot_stacks, slots_of

if TYPE_CHECKING:
    from mxfp4prep.manifest import LayerRecord

_ACTIVATIONS = {
    MoEActivation.SILU: "silu",
    MoEActivation.GELU: "gelu",
    MoEActivation.GELU_TANH: "gelu_tanh",
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: "swigluoai",
}
"""vLLM's activation -> a name of GATES, for gate rows above up rows."""


class PreparedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]  # vLLM is untyped here
    """The routed experts of one layer, and a shared one that vLLM fuses with them as one more.

    gathered   every expert's stored layers, in the order of vLLM's ids
    banks      w13 and w2, once the weights are created
    """

    supports_pre_processed_weights = True

    def __init__(
        self, moe: FusedMoEConfig, prefix: str, gathered: Gathered, stored: Stored
    ) -> None:
        super().__init__(moe)
        self.prefix, self.gathered, self._stored = prefix, gathered, stored
        first = gathered.w2[0][0].record
        self.input_quant = input_quant_of(first.scheme, first.activation, first.name)
        self.activation = ""
        self.limit: float | None = None
        self.banks: tuple[Bank, Bank] | None = None
        self.backend = ""

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable[..., bool | None],
        **_: object,
    ) -> None:
        """`w13_weight`, `w2_weight` and their scales, (experts here, *stored shape).

        Raises CannotShard where a rank's share is not whole groups of 32, Unsupported for what the
        runtime has no GEMM for.
        """
        self.activation, self.limit = _activation_of(layer, self.prefix)
        self.gathered = self._with_shared(layer)
        width = intermediate_size_per_partition
        self._check_sizes(layer, hidden_size, width)
        ranks = self.moe.tp_size
        rows = self.moe.tp_rank * width, (self.moe.tp_rank + 1) * width
        up, down = Shard((rows,), (0, hidden_size)), Shard(((0, hidden_size),), rows)
        banks, reasons = [], []
        for name, stacks, shard, n, k in (
            ("w13", self.gathered.w13, up, 2 * width, hidden_size),
            ("w2", self.gathered.w2, down, hidden_size, width),
        ):
            path, why = path_of((member.record, shard) for stack in stacks for member in stack)
            banks.append(Bank(name, path, n, k))
            reasons += [f"{name}: {reason}" for reason in why]
        self.banks = banks[0], banks[1]
        self.shards = up, down
        if reasons:
            first = self.moe.tp_rank if ranks > 1 else self.moe.ep_rank
            tell_repacking(self.prefix, first, ranks, reasons)
        self.arrivals = Arrivals(
            self.prefix,
            (
                arrival(tensor, number)
                for number in self._here(layer)
                for record in self._records(number)
                for tensor in (record.weight.tensor, record.scale.tensor)
            ),
            str(get_current_vllm_config().load_config.load_format),
        )
        for bank in self.banks:
            add_bank(layer, bank, num_experts, self.gathered, self.arrivals, weight_loader)
        add_vectors(layer, num_experts, self.banks, self.gathered, weight_loader)

    def _with_shared(self, layer: RoutedExperts) -> Gathered:
        """The experts and, behind them, what vLLM fuses with them."""
        more = layer.expert_map_manager.num_fused_shared_experts
        if not more:
            return self.gathered
        shared = self._stored.shared_expert(self.prefix)
        slots, obstacle = slots_of(shared, self.gathered)
        if obstacle is not None or slots != more or more != 1:
            raise Unsupported(
                shared.name,
                "cannot be fused with the routed experts here",
                found=obstacle or f"as wide as {slots} of them, where vLLM adds {more}",
                hint="serve with VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0",
            )
        w13, w2 = slot_stacks(shared, slots)
        return Gathered([*self.gathered.w13, *w13], [*self.gathered.w2, *w2])

    def _check_sizes(self, layer: RoutedExperts, hidden: int, width: int) -> None:
        down = self.gathered.w2[0][0].record
        fused = layer.expert_map_manager.num_fused_shared_experts
        for what, found, expected in (
            ("experts", len(self.gathered.w2) - fused, self.moe.num_logical_experts),
            ("the hidden size", down.n, hidden),
            ("an expert's width", down.k, width * self.moe.tp_size),
        ):
            if found != expected:
                raise Unsupported(
                    self.prefix,
                    f"vLLM expects another number for {what}",
                    found=found,
                    expected=expected,
                    hint="vLLM pads neither here; " + RESTORE_HINT,
                )
        start = self.moe.tp_rank * width
        for stack in self.gathered.w2:
            check_columns(stack[0].record, (start, start + width))

    def _records(self, number: int) -> Sequence[LayerRecord]:
        stacks = self.gathered.w13[number], self.gathered.w2[number]
        return [member.record for stack in stacks for member in stack]

    def _here(self, layer: RoutedExperts) -> dict[int, int]:
        """vLLM's id -> place in the banks, of the experts that are on this rank."""
        places = {
            number: layer.expert_map_manager.map_global_to_local(number)
            for number in range(len(self.gathered.w2))
        }
        return {number: place for number, place in places.items() if place != -1}

    def get_fused_moe_quant_config(self, _layer: RoutedExperts) -> None:
        """None: vLLM's modular kernels are not used."""
        return

    def fill(self, layer: RoutedExperts, batch: Batch) -> Iterator[str]:
        """Has the pieces of this rank's experts read into the banks when `batch` is run.

        Yields the names of the stored tensors that are read, or belong to experts of other ranks
        and are not to be read here at all.
        """
        assert self.banks is not None
        here = self._here(layer)
        for bank, shard, stacks in zip(
            self.banks, self.shards, (self.gathered.w13, self.gathered.w2), strict=True
        ):
            for operand, layout_id in zip(OPERANDS, PATHS[bank.path], strict=True):
                matrices = getattr(layer, bank.parameter(operand)).data
                for number, stack in enumerate(stacks):
                    for position, member in enumerate(stack):
                        stored = stored_of(member.record, operand).tensor
                        yield stored
                        if number not in here:
                            continue
                        out = matrices[here[number]]
                        target = Target(LAYOUTS[layout_id], out, bank.n, position * shard.n)
                        put(batch, member.record, operand, shard, target)
                        self.arrivals.note(arrival(stored, number))

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Changes no byte: checks that everything is there and chooses the backend.

        Raises InvalidCheckpoint for what is missing.
        """
        assert self.banks is not None
        if not is_weights_pre_processed():
            self.arrivals.check()
            for name in VECTORS:
                vector = getattr(layer, name)
                if vector is not None and vector.isnan().any():
                    raise InvalidCheckpoint(f"{self.prefix}: {name}", "is missing or NaN")
        w13, w2 = self.banks
        has_bias = layer.w13_bias is not None or layer.w2_bias is not None
        needs = Needs((w13.k, w2.k), "concatenated", self.activation, self.limit, has_bias)
        self.backend = choose_backend(
            layer.w13_weight.device.type, None, (w13.path, w2.path), self.input_quant, needs
        )
        tell_backend(f"{w13.path}+{w2.path}", self.backend)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(tokens, hidden) in x's dtype: the experts of this rank, or its share of each."""
        assert self.banks is not None
        w13, w2 = self.banks
        if layer.expert_map is not None:
            here = layer.expert_map[topk_ids.clamp(min=0).long()]
            topk_ids = torch.where(topk_ids >= 0, here, -1)
        y: torch.Tensor = torch.ops.mxfp4prep.fused_moe(
            x,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            topk_weights,
            topk_ids,
            w2.k,
            w13.path,
            w2.path,
            self.input_quant,
            activation=self.activation,
            limit=self.limit,
            bias1=layer.w13_bias,
            bias2=layer.w2_bias if self.moe.tp_rank == 0 else None,  # ranks add up
            a1_scale=layer.w13_input_scale,
            a2_scale=layer.w2_input_scale,
            backend=self.backend,
        )
        return y


def _activation_of(layer: RoutedExperts, where: str) -> tuple[str, float | None]:
    """The name in GATES of what stands between the two GEMMs, and its clamp.

    Raises Unsupported for what the runtime does not compute.
    """
    name = _ACTIVATIONS.get(layer.activation)
    if name is None:
        expected = ", ".join(sorted(each.value for each in _ACTIVATIONS))
        found = layer.activation.value
        raise Unsupported(where, "activation", found=found, expected=expected, hint=RESTORE_HINT)
    if layer.apply_router_weight_on_input:
        what = "the router's weight on the experts' input"
        raise Unsupported(where, what, hint=RESTORE_HINT)
    standard = (1.702, 1.0) if name == "swigluoai" else (1.0, 0.0)
    given = layer.swiglu_alpha, layer.swiglu_beta
    if any(a not in (None, b) for a, b in zip(given, standard, strict=True)):
        what = "the slope and the shift of its activation"
        raise Unsupported(where, what, found=given, expected=standard, hint=RESTORE_HINT)
    limit = layer.swiglu_limit
    if limit is None and name == "swigluoai":
        limit = SWIGLUOAI_LIMIT
    return name, limit
