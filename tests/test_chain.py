"""From a Quark checkpoint through convert and its manifest to the layers that ranks load."""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import NamedTuple

import pytest
import torch
from conftest import FIXTURES
from prepared_factory import decode64
from quark_factory import model_config, quant_config, write_checkpoint
from safetensors.torch import load_file
from test_convert import converted

import mxfp4prep
from mxfp4prep import RepackWarning
from mxfp4prep.errors import CannotShard

CHAINED = (
    "llama-w4a4-aligned",
    "qwen2-w4a4-misaligned-tied",
    "qwen3-w4a16-misaligned",
    "qwen2moe-w4a4-shared-expert",
    "llama-mixed-fp8attn-kvfp8",
)
ROW_LIKE = ("o_proj", "down_proj")


class Expected(NamedTuple):
    """One layer by the source's own bytes."""

    dense: torch.Tensor  # (n, k) float64
    bias: torch.Tensor  # (n,) float64


def source_layers(root):
    """Every MXFP4 matrix of a Quark checkpoint, decoded without the package."""
    tensors = {}
    for path in sorted(root.glob("*.safetensors")):
        tensors |= load_file(path)
    layers = {}
    for key, packed in tensors.items():
        name, _, leaf = key.rpartition(".")
        if leaf == "weight" and packed.dtype == torch.uint8:
            n, k = packed.shape[0], packed.shape[1] * 2
            dense = decode64(packed, tensors[f"{name}.weight_scale"], k)
            layers[name] = Expected(dense, tensors.get(f"{name}.bias", torch.zeros(n)).double())
    return layers


def pieces_by_hand(name, n, k, config, tp):
    """Per rank (rows, columns) as slices, or None where no engine can cut it."""
    leaf = name.rpartition(".")[2]
    if leaf in ROW_LIKE:
        if k % (32 * tp):
            return None
        return [(slice(None), slice(r * k // tp, (r + 1) * k // tp)) for r in range(tp)]
    units = n
    if leaf == "q_proj":
        units = config["num_attention_heads"]
    elif leaf in ("k_proj", "v_proj"):
        units = config["num_key_value_heads"]
        if units < tp and tp % units == 0:
            share, width = tp // units, n // units
            return [
                (slice(r // share * width, (r // share + 1) * width), slice(None))
                for r in range(tp)
            ]
    if units % tp:
        return None
    return [(slice(r * n // tp, (r + 1) * n // tp), slice(None)) for r in range(tp)]


def asm_legal(rows, k):
    return rows % 32 == 0 and k % 256 == 0 and rows != 96


def weights_only(layer):
    layer.quantize_activations = False
    return layer


def close(found, expected):
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.fixture(scope="module", params=[(1,), (1, 2, 4, 8)], ids=["tp1", "tp1248"])
def degrees(request):
    return request.param


@pytest.fixture(scope="module", params=CHAINED)
def chained(request, degrees, tmp_path_factory):
    source = FIXTURES / request.param
    out = converted(source, tmp_path_factory.mktemp("chain") / "out", degrees).out
    whole = mxfp4prep.load(out)
    return out, whole, source_layers(source), json.loads((source / "config.json").read_text())


def test_whole_layers_compute_what_the_source_says(chained):
    _, whole, layers, _ = chained
    assert set(whole) == set(layers)
    generator = torch.Generator().manual_seed(5)
    for name, layer in layers.items():
        x = torch.randn((3, layer.dense.shape[1]), generator=generator)
        assert torch.equal(whole[name].dequantize().double(), layer.dense)
        y = weights_only(whole.read(name))(x)
        close(y, x.double() @ layer.dense.T + layer.bias)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_together_are_the_whole(chained, degrees, tp):
    out, whole, layers, config = chained
    ranks = [mxfp4prep.load(out, tp_rank=rank, tp_size=tp) for rank in range(tp)]
    generator = torch.Generator().manual_seed(tp)
    for name, layer in layers.items():
        n, k = layer.dense.shape
        record = whole.manifest.layer(name)
        pieces = pieces_by_hand(name, n, k, config, tp)
        if pieces is None:
            assert record.verdict[str(tp)] == "impossible"
            for rank in ranks:
                with pytest.raises(CannotShard, match=name):
                    rank[name]
            continue
        x = torch.randn((3, k), generator=generator)
        outputs = {}
        for rank, (rows, columns) in zip(ranks, pieces, strict=True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                part = weights_only(rank.read(name))
            dense = layer.dense[rows, columns]
            assert (part.n, part.k) == dense.shape
            assert torch.equal(part.dequantize().double(), dense)
            repacked = record.path == "asm" and not asm_legal(*dense.shape)
            assert [each.category for each in caught] == [RepackWarning] * repacked
            assert part.path == ("triton" if repacked else record.path)
            assert not (repacked and tp in degrees), "it was prepared for this degree"
            start = (columns if name.endswith(ROW_LIKE) else rows).start
            y = part(x[:, columns])
            assert torch.equal(outputs.setdefault(start, y), y)  # replicas of a KV head agree
        if name.endswith(ROW_LIKE):
            total = sum(outputs.values())
        else:
            total = torch.cat([outputs[start] for start in sorted(outputs)], dim=-1)
        close(total, weights_only(whole.read(name))(x).double())
        close(total, x.double() @ layer.dense.T + layer.bias)


# Experts

EXPERTS, HIDDEN, WIDTH = 4, 256, 512
PREFIX = "model.layers.0.mlp.experts"


def noise(generator, *shape, low=0, high=256):
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def matrix(generator, name, n, k, bias=False, lead=()):
    """Scales around 2^-6, so that hidden values stay near one; with or without a bias."""
    tensors = {
        f"{name}.weight": noise(generator, *lead, n, k // 2),
        f"{name}.weight_scale": noise(generator, *lead, n, k // 32, low=118, high=124),
    }
    if bias:
        tensors[f"{name}.bias"] = torch.randn((*lead, n), generator=generator).bfloat16()
    return tensors


def dense_of(tensors, name, expert=None):
    """(weight, bias) float64 of one matrix or one of a bank."""
    packed, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    bias = tensors.get(f"{name}.bias")
    if expert is not None:
        packed, scale = packed[expert], scale[expert]
        bias = None if bias is None else bias[expert]
    dense = decode64(packed, scale, packed.shape[-1] * 2)
    return dense, torch.zeros(len(dense)).double() if bias is None else bias.double()


def routing():
    generator = torch.Generator().manual_seed(9)
    x = torch.randn((6, HIDDEN), generator=generator)
    weights = torch.rand((6, 2), generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(6)])
    return x, weights, ids


def routed(x, weights, ids, expert_of):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            y[token] += weight.double() * expert_of(int(expert), x[token].double())
    return y


def run_experts(out, tp):
    total = 0
    for rank in range(tp):
        experts = mxfp4prep.load(out, tp_rank=rank, tp_size=tp).experts(PREFIX)
        assert experts.intermediate == WIDTH // tp
        total = total + weights_only(experts)(*routing())
    return total


@pytest.mark.parametrize("tp", [1, 2])
def test_single_experts(tmp_path, tp):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for expert in range(EXPERTS):
        for leaf, n, k in (
            ("gate_proj", WIDTH, HIDDEN),
            ("up_proj", WIDTH, HIDDEN),
            ("down_proj", HIDDEN, WIDTH),
        ):
            tensors |= matrix(generator, f"{PREFIX}.{expert}.{leaf}", n, k)
    root = write_checkpoint(tmp_path / "m", {}, extra=tensors, shards=2)
    result = converted(root, tmp_path / "out", (1, 2))
    assert {layer.path for layer in result.manifest.layers} == {"asm"}

    def expert_of(expert, x):
        gate, up, down = (
            dense_of(tensors, f"{PREFIX}.{expert}.{leaf}_proj")[0]
            for leaf in ("gate", "up", "down")
        )
        hidden = gate @ x
        return down @ (hidden * torch.sigmoid(hidden) * (up @ x))

    close(run_experts(result.out, tp), routed(*routing(), expert_of))


def test_experts_of_a_real_checkpoint(tmp_path):
    source = FIXTURES / "qwen2moe-w4a4-shared-expert"
    out = converted(source, tmp_path / "out").out
    layers = source_layers(source)
    experts = weights_only(mxfp4prep.load(out).experts(PREFIX))
    x = torch.randn((4, 128), generator=torch.Generator().manual_seed(2))
    weights, ids = torch.rand((4, 2)), torch.tensor([[0, 7], [3, 1], [6, 5], [2, 4]])

    def expert_of(expert, x):
        gate, up, down = (
            layers[f"{PREFIX}.{expert}.{leaf}_proj"].dense for leaf in ("gate", "up", "down")
        )
        hidden = gate @ x
        return down @ (hidden * torch.sigmoid(hidden) * (up @ x))

    close(experts(x, weights, ids), routed(x, weights, ids, expert_of))
    with pytest.raises(CannotShard, match="down_proj"):  # 96 columns are 1.5 groups for each
        mxfp4prep.load(out, tp_rank=0, tp_size=2).experts(PREFIX)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stored", ["bank", "single"])
def test_gpt_oss_rows_alternate_between_gate_and_up(tmp_path, stored, tp):
    generator = torch.Generator().manual_seed(4)
    shapes = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    tensors = {}
    for leaf, (n, k) in shapes.items():
        if stored == "bank":
            tensors |= matrix(generator, f"{PREFIX}.{leaf}", n, k, True, (EXPERTS,))
            continue
        for expert in range(EXPERTS):
            tensors |= matrix(generator, f"{PREFIX}.{expert}.{leaf}", n, k, True)
    config = model_config(model_type="gpt_oss", hidden_size=HIDDEN, swiglu_limit=7.0)
    root = write_checkpoint(tmp_path / "m", {}, extra=tensors, config=config)
    result = converted(root, tmp_path / "out", (1, 2))
    assert {(x.path, x.gate_up) for x in result.manifest.layers} == {
        ("asm", "interleaved"),
        ("asm", None),
    }

    def expert_of(expert, x):
        at = (PREFIX, expert) if stored == "bank" else (f"{PREFIX}.{expert}", None)
        dense, bias = dense_of(tensors, f"{at[0]}.gate_up_proj", at[1])
        both = dense @ x + bias
        gate, up = both[0::2].clamp(max=7), both[1::2].clamp(-7, 7)
        dense, bias = dense_of(tensors, f"{at[0]}.down_proj", at[1])
        return dense @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + bias

    close(run_experts(result.out, tp), routed(*routing(), expert_of))


# The manifest, word for word

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
FP4_INPUTS = {"dtype": "fp4", "scale_mode": "even", "static": False}
ALL_ASM = {"1": "asm", "2": "asm", "4": "asm", "8": "asm"}
EXPECTED_LAYERS = [
    {
        "name": f"{MLP}.down_proj",
        "parallel": "row",
        "group": None,
        "n": 512,
        "k": 640,
        "path": "triton",
        "reasons": ["scale_cols"],
        "verdict": {"1": "triton", "2": "triton", "4": "triton", "8": "impossible"},
        "weight": ("raw", [512, 320], [512, 320]),
        "scale": ("transposed", [20, 512], [512, 20]),
        "bias": None,
    },
    {
        "name": f"{MLP}.gate_proj",
        "parallel": "merged",
        "group": f"{MLP}.gate_up_proj",
        "n": 128,
        "k": 512,
        "path": "asm",
        "reasons": [],
        "verdict": {"1": "asm", "2": "asm", "4": "asm", "8": "triton"},
        "weight": ("tile16x16", [8, 4096], [128, 256]),
        "scale": ("tile32x8", [4, 512], [128, 16]),
        "bias": None,
    },
    {
        "name": f"{MLP}.up_proj",
        "parallel": "merged",
        "group": f"{MLP}.gate_up_proj",
        "n": 128,
        "k": 512,
        "path": "asm",
        "reasons": [],
        "verdict": {"1": "asm", "2": "asm", "4": "asm", "8": "triton"},
        "weight": ("tile16x16", [8, 4096], [128, 256]),
        "scale": ("tile32x8", [4, 512], [128, 16]),
        "bias": None,
    },
    {
        "name": f"{ATTENTION}.k_proj",
        "parallel": "qkv",
        "group": f"{ATTENTION}.qkv_proj",
        "n": 128,
        "k": 512,
        "path": "asm",
        "reasons": [],
        "verdict": ALL_ASM,
        "weight": ("tile16x16", [8, 4096], [128, 256]),
        "scale": ("tile32x8", [4, 512], [128, 16]),
        "bias": f"{ATTENTION}.k_proj.bias",
    },
    {
        "name": f"{ATTENTION}.o_proj",
        "parallel": "row",
        "group": None,
        "n": 512,
        "k": 512,
        "path": "asm",
        "reasons": [],
        "verdict": {"1": "asm", "2": "asm", "4": "triton", "8": "triton"},
        "weight": ("tile16x16", [32, 4096], [512, 256]),
        "scale": ("tile32x8", [16, 512], [512, 16]),
        "bias": None,
    },
    {
        "name": f"{ATTENTION}.q_proj",
        "parallel": "qkv",
        "group": f"{ATTENTION}.qkv_proj",
        "n": 512,
        "k": 512,
        "path": "asm",
        "reasons": [],
        "verdict": ALL_ASM,
        "weight": ("tile16x16", [32, 4096], [512, 256]),
        "scale": ("tile32x8", [16, 512], [512, 16]),
        "bias": f"{ATTENTION}.q_proj.bias",
    },
    {
        "name": f"{ATTENTION}.v_proj",
        "parallel": "qkv",
        "group": f"{ATTENTION}.qkv_proj",
        "n": 128,
        "k": 512,
        "path": "asm",
        "reasons": [],
        "verdict": ALL_ASM,
        "weight": ("tile16x16", [8, 4096], [128, 256]),
        "scale": ("tile32x8", [4, 512], [128, 16]),
        "bias": f"{ATTENTION}.v_proj.bias",
    },
]


def test_the_manifest_of_a_small_checkpoint_by_hand(tmp_path):
    linears = {x["name"]: (x["n"], x["k"]) for x in EXPECTED_LAYERS}
    biases = {x["bias"]: torch.zeros(x["n"]).bfloat16() for x in EXPECTED_LAYERS if x["bias"]}
    extra = {"mtp.fc.weight": torch.ones((4, 8)).bfloat16(), **biases}
    root = write_checkpoint(
        tmp_path / "m",
        linears,
        extra=extra,
        shards=2,
        config=model_config(quant_config(exclude=["lm_head", "mtp.fc"])),
    )
    out = converted(root, tmp_path / "out").out
    document = json.loads((out / "mxfp4prep.json").read_text())
    found = []
    for layer in document["layers"]:
        parts = {"weight": layer.pop("weight"), "scale": layer.pop("scale")}
        for key, stored in parts.items():
            assert stored["tensor"] == f"{layer['name']}.weight{'_scale' * (key == 'scale')}"
            assert stored["tensor"] in load_file(root / stored["file"])
            assert stored["pad_byte"] is None
            layer[key] = (stored["layout"], stored["shape"], stored["source_shape"])
        assert (layer.pop("n_padded"), layer.pop("k_padded")) == (layer["n"], layer["k"])
        found.append(layer)
    same = {
        "kind": "linear",
        "scheme": "w4a4",
        "activation": FP4_INPUTS,
        "hazards": [],
        "gate_up": None,
        "experts": None,
        "input_scale": None,
    }
    assert found == [{**same, **layer} for layer in EXPECTED_LAYERS]
    copied = {each["name"]: each["label"] for each in document["tensors"]}
    assert copied == {**dict.fromkeys(biases), "mtp.fc.weight": "mtp"}
    assert document["source"] == {
        "name": "m",
        "repo": None,
        "commit": None,
        "config_sha256": hashlib.sha256((root / "config.json").read_bytes()).hexdigest(),
        "index_sha256": hashlib.sha256(
            (root / "model.safetensors.index.json").read_bytes()
        ).hexdigest(),
    }
    noticed = {each["code"]: (each["severity"], each["where"]) for each in document["findings"]}
    assert noticed["mtp_layers"] == ("note", "mtp.fc.weight")
    assert "KV heads" in " ".join(each["message"] for each in document["findings"])
