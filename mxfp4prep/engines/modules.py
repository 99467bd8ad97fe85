"""The modules an engine builds from a checkpoint's: fused projections, banks of experts, others.

An engine asks its config about these, not about what is stored: `qkv_proj`, never `q_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mxfp4prep.parallel import Role, assign_roles
from mxfp4prep.survey import LayerSurvey, Survey

UNQUANTIZED = frozenset({"bf16", "f16", "f32", "f64"})
"""Labels of weights that are stored as plain floating point."""

_BUILT_PLAIN = frozenset({"vocab"})
"""Parts that no engine here builds quantized: the head and the embedding."""

_LINEARS = frozenset({"qkv", "merged", "column", "row"})
_LOW_RANK = frozenset({"q_a", "kv_a"})


@dataclass(slots=True)
class Module:
    """One module of an engine.

    name       as its parts are called on disk: that of the linear, the projection or the bank
    layers     its parts that are MXFP4
    others     its parts that are not: (module, bf16, fp8, ...)
    """

    name: str
    layers: list[LayerSurvey] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """The names of all parts."""
        return [*(item.layer.name for item in self.layers), *(name for name, _ in self.others)]


@dataclass(frozen=True, slots=True)
class Modules:
    """A checkpoint's modules as one engine builds them.

    groups     fused projections by name
    single     linears that stand alone and are not MXFP4: (module, dtype)
    banks      banks of routed experts by name
    group_of   MXFP4 layer -> the name of its group
    unknown    unquantized matrices whose names no rule knows
    """

    groups: Mapping[str, Module]
    single: tuple[tuple[str, str], ...]
    banks: Mapping[str, Module]
    group_of: Mapping[str, str]
    unknown: int


def modules_of(survey: Survey, fused: Mapping[str, str]) -> Modules:
    """What an engine builds from the checkpoint of `survey`.

    fused   leaf of a fused projection, as parallel names it -> leaf of the engine's module
    """
    banks: dict[str, Module] = {}
    dense: list[LayerSurvey] = []
    for item in survey.layers:
        if item.role.parallel == "expert":
            _bank(banks, item.layer.name).layers.append(item)
        else:
            dense.append(item)
    others = []
    for name, dtype in survey.classified.others.items():
        bank = bank_of(name)
        if bank is None:
            others.append((name, dtype))
        else:
            banks.setdefault(bank, Module(bank)).others.append((name, dtype))
    names = [item.layer.name for item in dense] + [name for name, _ in others]
    roles = assign_roles(names, survey.rules, survey.topology.model_type)
    groups: dict[str, Module] = {}
    group_of: dict[str, str] = {}
    for item in dense:
        group = _group(item.layer.name, roles, fused)
        if group is not None:
            groups.setdefault(group, Module(group)).layers.append(item)
            group_of[item.layer.name] = group
    single, unknown = [], 0
    for name, dtype in others:
        group = _group(name, roles, fused)
        role = roles[name]
        if group is not None:
            groups.setdefault(group, Module(group)).others.append((name, dtype))
        elif role.parallel in _LINEARS and role.part not in _BUILT_PLAIN:
            single.append((name, dtype))
        elif role.parallel == "unknown" and dtype in UNQUANTIZED and _is_matrix(name, survey):
            unknown += 1
    return Modules(groups, tuple(single), banks, group_of, unknown)


def bank_of(name: str) -> str | None:
    """The bank of routed experts that module `name` belongs to; None for any other module."""
    at = name.rfind("experts.")
    if at < 0 or (at and name[at - 1] != "."):
        return None
    return name[: at + len("experts")]


def _is_matrix(name: str, survey: Survey) -> bool:
    tensors = survey.checkpoint.tensors
    entry = tensors.get(f"{name}.weight") or tensors.get(name)
    return entry is not None and len(entry.shape) > 1


def _bank(banks: dict[str, Module], name: str) -> Module:
    bank = bank_of(name) or name
    module = banks.get(bank)
    if module is None:
        module = banks[bank] = Module(bank)
    return module


def _group(name: str, roles: Mapping[str, Role], fused: Mapping[str, str]) -> str | None:
    """The fused projection that an engine puts `name` into, by the names on disk."""
    role = roles[name]
    if role.group is None or not (role.parallel in _LINEARS or role.part in _LOW_RANK):
        return None
    parent, _, leaf = role.group.rpartition(".")
    module = fused.get(leaf)
    if module is None:
        return None
    return f"{parent}.{module}" if parent else module


def is_draft(name: str, labels: Mapping[str, str]) -> bool:
    """Whether module `name` belongs to a draft (multi-token prediction) layer."""
    return labels.get(f"{name}.weight") == "mtp" or labels.get(name) == "mtp"
