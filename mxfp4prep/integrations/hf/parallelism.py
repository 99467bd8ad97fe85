"""Tensor and expert parallelism as transformers does them: a plan of styles, by name.

A style knows how a plain weight is sliced. Ours ask the module, whose tensors may stand in another
order; hooks around a module's forward stay transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from transformers.quantizers.base import HfQuantizer

from mxfp4prep.errors import Unsupported
from mxfp4prep.integrations.hf.experts import StoredExperts, split
from mxfp4prep.integrations.hf.fp8 import Fp8Linear
from mxfp4prep.integrations.hf.linear import StoredLinear

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from mxfp4prep.integrations.hf.cutting import Axis

Stored = StoredLinear | Fp8Linear | StoredExperts
Share = Literal["rows", "columns", "experts"]

SHARES: dict[str, Share] = {
    "colwise": "rows",
    "colwise_rep": "rows",
    "colwise_gather_output": "rows",
    "packed_colwise": "rows",
    "rowwise": "columns",
    "rowwise_rep": "columns",
    "rowwise_split_input": "columns",
    "grouped_gemm": "experts",
}
"""Style that a plan gives a layer or a bank -> what ranks share of it."""

WHOLE = frozenset({"replicate"})
"""Styles under which every rank has all of it."""


class StoredStyle:
    """Style `inner` for the parameters of stored modules; for others it is `inner` itself."""

    def __init__(self, inner: Any, share: Share) -> None:  # noqa: ANN401 - transformers' styles
        self._inner, self._share = inner, share

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Makes a DTensor of a meta parameter, or leaves it whole where it cannot be sliced."""
        meta = module._parameters.get(param)
        if not isinstance(module, Stored) or meta is None:
            self._inner.shard_param(module, param, mesh)
            return
        rank, size = mesh.get_local_rank(), mesh.size()
        module.__dict__["share_of"] = (self._share, rank, size)
        module.__dict__.setdefault("placed", set()).add(param)
        if self._share == "experts" or param == "bias":
            self._inner.shard_param(module, param, mesh)
            return
        axis: Axis = self._share
        if axis == "columns" and not isinstance(module, StoredExperts):
            module.share_inputs(mesh)
        dim = module.shard_dim(param, axis, size)
        if dim is not None:
            module._parameters[param] = _distributed(module, meta, mesh, dim, axis)


def _distributed(
    module: Stored, meta: nn.Parameter, mesh: DeviceMesh, dim: int, axis: Axis
) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    placement: Any = Shard(dim)
    if isinstance(module, StoredExperts) and axis == "rows" and module.gate.order == "concatenated":
        placement = _StridedShard(dim=dim, split_factor=2)  # a run of gate rows and one of up rows
    placed = distribute_tensor(meta, mesh, [placement], src_data_rank=None)
    return nn.Parameter(placed, requires_grad=False)


def check(model: PreTrainedModel) -> None:
    """Raises Unsupported for stages of a pipeline, and where the release of transformers is too old
    for what was asked."""
    config = getattr(model.config, "distributed_config", None)
    stages, *sizes = (getattr(config, f"{kind}_size", None) or 1 for kind in ("pp", "tp", "ep"))
    if stages > 1:
        what = "a prepared checkpoint is not cut into stages of a pipeline"
        hint = "tp_size and ep_size spread it over ranks, a device_map over the GPUs of one process"
        raise Unsupported("DistributedConfig.pp_size", what, found=stages, hint=hint)
    if max(sizes) > 1 and not hasattr(HfQuantizer, "update_parallel_plan"):
        import transformers

        what = "cannot split the layers of a prepared checkpoint over ranks"
        hint = "install transformers 5.24 or later"
        raise Unsupported(f"transformers {transformers.__version__}", what, hint=hint)


def extend(plan: dict[str, str], modules: Mapping[str, nn.Module]) -> None:
    """Adds to a model's plan, in place, a style for each parameter of stored modules.

    Raises Unsupported for a style that is not known here.
    """
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    added: dict[str, str] = {}
    for path, module in modules.items():
        if not isinstance(module, Stored):
            continue
        name = replace_layer_number_by_wildcard(path)
        for param in module._parameters:
            key = f"{name}.{param}"
            root = split(param)[0] if isinstance(module, StoredExperts) else None
            style = plan.get(name if root is None else f"{name}.{root}")
            if style is None or style in WHOLE:
                continue
            if style not in SHARES:
                what = f"the parallel style {style} is not known for stored layers"
                raise Unsupported(path, what, expected=", ".join(SHARES))
            added[key] = _registered(style)
    plan.update(added)


def _registered(style: str) -> str:
    """The name of our style around transformers' own."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    name = f"mxfp4prep_{style}"
    if name not in ALL_PARALLEL_STYLES:
        style_of_ours: Any = StoredStyle(ALL_PARALLEL_STYLES[style], SHARES[style])
        ALL_PARALLEL_STYLES.register(name, style_of_ours)
    return name


def finish(modules: Iterable[Stored]) -> None:
    """Once weights are there: cuts what had to be read whole.

    Raises Unsupported where a parameter was sliced, but not by us.
    """
    for module in modules:
        placed = module.__dict__.pop("placed", set())
        for name, parameter in module.named_parameters(recurse=False):
            if hasattr(parameter, "_local_tensor") and name not in placed:
                what = "sliced by a plan of your own, or by FSDP, which do not know stored layers"
                hint = "leave tp_plan out: the model's own is used, and extended"
                raise Unsupported(f"{module.name}.{name}", what, hint=hint)
        share, rank, size = module.__dict__.pop("share_of", (None, 0, 1))
        if share is None:
            continue
        if not isinstance(module, StoredExperts):
            module.cut(share, rank, size)
        elif share == "experts":
            module.keep_block(rank, size)
        else:
            module.cut(rank, size)
