"""Loads a prepared checkpoint for one rank: layers on demand, cut and ready to run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mxfp4prep.errors import BackendUnavailable, UsageError
from mxfp4prep.manifest import Manifest
from mxfp4prep.parallel import Topology
from mxfp4prep.runtime.assembling import Assembler
from mxfp4prep.runtime.backends import choose_backend
from mxfp4prep.runtime.cutting import Cutter
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.gathering import gather, group_experts
from mxfp4prep.runtime.gating import activation_of_config
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.opening import Opened, open_for_serving
from mxfp4prep.runtime.reading import Reader

if TYPE_CHECKING:
    from torch import Tensor


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
    tp_size: int = 1,
    backend: str | None = None,
    verify: bool = False,
) -> Prepared:
    """The prepared checkpoint at `path`, cut for one rank. Reads manifest and headers; a layer's
    bytes are read when it is asked for.

    device    where layers live and run
    tp_rank, tp_size   which piece of each layer, as engines cut them
    backend   a name from `backends()`; None takes the best that can run each layer there
    verify    read tensors whole and compare each with its digest before it is used

    Raises InvalidManifest, InvalidCheckpoint or Unsupported where anything is missing, unknown or
    contradictory, BackendUnavailable for a backend that cannot run, UsageError for a wrong rank.
    """
    opened = open_for_serving(Path(path), verify=verify)
    target = _device(device)
    choose_backend(target.type, backend)
    modules = [record.name for record in opened.manifest.layers]
    copied = (tensor.name for tensor in opened.manifest.tensors)
    modules += [name.removesuffix(".weight") for name in copied if name.endswith(".weight")]
    topology = Topology.from_config(opened.config)
    rules = opened.manifest.target.parallel
    cutter = Cutter.make(dict.fromkeys(modules), topology, tp_rank, tp_size, rules)
    return Prepared(opened, Assembler(Reader(opened), cutter, target, backend))


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError:
        raise UsageError(
            "device", "unknown", found=repr(device), expected="'cpu', 'cuda' or 'cuda:N'"
        ) from None
    if target.type not in ("cpu", "cuda"):
        raise UsageError("device", "not supported", found=target.type, expected="cpu or cuda")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"device {device}", "torch finds no GPU here", hint="load with device='cpu'"
        )
    return target


class Prepared(Mapping[str, PreparedLinear]):
    """The layers of a prepared checkpoint, for one rank.

    As a mapping it has every MXFP4 matrix, those of single experts too; `prepared[name]` reads a
    layer once and keeps it. Banks of expert matrices are reached through `experts(prefix)`.

    names             the mapping's keys, in the manifest's order
    expert_prefixes   what `experts` takes
    """

    def __init__(self, opened: Opened, assembler: Assembler) -> None:
        self._opened = opened
        self._assembler = assembler
        self._groups = group_experts(opened.manifest.layers)
        self._copied = frozenset(tensor.name for tensor in opened.manifest.tensors)
        self._linears: dict[str, PreparedLinear] = {}
        self._experts: dict[tuple[str, str | None, float | None], PreparedExperts] = {}
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
        return self._assembler.device

    @property
    def tp_rank(self) -> int:
        """The rank whose pieces these are."""
        return self._assembler.cutter.tp_rank

    @property
    def tp_size(self) -> int:
        """How many ranks share each layer."""
        return self._assembler.cutter.tp_size

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from files so far."""
        return self._assembler.reader.nbytes

    def __repr__(self) -> str:
        rank = f", rank {self.tp_rank} of {self.tp_size}" if self.tp_size > 1 else ""
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
        return self._assembler.linear(record)

    def experts(
        self, prefix: str, activation: str | None = None, limit: float | None = None
    ) -> PreparedExperts:
        """The routed experts below `prefix`, kept for the next time.

        activation, limit   a name of GATES and a clamp; by default what config.json says

        Raises KeyError where there are none, InvalidCheckpoint where some are missing, Unsupported
        where they differ, CannotShard where they cannot be cut.
        """
        key = prefix, activation, limit
        experts = self._experts.get(key)
        if experts is None:
            experts = self._experts[key] = self.read_experts(prefix, activation, limit)
        return experts

    def read_experts(
        self, prefix: str, activation: str | None = None, limit: float | None = None
    ) -> PreparedExperts:
        """As `experts`, but read anew and not kept."""
        if prefix not in self._groups:
            raise KeyError(f"{prefix}: no MXFP4 experts below it")
        if activation is None:
            activation, named = activation_of_config(self.config, prefix)
            limit = named if limit is None else limit
        records = self._groups[prefix]
        parts = {record.name: self._assembler.cutter.part(record) for record in records}
        gathered = gather(prefix, records, parts)
        return self._assembler.experts(prefix, gathered, activation, limit)

    def tensor(self, name: str) -> Tensor:
        """A tensor that was copied as it is (a norm, an embedding, a router), whole.

        Raises KeyError for any other name.
        """
        if name not in self._copied:
            raise KeyError(f"{name}: no copied tensor of this checkpoint")
        return self._assembler.reader.tensor(name).to(self.device)
