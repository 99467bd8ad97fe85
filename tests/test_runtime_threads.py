"""Threads that ask for one thing get one thing, read once; whoever is called back may ask too."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from moe_cases import BLOCK, PREFIX, mlp
from prepared_factory import build

import mxfp4prep
from mxfp4prep.runtime.reading import Batch

THREADS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("threads")
    generator = torch.Generator().manual_seed(0)
    layers = []
    for name in (f"{PREFIX}.0", f"{PREFIX}.1", f"{BLOCK}.shared_expert", "model.layers.0.mlp"):
        layers += mlp(name, 256, 64, generator, paths=("asm", "triton"))
    build(root, layers, copied={"model.norm.weight": torch.ones(3)})
    return root


def asked_by_all(ask) -> list[object]:
    """What each thread got; all begin together."""
    barrier = threading.Barrier(THREADS)
    got: list[object] = []

    def one() -> None:
        barrier.wait()
        got.append(ask())

    threads = [threading.Thread(target=one, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == THREADS
    return got


@pytest.fixture
def slow(monkeypatch):
    """Reading takes so long that every thread has asked before the first one has it."""
    real = Batch.run

    def run(self, progress=None):
        time.sleep(0.05)
        real(self, progress)

    monkeypatch.setattr(Batch, "run", run)


ASKS = {
    "layer": lambda prepared: prepared["model.layers.0.mlp.up_proj"],
    "experts": lambda prepared: prepared.experts(PREFIX),
    "fused": lambda prepared: prepared.experts(PREFIX, shared="auto"),
    "apart": lambda prepared: prepared.experts(PREFIX, shared="auto", fusion="separate"),
    "all": lambda prepared: prepared.load_all() or prepared["model.layers.0.mlp.up_proj"],
    "all, banks": lambda prepared: prepared.load_all() or prepared.experts(PREFIX),
}


@pytest.mark.parametrize("what", ASKS)
def test_one_module_read_once(root, slow, what):
    alone = mxfp4prep.load(root)
    ASKS[what](alone)
    prepared = mxfp4prep.load(root)
    assert len({id(module) for module in asked_by_all(lambda: ASKS[what](prepared))}) == 1
    assert prepared.bytes_read == alone.bytes_read


def test_a_layer_while_all_are_loaded(root, slow):
    """The one that load_all read, or the one that load_all found."""
    prepared = mxfp4prep.load(root)
    name = "model.layers.0.mlp.up_proj"
    turns = iter(range(THREADS))
    asks = [prepared.load_all, *[lambda: prepared[name]] * (THREADS - 1)]
    got = asked_by_all(lambda: asks[next(turns)]())
    assert {id(layer) for layer in got if layer is not None} == {id(prepared[name])}


def test_a_progress_function_may_ask(root):
    """On the same thread, for what is being read: what it got stays what everyone gets."""
    prepared = mxfp4prep.load(root)
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((prepared["model.layers.0.mlp.up_proj"], prepared.tensor("model.norm.weight")))

    thread = threading.Thread(target=prepared.load_all, args=(progress,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert seen
    assert {id(layer) for layer, _ in seen} == {id(prepared["model.layers.0.mlp.up_proj"])}
