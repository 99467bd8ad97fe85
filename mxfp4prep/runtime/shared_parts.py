"""Which stored layers make a shared expert, and whether it can be slots of the routed banks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.manifest import LayerRecord
from mxfp4prep.parallel import SCALE_GROUP
from mxfp4prep.runtime.gathering import Gathered, Member, Stack

FUSIONS = ("auto", "fused", "separate")
"""auto: in the routed banks where that can be · fused: there, or an error · separate: apart."""

GATE_LEAF = "shared_expert_gate"
"""Beside the shared expert: the row that says how much of it a token gets (Qwen2-MoE, Qwen3-Next).

Source: modeling_qwen2_moe.py, modeling_qwen3_next.py in transformers 5.24.0.
"""

_MODULE = re.compile(r"(?:^|\.)(?:shared_experts?|shared_mlp)(?=\.)")


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The layers of one shared expert.

    name   its module
    up     (gate, up) or (gate_up,)
    gate   module of its gate, or None
    """

    name: str
    up: tuple[LayerRecord, ...]
    down: LayerRecord
    gate: str | None = None

    @property
    def records(self) -> tuple[LayerRecord, ...]:
        """All its layers."""
        return (*self.up, self.down)


def group_shared(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of layers and tensors that belong to a shared expert, by its module."""
    found: dict[str, list[str]] = {}
    for name in names:
        match = _MODULE.search(name)
        if match is not None:
            found.setdefault(name[: match.end()], []).append(name)
    return found


def beside(prefix: str, modules: Iterable[str]) -> str | None:
    """The shared expert that stands beside routed experts `prefix`, or None.

    Raises Unsupported where there are several.
    """
    block = prefix.rpartition(".")[0]
    found = [name for name in modules if name.rpartition(".")[0] == block]
    if len(found) > 1:
        what = f"several shared experts: {', '.join(found)}"
        raise Unsupported(prefix, what, hint="name one: experts(prefix, shared=...)")
    return found[0] if found else None


def gate_of(name: str) -> str:
    """The module that would be the gate of shared expert `name`."""
    return f"{name.rpartition('.')[0]}.{GATE_LEAF}".removeprefix(".")


def shared_parts(
    name: str,
    layers: Mapping[str, LayerRecord],
    copied: Mapping[str, str],
    parts: Mapping[str, str],
) -> SharedParts:
    """The layers of shared expert `name`.

    layers   those below it, and its gate if that is MXFP4, by name
    copied   dtype by name of the tensors below it that are no MXFP4 layer's, and of its gate's
    parts    layer -> "gate", "up", "down" or "gate_up"

    Raises Unsupported where a part is not MXFP4, InvalidCheckpoint where one is missing.
    """
    gate = gate_of(name)
    has_gate = gate in layers or f"{gate}.weight" in copied
    mine = [record for record in layers.values() if record.name != gate]
    owned = {tensor for record in mine for tensor in (record.bias, record.input_scale)}
    for tensor, dtype in copied.items():
        if tensor not in owned and tensor != f"{gate}.weight":
            raise Unsupported(
                tensor,
                f"this part of the shared expert is no MXFP4 layer but {dtype}",
                hint="leave shared out, and run the shared expert beside the routed ones",
            )
    found: dict[str, LayerRecord] = {}
    for record in mine:
        part = parts[record.name]
        if part not in ("gate", "up", "gate_up", "down"):
            what = "its name does not say which part of a shared expert it is"
            raise Unsupported(
                record.name,
                what,
                found=part or None,
                hint=f"load it alone: prepared[{record.name!r}]",
            )
        if part in found or record.experts is not None:
            raise InvalidCheckpoint(record.name, f"{name} has more than one {part} matrix")
        found[part] = record
    halves = ("gate_up",) if "gate_up" in found else ("gate", "up")
    if set(found) != {*halves, "down"}:
        raise InvalidCheckpoint(
            name,
            "the shared expert's matrices",
            found=", ".join(sorted(found)),
            expected="gate, up and down, or gate_up and down",
        )
    up, down = tuple(found[half] for half in halves), found["down"]
    rows, hidden = [record.n for record in up], {record.k for record in up}
    if sum(rows) != 2 * down.k or len(set(rows)) > 1 or hidden != {down.n}:
        raise InvalidCheckpoint(
            name,
            "gate, up and down do not fit together",
            found=f"{sum(rows)} gate and up rows of {sorted(hidden)} columns, "
            f"down {down.n} x {down.k}",
        )
    return SharedParts(name, up, down, gate if has_gate else None)


def slots_of(shared: SharedParts, routed: Gathered) -> tuple[int, str | None]:
    """How many more routed experts the shared one would be, and why it cannot (None if it can).

    Its quantization must be theirs, and its width a multiple of theirs: DeepSeek's n_shared_experts
    of 2 are one matrix of twice the width.
    """
    up, down = routed.w13[0][0].record, routed.w2[0][0].record
    slots, rest = divmod(shared.down.k, down.k)
    for record in shared.records:
        if (record.scheme, record.activation) != (down.scheme, down.activation):
            return 0, f"it is {_quantized(record)}, the routed experts are {_quantized(down)}"
    if shared.down.n != down.n:
        return 0, f"its hidden size is {shared.down.n}, the routed experts' {down.n}"
    if rest:
        return 0, f"its width {shared.down.k} is no multiple of the routed experts' {down.k}"
    if slots > 1 and down.k % SCALE_GROUP:
        return 0, f"a share of {down.k} columns is not whole groups of {SCALE_GROUP}"
    for theirs, mine in ((up, shared.up), (down, (shared.down,))):
        if any((record.bias is None) != (theirs.bias is None) for record in mine):
            return 0, "only one of it and the routed experts has a bias"
    if slots > 1 and any(record.bias is not None for record in shared.records):
        return 0, "it has a bias, which cannot be shared out"
    order = shared.up[0].gate_up or "concatenated"
    if order != (up.gate_up or "concatenated"):
        return 0, f"its gate and up rows are {order}, the routed experts' {up.gate_up}"
    return slots, None


def slot_stacks(shared: SharedParts, slots: int) -> tuple[list[Stack], list[Stack]]:
    """What stands in the added slots of w13 and of w2."""
    w13 = [tuple(Member(record, 0, slot, slots) for record in shared.up) for slot in range(slots)]
    return w13, [(Member(shared.down, 0, slot, slots),) for slot in range(slots)]


def _quantized(record: LayerRecord) -> str:
    activation = record.activation
    how = "static" if activation.static else activation.scale_mode or "dynamic"
    return f"{record.scheme} ({activation.dtype}, {how})" if activation.dtype else record.scheme
