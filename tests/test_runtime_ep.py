"""Expert parallelism: whole experts spread over ranks, read once, and results that add up."""

from __future__ import annotations

import pytest
import torch
from moe_cases import BLOCK, PREFIX, close, expert_of, mlp, routed64, routing, small
from prepared_factory import Layer, build, edit_manifest

import mxfp4prep
from mxfp4prep.deployment import Deployment
from mxfp4prep.errors import CannotShard, Unsupported, UsageError
from mxfp4prep.runtime.oracle import experts_oracle
from mxfp4prep.runtime.spreading import Spread
from mxfp4prep.shared_experts import SharedBlock, decide

EXPERTS, HIDDEN, INTER = 5, 256, 512
SHARED = f"{BLOCK}.shared_expert"
GATE = f"{BLOCK}.shared_expert_gate"
PIECE = HIDDEN * INTER * 17 // 32
"""Bytes of one (512, 256) matrix and its scale."""


def block(width=INTER, inter=INTER, banks=False, paths=("asm", "asm"), bias=False):
    generator = torch.Generator().manual_seed(0)
    layers = []
    if banks:
        layers += [
            small(
                Layer(f"{PREFIX}.gate_up_proj", 2 * inter, HIDDEN, experts=EXPERTS, bias=bias),
                generator,
            ),
            small(
                Layer(f"{PREFIX}.down_proj", HIDDEN, inter, experts=EXPERTS, bias=bias), generator
            ),
        ]
    else:
        for number in range(EXPERTS):
            layers += mlp(f"{PREFIX}.{number}", HIDDEN, inter, generator, paths=paths, bias=bias)
    if width:
        layers += mlp(SHARED, HIDDEN, width, generator, paths=paths, bias=bias)
    return layers


def routed_of(layers):
    if layers[0].experts is None:
        return [expert_of(layers, f"{PREFIX}.{number}") for number in range(EXPERTS)]
    return [
        expert_of(
            [
                Layer(
                    layer.name.replace("experts.", f"experts.{number}."),
                    layer.n,
                    layer.k,
                    packed=layer.packed[number],
                    scale=layer.scale[number],
                    bias_values=None if layer.bias_values is None else layer.bias_values[number],
                )
                for layer in layers[:2]
            ],
            f"{PREFIX}.{number}",
        )
        for number in range(EXPERTS)
    ]


def expected(layers, x, weights, ids, gate=None, with_shared=True):
    y = routed64(routed_of(layers), x, weights, ids)
    if not with_shared:
        return y
    weight = 1.0 if gate is None else 1 / (1 + torch.exp(-(x.double() @ gate.double().T)))
    return y + weight * expert_of(layers, SHARED)(x)


def ranks(tp, ep):
    return [
        {"tp_rank": rank % tp, "tp_size": tp, "ep_rank": rank, "ep_size": ep} for rank in range(ep)
    ]


@pytest.mark.parametrize(
    ("experts", "size", "blocks"),
    [
        (8, 2, [range(4), range(4, 8)]),
        (5, 2, [range(3), range(3, 5)]),
        (5, 3, [range(2), range(2, 4), range(4, 5)]),
        (7, 5, [range(2), range(2, 4), range(4, 5), range(5, 6), range(6, 7)]),
        (3, 1, [range(3)]),
    ],
)
def test_blocks_are_contiguous_and_the_first_ranks_have_more(experts, size, blocks):
    assert [Spread(rank, size).block(experts, "x") for rank in range(size)] == blocks
    for rank in range(size):
        found = Spread(rank, size).expert_map(experts, "x")
        if size == 1:
            assert found is None
            continue
        assert found.dtype == torch.int32
        wanted = [blocks[rank].index(n) if n in blocks[rank] else -1 for n in range(experts)]
        assert found.tolist() == wanted


@pytest.mark.parametrize("banks", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_add_up_and_read_their_experts_only(tmp_path, banks, size):
    layers = block(width=0, banks=banks)
    build(tmp_path, layers, shards=2)
    x, weights, ids = routing(EXPERTS, HIDDEN, tokens=11, top=3)
    total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for rank in range(size):
        prepared = mxfp4prep.load(tmp_path, ep_rank=rank, ep_size=size)
        moe = prepared.experts(PREFIX)
        here = len(Spread(rank, size).block(EXPERTS, "x"))
        assert (moe.experts, moe.w13.shape[0], moe.intermediate) == (EXPERTS, here, INTER)
        assert prepared.bytes_read == here * 3 * PIECE
        y = moe(x, weights, ids)
        assert (y - experts_oracle(moe, x, weights, ids)).norm() < 1e-4 * y.norm()
        total += y.double()
    close(total, expected(layers, x, weights, ids, with_shared=False))


def test_biases_of_whole_experts_count_on_their_rank(tmp_path):
    layers = block(width=0, banks=True, bias=True)
    build(tmp_path, layers)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for rank in ranks(2, 2):
        total += mxfp4prep.load(tmp_path, **rank).experts(PREFIX)(x, weights, ids).double()
    close(total, expected(layers, x, weights, ids, with_shared=False))


@pytest.mark.parametrize("fusion", ["auto", "separate"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 5), (2, 2), (2, 4)])
def test_the_shared_expert_counts_once(tmp_path, fusion, gated, dtype, tp, ep):
    layers = block()
    generator = torch.Generator().manual_seed(5)
    gate = (torch.randn((1, HIDDEN), generator=generator) / 8).bfloat16() if gated else None
    build(tmp_path, layers, copied={f"{GATE}.weight": gate} if gated else None)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    x = x.to(dtype)
    total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for rank in ranks(tp, ep):
        prepared = mxfp4prep.load(tmp_path, **rank)
        moe = prepared.experts(PREFIX, shared="auto", fusion=fusion)
        here = len(Spread(rank["ep_rank"], ep).block(EXPERTS, "x"))
        assert moe.w13.shape[0] == here + (fusion == "auto")
        gate_nbytes = 2 * HIDDEN if gated else 0
        share = 1 if fusion == "auto" else tp  # fused it is whole on every rank, apart it is cut
        assert prepared.bytes_read == here * 3 * PIECE + 3 * PIECE // share + gate_nbytes
        y = moe(x, weights, ids)
        assert y.dtype == dtype
        if dtype == torch.float32:
            assert (y - experts_oracle(moe, x, weights, ids)).norm() < 1e-4 * y.norm()
        total += y.double()
        assert moe(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)
    close(total, expected(layers, x, weights, ids, gate), 1e-4 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("width", [96, 128, 512])
@pytest.mark.parametrize("fusion", ["auto", "separate"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_what_becomes_of_the_shared_expert_is_what_audit_says(tmp_path, width, fusion, tp, ep):
    layers = block(width=width, inter=width, paths=("triton", "triton"))
    build(tmp_path, layers)
    fusable = SharedBlock(SHARED, width, True, "", 1, ())
    mode = "auto" if fusion == "auto" else "separate"
    said = decide(fusable, tp, Deployment(expert_parallel=ep > 1, shared_experts=mode)).decision
    rank = {"tp_rank": tp - 1, "tp_size": tp, "ep_rank": ep - 1, "ep_size": ep}
    prepared = mxfp4prep.load(tmp_path, **rank)
    if said == "impossible" or (width % (32 * tp) and ep == 1):
        with pytest.raises(CannotShard):
            prepared.experts(PREFIX, shared="auto", fusion=fusion)
        return
    moe = prepared.experts(PREFIX, shared="auto", fusion=fusion)
    if said == "fused":
        assert moe.shared_slots == 1
        assert moe.turn.of == ep
        return
    assert moe.shared_slots == 0
    assert moe.shared.down.k == (width // tp if said == "sliced" else width)
    assert moe.turn.of == (ep // tp if said == "sliced" and ep > 1 else ep)


def test_a_misaligned_shared_expert_is_whole_on_every_rank(tmp_path):
    """vLLM's Qwen3-Next: 1.5 groups a rank under expert parallelism -> replicated."""
    layers = block(width=96, inter=96, paths=("triton", "triton"))
    build(tmp_path, layers)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for rank in ranks(2, 2):
        moe = mxfp4prep.load(tmp_path, **rank).experts(PREFIX, shared="auto", fusion="separate")
        assert (moe.turn.mine, moe.turn.of) == (rank["ep_rank"], 2)
        total += moe(x, weights, ids).double()
    close(total, expected(layers, x, weights, ids))


def test_other_layers_are_cut_as_before(tmp_path):
    generator = torch.Generator().manual_seed(1)
    dense = small(Layer("model.layers.0.mlp.down_proj", HIDDEN, INTER), generator)
    build(tmp_path, [*block(), dense])
    prepared = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2, ep_rank=1, ep_size=2)
    assert prepared[dense.name].k == INTER // 2
    single = prepared[f"{PREFIX}.0.down_proj"]
    assert (single.k, single.tp_size) == (INTER, 1)
    assert (prepared.ep_rank, prepared.ep_size) == (1, 2)
    assert "rank 1 of 2, experts of rank 1 of 2" in repr(prepared)
    assert "here=2" in repr(prepared.experts(PREFIX))


def test_minus_one_and_unknown_ids(tmp_path):
    layers = block(width=0)
    build(tmp_path, layers)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    ids[2, 0], weights[2, 0] = -1, torch.nan
    moe = mxfp4prep.load(tmp_path, ep_rank=1, ep_size=2).experts(PREFIX)
    y = moe(x, weights, ids.to(torch.int16))
    assert not y.isnan().any()
    kept = torch.where(ids >= 3, ids, -1)
    close(y, expected(layers, x, weights, kept, with_shared=False))
    for wrong in (-2, EXPERTS, 2**31, 2**40):
        ids[2, 0] = wrong
        with pytest.raises(UsageError, match="no such expert"):
            moe(x, weights, ids)


def test_a_rank_none_of_whose_experts_is_hit(tmp_path):
    build(tmp_path, block(width=0))
    x, weights, _ = routing(EXPERTS, HIDDEN)
    moe = mxfp4prep.load(tmp_path, ep_rank=4, ep_size=5).experts(PREFIX)
    y = moe(x, weights, torch.zeros((len(x), 2), dtype=torch.int64))
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ({"ep_rank": 2, "ep_size": 2}, ["ep_rank 2, ep_size 2"]),
        ({"ep_rank": -1, "ep_size": 2}, ["no such rank"]),
        ({"ep_rank": 0, "ep_size": 0}, ["no such rank"]),
        ({"tp_rank": 0, "tp_size": 2, "ep_rank": 1, "ep_size": 2}, ["do not go together"]),
        ({"tp_rank": 0, "tp_size": 2, "ep_rank": 0, "ep_size": 3}, ["a multiple of tp_size"]),
    ],
)
def test_ranks_that_do_not_exist(tmp_path, rank, words):
    build(tmp_path, block(width=0))
    with pytest.raises(UsageError) as caught:
        mxfp4prep.load(tmp_path, **rank)
    for word in words:
        assert word in str(caught.value)


def test_fewer_experts_than_ranks(tmp_path):
    build(tmp_path, block(width=0))
    with pytest.raises(Unsupported, match="5 experts, ep_size 6"):
        mxfp4prep.load(tmp_path, ep_rank=5, ep_size=6).experts(PREFIX)


@pytest.mark.parametrize("converted_for_it", [False, True])
def test_experts_that_cannot_be_cut_say_that_they_can_be_spread(tmp_path, converted_for_it):
    build(tmp_path, block(width=0, inter=96, paths=("triton", "triton")))
    edit_manifest(tmp_path, lambda d: d["target"].update(expert_parallel=converted_for_it))
    with pytest.raises(CannotShard, match=r"1\.5 groups") as caught:
        mxfp4prep.load(tmp_path, tp_rank=0, tp_size=2).experts(PREFIX)
    assert "add ep_rank=tp_rank, ep_size=tp_size" in caught.value.hint
    # verdicts of a checkpoint converted with --ep are about whole experts
    assert ("it can be cut at tp" in caught.value.hint) != converted_for_it


@pytest.mark.parametrize("banks", [False, True])
def test_everything_at_once_is_the_ranks_part_only(tmp_path, banks):
    layers = block(width=0, banks=banks)
    build(tmp_path, layers)
    prepared = mxfp4prep.load(tmp_path, ep_rank=1, ep_size=2, lazy=False)
    assert prepared.bytes_read == 2 * 3 * PIECE
    prepared.experts(PREFIX)
    assert prepared.bytes_read == 2 * 3 * PIECE


@pytest.mark.parametrize("route", ["at once", "one by one"])
def test_the_layers_of_a_shared_expert_that_cannot_be_cut_are_whole(tmp_path, route):
    """As where the experts take it in apart. Its down decides, although 96 rows can be halved."""
    layers = block(width=96, inter=96, paths=("triton", "triton"))
    generator = torch.Generator().manual_seed(1)
    layers += mlp("model.layers.0.mlp", HIDDEN, INTER, generator)
    build(tmp_path, layers)
    dense = {layer.name: layer.dense for layer in layers}
    for rank in ranks(2, 2):
        prepared = mxfp4prep.load(tmp_path, **rank)
        if route == "at once":
            prepared.load_all()
        for part in ("gate", "up", "down"):
            name = f"{SHARED}.{part}_proj"
            assert torch.equal(prepared[name].dequantize().double(), dense[name])
            assert prepared[name].tp_size == 1
        assert prepared["model.layers.0.mlp.down_proj"].tp_size == 2, "other layers are cut"
        before = prepared.bytes_read
        moe = prepared.experts(PREFIX, shared="auto", fusion="separate")
        read = prepared.bytes_read - before
        assert read == (0 if route == "at once" else 3 * HIDDEN * 96 * 17 // 32 * moe.w13.shape[0])


def test_layers_of_a_shared_expert_that_can_be_cut_are_cut(tmp_path):
    build(tmp_path, block(width=128, paths=("triton", "triton")))
    for rank in ranks(2, 4):
        prepared = mxfp4prep.load(tmp_path, lazy=False, **rank)
        assert prepared[f"{SHARED}.down_proj"].k == 64
        assert prepared[f"{SHARED}.gate_proj"].n == 64


def test_everything_at_once_fails_as_each_would(tmp_path):
    """Where experts are not spread, a shared expert that cannot be cut is refused."""
    build(tmp_path, block(width=96, paths=("triton", "triton")))
    prepared = mxfp4prep.load(tmp_path, tp_rank=0, tp_size=2)
    with pytest.raises(CannotShard, match=r"shared_expert\.down_proj: .*1\.5 groups"):
        prepared.load_all()
