"""What was read is read and held once, however it is asked for again."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from moe_cases import BLOCK, PREFIX, mlp, routing
from prepared_factory import build

import mxfp4prep
from mxfp4prep import RepackWarning

EXPERTS, HIDDEN, INTER = 3, 256, 512
SHARED = f"{BLOCK}.shared_expert"
MATRIX = HIDDEN * INTER * 17 // 32
"""Bytes of one matrix and its scale."""
BANKS = ("w13", "w13_scale", "w2", "w2_scale")


def model(root, bias: bool):
    generator = torch.Generator().manual_seed(0)
    layers = []
    for name in (*(f"{PREFIX}.{number}" for number in range(EXPERTS)), SHARED):
        layers += mlp(name, HIDDEN, INTER, generator, bias=bias)
    build(root, layers)
    return root


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return model(tmp_path_factory.mktemp("kept") / "plain", bias=False)


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """Biases are looked at anew."""
    return model(tmp_path_factory.mktemp("kept") / "biased", bias=True)


def storages(module) -> list[int]:
    return [getattr(module, name).untyped_storage().data_ptr() for name in BANKS]


def answers_alike(module, other) -> None:
    x, weights, ids = routing(EXPERTS, HIDDEN)
    assert torch.equal(module(x, weights, ids), other(x, weights, ids))


RANKS = [
    {},
    {"tp_rank": 1, "tp_size": 2},
    {"tp_rank": 1, "tp_size": 2, "ep_rank": 1, "ep_size": 2},
]


@pytest.mark.parametrize("rank", RANKS, ids=["whole", "tp", "ep"])
@pytest.mark.parametrize("fusion", ["fused", "separate"])
@pytest.mark.parametrize("model", ["plain", "biased"])
def test_a_shared_expert_is_all_that_is_read_after_everything_was(model, fusion, rank, request):
    where = request.getfixturevalue(model)
    prepared = mxfp4prep.load(where, lazy=False, **rank)
    before = prepared.bytes_read
    routed = prepared.experts(PREFIX)
    assert prepared.bytes_read == before
    moe = prepared.experts(PREFIX, shared="auto", fusion=fusion)
    anew = mxfp4prep.load(where, **rank).experts(PREFIX, shared="auto", fusion=fusion)
    answers_alike(moe, anew)
    if model == "plain":
        share = 1 if "ep_size" in rank else rank.get("tp_size", 1)
        assert prepared.bytes_read - before == (3 * MATRIX // share if fusion == "fused" else 0)
    if fusion == "separate":
        assert storages(moe) == storages(routed)
        parts = (*moe.shared.layers, moe.shared.down)
        for layer in parts:
            mine = prepared[layer.name].weight
            assert layer.weight.data_ptr() == mine.data_ptr()
            assert layer is not prepared[layer.name]


@pytest.mark.parametrize("rank", RANKS, ids=["whole", "tp", "ep"])
def test_the_smaller_banks_are_given_up(plain, rank):
    prepared = mxfp4prep.load(plain, lazy=False, **rank)
    smaller = weakref.ref(prepared.experts(PREFIX))
    moe = prepared.experts(PREFIX, shared="auto")
    gc.collect()
    assert smaller() is None, "nobody holds two copies of the routed experts"
    read = prepared.bytes_read
    routed = prepared.experts(PREFIX)
    assert storages(routed) == storages(moe)
    assert routed.w13.shape[0] == moe.w13.shape[0] - moe.shared_slots
    answers_alike(routed, mxfp4prep.load(plain, **rank).experts(PREFIX))
    assert prepared.experts(PREFIX, shared="auto") is moe
    assert prepared.bytes_read == read
    prepared.load_all()
    assert prepared.bytes_read == read
    assert prepared.experts(PREFIX) is routed


def test_a_module_that_its_caller_holds_stays_as_it_is(plain):
    prepared = mxfp4prep.load(plain)
    held = prepared.experts(PREFIX)
    before = held.w13.data_ptr()
    prepared.experts(PREFIX, shared="auto")
    assert held.w13.data_ptr() == before
    answers_alike(held, prepared.experts(PREFIX))


def test_another_activation_or_clamp_is_the_same_banks(plain):
    prepared = mxfp4prep.load(plain)
    modules = [prepared.experts(PREFIX)]
    read = prepared.bytes_read
    modules += [prepared.experts(PREFIX, "gelu"), prepared.experts(PREFIX, limit=0.5)]
    assert prepared.bytes_read == read
    assert len({tuple(storages(module)) for module in modules}) == 1
    assert [module.activation for module in modules] == ["silu", "gelu", "silu"]
    assert modules[2].limit == 0.5
    answers_alike(modules[1], prepared.read_experts(PREFIX, "gelu"))
    assert prepared.bytes_read == 2 * read, "read_experts reads anew"


def test_everything_after_the_shared_expert_reads_the_rest_only(plain):
    prepared = mxfp4prep.load(plain)
    moe = prepared.experts(PREFIX, shared="auto", fusion="separate")
    read = prepared.bytes_read
    prepared.load_all()
    assert prepared.bytes_read == read == mxfp4prep.load(plain, lazy=False).bytes_read
    assert prepared[f"{SHARED}.down_proj"].weight.data_ptr() == moe.shared.down.weight.data_ptr()


def test_what_was_moved_is_not_used(plain):
    prepared = mxfp4prep.load(plain)
    prepared.experts(PREFIX).to("meta")
    prepared[f"{SHARED}.down_proj"].to("meta")
    moe = prepared.experts(PREFIX, shared="auto", fusion="separate")
    assert not any(buffer.is_meta for buffer in moe.buffers())
    answers_alike(moe, mxfp4prep.load(plain).experts(PREFIX, shared="auto", fusion="separate"))


def test_one_warning_for_banks_that_are_used_twice(plain):
    """Width 512 by 4 ranks is 128 columns a rank: no ASM tile of 256, for down alone."""
    prepared = mxfp4prep.load(plain, tp_rank=3, tp_size=4)
    with pytest.warns(RepackWarning, match="experts: .*repacked") as caught:
        prepared.experts(PREFIX)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared.experts(PREFIX, "gelu")
        moe = prepared.experts(PREFIX, shared="auto")
        prepared.experts(PREFIX)
    with pytest.warns(RepackWarning):
        anew = mxfp4prep.load(plain, tp_rank=3, tp_size=4).experts(PREFIX, shared="auto")
    answers_alike(moe, anew)


def test_a_warning_points_at_the_callers_line_whoever_asks(plain):
    with pytest.warns(RepackWarning) as caught:
        mxfp4prep.load(plain, tp_rank=0, tp_size=4, lazy=False)
    assert {warning.filename for warning in caught} == {__file__}


def test_nothing_is_kept_of_experts_that_fail(plain):
    prepared = mxfp4prep.load(plain)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared.load_all(stop)
    answers_alike(prepared.experts(PREFIX), mxfp4prep.load(plain).experts(PREFIX))


def test_the_slots_of_another_shared_expert_are_not_taken(tmp_path):
    generator = torch.Generator().manual_seed(0)
    layers, names = [], (SHARED, f"{BLOCK}.share_expert")
    for name in (f"{PREFIX}.0", *names):
        layers += mlp(name, HIDDEN, INTER, generator)
    build(tmp_path, layers)
    prepared = mxfp4prep.load(tmp_path)
    modules = [prepared.experts(PREFIX, shared=name) for name in names]
    for name, module in zip(names, modules, strict=True):
        assert (module.shared_slots, module.shared_name) == (1, name)
        anew = mxfp4prep.load(tmp_path).experts(PREFIX, shared=name)
        assert torch.equal(module.w2, anew.w2)
        assert torch.equal(module.w13_scale, anew.w13_scale)
    assert not torch.equal(modules[0].w2, modules[1].w2)
    assert prepared.bytes_read == 9 * MATRIX, "the routed expert once"


def test_slots_that_are_used_twice_are_repacked_once(tmp_path):
    generator = torch.Generator().manual_seed(0)
    layers = mlp(f"{PREFIX}.0", HIDDEN, INTER, generator)
    build(tmp_path, [*layers, *mlp(SHARED, HIDDEN, INTER, generator, paths=("triton", "kept"))])
    prepared = mxfp4prep.load(tmp_path)
    with pytest.warns(RepackWarning, match="shared_expert: ") as caught:
        moe = prepared.experts(PREFIX, shared="auto")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = prepared.experts(PREFIX, shared=SHARED)
    assert storages(named) == storages(moe)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("device", ["cuda", 0])
def test_banks_on_a_gpu_are_copied_there(plain, device):
    prepared = mxfp4prep.load(plain, device, backend="torch", lazy=False)
    before = prepared.bytes_read
    moe = prepared.experts(PREFIX, shared="auto")
    assert prepared.bytes_read - before == 3 * MATRIX
    routed = prepared.experts(PREFIX)
    assert storages(routed) == storages(moe)
    assert prepared.bytes_read - before == 3 * MATRIX
    for module, how in ((moe, {"shared": "auto"}), (routed, {})):
        wanted = mxfp4prep.load(plain).experts(PREFIX, **how)
        for name in BANKS:
            assert torch.equal(getattr(module, name).cpu(), getattr(wanted, name)), name
