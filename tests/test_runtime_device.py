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
    assert len(rows) == 14  # six layers and the experts, at each m
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_layers_run_on_the_gpu_they_are_on(root, backend):
    """The current device is another one, and stays it."""
    here = mxfp4prep.load(root)
    there = mxfp4prep.load(root, device=1, backend=backend)
    assert torch.cuda.current_device() == 0
    for name in here:
        x = torch.randn((5, here[name].k))
        y = there[name](x.to("cuda:1"))
        torch.testing.assert_close(y.cpu(), here[name](x), rtol=1e-2, atol=1e-2)
    experts, expected = there.experts(PREFIX), here.experts(PREFIX)
    x, weights = torch.randn((70, experts.hidden)), torch.rand((70, 2))
    ids = torch.rand((70, 3)).topk(2).indices
    y = experts(*(part.to("cuda:1") for part in (x, weights, ids))).cpu()
    wanted = expected(x, weights, ids)
    assert (y - wanted).norm() < 0.02 * wanted.norm()
    assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_on_the_gpu(root):
    layer = mxfp4prep.load(root, device="cuda", backend="torch")["a.fc1"]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (1, 33):
        x = torch.randn((m, 512), device="cuda", dtype=torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


def captured(run, *inputs):
    """`run` as a CUDA graph; the returned function answers for new values of the inputs."""
    held = [tensor.clone() for tensor in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(*held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(*held)

    def replay(*values):
        for place, value in zip(held, values, strict=True):
            place.copy_(value)
        graph.replay()
        return y.clone()

    return replay


@pytest.mark.parametrize("m", [1, 31, 33])
@pytest.mark.parametrize("name", ["a.fc1", "b.fc1", "c.fc1", "d.fc1", "e.fc1", "f.fc1"])
def test_gemm_in_a_cuda_graph(root, name, m):
    layer = mxfp4prep.load(root, device="cuda", backend="triton")[name]
    xs = [torch.randn((m, layer.k), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    replay = captured(layer, xs[0])
    for x in xs:
        assert torch.equal(replay(x), layer(x))


@pytest.mark.parametrize("m", [1, 31, 33])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_fused_moe_in_a_cuda_graph(root, m, ep_size):
    """Replayed with another routing: nothing of the first one is baked in."""
    prepared = mxfp4prep.load(root, device="cuda", backend="triton", ep_size=ep_size, ep_rank=0)
    moe = prepared.experts(PREFIX)
    calls = []
    for _ in range(3):
        x = torch.randn((m, moe.hidden), device="cuda", dtype=torch.bfloat16)
        ids = torch.rand((m, moe.experts), device="cuda").topk(2).indices
        calls.append((x, torch.rand((m, 2), device="cuda"), ids))
    replay = captured(moe, *calls[0])
    for call in calls:
        # sums over experts may be added up in another order
        torch.testing.assert_close(replay(*call), moe(*call), rtol=2e-2, atol=2e-2)
    nowhere = (calls[0][0], calls[0][1], torch.full_like(calls[0][2], -1))
    assert not replay(*nowhere).any()
