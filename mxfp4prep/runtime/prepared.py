"""Prepared: the layers of a prepared checkpoint for one rank, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from torch import nn

from mxfp4prep.errors import UsageError, naming
from mxfp4prep.manifest import Manifest
from mxfp4prep.prepared import VERIFY_HINT
from mxfp4prep.runtime.asked import Asked
from mxfp4prep.runtime.assembling import Assembler
from mxfp4prep.runtime.catalogue import Catalogue
from mxfp4prep.runtime.devices import loading_device
from mxfp4prep.runtime.experts import PreparedExperts
from mxfp4prep.runtime.filling import empty_layers, fill, read_again
from mxfp4prep.runtime.kept import Kept
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.reading import Batch, Progress, Reader
from mxfp4prep.runtime.spreading import ALONE, Spread

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mxfp4prep.runtime.cutting import Cutter

Default = TypeVar("Default")


class Prepared(Mapping[str, PreparedLinear]):
    """The layers of a prepared checkpoint, for one rank.

    As a mapping it has every MXFP4 matrix, those of single experts too; `prepared[name]` reads a
    layer once and keeps it, whichever thread asks first. Banks of expert matrices are reached
    through `experts(prefix)`. `load_all` reads everything at once.

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
        self._opened, self._reader, self._spread = reader.opened, reader, spread
        self._cutter, self._device, self._backend = cutter, device, backend
        self._catalogue = Catalogue(reader.opened, cutter, spread)
        self._kept = Kept()
        self._reading = RLock()  # one that a progress function may pass again
        self.names: tuple[str, ...] = self._catalogue.names
        self.expert_prefixes: tuple[str, ...] = tuple(self._catalogue.groups)

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

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "Prepared",
            "an opened checkpoint cannot be pickled or copied",
            hint="load it again where it is wanted, or copy its modules: they can be",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._catalogue

    @overload
    def get(self, name: str, /) -> PreparedLinear | None: ...

    @overload
    def get(self, name: str, /, default: PreparedLinear | Default) -> PreparedLinear | Default: ...

    def get(self, name: str, /, default: object = None) -> object:
        """As a mapping's: `prepared[name]`, or `default` where it is no MXFP4 matrix."""
        if name not in self:
            return default
        return self[name]

    def __getitem__(self, name: str) -> PreparedLinear:
        """The matrix of that name, or the rank's piece of it, kept for the next time.

        A single expert's is read into memory of its own, although `experts` or `load_all` may have
        it in a bank: there its rows stand in the bank's order of bytes, side by side with others.

        Raises KeyError for a name that is no MXFP4 matrix, CannotShard for one that cannot be cut.
        """
        record = self._catalogue.record(name)
        kept = self._kept.linears
        if name not in kept:
            with self._reading:
                if name not in kept:  # another thread may have read it meanwhile
                    with self._assembling(kept=True) as assembler:
                        layer = self._catalogue.linear(assembler, record)
                    kept.setdefault(name, layer)
        return kept[name]

    def read(self, name: str) -> PreparedLinear:
        """As `prepared[name]`, but read anew and not kept.

        Raises KeyError for a name that is no MXFP4 matrix, CannotShard for one that cannot be cut.
        """
        record = self._catalogue.record(name)
        with self._assembling() as assembler:
            return self._catalogue.linear(assembler, record)

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

        Asked for in another way, experts are another module on the same banks. Where those have no
        room for a fused shared expert they are copied once, and the smaller are given up; a module
        on them that the caller still has keeps them alive.

        Raises KeyError where there are none, InvalidCheckpoint where some are missing, Unsupported
        where they differ, CannotShard where they cannot be cut, UsageError for an odd argument.
        """
        asked = Asked.make(prefix, activation, limit, shared, fusion)
        experts = self._kept.experts.get(asked)
        if experts is None:
            with self._reading:
                experts = self._kept.experts.get(asked)
                if experts is None:
                    with self._assembling(kept=True) as assembler:
                        experts = self._catalogue.experts(assembler, asked)
                    self._kept.add({}, {asked: experts}, {})
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
        asked = Asked.make(prefix, activation, limit, shared, fusion)
        with self._assembling() as assembler:
            return self._catalogue.experts(assembler, asked)

    def tensor(self, name: str) -> Tensor:
        """A tensor that was copied as it is (a norm, an embedding, a router), whole.

        Raises KeyError for any other name.
        """
        self._catalogue.check_copied(name)
        kept = self._kept.tensors.get(name)
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
        kept in their banks only, and experts that are kept already are not read again, however they
        were asked for: ask for those with a shared expert in their banks before.

        A single expert asked for by its own name afterwards is read into memory of its own; to walk
        over every name of a model that is loaded costs its experts' memory again.

        Raises what `prepared[name]`, `experts` and `tensor` raise.
        """
        _check_progress(progress)
        check_flag("tensors", tensors)
        with self._reading:
            self._load_all(progress, tensors=tensors)

    def _load_all(self, progress: Progress | None, *, tensors: bool) -> None:
        catalogue, kept = self._catalogue, self._kept
        names = [name for name in catalogue.alone() if name not in kept.linears]
        asked = [Asked(prefix) for prefix in catalogue.groups if prefix not in kept.prefixes]
        copied = catalogue.loose() - kept.tensors.keys() if tensors else set()
        with self._assembling(progress, kept=True) as assembler:
            linears = {name: catalogue.linear(assembler, catalogue.record(name)) for name in names}
            experts = {item: catalogue.experts(assembler, item) for item in asked}
            others = {name: assembler.batch.later(name) for name in copied}
        kept.add(linears, experts, others)

    def materialize(
        self,
        module: nn.Module,
        device: str | int | torch.device | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Reads the layers inside `module` that are on the meta device, as `load_all` reads, and
        puts them on a real one; the backends are chosen anew.

        device   by default where this checkpoint's layers are put

        Raises UsageError for a layer that this checkpoint does not have for this rank: one of
        another rank, or whose bytes are in another order or are meant for other inputs.
        """
        _check_progress(progress)
        if not isinstance(module, nn.Module):
            found, expected = type(module).__name__, "a torch.nn.Module"
            hint = "the model whose layers were loaded with device='meta'"
            raise UsageError("module", "not a module", found=found, expected=expected, hint=hint)
        target = self._device if device is None else loading_device(device)
        if target.type == "meta":
            what, hint = "holds no bytes to read into", "name one: materialize(module, 'cpu')"
            raise UsageError("device", what, found="meta", expected="cpu or cuda", hint=hint)
        with self._assembling(progress, target) as assembler:
            pairs = [
                (layer, read_again(self._catalogue, assembler, layer))
                for layer in empty_layers(module)
            ]
        fill(pairs)

    @contextmanager
    def _assembling(
        self,
        progress: Callable[[int, int], None] | None = None,
        device: torch.device | None = None,
        *,
        kept: bool = False,
    ) -> Iterator[Assembler]:
        """An assembler; its modules have their bytes when the context is left.

        kept   whether it may use bytes of what is kept
        """
        target = self._device if device is None else device
        with naming(self._opened.root, VERIFY_HINT), Batch(self._reader, target) as batch:
            yield Assembler(
                batch, self._cutter, target, self._backend, self._kept if kept else None
            )
            batch.run(progress)


def check_flag(name: str, value: object) -> None:
    """Raises UsageError for what is neither True nor False: "no" would count as True."""
    if not isinstance(value, bool):
        found, hint = repr(value), f"for example {name}=True"
        raise UsageError(name, "not a flag", found=found, expected="True or False", hint=hint)


def _check_progress(progress: object) -> None:
    if progress is not None and not callable(progress):
        expected = "a function of the bytes done and of those there are to do"
        hint = "for example progress=lambda done, total: print(done, total)"
        raise UsageError("progress", "not callable", found=progress, expected=expected, hint=hint)
