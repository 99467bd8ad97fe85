"""One MoE layer put together: a rank's routed experts, the shared one in their banks or apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from mxfp4prep.errors import CannotShard, Unsupported
from mxfp4prep.runtime.assembling import Assembler
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.gathering import Gathered, Stack
from mxfp4prep.runtime.shared_expert import SharedExpert, SharedGate
from mxfp4prep.runtime.shared_parts import SharedParts, slot_stacks, slots_of
from mxfp4prep.runtime.slices import warn_of_repacking
from mxfp4prep.runtime.spreading import EVERY_ROW, Spread, Turn

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mxfp4prep.manifest import LayerRecord


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """What makes up one MoE layer.

    routed             all of its routed experts
    activation, limit  a name of GATES, and a clamp or None
    shared             the expert that every token visits, or None
    fusion             a name of FUSIONS: what to do with it
    """

    prefix: str
    routed: Gathered
    activation: str
    limit: float | None
    shared: SharedParts | None = None
    fusion: str = "auto"


def assemble(
    assembler: Assembler, layer: MoeLayer, spread: Spread, records: Mapping[str, LayerRecord]
) -> PreparedExperts:
    """The rank's part of an MoE layer: its piece of every expert, or a block of whole ones.

    records   MXFP4 layers by name, for the shared expert's gate

    Raises CannotShard where experts cannot be cut, Unsupported where ranks would go without one or
    a shared expert that is to be fused cannot be.
    """
    routed, maker = layer.routed, assembler
    expert_map = spread.expert_map(len(routed.w2), layer.prefix)
    if expert_map is not None:
        block = spread.block(len(routed.w2), layer.prefix)
        here = slice(block.start, block.stop)
        routed, maker = Gathered(routed.w13[here], routed.w2[here]), assembler.whole()
        expert_map = expert_map.to(assembler.device)
    intermediate = _check_cut(maker, layer.prefix, routed)
    slots = _slots(maker, layer, routed) if layer.shared is not None else 0
    held = _held(maker, layer, len(routed.w2), slots)
    if held is None:
        paths = maker.paths(layer.prefix, {"gate and up": routed.w13, "down": routed.w2})
        w13_path, w2_path = paths["gate and up"], paths["down"]
    else:
        w13_path, w2_path = held.w13_path, held.w2_path
    more: tuple[list[Stack], list[Stack]] = ([], [])
    shared, turn = None, EVERY_ROW
    if layer.shared is not None and slots:
        more = slot_stacks(layer.shared, slots)
        turn = spread.turn(1)
        if held is None or held.w13[0].shape[0] == len(routed.w2):
            banks = zip(more, (w13_path, w2_path), strict=True)
            _warn_of_repacking(maker, layer.shared.name, banks)
    elif layer.shared is not None:
        shared, turn = _apart(assembler, layer, spread)
    w13, w2 = [*routed.w13, *more[0]], [*routed.w2, *more[1]]
    up, down = routed.w13[0][-1].record, routed.w2[0][0].record
    experts = PreparedExperts(
        *maker.banks(w13, w13_path, None if held is None else held.w13),
        *maker.banks(w2, w2_path, None if held is None else held.w2),
        hidden=down.n,
        intermediate=intermediate,
        w13_path=w13_path,
        w2_path=w2_path,
        scheme=down.scheme,
        input_activation=down.activation,
        gate_up=up.gate_up or "concatenated",
        activation=layer.activation,
        limit=layer.limit,
        bias1=_joined(maker.bias, routed.w13, more[0]),
        bias2=_joined(maker.bias, routed.w2, more[1]),
        a1_scale=_joined(maker.input_scale, routed.w13, more[0]),
        a2_scale=_joined(maker.input_scale, routed.w2, more[1]),
        name=layer.prefix,
        tp_rank=maker.cutter.tp_rank,
        tp_size=maker.cutter.tp_size,
        expert_map=expert_map,
        shared_slots=slots,
        shared=shared,
        shared_gate=_gate(assembler, layer.shared, records),
        shared_name=None if layer.shared is None else layer.shared.name,
        turn=turn,
        ep_rank=spread.rank,
        ep_size=spread.size,
    )
    return maker.with_backend(experts)


class _Held(NamedTuple):
    """Weight and scale of both banks that are here already: of the routed experts, or of all."""

    w13: tuple[Tensor, Tensor]
    w2: tuple[Tensor, Tensor]
    w13_path: str
    w2_path: str


def _held(maker: Assembler, layer: MoeLayer, routed: int, slots: int) -> _Held | None:
    """What is kept of this layer's banks: routed experts, and the shared one's slots if any."""
    kept = None if maker.kept is None else maker.kept.banks(layer.prefix, maker.device)
    if kept is None:
        return None
    same = layer.shared is not None and layer.shared.name == kept.shared_name
    count = routed + slots if same and kept.shared_slots == slots else routed
    return _Held(
        (kept.w13[:count], kept.w13_scale[:count]),
        (kept.w2[:count], kept.w2_scale[:count]),
        kept.w13_path,
        kept.w2_path,
    )


def _check_cut(maker: Assembler, prefix: str, routed: Gathered) -> int:
    """The width of an expert's piece. Raises CannotShard, or Unsupported for uneven pieces."""
    up, down = routed.w13[0], routed.w2[0][0]
    try:
        rows, piece = sum(maker.piece(member).n for member in up), maker.piece(down)
    except CannotShard as error:
        way = "whole experts can be spread over the ranks: add ep_rank=tp_rank, ep_size=tp_size"
        # converted with --ep, verdicts are about whole experts and say nothing about cut ones
        known = not maker.batch.reader.opened.manifest.target.expert_parallel
        hint = f"{error.hint}; {way}" if known and error.hint else way
        raise CannotShard(error.where, error.what, reason=error.reason, hint=hint) from error
    if rows != 2 * piece.k or piece.n != up[0].record.k:
        raise Unsupported(
            prefix,
            f"gate and up are cut otherwise than down at tp {maker.cutter.tp_size}",
            found=f"{rows} gate and up rows, {piece.k} down columns",
            hint="convert again without --parallel rules for these experts",
        )
    return piece.k


def _slots(maker: Assembler, layer: MoeLayer, routed: Gathered) -> int:
    """How many slots of the banks the shared expert takes; 0 where it stands apart.

    Raises Unsupported where it is to be fused and cannot be.
    """
    if layer.shared is None or layer.fusion == "separate":
        return 0
    slots, obstacle = slots_of(layer.shared, routed)
    if obstacle is None and _sizes(maker, *slot_stacks(layer.shared, slots)) != _sizes(
        maker, routed.w13[:1], routed.w2[:1]
    ):
        obstacle = "it is cut otherwise than the routed experts"
    if obstacle is None:
        return slots
    if layer.fusion == "fused":
        raise Unsupported(
            layer.shared.name,
            f"cannot be one more routed expert: {obstacle}",
            hint="fusion='auto' keeps it apart where that is so",
        )
    return 0


def _sizes(maker: Assembler, w13: Sequence[Stack], w2: Sequence[Stack]) -> set[tuple[int, int]]:
    """(rows, columns) that a bank's matrix gets from each stack. Raises CannotShard."""
    found = set()
    for stack in (*w13, *w2):
        pieces = [maker.piece(member) for member in stack]
        found.add((sum(piece.n for piece in pieces), pieces[0].k))
    return found


def _warn_of_repacking(
    maker: Assembler, name: str, banks: Iterable[tuple[list[Stack], str]]
) -> None:
    """One warning where the shared expert's slots are stored for another path than the bank's."""
    for stacks, path in banks:
        stored = sorted({found for found, _ in maker.piece_paths(stacks)} - {path})
        if stored:
            warn_of_repacking(
                f"{name}: read whole and repacked for path {path}, which the routed experts take: "
                f"its pieces are stored for path {', '.join(stored)}"
            )
            return


def _apart(assembler: Assembler, layer: MoeLayer, spread: Spread) -> tuple[SharedExpert, Turn]:
    """The shared expert as layers of its own, and the rows that are this rank's."""
    parts = layer.shared
    assert parts is not None
    cutter = assembler.cutter
    maker, ranks = shared_maker(assembler, parts.down, spread)
    rows = sum(maker.cutter.piece(record).n for record in parts.up)
    if rows != 2 * maker.cutter.piece(parts.down).k:
        raise Unsupported(
            parts.name,
            f"gate and up are cut otherwise than down at tp {cutter.tp_size}",
            hint="convert again without --parallel rules for this shared expert",
        )
    shared = SharedExpert(
        tuple(maker.linear(record) for record in parts.up),
        maker.linear(parts.down),
        gate_up=parts.up[0].gate_up or "concatenated",
        activation=layer.activation,
        limit=layer.limit,
    )
    everyone = spread if spread.size > 1 else Spread(cutter.tp_rank, cutter.tp_size)
    return shared, everyone.turn(ranks)


def shared_maker(assembler: Assembler, down: LayerRecord, spread: Spread) -> tuple[Assembler, int]:
    """Who makes the layers of the shared expert with this down, and how many ranks share a result.

    It is cut over the tensor-parallel ranks, as audit has it. Where that is impossible but experts
    are spread, or where a rule says so, every rank holds the whole.
    """
    if assembler.cutter.cut(down).axis != "columns":
        return assembler, 1
    if spread.size > 1 and not _can_be_cut(assembler, down):
        return assembler.whole(), 1
    return assembler, assembler.cutter.tp_size


def _can_be_cut(assembler: Assembler, record: LayerRecord) -> bool:
    try:
        assembler.cutter.piece(record)
    except CannotShard:
        return False
    return True


def _gate(
    assembler: Assembler, shared: SharedParts | None, records: Mapping[str, LayerRecord]
) -> nn.Module | None:
    """From x to the (m, 1) that decide how much of the shared expert each row gets."""
    if shared is None or shared.gate is None:
        return None
    if shared.gate in records:
        return assembler.whole().linear(records[shared.gate])
    return SharedGate(assembler.batch.later(f"{shared.gate}.weight"), shared.gate)


def _joined(
    read: Callable[[Sequence[Stack]], Tensor | None], routed: Sequence[Stack], more: list[Stack]
) -> Tensor | None:
    """What `read` finds of the routed experts, then of the shared one's slots."""
    found = read(routed)
    added = read(more) if more and found is not None else None
    return found if found is None or added is None else torch.cat((found, added))
