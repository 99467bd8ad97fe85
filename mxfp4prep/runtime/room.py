"""Room in memory for rows of activations: asked for before they are made, and told when it ends.

Linux grants more memory than there is and kills, without a word, whoever uses it. So rows that
cannot fit on the host are refused before the first of them is drawn; what an allocator refuses
later, there or on a GPU, is told in the same words.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mxfp4prep.errors import IOFailed
from mxfp4prep.runtime.devices import free_nbytes
from mxfp4prep.runtime.experts import PreparedExperts

if TYPE_CHECKING:
    from mxfp4prep.runtime.linear import PreparedLinear

INPUT_NBYTES, OUTPUT_NBYTES = 32, 12
"""Host bytes for each value of a matrix's x and y that is computed on the CPU: float32 copies, and
what rounding to FP4 makes on its way. Measured at 2048 x 2048, W4A4, torch 2.13: 30 and less."""

EXPERT_NBYTES = 24
"""The same for each value of x and of the row between the two GEMMs, for each expert of a token.
Measured: 24 and 20."""

DRAWN_NBYTES = 6
"""Host bytes for each random value that goes to a GPU: float32, and bfloat16 of it."""

FEWER = "ask for fewer rows, for example --m 1,16,64"

_HOST = torch.device("cpu")
_ASKED = re.compile(r"ried to allocate ([\d.]+) ?([A-Za-z]+)")
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""What torch's allocators for the host, for other devices and cuBLAS say."""


class NoRoom(IOFailed):
    """Memory is too small for what was asked."""


def check_room(
    layer: PreparedLinear | PreparedExperts,
    m: int,
    device: torch.device,
    top: int = 1,
    more: int = 0,
) -> None:
    """Raises NoRoom where m rows of x for `layer`, and what is made of them, exceed what is free.

    device   where they are computed; memory of a GPU is not asked, its allocator refuses in time
    top      how many experts a row goes to
    more     host bytes beside
    """
    free = free_nbytes(_HOST)
    needed = rows_nbytes(layer, m, device, top) + more
    if free is not None and needed > free:
        raise NoRoom(
            f"{layer.name} at m {m}",
            "too many rows for the memory here",
            found=f"about {_size(needed)} for them",
            expected=f"at most {_size(free)}, which is free",
            hint=FEWER,
        )


def rows_nbytes(
    layer: PreparedLinear | PreparedExperts, m: int, device: torch.device, top: int = 1
) -> int:
    """Bytes of the host's memory that m rows take, rather too many than too few."""
    drawn = device.type == "cuda"
    if isinstance(layer, PreparedExperts):
        own = top * (layer.hidden + layer.intermediate) * EXPERT_NBYTES
        routing = layer.experts * 12  # a random float32 and an int64 for each expert
        return m * (routing + (layer.hidden * DRAWN_NBYTES if drawn else own))
    own = layer.k * INPUT_NBYTES + layer.n * OUTPUT_NBYTES
    return m * (layer.k * DRAWN_NBYTES if drawn else own)


@contextmanager
def telling_where(where: str, hint: str | None = None) -> Iterator[None]:
    """Turns what an allocator says inside into NoRoom at `where`; other errors go through."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_shortage(error):
            raise
        asked = _asked(str(error))
        found = None if asked is None else f"{asked} more asked for"
        raise NoRoom(where, "out of memory", found=found, hint=hint or FEWER) from error


def is_shortage(error: Exception) -> bool:
    """Whether an allocator says that there is no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def _asked(text: str) -> str | None:
    found = _ASKED.search(text)
    if found is None:
        return None
    return _size(int(found[1])) if found[2] == "bytes" else f"{found[1]} {found[2]}"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
