"""Prepare AMD Quark MXFP4 checkpoints for AITER's GEMMs: audit, convert, prove, undo, load.

Importing this package imports no torch, probes no GPU and configures nothing: every public name
but the errors is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mxfp4prep.errors import (
    BackendUnavailable,
    CannotShard,
    InvalidCheckpoint,
    InvalidManifest,
    IOFailed,
    LayoutError,
    Mxfp4PrepError,
    UnsafeOutput,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from mxfp4prep.runtime.backends import backends
    from mxfp4prep.runtime.experts import PreparedExperts
    from mxfp4prep.runtime.linear import PreparedLinear
    from mxfp4prep.runtime.loader import load
    from mxfp4prep.runtime.prepared import Prepared
    from mxfp4prep.runtime.slices import RepackWarning

    __version__: str

_LAZY = {  # public name -> module that has it
    "Prepared": "mxfp4prep.runtime.prepared",
    "PreparedExperts": "mxfp4prep.runtime.experts",
    "PreparedLinear": "mxfp4prep.runtime.linear",
    "RepackWarning": "mxfp4prep.runtime.slices",
    "backends": "mxfp4prep.runtime.backends",
    "load": "mxfp4prep.runtime.loader",
}

__all__ = [
    "BackendUnavailable",
    "CannotShard",
    "IOFailed",
    "InvalidCheckpoint",
    "InvalidManifest",
    "LayoutError",
    "Mxfp4PrepError",
    "Prepared",
    "PreparedExperts",
    "PreparedLinear",
    "RepackWarning",
    "UnsafeOutput",
    "Unsupported",
    "UsageError",
    "__version__",
    "backends",
    "load",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """The installed distribution's version; a source tree that is not installed has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mxfp4prep")
    except PackageNotFoundError:
        return "0+uninstalled"
