"""Which stored layers make the two banks of a MoE layer, and whether they fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.manifest import LayerRecord

MAX_INDEX_DIGITS = 7
"""An expert's number has fewer digits; longer ones are names."""


@dataclass(frozen=True, slots=True)
class Member:
    """One expert's matrix: a layer, and which matrix of its bank.

    slot, slots   which of `slots` equal parts of the matrix, where it is as wide as several experts
    """

    record: LayerRecord
    index: int
    slot: int = 0
    slots: int = 1


Stack = tuple[Member, ...]
"""The matrices whose rows, one after the other, make one matrix of a bank."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The experts below a prefix, in order.

    w13   each expert's gate and up, or its gate_up
    w2    each expert's down
    """

    w13: Sequence[Stack]
    w2: Sequence[Stack]


def group_experts(records: Iterable[LayerRecord]) -> dict[str, list[LayerRecord]]:
    """The layers of routed experts by the prefix that `gather` takes, in the manifest's order."""
    groups: dict[str, list[LayerRecord]] = {}
    for record in records:
        if record.kind == "expert":
            groups.setdefault(_split(record.name)[0], []).append(record)
    return groups


def gather(prefix: str, records: Iterable[LayerRecord], parts: Mapping[str, str]) -> Gathered:
    """The experts below `prefix`, each with all its parts.

    records   the prefix's group of `group_experts`
    parts     module name -> "gate", "up", "down" or "gate_up"

    Raises InvalidCheckpoint where an expert or a part is missing, Unsupported where experts
    differ in shape or scheme.
    """
    found: dict[str, dict[int, Member]] = {}
    for record in records:
        part = parts[record.name]
        if part not in ("gate", "up", "gate_up", "down"):
            what = "its name does not say which part of an expert it is"
            raise Unsupported(
                record.name,
                what,
                found=part or None,
                hint=f"load it alone: prepared[{record.name!r}]",
            )
        _, index = _split(record.name)
        members = found.setdefault(part, {})
        for position in range(record.experts or 1):
            number = position if index is None else index
            if number in members:
                raise InvalidCheckpoint(record.name, f"expert {number} has two {part} matrices")
            members[number] = Member(record, position)
    halves = ("gate_up",) if "gate_up" in found else ("gate", "up")
    if set(found) != {*halves, "down"}:
        raise InvalidCheckpoint(
            prefix,
            "the experts' matrices",
            found=", ".join(sorted(found)),
            expected="gate, up and down, or gate_up and down",
        )
    count = 1 + max(number for members in found.values() for number in members)
    banks = {part: _in_order(prefix, part, members, count) for part, members in found.items()}
    _check_alike(prefix, banks)
    w13 = zip(*(banks[half] for half in halves), strict=True)
    return Gathered(list(w13), [(member,) for member in banks["down"]])


def _split(name: str) -> tuple[str, int | None]:
    """("...experts", 3) of "...experts.3.up_proj", ("...experts", None) of "...experts.up_proj"."""
    parts = name.split(".")
    if len(parts) > 2 and parts[-2].isdecimal() and len(parts[-2]) < MAX_INDEX_DIGITS:
        return ".".join(parts[:-2]), int(parts[-2])
    return ".".join(parts[:-1]), None


def _in_order(prefix: str, part: str, members: Mapping[int, Member], count: int) -> list[Member]:
    if len(members) < count:
        missing = list(islice((number for number in range(count) if number not in members), 5))
        shown = ", ".join(map(str, missing))
        raise InvalidCheckpoint(
            f"{prefix}.{missing[0]}",
            f"no {part} matrix for {count - len(members)} of {count} experts: {shown}",
            hint="every expert 0.. must be there; load layers one by one with prepared[name]",
        )
    return [members[number] for number in range(count)]


def _check_alike(prefix: str, banks: Mapping[str, Sequence[Member]]) -> None:
    first = next(iter(banks.values()))[0].record
    for part, members in banks.items():
        one = members[0].record
        for member in members:
            record = member.record
            facts = (
                ("shape", (record.n, record.k), (one.n, one.k)),
                ("gate_up order", record.gate_up, one.gate_up),
                ("parallel kind", record.parallel, one.parallel),
                ("scheme", record.scheme, first.scheme),
                ("input quantization", record.activation, first.activation),
                ("bias", record.bias is None, one.bias is None),
            )
            for what, found, expected in facts:
                if found != expected:
                    raise Unsupported(
                        record.name,
                        f"{what} differs from that of other {part} experts",
                        found=found,
                        expected=expected,
                        hint="load its layers one by one with prepared[name]",
                    )
    rows = sum(banks[half][0].record.n for half in banks if half != "down")
    hidden = {members[0].record.k for part, members in banks.items() if part != "down"}
    down = banks["down"][0].record
    if rows != 2 * down.k or hidden != {down.n}:
        raise InvalidCheckpoint(
            prefix,
            "gate, up and down do not fit together",
            found=f"{rows} gate and up rows of {sorted(hidden)} columns, down {down.n} x {down.k}",
        )
