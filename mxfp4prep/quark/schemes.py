"""A quantization scheme: what Quark's config says about one layer's weight and input.

Recognition follows the fields of the tensor specs, never a scheme's name, because look-alikes
(amdfp4, nvfp4) share dtype, shape and tensor names with MXFP4 and differ in one field.
Only `dtype` is required of a spec; unknown keys are ignored; the older keys `dynamic` and `axis`
stand in for `is_dynamic` and `ch_axis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.parallel import SCALE_GROUP

CONFIG_NAME = "config.json"


class Activation(NamedTuple):
    """How a layer's input is quantized; dtype None means not at all.

    dtype        Quark's name of the element type: fp4, fp6_e2m3, fp6_e3m2, fp8_e4m3
    scale_mode   rounding of the shared exponent (even, floor, ceil), None where there is none
    static       the scale is stored as `input_scale`, not computed per call
    """

    dtype: str | None
    scale_mode: str | None
    static: bool


UNQUANTIZED_INPUT = Activation(None, None, False)

MXFP4_SCHEMES = frozenset({"w4a4", "w4a16", "w4a8", "w4a6"})
"""The schemes whose weights are MXFP4, by what the input becomes."""

_NEVER_PACKED = frozenset({"fp8_e4m3", "fp8_e5m2", "int8", "int4", "uint4", "bfloat16", "float16"})
"""Weight dtypes that Quark stores as F8, I8, I32 or floats: a U8 weight contradicts them."""


_ROW_AXES = (-1, 1, None)
"""Values of ch_axis that mean groups along the last axis."""


class Scheme(NamedTuple):
    """One layer's scheme.

    name           w4a4, w4a16, w4a8, w4a6, or the name of what is not MXFP4 ("unquantized", "fp8")
    weight_dtype   Quark's dtype of the weight, the first one of a two-stage spec, None if none
    activation     meaningful for the four MXFP4 schemes only
    group          values per scale of a single-stage weight, else None
    """

    name: str
    weight_dtype: str | None = None
    activation: Activation = UNQUANTIZED_INPUT
    group: int | None = None

    @property
    def is_mxfp4(self) -> bool:
        """Whether the weights are MXFP4 and the inputs one of the four known kinds."""
        return self.name in MXFP4_SCHEMES

    @property
    def may_be_u8(self) -> bool:
        """Whether such a weight may be stored as U8 at all."""
        return self.weight_dtype is not None and self.weight_dtype not in _NEVER_PACKED

    @property
    def is_twin(self) -> bool:
        """Whether its weights have MXFP4's dtypes and shapes but mean something else."""
        alike = self.weight_dtype == "fp4" and self.group == SCALE_GROUP
        return alike and not self.is_mxfp4 and not self.name.startswith("mxfp4_")


UNQUANTIZED = Scheme("unquantized")


class _Spec(NamedTuple):
    """The fields of a tensor spec that decide a scheme."""

    dtype: str
    qscheme: str | None
    group: int | None
    scale_format: str | None
    scale_mode: str | None
    dynamic: bool
    axis: int | None

    @property
    def is_mx(self) -> bool:
        return (
            self.qscheme == "per_group"
            and self.group == SCALE_GROUP
            and self.scale_format == "e8m0"
            and self.axis in _ROW_AXES
        )


def layer_scheme(layer: object, where: str) -> Scheme:
    """The scheme of a layer spec `{weight, input_tensors, ...}`; `where` is its key in the config.

    Raises InvalidCheckpoint, naming the key, where the spec has another form than Quark's.
    """
    if not isinstance(layer, Mapping):
        refuse(where, layer, "an object with weight and input_tensors")
    weight = _specs(layer.get("weight"), f"{where}.weight")
    inputs = _specs(layer.get("input_tensors"), f"{where}.input_tensors")
    if not weight:
        return UNQUANTIZED
    if len(weight) > 1 or isinstance(layer["weight"], list):
        return Scheme(_staged_name(weight), weight[0].dtype)
    spec = weight[0]
    if spec.dtype == "fp4" and spec.is_mx and not spec.dynamic:
        name, activation = _mxfp4_input(inputs, isinstance(layer.get("input_tensors"), list))
        return Scheme(name, "fp4", activation, spec.group)
    return Scheme(_single_name(spec, inputs), spec.dtype, group=spec.group)


def _mxfp4_input(inputs: tuple[_Spec, ...], staged: bool) -> tuple[str, Activation]:
    if not inputs:
        return "w4a16", UNQUANTIZED_INPUT
    spec = inputs[0]
    activation = Activation(spec.dtype, spec.scale_mode, not spec.dynamic)
    if not staged:
        if spec.is_mx and spec.dynamic and spec.dtype == "fp4":
            return "w4a4", activation
        if spec.is_mx and spec.dynamic and spec.dtype in ("fp6_e2m3", "fp6_e3m2"):
            return "w4a6", activation
        per_token = spec.qscheme == "per_channel" and spec.dynamic
        if spec.dtype == "fp8_e4m3" and (spec.qscheme == "per_tensor" or per_token):
            # Static scales are stored; dynamic ones are computed over a token or the whole input.
            mode = None if not spec.dynamic else "per_token" if per_token else "per_tensor"
            return "w4a8", activation._replace(scale_mode=mode)
    dtypes = "_".join(each.dtype for each in inputs)
    return f"mxfp4_{dtypes}{'' if spec.dynamic else '_static'}", activation


def _staged_name(stages: tuple[_Spec, ...]) -> str:
    dtypes = tuple(spec.dtype for spec in stages)
    if dtypes == ("fp4", "fp8_e4m3") and stages[0].group == 16:
        return "nvfp4"
    if dtypes == ("fp4", "fp8_e5m3"):
        return f"amdfp4_global{stages[0].group}"
    if dtypes == ("fp8_e4m3", "int4"):
        return "int4_fp8"
    return "list_of_" + "_".join(dtypes)


def _single_name(spec: _Spec, inputs: tuple[_Spec, ...]) -> str:
    if spec.dtype == "fp4":
        if spec.scale_format == "e5m3" and spec.group in (16, 32):
            return "amdfp4" if spec.group == 16 else "amdfp4_g32"
        axis = "" if spec.axis in _ROW_AXES else f"_axis{spec.axis}"
        dynamic = "_dynamic" if spec.dynamic else ""
        return f"fp4_g{spec.group}_{spec.scale_format}{axis}{dynamic}"
    if spec.dtype.startswith("fp6_"):
        return f"mx{spec.dtype}" if spec.is_mx else spec.dtype
    if spec.dtype == "fp8_e4m3":
        if spec.is_mx:
            return "mxfp8"
        if spec.qscheme == "per_channel":
            per_token = bool(inputs) and inputs[0].qscheme == "per_channel" and inputs[0].dynamic
            return "ptpc_fp8" if per_token else "fp8_per_channel"
        return {"per_tensor": "fp8", "per_block": "fp8_block"}.get(spec.qscheme or "", "fp8_other")
    if spec.dtype in ("int4", "uint4") and spec.qscheme == "per_group" and not inputs:
        return f"{spec.dtype}_wo_{spec.group}"
    return spec.dtype


def _specs(value: object, where: str) -> tuple[_Spec, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        if not value:
            refuse(where, value, "an object, a list of objects or null", found="an empty list")
        return tuple(_spec(item, f"{where}[{i}]") for i, item in enumerate(value))
    return (_spec(value, where),)


def _spec(value: object, where: str) -> _Spec:
    if not isinstance(value, Mapping):
        refuse(where, value, "an object, a list of objects or null")

    dtype = _text(value, "dtype", where)
    if dtype is None:
        refuse(f"{where}.dtype", None, "a string")
    return _Spec(
        dtype=dtype,
        qscheme=_text(value, "qscheme", where),
        group=_number(value, ("group_size",), where),
        scale_format=_text(value, "scale_format", where),
        scale_mode=_text(value, "scale_calculation_mode", where),
        dynamic=_flag(value, ("is_dynamic", "dynamic"), where),
        axis=_number(value, ("ch_axis", "axis"), where),
    )


def _text(spec: Mapping[str, object], key: str, where: str) -> str | None:
    value = spec.get(key)
    if value is not None and not isinstance(value, str):
        refuse(f"{where}.{key}", value, "a string or null")
    return value


def _number(spec: Mapping[str, object], keys: tuple[str, ...], where: str) -> int | None:
    for key in keys:
        value = spec.get(key)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        refuse(f"{where}.{key}", value, "a whole number or null")
    return None


def _flag(spec: Mapping[str, object], keys: tuple[str, ...], where: str) -> bool:
    for key in keys:
        value = spec.get(key)
        if value is None:
            continue
        if isinstance(value, bool):
            return value
        refuse(f"{where}.{key}", value, "true, false or null")
    return False


def refuse(key: str, value: object, expected: str, found: str | None = None) -> NoReturn:
    """Raises InvalidCheckpoint about the value at `key` of config.json."""
    raise InvalidCheckpoint(
        CONFIG_NAME, f"{key} has the wrong form", found=found or _word(value), expected=expected
    )


def _word(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    if isinstance(value, int | float):
        return f"the number {value}"
    return "a list" if isinstance(value, list) else "an object"
