"""From records and bytes to what modules are made of: a layer's piece, or experts' in banks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.manifest import LayerRecord
from mxfp4prep.prepared import VERIFY_HINT
from mxfp4prep.runtime import memory
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.backends import choose_backend
from mxfp4prep.runtime.cutting import Cutter
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.gathering import Member, Stack
from mxfp4prep.runtime.kept import Kept
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.reading import Batch, Operand, Target, place_piece
from mxfp4prep.runtime.slices import byte_columns, path_of_piece, warn_of_repacking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mxfp4prep.parallel import Shard

Module = TypeVar("Module", PreparedLinear, PreparedExperts)


@dataclass(frozen=True, slots=True)
class Assembler:
    """Builds modules for one rank on one device; their weights have no bytes before `batch` is run.

    backend   the user's choice, or None
    kept      what was read before: its bytes are used again, not read
    """

    batch: Batch
    cutter: Cutter
    device: torch.device
    backend: str | None
    kept: Kept | None = None

    def linear(self, record: LayerRecord) -> PreparedLinear:
        """The rank's piece of a layer. Raises CannotShard."""
        stacks = [(Member(record, 0),)]
        piece = self.cutter.piece(record)
        held = self._held(record.name)
        if held is None:
            path = self.paths(record.name, {"the layer": stacks})["the layer"]
            weight, scale = (bank[0] for bank in self.banks(stacks, path))
        else:
            path, weight, scale = held.path, held.weight, held.scale
        bias, input_scale = self.bias(stacks), self.input_scale(stacks)
        layer = PreparedLinear(
            weight,
            scale,
            n=piece.n,
            k=piece.k,
            path=path,
            scheme=record.scheme,
            activation=record.activation,
            bias=None if bias is None else bias[0],
            input_scale=None if input_scale is None else input_scale[0],
            name=record.name,
            tp_rank=self.cutter.tp_rank,
            tp_size=self.cutter.tp_size,
        )
        return self.with_backend(layer)

    def _held(self, name: str) -> PreparedLinear | None:
        if self.kept is None:
            return None
        return self.kept.linear(name, (self.cutter.tp_rank, self.cutter.tp_size), self.device)

    def whole(self) -> Assembler:
        """The same, but for one rank that holds everything whole."""
        return replace(self, cutter=replace(self.cutter, tp_rank=0, tp_size=1))

    def piece(self, member: Member) -> Shard:
        """The rows and columns of a member's matrix that this rank holds. Raises CannotShard."""
        cutter = self.cutter
        if member.slots > 1:
            # each slot is cut over the ranks as an expert is, and slots lie one after the other
            rank, size = cutter.tp_rank, cutter.tp_size
            cutter = replace(cutter, tp_rank=member.slot * size + rank, tp_size=size * member.slots)
        return cutter.piece(member.record)

    def with_backend(self, module: Module) -> Module:
        """The module, with the backend it will run on. Raises BackendUnavailable."""
        module.backend = choose_backend(
            self.device.type, self.backend, module.paths, module.input_quant, module.needs
        )
        return module

    def paths(self, name: str, banks: Mapping[str, Sequence[Stack]]) -> dict[str, str]:
        """The path that each bank's pieces take; one warning where it is not the stored one."""
        chosen: dict[str, str] = {}
        reasons: list[str] = []
        for what, stacks in banks.items():
            choices = self.piece_paths(stacks)
            paths = {path for path, _ in choices}
            whys = sorted({why for _, why in choices if why is not None})
            if len(paths) > 1 and not whys:
                whys = [f"its matrices are stored for different paths ({', '.join(sorted(paths))})"]
            chosen[what] = paths.pop() if len(paths) == 1 else "triton"
            reasons += [f"{what}: {why}" if len(banks) > 1 else why for why in whys]
        if reasons:
            warn_of_repacking(
                f"{name}: read whole and repacked for the Triton path at rank "
                f"{self.cutter.tp_rank} of {self.cutter.tp_size}: {'; '.join(reasons)}"
            )
        return chosen

    def piece_paths(self, stacks: Sequence[Stack]) -> set[tuple[str, str | None]]:
        """The paths that pieces can take as they are stored, and why not their matrix's own."""
        kinds = {
            (path_name(member.record), member.record.n, member.record.k, piece)
            for stack, pieces in self._cut(stacks)
            for member, piece in zip(stack, pieces, strict=True)
        }
        return {path_of_piece(*kind) for kind in kinds}

    def banks(
        self,
        stacks: Sequence[Stack],
        path: str,
        held: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weight and scale, (e, *stored shape) each, a stack's rows one after the other.

        held   those of the first stacks, if they are here: copied, or taken where they are all

        Only their memory: what else belongs there is put on the batch's list.
        """
        weight, scale = PATHS[path]
        return (
            self._bank("weight", stacks, weight, None if held is None else held[0]),
            self._bank("scale", stacks, scale, None if held is None else held[1]),
        )

    def _bank(
        self, operand: str, stacks: Sequence[Stack], layout_id: str, held: Tensor | None
    ) -> Tensor:
        first_missing = 0 if held is None else held.shape[0]
        if held is not None and first_missing == len(stacks):
            return held
        layout = LAYOUTS[layout_id]
        cut = self._cut(stacks)
        first = cut[0][1]
        rows = sum(piece.n for piece in first)
        start, stop = byte_columns(operand, first[0].columns)
        shape = layout.stored_shape(rows, stop - start)
        bank = memory.empty((len(stacks), *shape), self.device)
        if held is not None:
            bank[:first_missing].copy_(held)
        for number, (stack, pieces) in enumerate(cut[first_missing:], first_missing):
            at = 0
            for member, piece in zip(stack, pieces, strict=True):
                stored = _operand(operand, member.record)
                columns = byte_columns(operand, piece.columns)
                target = Target(layout, bank[number], rows, at)
                place_piece(self.batch, stored, member.index, piece.rows, columns, target)
                at += piece.n
        return bank

    def _cut(self, stacks: Sequence[Stack]) -> list[tuple[Stack, tuple[Shard, ...]]]:
        """Each stack with its members' pieces. Experts are alike, so that few must be found."""
        known: dict[tuple[str, int, int], tuple[Shard, ...]] = {}
        result = []
        for stack in stacks:
            key = stack[0].record.kind, len(stack), stack[0].slot
            if key not in known:
                known[key] = tuple(self.piece(member) for member in stack)
            result.append((stack, known[key]))
        return result

    def bias(self, stacks: Sequence[Stack]) -> Tensor | None:
        """(e, n), a stack's side by side; None where there is none or another rank adds it.

        stacks   of one kind: all routed experts, or all slots of a shared one
        """
        first = stacks[0][0].record
        parts = []
        for members in zip(*stacks, strict=True):
            vectors = self._vectors(members, [member.record.bias for member in members])
            if vectors is not None:
                rows = self.piece(members[0]).rows
                parts.append(torch.cat([vectors[:, start:stop] for start, stop in rows], dim=-1))
        if not parts or not self.cutter.holds_bias(first):
            return None
        if len(parts) != len(stacks[0]):
            raise InvalidCheckpoint(first.name, "of gate and up only one has a bias")
        return torch.cat(parts, dim=-1).to(self.device)

    def input_scale(self, stacks: Sequence[Stack]) -> Tensor | None:
        """(e,) float32. Gate and up have the same input, hence must have the same scale.

        stacks   as for `bias`
        """
        scales = [
            self._vectors(members, [member.record.input_scale for member in members])
            for members in zip(*stacks, strict=True)
        ]
        record = stacks[0][0].record
        first = scales[0]
        for other in scales[1:]:
            if (first is None) != (other is None) or not (
                first is None or other is None or first.is_meta or torch.equal(first, other)
            ):
                what = "gate and up have different input scales, although they have one input"
                raise Unsupported(record.name, what, hint="load its layers with prepared[name]")
        if first is None:
            if record.activation.static:
                what = "static inputs, but no input_scale is stored"
                raise InvalidCheckpoint(record.name, what, hint=VERIFY_HINT)
            return None
        return first.float().reshape(len(stacks)).to(self.device)

    def _vectors(self, members: Sequence[Member], names: Sequence[str | None]) -> Tensor | None:
        """(e, ...), each member's tensor, or its row where one tensor has those of all experts."""
        rows: list[Tensor] = []
        last, tensor = None, None
        for member, name in zip(members, names, strict=True):
            if name is None:
                return None
            if name != last or tensor is None:
                last, tensor = name, self.batch.now(name)
            in_bank = member.record.experts is not None and tensor.dim() > 0
            rows.append(tensor[member.index] if in_bank else tensor)
        return torch.stack(rows)


def _operand(operand: str, record: LayerRecord) -> Operand:
    stored = record.weight if operand == "weight" else record.scale
    _, columns = byte_columns(operand, (0, record.k))
    return Operand(stored.tensor, LAYOUTS[stored.layout], record.n, columns, record.experts or 1)
