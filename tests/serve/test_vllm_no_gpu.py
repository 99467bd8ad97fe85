"""vLLM's front end registers the plugin in a process that must not start a GPU: it forks or spawns
workers that do. Registering and reading a checkpoint's config ask for none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine import HERE, NONE, ROOT, needs_vllm
from models import prepare, write_model

pytestmark = [needs_vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def touched(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("touched")
    model = prepare(write_model(root / "model", "llama"), root / "prepared")
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_no_gpu.py"), str(model)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_PLUGINS": NONE},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_plugin_touches_no_gpu(touched):
    assert touched["plugin"] == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("torch.cuda.is_available()", "torch.cuda.is_available"),
        ("torch.cuda.device_count()", "torch.cuda.device_count"),
        ("torch.cuda.get_device_properties(0)", "torch.cuda.get_device_properties"),
        ("torch.accelerator.device_count()", "torch.accelerator.device_count"),
        ("torch.zeros(1, device='cuda')", "torch.cuda._lazy_init"),
        ("ctypes.CDLL('libamdhip64.so')", "CDLL libamdhip64.so"),
    ],
)
def test_a_plugin_that_does_is_found_out(touched, line, named):
    """`register` with that line added."""
    assert touched["asking"][line] == [named]
