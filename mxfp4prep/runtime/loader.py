"""load(): a prepared checkpoint opened and checked, for one rank on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mxfp4prep.errors import UsageError
from mxfp4prep.parallel import Topology
from mxfp4prep.runtime.backends import choose_backend
from mxfp4prep.runtime.cutting import Cutter
from mxfp4prep.runtime.devices import loading_device
from mxfp4prep.runtime.opening import open_for_serving
from mxfp4prep.runtime.prepared import Prepared, check_flag
from mxfp4prep.runtime.ranks import Ranks
from mxfp4prep.runtime.reading import Progress, Reader
from mxfp4prep.runtime.spreading import Spread

if TYPE_CHECKING:
    import torch

__all__ = ["Prepared", "load"]


def load(
    path: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    tp_rank: int | None = None,
    tp_size: int = 1,
    backend: str | None = None,
    verify: bool = False,
    *,
    ep_rank: int | None = None,
    ep_size: int = 1,
    lazy: bool = True,
    progress: Progress | None = None,
) -> Prepared:
    """The prepared checkpoint at `path`, cut for one rank. Reads manifest and headers; a layer's
    bytes are read when it is asked for.

    device    where layers live and run, a GPU's number too; "meta" reads no bytes, see
              `Prepared.materialize`
    tp_rank, tp_size   which piece of each layer, as engines cut them; the rank must be named where
              there are several
    backend   a name from `backends()`; None takes the best that can run each layer there
    verify    read tensors whole and compare each with its digest before it is used; config.json and
              the digests with theirs now
    ep_rank, ep_size   which block of whole experts, where those are spread over ranks and not cut;
              what `--ep` means in audit and convert is ep_rank = tp_rank, ep_size = tp_size
    lazy      False reads everything now, as `Prepared.load_all` does, and reports to `progress`

    Raises InvalidManifest, InvalidCheckpoint or Unsupported where anything is missing, unknown or
    contradictory, BackendUnavailable for a backend or device that is not here, UsageError for a
    wrong argument.
    """
    check_flag("verify", verify)
    check_flag("lazy", lazy)
    if lazy and progress is not None:
        raise UsageError("progress", "reports on a whole model being read", hint="add lazy=False")
    ranks = Ranks.make(tp_rank, tp_size, ep_rank, ep_size)
    spread = Spread.make(ranks.ep_rank, ranks.ep_size, ranks.tp_rank, ranks.tp_size)
    opened = open_for_serving(_path(path), verify=verify)
    target = loading_device(device)
    choose_backend(target.type, backend)
    modules = [record.name for record in opened.manifest.layers]
    copied = (tensor.name for tensor in opened.manifest.tensors)
    modules += [name.removesuffix(".weight") for name in copied if name.endswith(".weight")]
    topology = Topology.from_config(opened.config)
    rules = opened.manifest.target.parallel
    cutter = Cutter.make(dict.fromkeys(modules), topology, ranks.tp_rank, ranks.tp_size, rules)
    prepared = Prepared(Reader(opened), cutter, target, backend, spread)
    if not lazy:
        prepared.load_all(progress)
    return prepared


def _path(path: object) -> Path:
    try:
        return Path(os.fsdecode(path))  # type: ignore[arg-type]
    except TypeError:
        hint = "the directory that `mxfp4prep convert` wrote"
        raise UsageError(
            "path", "not a path", found=repr(path), expected="a str or os.PathLike", hint=hint
        ) from None
