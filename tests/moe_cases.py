"""Experts in float64, by definition, and the layers of MoE blocks to prepare, for several tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from prepared_factory import Layer, fake_quantize64
from torch import Tensor

BLOCK = "model.layers.1.mlp"
PREFIX = f"{BLOCK}.experts"


def act64(name: str, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """What stands between an expert's two GEMMs, float64."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if name == "gelu":
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
    if name == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * (1 + torch.tanh(inner)) / 2 * up
    assert name == "swigluoai"
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


@dataclass
class Expert:
    """One expert's matrices (n, k), float64, and biases or zeros."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Any = 0.0
    up_bias: Any = 0.0
    down_bias: Any = 0.0

    def __call__(
        self,
        rows: Tensor,
        activation: str = "silu",
        limit: float | None = None,
        quantize: Callable[[Tensor], Tensor] = fake_quantize64,
    ) -> Tensor:
        """(m, hidden) float64 from (m, hidden)."""
        rows = quantize(rows.double())
        gate, up = rows @ self.gate.T + self.gate_bias, rows @ self.up.T + self.up_bias
        middle = act64(activation, gate, up, limit).float().double()
        return quantize(middle) @ self.down.T + self.down_bias


def routed64(
    experts: Sequence[Expert], x: Tensor, weights: Tensor, ids: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Token by token, slot by slot; slots of -1 are left out."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x):
        for weight, number in zip(weights[token], ids[token].tolist(), strict=True):
            if number >= 0:
                y[token] += weight.double() * experts[number](row[None], *args, **kwargs)[0]
    return y


def small(layer: Layer, generator: torch.Generator) -> Layer:
    """Scales around 2^-6, so that hidden values stay near one."""
    lead = () if layer.experts is None else (layer.experts,)
    shape = (*lead, layer.n, -(-layer.k // 32))
    layer.scale = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    layer.fill(generator)
    return layer


def mlp(
    name: str,
    hidden: int,
    width: int,
    generator: torch.Generator,
    *,
    paths: tuple[str, str] = ("asm", "asm"),
    scheme: str = "w4a4",
    bias: bool = False,
    fused: bool = False,
) -> list[Layer]:
    """gate, up and down, or gate_up and down, of one gated MLP below `name`."""
    ups = [("gate_up_proj", 2 * width)] if fused else [("gate_proj", width), ("up_proj", width)]
    layers = [
        Layer(f"{name}.{leaf}", rows, hidden, paths[0], scheme, bias=bias) for leaf, rows in ups
    ]
    layers.append(Layer(f"{name}.down_proj", hidden, width, paths[1], scheme, bias=bias))
    return [small(layer, generator) for layer in layers]


def expert_of(layers: Sequence[Layer], name: str) -> Expert:
    """The MLP below `name` in float64."""
    by_leaf = {
        layer.name.rpartition(".")[2]: layer
        for layer in layers
        if layer.name.startswith(f"{name}.")
    }
    biases = {
        leaf: 0.0 if layer.bias_values is None else layer.bias_values.double()
        for leaf, layer in by_leaf.items()
    }
    down = by_leaf["down_proj"]
    if "gate_up_proj" in by_leaf:
        gate, up = by_leaf["gate_up_proj"].dense.chunk(2)
        bias = biases["gate_up_proj"]
        halves = bias.chunk(2) if isinstance(bias, Tensor) else (0.0, 0.0)
        return Expert(gate, up, down.dense, *halves, biases["down_proj"])
    gate, up = by_leaf["gate_proj"], by_leaf["up_proj"]
    found = (biases[f"{part}_proj"] for part in ("gate", "up", "down"))
    return Expert(gate.dense, up.dense, down.dense, *found)


def routing(
    experts: int, hidden: int, tokens: int = 9, top: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x float32, weights and ids of distinct experts."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, hidden), generator=generator)
    weights = torch.rand((tokens, top), generator=generator)
    ids = torch.rand((tokens, experts), generator=generator).topk(top).indices
    return x, weights, ids


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Norms: one rounding of the hidden vector that falls the other way moves single values."""
    assert found.shape == expected.shape
    assert expected.norm() > 0
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


def pairwise(**factors: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Cases that have every pair of two factors' values in one of them at least."""
    names = list(factors)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    generator = torch.Generator().manual_seed(0)

    def pairs(case: dict[str, int]) -> set[Any]:
        return {((a, case[a]), (b, case[b])) for a, b in combinations(names, 2)}

    while open_pairs:
        pair = min(open_pairs)
        tried = []
        for _ in range(30):
            case = {
                name: int(torch.randint(len(values), (), generator=generator))
                for name, values in factors.items()
            }
            tried.append(case | dict(pair))
        best = max(tried, key=lambda case: len(pairs(case) & open_pairs))
        open_pairs -= pairs(best)
        yield {name: factors[name][best[name]] for name in names}
