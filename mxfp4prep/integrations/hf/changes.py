"""Whether a model's tensors are still those of the checkpoint that it was loaded from."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import torch
import xxhash

from mxfp4prep.errors import UsageError
from mxfp4prep.integrations.hf.experts import StoredExperts
from mxfp4prep.integrations.hf.linear import StoredLinear
from mxfp4prep.prepared import open_prepared, read_digests
from mxfp4prep.runtime import memory
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.reading import Batch, Reader

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from mxfp4prep.runtime.opening import Opened


def check_unchanged(model: PreTrainedModel, opened: Opened) -> None:
    """Raises UsageError where a tensor has other values than the checkpoint's, or where there are
    other tensors.

    A cast to another dtype is no change: what is saved has the checkpoint's dtype. Tensors that
    accelerate has put on disk are not looked at, nor MXFP4 bytes that ranks share or that were
    repacked while loading.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    stored = {record.name for record in opened.manifest.tensors}
    pairs = read_digests(open_prepared(opened.root))
    digests = {name: digest for name, (_, digest) in pairs.items()}
    _check_bytes(model, digests)
    ours = set(_ours(model))
    state = {
        name: _whole(tensor) for name, tensor in model.state_dict().items() if name not in ours
    }
    state = remove_tied_weights_from_state_dict(state, model)
    reader = Reader(opened)
    with Batch(reader, torch.device("cpu")) as batch:
        for name, tensor in revert_weight_conversion(model, state).items():
            key = _stored_name(name, stored, model.base_model_prefix)
            if key is None:
                _changed(name, "is not in the checkpoint")
            elif not tensor.is_meta and not _is_same(batch, key, tensor, digests.get(key)):
                _changed(name, "has other values than in the checkpoint")


def _check_bytes(model: PreTrainedModel, digests: Mapping[str, str]) -> None:
    for module in model.modules():
        if isinstance(module, StoredLinear | StoredExperts):
            for name, tensor in _stored_bytes(module):
                if not tensor.is_meta and _digest(tensor) != digests.get(name):
                    _changed(name, "has other bytes than in the checkpoint")


def _stored_bytes(module: StoredLinear | StoredExperts) -> Iterator[tuple[str, Tensor]]:
    """(the checkpoint's name, bytes) of what a module holds as it is stored."""
    if isinstance(module, StoredExperts):
        for param, bank in module.banks.items():
            pair = getattr(module, param), getattr(module, f"{param}_scale")
            is_whole = pair[0].shape == bank.shape("weight") and module.paths[param] == bank.path
            if is_whole and not hasattr(pair[0], "full_tensor"):
                yield from bank.take_apart("weight", pair[0])
                yield from bank.take_apart("scale", pair[1])
    elif module.path == path_name(module.record):
        record = module.record
        pairs = (record.weight, module.weight), (record.scale, module.weight_scale)
        if not any(hasattr(tensor, "full_tensor") for _, tensor in pairs):
            yield from ((stored.tensor, tensor) for stored, tensor in pairs)


def _whole(tensor: Tensor) -> Tensor:
    """All ranks' pieces of a DTensor, joined; every rank has to ask."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach()
    from torch.distributed.tensor import DTensor

    piece = cast("DTensor", tensor.detach())
    if piece.dtype.itemsize > 1:
        return piece.full_tensor()
    local = piece.to_local().view(torch.uint8)  # gloo moves no FP8
    mesh, placements = piece.device_mesh, piece.placements
    shape, stride = piece.shape, piece.stride()
    bytes_of = DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    return bytes_of.full_tensor().view(piece.dtype)


def _ours(model: PreTrainedModel) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, StoredExperts):
            for name, _ in (*module.named_parameters(), *module.named_buffers()):
                yield f"{path}.{name}"
        elif isinstance(module, StoredLinear):
            yield from (f"{path}.weight", f"{path}.weight_scale")


def _stored_name(name: str, stored: Collection[str], base: str) -> str | None:
    """The checkpoint's name of a tensor that the model calls `name`."""
    older = re.sub(r"(in|out)put_scale$", r"\1put_quantizer.scale", name)  # Quark 0.11's
    candidates = (name, f"{base}.{name}", older, f"{base}.{older}")
    return next((key for key in candidates if key in stored), None)


def _is_same(batch: Batch, name: str, tensor: Tensor, digest: str | None) -> bool:
    here = tensor.cpu().contiguous()
    if _digest(here) == digest:
        return True
    before = batch.now(name)
    return before.shape == here.shape and torch.equal(before.to(here.dtype), here)


def _digest(tensor: Tensor) -> str:
    bytes_of = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(memory.view(bytes_of))


def _changed(name: str, what: str) -> None:
    raise UsageError(
        name,
        f"{what}: a prepared checkpoint is its source's, and cannot be saved with changes",
        hint="save what you changed with safetensors.torch.save_file",
    )
