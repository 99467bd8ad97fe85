"""Memory is bounded by a tensor, not by the checkpoint; `audit` needs neither bytes nor torch.

With MXFP4PREP_FULL_SIZE (`make memory`) it is 4 GiB with tensors of 512 MiB; `attacks/memory.py`
does the same with 40 GB and tensors of 2 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks import memory
from processes import environment
from sparse import linear, write_sparse

MIB = memory.MIB
FULL = bool(os.environ.get("MXFP4PREP_FULL_SIZE"))
NBYTES, LARGEST = (4 << 30, 512 * MIB) if FULL else (400_000_000, 160 * MIB)
STREAMED_NBYTES = 96 * MIB + LARGEST // 8
"""What moving bytes takes beside what a process has that does nothing: buffers, and a scale that is
transposed, a sixteenth of its weight, as it was and as it will be."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, a large tensor in each, one for either path."""
    root: Path = tmp_path_factory.mktemp("memory") / "m"
    return memory.write_source(root, NBYTES, LARGEST, 2)


@pytest.fixture(scope="module")
def figures(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, dict[str, Any]]]:
    """{workers: {step: what it took}}."""
    work = tmp_path_factory.mktemp("work")
    few = {1: ["convert", "restore", "load"], 2: ["convert", "verify"]}
    every = {1: memory.ALL, 2: ["convert", "verify", "verify --source", "restore"]}
    steps = every if FULL else few
    return {workers: memory.outside(source, work, workers, steps[workers]) for workers in (1, 2)}


def test_no_step_takes_more_than_the_tensors_it_holds(
    figures: dict[int, dict[str, dict[str, Any]]], tried: Callable[..., None]
) -> None:
    for workers, steps in figures.items():
        for name, figure in steps.items():
            assert figure["peak"] <= memory.limit(LARGEST, workers), (workers, name)
    tried("R1", sum(len(steps) - 1 for steps in figures.values()))


def test_bytes_are_moved_in_pieces_smaller_than_a_tensor(
    figures: dict[int, dict[str, dict[str, Any]]],
) -> None:
    for workers, steps in figures.items():
        for name in steps.keys() - {"load"}:
            extra = steps[name]["peak"] - steps["base"]["peak"]
            assert extra <= STREAMED_NBYTES, (workers, name)


def test_a_layer_that_is_loaded_is_held_once(
    figures: dict[int, dict[str, dict[str, Any]]],
) -> None:
    extra = figures[1]["load"]["peak"] - figures[1]["base"]["peak"]
    assert LARGEST < extra <= LARGEST * 17 / 16 + STREAMED_NBYTES


HOLLOW = """
import json, sys
from mxfp4prep.__main__ import main
code = main()
status = open("/proc/self/status").read()
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
heavy = sorted({"torch", "numpy", "safetensors", "huggingface_hub"} & set(sys.modules))
print(json.dumps([code, peak, heavy]), file=sys.stderr)
"""


def test_an_audit_of_100_000_tensors_leaves_torch_alone(
    tmp_path: Path, tried: Callable[..., None]
) -> None:
    shards = []
    for shard in range(100):
        shapes: dict[str, tuple[int, ...]] = {}
        for expert in range(167):
            at = f"model.layers.{shard}.mlp.experts.{expert}"
            shapes |= linear(f"{at}.gate_proj", 1536, 4096)
            shapes |= linear(f"{at}.up_proj", 1536, 4096)
            shapes |= linear(f"{at}.down_proj", 4096, 1536)
        shards.append(shapes)
    assert sum(map(len, shards)) >= 100_000
    root = write_sparse(tmp_path / "m", shards)
    words = ["audit", str(root), "--format", "json", "--fail-on", "never"]
    done = subprocess.run(
        [sys.executable, "-c", HOLLOW, *words],
        env=environment(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    code, peak, heavy = json.loads(done.stderr.splitlines()[-1])
    assert (code, heavy) == (0, [])
    assert peak <= 300 * MIB
    assert done.stdout.count(b'"name":"model.layers.') >= 50_000
    tried("R2")
