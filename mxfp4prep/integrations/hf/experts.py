"""StoredExperts: all routed experts of one layer in a transformers model, as two banks of bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn

from mxfp4prep.errors import InvalidCheckpoint, Unsupported, UsageError
from mxfp4prep.integrations.hf.cutting import Axis, check_cut, cut_matrix, moved, slicing_of
from mxfp4prep.layouts import LAYOUTS, PATHS
from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.backends import Needs, choose_backend
from mxfp4prep.runtime.exact import ExactScales
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.linear import check_input
from mxfp4prep.runtime.slices import RepackWarning, byte_columns

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.manifest import LayerRecord
    from mxfp4prep.runtime.gathering import Gathered, Stack


class Gate(NamedTuple):
    """What stands between the two GEMMs: a name of GATES, its clamp, the order of gate and up."""

    activation: str
    limit: float | None
    order: str


class Bank(NamedTuple):
    """One of the two banks, before a byte of it is there.

    param    what its parameter is called
    stacks   what is stored of each expert, in order
    path     the path whose layouts it has
    n, k     of one expert's matrix
    """

    param: str
    stacks: Sequence[Stack]
    path: str
    n: int
    k: int

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


class StoredExperts(ExactScales):
    """For each token the weighted sum of its experts' down(act(gate) * up), as PreparedExperts.

    Takes the place of a model's fused experts, with the arguments of their forward. The parameters
    have the names that transformers gives the two banks, and `_scale` and `_bias` behind them.

    num_experts    in the banks: under expert parallelism this rank's
    backend        a name from `mxfp4prep.backends()`; None takes the best for the device
    """

    exact_buffers: ClassVar[tuple[str, ...]] = ("gate_up_proj_input_scale", "down_proj_input_scale")
    _hf_quantized_needs_local_tp = True

    gate_up_proj: nn.Parameter
    gate_up_proj_scale: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_proj_scale: nn.Parameter
    down_proj_bias: nn.Parameter | None
    gate_up_proj_input_scale: Tensor | None
    down_proj_input_scale: Tensor | None

    def __init__(
        self,
        name: str,
        gathered: Gathered,
        gate: Gate,
        dtype: torch.dtype,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        first, down = gathered.w13[0][0].record, gathered.w2[0][0].record
        self.name, self.gate, self.backend = name, gate, backend
        self.num_experts, self.hidden_dim, self.intermediate_dim = len(gathered.w2), down.n, down.k
        self.input_quant = input_quant_of(first.scheme, first.activation, name)
        self.quantize_activations = True
        self._is_expert_parallel = False
        self._adds_bias = True
        self._chosen: dict[tuple[str, str | None], str] = {}
        self.banks = {
            "gate_up_proj": _bank("gate_up_proj", gathered.w13, 2 * down.k, down.n),
            "down_proj": _bank("down_proj", gathered.w2, down.n, down.k),
        }
        self.paths = {param: bank.path for param, bank in self.banks.items()}
        mixed = [param for param, bank in self.banks.items() if bank.is_mixed]
        if mixed:
            warnings.warn(
                f"{name}: {' and '.join(mixed)} repacked for the Triton path while loading: their "
                "matrices are stored for different paths",
                RepackWarning,
                stacklevel=4,
            )
        for param, bank in self.banks.items():
            for suffix, operand in (("", "weight"), ("_scale", "scale")):
                empty = torch.empty(bank.shape(operand), dtype=torch.uint8, device="meta")
                self.register_parameter(param + suffix, nn.Parameter(empty, requires_grad=False))
            experts, record = len(bank.stacks), bank.parts[0]
            bias, scale = None, None
            if record.bias is not None:
                empty = torch.empty((experts, bank.n), dtype=dtype, device="meta")
                bias = nn.Parameter(empty, requires_grad=False)
            if record.input_scale is not None:
                scale = torch.empty((experts,), dtype=torch.float32, device="meta")
            self.register_parameter(f"{param}_bias", bias)
            self.register_buffer(f"{param}_input_scale", scale)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        router_indices: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """(..., hidden) in hidden_states' dtype.

        top_k_index, top_k_weights   (tokens, top); gpt-oss has the other two names for them
        """
        ids = router_indices if top_k_index is None else top_k_index
        weights = routing_weights if top_k_weights is None else top_k_weights
        if ids is None or weights is None:
            raise UsageError(self.name, "the routing is missing", expected="ids and weights")
        w13, w2 = self.gate_up_proj.view(torch.uint8), self.down_proj.view(torch.uint8)
        check_input(self.name, hidden_states, self.hidden_dim, w13)
        columns = w2.shape[-1]
        intermediate = columns // 8 if self.paths["down_proj"] == "asm" else 2 * columns
        ids = ids.reshape(-1, ids.shape[-1])
        if self._is_expert_parallel:  # another rank's are marked with the number of those here
            ids = torch.where(ids < self.num_experts, ids, -1)
        y: Tensor = torch.ops.mxfp4prep.fused_moe(
            hidden_states.reshape(-1, self.hidden_dim),
            w13,
            self.gate_up_proj_scale.view(torch.uint8),
            w2,
            self.down_proj_scale.view(torch.uint8),
            weights.reshape(-1, weights.shape[-1]),
            ids,
            intermediate,
            self.paths["gate_up_proj"],
            self.paths["down_proj"],
            self.input_quant if self.quantize_activations else "none",
            activation=self.gate.activation,
            limit=self.gate.limit,
            gate_up=self.gate.order,
            bias1=self.gate_up_proj_bias,
            bias2=self.down_proj_bias if self._adds_bias else None,
            a1_scale=self.gate_up_proj_input_scale,
            a2_scale=self.down_proj_input_scale,
            backend=self._backend_on(hidden_states.device.type, intermediate),
        )
        return y.reshape(hidden_states.shape)

    def _backend_on(self, device: str, intermediate: int) -> str:
        key = device, self.backend
        if key not in self._chosen:
            has_bias = self.gate_up_proj_bias is not None
            order, activation, limit = self.gate.order, self.gate.activation, self.gate.limit
            needs = Needs((self.hidden_dim, intermediate), order, activation, limit, has_bias)
            paths = self.paths["gate_up_proj"], self.paths["down_proj"]
            self._chosen[key] = choose_backend(device, self.backend, paths, self.input_quant, needs)
        return self._chosen[key]

    def get_ready(self) -> None:
        """Chooses the backend for where the banks are. Raises BackendUnavailable."""
        if not self.down_proj.is_meta:
            self._backend_on(self.down_proj.device.type, self.intermediate_dim)

    def assemble(self, param: str, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """What parameter or buffer `param` holds, from tensors as they are stored.

        parts   for each part of an expert's matrix (gate, up) the tensors of the experts here, or
                one tensor with those of all

        Raises InvalidCheckpoint where experts are missing, or where gate and up contradict.
        """
        root = "down_proj" if param.startswith("down_proj") else "gate_up_proj"
        bank, what = self.banks[root], param.removeprefix(root).removeprefix("_") or "weight"
        lists = [_each(bank.parts[at], tensors) for at, tensors in enumerate(parts)]
        # buffers are never sharded: under expert parallelism they come whole, see keep_block
        count = len(bank.stacks) if what == "input_scale" else self.num_experts
        if {len(tensors) for tensors in lists} != {count}:
            found = ", ".join(str(len(tensors)) for tensors in lists)
            raise InvalidCheckpoint(f"{self.name}.{param}", "experts", found=found, expected=count)
        if what == "input_scale":
            stacked = [torch.stack([t.float().reshape(()) for t in tensors]) for tensors in lists]
            if any(not torch.equal(stacked[0], other) for other in stacked[1:]):
                where = f"{self.name}.{param}"
                raise Unsupported(where, "gate and up have different input scales for one input")
            return stacked[0]
        if what == "bias":
            return torch.stack([torch.cat(rows) for rows in zip(*lists, strict=True)])
        matrices = [[t.view(torch.uint8) for t in rows] for rows in zip(*lists, strict=True)]
        if bank.is_mixed:
            rows_of = enumerate(matrices)
            return torch.stack([self._repacked(bank, what, at, rows) for at, rows in rows_of])
        turned = PATHS[bank.path][what == "scale"] == "transposed"
        return _beside(matrices, dim=int(turned))

    def _repacked(self, bank: Bank, operand: str, at: int, rows: Sequence[Tensor]) -> Tensor:
        plain = []
        columns = byte_columns(operand, (0, bank.k))[1]
        for member, tensor in zip(bank.stacks[at], rows, strict=True):
            layout = LAYOUTS[PATHS[path_name(member.record)][operand == "scale"]]
            plain.append(layout.inverse(tensor, member.record.n, columns))
        return LAYOUTS[PATHS[bank.path][operand == "scale"]].forward(torch.cat(plain))

    def shard_dim(self, param: str, axis: Axis, size: int) -> int | None:
        """As StoredLinear.shard_dim, for banks: gate and up rows, down columns."""
        root = "down_proj" if param.startswith("down_proj") else "gate_up_proj"
        width = self.intermediate_dim
        check_cut(f"{self.name}.{root}", axis, (width, width), size)
        dims = self._slicing(self.banks[root], axis, size)
        suffix = param.removeprefix(root)
        if dims is None or suffix not in ("", "_scale"):
            return None
        return 1 + dims[suffix == "_scale"]

    def _slicing(self, bank: Bank, axis: Axis, size: int) -> tuple[int, int] | None:
        """None also where a tensor holds gate and up of an expert, or all experts: transformers
        would take one run of rows."""
        if bank.is_mixed or any(record.experts or record.gate_up for record in bank.parts):
            return None
        record = bank.parts[0]
        return slicing_of(bank.path, record.n, record.k, axis, size)

    def cut(self, rank: int, size: int) -> None:
        """Replaces whole tensors that could not be read in pieces by this rank's."""
        axes: tuple[tuple[str, Axis], ...] = (("gate_up_proj", "rows"), ("down_proj", "columns"))
        mine = [*self._rows_of(rank, size)]
        for param, axis in axes:
            bank = self.banks[param]
            if self._slicing(bank, axis, size) is not None:
                continue
            pair = getattr(self, param).data, getattr(self, f"{param}_scale").data
            ranges = mine if axis == "rows" else None
            weight, scale = cut_matrix(pair, bank.path, (bank.n, bank.k), axis, rank, size, ranges)
            moved(f"{self.name}.{param}", rank, size)
            setattr(self, param, nn.Parameter(weight, requires_grad=False))
            setattr(self, f"{param}_scale", nn.Parameter(scale, requires_grad=False))
            self.paths[param] = "triton"
        if self.gate_up_proj_bias is not None:
            bias = torch.cat([self.gate_up_proj_bias[:, top:end] for top, end in mine], dim=1)
            self.gate_up_proj_bias = nn.Parameter(bias, requires_grad=False)
        self._adds_bias = rank == 0

    def _rows_of(self, rank: int, size: int) -> Iterator[tuple[int, int]]:
        """The rank's rows of a gate-up matrix."""
        width = self.intermediate_dim // size
        if self.gate.order == "interleaved":
            yield 2 * rank * width, 2 * (rank + 1) * width
            return
        for start in (0, self.intermediate_dim):
            yield start + rank * width, start + (rank + 1) * width

    def keep_block(self, rank: int, size: int) -> None:
        """Under expert parallelism: the input scales of this rank's block of experts."""
        count = len(self.banks["down_proj"].stacks) // size
        for name in self.exact_buffers:
            scales = self._buffers[name]
            if scales is not None:
                self._buffers[name] = scales[rank * count : (rank + 1) * count]

    def extra_repr(self) -> str:
        return (
            f"experts={self.num_experts}, hidden={self.hidden_dim}, "
            f"intermediate={self.intermediate_dim}, paths={'+'.join(self.paths.values())}, "
            f"activation={self.gate.activation}, gate_up={self.gate.order}"
        )


def _bank(param: str, stacks: Sequence[Stack], n: int, k: int) -> Bank:
    paths = {path_name(member.record) for stack in stacks for member in stack}
    return Bank(param, stacks, paths.pop() if len(paths) == 1 else "triton", n, k)


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
