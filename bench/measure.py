"""Wall time and peak memory of a child process, and medians over runs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run(command: Sequence[str | Path], env: dict[str, str] | None = None) -> dict[str, float]:
    """Runs `command` to its end: wall seconds, cpu seconds and peak resident memory in MB.

    Raises RuntimeError, with the child's stderr, when it fails.
    """
    started = time.perf_counter()
    child = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )
    stderr = child.stderr.read() if child.stderr else b""
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{command}: exit {child.returncode}: {stderr.decode(errors='replace')}")
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss * 1024 / 1e6,
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "runs": len(values),
    }


def mxfp4prep() -> list[str]:
    """The command line of the mxfp4prep beside this interpreter."""
    return [sys.executable, "-m", "mxfp4prep"]
