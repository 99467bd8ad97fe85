"""The example serves what it makes, as it stands, and nothing that is not prepared."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from engine import NONE, PREPARED, ROOT, needs_vllm
from models import write_model

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def run(name, *arguments, cwd, plugins=PREPARED, code=0):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_PLUGINS": plugins}
        | {"VLLM_CACHE_ROOT": str(cwd / "cache"), "VLLM_NO_USAGE_STATS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == code, done.stderr[-4000:]
    return done


def test_serve(tmp_path):
    said = run("04_vllm.py", cwd=tmp_path).stdout
    answers = re.findall(r"^\[[\d, ]+\] -> \[([\d, ]+)\]$", said, re.MULTILINE)
    assert len(answers) == 2
    assert all(1 <= len(answer.split(", ")) <= 8 for answer in answers)
    assert "all of them equal to their digests" in said


def test_without_the_plugin_nothing_is_served(tmp_path):
    done = run("04_vllm.py", cwd=tmp_path, plugins=NONE, code=1)
    assert "Unknown quantization method: mxfp4prep" in done.stderr
    assert "->" not in done.stdout


@pytest.mark.parametrize("what", ["a Quark checkpoint", "no checkpoint", "nothing"])
def test_a_directory_that_is_not_prepared(tmp_path, what):
    """One error, its way out, and the exit code of the commands; vLLM is not even imported."""
    root = tmp_path / "model"
    if what == "a Quark checkpoint":
        write_model(root, "llama", num_hidden_layers=1)
        expected = ("not a prepared checkpoint but a Quark checkpoint", "mxfp4prep convert")
    elif what == "no checkpoint":
        root.mkdir()
        expected = ("not a prepared checkpoint: no mxfp4prep.json", "mxfp4prep convert")
    else:
        expected = ("no such directory", "mxfp4prep convert")
    done = run("04_vllm.py", root, cwd=tmp_path, code=3)
    assert done.stderr.startswith(f"error: {root}: ")
    for words in expected:
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "vllm" not in done.stderr.lower().replace(str(root).lower(), "")
    assert done.stdout == ""
