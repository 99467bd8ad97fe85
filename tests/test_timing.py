"""Timing: what is in a result and what is not, on a GPU that is played and on the host's clock."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime import timing
from mxfp4prep.runtime.timing import MOST_COPIES, Timing, copies_beyond, measure

GPU = torch.device("cuda", 0)
GRAPH_LAUNCH = 0.002
"""Milliseconds that a replay takes beyond its kernels."""


class PlayedGPU:
    """Stands in for torch.cuda: kernels take the time that they say, one after the other.

    log   what happened, in order: "run x", "capture x", "replay"
    """

    def __init__(self):
        self.now = 0.0
        self.log = []
        self.mode = 0
        self.capturing = None
        self.compiled = set()
        self.capture_fails = False

    def kernel(self, name, milliseconds, *, compiles=0.0, waits=False):
        """A call that launches one kernel; the first one compiles it, on the GPU's time."""

        def call():
            if name not in self.compiled:
                self.compiled.add(name)
                self.now += compiles
            if waits and (self.mode == "error" or self.capturing is not None):
                raise RuntimeError("called a synchronizing CUDA operation")
            if self.capturing is not None:
                self.log.append(f"capture {name}")
                self.capturing.times.append(milliseconds)
            else:
                self.log.append(f"run {name}")
                self.now += milliseconds
            return torch.empty(0)

        return call

    @contextmanager
    def device(self, device):
        assert device == GPU
        yield

    @contextmanager
    def stream(self, _stream):
        yield

    def Stream(self):
        return PlayedStream()

    def current_stream(self):
        return PlayedStream()

    def CUDAGraph(self):
        return PlayedGraph(self)

    def Event(self, *, enable_timing):
        assert enable_timing
        return PlayedEvent(self)

    @contextmanager
    def graph(self, graph, *, stream):
        assert isinstance(stream, PlayedStream)
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
        if self.capture_fails:
            raise RuntimeError("capture failed")

    def synchronize(self):
        pass

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode


class PlayedStream:
    def wait_stream(self, other):
        assert isinstance(other, PlayedStream)

    def synchronize(self):
        pass


class PlayedGraph:
    def __init__(self, gpu):
        self.gpu, self.times = gpu, []

    def replay(self):
        self.gpu.log.append("replay")
        self.gpu.now += GRAPH_LAUNCH + sum(self.times)


class PlayedEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = self.gpu.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch):
    played = PlayedGPU()
    monkeypatch.setattr(timing, "cuda", played)
    return played


def test_a_graph_holds_every_copy_equally_often_and_no_compilation(gpu):
    calls = [gpu.kernel(f"copy{i}", 0.5, compiles=1000.0) for i in range(3)]
    found = measure(calls, GPU)
    captured = [entry for entry in gpu.log if entry.startswith("capture")]
    assert captured == [f"capture copy{i}" for i in range(3)] * 6  # 16 calls at least
    before = gpu.log[: gpu.log.index("capture copy0")]
    assert {f"run copy{i}" for i in range(3)} <= set(before)
    assert found.method == "graph"
    assert found.median_us == pytest.approx(500 + GRAPH_LAUNCH * 1000 / 18)
    assert found.spread_us == pytest.approx(0, abs=1e-6)
    assert gpu.mode == 0


def test_many_copies_are_captured_once(gpu):
    measure([gpu.kernel(f"copy{i}", 0.01) for i in range(40)], GPU)
    assert len([entry for entry in gpu.log if entry.startswith("capture")]) == 40


@pytest.mark.parametrize(
    ("milliseconds", "runs"), [(0.001, 200), (0.1, 125), (10.0, 5)]
)  # of 0.2 s
def test_short_work_runs_often_and_long_work_seldom(gpu, milliseconds, runs):
    found = measure([gpu.kernel("one", milliseconds)], GPU)
    assert found.runs == pytest.approx(runs, abs=1)
    assert gpu.log.count("replay") == found.runs + 2


def test_calls_that_wait_for_the_host_are_never_captured(gpu):
    calls = [gpu.kernel(name, 2.0, waits=True) for name in "ab"]
    gpu.mode = 1
    found = measure(calls, GPU)
    assert found.method == "events"
    assert found.median_us == pytest.approx(2000)
    assert not any(entry.startswith("capture") for entry in gpu.log)
    assert gpu.mode == 1  # as it was


def test_a_capture_that_fails_is_no_failure(gpu):
    gpu.capture_fails = True
    found = measure([gpu.kernel("one", 2.0)], GPU)
    assert (found.method, found.median_us) == ("events", pytest.approx(2000))


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_errors_of_calls_go_through(gpu, device):
    def broken():
        raise UsageError("x", "is wrong")

    with pytest.raises(UsageError, match="is wrong"):
        measure([broken], device)
    with pytest.raises(ValueError, match="no call"):
        measure([], device)


class HostClock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def call(self, name, durations, seen):
        def run():
            seen.append(name)
            self.now += durations.pop(0) if len(durations) > 1 else durations[0]
            return torch.empty(0)

        return run


def test_the_hosts_clock_leaves_the_first_runs_out_and_takes_turns(monkeypatch):
    clock, seen = HostClock(monkeypatch), []
    calls = [clock.call(name, [9.0, 9.0, 0.010], seen) for name in "ab"]
    found = measure(calls, torch.device("cpu"), seconds=0.2)
    assert seen[:6] == ["a", "b"] * 3
    # the first three are warm-up, and one more of b is slow: the median does not care
    assert found.method == "clock"
    assert found.median_us == pytest.approx(10_000)
    assert found.runs == 5


def test_spread_is_that_of_the_quartiles(monkeypatch):
    clock = HostClock(monkeypatch)
    durations = [1.0] * 3 + [0.001, 0.002, 0.003, 0.004, 0.005]
    call = clock.call("a", [*durations, 100.0], [])
    found = measure([call], torch.device("cpu"), seconds=0)
    assert (found.median_us, found.spread_us) == (pytest.approx(3000), pytest.approx(2000))
    assert found.fastest_us == pytest.approx(1000)


@pytest.mark.parametrize(
    ("spread", "fastest", "waited", "steady"),
    [
        (25, 99, None, True),
        (26, 99, None, False),
        (1, 67, 0.1, True),
        (1, 66, 0.1, False),
        (1, 99, 0.11, False),
    ],
)
def test_runs_that_were_not_alone_are_not_steady(spread, fastest, waited, steady):
    assert Timing(100.0, spread, fastest, 9, "clock", waited).steady is steady


def test_waiting_for_a_cpu_counts_while_the_runs_go_on(monkeypatch):
    """Nothing else shows what hits every run alike."""
    clock = HostClock(monkeypatch)
    told = iter([5.0, 5.5])
    monkeypatch.setattr(timing, "waited_seconds", lambda: next(told))
    found = measure([clock.call("a", [0.2], [])], torch.device("cpu"), seconds=0.2)
    assert found.runs == 5
    assert (found.spread_us, found.fastest_us) == (pytest.approx(0), pytest.approx(200_000))
    assert found.waited == pytest.approx(0.5)
    assert not found.steady
    monkeypatch.setattr(timing, "waited_seconds", lambda: None)
    found = measure([clock.call("a", [0.2], [])], torch.device("cpu"), seconds=0.2)
    assert (found.waited, found.steady) == (None, True)


def test_the_kernel_tells_how_long_threads_waited(tmp_path):
    for thread, text in {"7": "90 2000000000 3\n", "8": "1 500000000 1\n", "9": "gone"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "10").mkdir()
    assert timing.waited_seconds(tmp_path) == pytest.approx(2.5)
    assert timing.waited_seconds(tmp_path / "10") is None


def test_a_real_call_on_the_cpu():
    x = torch.randn(64, 64)
    found = measure([lambda: x @ x], torch.device("cpu"), seconds=0.01)
    assert 0 < found.median_us < 1e6
    assert found.runs >= 5


@pytest.mark.parametrize(
    ("cache", "nbytes", "limit", "copies"),
    [
        (50, 150, None, 1),
        (50, 149, None, 2),
        (50, 50, None, 3),
        (50, 10, None, 15),
        (50, 10, 45, 4),
        (50, 10, 5, 1),  # one copy is made, whatever the limit
        (10**9, 1, None, MOST_COPIES),
        (50, 0, None, 150),
    ],
)
def test_copies_do_not_fit_into_the_cache(cache, nbytes, limit, copies):
    assert copies_beyond(cache, nbytes, limit) == copies


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_on_a_gpu():
    device = torch.device("cuda")
    weights = [torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) for _ in range(4)]
    x = torch.randn(16, 2048, device=device, dtype=torch.bfloat16)
    graph = measure([lambda w=w: x @ w for w in weights], device)
    assert graph.method == "graph"
    assert 0.5 < graph.median_us < 1000
    events = measure([lambda: torch.unique(x > 0) if float(x.sum()) else x], device)
    assert events.method == "events"
    assert measure([lambda: x + 1], device).method == "graph"  # nothing is left behind
