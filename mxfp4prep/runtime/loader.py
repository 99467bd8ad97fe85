"""Loads a prepared checkpoint for one rank: layers on demand, cut and ready to run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mxfp4prep.errors import BackendUnavailable, UsageError
from mxfp4prep.manifest import LayerRecord, Manifest
from mxfp4prep.parallel import Topology
from mxfp4prep.runtime.assembling import Assembler
from mxfp4prep.runtime.backends import choose_backend
from mxfp4prep.runtime.cutting import Cutter
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.gathering import gather, group_experts
from mxfp4prep.runtime.gating import activation_of_config
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.moe import MoeLayer, assemble
from mxfp4prep.runtime.opening import open_for_serving
from mxfp4prep.runtime.reading import Batch, Progress, Reader
from mxfp4prep.runtime.shared_parts import (
    SharedParts,
    beside,
    gate_of,
    group_shared,
    shared_parts,
)
from mxfp4prep.runtime.spreading import ALONE, Spread

if TYPE_CHECKING:
    from torch import Tensor


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
    tp_size: int = 1,
    backend: str | None = None,
    verify: bool = False,
    *,
    ep_rank: int = 0,
    ep_size: int = 1,
    lazy: bool = True,
    progress: Progress | None = None,
) -> Prepared:
    """The prepared checkpoint at `path`, cut for one rank. Reads manifest and headers; a layer's
    bytes are read when it is asked for.

    device    where layers live and run; "meta" reads no bytes, see `Prepared.materialize`
    tp_rank, tp_size   which piece of each layer, as engines cut them
    backend   a name from `backends()`; None takes the best that can run each layer there
    verify    read tensors whole and compare each with its digest before it is used
    ep_rank, ep_size   which block of whole experts, where those are spread over ranks and not cut;
              what `--ep` means in audit and convert is ep_rank = tp_rank, ep_size = tp_size
    lazy      False reads everything now, as `Prepared.load_all` does, and reports to `progress`

    Raises InvalidManifest, InvalidCheckpoint or Unsupported where anything is missing, unknown or
    contradictory, BackendUnavailable for a backend that cannot run, UsageError for a wrong rank.
    """
    if lazy and progress is not None:
        raise UsageError("progress", "reports on a whole model being read", hint="add lazy=False")
    opened = open_for_serving(Path(path), verify=verify)
    target = _device(device)
    choose_backend(target.type, backend)
    modules = [record.name for record in opened.manifest.layers]
    copied = (tensor.name for tensor in opened.manifest.tensors)
    modules += [name.removesuffix(".weight") for name in copied if name.endswith(".weight")]
    topology = Topology.from_config(opened.config)
    rules = opened.manifest.target.parallel
    cutter = Cutter.make(dict.fromkeys(modules), topology, tp_rank, tp_size, rules)
    spread = Spread.make(ep_rank, ep_size, tp_rank, tp_size)
    prepared = Prepared(Reader(opened), cutter, target, backend, spread)
    if not lazy:
        prepared.load_all(progress)
    return prepared


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError:
        raise UsageError(
            "device", "unknown", found=repr(device), expected="'cpu', 'cuda', 'cuda:N' or 'meta'"
        ) from None
    if target.type not in ("cpu", "cuda", "meta"):
        expected = "cpu, cuda or meta"
        raise UsageError("device", "not supported", found=target.type, expected=expected)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"device {device}", "torch finds no GPU here", hint="load with device='cpu'"
        )
    return target


class _Asked(NamedTuple):
    """What `experts` was asked for."""

    prefix: str
    activation: str | None = None
    limit: float | None = None
    shared: str | None = None
    fusion: str = "auto"


class Prepared(Mapping[str, PreparedLinear]):
    """The layers of a prepared checkpoint, for one rank.

    As a mapping it has every MXFP4 matrix, those of single experts too; `prepared[name]` reads a
    layer once and keeps it. Banks of expert matrices are reached through `experts(prefix)`.
    `load_all` reads everything at once.

    names             the mapping's keys, in the manifest's order
    expert_prefixes   what `experts` takes
    """

    def __init__(
        self,
        reader: Reader,
        cutter: Cutter,
        device: torch.device,
        backend: str | None,
        spread: Spread = ALONE,
    ) -> None:
        opened = reader.opened
        self._spread = spread
        self._opened, self._reader = opened, reader
        self._cutter, self._device, self._backend = cutter, device, backend
        self._groups = group_experts(opened.manifest.layers)
        self._copied = frozenset(tensor.name for tensor in opened.manifest.tensors)
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, PreparedLinear] = {}
        self._experts: dict[_Asked, PreparedExperts] = {}
        self.names: tuple[str, ...] = tuple(
            record.name for record in opened.manifest.layers if record.experts is None
        )
        self.expert_prefixes: tuple[str, ...] = tuple(self._groups)

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint says about itself."""
        return self._opened.manifest

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the prepared checkpoint."""
        return self._opened.config

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self._opened.root

    @property
    def device(self) -> torch.device:
        """Where layers are put."""
        return self._device

    @property
    def tp_rank(self) -> int:
        """The rank whose pieces these are."""
        return self._cutter.tp_rank

    @property
    def tp_size(self) -> int:
        """How many ranks share each layer."""
        return self._cutter.tp_size

    @property
    def ep_rank(self) -> int:
        """The rank whose experts these are, where whole ones are spread."""
        return self._spread.rank

    @property
    def ep_size(self) -> int:
        """How many ranks whole experts are spread over; 1 where each is cut instead."""
        return self._spread.size

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from files so far."""
        return self._reader.nbytes

    def __repr__(self) -> str:
        rank = f", rank {self.tp_rank} of {self.tp_size}" if self.tp_size > 1 else ""
        if self.ep_size > 1:
            rank += f", experts of rank {self.ep_rank} of {self.ep_size}"
        return f"<Prepared {self.path}: {len(self)} layers on {self.device}{rank}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        record = self._opened.layers.get(name) if isinstance(name, str) else None
        return record is not None and record.experts is None

    def __getitem__(self, name: str) -> PreparedLinear:
        layer = self._linears.get(name)
        if layer is None:
            layer = self._linears[name] = self.read(name)
        return layer

    def read(self, name: str) -> PreparedLinear:
        """As `prepared[name]`, but read anew and not kept.

        Raises KeyError for a name that is no MXFP4 matrix, CannotShard for one that cannot be cut.
        """
        record = self._opened.layers.get(name)
        if record is None:
            raise KeyError(f"{name}: no MXFP4 layer of this checkpoint")
        if record.experts is not None:
            prefix = name.rpartition(".")[0]
            raise KeyError(f"{name}: a bank of {record.experts} matrices, use experts({prefix!r})")
        with self._assembling() as assembler:
            return self._linear_by(assembler, record)

    def experts(
        self,
        prefix: str,
        activation: str | None = None,
        limit: float | None = None,
        *,
        shared: str | None = None,
        fusion: str = "auto",
    ) -> PreparedExperts:
        """The experts below `prefix`, kept for the next time.

        activation, limit   a name of GATES and a clamp; by default what config.json says
        shared    module of the expert that every token visits; "auto": the one beside `prefix`, if
                  there is one; None: the routed experts alone
        fusion    "auto": the shared expert is one more routed expert (or several, if it is as wide)
                  where its quantization, hidden size and width allow that, else it stands apart;
                  "fused": that, or an error that says why not; "separate": always apart

        Either way the result is the routed sum plus the shared expert, times sigmoid of its gate
        where there is a `shared_expert_gate`, and the results of all ranks add up.

        Raises KeyError where there are none, InvalidCheckpoint where some are missing, Unsupported
        where they differ, CannotShard where they cannot be cut.
        """
        asked = _Asked(prefix, activation, limit, shared, fusion)
        experts = self._experts.get(asked)
        if experts is None:
            experts = self._experts[asked] = self.read_experts(
                prefix, activation, limit, shared=shared, fusion=fusion
            )
        return experts

    def read_experts(
        self,
        prefix: str,
        activation: str | None = None,
        limit: float | None = None,
        *,
        shared: str | None = None,
        fusion: str = "auto",
    ) -> PreparedExperts:
        """As `experts`, but read anew and not kept."""
        asked = _Asked(prefix, activation, limit, shared, fusion)
        with self._assembling() as assembler:
            return self._experts_by(assembler, asked)

    def _linear_by(self, assembler: Assembler, record: LayerRecord) -> PreparedLinear:
        if record.kind == "expert" and self.ep_size > 1:
            return assembler.whole().linear(record)
        return assembler.linear(record)

    def _experts_by(self, assembler: Assembler, asked: _Asked) -> PreparedExperts:
        prefix, activation, limit, shared, fusion = asked
        if prefix not in self._groups:
            raise KeyError(f"{prefix}: no MXFP4 experts below it")
        if activation is None:
            activation, named = activation_of_config(self.config, prefix)
            limit = named if limit is None else limit
        records = self._groups[prefix]
        parts = {record.name: self._cutter.part(record) for record in records}
        layer = MoeLayer(
            prefix,
            gather(prefix, records, parts),
            activation,
            limit,
            self._shared_parts(prefix, shared),
            fusion,
        )
        return assemble(assembler, layer, self._spread, self._opened.layers)

    def _shared_parts(self, prefix: str, shared: str | None) -> SharedParts | None:
        """The shared expert of that name, or beside `prefix`. Raises KeyError for none of it."""
        if shared is None:
            return None
        layers, places = self._opened.layers, self._opened.places
        name = beside(prefix, self._shared) if shared == "auto" else shared
        if name is None:
            return None
        below = self._shared.get(name)
        if below is None:  # a name that the table does not know as one of a shared expert
            below = [key for key in (*layers, *self._copied) if key.startswith(f"{name}.")]
        if not below:
            raise KeyError(f"{name}: no shared expert of that name")
        names = [*below, gate_of(name), f"{gate_of(name)}.weight"]
        mine = {key: layers[key] for key in names if key in layers}
        copied = {key: places[key].entry.dtype for key in names if key in self._copied}
        parts = {key: self._cutter.part(record) for key, record in mine.items()}
        return shared_parts(name, mine, copied, parts)

    @cached_property
    def _shared(self) -> dict[str, list[str]]:
        return group_shared((*self._opened.layers, *self._copied))

    def tensor(self, name: str) -> Tensor:
        """A tensor that was copied as it is (a norm, an embedding, a router), whole.

        Raises KeyError for any other name.
        """
        if name not in self._copied:
            raise KeyError(f"{name}: no copied tensor of this checkpoint")
        kept = self._tensors.get(name)
        if kept is not None:
            return kept
        with self._assembling() as assembler:
            return assembler.batch.later(name)

    def load_all(self, progress: Progress | None = None, *, tensors: bool = True) -> None:
        """Reads and keeps every layer, all experts and, unless `tensors` is False, every copied
        tensor that no layer holds as its bias or input scale.

        progress   called with the bytes done so far and those there are to do

        One pass over the files, in their order, several reads at a time; on a GPU they go on while
        it fetches what was read. Nothing is kept if any of it fails. Matrices of single experts are
        kept in their banks only.

        Raises what `prepared[name]`, `experts` and `tensor` raise.
        """
        inside = {record.name for group in self._groups.values() for record in group}
        names = [name for name in self.names if name not in inside | self._linears.keys()]
        asked = [_Asked(name) for name in self._groups if _Asked(name) not in self._experts]
        layers = self._opened.manifest.layers
        held = {name for record in layers for name in (record.bias, record.input_scale)}
        copied = self._copied - held - self._tensors.keys() if tensors else ()
        with self._assembling(progress) as assembler:
            linears = {
                name: self._linear_by(assembler, self._opened.layers[name]) for name in names
            }
            experts = {item: self._experts_by(assembler, item) for item in asked}
            others = {name: assembler.batch.later(name) for name in copied}
        self._linears |= linears
        self._experts |= experts
        self._tensors |= others

    def materialize(
        self,
        module: torch.nn.Module,
        device: str | torch.device | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Reads the layers inside `module` that are on the meta device, as `load_all` reads, and
        puts them on a real one; the backends are chosen anew.

        device   by default where this checkpoint's layers are put

        Raises UsageError for a layer that this checkpoint does not have for this rank.
        """
        target = self._device if device is None else _device(device)
        if target.type == "meta":
            what = "holds no bytes to read into"
            raise UsageError("device", what, found="meta", expected="cpu or cuda")
        inside = {  # a shared expert is read with the routed ones that it stands beside
            part
            for layer in module.modules()
            if isinstance(layer, PreparedExperts)
            for part in layer.modules()
            if part is not layer
        }
        empty = [
            layer
            for layer in module.modules()
            if isinstance(layer, PreparedLinear | PreparedExperts)
            and layer not in inside
            and any(buffer.is_meta for buffer in layer.buffers())
        ]
        with self._assembling(progress, target) as assembler:
            pairs = [(layer, self._again(assembler, layer)) for layer in empty]
        for layer, filled in pairs:
            for mine, theirs in zip(layer.modules(), filled.modules(), strict=True):
                if isinstance(theirs, PreparedLinear | PreparedExperts):
                    mine.backend = theirs.backend  # type: ignore[assignment]
                for name, buffer in theirs.named_buffers(recurse=False):
                    setattr(mine, name, buffer)

    def _again(
        self, assembler: Assembler, layer: PreparedLinear | PreparedExperts
    ) -> PreparedLinear | PreparedExperts:
        """The same layer from the files."""
        again: PreparedLinear | PreparedExperts | None = None
        if isinstance(layer, PreparedExperts):
            if layer.name in self._groups:
                fusion = "fused" if layer.shared_slots else "separate"
                named = layer.activation, layer.limit, layer.shared_name
                again = self._experts_by(assembler, _Asked(layer.name, *named, fusion))
        elif layer.name in self:
            again = self._linear_by(assembler, self._opened.layers[layer.name])
        if again is None or _shapes(again) != _shapes(layer):
            raise UsageError(
                layer.name,
                "not a layer of this checkpoint for this rank",
                found=_shapes(layer),
                expected="no such layer" if again is None else _shapes(again),
            )
        return again

    @contextmanager
    def _assembling(
        self, progress: Progress | None = None, device: torch.device | None = None
    ) -> Iterator[Assembler]:
        """An assembler; its modules have their bytes when the context is left."""
        target = self._device if device is None else device
        with Batch(self._reader, target) as batch:
            yield Assembler(batch, self._cutter, target, self._backend)
            batch.run(progress)


def _shapes(layer: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in layer.named_buffers()}
