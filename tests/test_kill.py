"""Real processes that are killed, and the runs that come after them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import with_path

TESTS = Path(__file__).parent
KILLS = 60


@pytest.mark.timeout(300)
def test_sigkill_at_any_moment_and_the_run_after_it_gives_the_same_bytes(tried):
    done = subprocess.run(
        [sys.executable, TESTS / "attacks" / "kill.py", "--json", "--seed=7", f"--kills={KILLS}"],
        env=with_path(TESTS),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == KILLS
    assert counts["resumed"] > 0
    tried("F2", KILLS)
