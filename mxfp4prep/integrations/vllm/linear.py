"""The linear method: parameters in the stored layouts, one GEMM of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from vllm.model_executor.utils import is_weights_pre_processed

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.vllm.messages import (
    NO_PLACE,
    NOT_STORED,
    NOT_STORED_HINT,
    tell_backend,
    tell_repacking,
)
from mxfp4prep.integrations.vllm.pieces import Partition, Piece, check_alike, path_of, pieces
from mxfp4prep.integrations.vllm.receiving import Arrivals, put, received, stored_of
from mxfp4prep.integrations.vllm.stored import RESTORE_HINT
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.backends import Needs, choose_backend
from mxfp4prep.runtime.decoding import decode_matrix
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.reading import Batch, Target
from mxfp4prep.runtime.slices import byte_columns

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.manifest import LayerRecord

_QKV = {"q": 0, "k": 1, "v": 2}

_PARAMETERS: dict[str, tuple[Callable[..., BasevLLMParameter], dict[str, int]]] = {
    # How a stored matrix is sliced: the dimension of its rows, that of its columns, and how many
    # rows or columns of the logical matrix one step there is.
    "tile16x16": (
        PackedvLLMParameter,
        {"output_dim": 0, "input_dim": 1, "packed_dim": 0, "packed_factor": 16},
    ),
    "tile32x8": (
        PackedvLLMParameter,
        {"output_dim": 0, "input_dim": 1, "packed_dim": 0, "packed_factor": 32},
    ),
    "transposed": (GroupQuantScaleParameter, {"output_dim": 1, "input_dim": 0}),
    "raw": (GroupQuantScaleParameter, {"output_dim": 0, "input_dim": 1}),
}
"""Layout -> vLLM's class of parameter for it, with its arguments."""


@register_weight_loader_v2_supported_method
class PreparedLinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM is untyped here
    """One module of vLLM, made of one stored layer or of several that it fuses.

    pieces   each stored matrix and what this rank holds of it, once the weights are created
    n, k     of what this rank holds
    path     a name of PATHS
    """

    supports_pre_processed_weights = True

    def __init__(self, prefix: str, members: tuple[LayerRecord, ...]) -> None:
        self.prefix, self.members = prefix, members
        check_alike(prefix, members)
        first = members[0]
        self.input_quant = input_quant_of(first.scheme, first.activation, first.name)
        self.pieces: tuple[Piece, ...] = ()
        self.n = self.k = 0
        self.path = ""
        self.backend = ""

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable[..., None],
        **_more: object,
    ) -> None:
        """`weight` and `weight_scale` as `path` stores them, `input_scale` for static inputs.

        Raises CannotShard where this rank's columns are not whole groups of 32, Unsupported for a
        module whose parts are cut in a way that is not known here.
        """
        self.params_dtype = params_dtype
        for record in self.members:
            if record.k != input_size:
                what = "vLLM expects another input size"
                raise Unsupported(record.name, what, found=record.k, expected=input_size)
        self.n, self.k = sum(output_partition_sizes), input_size_per_partition
        columns = columns_of(layer, input_size_per_partition)
        parts = partitions_of(layer, output_partition_sizes)
        self.pieces = pieces(self.prefix, self.members, parts, columns)
        self.path, reasons = path_of(((p.record, p.shard) for p in self.pieces), self.n)
        if reasons:
            tell_repacking(self.prefix, layer.tp_rank, layer.tp_size, reasons)
        scales = [record.input_scale for record in self.members]
        expected = [
            name
            for record, scale in zip(self.members, scales, strict=True)
            for name in (record.weight.tensor, record.scale.tensor, scale)
            if name is not None
        ]
        load_format = get_current_vllm_config().load_config.load_format
        self.arrivals = Arrivals(self.prefix, expected, str(load_format))
        for operand, layout_id in zip(("weight", "scale"), PATHS[self.path], strict=True):
            _, width = byte_columns(operand, (0, self.k))
            stored_shape = LAYOUTS[layout_id].stored_shape(self.n, width)
            kind, arguments = _PARAMETERS[layout_id]
            parameter: Any = kind(
                data=torch.empty(stored_shape, dtype=torch.uint8),
                weight_loader=self._receiver(operand, layout_id, weight_loader),
                **arguments,
            )
            name = "weight" if operand == "weight" else "weight_scale"
            layer.register_parameter(name, parameter)
        if any(scales):
            shape = (len(output_partition_sizes),)
            layer.register_parameter(
                "input_scale",
                PerTensorScaleParameter(
                    data=torch.full(shape, torch.nan, dtype=torch.float32),
                    weight_loader=self._scale_receiver(weight_loader),
                ),
            )

    def _receiver(
        self, operand: str, layout_id: str, load: Callable[..., None]
    ) -> Callable[..., None]:
        """vLLM's weight loader, behind a check and, where there must be one, a repacking."""

        def receive(param: Tensor, loaded_weight: Tensor, *shard_id: Any) -> None:  # noqa: ANN401
            record = self._member(shard_id)
            load(param, received(record, operand, loaded_weight, layout_id), *shard_id)
            self.arrivals.note(stored_of(record, operand).tensor)

        return receive

    def _scale_receiver(self, load: Callable[..., None]) -> Callable[..., None]:
        def receive(param: Tensor, loaded_weight: Tensor, *shard_id: Any) -> None:  # noqa: ANN401
            load(param, loaded_weight.float().reshape(1), *shard_id)
            self.arrivals.note(self._member(shard_id).input_scale or "")

        return receive

    def _member(self, shard_id: Sequence[Any]) -> LayerRecord:
        """The layer that a shard id of vLLM's means: "q", a number, several or none."""
        if len(self.members) == 1:
            return self.members[0]
        which = shard_id[0] if shard_id else None
        first = which[0] if isinstance(which, tuple) and which else which
        number = _QKV.get(first) if isinstance(first, str) else first
        for piece in self.pieces:
            if isinstance(number, int) and piece.partitions[0] <= number < piece.partitions[1]:
                return piece.record
        what = "vLLM loads a part of it that is not known"
        raise Unsupported(self.prefix, what, found=which, hint=RESTORE_HINT)

    def fill(self, layer: torch.nn.Module, batch: Batch) -> Iterator[str]:
        """Has this rank's pieces read into the parameters when `batch` is run.

        Yields the names of the stored tensors that are read.
        """
        for operand, layout_id in zip(("weight", "scale"), PATHS[self.path], strict=True):
            name = "weight" if operand == "weight" else "weight_scale"
            at = 0
            for piece in self.pieces:
                target = Target(LAYOUTS[layout_id], getattr(layer, name).data, self.n, at)
                put(batch, piece.record, operand, piece.shard, target)
                stored = stored_of(piece.record, operand).tensor
                self.arrivals.note(stored)
                at += piece.shard.n
                yield stored

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Changes no byte: checks that everything is there and chooses the backend.

        Raises InvalidCheckpoint for what is missing, Unsupported for static inputs that differ or a
        bias that the module has no place for.
        """
        if not is_weights_pre_processed():
            self.arrivals.check()
            _check_bias(layer, self.members)
            _check_input_scale(layer, self.prefix)
        device = layer.get_parameter("weight").device
        self.backend = choose_backend(
            device.type, None, (self.path,), self.input_quant, Needs(k=(self.k,))
        )
        tell_backend(self.path, self.backend)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(..., n) in x's dtype."""
        scale = getattr(layer, "input_scale", None)
        y: torch.Tensor = torch.ops.mxfp4prep.gemm(
            x.reshape(-1, self.k),
            layer.weight,
            layer.weight_scale,
            self.n,
            self.path,
            self.input_quant,
            bias,
            None if scale is None else scale[0],
            self.backend,
        )
        return y.reshape(*x.shape[:-1], self.n)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The weight that this rank holds, (n, k)."""
        weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        return decode_matrix(weight, scale, self.n, self.k, self.path, self.params_dtype)


def columns_of(layer: LinearBase, width: int) -> tuple[int, int]:
    """The columns of its input that a module has on this rank, `width` of them."""
    rank = layer.tp_rank if isinstance(layer, RowParallelLinear) else 0
    return rank * width, (rank + 1) * width


def partitions_of(layer: LinearBase, sizes: Sequence[int]) -> list[Partition]:
    """A module's outputs and which of them are on this rank.

    sizes   of the outputs on this rank

    Raises Unsupported for a module that has other outputs than its class is known to have.
    """
    rank = layer.tp_rank
    if isinstance(layer, QKVParallelLinear):
        kv_heads, kv_rank = layer.total_num_kv_heads, rank // layer.num_kv_head_replicas
        whole = [
            (layer.total_num_heads * layer.head_size, rank),
            (kv_heads * layer.head_size, kv_rank),
            (kv_heads * layer.v_head_size, kv_rank),
        ]
    elif isinstance(layer, MergedColumnParallelLinear):
        whole = [(rows, rank) for rows in layer.output_sizes]
    elif isinstance(layer, ColumnParallelLinear):
        whole = [(layer.output_size, rank)]
    else:
        whole = [(rows, 0) for rows in sizes]
    if len(whole) != len(sizes):
        what = f"{type(layer).__name__} has outputs that are not known here"
        raise Unsupported(layer.prefix, what, found=len(sizes), expected=len(whole))
    return [
        Partition(rows, at * size, (at + 1) * size)
        for (rows, at), size in zip(whole, sizes, strict=True)
    ]


def _check_bias(layer: torch.nn.Module, members: Sequence[LayerRecord]) -> None:
    """vLLM leaves a bias out that its module has no place for, and serves whatever memory holds
    where the module has a place and nothing is stored; both without a word."""
    has_place = getattr(layer, "bias", None) is not None
    for record in members:
        if record.bias is not None and not has_place:
            raise Unsupported(record.bias, NO_PLACE)
        if record.bias is None and has_place:
            raise InvalidCheckpoint(f"{record.name}.bias", NOT_STORED, hint=NOT_STORED_HINT)


def _check_input_scale(layer: torch.nn.Module, prefix: str) -> None:
    scales = getattr(layer, "input_scale", None)
    if scales is None:
        return
    if scales.isnan().any():
        raise InvalidCheckpoint(prefix, "static inputs, but an input_scale is missing or NaN")
    if (scales != scales[0]).any():
        what = "parts of one projection have different input scales, although they have one input"
        raise Unsupported(prefix, what, found=scales.tolist(), hint=RESTORE_HINT)
