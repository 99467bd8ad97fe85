"""What is timed for one layer: calls on copies of its weights, and bfloat16's beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from mxfp4prep.runtime.bf16_reference import (
    Banks,
    Routing,
    Way,
    experts_calls,
    linear_calls,
    random_banks,
)
from mxfp4prep.runtime.ceilings import random_bf16
from mxfp4prep.runtime.devices import cache_nbytes, free_nbytes
from mxfp4prep.runtime.distinct import top_k
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.room import check_room
from mxfp4prep.runtime.timing import copies_beyond

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.runtime.linear import PreparedLinear

SHARE_OF_FREE = 4
"""All copies of a layer take at most this fraction of the free memory."""

BF16_BYTES = 2

ROUTING_NBYTES = 12
"""For each expert of a token: a float32 weight, an int64 id."""

Calls = Sequence[Callable[[], "Tensor"]]
Copied = TypeVar("Copied")


class Size(NamedTuple):
    """n, k of the matrix; for experts of gate and up together, down being (k, n / 2).

    experts, top_k   None for a plain matrix
    """

    n: int
    k: int
    experts: int | None = None
    top_k: int | None = None


class Work(NamedTuple):
    """One m. `bf16` holds the same work by the ways to do it, none where it does not fit into
    memory; nbytes and operations are those of one call."""

    m: int
    device: torch.device
    calls: Calls
    bf16: dict[Way, Calls]
    nbytes: float
    operations: float


def load_of(layer: PreparedLinear | PreparedExperts, config: Mapping[str, Any]) -> Load:
    """Copies of the layer and of bfloat16 weights, on its device.

    config   says how many experts a token goes to
    """
    if isinstance(layer, PreparedExperts):
        return ExpertsLoad.of(layer, top_k(config, layer.experts))
    return LinearLoad.of(layer)


@dataclass(frozen=True, slots=True)
class LinearLoad:
    """Copies of a layer, and bfloat16 weights of its shape."""

    modules: list[PreparedLinear]
    weights: list[Tensor]

    @staticmethod
    def of(layer: PreparedLinear) -> LinearLoad:
        """The copies, where the layer is."""
        device = layer.weight.device
        modules = _copies(layer, _nbytes(layer.weight, layer.scale), device)
        weights: list[Tensor] = []
        if _fits(layer.n * layer.k * BF16_BYTES, device):
            weight = random_bf16((layer.n, layer.k), device)
            weights = _copies(weight, weight.nbytes, device)
        return LinearLoad(modules, weights)

    @property
    def size(self) -> Size:
        """The matrix's."""
        return Size(self.modules[0].n, self.modules[0].k)

    def at(self, m: int, generator: torch.Generator) -> Work:
        """The work of x (m, k). Raises NoRoom where so many rows do not fit into memory."""
        layer = self.modules[0]
        check_room(layer, m, layer.weight.device)
        x = _activations(m, layer.k, layer.weight, generator)
        calls = [lambda module=module: module(x) for module in self.modules]
        nbytes = _nbytes(layer.weight, layer.scale) + m * (layer.k + layer.n) * BF16_BYTES
        bf16: dict[Way, Calls] = {}
        if self.weights:
            bf16["linear"] = linear_calls(x, self.weights)
        return Work(m, x.device, calls, bf16, nbytes, 2.0 * m * layer.n * layer.k)


@dataclass(frozen=True, slots=True)
class ExpertsLoad:
    """Copies of the experts' banks, and bfloat16 banks of their shapes. Tokens go to `top` experts
    each, all equally often, to other ones in every call."""

    modules: list[PreparedExperts]
    banks: list[Banks]
    top: int

    @staticmethod
    def of(layer: PreparedExperts, top: int) -> ExpertsLoad:
        """The copies, where the experts are."""
        device = layer.w13.device
        modules = _copies(layer, _bank_nbytes(layer), device)
        banks: list[Banks] = []
        nbytes = 3 * layer.experts * layer.intermediate * layer.hidden * BF16_BYTES
        if _fits(nbytes, device):
            banks = _copies(random_banks(layer, device), nbytes, device)
        return ExpertsLoad(modules, banks, top)

    @property
    def size(self) -> Size:
        """The bank's."""
        layer = self.modules[0]
        return Size(2 * layer.intermediate, layer.hidden, layer.experts, self.top)

    def at(self, m: int, generator: torch.Generator) -> Work:
        """The work of x (m, hidden). Raises NoRoom where so many rows do not fit into memory."""
        layer, device = self.modules[0], self.modules[0].w13.device
        one = _bank_nbytes(layer) / layer.w13.shape[0]
        most = min(m * self.top, layer.experts)
        count = copies_beyond(cache_nbytes(device), int(one * most))
        count = max(count, len(self.modules))
        check_room(layer, m, device, self.top, count * m * self.top * ROUTING_NBYTES)
        x = _activations(m, layer.hidden, layer.w13, generator)
        routings = [self._routing(m, layer.experts, generator, device) for _ in range(count)]
        hit = sum(torch.unique(routing.ids).numel() for routing in routings) / count
        pairs = [(self.modules[i % len(self.modules)], r) for i, r in enumerate(routings)]
        calls = [lambda module=module, r=r: module(x, r.weights, r.ids) for module, r in pairs]
        bf16: dict[Way, Calls] = {}
        if self.banks:
            bf16.update(experts_calls(x, self.banks, routings))
        nbytes = hit * one + 2 * m * layer.hidden * BF16_BYTES
        operations = 6.0 * m * self.top * layer.hidden * layer.intermediate
        return Work(m, device, calls, bf16, nbytes, operations)

    def _routing(
        self, m: int, experts: int, generator: torch.Generator, device: torch.device
    ) -> Routing:
        ids = torch.rand((m, experts), generator=generator).topk(self.top).indices
        weights = torch.rand((m, self.top), generator=generator)
        weights /= weights.sum(dim=-1, keepdim=True)
        return Routing(weights.to(device), ids.to(device, torch.int32))


Load = LinearLoad | ExpertsLoad


def _activations(m: int, k: int, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn((m, k), generator=generator).to(like.device, torch.bfloat16)


def _copies(thing: Copied, nbytes: int, device: torch.device) -> list[Copied]:
    """`thing` and as many copies as it takes to fill the caches, or the memory, of the device."""
    free = free_nbytes(device)
    limit = None if free is None else free // SHARE_OF_FREE
    count = copies_beyond(cache_nbytes(device), nbytes, limit)
    return [thing, *(copy.deepcopy(thing) for _ in range(count - 1))]


def _fits(nbytes: int, device: torch.device) -> bool:
    free = free_nbytes(device)
    return free is None or nbytes <= free // 2


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bank_nbytes(layer: PreparedExperts) -> int:
    return _nbytes(layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
