"""StoredLinear: an MXFP4 layer in a transformers model, its tensors named as in the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.integrations.hf.cutting import Axis, check_cut, cut_matrix, moved, slicing_of
from mxfp4prep.integrations.hf.inputs import DYNAMIC_FP8, quantize_rows
from mxfp4prep.layouts import PATHS
from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.backends import Needs, choose_backend
from mxfp4prep.runtime.exact import ExactScales
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.linear import check_input
from mxfp4prep.runtime.reading import DTYPES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from mxfp4prep.manifest import LayerRecord
    from mxfp4prep.runtime.opening import Opened


class StoredLinear(ExactScales):
    """y = x @ weight.T + bias, as PreparedLinear; made on meta, filled by transformers' loader.

    in_features, out_features   of the whole layer, on every rank
    path           "asm", "triton" or "kept", of what is held now
    weight, weight_scale        bytes, as stored or as this rank's piece of that
    bias           (n,) floating, or None
    input_scale    float32, for static FP8 inputs, or None
    quantize_activations        False skips what the scheme does to x
    backend        a name from `mxfp4prep.backends()`; None takes the best for the device
    sharers        the ranks with which it takes the scale of its input, or None
    """

    exact_buffers: ClassVar[tuple[str, ...]] = ("input_scale",)
    # transformers' tensor-parallel hooks then hand over this rank's tensors and take back its part
    _hf_quantized_needs_local_tp = True

    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None
    input_scale: Tensor | None

    def __init__(
        self, linear: nn.Linear, record: LayerRecord, opened: Opened, backend: str | None = None
    ) -> None:
        super().__init__()
        found = linear.out_features, linear.in_features
        if found != (record.n, record.k):
            raise InvalidCheckpoint(
                record.name,
                "not the size that config.json gives the layer",
                found=f"{record.n} x {record.k}",
                expected=f"{found[0]} x {found[1]}",
            )
        self.in_features, self.out_features = record.k, record.n
        self.record, self.name = record, record.name
        self.path = path_name(record)
        self.input_quant = input_quant_of(record.scheme, record.activation, record.name)
        self.quantize_activations = True
        self.backend = backend
        self.sharers: DeviceMesh | None = None
        self._chosen: dict[tuple[str, str | None], str] = {}
        for name, tensor in (
            ("weight", record.weight.tensor),
            ("weight_scale", record.scale.tensor),
        ):
            self.register_parameter(name, stored_parameter(opened, tensor))
        bias = linear.bias
        if bias is None and record.bias is not None:
            what = "the checkpoint has a bias, the model's layer has none"
            raise InvalidCheckpoint(record.name, what)
        self.register_parameter("bias", bias)
        scale = None if record.input_scale is None else opened.places[record.input_scale].entry
        self.register_buffer(
            "input_scale",
            None if scale is None else torch.empty(scale.shape, dtype=torch.float32, device="meta"),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) in x's dtype, from x (..., k) bfloat16, float16 or float32; n and k are this
        rank's. Raises UsageError for another width, dtype or device."""
        weight, scale = self.weight.view(torch.uint8), self.weight_scale.view(torch.uint8)
        n, columns = weight.shape
        n, k = (16 * n, columns // 8) if self.path == "asm" else (n, 2 * columns)
        check_input(self.name, x, k, weight)
        input_scale, rows = self.input_scale, x.reshape(-1, k)
        input_quant = self.input_quant if self.quantize_activations else "none"
        if self.sharers is not None and self.quantize_activations:
            rows, input_quant = quantize_rows(rows, input_quant, self.sharers), "none"
        y: Tensor = torch.ops.mxfp4prep.gemm(
            rows,
            weight,
            scale,
            n,
            self.path,
            input_quant,
            self.bias,
            None if input_scale is None else input_scale.reshape(()),
            self._backend_on(x.device.type, k),
        )
        return y.to(x.dtype).reshape(*x.shape[:-1], n)

    def _backend_on(self, device: str, k: int) -> str:
        key = device, self.backend
        if key not in self._chosen:
            paths, needs = (self.path,), Needs(k=(k,))
            self._chosen[key] = choose_backend(device, self.backend, paths, self.input_quant, needs)
        return self._chosen[key]

    def get_ready(self) -> None:
        """Chooses the backend for where the layer is. Raises BackendUnavailable."""
        if not self.weight.is_meta:
            self._backend_on(self.weight.device.type, self.in_features)

    def shard_dim(self, param: str, axis: Axis, size: int) -> int | None:
        """The dimension along which `param` is read in `size` equal pieces where the layer is cut
        along `axis`; None for a whole one. Raises CannotShard."""
        check_cut(self.name, axis, (self.out_features, self.in_features), size)
        if param == "bias":
            return 0 if axis == "rows" else None
        dims = slicing_of(self.path, self.out_features, self.in_features, axis, size)
        return None if dims is None else dims[param == "weight_scale"]

    def share_inputs(self, mesh: DeviceMesh) -> None:
        """Has the ranks of `mesh` take the scale of an input together of which each has columns."""
        if self.input_quant in DYNAMIC_FP8:
            self.sharers = mesh

    def cut(self, axis: Axis, rank: int, size: int) -> None:
        """Replaces whole tensors that could not be read in pieces by this rank's, repacked."""
        if slicing_of(self.path, self.out_features, self.in_features, axis, size) is not None:
            return
        n, k = self.out_features, self.in_features
        pair = self.weight.data, self.weight_scale.data
        weight, scale = cut_matrix(pair, self.path, (n, k), axis, rank, size)
        moved(self.name, rank, size)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.path = "triton"

    def extra_repr(self) -> str:
        return (
            f"n={self.out_features}, k={self.in_features}, path={self.path}, "
            f"layouts={'+'.join(PATHS[self.path])}, scheme={self.record.scheme}, "
            f"bias={self.bias is not None}"
        )


def stored_parameter(opened: Opened, name: str, *lead: int) -> nn.Parameter:
    """A meta parameter with the dtype and shape that tensor `name` is stored in."""
    entry = opened.places[name].entry
    empty = torch.empty((*lead, *entry.shape), dtype=DTYPES[entry.dtype], device="meta")
    return nn.Parameter(empty, requires_grad=False)
