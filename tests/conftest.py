"""Shared places of the test data."""

from __future__ import annotations

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():  # before anything imports triton: kernels ask when they are made
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from reliability import Counter, tried

__all__ = ["tried"]

# Two test processes share two cores: with more threads each, small matrices take five times longer.
torch.set_num_threads(1)

DATA = Path(__file__).parent / "data"
FIXTURES = DATA / "fixtures"

MXFP4_FIXTURES = sorted(
    path.name
    for path in FIXTURES.iterdir()
    if path.is_dir() and path.name.startswith(("llama-", "qwen", "version-"))
)
LOOKALIKES = {
    "lookalike-amdfp4-g32": "amdfp4_g32",
    "lookalike-mxfp6-e2m3": "mxfp6_e2m3",
    "lookalike-nvfp4": "nvfp4",
}


def pytest_configure(config: pytest.Config) -> None:
    """Counts what the tests say they tried; see `reliability`."""
    config.pluginmanager.register(Counter(), "tried-counter")


def with_path(*first: object) -> dict[str, str]:
    """The environment with folders put before PYTHONPATH, for a child process."""
    folders = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


@pytest.fixture(params=MXFP4_FIXTURES)
def mxfp4_fixture(request: pytest.FixtureRequest) -> Path:
    """Each real Quark MXFP4 checkpoint in turn."""
    return FIXTURES / request.param
