"""Which piece of each layer a rank holds, from the manifest's parallel kind and the head counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxfp4prep.errors import CannotShard, InvalidManifest
from mxfp4prep.manifest import LayerRecord
from mxfp4prep.parallel import Cut, Role, Shard, Topology, assign_roles, cut_of, parse_rules, shard


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts layers for rank `tp_rank` of `tp_size`; `table` has every module's role by name."""

    tp_rank: int
    tp_size: int
    topology: Topology
    table: dict[str, Role]

    @classmethod
    def make(
        cls,
        names: Iterable[str],
        topology: Topology,
        tp_rank: int,
        tp_size: int,
        rules: Iterable[str] = (),
    ) -> Cutter:
        """A cutter for modules `names`, with the rules that they were planned by."""
        roles = assign_roles(list(names), parse_rules(rules), topology.model_type)
        return cls(tp_rank, tp_size, topology, roles)

    def part(self, record: LayerRecord) -> str:
        """Which part of an expert or fused projection the layer's name says it is, or ""."""
        return self.table[record.name].part

    def cut(self, record: LayerRecord) -> Cut:
        """Where the layer may be cut. The manifest's kind is authoritative: where it is not the
        name table's, a user rule gave it, and the table's part does not apply."""
        named = self.table[record.name]
        role = named if named.parallel == record.parallel else Role(record.parallel)
        if role.part == "gate_up" and record.gate_up is None:
            raise InvalidManifest(
                record.name,
                "gate_up is missing: the order of gate and up rows decides where it may be cut",
                expected="interleaved or concatenated",
            )
        return cut_of(role, record.n, self.topology, record.gate_up == "interleaved")

    def piece(self, record: LayerRecord) -> Shard:
        """The rows and columns this rank holds.

        Raises CannotShard, naming the layer and the degrees at which it can be cut.
        """
        try:
            return shard(self.cut(record), record.n, record.k, self.tp_size, self.tp_rank)
        except CannotShard as error:
            possible = [degree for degree, path in record.verdict.items() if path != "impossible"]
            raise CannotShard(
                record.name,
                error.what,
                reason=error.reason,
                hint=f"it can be cut at tp {', '.join(possible) or '1'}",
            ) from error

    def holds_bias(self, record: LayerRecord) -> bool:
        """Whether this rank adds the bias: where columns are cut, ranks add up, so one does."""
        return self.tp_rank == 0 or self.cut(record).axis != "columns"
