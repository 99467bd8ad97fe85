"""bench: what is timed, beside what, against which floor, and how it is told."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from prepared_factory import Layer, build
from test_report import displayed, validate

import mxfp4prep
from mxfp4prep import cli
from mxfp4prep.errors import BackendUnavailable, Unsupported, UsageError
from mxfp4prep.report.bench_document import bench_document
from mxfp4prep.report.bench_text import bench_text, duration, scaled
from mxfp4prep.report.progress import steps
from mxfp4prep.report.screen import Screen
from mxfp4prep.runtime import benching, bf16_reference, ceilings, devices, workloads
from mxfp4prep.runtime.backends import BACKENDS, torch_backend
from mxfp4prep.runtime.bf16_reference import Banks, Routing, experts_calls
from mxfp4prep.runtime.ceilings import Ceilings, Floor, floor_of
from mxfp4prep.runtime.distinct import Alike, distinct, top_k
from mxfp4prep.runtime.timing import Timing
from mxfp4prep.runtime.workloads import Size, load_of

CPU = torch.device("cpu")
EXPERTS = "model.layers.{}.mlp.experts"
LIMITS = Ceilings(bandwidth=1e9, rate=1e12)
HOST_IS_FULL = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 2047999997952 bytes. Error code 12 (Cannot allocate memory)"
)
"""What torch 2.13 says on Linux."""


def layers():
    found = [
        Layer("a.fc1", 64, 256, bias=True),
        Layer("b.fc1", 64, 256),
        Layer("c.fc1", 64, 256, "triton"),
        Layer("d.fc1", 50, 80, "kept", "w4a16"),
        Layer("e.fc1", 64, 256, "asm", "w4a8", input_scale=0.5),
    ]
    for i, width in ((1, 64), (2, 64), (3, 32)):
        for expert in range(5):
            for part, (n, k) in (("gate", (width, 128)), ("up", (width, 128))):
                name = f"{EXPERTS.format(i)}.{expert}.{part}_proj"
                found.append(Layer(name, n, k, "triton"))
            found.append(Layer(f"{EXPERTS.format(i)}.{expert}.down_proj", 128, width, "triton"))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench")
    build(path, layers(), config={"num_experts_per_tok": 3})
    return path


@pytest.fixture
def prepared(root):
    return mxfp4prep.load(root)


@pytest.fixture
def quick(monkeypatch):
    """No copies, and a time for each call that is not measured; every call runs once."""
    measured = []

    def measure(calls, device, seconds=0.2):
        measured.append([call() for call in calls])
        return Timing(100.0 * len(measured), 2.0, 98.0 * len(measured), 7, "clock")

    monkeypatch.setattr(devices, "CACHE_ON_CPU", 1)
    monkeypatch.setattr(benching, "measure", measure)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda _device: LIMITS)
    return measured


# --- what is run --------------------------------------------------------------------------------


def test_every_shape_once_and_experts_in_their_banks(prepared):
    assert distinct(prepared) == [
        Alike("a.fc1", 2, experts=False),
        Alike("c.fc1", 1, experts=False),
        Alike("d.fc1", 1, experts=False),
        Alike("e.fc1", 1, experts=False),
        Alike(EXPERTS.format(1), 2, experts=True),
        Alike(EXPERTS.format(3), 1, experts=True),
    ]


def test_single_experts_only_where_their_bank_is_not_named(prepared):
    single = f"{EXPERTS.format(1)}.0.down_proj"
    assert distinct(prepared, ["b.fc1", single]) == [
        Alike("b.fc1", 1, experts=False),
        Alike(single, 1, experts=False),
    ]
    assert distinct(prepared, [single, EXPERTS.format(1)]) == [
        Alike(EXPERTS.format(1), 1, experts=True)
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts_per_tok": 4}, 4),
        ({"text_config": {"num_experts_per_tok": 3}}, 3),
        ({"experts_per_token": 1}, 1),
        ({"num_experts_per_tok": 99}, 8),
        ({"num_experts_per_tok": None}, 2),
        ({}, 2),
    ],
)
def test_how_many_experts_a_token_goes_to(config, expected):
    assert top_k(config, 8) == expected
    assert top_k(config, 1) == 1


def test_a_layers_work_is_its_bytes_and_its_operations(prepared, monkeypatch):
    layer = prepared.read("a.fc1")
    stored = 64 * 256 // 2 + 64 * 256 // 32
    monkeypatch.setattr(devices, "CACHE_ON_CPU", stored)
    load = load_of(layer, {})
    assert load.size == Size(64, 256)
    assert len(load.modules) == 3
    assert len({module.weight.data_ptr() for module in load.modules}) == 3
    assert [tuple(weight.shape) for weight in load.weights] == [(64, 256)]
    assert load.weights[0].dtype == torch.bfloat16
    work = load.at(7, torch.Generator().manual_seed(0))
    assert work.nbytes == stored + 7 * (64 + 256) * 2
    assert work.operations == 2 * 7 * 64 * 256
    results = [call() for call in work.calls]
    assert len(results) == 3
    assert all(torch.equal(result, results[0]) for result in results)
    assert [tuple(call().shape) for call in work.bf16["linear"]] == [(7, 64)]


def test_experts_get_other_tokens_each_time(prepared, monkeypatch):
    layer = prepared.read_experts(EXPERTS.format(1))
    matrix = 64 * 128 // 2 + 64 * 128 // 32
    monkeypatch.setattr(devices, "CACHE_ON_CPU", 10 * 3 * matrix)
    seen = []
    real = torch_backend.fused_moe

    def spy(x, w13, *rest, **more):
        seen.append((w13.data_ptr(), rest[3], rest[4]))  # topk_weights, topk_ids
        return real(x, w13, *rest, **more)

    monkeypatch.setattr(torch_backend, "fused_moe", spy)
    load = load_of(layer, prepared.config)
    assert load.size == Size(128, 128, 5, 3)
    work = load.at(1, torch.Generator().manual_seed(0))
    for call in work.calls:
        assert call().shape == (1, 128)
    assert len(load.modules) == 6  # 30 matrices fill 3 caches; each bank has 15 of 3
    assert len(work.calls) == 10  # one token hits 3 experts of 5
    assert len({pointer for pointer, _, _ in seen}) == 6
    picks = [tuple(sorted(ids.flatten().tolist())) for _, _, ids in seen]
    assert len(set(picks)) > 1
    for _, weights, ids in seen:
        assert len(set(ids.flatten().tolist())) == 3
        assert 0 <= int(ids.min()) <= int(ids.max()) < 5
        assert float(weights.sum()) == pytest.approx(1)
    assert work.nbytes == 3 * 3 * matrix + 2 * 128 * 2
    assert work.operations == 3 * 2 * 3 * 64 * 128


def test_many_tokens_move_every_expert_once(prepared, monkeypatch):
    monkeypatch.setattr(devices, "CACHE_ON_CPU", 1)
    load = load_of(prepared.read_experts(EXPERTS.format(1)), prepared.config)
    work = load.at(500, torch.Generator().manual_seed(0))
    matrix = 64 * 128 // 2 + 64 * 128 // 32
    assert work.nbytes == 5 * 3 * matrix + 2 * 500 * 128 * 2
    assert set(work.bf16) == {"grouped_mm", "loop"}


def test_bf16_is_left_out_where_it_does_not_fit(prepared, quick, monkeypatch):
    monkeypatch.setattr(workloads, "free_nbytes", lambda _device: 64 * 256 * 2)
    shapes = [Alike("a.fc1", 1, experts=False), Alike(EXPERTS.format(1), 1, experts=True)]
    rows = list(benching.bench(prepared, shapes, ["torch"], CPU, LIMITS, m=(2,)))
    assert [row.bf16 for row in rows] == [None, None]
    document = bench_document("x", device_document(), rows)
    validate(document, "bench")
    assert (document["rows"][0]["bf16_us"], document["rows"][0]["bf16_ratio"]) == (None, None)
    assert "did not fit into memory" in "\n".join(bench_text(document, Screen(), "m"))


# --- bfloat16 -----------------------------------------------------------------------------------


def moe64(x, banks, routing):
    """Token by token in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    width = banks.w2.shape[-1]
    for token in range(x.shape[0]):
        for weight, expert in zip(routing.weights[token], routing.ids[token], strict=True):
            both = banks.w13[expert].double() @ x[token].double()
            middle = torch.sigmoid(both[:width]) * both[:width] * both[width:]
            out[token] += weight.double() * (banks.w2[expert].double() @ middle)
    return out


@pytest.mark.parametrize("m", [1, 9])
def test_both_ways_compute_what_experts_do(m):
    generator = torch.Generator().manual_seed(m)
    banks = Banks(
        (torch.randn((6, 64, 48), generator=generator) * 0.1).bfloat16(),
        (torch.randn((6, 48, 32), generator=generator) * 0.1).bfloat16(),
    )
    x = torch.randn((m, 48), generator=generator).bfloat16()
    ids = torch.rand((m, 6), generator=generator).topk(2).indices.int()
    routing = Routing(torch.rand((m, 2), generator=generator), ids)
    ways = experts_calls(x, [banks], [routing])
    assert set(ways) == {"grouped_mm", "loop"}
    expected = moe64(x, banks, routing)
    for calls in ways.values():
        error = (calls[0]().double() - expected).norm() / expected.norm()
        assert error < 0.02


def test_without_a_grouped_product_there_is_the_loop(monkeypatch):
    def none(*_args, **_more):
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(bf16_reference.F, "grouped_mm", none, raising=False)
    monkeypatch.setattr(torch, "_grouped_mm", none, raising=False)
    banks = Banks(torch.zeros(2, 64, 32).bfloat16(), torch.zeros(2, 32, 32).bfloat16())
    routing = Routing(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    assert set(experts_calls(torch.zeros(1, 32).bfloat16(), [banks], [routing])) == {"loop"}


def test_the_faster_way_counts(prepared, quick):
    shape = Alike(EXPERTS.format(1), 1, experts=True)
    (row,) = benching.bench(prepared, [shape], ["torch"], CPU, LIMITS, m=(4,))
    assert row.bf16.by == "loop"  # measured first, and the played clock only gets slower
    assert row.bf16.timing.median_us == 100
    assert row.timing.median_us == 300


# --- floor --------------------------------------------------------------------------------------


def test_the_floor_is_what_takes_longer():
    assert floor_of(1e6, 1e6, LIMITS) == Floor(pytest.approx(1000), "memory")
    assert floor_of(1e3, 1e12, LIMITS) == Floor(pytest.approx(1e6), "arithmetic")


def test_ceilings_are_measured(monkeypatch):
    seen = []

    def measure(calls, device):
        seen.append(calls[0]())
        return Timing(2000.0, 1.0, 1000.0, 5, "clock")

    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setattr(ceilings, "COPY_NBYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "cache_nbytes", lambda _device: 1 << 20)
    monkeypatch.setattr(ceilings, "SQUARE", {"cpu": 32})
    limits = ceilings.measure_ceilings(CPU)
    assert seen[0].nbytes == 4 << 20  # more than any cache
    assert limits.bandwidth == pytest.approx(2 * (4 << 20) / 1e-3)
    assert (seen[1].shape, seen[1].dtype) == ((32, 32), torch.bfloat16)
    assert limits.rate == pytest.approx(2 * 32**3 / 1e-3)
    monkeypatch.setattr(ceilings, "free_nbytes", lambda _device: 1 << 20)
    ceilings.measure_ceilings(CPU)
    assert seen[2].nbytes == 1 << 18


# --- rows ---------------------------------------------------------------------------------------


@pytest.fixture
def other_backend(monkeypatch):
    """A second backend on the CPU, which takes W4A4 and no other input."""
    ran = []

    def gemm(x, *args, **more):
        ran.append("gemm")
        return torch_backend.gemm(x, *args, **more)

    module = SimpleNamespace(gemm=gemm, fused_moe=torch_backend.fused_moe)
    monkeypatch.setitem(sys.modules, "other_backend", module)
    entry = BACKENDS["torch"]._replace(
        module="other_backend", input_quants=frozenset({"mxfp4"}), what="another"
    )
    monkeypatch.setitem(BACKENDS, "other", entry)
    return SimpleNamespace(module=module, ran=ran)


def test_each_backend_runs_what_it_can(prepared, quick, other_backend):
    backends = benching.usable_backends(CPU)
    assert backends == ["torch", "other"]
    results = list(benching.bench(prepared, distinct(prepared), backends, CPU, LIMITS, m=(1, 3)))
    rows = [row for row in results if isinstance(row, benching.BenchRow)]
    skipped = [row for row in results if isinstance(row, benching.Skipped)]
    assert [(skip.layer, skip.backend, skip.m) for skip in skipped] == [
        ("d.fc1", "other", None),
        ("e.fc1", "other", None),
    ]
    assert "does not handle input quantization none" in skipped[0].reason
    assert [(row.m, row.backend) for row in rows if row.layer == "a.fc1"] == [
        (1, "torch"),
        (1, "other"),
        (3, "torch"),
        (3, "other"),
    ]
    assert len(other_backend.ran) == 2 * 2  # a.fc1 and c.fc1 at two m
    first = rows[0]
    assert (first.layers, first.path, first.scheme) == (2, "asm", "w4a4")
    assert first.bf16.by == "linear"
    assert first.floor == floor_of(64 * 256 / 2 + 64 * 8 + (64 + 256) * 2, 2 * 64 * 256, LIMITS)
    assert rows[-1].path == "triton+triton"
    # bfloat16 is measured once for both backends
    assert rows[0].bf16 is rows[1].bf16


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unsupported("x", "this m"), "x: this m"),
        (torch.OutOfMemoryError("GPU out of memory.\nToo large"), "out of memory"),
        (RuntimeError(HOST_IS_FULL), "out of memory: found 2.05 TB more asked for"),
    ],
)
def test_what_a_backend_cannot_do_after_all_is_said(prepared, quick, other_backend, error, reason):
    def gemm(x, *args, **more):
        if x.shape[0] > 1:
            raise error
        return torch_backend.gemm(x, *args, **more)

    other_backend.module.gemm = gemm
    shapes = [Alike("a.fc1", 1, experts=False)]
    results = list(benching.bench(prepared, shapes, ["other", "torch"], CPU, LIMITS, m=(1, 2)))
    kinds = [type(result).__name__ for result in results]
    assert kinds == ["BenchRow", "BenchRow", "Skipped", "BenchRow"]
    assert results[2].m == 2
    assert results[2].reason == reason
    assert results[2].no_room is not isinstance(error, Unsupported)


def test_errors_that_are_not_about_memory_go_through(prepared, quick, other_backend):
    def gemm(*_args, **_more):
        raise RuntimeError("expected scalar type Half")

    other_backend.module.gemm = gemm
    shapes = [Alike("a.fc1", 1, experts=False)]
    with pytest.raises(RuntimeError, match="scalar type"):
        list(benching.bench(prepared, shapes, ["other"], CPU, LIMITS, m=(1,)))


@pytest.mark.parametrize("place", ["load_of", "at", "read"])
def test_memory_that_ends_before_anything_is_timed_is_said(prepared, quick, monkeypatch, place):
    """At whatever it is that asks for too much, the other shapes and sizes are still measured."""

    def full(*_args, **_more):
        raise RuntimeError(HOST_IS_FULL)

    shapes = [Alike("a.fc1", 1, experts=False), Alike("c.fc1", 1, experts=False)]
    if place == "at":
        real = workloads._activations
        monkeypatch.setattr(
            workloads, "_activations", lambda m, *a: full() if m > 1 else real(m, *a)
        )
    elif place == "load_of":
        real = benching.load_of
        monkeypatch.setattr(
            benching, "load_of", lambda x, c: full() if x.name == "a.fc1" else real(x, c)
        )
    else:
        real = prepared.read
        monkeypatch.setattr(prepared, "read", lambda n: full() if n == "a.fc1" else real(n))
    results = list(benching.bench(prepared, shapes, ["torch"], CPU, LIMITS, m=(1, 2)))
    skipped = [(r.layer, r.m, r.no_room) for r in results if isinstance(r, benching.Skipped)]
    if place == "at":
        assert skipped == [("a.fc1", 2, True), ("c.fc1", 2, True)]
    else:
        assert skipped == [("a.fc1", None, True)]
    assert len(results) == (4 if place == "at" else 3)


def test_experts_that_cannot_be_read_together_are_skipped(tmp_path, quick):
    found = [Layer(f"{EXPERTS.format(0)}.{i}.{part}_proj", 32, 32, "triton")
             for i in range(2) for part in ("gate", "up", "down")]  # fmt: skip
    found[3].scheme = "w4a16"
    build(tmp_path, [*found, Layer("a.fc1", 64, 256)])
    prepared = mxfp4prep.load(tmp_path)
    results = list(benching.bench(prepared, distinct(prepared), ["torch"], CPU, LIMITS, m=(1, 2)))
    assert [type(result).__name__ for result in results] == ["BenchRow", "BenchRow", "Skipped"]
    assert results[2].m is None
    assert "scheme" in results[2].reason


# --- devices ------------------------------------------------------------------------------------


def test_devices_that_torch_has(monkeypatch):
    assert devices.usable_device("cpu") == CPU
    for name in ("toaster", "", "cuda:-1", "meta"):
        with pytest.raises(UsageError, match="--device"):
            devices.usable_device(name, "--device")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices.usable_device("cuda:1") == torch.device("cuda", 1)
    assert devices.usable_device("cuda") == torch.device("cuda")
    with pytest.raises(BackendUnavailable, match=r"device cuda:2: .* torch sees 2"):
        devices.usable_device("cuda:2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="no GPU"):
        devices.usable_device("cuda")


@pytest.mark.parametrize("name", ["xpu", "mps", "hpu", "fpga"])
def test_devices_that_are_not_here_say_so_in_a_line(name):
    with pytest.raises(BackendUnavailable) as caught:
        devices.usable_device(name, "--device")
    assert str(caught.value).startswith(f"--device {name}: ")
    assert "\n" not in str(caught.value)


def test_the_cache_behind_the_l2_of_amds_gpus_counts(monkeypatch):
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: properties)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("torch.version.hip", None)
    assert devices.cache_nbytes(gpu) == 50 << 20
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert devices.cache_nbytes(gpu) == 256 << 20


def test_free_memory(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:   4096 kB\n")
    assert devices.free_nbytes(CPU, meminfo) == 4 << 20
    meminfo.write_text("MemTotal: 9 kB\n")
    assert devices.free_nbytes(CPU, meminfo) is None
    assert devices.free_nbytes(CPU, tmp_path / "none") is None
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (100, 500))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _device: 30)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _device: 10)
    assert devices.free_nbytes(torch.device("cuda", 0)) == 120
    assert devices.free_nbytes(torch.device("mps")) is None


# --- text and JSON ------------------------------------------------------------------------------


def device_document():
    return {
        "device": "cuda:0",
        "name": "NVIDIA H200",
        "torch": "2.11.0",
        "bandwidth": 4.153e12,
        "bf16_rate": 6.89e14,
    }


def row(layer="model.layers.0.mlp.down_proj", m=1, backend="triton", us=12.34, **changes):
    one = benching.BenchRow(
        layer, 48, Size(2560, 640), "asm", "w4a4", backend, m,
        Timing(us, us / 50, us * 0.99, 20, "graph"),
        benching.Bf16(Timing(us * 2, 0.1, us * 2, 20, "graph"), "linear"), Floor(us / 4, "memory"),
    )  # fmt: skip
    return one._replace(**changes)


def results():
    bank = Size(1536, 2048, 128, 8)
    return [
        row(),
        row(
            backend="torch", us=1234567.0, bf16=benching.Bf16(Timing(9, 1, 8, 9, "clock"), "linear")
        ),
        row(m=4096, us=123.4, floor=Floor(150, "arithmetic")),
        row("model.layers.1.mlp.experts", size=bank, layers=1, path="asm+triton", bf16=None),
        row("layer.\x1b[31m漢", us=0.5, layers=2),
        benching.Skipped("a.\x1bfc1", "aiter", None, "does not handle input quantization none"),
        benching.Skipped("b", "triton", 64, "out of memory"),
    ]


def test_the_document_is_what_the_schema_says():
    document = bench_document("model", device_document(), results())
    validate(json.loads(json.dumps(document)), "bench")
    first = document["rows"][0]
    assert (first["bf16_ratio"], first["floor_share"]) == (pytest.approx(2), pytest.approx(0.25))
    assert (first["n"], first["k"], first["experts"], first["top_k"]) == (2560, 640, None, None)
    assert document["rows"][3]["experts"] == 128
    assert document["skipped"][1] == {
        "layer": "b", "backend": "triton", "m": 64, "reason": "out of memory"
    }  # fmt: skip


def test_a_table_of_eighty_columns():
    document = bench_document("model", device_document(), results())
    text = bench_text(document, Screen(encoding="ascii"), "model")
    assert text[:7] == [
        "model on cuda:0 (NVIDIA H200, torch 2.11.0)",
        "measured ceilings: 4.15 TB/s copied, 689 TFLOP/s in bf16",
        "",
        "model.layers.0.mlp.down_proj and 47 more: 2560 x 640, asm, w4a4",
        "   m  backend     time  spread  bf16 time  x bf16    floor  share  bound by",
        "   1  triton   12.3 us      2%    24.7 us   2.00x  3.08 us    25%  memory",
        "   1  torch     1.23 s      2%       9 us  <0.01x   309 ms    25%  memory",
    ]
    assert text[7].endswith("150 us   122%  arithmetic")
    joined = "\n".join(text)
    assert joined.isascii()
    assert "\x1b" not in joined
    assert "128 experts of 1536 x 2048 and 2048 x 768, top 8, asm+triton" in " ".join(
        joined.split()
    )
    assert r"layer.\x1b[31m\u6f22 and 1 more" in joined
    assert r"not run: a.\x1bfc1 on aiter: does not handle" in joined
    assert "not run: b on triton at m 64: out of memory" in joined


def test_a_table_of_forty_columns():
    document = bench_document("model", device_document(), results()[:3])
    text = bench_text(document, Screen(columns=40), "m")
    at = text.index("m, backend")
    assert text[at - 2 : at + 7] == [
        "model.layers.0.mlp.down_proj and 47",
        "  more: 2560 x 640, asm, w4a4",
        "m, backend",
        "       time  spread  x bf16  share",
        "1 triton",
        "    12.3 us      2%   2.00x    25%",
        "1 torch",
        "     1.23 s      2%  <0.01x    25%",
        "4096 triton",
    ]


@pytest.mark.parametrize("columns", [40, 50, 78, 79, 80, 120])
def test_the_legend_has_the_heads_of_the_table_and_no_others(columns):
    document = bench_document("model", device_document(), results()[:3])
    text = bench_text(document, Screen(columns=columns), "m")
    (head,) = (line for line in text if "spread  " in line and "x bf16  " in line)
    heads = re.sub(r"^(m, backend| *m +backend)", "", head)
    heads = re.split(r" {2,}", heads.strip())
    legend = text[len(text) - text[::-1].index("") :]
    named = [re.split(r" {2,}", line)[0] for line in legend if not line.startswith(" ")]
    assert named == heads
    assert len(heads) == (7 if columns >= 79 else 4)


def unsteady():
    noisy, calm = Timing(900, 600, 800, 9, "clock"), Timing(900, 9, 890, 9, "clock", 0.01)
    return [
        row(timing=noisy),
        row(timing=calm),
        row(timing=calm, bf16=benching.Bf16(noisy, "linear")),
    ]


@pytest.mark.parametrize("columns", [24, 40, 80])
def test_rows_that_are_not_steady_say_so(columns):
    document = bench_document("model", device_document(), unsteady())
    validate(document, "bench")
    assert [row["steady"] for row in document["rows"]] == [False, True, False]
    first = document["rows"][0]
    assert (first["spread_us"], first["fastest_us"], first["waited"]) == (600, 800, None)
    assert document["rows"][1]["waited"] == 0.01
    assert document["rows"][2]["bf16_spread_us"] == 600
    text = " ".join(" ".join(bench_text(document, Screen(columns=columns), "m")).split())
    assert re.findall(r"(?:us,? (?:spread )?)(!?\d+%)", text) == ["!67%", "1%", "!1%"]
    assert "warning: 2 of 3 rows not to be trusted (! before the spread): something" in text
    document = bench_document("model", device_document(), results())
    assert "warning" not in "\n".join(bench_text(document, Screen(columns=columns), "m"))


@pytest.mark.parametrize("columns", [24, 40, 59, 60, 80, 120])
def test_it_fits(columns):
    document = bench_document("model", device_document(), results())
    lines = bench_text(document, Screen(columns=columns), "m")
    assert max(map(displayed, lines)) <= columns
    text = " ".join(lines)
    for cell in ("12.3 us", "2.00x", "25%", "4096"):
        assert cell in text


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0.4242, "0.424 us"), (12.34, "12.3 us"), (999.4, "999 us"), (999.6, "1 ms"),
     (1234.0, "1.23 ms"), (2.5e6, "2.5 s"), (12_345e6, "1.23e+04 s")],
)  # fmt: skip
def test_durations(microseconds, text):
    assert duration(microseconds) == text


def test_rates():
    assert scaled(4.153e12, "B") == "4.15 TB"
    assert scaled(85.5e9, "FLOP") == "85.5 GFLOP"
    assert scaled(2.5e15, "FLOP") == "2.5 PFLOP"
    assert scaled(12, "B") == "12 B"


def test_steps_are_counted():
    now = [0.0]
    stream = io.StringIO()
    with steps("timing", 30, stream, live=False, clock=lambda: now[0]) as advance:
        for _ in range(3):
            now[0] += 2
            advance(4)
    assert stream.getvalue().splitlines() == [
        "timing: 13 % (4 of 30, 13 s left)",
        "timing: 27 % (8 of 30, 11 s left)",
        "timing: 40 % (12 of 30, 9 s left)",
    ]


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    def call(*words):
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return call


def test_the_command_prints_json_and_text(run, root, quick):
    result = run("bench", root, "--m", "1,5", "--format", "json")
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    validate(document, "bench")
    assert document["device"]["device"] == "cpu"
    assert document["device"]["bandwidth"] == LIMITS.bandwidth
    assert [(row["layer"], row["m"]) for row in document["rows"][:3]] == [
        ("a.fc1", 1),
        ("a.fc1", 5),
        ("c.fc1", 1),
    ]
    assert len(document["rows"]) == 6 * 2
    assert {row["top_k"] for row in document["rows"]} == {None, 3}
    text = run("bench", root, "--m", "1", "--layers", "?.fc1")
    assert text.code == 0
    assert "a.fc1 and 1 more: 64 x 256, asm, w4a4" in text.out
    assert "experts" not in text.out


def test_by_default_four_sizes(run, root, quick):
    document = json.loads(run("bench", root, "--layers", "a.fc1", "--format", "json").out)
    assert [row["m"] for row in document["rows"]] == [1, 16, 64, 256]


def test_backends_by_name(run, root, quick, other_backend):
    words = ("bench", root, "--m", "1", "--layers", "a.fc1", "--format", "json")
    rows = json.loads(run(*words, "--backend", "other, torch", "--backend", "other").out)["rows"]
    assert [row["backend"] for row in rows] == ["other", "torch"]
    result = run("bench", root, "--layers", "[de].fc1", "--backend", "other")
    assert result.code == 4
    assert result.out == ""
    lines = result.err.splitlines()
    assert lines[0].startswith("error: backend other: runs none of these layers: does not handle")
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize(
    ("words", "code", "start"),
    [
        (["--backend", "nope"], 2, "error: backend: unknown: found 'nope', expected aiter or "),
        (["--backend", "torch,"], 2, "error: backend: unknown: found ''"),
        (["--backend", "aiter"], 4, "error: backend aiter: "),
        (["--layers", "nothing"], 2, "error: --layers nothing: matches no layer"),
        (["--device", "toaster"], 2, "error: --device: names no device: found 'toaster', expected"),
        (["--device", "cuda:300"], 2, "error: --device: names no device: found 'cuda:300'"),
        (["--device", "a\nb"], 2, r"error: --device: names no device: found 'a\nb', expected cpu"),
        (["--device", "meta"], 2, "error: --device: meta tensors hold no values"),
        (["--device", "mps"], 4, "error: --device mps: this build of torch ("),
        (["--m", "0"], 2, "error: --m: not a number of rows: found '0'"),
        (["--m", "1,x"], 2, "error: --m: not a number of rows: found 'x'"),
        (
            ["--m", "1000000000"],
            2,
            "error: --m: not a number of rows: found '1000000000', expected "
            "whole numbers from 1 to 999999999, separated by commas",
        ),
        (["--m", "9" * 5000], 2, "error: --m: not a number of rows: found '999"),
        (["--m", "0" * 5000 + "1"], 2, "error: --m: not a number of rows: found '000"),
    ],
)
def test_wrong_words(run, root, quick, words, code, start):
    result = run("bench", root, *words)
    assert (result.code, result.out) == (code, "")
    lines = result.err.splitlines()
    assert lines[0].startswith(start)
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert quick == []  # refused before anything ran


@pytest.mark.parametrize("verb", ["bench", "selfcheck"])
@pytest.mark.parametrize("layers", ["a.fc1", EXPERTS.format(1)])
def test_more_rows_than_fit_into_memory_are_one_error(run, root, quick, verb, layers):
    result = run(verb, root, "--m", "999999999", "--layers", layers, "--no-progress")
    assert (result.code, result.out) == (6, "")
    error, hint = result.err.splitlines()
    assert error.startswith(f"error: {layers} at m 999999999: too many rows for the memory here: ")
    assert " TB for them, expected at most " in error
    assert hint.startswith("hint: ask for fewer rows")
    assert quick == []


def test_rows_that_fit_are_measured_beside_those_that_do_not(run, root, quick):
    words = ("bench", root, "--m", "999999999,1", "--layers", "a.fc1", "--format", "json")
    result = run(*words)
    assert result.code == 0
    document = json.loads(result.out)
    validate(document, "bench")
    assert [row["m"] for row in document["rows"]] == [1]
    assert [skip["m"] for skip in document["skipped"]] == [999999999]
    assert document["skipped"][0]["reason"].startswith("too many rows")


def test_a_device_without_memory_for_the_ceilings_is_an_error(run, root, quick, monkeypatch):
    def full(_device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(ceilings, "measure_ceilings", full)
    result = run("bench", root, "--no-progress")
    assert (result.code, result.out) == (6, "")
    assert result.err.splitlines()[0] == (
        "error: cpu: out of memory: found 2.00 GiB more asked for"
    )


@pytest.mark.parametrize(("threads", "text"), [(1, ", 1 thread"), (2, ", 2 threads")])
def test_threads_are_counted(monkeypatch, threads, text):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert devices.device_name(CPU).endswith(text)


def test_no_gpu_and_no_checkpoint(run, root, tmp_path, quick, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("bench", root, "--device", "cuda:0")
    assert result.code == 4
    assert result.err == (
        "error: --device cuda:0: torch sees no GPU here\nhint: --device cpu runs the reference\n"
    )
    assert run("bench", tmp_path).code == 3
    assert run("bench", tmp_path / "nowhere").code == 3


@pytest.mark.parametrize("verb", ["bench", "selfcheck"])
def test_progress_adds_up(run, root, quick, monkeypatch, verb):
    from contextlib import contextmanager

    counted = {}

    @contextmanager
    def counting(label, total, *_args, **_more):
        counted[label] = [total, 0]

        def advance(count):
            counted[label][1] += count

        yield advance

    monkeypatch.setattr("mxfp4prep.report.progress.steps", counting)
    assert run(verb, root, "--m", "1,2").code == 0
    ((total, done),) = counted.values()
    assert done == total == 12 + (verb == "bench")
    counted.clear()
    assert run(verb, root, "--m", "1", "--no-progress").code == 0
    assert counted == {}


def test_for_real_without_colours_on_a_narrow_ascii_terminal(root):
    result = subprocess.run(
        [sys.executable, "-m", "mxfp4prep", "bench", str(root), "--m", "1", "--layers", "a.fc1"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "40", "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 40
    found = re.search(r"^1 torch\n +([0-9.]+) (us|ms|s) +!?[0-9]+% ", result.stdout, re.MULTILINE)
    assert found
    assert math.isfinite(float(found[1]))
    assert float(found[1]) > 0


@pytest.mark.parametrize("columns", [40, 100])
def test_a_bar_of_steps_on_a_terminal(columns, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with steps("timing", 30, stream, live=True) as advance:
        advance(12)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "timing" in shown
    assert ("12/30" if columns == 100 else "40%") in shown
    assert "bytes" not in shown
    assert "/s" not in shown


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_on_a_gpu(run, root):
    result = run("bench", root, "--device", "cuda", "--m", "1,16", "--format", "json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    validate(document, "bench")
    assert document["device"]["bandwidth"] > 1e10
    found = {(row["layer"], row["backend"]) for row in document["rows"]}
    assert {("a.fc1", "torch"), (EXPERTS.format(1), "torch")} <= found
    for row in document["rows"]:
        assert row["method"] in ("graph", "events")
        assert row["median_us"] > 0
        assert row["bf16_us"] > 0
