"""What a prepared checkpoint has for one rank, by name, and how each is put together."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.gathering import gather, group_experts
from mxfp4prep.runtime.gating import activation_of_config
from mxfp4prep.runtime.moe import MoeLayer, assemble, shared_maker
from mxfp4prep.runtime.naming import UnknownName, near_names, unknown_name
from mxfp4prep.runtime.shared_parts import (
    SharedParts,
    beside,
    gate_of,
    group_shared,
    shared_parts,
)

if TYPE_CHECKING:
    from mxfp4prep.manifest import LayerRecord
    from mxfp4prep.runtime.asked import Asked
    from mxfp4prep.runtime.assembling import Assembler
    from mxfp4prep.runtime.cutting import Cutter
    from mxfp4prep.runtime.experts import PreparedExperts
    from mxfp4prep.runtime.linear import PreparedLinear
    from mxfp4prep.runtime.opening import Opened
    from mxfp4prep.runtime.spreading import Spread

SHARED_HINT = "shared='auto' takes the one beside the experts, None takes none"
COPIED = "[tensor.name for tensor in prepared.manifest.tensors]"


class Catalogue:
    """The names of an opened checkpoint, and what an assembler makes of each for a rank.

    names      the MXFP4 matrices, those of single experts too, in the manifest's order
    groups     the layers of routed experts by their prefix
    copied     tensors that were copied as they are
    """

    def __init__(self, opened: Opened, cutter: Cutter, spread: Spread) -> None:
        self.opened, self.cutter, self.spread = opened, cutter, spread
        layers = opened.manifest.layers
        self.names = tuple(record.name for record in layers if record.experts is None)
        self.groups = group_experts(layers)
        self.copied = frozenset(tensor.name for tensor in opened.manifest.tensors)

    def __contains__(self, name: object) -> bool:
        record = self.opened.layers.get(name) if isinstance(name, str) else None
        return record is not None and record.experts is None

    def record(self, name: object) -> LayerRecord:
        """The matrix of that name. Raises UnknownName, a KeyError."""
        record = self.opened.layers.get(name) if isinstance(name, str) else None
        if record is not None and record.experts is None:
            return record
        what, instead = "no MXFP4 layer of this checkpoint", None
        if record is not None:
            what = f"a bank of {record.experts} matrices"
            instead = f"use experts({record.name.rpartition('.')[0]!r})"
        elif isinstance(name, str) and name in self.groups:
            what, instead = "MXFP4 experts, no single layer", f"use experts({name!r})"
        elif isinstance(name, str) and name in self.copied:
            what, instead = "a tensor that was copied as it is", f"use tensor({name!r})"
        raise unknown_name(name, what, self.names, "prepared.names", instead)

    def check_copied(self, name: object) -> None:
        """Raises UnknownName, a KeyError, unless a tensor of that name was copied."""
        if isinstance(name, str) and name in self.copied:
            return
        what, instead = "no copied tensor of this checkpoint", None
        if name in self:
            instead = f"use prepared[{name!r}]"
        raise unknown_name(name, what, self.copied, COPIED, instead)

    def alone(self) -> list[str]:
        """The matrices that are no expert's."""
        inside = {record.name for group in self.groups.values() for record in group}
        return [name for name in self.names if name not in inside]

    def loose(self) -> set[str]:
        """The copied tensors that no layer holds as its bias or input scale."""
        layers = self.opened.manifest.layers
        held = {name for record in layers for name in (record.bias, record.input_scale)}
        return set(self.copied - held)

    def linear(self, assembler: Assembler, record: LayerRecord) -> PreparedLinear:
        """A matrix, or the rank's piece of it. Raises CannotShard.

        Where whole experts are spread, so are the single matrices of one; those of a shared expert
        are cut or whole as `assemble` has them where it stands apart.
        """
        if self.spread.size > 1:
            if record.kind == "expert":
                assembler = assembler.whole()
            elif record.kind == "shared_expert":
                assembler, _ = shared_maker(assembler, self._down_beside(record), self.spread)
        return assembler.linear(record)

    def _down_beside(self, record: LayerRecord) -> LayerRecord:
        """The down matrix of the shared expert that the record is of: it decides for all three."""
        layers = self.opened.layers
        for names in self._shared.values():
            if record.name in names:
                mine = (layers[name] for name in names if name in layers)
                return next((each for each in mine if self.cutter.part(each) == "down"), record)
        return record

    def experts(self, assembler: Assembler, asked: Asked) -> PreparedExperts:
        """The rank's part of an MoE layer.

        Raises UnknownName, a KeyError, for a prefix or shared expert that is not there, and what
        `gather`, `shared_parts` and `assemble` raise.
        """
        prefix, activation, limit, shared, fusion = asked
        records = self.groups.get(prefix)
        if records is None:
            raise self._no_experts(prefix)
        if activation is None:
            activation, named = activation_of_config(self.opened.config, prefix)
            limit = named if limit is None else limit
        parts = {record.name: self.cutter.part(record) for record in records}
        routed = gather(prefix, records, parts)
        beside_them = self._shared_parts(prefix, shared)
        layer = MoeLayer(prefix, routed, activation, limit, beside_them, fusion)
        return assemble(assembler, layer, self.spread, self.opened.layers)

    def _no_experts(self, prefix: str) -> UnknownName:
        what, instead = "no MXFP4 experts below it", None
        within = [group for group in self.groups if prefix.startswith(f"{group}.")]
        if within:
            what, instead = "a part of MXFP4 experts", f"use experts({within[0]!r})"
        elif prefix in self:
            what, instead = "one MXFP4 layer, no experts", f"use prepared[{prefix!r}]"
        return unknown_name(prefix, what, self.groups, "prepared.expert_prefixes", instead)

    def _shared_parts(self, prefix: str, shared: str | None) -> SharedParts | None:
        """The shared expert of that name, or beside `prefix`. Raises UnknownName for none of it,
        UsageError for routed experts and for one of another layer."""
        if shared is None:
            return None
        layers, places = self.opened.layers, self.opened.places
        name = beside(prefix, self._shared) if shared == "auto" else shared
        if name is None:
            return None
        below = self._shared.get(name)
        if below is None:  # a name that the table does not know as one of a shared expert
            below = [key for key in (*layers, *self.copied) if key.startswith(f"{name}.")]
        if not below:
            near = " or ".join(near_names(name, self._shared)) or None
            raise UnknownName(
                name, "no shared expert of that name", expected=near, hint=SHARED_HINT
            )
        if any(key in layers and layers[key].kind == "expert" for key in below):
            raise UsageError(
                name,
                "routed experts, which no shared expert can be",
                found=f"shared={name!r}",
                expected=" or ".join(self._shared) or "none: this checkpoint has no shared expert",
                hint=SHARED_HINT,
            )
        block = name.rpartition(".")[0]
        if block and not prefix.startswith(f"{block}."):
            raise UsageError(
                name,
                "not the shared expert of these experts: it stands in another module",
                found=f"shared={name!r}",
                expected=f"one beside {prefix}",
                hint=SHARED_HINT,
            )
        names = [*below, gate_of(name), f"{gate_of(name)}.weight"]
        mine = {key: layers[key] for key in names if key in layers}
        copied = {key: places[key].entry.dtype for key in names if key in self.copied}
        parts = {key: self.cutter.part(record) for key, record in mine.items()}
        return shared_parts(name, mine, copied, parts)

    @cached_property
    def _shared(self) -> dict[str, list[str]]:
        return group_shared((*self.opened.layers, *self.copied))
