"""Command lines in processes of their own, in an environment without surprises."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import mxfp4prep

ROOT = Path(__file__).parent.parent
PACKAGE = Path(mxfp4prep.__file__).parent
"""The package that is tested: of the tree, or installed."""


def environment(**changes: str) -> dict[str, str]:
    """A plain environment: none of the variables that change the output unless given."""
    names = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "MXFP4PREP_DEBUG", "MXFP4PREP_WORKERS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "PYTHONPATH": str(PACKAGE.parent), **changes}


def default_signals() -> None:
    """A process that was started in the background ignores what its shell made it ignore."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
