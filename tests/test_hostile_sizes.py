"""Huge and deep inputs cost little time and memory: the table of tests/attacks/headers.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from attacks import headers

SCRIPT = Path(headers.__file__)


def test_huge_inputs_are_read_or_refused_within_a_gibibyte(tried):
    """In a process without torch, whose children are measured one by one."""
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=500, check=False
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("well: ")] == []
    assert (done.returncode, done.stderr) == (0, "")
    assert len(lines) == len(headers.HUGE)
    tried("H6", len(lines))


def test_a_process_that_takes_too_much_is_seen(monkeypatch):
    monkeypatch.setattr(headers, "SECONDS_LIMIT", 1)

    def spin() -> None:
        while True:
            pass

    assert headers.measured(spin).code != 0
    outcome = headers.measured(lambda: bytearray(700 << 20))
    assert outcome.nbytes > 700 << 20
    assert outcome.said == "read"


def test_mutated_headers_and_manifests_raise_our_errors_only():
    """A few of what `headers.py --seconds` tries; whatever is accepted safetensors reads alike."""
    import random

    import safetensors

    assert safetensors.deserialize
    rng, pool = random.Random(11), headers.seeds()
    taken = 0
    for turn in range(6000):
        content = headers.mutated(pool[turn % len(pool)], rng)
        taken += headers.feed(content)
    assert 50 < taken < 3000
    assert all(headers.feed(content) for content in headers.seeds()[2:])
