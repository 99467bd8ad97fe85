"""The shared expert: one more routed expert or layers apart, plain or gated, on any rank."""

from __future__ import annotations

import warnings

import pytest
import torch
from moe_cases import BLOCK, PREFIX, close, expert_of, mlp, routed64, routing, small
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep import RepackWarning
from mxfp4prep.errors import CannotShard, InvalidCheckpoint, Unsupported, UsageError
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.oracle import experts_oracle
from mxfp4prep.runtime.shared_expert import SharedExpert, SharedGate

EXPERTS, HIDDEN, INTER = 3, 256, 512
SHARED = f"{BLOCK}.shared_expert"
GATE = f"{BLOCK}.shared_expert_gate"


def block(name=SHARED, width=INTER, seed=0, **shared):
    """Layers of routed experts and of a shared one, and what each computes."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    bias = bool(shared.get("bias"))
    for number in range(EXPERTS):
        layers += mlp(f"{PREFIX}.{number}", HIDDEN, INTER, generator, bias=bias)
    layers += mlp(name, HIDDEN, width, generator, **shared)
    return layers


def bank_block(seed=0, **shared):
    """The same, with routed experts in two 3-D tensors as Qwen3.5 stores them."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        small(Layer(f"{PREFIX}.gate_up_proj", 2 * INTER, HIDDEN, experts=EXPERTS), generator),
        small(Layer(f"{PREFIX}.down_proj", HIDDEN, INTER, experts=EXPERTS), generator),
    ]
    return layers + mlp(SHARED, HIDDEN, INTER, generator, **shared)


def routed_of(layers):
    if layers[0].experts is None:
        return [expert_of(layers, f"{PREFIX}.{number}") for number in range(EXPERTS)]
    experts = []
    for number in range(EXPERTS):
        single = [
            Layer(
                layer.name.replace("experts.", f"experts.{number}."),
                layer.n,
                layer.k,
                packed=layer.packed[number],
                scale=layer.scale[number],
            )
            for layer in layers[:2]
        ]
        experts.append(expert_of(single, f"{PREFIX}.{number}"))
    return experts


def expected(layers, x, weights, ids, name=SHARED, gate=None, **how):
    y = routed64(routed_of(layers), x, weights, ids, **how)
    weight = 1.0
    if gate is not None:
        weight = 1 / (1 + torch.exp(-(x.double() @ gate.double().T)))
    return y + weight * expert_of(layers, name)(x, **how)


def plain_gate():
    generator = torch.Generator().manual_seed(9)
    return (torch.randn((1, HIDDEN), generator=generator) / 8).to(torch.bfloat16)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("fusion", ["auto", "fused", "separate"])
@pytest.mark.parametrize(
    "make",
    [block, bank_block, lambda: block(fused=True), lambda: bank_block(fused=True)],
    ids=["single", "banks", "single, gate_up", "banks, gate_up"],
)
def test_the_shared_expert_is_added(tmp_path, make, fusion, gated):
    layers, gate = make(), plain_gate() if gated else None
    build(tmp_path, layers, copied={f"{GATE}.weight": gate} if gated else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe = mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto", fusion=fusion)
    assert moe.experts == EXPERTS
    assert moe.w13.shape[0] == EXPERTS + (fusion != "separate")
    assert moe.shared_slots == (fusion != "separate")
    assert isinstance(moe.shared, SharedExpert) == (fusion == "separate")
    x, weights, ids = routing(EXPERTS, HIDDEN)
    target = expected(layers, x, weights, ids, gate=gate)
    close(moe(x, weights, ids), target)
    assert (moe(x, weights, ids) - experts_oracle(moe, x, weights, ids)).norm() < 1e-3
    y = moe(x.bfloat16().view(3, 3, HIDDEN), weights.view(3, 3, 2), ids.view(3, 3, 2))
    assert y.dtype == torch.bfloat16
    assert y.shape == (3, 3, HIDDEN)
    close(y.view(9, HIDDEN), expected(layers, x.bfloat16(), weights, ids, gate=gate), 0.01)


def test_without_shared_it_is_left_alone(tmp_path):
    layers = block()
    build(tmp_path, layers)
    prepared = mxfp4prep.load(tmp_path)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    moe = prepared.experts(PREFIX)
    close(moe(x, weights, ids), routed64(routed_of(layers), x, weights, ids))
    assert (moe.shared, moe.shared_slots, moe.shared_name) == (None, 0, None)
    assert prepared.experts(PREFIX, shared="auto") is not moe
    assert prepared.experts(PREFIX, shared="auto") is prepared.experts(PREFIX, shared="auto")


def test_a_shared_expert_that_is_not_there(tmp_path):
    build(tmp_path, block())
    with pytest.raises(KeyError, match="no shared expert of that name") as caught:
        mxfp4prep.load(tmp_path).experts(PREFIX, shared=f"{BLOCK}.shared_exprt")
    assert f"expected {SHARED}" in str(caught.value)
    assert "shared='auto'" in caught.value.hint


def test_auto_finds_none_where_there_is_none(tmp_path):
    build(tmp_path, [layer for layer in block() if SHARED not in layer.name])
    prepared = mxfp4prep.load(tmp_path)
    assert prepared.experts(PREFIX, shared="auto").shared_slots == 0
    with pytest.raises(KeyError, match="no shared expert"):
        prepared.experts(PREFIX, shared=SHARED)


@pytest.mark.parametrize("name", ["shared_expert", "shared_experts", "shared_mlp", "share_expert"])
def test_names(tmp_path, name):
    """`share_expert` (Step-3) is no name that the table knows, but may be named."""
    module = f"{BLOCK}.{name}"
    layers = block(module)
    build(tmp_path, layers)
    wanted = module if name == "share_expert" else "auto"
    moe = mxfp4prep.load(tmp_path).experts(PREFIX, shared=wanted)
    assert (moe.shared_slots, moe.shared_name) == (1, module)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    close(moe(x, weights, ids), expected(layers, x, weights, ids, module))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_wide_shared_expert_is_several_slots(tmp_path, tp):
    """DeepSeek's n_shared_experts 2 is one MLP of twice the width."""
    layers = block(width=2 * INTER)
    build(tmp_path, layers)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for rank in range(tp):
        moe = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=tp).experts(PREFIX, shared="auto")
        assert (moe.shared_slots, moe.w13.shape[0]) == (2, EXPERTS + 2)
        total += moe(x, weights, ids).double()
    close(total, expected(layers, x, weights, ids))


@pytest.mark.parametrize("fusion", ["fused", "separate"])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_add_up(tmp_path, fusion, bias):
    layers = block(bias=bias)
    gate = plain_gate()
    build(tmp_path, layers, copied={f"{GATE}.weight": gate}, shards=2)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    nbytes = 0
    for rank in range(2):
        prepared = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=2)
        moe = prepared.experts(PREFIX, shared="auto", fusion=fusion)
        assert moe.intermediate == INTER // 2
        total += moe(x, weights, ids).double()
        nbytes += prepared.bytes_read
    close(total, expected(layers, x, weights, ids, gate=gate))
    if not bias:  # biases are read whole
        stored = (EXPERTS + 1) * 3 * HIDDEN * INTER * 17 // 32
        assert nbytes == stored + 2 * HIDDEN * 2, "every weight once, the gate on each rank"


def test_static_scales_of_the_slots(tmp_path):
    layers = block(scheme="w4a8")
    for number, layer in enumerate(layers):
        layer.scheme, layer.input_scale = "w4a8", 0.25 * (1 + number // 3)
    build(tmp_path, layers)
    moe = mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto", fusion="fused")
    assert moe.a1_scale.tolist() == moe.a2_scale.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_an_mxfp4_gate(tmp_path):
    """Exclude lists that miss it leave a quantized gate."""
    generator = torch.Generator().manual_seed(4)
    layers = block()
    gate = small(Layer(GATE, 1, HIDDEN, "triton", "w4a16"), generator)
    build(tmp_path, [*layers, gate])
    moe = mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto")
    assert isinstance(moe.shared_gate, PreparedLinear)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    close(moe(x, weights, ids), expected(layers, x, weights, ids, gate=gate.dense))


def test_the_gate_is_exact_under_autocast():
    gate = SharedGate(plain_gate())
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gate(x)
    assert found.dtype == torch.float32
    close(found, x.double() @ plain_gate().double().T, 1e-6)
    for wrong in (torch.zeros((2, 4)), torch.zeros(4), torch.zeros((1, 4), dtype=torch.uint8)):
        with pytest.raises(UsageError, match="gate"):
            SharedGate(wrong)


def test_slots_are_repacked_for_the_banks_path(tmp_path):
    layers = block(paths=("triton", "kept"))
    build(tmp_path, layers)
    with pytest.warns(RepackWarning, match=r"shared_expert: .*repacked for path asm") as caught:
        moe = mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (moe.w13_path, moe.w2_path, moe.shared_slots) == ("asm", "asm", 1)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    close(moe(x, weights, ids), expected(layers, x, weights, ids))


def changed(**values):
    def change(layers):
        for layer in layers:
            if SHARED in layer.name:
                for key, value in values.items():
                    setattr(layer, key, value)
        return layers

    return change


def other_hidden(layers):
    generator = torch.Generator().manual_seed(1)
    return [*layers[:-3], *mlp(SHARED, 2 * HIDDEN, INTER, generator)]


NOT_FUSABLE = [
    (changed(scheme="w4a16"), "it is w4a16, the routed experts are w4a4"),
    (lambda layers: [*layers[:-3], *block(width=768)[-3:]], "width 768 is no multiple of"),
    (lambda layers: [*layers[:-3], *block(width=256)[-3:]], "width 256 is no multiple of"),
    (lambda layers: [*layers[:-3], *block(bias=True)[-3:]], "has a bias"),
    (
        lambda layers: [*block(bias=True)[:-3], *block(width=2 * INTER, bias=True)[-3:]],
        "a bias, which cannot be shared out",
    ),
    (lambda layers: interleaved(layers), "rows are interleaved"),
]


def interleaved(layers):
    layers = [*layers[:-3], *block(fused=True)[-2:]]
    layers[-2].gate_up = "interleaved"
    return layers


@pytest.mark.parametrize(("change", "why"), NOT_FUSABLE)
def test_what_cannot_be_fused_stands_apart(tmp_path, change, why):
    layers = change(block())
    build(tmp_path, layers)
    prepared = mxfp4prep.load(tmp_path)
    with pytest.raises(Unsupported, match=why) as caught:
        prepared.experts(PREFIX, shared="auto", fusion="fused")
    assert caught.value.where == SHARED
    assert "fusion='auto'" in caught.value.hint
    moe = prepared.experts(PREFIX, shared="auto")
    assert moe.shared_slots == 0
    assert moe.shared is not None
    if "interleaved" in why or "w4a16" in why:
        return
    x, weights, ids = routing(EXPERTS, HIDDEN)
    close(moe(x, weights, ids), expected(layers, x, weights, ids))


def test_another_hidden_size(tmp_path):
    build(tmp_path, other_hidden(block()))
    prepared = mxfp4prep.load(tmp_path)
    with pytest.raises(Unsupported, match="hidden size is 512, the routed experts' 256"):
        prepared.experts(PREFIX, shared="auto", fusion="fused")


def test_a_shared_expert_of_another_scheme_or_order_apart(tmp_path):
    layers = interleaved(block())
    layers[-1].scheme = layers[-2].scheme = "w4a16"
    build(tmp_path, layers)
    moe = mxfp4prep.load(tmp_path).experts(PREFIX, "swigluoai", 0.5, shared="auto")
    x, weights, ids = routing(EXPERTS, HIDDEN)
    shared = expert_of(layers, SHARED)
    both = layers[-2].dense
    shared.gate, shared.up = both[0::2], both[1::2]
    how = {"activation": "swigluoai", "limit": 0.5}
    target = routed64(routed_of(layers), x, weights, ids, **how)
    target += shared(x, **how, quantize=lambda v: v.double())
    close(moe(x, weights, ids), target)


def test_a_shared_expert_that_is_not_mxfp4(tmp_path):
    """Same repository, two revisions: in one the shared expert is bf16."""
    layers = block()[:-3]
    stored = torch.zeros((INTER, HIDDEN), dtype=torch.bfloat16)
    build(tmp_path, layers, copied={f"{SHARED}.up_proj.weight": stored})
    with pytest.raises(Unsupported, match=r"shared_expert\.up_proj.weight: .* but BF16") as caught:
        mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto")
    assert "leave shared out" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda layers: layers[:-1], InvalidCheckpoint, ["found gate, up", "down"]),
        (lambda layers: layers[:-2], InvalidCheckpoint, ["found gate, expected"]),
        (
            lambda layers: [*layers, Layer(f"{SHARED}.mixer", 64, 256)],
            Unsupported,
            ["shared_expert.mixer", "which part"],
        ),
        (
            lambda layers: [*layers, Layer(f"{SHARED}.w2", HIDDEN, INTER)],
            InvalidCheckpoint,
            ["more than one down"],
        ),
        (
            lambda layers: [*layers[:-1], Layer(f"{SHARED}.down_proj", HIDDEN, 256)],
            InvalidCheckpoint,
            ["do not fit together"],
        ),
        (
            lambda layers: [
                *layers,
                *mlp(f"{BLOCK}.shared_mlp", HIDDEN, INTER, torch.Generator()),
            ],
            Unsupported,
            ["several shared experts", "shared_expert, ", "shared_mlp"],
        ),
    ],
)
def test_shared_experts_that_do_not_fit_together(tmp_path, change, error, words):
    build(tmp_path, change(block()))
    with pytest.raises(error) as caught:
        mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto")
    for word in words:
        assert word in str(caught.value)


def test_unknown_fusion(tmp_path):
    build(tmp_path, block())
    with pytest.raises(UsageError, match="auto or fused or separate"):
        mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto", fusion="yes")


def test_a_misaligned_shared_expert_cannot_be_cut(tmp_path):
    """1.5 groups a rank: fused it would be cut like the routed experts, apart it is impossible."""
    layers = block(width=96, paths=("triton", "triton"))
    build(tmp_path, layers)
    with pytest.raises(CannotShard, match=r"1\.5 groups"):
        mxfp4prep.load(tmp_path, tp_rank=0, tp_size=2).experts(PREFIX, shared="auto")


def test_a_rule_that_keeps_the_shared_expert_whole(tmp_path):
    """Every rank holds it, and each adds it for every other row."""
    layers = block()
    for layer in layers:
        if SHARED in layer.name:
            layer.parallel = "replicated"
    build(tmp_path, layers)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    total = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for rank in range(2):
        prepared = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=2)
        with pytest.raises(Unsupported, match="cut otherwise"):
            prepared.experts(PREFIX, shared="auto", fusion="fused")
        moe = prepared.experts(PREFIX, shared="auto")
        assert (moe.turn.mine, moe.turn.of) == (rank, 2)
        assert "turn=" in repr(moe)
        total += moe(x, weights, ids).double()
    close(total, expected(layers, x, weights, ids))


def test_only_down_of_the_shared_expert_is_replicated_by_a_rule(tmp_path):
    layers = block()
    layers[-1].parallel = "replicated"
    build(tmp_path, layers)
    with pytest.raises(Unsupported, match="cut otherwise than down"):
        mxfp4prep.load(tmp_path, tp_rank=0, tp_size=2).experts(PREFIX, shared="auto")


@pytest.mark.parametrize("wrong", [-2, EXPERTS, EXPERTS + 1, 2**40])
def test_ids_never_name_the_shared_slot(tmp_path, wrong):
    build(tmp_path, block())
    moe = mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto")
    x, weights, ids = routing(EXPERTS, HIDDEN)
    ids[4, 1] = wrong
    with pytest.raises(UsageError, match="no such expert"):
        moe(x, weights, ids)


@pytest.mark.parametrize("fusion", ["fused", "separate"])
def test_no_rows_and_slots_left_out(tmp_path, fusion):
    layers = block()
    build(tmp_path, layers)
    moe = mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto", fusion=fusion)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    assert moe(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)
    close(moe(x, weights, torch.full_like(ids, -1)), expert_of(layers, SHARED)(x))


def test_repr(tmp_path):
    build(tmp_path, block())
    text = repr(mxfp4prep.load(tmp_path).experts(PREFIX, shared="auto"))
    assert "experts=3, " in text
    assert "shared_slots=1" in text


@pytest.mark.parametrize(("fusion", "width"), [("fused", INTER), ("separate", INTER), ("auto", 96)])
@pytest.mark.parametrize("mxfp4_gate", [False, True])
def test_experts_on_meta_are_filled_later(tmp_path, fusion, mxfp4_gate, width):
    """Spread over two ranks, a shared expert of width 96 is whole on each where it stands apart."""
    layers = block(width=width, paths=("triton", "triton") if width == 96 else ("asm", "asm"))
    copied = {f"{GATE}.weight": plain_gate()}
    if mxfp4_gate:
        gate = Layer(GATE, 1, HIDDEN, "triton", "w4a16")
        layers, copied = [*layers, small(gate, torch.Generator().manual_seed(4))], {}
    build(tmp_path, layers, copied=copied)
    rank = {"tp_rank": 1, "tp_size": 2, "ep_rank": 1, "ep_size": 2}
    empty = mxfp4prep.load(tmp_path, device="meta", **rank)
    moe = empty.experts(PREFIX, shared="auto", fusion=fusion)
    x, weights, ids = routing(EXPERTS, HIDDEN)
    assert moe(x.to("meta"), weights.to("meta"), ids.to("meta")).is_meta
    assert empty.bytes_read == 0
    prepared = mxfp4prep.load(tmp_path, **rank)
    prepared.materialize(torch.nn.ModuleList([moe]))
    read = prepared.bytes_read
    assert not any(buffer.is_meta for buffer in moe.buffers())
    wanted = prepared.read_experts(PREFIX, shared="auto", fusion=fusion)
    assert prepared.bytes_read == 2 * read, "nothing is read twice"
    assert torch.equal(moe(x, weights, ids), wanted(x, weights, ids))
