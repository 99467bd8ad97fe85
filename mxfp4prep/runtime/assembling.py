"""From records and bytes to modules: one layer's piece, or all experts' pieces in two banks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.manifest import LayerRecord
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.backends import choose_backend
from mxfp4prep.runtime.cutting import Cutter
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.gathering import Gathered, Member
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.reading import Operand, Reader, Target, place_piece
from mxfp4prep.runtime.slices import RepackWarning, byte_columns, path_of_piece

if TYPE_CHECKING:
    from torch import Tensor

Module = TypeVar("Module", PreparedLinear, PreparedExperts)


@dataclass(frozen=True, slots=True)
class Assembler:
    """Builds modules for one rank on one device. `backend` is the user's choice, or None."""

    reader: Reader
    cutter: Cutter
    device: torch.device
    backend: str | None

    def linear(self, record: LayerRecord) -> PreparedLinear:
        """The rank's piece of a layer. Raises CannotShard."""
        members = [[Member(record, 0)]]
        path = self._path(record.name, {"the layer": members})["the layer"]
        weight, scale = (bank[0] for bank in self._banks(members, path))
        piece = self.cutter.piece(record)
        bias, input_scale = self._bias(members), self._input_scale(members)
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
        return self._with_backend(layer)

    def experts(
        self, prefix: str, gathered: Gathered, activation: str, limit: float | None
    ) -> PreparedExperts:
        """The rank's piece of every expert. Raises CannotShard."""
        w13, w2 = list(gathered.w13.values()), [gathered.w2]
        paths = self._path(prefix, {"gate and up": w13, "down": w2})
        w13_path, w2_path = paths["gate and up"], paths["down"]
        up, down = w13[-1][0].record, gathered.w2[0].record
        rows = sum(self.cutter.piece(members[0].record).n for members in w13)
        piece = self.cutter.piece(down)
        if rows != 2 * piece.k or piece.n != up.k:
            raise Unsupported(
                prefix,
                f"gate and up are cut otherwise than down at tp {self.cutter.tp_size}",
                found=f"{rows} gate and up rows, {piece.k} down columns",
                hint="convert again without --parallel rules for these experts",
            )
        banks = (*self._banks(w13, w13_path), *self._banks(w2, w2_path))
        experts = PreparedExperts(
            *banks,
            hidden=piece.n,
            intermediate=piece.k,
            w13_path=w13_path,
            w2_path=w2_path,
            scheme=down.scheme,
            input_activation=down.activation,
            gate_up=up.gate_up or "concatenated",
            activation=activation,
            limit=limit,
            bias1=self._bias(w13),
            bias2=self._bias(w2),
            a1_scale=self._input_scale(w13),
            a2_scale=self._input_scale(w2),
            name=prefix,
            tp_rank=self.cutter.tp_rank,
            tp_size=self.cutter.tp_size,
        )
        return self._with_backend(experts)

    def _with_backend(self, module: Module) -> Module:
        module.backend = choose_backend(
            self.device.type, self.backend, module.paths, module.input_quant
        )
        return module

    def _path(self, name: str, banks: dict[str, list[list[Member]]]) -> dict[str, str]:
        """The path that each bank's pieces take; one warning where it is not the stored one."""
        chosen: dict[str, str] = {}
        reasons: list[str] = []
        for what, halves in banks.items():
            choices = {self._piece_path(member.record) for members in halves for member in members}
            paths = {path for path, _ in choices}
            whys = sorted({why for _, why in choices if why is not None})
            if len(paths) > 1 and not whys:
                whys = [f"its matrices are stored for different paths ({', '.join(sorted(paths))})"]
            chosen[what] = paths.pop() if len(paths) == 1 else "triton"
            reasons += [f"{what}: {why}" if len(banks) > 1 else why for why in whys]
        if reasons:
            warnings.warn(
                f"{name}: read whole and repacked for the Triton path at rank "
                f"{self.cutter.tp_rank} of {self.cutter.tp_size}: {'; '.join(reasons)}",
                RepackWarning,
                stacklevel=5,
            )
        return chosen

    def _piece_path(self, record: LayerRecord) -> tuple[str, str | None]:
        return path_of_piece(path_name(record), record.n, record.k, self.cutter.piece(record))

    def _banks(self, halves: Sequence[Sequence[Member]], path: str) -> tuple[Tensor, Tensor]:
        """Weight and scale, (e, *stored shape) each, the halves' rows one after the other."""
        weight, scale = PATHS[path]
        return self._bank("weight", halves, weight), self._bank("scale", halves, scale)

    def _bank(self, operand: str, halves: Sequence[Sequence[Member]], layout_id: str) -> Tensor:
        layout = LAYOUTS[layout_id]
        pieces = [self.cutter.piece(members[0].record) for members in halves]
        rows = sum(piece.n for piece in pieces)
        columns = byte_columns(operand, pieces[0].columns)
        shape = layout.stored_shape(rows, columns[1] - columns[0])
        bank = torch.empty((len(halves[0]), *shape), dtype=torch.uint8)
        at = 0
        for members, piece in zip(halves, pieces, strict=True):
            numbered = enumerate(members)
            for _, run in groupby(numbered, key=lambda item: item[1].record.name):
                group = list(run)
                with self.reader.open(_operand(operand, group[0][1].record)) as stored:
                    for number, member in group:
                        target = Target(layout, bank[number], rows, at)
                        place_piece(stored, member.index, piece.rows, columns, target)
            at += piece.n
        return bank.to(self.device)

    def _bias(self, halves: Sequence[Sequence[Member]]) -> Tensor | None:
        """(e, n), the halves' side by side; None where there is none or another rank adds it."""
        first = halves[0][0].record
        parts = []
        for members in halves:
            vectors = self._vectors(members, [member.record.bias for member in members])
            if vectors is not None:
                rows = self.cutter.piece(members[0].record).rows
                parts.append(torch.cat([vectors[:, start:stop] for start, stop in rows], dim=-1))
        if not parts or not self.cutter.holds_bias(first):
            return None
        if len(parts) != len(halves):
            raise InvalidCheckpoint(first.name, "of gate and up only one has a bias")
        return torch.cat(parts, dim=-1).to(self.device)

    def _input_scale(self, halves: Sequence[Sequence[Member]]) -> Tensor | None:
        """(e,) float32. Gate and up have the same input, hence must have the same scale."""
        scales = [
            self._vectors(members, [member.record.input_scale for member in members])
            for members in halves
        ]
        record = halves[0][0].record
        first = scales[0]
        for other in scales[1:]:
            if (first is None) != (other is None) or not (
                first is None or other is None or torch.equal(first, other)
            ):
                what = "gate and up have different input scales, although they have one input"
                raise Unsupported(record.name, what, hint="load its layers with prepared[name]")
        if first is None:
            if record.activation.static:
                raise InvalidCheckpoint(record.name, "static inputs, but no input_scale is stored")
            return None
        return first.float().reshape(len(halves[0])).to(self.device)

    def _vectors(self, members: Sequence[Member], names: Sequence[str | None]) -> Tensor | None:
        """(e, ...), each member's tensor, or its row where one tensor has those of all experts."""
        rows: list[Tensor] = []
        last, tensor = None, None
        for member, name in zip(members, names, strict=True):
            if name is None:
                return None
            if name != last or tensor is None:
                last, tensor = name, self.reader.tensor(name)
            in_bank = member.record.experts is not None and tensor.dim() > 0
            rows.append(tensor[member.index] if in_bank else tensor)
        return torch.stack(rows)


def _operand(operand: str, record: LayerRecord) -> Operand:
    stored = record.weight if operand == "weight" else record.scale
    _, columns = byte_columns(operand, (0, record.k))
    return Operand(stored.tensor, LAYOUTS[stored.layout], record.n, columns, record.experts or 1)
