"""PreparedExperts against an expert-by-expert float64 reference, whole and cut for ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from moe_cases import Expert, pairwise, routed64
from prepared_factory import (
    LAYOUT_IDS,
    Layer,
    build,
    decode64,
    edit_manifest,
    fake_quantize64,
    lay_out,
)

import mxfp4prep
from mxfp4prep import RepackWarning
from mxfp4prep.errors import CannotShard, InvalidCheckpoint, Unsupported, UsageError
from mxfp4prep.runtime import ops
from mxfp4prep.runtime.gating import activation_of_config, gated

PREFIX = "model.layers.1.mlp.experts"
EXPERTS, HIDDEN, INTER, TOKENS, TOP = 4, 256, 512, 9, 2
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def small(layer: Layer, generator: torch.Generator) -> Layer:
    """Scales around 2^-6, so that hidden values stay near one whatever the clamp."""
    groups = -(-layer.k // 32)
    lead = () if layer.experts is None else (layer.experts,)
    shape = (*lead, layer.n, groups)
    layer.scale = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    return layer


def per_expert(names=NAMES, paths=("asm", "asm"), inter=INTER, bias=False, scheme="w4a4"):
    generator = torch.Generator().manual_seed(0)
    up_path, down_path = paths
    layers = []
    for expert in range(EXPERTS):
        for part, leaf in names.items():
            name = f"{PREFIX}.{expert}.{leaf}"
            if part == "down":
                layer = Layer(name, HIDDEN, inter, down_path, scheme, bias=bias)
            else:
                rows = 2 * inter if part == "gate_up" else inter
                layer = Layer(name, rows, HIDDEN, up_path, scheme, bias=bias)
            layers.append(small(layer, generator))
    return layers


def banks(order=None, path="asm", bias=False, names=("gate_up_proj", "down_proj")):
    generator = torch.Generator().manual_seed(0)
    up = Layer(f"{PREFIX}.{names[0]}", 2 * INTER, HIDDEN, path, experts=EXPERTS, bias=bias)
    up.gate_up = order
    down = Layer(f"{PREFIX}.{names[1]}", HIDDEN, INTER, path, experts=EXPERTS, bias=bias)
    return [small(up, generator), small(down, generator)]


def dense_of(layers: list[Layer], order: str):
    """Per expert: gate, up, down (n, k) float64 and their biases or None."""
    result = []
    for expert in range(EXPERTS):
        found = {}
        for layer in layers:
            parts = layer.name.removeprefix(f"{PREFIX}.").split(".")
            leaf = parts[-1]
            if len(parts) == 2 and int(parts[0]) != expert:
                continue
            matrix, bias = layer.dense, layer.bias_values
            if layer.experts is not None:
                matrix, bias = matrix[expert], None if bias is None else bias[expert]
            bias = torch.zeros(layer.n) if bias is None else bias
            if leaf in ("gate_up_proj", "w13"):
                half = layer.n // 2
                gate, up = (
                    (slice(0, None, 2), slice(1, None, 2))
                    if order == "interleaved"
                    else (slice(0, half), slice(half, None))
                )
                found["gate"], found["up"] = (matrix[gate], bias[gate]), (matrix[up], bias[up])
            else:
                part = {"w1": "gate", "w3": "up", "w2": "down"}.get(leaf, leaf.partition("_")[0])
                found[part] = matrix, bias
        result.append(found)
    return result


def reference(dense, x, weights, ids, act="silu", limit=None, quantize=fake_quantize64):
    """One token, one expert at a time, float64."""
    y = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for token in range(len(x)):
        for slot in range(ids.shape[1]):
            expert = dense[int(ids[token, slot])]
            row = quantize(x[token : token + 1].double())
            gate, up = (
                row @ expert[part][0].T + expert[part][1].double() for part in ("gate", "up")
            )
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            if act == "silu":
                hidden = gate / (1 + torch.exp(-gate)) * up
            elif act == "gelu":
                hidden = gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up
            else:
                hidden = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
            down = quantize(hidden.float().double()) @ expert["down"][0].T
            down += expert["down"][1].double()
            y[token] += weights[token, slot].double() * down[0]
    return y


def routing(seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, HIDDEN), generator=generator)
    weights = torch.rand((tokens, TOP), generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(tokens)])
    return x, weights, ids


def close(found, expected, tolerance=1e-4):
    """Norms: one rounding of the hidden vector that falls the other way moves single values."""
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


CASES = {
    "asm": (per_expert(), "concatenated"),
    "triton": (per_expert(paths=("triton", "triton")), "concatenated"),
    "kept": (per_expert(paths=("kept", "kept")), "concatenated"),
    "asm and triton": (per_expert(paths=("asm", "triton"), bias=True), "concatenated"),
    "w1 w3 w2": (per_expert({"gate": "w1", "up": "w3", "down": "w2"}), "concatenated"),
    "gate_up": (per_expert({"gate_up": "gate_up_proj", "down": "down_proj"}), "concatenated"),
    "banks": (banks(bias=True), "concatenated"),
    "banks triton": (banks(path="triton"), "concatenated"),
    "w13 banks": (banks(names=("w13", "w2")), "concatenated"),
    "interleaved": (banks("interleaved", bias=True), "interleaved"),
    "interleaved one by one": (
        [
            *(
                setattr(layer, "gate_up", "interleaved") or layer
                for layer in per_expert(
                    {"gate_up": "gate_up_proj", "down": "down_proj"}, ("triton", "triton")
                )
            )
        ],
        "interleaved",
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request, tmp_path_factory):
    layers, order = CASES[request.param]
    for layer in layers:
        if not layer.name.endswith(("gate_up_proj", "w13")):
            layer.gate_up = None
    root = tmp_path_factory.mktemp("experts") / "prepared"
    build(root, layers, shards=2)
    return root, dense_of(layers, order), order


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_add_up_to_the_whole(case, tp):
    root, dense, order = case
    x, weights, ids = routing()
    total = torch.zeros((TOKENS, HIDDEN), dtype=torch.float64)
    for rank in range(tp):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            moe = mxfp4prep.load(root, tp_rank=rank, tp_size=tp).experts(PREFIX)
        assert (moe.experts, moe.hidden, moe.intermediate) == (EXPERTS, HIDDEN, INTER // tp)
        assert moe.gate_up == order
        total += moe(x, weights, ids).double()
    # ranks quantize their share of the hidden vector as the whole is: 32-groups stay whole
    close(total, reference(dense, x, weights, ids))


def test_half_precision_and_leading_dimensions(case):
    root, dense, _ = case
    moe = mxfp4prep.load(root).experts(PREFIX)
    x, weights, ids = routing(1)
    x = x.bfloat16()
    y = moe(x.view(3, 3, HIDDEN), weights.view(3, 3, TOP), ids.view(3, 3, TOP).int())
    assert y.dtype == torch.bfloat16
    close(y.view(TOKENS, HIDDEN), reference(dense, x, weights, ids), 2**-7)
    assert moe(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)


def test_only_the_bytes_of_the_pieces_are_read(tmp_path):
    build(tmp_path, per_expert())
    prepared = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2)
    moe = prepared.experts(PREFIX)
    assert prepared.experts(PREFIX) is moe
    assert prepared.bytes_read == EXPERTS * 3 * HIDDEN * INTER // 2 * 17 // 32


@pytest.mark.parametrize("bank", [False, True])
def test_verified_banks_are_the_same(tmp_path, bank):
    build(tmp_path, banks() if bank else per_expert())
    plain = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2).experts(PREFIX)
    prepared = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2, verify=True)
    checked = prepared.experts(PREFIX)
    for (name, one), two in zip(plain.named_buffers(), checked.buffers(), strict=True):
        assert torch.equal(one, two), name
    assert prepared.bytes_read == EXPERTS * 3 * HIDDEN * INTER * 17 // 32, "each tensor once"


def test_experts_start_at_their_own_rows(tmp_path):
    """Rank 1 of a stored width of 384 starts at row 192, whatever kernels pad to."""
    layers = per_expert(paths=("triton", "triton"), inter=384)
    for layer in layers:
        if layer.n == 384:
            layer.packed = (
                torch.arange(384, dtype=torch.int32)
                .remainder(256)
                .to(torch.uint8)
                .view(-1, 1)
                .repeat(1, HIDDEN // 2)
            )
    build(tmp_path, layers)
    moe = mxfp4prep.load(tmp_path, tp_rank=1, tp_size=2).experts(PREFIX)
    rows = torch.arange(192, 384).remainder(256).to(torch.uint8)
    assert torch.equal(moe.w13[2, :, 0], torch.cat([rows, rows]))


@pytest.mark.parametrize("tp", [4])
def test_repacked_banks_warn_once(tmp_path, tp):
    """down has 512 columns: 128 a rank, no multiple of 256."""
    layers = per_expert(bias=True)
    build(tmp_path, layers)
    x, weights, ids = routing()
    total = torch.zeros((TOKENS, HIDDEN), dtype=torch.float64)
    for rank in range(tp):
        prepared = mxfp4prep.load(tmp_path, tp_rank=rank, tp_size=tp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moe = prepared.experts(PREFIX)
            prepared.experts(PREFIX)
        assert caught[0].category is RepackWarning
        assert len(caught) == 1
        assert PREFIX in str(caught[0].message)
        assert "down: " in str(caught[0].message)
        assert "gate and up" not in str(caught[0].message)
        assert (moe.w13_path, moe.w2_path) == ("asm", "triton")
        assert (moe.bias2 is None) == (rank > 0)
        assert moe.bias1.shape == (EXPERTS, 2 * INTER // tp)
        total += moe(x, weights, ids).double()
    close(total, reference(dense_of(layers, "concatenated"), x, weights, ids))


@pytest.mark.parametrize("other", ["triton", "kept"])
def test_experts_stored_for_different_paths_are_unified(tmp_path, other):
    layers = per_expert()
    layers[0].path = other
    build(tmp_path, layers)
    with pytest.warns(RepackWarning, match=rf"gate and up: .*different paths \(asm, {other}\)"):
        moe = mxfp4prep.load(tmp_path).experts(PREFIX)
    assert (moe.w13_path, moe.w2_path) == ("triton", "asm")
    x, weights, ids = routing()
    close(moe(x, weights, ids), reference(dense_of(layers, "concatenated"), x, weights, ids))


def test_experts_that_cannot_be_cut(tmp_path):
    build(tmp_path, per_expert(paths=("triton", "triton"), inter=96))
    with pytest.raises(CannotShard, match=r"1\.5 groups") as caught:
        mxfp4prep.load(tmp_path, tp_rank=0, tp_size=2).experts(PREFIX)
    assert caught.value.where == f"{PREFIX}.0.down_proj"


def test_single_experts_are_layers_too(tmp_path):
    layers = {layer.name: layer for layer in per_expert()}
    build(tmp_path, list(layers.values()))
    prepared = mxfp4prep.load(tmp_path)
    assert set(prepared) == set(layers)
    assert prepared.expert_prefixes == (PREFIX,)
    name = f"{PREFIX}.3.up_proj"
    assert torch.equal(prepared[name].dequantize().double(), layers[name].dense)


def test_banks_are_no_layers(tmp_path):
    build(tmp_path, banks())
    prepared = mxfp4prep.load(tmp_path)
    assert len(prepared) == 0
    assert f"{PREFIX}.down_proj" not in prepared
    with pytest.raises(KeyError, match=r"use experts\('model.layers.1.mlp.experts'\)"):
        prepared[f"{PREFIX}.down_proj"]


def without(name):
    return lambda layers: [layer for layer in layers if layer.name != f"{PREFIX}.{name}"]


def changed(**values):
    def change(layers):
        for key, value in values.items():
            setattr(layers[5], key, value)  # expert 1's down
        return layers

    return change


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (without("2.up_proj"), InvalidCheckpoint, ["no up matrix", "experts.2"]),
        (lambda x: [y for y in x if ".0." not in y.name], InvalidCheckpoint, ["experts.0"]),
        (lambda x: [y for y in x if "down" not in y.name], InvalidCheckpoint, ["down"]),
        (lambda x: [y for y in x if "gate" not in y.name], InvalidCheckpoint, ["gate"]),
        (changed(n=128, scale=None), Unsupported, ["experts.1.down_proj", "shape"]),
        (changed(k=256, scale=None), Unsupported, ["experts.1.down_proj", "shape"]),
        (changed(scheme="w4a16"), Unsupported, ["experts.1.down_proj", "scheme"]),
        (changed(bias=True), Unsupported, ["experts.1.down_proj", "bias"]),
        (changed(parallel="replicated"), Unsupported, ["experts.1.down_proj", "parallel"]),
        (
            lambda x: [*x, Layer(f"{PREFIX}.gate_up_proj", 2 * INTER, HIDDEN, experts=EXPERTS)],
            InvalidCheckpoint,
            ["found down, gate, gate_up, up"],
        ),
        (
            lambda x: [*x, Layer(f"{PREFIX}.up_proj", INTER, HIDDEN, experts=2)],
            InvalidCheckpoint,
            ["two up matrices"],
        ),
        (
            lambda x: [*x, Layer(f"{PREFIX}.1.mixer", INTER, HIDDEN)],
            Unsupported,
            ["experts.1.mixer", "part"],
        ),
    ],
)
def test_experts_that_do_not_fit_together(tmp_path, change, error, words):
    build(tmp_path, change(per_expert()))
    with pytest.raises(error) as caught:
        mxfp4prep.load(tmp_path).experts(PREFIX)
    for word in words:
        assert word in str(caught.value)


def test_only_gate_has_a_bias(tmp_path):
    layers = per_expert()
    for layer in layers:
        layer.bias = layer.name.endswith("gate_proj")
    build(tmp_path, layers)
    with pytest.raises(InvalidCheckpoint, match="only one has a bias"):
        mxfp4prep.load(tmp_path).experts(PREFIX)


def test_gate_and_down_of_different_width(tmp_path):
    layers = per_expert()
    for layer in layers:
        if "down" in layer.name:
            layer.k, layer.scale = 256, None
    build(tmp_path, layers)
    with pytest.raises(InvalidCheckpoint, match="do not fit together"):
        mxfp4prep.load(tmp_path).experts(PREFIX)


def test_only_down_is_replicated_by_a_rule(tmp_path):
    layers = per_expert()
    for layer in layers:
        if "down" in layer.name:
            layer.parallel = "replicated"
    build(tmp_path, layers)
    assert mxfp4prep.load(tmp_path).experts(PREFIX) is not None
    with pytest.raises(Unsupported, match="cut otherwise"):
        mxfp4prep.load(tmp_path, tp_rank=0, tp_size=2).experts(PREFIX)


def test_gate_up_order_is_needed(tmp_path):
    build(tmp_path, banks())
    edit_manifest(tmp_path, lambda d: d["layers"][0].update(gate_up=None))
    with pytest.raises(InvalidCheckpoint, match="gate_up"):
        mxfp4prep.load(tmp_path).experts(PREFIX)


def test_static_input_scales(tmp_path):
    layers = per_expert(scheme="w4a8")
    for number, layer in enumerate(layers):
        layer.input_scale = 0.25 * (1 + number // 3)
    build(tmp_path, layers)
    moe = mxfp4prep.load(tmp_path).experts(PREFIX)
    assert moe.input_quant == "fp8_static"
    assert moe.a1_scale.tolist() == moe.a2_scale.tolist() == [0.25, 0.5, 0.75, 1.0]
    layers[0].input_scale = 3.0
    build(tmp_path, layers)
    with pytest.raises(Unsupported, match="input scales"):
        mxfp4prep.load(tmp_path).experts(PREFIX)


@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_activations_and_their_limit(tmp_path, activation, limit):
    layers = per_expert()
    build(tmp_path, layers)
    moe = mxfp4prep.load(tmp_path).experts(PREFIX, activation, limit)
    x, weights, ids = routing()
    dense = dense_of(layers, "concatenated")
    close(moe(x, weights, ids), reference(dense, x, weights, ids, activation, limit))


def test_the_limit_may_be_named_alone(tmp_path):
    build(tmp_path, per_expert(), config={"swiglu_limit": 3.0})
    prepared = mxfp4prep.load(tmp_path)
    assert prepared.experts(PREFIX).limit == 3.0
    assert prepared.experts(PREFIX, limit=0.5).limit == 0.5
    assert prepared.experts(PREFIX, "silu").limit is None


def test_weights_only(tmp_path):
    layers = per_expert()
    build(tmp_path, layers)
    moe = mxfp4prep.load(tmp_path).experts(PREFIX)
    moe.quantize_activations = False
    x, weights, ids = routing()
    dense = dense_of(layers, "concatenated")
    close(moe(x, weights, ids), reference(dense, x, weights, ids, quantize=lambda v: v))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_act": "silu"}, ("silu", None)),
        ({}, ("silu", None)),
        ({"hidden_act": "gelu"}, ("gelu", None)),
        ({"hidden_activation": "gelu_pytorch_tanh"}, ("gelu_tanh", None)),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, ("swigluoai", 7.0)),
        ({"model_type": "gpt_oss", "swiglu_limit": 5}, ("swigluoai", 5.0)),
        ({"text_config": {"hidden_act": "swish"}, "hidden_act": "gelu"}, ("silu", None)),
        ({"hidden_act": "silu", "swiglu_limits": [0.0, None]}, ("silu", None)),
    ],
)
def test_activation_of_config(config, expected):
    assert activation_of_config(config, "x") == expected


def test_unknown_activations(tmp_path):
    with pytest.raises(Unsupported, match="relu2") as caught:
        activation_of_config({"hidden_act": "relu2"}, "x")
    assert "activation=" in caught.value.hint
    with pytest.raises(Unsupported, match="swiglu_limits_shared: clamps that differ"):
        activation_of_config({"hidden_act": "silu", "swiglu_limits_shared": [0, 7.0]}, "x")
    build(tmp_path, per_expert())
    with pytest.raises(UsageError, match="tanh"):
        mxfp4prep.load(tmp_path).experts(PREFIX, "tanh")


def test_gelu_tanh_is_torchs():
    values = torch.linspace(-3, 3, 8)
    found = gated(torch.cat([values, torch.ones(8)]), "concatenated", "gelu_tanh", None)
    assert torch.equal(found, torch.nn.functional.gelu(values, approximate="tanh"))


@pytest.mark.parametrize("wrong", [-2, EXPERTS])
def test_ids_that_no_expert_has(tmp_path, wrong):
    build(tmp_path, per_expert())
    moe = mxfp4prep.load(tmp_path).experts(PREFIX)
    x, weights, ids = routing()
    ids[4, 1] = wrong
    with pytest.raises(UsageError, match=str(wrong)):
        moe(x, weights, ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, i: (x, w[:, :1], i),
        lambda x, w, i: (x[1:], w, i),
        lambda x, w, i: (x[:, 1:], w, i),
        lambda x, w, i: (x.double(), w, i),
        lambda x, w, i: (x, w.int(), i),
        lambda x, w, i: (x, w, i.float()),
        lambda x, w, i: (x, w, i.to("meta")),
        lambda x, w, i: (x, w, i > 0),
        lambda x, w, i: (x, w[:, :0], i[:, :0]),
        lambda x, w, i: (x[0], w[0, 0], i[0, 0]),
    ],
)
def test_wrong_calls_are_named(tmp_path, change):
    build(tmp_path, per_expert())
    moe = mxfp4prep.load(tmp_path).experts(PREFIX)
    with pytest.raises(UsageError, match=PREFIX):
        moe(*change(*routing()))


H, W, E, T = 256, 256, 4, 7
CASES_BY_PAIRS = list(
    pairwise(
        activation=("silu", "gelu", "gelu_tanh", "swigluoai"),
        order=("concatenated", "interleaved"),
        biases=((False, False), (True, False), (False, True), (True, True)),
        pads=((0, 0), (32, 0), (0, 32), (40, 24)),
        paths=(("asm", "asm"), ("triton", "kept"), ("kept", "asm"), ("asm", "triton")),
        limit=(None, 0.5),
        quant=("mxfp4", "none"),
        dtype=(torch.float32, torch.bfloat16, torch.float16),
        ids=("distinct", "elsewhere", "twice", "one"),
    )
)


def ids_of(kind: str, generator: torch.Generator) -> torch.Tensor:
    """(T, 3) int32; expert E - 1 is never hit."""
    ids = torch.rand((T, E - 1), generator=generator).argsort(dim=-1).int()
    if kind == "elsewhere":
        ids[ids == 0] = -1
        ids[3] = -1
    if kind == "twice":
        ids[:, 2] = ids[:, 0]
    if kind == "one":
        ids[:] = 1
    return ids


@pytest.mark.parametrize(
    "case", CASES_BY_PAIRS, ids=["-".join(map(str, c.values())) for c in CASES_BY_PAIRS]
)
def test_the_operator_is_what_its_docstring_says(case):
    """Every pair of options; padding, experts nobody hits and weights of slots of -1 are NaN."""
    generator = torch.Generator().manual_seed(3)
    hidden_pad, pad = case["pads"]
    rows = torch.arange(2 * W)
    value = rows // 2 if case["order"] == "interleaved" else rows % W
    is_gate = rows % 2 == 0 if case["order"] == "interleaved" else rows < W

    def bank(n, k):
        packed = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, generator=generator)
        scale = torch.randint(118, 124, (E, n, k // 32), dtype=torch.uint8, generator=generator)
        return packed, scale

    (w13, s13), (w2, s2) = bank(2 * W, H), bank(H, W)
    bias1 = torch.randn((E, 2 * W), generator=generator).bfloat16() if case["biases"][0] else None
    bias2 = torch.randn((E, H), generator=generator).bfloat16() if case["biases"][1] else None
    used, kept = H - hidden_pad, value < W - pad
    experts = []
    for e in range(E):
        both = decode64(w13[e], s13[e], H)[:, :used]
        added = torch.zeros(2 * W) if bias1 is None else bias1[e]
        down = decode64(w2[e], s2[e], W)[:used, : W - pad]
        halves = [(both[kept & half], added[kept & half].double()) for half in (is_gate, ~is_gate)]
        last = torch.zeros(used) if bias2 is None else bias2[e, :used]
        matrices = halves[0][0], halves[1][0], down
        experts.append(Expert(*matrices, halves[0][1], halves[1][1], last.double()))
    s13[:, ~kept], s2[:, used:], s13[E - 1], s2[E - 1] = 255, 255, 255, 255
    if hidden_pad:
        s13[..., -(hidden_pad // 32) :] = 255
    x = torch.randn((T, H), generator=generator).to(case["dtype"])
    x[:, used:] = torch.nan
    ids = ids_of(case["ids"], generator)
    weights = torch.rand(ids.shape, generator=generator).masked_fill(ids == -1, torch.nan)
    operands = []
    for packed, scale, path in ((w13, s13, case["paths"][0]), (w2, s2, case["paths"][1])):
        layouts = LAYOUT_IDS[path]
        operands += [lay_out(packed, layouts[0]), lay_out(scale, layouts[1])]
    y = torch.ops.mxfp4prep.fused_moe(
        x, *operands, weights, ids, W, *case["paths"], case["quant"],
        activation=case["activation"], limit=case["limit"], gate_up=case["order"],
        hidden_pad=hidden_pad, intermediate_pad=pad, bias1=bias1, bias2=bias2,
    )  # fmt: skip
    quantize = fake_quantize64 if case["quant"] == "mxfp4" else torch.Tensor.double
    how = case["activation"], case["limit"], quantize
    wanted = routed64(experts, x[:, :used].double(), weights, ids, *how)
    assert (y.dtype, y.shape, y.is_contiguous()) == (case["dtype"], x.shape, True)
    assert torch.equal(y[:, used:], torch.zeros_like(y[:, used:]))
    rounding = {torch.float32: 1e-4, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
    assert (y[:, :used] - wanted).norm() <= rounding[case["dtype"]] * wanted.norm()
    if case["ids"] == "elsewhere":
        assert not y[3].any()


def test_every_pair_of_options_is_in_some_case():
    assert len(CASES_BY_PAIRS) < 40
    for a, b in (("activation", "order"), ("paths", "pads"), ("ids", "biases"), ("limit", "dtype")):
        pairs = {(case[a], case[b]) for case in CASES_BY_PAIRS}
        sizes = [len({case[name] for case in CASES_BY_PAIRS}) for name in (a, b)]
        assert len(pairs) == sizes[0] * sizes[1]


@pytest.mark.parametrize("order", ["concatenated", "interleaved"])
def test_padding_is_ignored_whatever_it_holds(order):
    """Banks of h + 32 columns and i + 32 values whose padding is garbage answer like the plain."""
    generator = torch.Generator().manual_seed(0)
    h, i, pad, e = 96, 64, 32, 2
    rows = torch.arange(2 * (i + pad))
    value = rows // 2 if order == "interleaved" else rows % (i + pad)
    real = rows[value < i]

    def byte(low, high, *shape):
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    big13, big13_scale = (
        byte(0, 256, e, 2 * (i + pad), (h + pad) // 2),
        byte(118, 124, e, 2 * (i + pad), (h + pad) // 32),
    )
    big2, big2_scale = (
        byte(0, 256, e, h + pad, (i + pad) // 2),
        byte(118, 124, e, h + pad, (i + pad) // 32),
    )
    bias1, bias2 = torch.randn((e, 2 * (i + pad))), torch.randn((e, h + pad))
    x = torch.randn((5, h + pad), generator=generator)
    weights, ids = torch.rand((5, 1), generator=generator), torch.tensor([[0], [1], [0], [1], [0]])
    padded = ops.fused_moe(
        x, big13, big13_scale, big2, big2_scale, weights, ids, i + pad, "kept", "kept", "mxfp4",
        gate_up=order, hidden_pad=pad, intermediate_pad=pad, bias1=bias1, bias2=bias2,
    )  # fmt: skip
    plain = ops.fused_moe(
        x[:, :h],
        big13[:, real, : h // 2].contiguous(),
        big13_scale[:, real, : h // 32].contiguous(),
        big2[:, :h, : i // 2].contiguous(),
        big2_scale[:, :h, : i // 32].contiguous(),
        weights, ids, i, "kept", "kept", "mxfp4",
        gate_up=order, bias1=bias1[:, real], bias2=bias2[:, :h],
    )  # fmt: skip
    assert plain.abs().max() > 0
    torch.testing.assert_close(padded[:, :h], plain)
    assert (padded[:, h:] == 0).all()


def test_repr_names_paths_and_sizes(tmp_path):
    build(tmp_path, per_expert(paths=("asm", "triton")))
    text = repr(mxfp4prep.load(tmp_path).experts(PREFIX))
    for word in ("experts=4", "hidden=256", "intermediate=512", "asm+triton", "silu"):
        assert word in text
