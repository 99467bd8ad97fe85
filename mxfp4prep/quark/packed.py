"""A packed weight: a U8 tensor of E2M1 pairs, the E8M0 scale beside it, and their shapes.

Which U8 tensors *are* MXFP4 is for the config to say (see quark); here is which tensors belong
together and what they measure. No U8 tensor is passed over: each is a weight, a scale, or
explained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, Unsupported
from mxfp4prep.parallel import SCALE_GROUP, kind_of

if TYPE_CHECKING:
    from mxfp4prep.safefile import TensorEntry

_WEIGHT = ".weight"
_SCALES = (".weight_scale", ".weight_quantizer.scale")
"""Scale of `<m>.weight`. The second spelling is Quark 0.11 with transformers 5."""
_BANK_SCALES = ("_scale", "_weight_scale", ".weight_scale", ".weight_quantizer.scale")
"""Scale of a tensor without `.weight`: fused experts, DBRX's w1_weight."""
_SCALE_INV = ".weight_scale_inv"
"""Block FP8's name for its scale."""
_SECOND_STAGE = (".weight_scale_2", ".weight_quantizer.1.scale", ".weight_zero_point")
"""Tensors that MXFP4 never has."""
_SCALE_DTYPES = ("U8", "F8_E8M0")

_LABELS = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64", "F8_E4M3": "fp8"}
_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})


def label_of(entry: TensorEntry) -> str:
    """The word for a weight that is not MXFP4: bf16, f16, f32, fp8, int8, ..."""
    return _LABELS.get(entry.dtype) or entry.dtype.lower().replace("f8_", "fp8_")


def is_float(entry: TensorEntry) -> bool:
    """Whether the tensor is plain floating point, so not quantized."""
    return entry.dtype in _FLOATS


class Packed(NamedTuple):
    """A packed weight that has been measured.

    n, k        rows and values per row of one matrix
    experts     matrices of a bank, None for a single one
    is_matrix   False for weights of other ranks (convolutions): n is the product of leading sizes
    """

    weight: TensorEntry
    scale: TensorEntry
    n: int
    k: int
    experts: int | None
    is_matrix: bool


@dataclass(slots=True)
class Stock:
    """A checkpoint's tensors by what their names and dtypes say; all in file order.

    packed   module -> U8 weight. For a tensor without `.weight`, the module is the tensor's name
    others   module -> weight of any other dtype
    scales   U8 and F8_E8M0 tensors whose names end in "scale"
    loose    everything else
    """

    packed: dict[str, TensorEntry] = field(default_factory=dict)
    others: dict[str, TensorEntry] = field(default_factory=dict)
    scales: list[TensorEntry] = field(default_factory=list)
    loose: list[TensorEntry] = field(default_factory=list)


def take_stock(tensors: Mapping[str, TensorEntry]) -> Stock:
    """`tensors`, sorted into a Stock.

    Raises Unsupported for other ways to store FP4: dtype F4, and gpt-oss's `_blocks`/`_scales`.
    """
    stock = Stock()
    packed, others, scales, loose = stock.packed, stock.others, stock.scales, stock.loose
    for name, entry in tensors.items():
        dtype = entry.dtype
        if name.endswith(_WEIGHT):
            (packed if dtype == "U8" else others)[name[: -len(_WEIGHT)]] = entry
        elif dtype in _SCALE_DTYPES and name.endswith("scale"):
            scales.append(entry)
        elif dtype == "U8" and not _is_buffer(entry):
            packed[name] = entry
        elif len(entry.shape) == 3 and dtype in _FLOATS and kind_of(name) == "expert":
            others[name] = entry
        else:
            loose.append(entry)
        if dtype == "F4":
            raise Unsupported(
                name,
                "stored in dtype F4",
                found=f"F4 {list(entry.shape)}, a logical shape",
                expected="U8 with two codes a byte, as Quark writes",
            )
    return stock


def _is_buffer(entry: TensorEntry) -> bool:
    """Whether a U8 tensor cannot be a packed weight: too few axes, or an attention mask."""
    return len(entry.shape) < 2 or (len(entry.shape) > 2 and entry.name.endswith(".bias"))


def is_u8_buffer(entry: TensorEntry) -> bool:
    """Whether a loose tensor is a U8 one that has to be mentioned."""
    return entry.dtype == "U8"


def companions(tensors: Iterable[TensorEntry], endings: tuple[str, ...]) -> dict[str, str]:
    """Names of the tensors with one of `endings`, by what stands before it (see `stem`)."""
    found: dict[str, str] = {}
    for entry in tensors:
        name = entry.name
        if name.endswith(endings):
            for ending in endings:
                if name.endswith(ending):
                    found[name[: -len(ending)]] = name
    return found


def stem(module: str, weight: TensorEntry) -> str:
    """What names of a module's other tensors start with: `<module>.`, or `<bank>_`."""
    return f"{module}_" if weight.name == module else f"{module}."


def second_stage_of(name: str) -> str | None:
    """The module that a second scale or a zero point belongs to; None for other tensors."""
    for ending in _SECOND_STAGE:
        if name.endswith(ending):
            return name[: -len(ending)]
    return None


def scale_for(module: str, weight: TensorEntry, tensors: Mapping[str, TensorEntry]) -> TensorEntry:
    """The scale of a packed weight that the config says is MXFP4.

    Raises InvalidCheckpoint when there is none or two, and when it is neither U8 nor F8_E8M0.
    """
    endings = _BANK_SCALES if weight.name == module else _SCALES
    found = [entry for ending in endings if (entry := tensors.get(module + ending)) is not None]
    if len(found) != 1:
        raise _no_single_scale(module, weight, found, endings)
    scale = found[0]
    if scale.dtype not in _SCALE_DTYPES:
        raise InvalidCheckpoint(
            scale.name,
            "not an MXFP4 scale",
            found=f"{scale.dtype} {list(scale.shape)}",
            expected="U8 or F8_E8M0",
        )
    return scale


def _no_single_scale(
    module: str, weight: TensorEntry, found: list[TensorEntry], endings: tuple[str, ...]
) -> Mxfp4PrepError:
    if weight.name.endswith(("_blocks", "_scales")):
        return Unsupported(
            weight.name,
            "the _blocks and _scales form of gpt-oss, not AMD Quark MXFP4",
            hint="use a checkpoint that AMD Quark wrote",
        )
    if found:
        return InvalidCheckpoint(
            weight.name,
            "a U8 weight with two scales",
            found=" and ".join(entry.name for entry in found),
            expected="one of them",
        )
    return InvalidCheckpoint(
        weight.name,
        "a U8 weight without a scale",
        found=f"U8 {list(weight.shape)} alone",
        expected=" or ".join(module + ending for ending in endings),
        hint="see that every shard is there",
    )


def measure(module: str, weight: TensorEntry, scale: TensorEntry) -> Packed:
    """Sizes of a packed weight, checked against its scale.

    weight   (..., n, k // 2) U8
    scale    (..., n, ceil(k / 32)), leading axes as the weight's or flattened into n

    Raises InvalidCheckpoint where the shapes do not belong together.
    """
    shape = weight.shape
    if len(shape) < 2 or 0 in shape:
        raise InvalidCheckpoint(
            weight.name, "not a packed weight", found=f"U8 {list(shape)}", expected="(n, k / 2)"
        )
    k = 2 * shape[-1]
    columns = -(-k // SCALE_GROUP)
    rows = math.prod(shape[:-1])
    if len(shape) == 2:
        if scale.shape == (rows, columns):
            return Packed(weight, scale, rows, k, None, True)
        if _is_stacked(scale.shape, rows, columns):
            return Packed(weight, scale, scale.shape[1], k, scale.shape[0], True)
    elif scale.shape in ((rows, columns), (*shape[:-1], columns)):
        if len(shape) == 3 and shape[1] > 1 and not _is_convolution(module):
            return Packed(weight, scale, shape[1], k, shape[0], True)
        return Packed(weight, scale, rows, k, None, False)
    raise InvalidCheckpoint(
        scale.name,
        "does not fit its weight",
        found=f"{scale.dtype} {list(scale.shape)}",
        expected=f"{[*shape[:-1], columns]} for U8 {list(shape)}",
    )


def _is_stacked(shape: tuple[int, ...], rows: int, columns: int) -> bool:
    """Whether a scale is stacked per expert while the weight is concatenated (DBRX)."""
    return len(shape) == 3 and shape[0] * shape[1] == rows and shape[2] == columns


def _is_convolution(module: str) -> bool:
    return any("conv" in part or "patch_embed" in part for part in module.split(".")[-2:])


def owner_of(scale: TensorEntry, tensors: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """The weight that a weight scale belongs to, whatever its dtype; None if missing."""
    for ending in (_SCALE_INV, *_SCALES, "_weight_scale", "_scale"):
        if scale.name.endswith(ending):
            base = scale.name[: -len(ending)]
            owner = tensors.get(base + _WEIGHT) or tensors.get(base)
            if owner is not None:
                return owner
    return None


def is_weight_scale(name: str) -> bool:
    """Whether a name is that of a weight's scale, as opposed to a cache's or an input's."""
    return name.endswith((*_SCALES, "_weight_scale", _SCALE_INV))
