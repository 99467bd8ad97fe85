"""FP8 layers of a mixed Quark checkpoint, which were copied: run as Quark's importer runs them.

transformers has no module for them without amd-quark. Weights are per tensor or per output row,
inputs are left alone, static per tensor, or dynamic per tensor or per token; anything else is
refused. Scales of the key-value cache are loaded, kept, and not applied: the cache is
transformers', in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from mxfp4prep import mxfp4
from mxfp4prep.documents import CONFIG_NAME
from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.hf.cutting import Axis, check_cut
from mxfp4prep.integrations.hf.inputs import quantize_fp8
from mxfp4prep.prepared import VERIFY_HINT
from mxfp4prep.quark.binding import bind
from mxfp4prep.quark.patterns import parse_patterns
from mxfp4prep.runtime.exact import ExactScales
from mxfp4prep.runtime.reading import DTYPES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from mxfp4prep.runtime.opening import Opened

Inputs = Literal["none", "static", "tensor", "token"]
FP8 = "F8_E4M3"
"""safetensors' name of the one FP8 format that Quark stores weights in."""


class Fp8Linear(ExactScales):
    """y = Q(x) @ (weight * weight_scale).T + bias, in float32 and rounded once to x's dtype.

    weight        (n, k) float8_e4m3fn
    weight_scale  one value, or (n,)
    input_scale   float32, for static inputs, or None
    inputs        what Q is; "token" takes one scale for each position, shared by a batch of
                  sequences, as Quark's per_channel along axis 1 does
    sharers       the ranks with which it takes the scale of its input, or None
    """

    exact_buffers = ("input_scale",)
    _hf_quantized_needs_local_tp = True

    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None
    input_scale: Tensor | None

    def __init__(self, linear: nn.Linear, name: str, inputs: Inputs, opened: Opened) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.name, self.inputs = name, inputs
        self.sharers: DeviceMesh | None = None
        self.quantize_activations = True
        shape = linear.out_features, linear.in_features
        weight, scale = _entry(opened, f"{name}.weight"), _entry(opened, f"{name}.weight_scale")
        if weight.shape != shape:
            what = "not the size that config.json gives the layer"
            raise InvalidCheckpoint(name, what, found=weight.shape, expected=shape)
        if scale.numel() != 1 and scale.shape != shape[:1]:
            raise Unsupported(
                f"{name}.weight_scale",
                "FP8 scales of this shape",
                found=tuple(scale.shape),
                expected=f"one value, or {shape[0]}",
                hint="`mxfp4prep restore` gives the checkpoint back for an engine that reads it",
            )
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        static = torch.empty((), dtype=torch.float32, device="meta")
        if inputs == "static":
            static = static.expand(_entry(opened, f"{name}.input_scale").shape)
        self.register_buffer("input_scale", static if inputs == "static" else None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) in x's dtype, from x (..., k)."""
        scale = self.weight_scale.float()
        weight = self.weight.float() * (scale if scale.numel() == 1 else scale.unsqueeze(-1))
        y = self._quantized(x) @ weight.T
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype)

    def _quantized(self, x: Tensor) -> Tensor:
        """float32."""
        if not self.quantize_activations or self.inputs == "none":
            return x.float()
        if self.inputs == "static":
            assert self.input_scale is not None
            return mxfp4.fake_quantize_fp8(x, self.input_scale)
        dims = [dim for dim in range(x.dim()) if self.inputs == "tensor" or dim != x.dim() - 2]
        return quantize_fp8(x, dims, self.sharers)

    def get_ready(self) -> None:
        """Nothing: plain torch on any device."""

    def shard_dim(self, param: str, axis: Axis, size: int) -> int | None:
        """As StoredLinear.shard_dim; FP8 has no groups to break."""
        check_cut(self.name, axis, (self.out_features, self.in_features), size, group=1)
        if param == "weight":
            return 0 if axis == "rows" else 1
        return 0 if axis == "rows" and getattr(self, param).dim() == 1 else None

    def share_inputs(self, mesh: DeviceMesh) -> None:
        """As StoredLinear.share_inputs."""
        if self.inputs in ("tensor", "token"):
            self.sharers = mesh

    def cut(self, axis: Axis, rank: int, size: int) -> None:
        """Nothing: every piece is a slice."""

    def extra_repr(self) -> str:
        return f"n={self.out_features}, k={self.in_features}, inputs={self.inputs}"


def _entry(opened: Opened, name: str) -> Tensor:
    """A meta tensor like stored tensor `name`. Raises InvalidCheckpoint where there is none."""
    place = opened.places.get(name)
    if place is None:
        raise InvalidCheckpoint(name, "the tensor is missing")
    return torch.empty(place.entry.shape, dtype=DTYPES[place.entry.dtype], device="meta")


def inputs_of_fp8(config: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Inputs]:
    """What each FP8 module does to its input, from the source's quantization_config.

    Raises Unsupported for a module whose scheme Fp8Linear cannot run, InvalidCheckpoint for a part
    of the config that is no object.
    """
    layers = _object(config, "layer_quant_config")
    default = _object(config, "global_quant_config")
    specs = [_object(layers, pattern) for pattern in layers]
    patterns = parse_patterns(list(layers), "layer_quant_config")
    hits = bind(patterns, modules, parents=False).hits
    found: dict[str, Inputs] = {}
    for module in modules:
        candidates = [specs[patterns[hit].entry] for hit in hits.get(module, ())]
        candidates.append(default)
        # Quark writes the patterns sorted: the first one need not be the one that was applied
        spec = next((spec for spec in candidates if _weight_dtype(spec) == "fp8_e4m3"), None)
        if spec is None:
            what = "stored as FP8, which the source's quantization_config does not explain"
            raise Unsupported(module, what)
        found[module] = _inputs(module, spec)
    return found


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands at `key`; empty where nothing does. Raises InvalidCheckpoint for no object."""
    value = config.get(key)
    if value is None or isinstance(value, Mapping):
        return value or {}
    where = f"{CONFIG_NAME}: quantization_config.source_quantization_config: {key}"
    found = type(value).__name__
    raise InvalidCheckpoint(where, "not an object", found=found, hint=VERIFY_HINT)


def _weight_dtype(spec: Mapping[str, Any]) -> object:
    weight = spec.get("weight")
    return weight.get("dtype") if isinstance(weight, Mapping) else None


def _inputs(module: str, spec: Mapping[str, Any]) -> Inputs:
    tensors = spec.get("input_tensors")
    if tensors is None:
        return "none"
    if isinstance(tensors, Mapping) and tensors.get("dtype") == "fp8_e4m3":
        dynamic = bool(tensors.get("is_dynamic", tensors.get("dynamic")))
        axis = tensors.get("ch_axis", tensors.get("axis"))
        named = {
            ("per_tensor", False): "static",
            ("per_tensor", True): "tensor",
            ("per_channel", True): "token" if axis == 1 else None,
        }.get((str(tensors.get("qscheme")), dynamic))
        if named is not None:
            return cast(Inputs, named)
    raise Unsupported(
        module,
        "FP8 weights whose inputs are quantized in a way that is not known here",
        found=tensors,
        hint="`mxfp4prep restore` gives the checkpoint back for an engine that reads it",
    )
