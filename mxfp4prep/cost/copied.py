"""What the fullest rank holds of the tensors that no MXFP4 layer owns.

A copied weight (bf16, FP8, ...) is cut by the role of its module, as engines cut it; what belongs
to a weight (bias, scales) is cut with it. Everything else is held whole by every rank: norms,
routers, vision towers, modules whose names no rule knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from mxfp4prep.cost.banks import bank_of
from mxfp4prep.deployment import Placement
from mxfp4prep.errors import CannotShard
from mxfp4prep.parallel import Cut, assign_roles, cut_of, kind_of, shard
from mxfp4prep.quark.labels import setting
from mxfp4prep.safefile import TensorEntry
from mxfp4prep.survey import LayerSurvey, Survey

_QUANTIZER = "_quantizer."
_BANK_ENDINGS = ("_weight_scale", "_scale_inv", "_scale", "_bias")
"""What follows a bank's name in the names of its other tensors."""


class _Owner(NamedTuple):
    """A weight as the ranks share it.

    sizes     (n, k), or (experts, n, k) of a stacked bank, in elements
    spread    whole experts are spread over the ranks
    whole     degrees at which every rank holds it whole whatever its cut
    experts   of its bank; 1 outside banks
    """

    cut: Cut
    sizes: tuple[int, ...]
    spread: bool
    whole: frozenset[int]
    experts: int

    def held(self, shape: tuple[int, ...], tp: int) -> Fraction:
        """The part of a tensor of `shape` that goes with this weight to the fullest rank."""
        if 0 in self.sizes or 0 in shape:
            return Fraction(1)  # an empty weight is cut into nothing
        if self.spread:
            return Fraction(-(-self.experts // tp), self.experts)
        if tp in self.whole or self.cut.axis == "none":
            return Fraction(1)
        n, k = self.sizes[-2:]
        piece = (*self.sizes[:-2], *_piece(self.cut, n, k, tp))
        part = Fraction(1)
        for size, full, own in zip(shape, self.sizes, piece, strict=False):
            if size:
                part *= Fraction(-(-size * own // full), size)
        return part


def copied_nbytes(survey: Survey, banks: Mapping[str, int]) -> dict[int, int]:
    """Bytes that the fullest rank holds of all copied tensors, per degree.

    banks   experts in each bank of single experts, from `count_experts`

    A size that does not divide is counted rounded up: whether an engine refuses it is not said
    here. Of a tied lm_head that is stored beside its embedding, only the embedding counts.
    """
    owners = _Owners(survey, banks)
    tensors, tied = survey.checkpoint.tensors, _tied_heads(survey)
    sums: dict[tuple[int, tuple[int, ...]], int] = {}
    alone = 0
    for name in survey.classified.copied:
        if name in tied:
            continue
        entry = tensors[name]
        owner = owners.of(name)
        if owner is None:
            alone += entry.nbytes
        else:
            key = (owner, entry.shape)
            sums[key] = sums.get(key, 0) + entry.nbytes
    held = {}
    for tp in survey.tp:
        parts = (nbytes * owners.held(owner, shape, tp) for (owner, shape), nbytes in sums.items())
        held[tp] = alone + _up(sum(parts, Fraction(0)))
    return held


def _tied_heads(survey: Survey) -> set[str]:
    """Names of copied lm_heads that engines share with an equal embedding."""
    if setting(survey.checkpoint.config, "tie_word_embeddings") is not True:
        return set()
    tensors = survey.checkpoint.tensors
    copied = survey.classified.copied
    tables = [tensors[name] for name in copied if name.endswith("embed_tokens.weight")]
    like = {(entry.dtype, entry.shape) for entry in tables}
    return {
        name
        for name in copied
        if name.endswith("lm_head.weight") and (tensors[name].dtype, tensors[name].shape) in like
    }


class _Owners:
    """The weight that a tensor belongs to, by the tensor's name.

    Weights that are shared alike are one, known by a number: thousands of layers are soon counted.
    """

    def __init__(self, survey: Survey, banks: Mapping[str, int]) -> None:
        self._survey = survey
        self._banks = banks
        others = survey.classified.others
        self._roles = assign_roles(list(others), survey.rules, survey.topology.model_type)
        self._layers = {item.layer.name: item for item in survey.layers}
        self._shared = {item.block.name: item.decisions for item in survey.shared}
        self._numbers: dict[_Owner, int] = {}
        self._owners: list[_Owner] = []
        self._like: dict[tuple[object, ...], int] = {}

    def of(self, name: str) -> int | None:
        """The owner of tensor `name`, itself if it is a weight; None if nothing cuts it."""
        module = self._module(name)
        if module is None:
            return None
        item = self._layers.get(module)
        if item is None:
            owner = self._copied(module)
            return None if owner is None else self._number(owner)
        layer = item.layer
        experts = 1
        if layer.kind == "expert":
            experts = layer.experts or self._banks[bank_of(layer.name)]
        key = (item.cut, layer.n, layer.k, layer.experts, id(item.placements), experts)
        if key not in self._like:
            self._like[key] = self._number(self._mxfp4(item, experts))
        return self._like[key]

    def held(self, owner: int, shape: tuple[int, ...], tp: int) -> Fraction:
        """The part of a tensor of `shape` that goes with `owner` to the fullest rank."""
        return self._owners[owner].held(shape, tp)

    def _number(self, owner: _Owner) -> int:
        number = self._numbers.setdefault(owner, len(self._owners))
        if number == len(self._owners):
            self._owners.append(owner)
        return number

    def _module(self, name: str) -> str | None:
        parent = name.rpartition(".")[0]
        if parent in self._roles or parent in self._layers:
            return parent
        if name in self._roles:
            return name
        if _QUANTIZER in name:
            owner = name[: name.index(_QUANTIZER)].rpartition(".")[0]
            if owner in self._roles or owner in self._layers:
                return owner
        for ending in _BANK_ENDINGS:
            owner = name.removesuffix(ending)
            if owner != name and (owner in self._roles or owner in self._layers):
                return owner
        return None

    def _mxfp4(self, item: LayerSurvey, experts: int) -> _Owner:
        layer = item.layer
        sizes = (layer.n, layer.k)
        return _Owner(
            cut=item.cut,
            sizes=sizes if layer.experts is None else (layer.experts, *sizes),
            spread="distributed" in item.placements.values(),
            whole=self._whole_at(item.placements),
            experts=experts,
        )

    def _whole_at(self, placements: Mapping[int, Placement]) -> frozenset[int]:
        fused = self._survey.deployment.expert_parallel
        return frozenset(
            tp
            for tp, placement in placements.items()
            if placement == "replicated" or (placement == "fused" and fused)
        )

    def _copied(self, module: str) -> _Owner | None:
        role = self._roles[module]
        kind = "expert" if role.parallel == "expert" else kind_of(module)
        sizes = self._weight(module).shape
        if len(sizes) != 2 and (len(sizes) != 3 or kind != "expert"):
            return None
        experts = 1
        if kind == "expert":
            experts = sizes[0] if len(sizes) == 3 else self._banks.get(bank_of(module), 1)
        return _Owner(
            cut=cut_of(role, sizes[-2], self._survey.topology),
            sizes=sizes,
            spread=role.parallel == "expert" and self._survey.deployment.expert_parallel,
            whole=self._with_block(module) if kind == "shared_expert" else frozenset(),
            experts=experts,
        )

    def _with_block(self, module: str) -> frozenset[int]:
        """Degrees at which the shared expert that `module` is a part of is replicated."""
        decisions = self._shared.get(module.rpartition(".")[0], {})
        return frozenset(tp for tp, made in decisions.items() if made.decision == "replicated")

    def _weight(self, module: str) -> TensorEntry:
        tensors = self._survey.checkpoint.tensors
        return tensors.get(f"{module}.weight") or tensors[module]


def _piece(cut: Cut, n: int, k: int, tp: int) -> tuple[int, int]:
    """Rows and columns on the fullest rank, rounded up where they do not divide."""
    if cut.axis == "columns":
        return n, _up(Fraction(k, tp))
    try:
        return shard(cut, n, k, tp).n, k
    except CannotShard:
        return _up(Fraction(n, tp)), k


def _up(size: Fraction) -> int:
    return -(-size.numerator // size.denominator)
