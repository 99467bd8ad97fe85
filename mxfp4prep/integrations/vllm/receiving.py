"""Stored tensors on their way into vLLM's parameters: checked, seen as bytes, repacked if need be.

A weight loader of vLLM gets a whole stored tensor and takes the rank's part of it by plain slices
along one dimension. That is right for every layout of this package as long as the parameter has the
layout that the tensor is stored in; otherwise the whole tensor is brought into the parameter's
layout first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.layouts import LAYOUTS
from mxfp4prep.manifest import LayerRecord, StoredTensor
from mxfp4prep.parallel import Shard
from mxfp4prep.prepared import VERIFY_HINT
from mxfp4prep.runtime.reading import Batch, Operand, Target, place_piece
from mxfp4prep.runtime.slices import byte_columns

OPERANDS = ("weight", "scale")
BYTES = (torch.uint8, torch.float8_e8m0fnu)
"""What a stored scale may be called; both are moved as bytes, never converted."""

UNWATCHED = frozenset({"dummy", "ipc_cache"})
"""vLLM's load formats where nothing arrives: numbers that mean nothing, and parameters that another
process has loaded and checked."""
UNCHECKED = frozenset({"runai_streamer_sharded", "sharded_state", "tensorizer"})
"""vLLM's load formats that fill parameters from files of their own: nothing is seen to arrive, and
nobody knows what the bytes were."""
FORMATS_HINT = "serve with --load-format auto or mxfp4prep"


class Arrivals:
    """Which of the expected tensors have arrived.

    is_accounted   whether it was asked for the rest of the model too, by what stands before every
                   loader of vLLM's

    Raises Unsupported for a load format that would fill parameters past this.
    """

    def __init__(self, where: str, expected: Iterable[str], load_format: str) -> None:
        if load_format in UNCHECKED:
            raise Unsupported(
                f"--load-format {load_format}",
                "fills parameters from files that no manifest describes, and checks nothing",
                hint=FORMATS_HINT,
            )
        self.is_accounted = False
        self._where, self._load_format = where, load_format
        self._missing = dict.fromkeys(expected)
        self._is_watched = load_format not in UNWATCHED

    def note(self, tensor: str) -> None:
        """Tensor `tensor` has arrived."""
        self._missing.pop(tensor, None)

    def check(self) -> None:
        """Nothing; raises InvalidCheckpoint while anything is missing, Unsupported for a loader
        that was registered by others: of what it leaves out nobody would know."""
        if not self._is_watched:
            return
        if self._missing:
            names = list(self._missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InvalidCheckpoint(
                self._where,
                f"its weights did not arrive: {', '.join(names[:3])}{more}",
                hint=VERIFY_HINT,
            )
        if not self.is_accounted:
            raise Unsupported(
                f"--load-format {self._load_format}",
                "loads past what sees to it that no tensor is missing",
                hint=FORMATS_HINT,
            )


def stored_of(record: LayerRecord, operand: str) -> StoredTensor:
    """The stored tensor of a layer's "weight" or "scale"."""
    return record.weight if operand == "weight" else record.scale


def received(record: LayerRecord, operand: str, loaded: Tensor, layout_id: str) -> Tensor:
    """The bytes of a stored tensor in layout `layout_id`, uint8.

    Raises InvalidCheckpoint for a tensor that is not the one the manifest describes.
    """
    stored = stored_of(record, operand)
    if loaded.dtype not in BYTES or list(loaded.shape) != stored.shape:
        raise InvalidCheckpoint(
            stored.tensor,
            f"not what the manifest says of this {operand}",
            found=f"{loaded.dtype} {list(loaded.shape)}",
            expected=f"{torch.uint8} {stored.shape} ({stored.layout})",
            hint=VERIFY_HINT,
        )
    loaded = loaded.view(torch.uint8)
    if stored.layout == layout_id:
        return loaded
    _, columns = byte_columns(operand, (0, record.k))
    matrix = LAYOUTS[stored.layout].inverse(loaded, record.n, columns)
    return LAYOUTS[layout_id].forward(matrix)


def put(batch: Batch, record: LayerRecord, operand: str, shard: Shard, target: Target) -> None:
    """Has a piece of a layer's "weight" or "scale" read to where `target` says."""
    stored = stored_of(record, operand)
    _, columns = byte_columns(operand, (0, record.k))
    source = Operand(stored.tensor, LAYOUTS[stored.layout], record.n, columns)
    place_piece(batch, source, 0, shard.rows, byte_columns(operand, shard.columns), target)
