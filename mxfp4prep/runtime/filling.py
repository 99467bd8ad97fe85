"""Layers on the meta device that get their bytes: which of a module's, and from which of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.asked import Asked
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.linear import PreparedLinear

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from mxfp4prep.runtime.assembling import Assembler
    from mxfp4prep.runtime.catalogue import Catalogue

Layer = PreparedLinear | PreparedExperts


def empty_layers(module: nn.Module) -> list[Layer]:
    """The layers inside `module` that have tensors on meta; of experts with all theirs, once."""
    inside = {  # a shared expert is read with the routed ones that it stands beside
        part
        for layer in module.modules()
        if isinstance(layer, PreparedExperts)
        for part in layer.modules()
        if part is not layer
    }
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, Layer)
        and layer not in inside
        and any(buffer.is_meta for buffer in layer.buffers())
    ]


def read_again(catalogue: Catalogue, assembler: Assembler, layer: Layer) -> Layer:
    """The same layer from the files. Raises UsageError for one that the catalogue has not."""
    again: Layer | None = None
    if isinstance(layer, PreparedExperts):
        if layer.name in catalogue.groups:
            fusion = "fused" if layer.shared_slots else "separate"
            asked = Asked(layer.name, layer.activation, layer.limit, layer.shared_name, fusion)
            again = catalogue.experts(assembler, asked)
    elif layer.name in catalogue:
        again = catalogue.linear(assembler, catalogue.record(layer.name))
    if again is None or _shapes(again) != _shapes(layer):
        raise UsageError(
            layer.name,
            "not a layer of this checkpoint for this rank",
            found=_shapes(layer),
            expected="no such layer" if again is None else _shapes(again),
            hint="the layer must come from this checkpoint, loaded with the same ranks",
        )
    return again


def fill(pairs: Iterable[tuple[Layer, Layer]]) -> None:
    """Gives each first layer the tensors and backends of the second."""
    for layer, filled in pairs:
        for mine, theirs in zip(layer.modules(), filled.modules(), strict=True):
            if isinstance(theirs, Layer):
                mine.backend = theirs.backend  # type: ignore[assignment]
            for name, buffer in theirs.named_buffers(recurse=False):
                setattr(mine, name, buffer)


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in layer.named_buffers()}
