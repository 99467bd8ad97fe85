"""The runtime on a GPU that torch can use; on CPU machines these are skipped, not passed."""

from __future__ import annotations

import pytest
import torch
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.runtime.selfcheck import selfcheck

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that torch can use"
)
PREFIX = "model.layers.1.mlp.experts"


@pytest.fixture
def root(tmp_path):
    layers = [
        Layer("a.fc1", 64, 512, bias=True),
        Layer("b.fc1", 48, 672, "triton"),
        Layer("c.fc1", 50, 80, "kept", "w4a16"),
        Layer("d.fc1", 64, 256, "asm", "w4a8", input_scale=0.5),
        Layer("e.fc1", 64, 256, "asm", "w4a8"),
        Layer("f.fc1", 64, 256, "triton", "w4a6"),
        Layer(f"{PREFIX}.gate_up_proj", 128, 256, experts=3, bias=True),
        Layer(f"{PREFIX}.down_proj", 256, 64, "triton", experts=3, bias=True),
    ]
    build(tmp_path, layers)
    return tmp_path


@pytest.mark.parametrize("backend", [None, "torch"])
def test_selfcheck_passes_on_the_gpu(root, backend):
    prepared = mxfp4prep.load(root, device="cuda", backend=backend)
    rows = list(selfcheck(prepared, m=(1, 33)))
    assert len(rows) == 12
    assert all(row.ok for row in rows), rows


def test_layers_are_on_the_gpu_and_equal_those_on_the_cpu(root):
    there = mxfp4prep.load(root, device="cuda", backend="torch")
    here = mxfp4prep.load(root)
    for name in here:
        assert there[name].weight.is_cuda
        assert torch.equal(there[name].dequantize().cpu(), here[name].dequantize())


def test_selfcheck_moves_layers(root):
    rows = list(selfcheck(mxfp4prep.load(root), ["a.fc1", PREFIX], device="cuda", m=(8,)))
    assert [row.ok for row in rows] == [True, True]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_on_the_gpu(root):
    layer = mxfp4prep.load(root, device="cuda", backend="torch")["a.fc1"]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (1, 33):
        x = torch.randn((m, 512), device="cuda", dtype=torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))
