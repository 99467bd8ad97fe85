"""selfcheck: passes on a right backend, fails on a wrong one, and its oracle is independent."""

from __future__ import annotations

import pytest
import torch
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.errors import BackendUnavailable, Unsupported, UsageError
from mxfp4prep.layouts import LAYOUTS
from mxfp4prep.runtime.backends import BACKENDS, torch_backend
from mxfp4prep.runtime.distinct import distinct
from mxfp4prep.runtime.oracle import decode_rows, linear_oracle
from mxfp4prep.runtime.selfcheck import selfcheck

PREFIX = "model.layers.1.mlp.experts"


def layers():
    return [
        Layer("a.fc1", 64, 256, bias=True),
        Layer("b.fc1", 64, 256),
        Layer("c.fc1", 48, 96, "triton"),
        Layer("d.fc1", 50, 80, "kept", "w4a16"),
        Layer("e.fc1", 64, 256, "asm", "w4a8", input_scale=0.5),
        Layer(f"{PREFIX}.gate_up_proj", 128, 256, experts=3, bias=True),
        Layer(f"{PREFIX}.down_proj", 256, 64, "triton", experts=3),
    ]


@pytest.fixture
def prepared(tmp_path):
    build(tmp_path, layers())
    return mxfp4prep.load(tmp_path)


def test_right_layers_pass(prepared):
    rows = list(selfcheck(prepared, m=(0, 1, 33)))
    assert [row.m for row in rows] == [0, 1, 33] * 5
    # b.fc1 is what a.fc1 is
    assert {row.layer for row in rows} == {"a.fc1", "c.fc1", "d.fc1", "e.fc1", PREFIX}
    assert all(row.ok for row in rows), rows
    assert {row.path for row in rows} == {"asm", "triton", "kept", "asm+triton"}
    for row in rows:
        assert row.backend == "torch"
        assert row.milliseconds >= 0
        assert 0 <= row.max_rel_error < 0.01
        assert row.max_abs_error >= row.max_rel_error or row.max_abs_error < 1


def test_p15_every_small_m_is_compared_with_the_reference(prepared):
    small = (1, 2, 4, 8, 16, 31)
    rows = list(selfcheck(prepared, ["a.fc1"], m=small))
    assert [row.m for row in rows] == list(small)
    assert all(row.ok for row in rows), rows


def test_an_overflow_that_must_be_is_right_and_another_is_not():
    from mxfp4prep.runtime.selfcheck import _error

    expected = torch.tensor([1e39, -1e39, 1.0, 1e39], dtype=torch.float64)
    y = torch.tensor([torch.inf, -torch.inf, torch.inf, -torch.inf], dtype=torch.bfloat16)
    assert _error(y, expected).tolist() == [0, 0, torch.inf, torch.inf]


def test_all_or_named_layers(prepared):
    every = {row.layer for row in selfcheck(prepared, sample=False, m=(1,))}
    assert every == {"a.fc1", "b.fc1", "c.fc1", "d.fc1", "e.fc1", PREFIX}
    assert [row.layer for row in selfcheck(prepared, ["b.fc1"], m=(1,))] == ["b.fc1"]
    assert [row.layer for row in selfcheck(prepared, [PREFIX], m=(1,))] == [PREFIX]


def test_unknown_names_are_refused_before_anything_runs(prepared):
    with pytest.raises(UsageError, match="nothing"):
        selfcheck(prepared, ["a.fc1", "nothing"])
    assert prepared.bytes_read == 0


def test_it_keeps_no_layer(prepared):
    list(selfcheck(prepared, m=(1,)))
    once = prepared.bytes_read
    list(selfcheck(prepared, m=(1,)))
    assert prepared.bytes_read == 2 * once


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_device_may_be_named(prepared, device):
    assert all(row.ok for row in selfcheck(prepared, device=device, m=(1,)))


def test_devices_without_float64_are_judged_on_the_cpu(prepared, monkeypatch):
    """cpu:0 stands for such a device: the layer that runs there is not the one that judges."""
    from mxfp4prep.runtime import selfcheck as module

    judges, runners = [], []
    real = torch_backend.gemm

    def gemm(x, weight, *rest, **more):
        runners.append(weight.data_ptr())
        return real(x, weight, *rest, **more)

    def oracle(layer, *rest):
        judges.append((layer.weight.data_ptr(), layer.weight.device))
        return linear_oracle(layer, *rest)

    monkeypatch.setattr(module, "DOUBLE", ())
    monkeypatch.setattr(module, "linear_oracle", oracle)
    monkeypatch.setattr(torch_backend, "gemm", gemm)
    rows = list(selfcheck(prepared, ["a.fc1", PREFIX], device="cpu:0", m=(1, 3)))
    assert [row.ok for row in rows] == [True] * 4
    assert {where for _, where in judges} == {torch.device("cpu")}
    assert not {pointer for pointer, _ in judges} & set(runners)


def test_the_backend_may_be_named(prepared, monkeypatch):
    entry = BACKENDS["torch"]._replace(input_quants=frozenset({"mxfp4"}))
    monkeypatch.setitem(BACKENDS, "other", entry)
    rows = list(selfcheck(prepared, ["a.fc1", PREFIX], backend="other", m=(1,)))
    assert [row.backend for row in rows] == ["other", "other"]
    with pytest.raises(BackendUnavailable, match="input quantization none"):
        list(selfcheck(prepared, ["d.fc1"], backend="other", m=(1,)))


def test_layers_keep_the_backend_that_they_were_loaded_for(tmp_path, monkeypatch):
    build(tmp_path, layers())
    monkeypatch.setitem(BACKENDS, "other", BACKENDS["torch"])
    prepared = mxfp4prep.load(tmp_path, backend="other")
    for device in (None, "cpu", "cpu:0"):
        (row,) = selfcheck(prepared, ["a.fc1"], device=device, m=(1,))
        assert row.backend == "other"


def test_experts_of_each_shape_are_checked(tmp_path):
    other = PREFIX.replace("1", "2")
    more = [
        Layer(f"{other}.gate_up_proj", 64, 256, experts=3),
        Layer(f"{other}.down_proj", 256, 32, "triton", experts=3),
    ]
    build(tmp_path, [*layers(), *more])
    checked = {row.layer for row in selfcheck(mxfp4prep.load(tmp_path), m=(2,))}
    assert {PREFIX, other} <= checked


def test_nan_scales_must_give_nan(tmp_path):
    layer = Layer("fc1", 64, 256)
    layer.fill(torch.Generator().manual_seed(0))
    layer.scale[3, 1] = 255
    build(tmp_path, [layer])
    rows = list(selfcheck(mxfp4prep.load(tmp_path), m=(2,)))
    assert rows[0].ok
    assert rows[0].max_abs_error < 10


def wrong_order(plain):
    """A backend that forgot that scales are tiled: reads them as if they were row-major."""

    def broken(weight, scale, n, k, path):
        packed, groups = plain(weight, scale, n, k, path)
        return packed, scale.reshape(groups.shape)

    return broken


def test_a_backend_that_mixes_up_scales_fails(prepared, monkeypatch):
    from mxfp4prep.runtime import decoding

    monkeypatch.setattr(torch_backend, "plain_matrix", wrong_order(torch_backend.plain_matrix))
    monkeypatch.setattr(decoding, "plain_matrix", wrong_order(decoding.plain_matrix))
    rows = list(selfcheck(prepared, ["a.fc1", "c.fc1", "d.fc1", PREFIX], m=(8,)))
    assert [row.ok for row in rows] == [False, False, True, False]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * 1.02,
        lambda y: y.index_fill(1, torch.tensor([5]), 0),
        lambda y: torch.where(torch.arange(y.shape[0])[:, None] == 6, torch.nan, y),
        lambda y: y.roll(1, 0),
    ],
)
def test_wrong_numbers_fail(prepared, monkeypatch, spoil):
    real = torch_backend.gemm
    monkeypatch.setattr(torch_backend, "gemm", lambda *a, **k: spoil(real(*a, **k)).to(a[0].dtype))
    assert [row.ok for row in selfcheck(prepared, ["a.fc1"], m=(8,))] == [False]


def test_the_oracle_does_not_use_the_inverse(prepared, monkeypatch):
    """Were layouts' inverse wrong, both sides must not be wrong alike."""
    layer = prepared["a.fc1"]
    expected = layer.dequantize().double()

    def fail(*_args):
        raise AssertionError("inverse was called")

    monkeypatch.setattr(type(LAYOUTS["tile16x16"]), "inverse", fail)
    shape = layer.n, layer.k
    assert torch.equal(
        decode_rows(layer.weight, layer.scale, shape, "asm", torch.arange(64)), expected
    )
    part = decode_rows(layer.weight, layer.scale, shape, "asm", torch.arange(17, 40))
    assert torch.equal(part, expected[17:40])


def test_the_oracle_knows_the_scales_extremes(tmp_path):
    layer = Layer("fc1", 2, 64, "triton", packed=torch.full((2, 32), 0xF1, dtype=torch.uint8))
    layer.scale = torch.tensor([[0, 254], [255, 127]], dtype=torch.uint8)
    build(tmp_path, [layer])
    found = mxfp4prep.load(tmp_path)["fc1"]
    dense = decode_rows(found.weight, found.scale, (2, 64), "triton", torch.arange(2))
    assert dense[0, 0] == 0.5 * 2.0**-127
    assert dense[0, 1] == -6 * 2.0**-127
    assert dense[0, 32] == 0.5 * 2.0**127
    assert dense[0, 33] == -torch.inf, "2^129.6 is not in float32, which backends decode to"
    assert dense[1, :32].isnan().all()
    assert torch.equal(dense[1, 32:34], torch.tensor([0.5, -6.0]).double())


@pytest.mark.parametrize("scheme", ["w4a4", "w4a16"])
def test_weights_beyond_float32_are_right_and_counted(tmp_path, scheme):
    """Infinite weights: with inputs of zero (w4a4 has them) the product is NaN, as it must be."""
    layer = Layer("fc1", 64, 256, "triton", scheme)
    layer.scale = torch.full((64, 8), 120, dtype=torch.uint8)
    layer.scale[3, 2] = 254
    generator = torch.Generator().manual_seed(0)
    up = Layer(f"{PREFIX}.gate_up_proj", 128, 64, "triton", scheme, experts=2)
    down = Layer(f"{PREFIX}.down_proj", 64, 64, "triton", scheme, experts=2)
    down.scale = torch.full((2, 64, 2), 120, dtype=torch.uint8)
    down.scale[:, 5, 1] = 254
    up.fill(generator)
    build(tmp_path, [layer, up, down])
    rows = list(selfcheck(mxfp4prep.load(tmp_path), m=(1, 4)))
    assert all(row.ok for row in rows), rows
    assert {row.layer for row in rows} == {"fc1", PREFIX}
    assert all(0 < row.nan <= row.m for row in rows if scheme == "w4a4"), rows
    assert all(0 < row.max_rel_error < 0.05 for row in rows if row.layer == "fc1"), rows


def test_sums_that_overflow_on_their_way_are_right_and_hide_no_other_error(tmp_path, monkeypatch):
    layer = Layer("fc1", 64, 256, "triton", "w4a16")
    layer.fill(torch.Generator().manual_seed(0))
    layer.scale[::2] = 250  # 2^123, sums of 256 products up to some 2^134: not in float32
    build(tmp_path, [layer])
    spoilt = []

    def check():
        return list(selfcheck(mxfp4prep.load(tmp_path), m=(8,)))

    real = torch_backend.gemm

    def watched(*arguments, **options):
        y = real(*arguments, **options)
        spoilt.append(int((~y.isfinite()).sum()))
        return y

    monkeypatch.setattr(torch_backend, "gemm", watched)
    assert [row.ok for row in check()] == [True]
    assert spoilt[0] > 0
    odd = torch.tensor([1])  # a row of usual scales
    monkeypatch.setattr(
        torch_backend, "gemm", lambda *a, **k: real(*a, **k).index_fill(1, odd, torch.inf)
    )
    assert [row.ok for row in check()] == [False]


def test_an_infinite_value_hides_no_other_error(tmp_path, monkeypatch):
    up = Layer(f"{PREFIX}.gate_up_proj", 128, 64, "triton", "w4a16", experts=1)
    down = Layer(f"{PREFIX}.down_proj", 64, 64, "triton", "w4a16", experts=1)
    for layer in (up, down):
        layer.fill(torch.Generator().manual_seed(0))
    down.scale[:, 5] = 254
    down.packed[:, 5] = 0
    down.packed[:, 5, 0] = 4  # 2 * 2^127, infinite, and no NaN
    build(tmp_path, [up, down])
    right = list(selfcheck(mxfp4prep.load(tmp_path), m=(1, 4)))
    assert [(row.ok, row.nan) for row in right] == [(True, 0)] * 2, right
    assert all(row.max_rel_error > 1e-6 for row in right), right
    real = torch_backend.fused_moe
    monkeypatch.setattr(torch_backend, "fused_moe", lambda *a, **k: real(*a, **k) * 1.5)
    assert not any(row.ok for row in selfcheck(mxfp4prep.load(tmp_path), m=(1, 4)))


def test_nothing_to_check_is_not_all_right(tmp_path):
    build(tmp_path, [], copied={"model.norm.weight": torch.ones(3)})
    prepared = mxfp4prep.load(tmp_path)
    for names, sample in ((None, True), (None, False), ([], True)):
        with pytest.raises(Unsupported, match="no MXFP4 layer to run") as caught:
            selfcheck(prepared, names, sample=sample)
        assert str(tmp_path) in str(caught.value)
        assert caught.value.hint
    with pytest.raises(Unsupported, match="no MXFP4 layer to run"):
        distinct(prepared)
