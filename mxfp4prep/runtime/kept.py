"""What was read of a checkpoint and is kept for the next time, its memory used once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.linear import PreparedLinear

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from mxfp4prep.runtime.asked import Asked


class Kept:
    """Modules and tensors by name, and experts by what was asked.

    Experts asked for in two ways, and a shared expert's layers, are modules of their own (one may
    be moved, and not the other) on the same bytes.
    """

    def __init__(self) -> None:
        self.linears: dict[str, PreparedLinear] = {}
        self.experts: dict[Asked, PreparedExperts] = {}
        self.tensors: dict[str, Tensor] = {}

    def add(
        self,
        linears: Mapping[str, PreparedLinear],
        experts: Mapping[Asked, PreparedExperts],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Keeps these too.

        Experts of the same prefix that hold other banks are forgotten: larger banks begin with a
        copy of theirs, which whoever asks for them again gets a view of.
        """
        # what a progress function asked for while these were read was handed out already
        for name, layer in linears.items():
            self.linears.setdefault(name, layer)
        for name, tensor in tensors.items():
            self.tensors.setdefault(name, tensor)
        for asked, module in experts.items():
            for other, mine in list(self.experts.items()):
                if other.prefix == asked.prefix and _is_another_copy(mine, module):
                    del self.experts[other]
            self.experts[asked] = module

    @property
    def prefixes(self) -> set[str]:
        """Those whose experts are kept, however they were asked for."""
        return {asked.prefix for asked in self.experts}

    def linear(
        self, name: str, rank: tuple[int, int], device: torch.device
    ) -> PreparedLinear | None:
        """The layer as rank and size cut it, if it is kept on that device."""
        for layer in self._layers(name):
            if (layer.tp_rank, layer.tp_size) == rank and _is_on(layer, device):
                return layer
        return None

    def _layers(self, name: str) -> Iterator[PreparedLinear]:
        if name in self.linears:
            yield self.linears[name]
        for module in self.experts.values():
            if module.shared is not None:
                parts = (*module.shared.layers, module.shared.down)
                yield from (layer for layer in parts if layer.name == name)

    def banks(self, prefix: str, device: torch.device) -> PreparedExperts | None:
        """Experts below the prefix that are kept on that device; those with most in their banks."""
        found = [
            module
            for asked, module in self.experts.items()
            if asked.prefix == prefix and _is_on(module, device)
        ]
        return max(found, key=lambda module: module.w13.shape[0], default=None)


def _is_another_copy(one: PreparedExperts, other: PreparedExperts) -> bool:
    """Whether they hold two banks on one device."""
    return any(
        mine.device == theirs.device
        and mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        for mine, theirs in zip(_banks(one), _banks(other), strict=True)
    )


def _banks(module: PreparedExperts) -> tuple[Tensor, ...]:
    return module.w13, module.w13_scale, module.w2, module.w2_scale


def _is_on(module: PreparedLinear | PreparedExperts, device: torch.device) -> bool:
    """Whether it is still where it was put; its user may have moved it."""
    where = torch.empty(0, device=device).device  # cuda:0 of cuda
    if isinstance(module, PreparedLinear):
        return module.weight.device == module.scale.device == where
    return all(bank.device == where for bank in _banks(module))
