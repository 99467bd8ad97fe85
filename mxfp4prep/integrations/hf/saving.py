"""save_pretrained of a prepared model: the checkpoint it came from, once more, and only that.

A prepared checkpoint is the proof that nothing was lost of its source, so what is saved is that
checkpoint, byte for byte, manifest and digests included: `mxfp4prep verify` and `restore` work on
the copy. A model whose tensors were changed since is refused: it is no longer what the manifest
says.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxfp4prep import io
from mxfp4prep.errors import InvalidCheckpoint, UsageError
from mxfp4prep.integrations.hf.changes import check_unchanged
from mxfp4prep.marks import MANIFEST_NAME, SUMS_NAME
from mxfp4prep.prepared import open_prepared

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from mxfp4prep.runtime.opening import Opened

_SET_BY_TRANSFORMERS = frozenset(
    {"dtype", "architectures", "transformers_version", "_from_model_config"}
)
"""Settings that transformers itself changes as it saves and generates."""
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names that transformers saves and looks for."""
PIECE_NBYTES = 1 << 24
"""Bytes that are copied at a time."""


def save(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    push_to_hub: bool = False,
    *,
    opened: Opened,
    settings: Mapping[str, dict[str, Any]],
    **rest: Any,  # noqa: ANN401 - what else transformers' own takes
) -> None:
    """Writes the model's checkpoint into `save_directory`, which may exist.

    opened     the checkpoint
    settings   `settings_of` the model when it was loaded: a change of them is not saved, and warned
               of

    Adapters on the model are saved by transformers itself.

    Raises UsageError for a state_dict, an upload, or files of other names or another size than the
    checkpoint's, and where tensors are not the checkpoint's any more; IOFailed.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        type(model).save_pretrained(
            model, save_directory, is_main_process, state_dict, push_to_hub, **rest
        )
        return
    _check_arguments(state_dict, push_to_hub, rest)
    _warn_of_sizes(opened, rest.get("max_shard_size"))
    check_unchanged(model, opened)
    for name in _changed_settings(model, settings):
        warnings.warn(
            f"{name} was changed since the model was loaded; what is saved is the checkpoint's",
            UserWarning,
            stacklevel=2,
        )
    if is_main_process and _is_first():
        copy_checkpoint(opened.root, Path(save_directory))


def push(model: PreTrainedModel, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401
    """Instead of push_to_hub: raises UsageError, but for adapters, before there is a repository."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return type(model).push_to_hub(model, *arguments, **more)
    raise _no_upload("push_to_hub")


def _no_upload(where: str) -> UsageError:
    hint = "save_pretrained(DIR), then `hf upload REPO DIR`"
    return UsageError(where, "transformers would not upload the checkpoint as it is", hint=hint)


def _check_arguments(state_dict: object, push_to_hub: bool, rest: Mapping[str, Any]) -> None:
    if state_dict is not None:
        what = "a state_dict of your own cannot be saved as a prepared checkpoint"
        raise UsageError("save_pretrained", what, hint="leave it out")
    if push_to_hub:
        raise _no_upload("save_pretrained")
    for name, wanted in (("variant", None), ("distributed_checkpoint", False)):
        found = rest.get(name, wanted)
        if found != wanted:
            what = "what is saved is the checkpoint, under its own names"
            raise UsageError(f"save_pretrained: {name}", what, found=found, hint="leave it out")


def _warn_of_sizes(opened: Opened, limit: int | str | None) -> None:
    """One warning where shards, which stay as they are, are larger than was asked for."""
    if limit is None:
        return
    from transformers.utils.hub import convert_file_size_to_int

    nbytes: int = convert_file_size_to_int(limit)
    large = [r.name for r in opened.manifest.files if r.role == "shard" and r.nbytes > nbytes]
    if large:
        warnings.warn(
            f"max_shard_size {limit} has no effect: shards stay as they are, and {large[0]} is "
            "larger",
            UserWarning,
            stacklevel=3,
        )


def settings_of(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """What generation_config.json and config.json say, as the model has it now."""
    generation = getattr(model, "generation_config", None)
    found = {"config": copy.deepcopy(model.config.to_dict())}
    if generation is not None:
        found["generation_config"] = copy.deepcopy(generation.to_dict())
    return found


def _changed_settings(
    model: PreTrainedModel, before: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    for name, after in settings_of(model).items():
        keys = (before.get(name, {}).keys() | after.keys()) - _SET_BY_TRANSFORMERS
        if any(before.get(name, {}).get(key) != after.get(key) for key in keys):
            yield name


def _is_first() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def copy_checkpoint(root: Path, out: Path) -> None:
    """The prepared checkpoint at `root`, byte for byte, in `out`; the manifest last."""
    if out.exists() and not out.is_dir():
        raise UsageError(out, "is a file", expected="a directory, or nothing")
    prepared = open_prepared(root)
    names = [record.name for record in prepared.manifest.files]
    names += [name for name in (SUMS_NAME, MANIFEST_NAME) if (root / name).is_file()]
    lacking = [name for name in names if not (root / name).is_file()]
    if lacking:
        raise InvalidCheckpoint(
            root,
            "not the whole checkpoint",
            found=f"no {lacking[0]}" + (f" and {len(lacking) - 1} more" if lacking[1:] else ""),
            hint="a model loaded from the Hub has only what transformers fetched: "
            "`hf download REPO --local-dir DIR` gets the rest",
        )
    if out.exists() and out.samefile(root):
        return
    out.mkdir(parents=True, exist_ok=True)
    _make_way(out, names)
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        _copy_file(root / name, out / name)
    io.fsync_dir(out)


def _make_way(out: Path, names: Collection[str]) -> None:
    """Removes what an older save left: its manifest, so that a save that is interrupted is not
    taken for whole, and weights under names that transformers would prefer to ours."""
    stale = [path for path in out.iterdir() if _WEIGHTS.fullmatch(path.name)]
    for path in (out / MANIFEST_NAME, *stale):
        if path.name not in names or path.name == MANIFEST_NAME:
            path.unlink(missing_ok=True)


def _copy_file(source: Path, target: Path) -> None:
    """Beside its place first, then there: a reader finds the old file or the whole new one."""
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        io.unlink(partial)
    reading, writing = io.open_read(source), io.create(partial)
    try:
        size = io.file_size(reading, source)
        buffer = memoryview(bytearray(min(size, PIECE_NBYTES)))
        for start in range(0, size, PIECE_NBYTES):
            view = buffer[: min(PIECE_NBYTES, size - start)]
            io.pread_into(reading, view, start, source)
            io.write_all(writing, view, target)
        io.fsync(writing, target)
    finally:
        io.close(reading)
        io.close(writing)
    io.rename(partial, target)
