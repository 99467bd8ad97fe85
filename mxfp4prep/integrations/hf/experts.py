"""StoredExperts: all routed experts of one layer in a transformers model, as two banks of bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import nn

from mxfp4prep.errors import Unsupported, UsageError
from mxfp4prep.integrations.hf.bank import Bank
from mxfp4prep.integrations.hf.cutting import Axis, check_cut, cut_matrix, moved
from mxfp4prep.integrations.hf.inputs import DYNAMIC_FP8
from mxfp4prep.runtime import ops  # noqa: F401 - defines torch.ops.mxfp4prep
from mxfp4prep.runtime.backends import Needs, choose_backend
from mxfp4prep.runtime.exact import ExactScales
from mxfp4prep.runtime.input_quant import input_quant_of
from mxfp4prep.runtime.linear import check_input
from mxfp4prep.runtime.slices import RepackWarning

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.runtime.gathering import Gathered


class Gate(NamedTuple):
    """What stands between the two GEMMs: a name of GATES, its clamp, the order of gate and up."""

    activation: str
    limit: float | None
    order: str


def split(param: str) -> tuple[str, str]:
    """("gate_up_proj" or "down_proj", what of that bank): the name of a parameter or buffer."""
    root = "down_proj" if param.startswith("down_proj") else "gate_up_proj"
    return root, param.removeprefix(root).removeprefix("_") or "weight"


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
            "gate_up_proj": Bank.of(f"{name}.gate_up_proj", gathered.w13, 2 * down.k, down.n),
            "down_proj": Bank.of(f"{name}.down_proj", gathered.w2, down.n, down.k),
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
        """What parameter or buffer `param` holds, from tensors as stored: see Bank.assemble."""
        root, what = split(param)
        bank = self.banks[root]
        # buffers are never sharded: under expert parallelism they come whole, see keep_block
        count = len(bank.stacks) if what == "input_scale" else self.num_experts
        return bank.assemble(what, parts, count)

    def shard_dim(self, param: str, axis: Axis, size: int) -> int | None:
        """As StoredLinear.shard_dim, for banks: gate and up rows, down columns."""
        root, what = split(param)
        width = self.intermediate_dim
        check_cut(f"{self.name}.{root}", axis, (width, width), size)
        if self.input_quant in DYNAMIC_FP8 and size > 1:
            raise Unsupported(
                f"{self.name}.down_proj",
                "the scales of its FP8 inputs are taken from whole rows, of which each rank would "
                "have a part",
                found=f"dynamic FP8 inputs at tp {size}",
                expected="whole experts on each rank",
                hint=f"DistributedConfig(tp_size={size}, ep_size={size}) spreads whole experts",
            )
        dims = self.banks[root].slicing(axis, size)
        if dims is None or what not in ("weight", "scale"):
            return None
        return 1 + dims[what == "scale"]

    def cut(self, rank: int, size: int) -> None:
        """Replaces whole tensors that could not be read in pieces by this rank's."""
        axes: tuple[tuple[str, Axis], ...] = (("gate_up_proj", "rows"), ("down_proj", "columns"))
        mine = [*self._rows_of(rank, size)]
        for param, axis in axes:
            bank = self.banks[param]
            if bank.slicing(axis, size) is not None:
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
