"""Layers on the meta device that get their bytes: which of a module's, and from which of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.asked import Asked
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.shared_expert import SharedExpert

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    if again is None:
        raise _not_ours(layer.name, f"{layer.name}: {layer.extra_repr()}", "no such layer")
    mine, theirs = _facts(layer), _facts(again)
    differing = [what for what in (mine | theirs) if mine.get(what) != theirs.get(what)]
    if differing:
        raise _not_ours(layer.name, _said(mine, differing), _said(theirs, differing))
    return again


def _said(facts: Mapping[str, object], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {facts.get(name, 'absent')}" for name in names)


def _not_ours(name: str, found: str, expected: str) -> UsageError:
    return UsageError(
        name,
        "not a layer of this checkpoint for this rank",
        found=found,
        expected=expected,
        hint="the layer must come from this checkpoint, loaded with the same ranks",
    )


def fill(pairs: Iterable[tuple[Layer, Layer]]) -> None:
    """Gives each first layer the tensors and backends of the second."""
    for layer, filled in pairs:
        for mine, theirs in zip(layer.modules(), filled.modules(), strict=True):
            if isinstance(theirs, Layer):
                mine.backend = theirs.backend  # type: ignore[assignment]
            for name, buffer in theirs.named_buffers(recurse=False):
                setattr(mine, name, buffer)


_TOLD = (
    "n", "k", "experts", "hidden", "intermediate", "paths", "scheme", "input_quant", "gate_up",
    "activation", "limit", "tp_rank", "tp_size", "ep_rank", "ep_size", "shared_slots", "turn",
)  # fmt: skip
"""What a module says about itself that its bytes must be read for. Shapes are not enough: those of
another rank's piece, and of another order of bytes, are often the same."""


def _facts(layer: nn.Module) -> dict[str, object]:
    """What must be equal for one layer to take the bytes of another, by name."""
    facts: dict[str, object] = {}
    for at, module in layer.named_modules():
        within = f"{at}." if at else ""
        if isinstance(module, PreparedLinear | PreparedExperts | SharedExpert):
            facts |= {
                f"{within}{name}": getattr(module, name) for name in _TOLD if hasattr(module, name)
            }
    return facts | {name: tuple(buffer.shape) for name, buffer in layer.named_buffers()}
