"""What modules and operators are handed: shapes, dtypes and devices, checked before a byte is read.

No value is looked at, so that nothing waits for a GPU, and no number of rows is compared with a
constant, so that torch.compile keeps it a symbol.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

import torch

from mxfp4prep.errors import LayoutError, UsageError
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime.slices import byte_columns

if TYPE_CHECKING:
    from torch import Tensor

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

TO_QUANTIZE = "the layer quantizes its input itself: hand it x.to(torch.bfloat16)"
ITS_COLUMNS = "under tensor parallelism a row-parallel layer takes its rank's columns only"
AS_TENSOR = "hand it torch.as_tensor(...), which a sparse one's .to_dense() is too"
AS_ROUTED = "one weight and one id for each of a row's experts, as torch.topk gives them"
AS_STORED = "a layer's own are its buffers: call the layer"
ONE_DEVICE = "load with device=..., or move one of them with .to(device)"


def check_stored(
    where: str, operands: tuple[Tensor, Tensor], n: int, k: int, path: str, *bank: int
) -> None:
    """Raises LayoutError unless weight and scale are what `path` stores for (n, k) matrices.

    bank   the number of experts, for banks of matrices
    """
    plain = isinstance(n, int) and isinstance(k, int)  # torch.compile's symbols have no hash
    try:
        shapes = _known_shapes(n, k, path) if plain else _stored_shapes(n, k, path)
    except LayoutError as error:
        place, found, expected = f"{where}: {error.where}", error.found, error.expected
        raise LayoutError(place, error.what, found=found, expected=expected) from None
    for which, (stored, shape) in enumerate(zip(operands, shapes, strict=True)):
        if stored.dtype != torch.uint8 or tuple(stored.shape) != (*bank, *shape):
            raise LayoutError(
                f"{where}: {('weight', 'scale')[which]}",
                f"not a ({n}, {k}) matrix in layout {PATHS[path][which]}",
                found=f"{stored.dtype} {tuple(stored.shape)}",
                expected=f"torch.uint8 {(*bank, *shape)}",
            )


def _stored_shapes(n: int, k: int, path: str) -> tuple[tuple[int, int], tuple[int, int]]:
    weight, scale = (LAYOUTS[layout] for layout in PATHS[path])
    return (
        weight.stored_shape(n, byte_columns("weight", (0, k))[1]),
        scale.stored_shape(n, byte_columns("scale", (0, k))[1]),
    )


_known_shapes = lru_cache(maxsize=1024)(_stored_shapes)
"""The same for numbers: a serving model asks for a few, at every call."""


def check_input(where: str, x: object, width: int, weight: Tensor) -> None:
    """Raises UsageError for activations that a layer of `width` columns cannot take.

    Under torch.compile the reason is said where the graph breaks: it cannot trace our errors.
    """
    if not isinstance(x, torch.Tensor):
        found, expected = type(x).__name__, f"a tensor (..., {width})"
        refuse(where, "the input is no tensor", found, expected, AS_TENSOR)
    if x.layout != torch.strided:
        refuse(where, "the input's layout", x.layout, "torch.strided", "hand it x.to_dense()")
    if x.dim() == 0 or x.shape[-1] != width:
        expected, known = f"(..., {width})", f": expected (..., {width})"
        refuse(where, "the input's shape", tuple(x.shape), expected, ITS_COLUMNS, known=known)
    if x.dtype not in INPUT_DTYPES:
        expected = "bfloat16, float16 or float32"
        known = f": found {x.dtype}, expected {expected}"
        refuse(where, "the input's dtype", x.dtype, expected, TO_QUANTIZE, known=known)
    if x.device != weight.device:
        what = "the input is on another device than the weight"
        refuse(where, what, x.device, weight.device, ONE_DEVICE)


def check_routing(where: str, x: Tensor, topk_weights: object, topk_ids: object) -> None:
    """Raises UsageError for a routing that is not that of x, (..., hidden)."""
    for what, found in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if not isinstance(found, torch.Tensor) or found.layout != torch.strided:
            kind = found.layout if isinstance(found, torch.Tensor) else type(found).__name__
            refuse(where, f"{what} is no strided tensor", kind, "a tensor (..., top)", AS_TENSOR)
    assert isinstance(topk_weights, torch.Tensor)
    assert isinstance(topk_ids, torch.Tensor)
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[:-1] != x.shape[:-1]:
        found = f"topk_weights {tuple(topk_weights.shape)}, topk_ids {tuple(topk_ids.shape)}"
        refuse(
            where, "the routing's shape", found, f"both {tuple(x.shape[:-1])} and top", AS_ROUTED
        )
    if topk_ids.dim() == 0 or topk_ids.shape[-1] == 0:
        refuse(where, "the routing names no expert", None, "top >= 1", AS_ROUTED)
    check_routing_kinds(where, x, topk_weights, topk_ids)


def check_routing_kinds(where: str, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    """Raises UsageError for dtypes or devices of a routing that are none of one."""
    if topk_ids.dtype not in ID_DTYPES or not topk_weights.is_floating_point():
        found = f"topk_weights {topk_weights.dtype}, topk_ids {topk_ids.dtype}"
        refuse(where, "the routing's dtypes", found, "floating weights and integer ids", AS_ROUTED)
    if topk_ids.device != x.device or topk_weights.device != x.device:
        refuse(where, "the routing is on another device", topk_ids.device, x.device, ONE_DEVICE)


def check_rows(where: str, x: Tensor, weight: Tensor) -> None:
    """Raises UsageError unless x is a matrix of activations beside the weight."""
    if x.dim() != 2:
        refuse(
            where,
            "the input's shape",
            tuple(x.shape),
            "(rows, columns)",
            "hand it x.flatten(0, -2)",
        )
    check_input(where, x, x.shape[1], weight)


def check_vector(where: str, vector: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    """Raises UsageError for a bias or a scale that is not floating, of that shape, beside x.

    An empty `shape` means one number, in any number of dimensions.
    """
    if vector is None:
        return
    fits = tuple(vector.shape) == shape if shape else vector.numel() == 1
    if not fits or not vector.is_floating_point() or vector.device != x.device:
        found = f"{vector.dtype} {tuple(vector.shape)} on {vector.device}"
        expected = f"floating {shape or 'of one value'} on {x.device}"
        refuse(where, "does not fit", found, expected, AS_STORED)


def refuse(
    where: str,
    what: str,
    found: object,
    expected: object,
    hint: str | None = None,
    *,
    known: str = "",
) -> NoReturn:
    """Raises UsageError. Under torch.compile, which cannot trace that, ends the graph and says why.

    known   what may be said there: no size, which may be a symbol
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=f"{where}: {what}{known}")
    raise UsageError(where, what, found=found, expected=expected, hint=hint)
