"""Counters of split products: who shares them, that they go back to zero, what a full pool does."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import Target, assert_product, in_order, random_stored

pytest.importorskip("triton")

from mxfp4prep.runtime.kernels import counters as subject
from mxfp4prep.runtime.kernels.configs import Tile
from mxfp4prep.runtime.kernels.dense import dense

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
OTHER_GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _no_pools(monkeypatch):
    monkeypatch.setattr(subject, "_pools", {})


class Device:
    """What counters.py asks of torch, with streams and captures as a test sets them."""

    def __init__(self, monkeypatch, pool=1 << 14, share=1 << 10):
        self.stream, self.capturing = 0, False
        self.waited_for = []
        monkeypatch.setattr(subject, "POOL", pool)
        monkeypatch.setattr(subject, "SHARE", share)
        cuda = SimpleNamespace(
            is_current_stream_capturing=lambda: self.capturing,
            current_stream=lambda _: SimpleNamespace(
                cuda_stream=self.stream, synchronize=lambda: self.waited_for.append(self.stream)
            ),
        )
        monkeypatch.setattr(
            subject, "torch", SimpleNamespace(cuda=cuda, int32=torch.int32, zeros=self.zeros)
        )

    def zeros(self, count, dtype, device):
        return torch.zeros(count, dtype=dtype)

    def take(self, count=100, stream=0, capturing=False, device=GPU):
        self.stream, self.capturing = stream, capturing
        found = subject.counters(count, device)
        assert found.shape == (count,)
        assert found.dtype == torch.int32
        assert not found.any()
        return found


@pytest.fixture
def gpu(monkeypatch):
    return Device(monkeypatch)


def share_memory(*parts):
    """Whether any two of the tensors have a byte in common."""
    spans = sorted((part.data_ptr(), part.data_ptr() + 4 * part.numel()) for part in parts)
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def test_sharing_is_noticed():
    tensor = torch.zeros(10)
    assert share_memory(tensor[:6], tensor[5:])
    assert not share_memory(tensor[:5], tensor[5:])


def test_launches_of_a_stream_share_theirs(gpu):
    """They follow one another, and each leaves zeros."""
    first, second = gpu.take(100), gpu.take(300)
    assert first.data_ptr() == second.data_ptr()


def test_streams_never_share(gpu):
    assert not share_memory(*[gpu.take(1 << 10, stream) for stream in range(8)])


def test_captured_launches_never_share(gpu):
    """Not with one another, of one stream or two, and not with launches that are not captured."""
    plain = [gpu.take(100, 0), gpu.take(100, 1)]
    captured = [gpu.take(100, stream, capturing=True) for stream in (0, 0, 1, 2)]
    later = [gpu.take(100, 3)]
    assert not share_memory(*plain, *captured, *later)


def test_devices_never_share(gpu):
    gpu.take(100)
    assert not share_memory(gpu.take(100), gpu.take(100, device=OTHER_GPU))


def test_no_pool_is_made_in_a_capture(gpu):
    """Its memory would belong to the graph, and its zeros would be written at every replay."""
    first, second = gpu.take(capturing=True), gpu.take(capturing=True)
    assert subject._pools == {}
    assert not share_memory(first, second)


def test_more_than_a_share_is_made_anew(gpu):
    first = gpu.take(10)
    large = [gpu.take((1 << 10) + 1) for _ in range(2)]
    assert not share_memory(first, *large)


def test_a_full_pool_falls_back(gpu):
    """16 streams fill it; what comes then is made anew each time, and the first go on as before."""
    streams = [gpu.take(100, stream) for stream in range(16)]
    late = [gpu.take(100, 16), gpu.take(100, 16), gpu.take(100, 17)]
    captured = [gpu.take(100, 0, capturing=True) for _ in range(2)]
    assert not share_memory(*streams, *late, *captured)
    assert gpu.take(100, 3).data_ptr() == streams[3].data_ptr()


def test_captures_take_no_more_than_there_is(gpu):
    gpu.take(100)
    taken = [gpu.take(1 << 10, capturing=True) for _ in range(20)]
    assert not share_memory(*taken)
    pool = subject._pools[GPU]
    assert pool.used <= subject.POOL


def test_threads_of_two_streams_do_not_share(gpu, monkeypatch):
    """Each takes its share as a whole, whatever the other does meanwhile."""
    gpu.take(100, 7)
    streams = {}
    monkeypatch.setattr(
        subject.torch.cuda,
        "current_stream",
        lambda _: SimpleNamespace(cuda_stream=streams[threading.get_ident()]),
    )
    take = subject.Pool.take

    def slow_take(pool, count):
        found = take(pool, count)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(subject.Pool, "take", slow_take)
    found = {}

    def run(stream):
        streams[threading.get_ident()] = stream
        found[stream] = subject.counters(100, GPU)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not share_memory(found[0], found[1])


def test_other_streams_wait_for_a_new_pools_zeros(gpu):
    """They are written on the stream that asked first; what others launch does not wait for it."""
    gpu.take(100, 3)
    assert gpu.waited_for == [3]
    gpu.take(100, 4)
    assert gpu.waited_for == [3]


# Products.


def product(tile, m=9, n=70, k=640):
    generator = torch.Generator().manual_seed(1)
    matrix = random_stored("kept", n, k, generator)
    x = torch.randn((m, k), generator=generator)
    target = Target(m, n, torch.float32)
    dense(x, matrix.weight, matrix.scale, target.out, "kept", "none", None, None, tile)
    assert_product(target.out, x.double(), matrix.dense, None)
    return target.out


@pytest.mark.parametrize("kernel", ["few", "many"])
def test_counters_are_zero_after_use(kernel, monkeypatch):
    """The pool that a product used is all zeros, and a second product with it right as well."""
    tile = Tile(kernel, 8, 32, 128, 2, 2, splits=5)
    asked = []
    real = subject.counters

    def watched(count, device):
        found = real(count, device)
        asked.append(found)
        return found

    monkeypatch.setattr("mxfp4prep.runtime.kernels.launch.counters", watched)
    first = product(tile)
    assert [part.numel() for part in asked] == [2 * 3]  # a counter per tile of out
    assert not subject._pools[CPU].tensor.any()
    in_order(monkeypatch, lambda numbers: list(reversed(numbers)))
    second = product(tile)
    assert asked[0].data_ptr() == asked[1].data_ptr()
    assert not subject._pools[CPU].tensor.any()
    assert torch.equal(first, second)
    product(tile._replace(splits=2), n=33)


def test_products_that_are_not_split_take_no_counters():
    product(Tile("few", 8, 32, 128, 2, 2))
    assert subject._pools == {}


def test_a_split_product_is_right_where_the_pool_is_full(monkeypatch):
    monkeypatch.setattr(subject, "POOL", 1)
    product(Tile("few", 8, 32, 128, 2, 2, splits=3))
