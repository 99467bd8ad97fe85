"""The system's own limits: each a clear error with the right exit code, and nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import with_path

TESTS = Path(__file__).parent
EXPECTED = {  # limit -> exit code, words of the error
    "a file may have 1000 bytes": (6, "the file is larger than this filesystem or process may"),
    "64 open files": (0, ""),
    "no more open files": (6, "too many open files"),
    "96 MiB of memory": (0, ""),
    "1 MiB of memory": (6, "memory: not enough of it"),
    "no more threads": (6, "the system starts no more threads"),
    "a source that may only be read": (0, ""),
    "a folder that may not be written to": (6, "permission denied"),
    "a folder that may not be entered": (6, "permission denied"),
    "a source that may not be entered": (6, "permission denied"),
    "a source that may not be listed": (2, "is not readable"),
    "a shard that may not be read": (6, "permission denied"),
    "a disk of 64 MiB": (6, "not enough room for the output"),
    "a disk that fills up meanwhile": (6, "the disk is full"),
}


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run(
        [sys.executable, TESTS / "attacks" / "limits.py", "--json"],
        env=with_path(TESTS),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return {outcome["name"]: outcome for outcome in json.loads(done.stdout)}


def test_every_limit_is_tried(outcomes):
    assert set(outcomes) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_limit_ends_in_one_clear_error_and_nothing_else(outcomes, tried, name):
    outcome = outcomes[name]
    if outcome["skipped"]:
        pytest.skip(outcome["skipped"])
    code, words = EXPECTED[name]
    lines = outcome["told"].splitlines()
    assert outcome["code"] == code, lines
    if code:
        told = {line.partition(":")[0]: line.lower() for line in lines}
        assert len(told) == len(lines), "no line is of a kind that there was already"
        assert {"error"} <= told.keys() <= {"note", "error", "in", "hint"}
        assert words in told["error"]
    else:
        assert lines == []
    tried("F4")


def test_root_tries_a_real_full_disk(outcomes):
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    skipped = [outcome["skipped"] for outcome in outcomes.values() if outcome["skipped"]]
    if skipped:
        pytest.skip(skipped[0])
    assert outcomes["a disk that fills up meanwhile"]["code"] == 6
