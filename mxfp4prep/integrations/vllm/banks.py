"""The parameters of routed experts: two banks in the stored layouts, and small vectors beside them.

vLLM's own loaders fill them, expert by expert, behind a check and a repacking where there must be
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from mxfp4prep.errors import Unsupported
from mxfp4prep.integrations.vllm.receiving import OPERANDS, Arrivals, received, stored_of
from mxfp4prep.integrations.vllm.stored import RESTORE_HINT
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime.gathering import Gathered
from mxfp4prep.runtime.slices import byte_columns

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from mxfp4prep.manifest import LayerRecord

Load = Callable[..., bool | None]
"""A weight loader of vLLM's: whether the expert is on this rank."""

VECTORS = ("w13_bias", "w2_bias", "w13_input_scale", "w2_input_scale")


class Bank(NamedTuple):
    """One of the two banks: its name in vLLM, its path, and one expert's matrix here."""

    name: str
    path: str
    n: int
    k: int

    def parameter(self, operand: str) -> str:
        """What vLLM calls the parameter with every expert's "weight" or "scale"."""
        return f"{self.name}_weight" + ("" if operand == "weight" else "_scale")


def arrival(tensor: str, number: int) -> str:
    """A stored tensor on its way into expert `number`, by vLLM's id."""
    return f"{tensor} for expert {number}"


def add_bank(
    layer: RoutedExperts,
    bank: Bank,
    experts: int,
    gathered: Gathered,
    arrivals: Arrivals,
    load: Load,
) -> None:
    """Registers the weight and the scale of `experts` matrices, (experts, *stored shape).

    gathered   what the matrices are stored as
    """
    for operand, layout_id in zip(OPERANDS, PATHS[bank.path], strict=True):
        _, columns = byte_columns(operand, (0, bank.k))
        shape = LAYOUTS[layout_id].stored_shape(bank.n, columns)
        parameter = torch.nn.Parameter(
            torch.empty((experts, *shape), dtype=torch.uint8), requires_grad=False
        )
        layer.register_parameter(bank.parameter(operand), parameter)
        set_weight_attrs(
            parameter,
            {
                "weight_loader": _receiver(gathered, arrivals, operand, layout_id, load),
                "quant_method": FusedMoeWeightScaleSupported.GROUP.value,
                # the dimensions of rows and columns have changed places
                "is_transposed": layout_id == "transposed",
            },
        )


def _receiver(
    gathered: Gathered, arrivals: Arrivals, operand: str, layout_id: str, load: Load
) -> Load:
    """vLLM's weight loader, behind a check and, where there must be one, a repacking."""

    def receive(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        record = _record(gathered, shard_id, expert_id)
        loaded = received(record, operand, loaded_weight, layout_id)
        success = load(
            param, loaded, weight_name, shard_id=shard_id, expert_id=expert_id,
            return_success=True,
        )  # fmt: skip
        if success:
            arrivals.note(arrival(stored_of(record, operand).tensor, expert_id))
        return success if return_success else None

    return receive


def _record(gathered: Gathered, shard_id: str, expert: int) -> LayerRecord:
    """The stored layer that is matrix "w1", "w2" or "w3" of an expert."""
    if shard_id == "w2":
        return gathered.w2[expert][0].record
    return gathered.w13[expert][0 if shard_id == "w1" else 1].record


def add_vectors(
    layer: RoutedExperts, experts: int, banks: tuple[Bank, Bank], gathered: Gathered, load: Load
) -> None:
    """Registers VECTORS: biases and the scales of static inputs, where there are any, with vLLM's
    own loaders. NaN until they are loaded."""
    up, down = gathered.w13[0][0].record, gathered.w2[0][0].record
    w13, w2 = banks
    for name, is_there, size in zip(
        VECTORS,
        (record is not None for record in (up.bias, down.bias, up.input_scale, down.input_scale)),
        ((experts, w13.n), (experts, w2.n), (experts,), (experts,)),
        strict=True,
    ):
        if not is_there:
            layer.register_parameter(name, None)
            continue
        empty = torch.full(size, torch.nan, dtype=torch.float32)
        parameter = torch.nn.Parameter(empty, requires_grad=False)
        layer.register_parameter(name, parameter)
        is_scale = name == "w13_input_scale"
        set_weight_attrs(parameter, {"weight_loader": _one_scale(load) if is_scale else load})


def _one_scale(load: Load) -> Load:
    """A loader for the one input scale that gate and up of an expert have in common."""

    def receive(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        before = param.detach().clone()
        success = load(
            param, loaded_weight, weight_name, shard_id=shard_id, expert_id=expert_id,
            return_success=True,
        )  # fmt: skip
        if ((before != param) & ~before.isnan()).any():
            what = "gate and up have different input scales, although they have one input"
            raise Unsupported(f"{weight_name}: expert {expert_id}", what, hint=RESTORE_HINT)
        return success if return_success else None

    return receive
