"""Modules that are not MXFP4: vLLM's own methods, asked whether there is something to load.

For a quantized model vLLM does not track which parameters were loaded. One that the checkpoint does
not have keeps what the memory held before, and is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import is_weights_pre_processed

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.vllm.receiving import Arrivals
from mxfp4prep.integrations.vllm.stored import Stored

NO_PLACE_FOR_BIAS = "vLLM's module for this layer adds no bias"
NOT_STORED = "vLLM's module needs it, but the checkpoint does not have it"
NOT_STORED_HINT = "its config.json may be that of another model"


def checked_linear(
    method: QuantizeMethodBase,
    layer: LinearBase,
    prefix: str,
    parts: Sequence[str],
    stored: Stored,
) -> QuantizeMethodBase:
    """`method`, which refuses a bias that only one of module and checkpoint has, once it is known.

    parts   the modules that `layer` is fused from, none where it is not known to be

    Raises InvalidCheckpoint where there is no weight for the module.
    """
    is_whole = f"{prefix}.weight" in stored.tensors
    is_fused = isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear)
    if not prefix or (is_fused and not is_whole and not parts):
        return method  # made by the model itself, of names that only its loading knows
    names = [prefix] if is_whole or not parts else list(parts)
    for name in names:
        _require(f"{name}.weight", stored)
    finish = method.process_weights_after_loading

    # On this one method only: a class of our own would not be Quark's any more, and vLLM tells by
    # the class's name how a weight is sliced.
    def process(layer: torch.nn.Module) -> None:
        _check_bias(layer, names, stored)
        finish(layer)

    method.process_weights_after_loading = process
    return method


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's for embeddings and heads, with a check that a weight has arrived.

    prefix   the module's name, "" where its model does not say
    """

    def __init__(self, prefix: str, stored: Stored) -> None:
        super().__init__()
        self.prefix, self._stored = prefix, stored

    def create_weights(
        self,
        layer: VocabParallelEmbedding,
        *sizes: Any,  # noqa: ANN401 - vLLM's
        weight_loader: Callable[..., None],
        **more: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        """vLLM's parameter, behind a loader that notes what arrives."""
        name = f"{self.prefix}.weight" if self.prefix else "weight"
        where = self.prefix or type(layer).__name__
        load_format = get_current_vllm_config().load_config.load_format
        self._arrivals = Arrivals(where, [name], str(load_format))

        def receive(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
            weight_loader(param, loaded_weight)
            self._arrivals.note(name)

        super().create_weights(layer, *sizes, weight_loader=receive, **more)
        self._receive = receive

    def process_weights_after_loading(self, layer: VocabParallelEmbedding) -> None:
        """vLLM's, after the check.

        Raises InvalidCheckpoint for a weight or a bias that is not there, Unsupported for a bias
        that the module has no place for.
        """
        # a tied head has another module's weight, and a model may load in a way of its own
        is_ours = getattr(layer.weight, "weight_loader", None) is self._receive
        if is_ours and not is_weights_pre_processed():
            self._arrivals.check()
        _check_bias(layer, [self.prefix] if self.prefix else [], self._stored)
        super().process_weights_after_loading(layer)


def _check_bias(layer: torch.nn.Module, names: Sequence[str], stored: Stored) -> None:
    has_place = getattr(layer, "bias", None) is not None
    for name in names:
        bias = f"{name}.bias"
        if has_place:
            _require(bias, stored)
        elif bias in stored.tensors:
            raise Unsupported(bias, NO_PLACE_FOR_BIAS)


def _require(tensor: str, stored: Stored) -> None:
    if tensor not in stored.tensors:
        raise InvalidCheckpoint(tensor, NOT_STORED, hint=NOT_STORED_HINT)
