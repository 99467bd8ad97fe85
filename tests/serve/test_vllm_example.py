"""The example serves what it makes, as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from engine import PREPARED, ROOT, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def run(name, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_PLUGINS": PREPARED}
        | {"VLLM_CACHE_ROOT": str(cwd / "cache"), "VLLM_NO_USAGE_STATS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_serve(tmp_path):
    said = run("04_vllm.py", cwd=tmp_path)
    answers = re.findall(r"^\[[\d, ]+\] -> \[([\d, ]+)\]$", said, re.MULTILINE)
    assert len(answers) == 2
    assert all(1 <= len(answer.split(", ")) <= 8 for answer in answers)
    assert "all of them equal to their digests" in said
