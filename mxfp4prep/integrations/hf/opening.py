"""The prepared checkpoint behind a model that transformers is about to load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest
from mxfp4prep.marks import DIGESTS_NAME, MANIFEST_NAME, SUMS_NAME
from mxfp4prep.prepared import CONVERT_HINT
from mxfp4prep.runtime.opening import Opened, open_for_serving
from mxfp4prep.runtime.reading import Batch, Reader

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OWN_FILES = (DIGESTS_NAME, SUMS_NAME, MANIFEST_NAME)
"""What transformers does not fetch from the Hub by itself."""


def open_checkpoint_of(
    config: PretrainedConfig, files: Sequence[str] | None, *, verify: bool
) -> Opened:
    """The prepared checkpoint whose shards transformers is about to read.

    files    their paths, all in one directory

    Raises InvalidManifest, InvalidCheckpoint or Unsupported where the directory is not whole, or
    with `verify` where a tensor is not the one whose digest was written.
    """
    if not files:
        what = "transformers names no file to load the weights from"
        raise InvalidCheckpoint(config.name_or_path, what, hint="from_pretrained(PREPARED_DIR)")
    root = Path(files[0]).parent
    if not (root / MANIFEST_NAME).is_file():
        _fetch(root)
    opened = open_for_serving(root, verify=verify)
    shards = {record.name for record in opened.manifest.files if record.role == "shard"}
    asked = {Path(file).name for file in files}
    if asked != shards:
        raise InvalidManifest(
            MANIFEST_NAME,
            "its shards are not those that transformers reads",
            found=", ".join(sorted(shards)),
            expected=", ".join(sorted(asked)),
            hint=CONVERT_HINT,
        )
    if verify:
        read_all(opened)
    return opened


def _fetch(root: Path) -> None:
    """Gets the manifest and its companions beside shards that came from the Hub: `root` is then
    models--ORG--NAME/snapshots/COMMIT[/SUBFOLDER] of its cache. Anywhere else it does nothing."""
    parts = root.parts
    if "snapshots" not in parts[1:-1]:
        return
    at = len(parts) - 1 - parts[::-1].index("snapshots")
    kind, *repo = parts[at - 1].split("--")
    if kind != "models" or not repo:
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file in OWN_FILES:
        with suppress(EntryNotFoundError, LocalEntryNotFoundError):
            hf_hub_download(
                "/".join(repo),
                file,
                subfolder="/".join(parts[at + 2 :]) or None,
                revision=parts[at + 1],
                cache_dir=Path(*parts[: at - 1]),
            )


def read_all(opened: Opened) -> None:
    """Reads every tensor and compares it with its digest. Raises InvalidCheckpoint."""
    reader = Reader(opened)
    with Batch(reader, torch.device("cpu")) as batch:
        for name in sorted(opened.places, key=reader.position):
            batch.now(name)
