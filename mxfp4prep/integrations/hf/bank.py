"""Bank: one matrix of every routed expert of a layer, as it is stored and as a module holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.hf.cutting import Axis, slicing_of
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.slices import byte_columns

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.manifest import LayerRecord, StoredTensor
    from mxfp4prep.runtime.gathering import Stack


class Bank(NamedTuple):
    """One of a layer's two banks, before a byte of it is there.

    name     of its parameter, with the module's
    stacks   what is stored of each expert, in order
    path     the path whose layouts it has
    n, k     of one expert's matrix
    """

    name: str
    stacks: Sequence[Stack]
    path: str
    n: int
    k: int

    @classmethod
    def of(cls, name: str, stacks: Sequence[Stack], n: int, k: int) -> Bank:
        """The bank of `stacks`, for Triton where they are stored for different paths."""
        paths = {path_name(member.record) for stack in stacks for member in stack}
        return cls(name, stacks, paths.pop() if len(paths) == 1 else "triton", n, k)

    @property
    def parts(self) -> tuple[LayerRecord, ...]:
        """The records of the first expert's matrices, whose rows follow each other."""
        return tuple(member.record for member in self.stacks[0])

    @property
    def is_mixed(self) -> bool:
        """Whether some of it is stored for another path and has to be repacked."""
        return any(
            path_name(member.record) != self.path for stack in self.stacks for member in stack
        )

    def shape(self, operand: str) -> tuple[int, ...]:
        """Of the parameter that holds "weight" or "scale"."""
        layout = LAYOUTS[PATHS[self.path][operand == "scale"]]
        columns = byte_columns(operand, (0, self.k))[1]
        return len(self.stacks), *layout.stored_shape(self.n, columns)

    def slicing(self, axis: Axis, size: int) -> tuple[int, int] | None:
        """As slicing_of; None also where a tensor holds gate and up of an expert, or all experts:
        transformers would take one run of rows."""
        if self.is_mixed or any(record.experts or record.gate_up for record in self.parts):
            return None
        record = self.parts[0]
        return slicing_of(self.path, record.n, record.k, axis, size)

    def assemble(self, what: str, parts: Sequence[Sequence[Tensor]], count: int) -> Tensor:
        """The whole of it from tensors as they are stored.

        what    "weight", "scale", "bias" or "input_scale"
        parts   for each part of an expert's matrix (gate, up) the tensors of the experts here, or
                one tensor with those of all
        count   of the experts here

        Raises InvalidCheckpoint where experts are missing, Unsupported where gate and up
        contradict.
        """
        lists = [_each(record, tensors) for record, tensors in zip(self.parts, parts, strict=True)]
        if {len(tensors) for tensors in lists} != {count}:
            found = ", ".join(str(len(tensors)) for tensors in lists)
            where = self.name if what == "weight" else f"{self.name}_{what}"
            raise InvalidCheckpoint(where, "experts", found=found, expected=count)
        if what == "input_scale":
            return self._one_scale(lists)
        if what == "bias":
            return torch.stack([torch.cat(rows) for rows in zip(*lists, strict=True)])
        matrices = [[t.view(torch.uint8) for t in rows] for rows in zip(*lists, strict=True)]
        if self.is_mixed:
            rows_of = enumerate(matrices)
            return torch.stack([self._repacked(what, at, rows) for at, rows in rows_of])
        turned = PATHS[self.path][what == "scale"] == "transposed"
        return _beside(matrices, dim=int(turned))

    def take_apart(self, operand: str, bank: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what `assemble` made `bank` of, which is not `is_mixed`."""
        if self.is_mixed:
            return
        turned = PATHS[self.path][operand == "scale"] == "transposed"
        sizes = [_stored(record, operand).shape[-2:][turned] for record in self.parts]
        columns = bank.split(sizes, dim=1 + turned)  # type: ignore[no-untyped-call]
        for at, record in enumerate(self.parts):
            if record.experts is not None:
                yield _stored(record, operand).tensor, columns[at]
                continue
            for stack, tensor in zip(self.stacks, columns[at], strict=True):
                yield _stored(stack[at].record, operand).tensor, tensor

    def _one_scale(self, lists: Sequence[Sequence[Tensor]]) -> Tensor:
        """(experts,) float32: gate and up have one input."""
        stacked = [torch.stack([t.float().reshape(()) for t in tensors]) for tensors in lists]
        if any(not torch.equal(stacked[0], other) for other in stacked[1:]):
            where = f"{self.name}_input_scale"
            raise Unsupported(where, "gate and up have different input scales for one input")
        return stacked[0]

    def _repacked(self, operand: str, at: int, rows: Sequence[Tensor]) -> Tensor:
        plain = []
        columns = byte_columns(operand, (0, self.k))[1]
        for member, tensor in zip(self.stacks[at], rows, strict=True):
            layout = LAYOUTS[PATHS[path_name(member.record)][operand == "scale"]]
            plain.append(layout.inverse(tensor, member.record.n, columns))
        return LAYOUTS[PATHS[self.path][operand == "scale"]].forward(torch.cat(plain))


def _stored(record: LayerRecord, operand: str) -> StoredTensor:
    return record.weight if operand == "weight" else record.scale


def _each(record: LayerRecord, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor an expert; a bank may have one input scale for all of them."""
    if record.experts is None:
        return tensors
    (bank,) = tensors
    return (bank if bank.dim() else bank.expand(record.experts)).unbind(0)


def _beside(matrices: Sequence[Sequence[Tensor]], dim: int) -> Tensor:
    """(experts, rows, columns): each expert's parts along `dim`. Every byte is copied once."""
    first = matrices[0]
    shape = list(first[0].shape)
    shape[dim] = sum(part.shape[dim] for part in first)
    bank = first[0].new_empty((len(matrices), *shape))
    for out, parts in zip(bank, matrices, strict=True):
        torch.cat(list(parts), dim=dim, out=out)
    return bank
