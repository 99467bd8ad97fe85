"""A process that converts, verifies, restores and fails a hundred times holds what it held before.

`attacks/leaks.py` does it a thousand times.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks import leaks
from quark_factory import write_checkpoint

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.survey import survey
from mxfp4prep.verify import verify

RUNS = 100
MIB = 1 << 20


def test_a_hundred_conversions_leave_no_file_thread_or_memory(
    tmp_path: Path, tried: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a disk's time, and nothing held
    found = leaks.repeat(tmp_path, RUNS)
    assert found.failed == RUNS, "each way to fail fails each time"
    assert found.after.files == found.before.files
    assert found.after.threads == found.before.threads
    assert found.growth < MIB, "bytes that a run adds, beside what the suite's process does"
    tried("R5")


def test_a_leak_of_memory_would_be_seen() -> None:
    flat = [100 * MIB + (run * 7919) % MIB for run in range(RUNS)]
    assert abs(leaks.slope(flat)) < MIB / 64
    assert leaks.slope([size + run * MIB for run, size in enumerate(flat)]) > MIB * 0.9


def test_no_file_stays_open_whichever_read_of_a_deep_verification_fails(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", leaks.LINEARS, shards=2)
    found = survey(open_checkpoint(source), surveyed_degrees((1,)))
    convert(make_plan(found, (1,)), tmp_path / "out", workers=1)
    before = leaks.held().files
    for after in range(200):
        try:
            with leaks.failing("pread_into", after, lambda: OSError(errno.EIO, "cut")):
                verify(tmp_path / "out", "deep", source, workers=1)
            break
        except OSError:
            assert leaks.held().files == before, after
    assert 20 < after < 200
