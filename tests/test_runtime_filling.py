"""materialize fills a layer with bytes that are meant for it, or refuses and names both sides."""

from __future__ import annotations

import pytest
import torch
from moe_cases import BLOCK, PREFIX, mlp, routing, small
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.errors import UsageError

NAME = "model.layers.0.mlp.down_proj"
STATIC = {"dtype": "fp8_e4m3", "scale_mode": None, "static": True}
TOKEN = {"dtype": "fp8_e4m3", "scale_mode": "per_token", "static": False}
TENSOR = TOKEN | {"scale_mode": "per_tensor"}


def linear(root, **changed):
    """1024 columns in 32 groups of 32 rows: every layout has the same shapes."""
    facts = {"n": 32, "k": 1024, "path": "triton", "scheme": "w4a4"} | changed
    build(root, [Layer(NAME, **facts)])
    return root


def refused(prepared, layer, *words: str) -> None:
    with pytest.raises(UsageError, match="not a layer of this checkpoint") as caught:
        prepared.materialize(layer, "cpu")
    assert caught.value.hint
    text = str(caught.value)
    found, expected = text[text.index("found ") :].split(", expected ")
    mine, theirs = words[: len(words) // 2], words[len(words) // 2 :]
    assert all(word in found for word in mine), text
    assert all(word in expected for word in theirs), text
    assert any(buffer.is_meta for buffer in layer.buffers()), "nothing was filled"


@pytest.mark.parametrize(
    ("one", "other", "mine", "theirs"),
    [
        ({"path": "kept"}, {"path": "triton"}, "paths ('kept',)", "paths ('triton',)"),
        ({"scheme": "w4a16"}, {"scheme": "w4a4"}, "scheme w4a16", "scheme w4a4"),
        (
            {"scheme": "w4a8", "activation": TOKEN},
            {"scheme": "w4a8", "activation": TENSOR},
            "input_quant fp8_token",
            "input_quant fp8_tensor",
        ),
        ({"bias": True}, {}, "bias (32,)", "bias absent"),
    ],
)
def test_a_linear_layer_of_another_kind(tmp_path, one, other, mine, theirs):
    """Both ways round, and each by its own: no shape tells them apart."""
    first, second = linear(tmp_path / "one", **one), linear(tmp_path / "other", **other)
    refused(mxfp4prep.load(second), mxfp4prep.load(first, "meta")[NAME], mine, theirs)
    refused(mxfp4prep.load(first), mxfp4prep.load(second, "meta")[NAME], theirs, mine)
    layer = mxfp4prep.load(first, "meta")[NAME]
    mxfp4prep.load(first).materialize(layer)
    assert torch.equal(layer.weight, mxfp4prep.load(first)[NAME].weight)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_linear_layer_of_another_rank(tmp_path, rank):
    root = linear(tmp_path)
    empty = mxfp4prep.load(root, "meta", tp_rank=rank, tp_size=2)[NAME]
    other = mxfp4prep.load(root, tp_rank=1 - rank, tp_size=2)
    refused(other, empty, f"tp_rank {rank}", f"tp_rank {1 - rank}")


def experts(root, scheme: str = "w4a4", order: str = "concatenated", path: str = "triton"):
    generator = torch.Generator().manual_seed(0)
    up = Layer(f"{PREFIX}.gate_up_proj", 128, 1024, path, scheme, experts=4, gate_up=order)
    down = Layer(f"{PREFIX}.down_proj", 1024, 64, "triton", scheme, experts=4)
    shared = mlp(f"{BLOCK}.shared_expert", 1024, 64, generator, paths=("triton", "triton"))
    build(root, [small(up, generator), small(down, generator), *shared])
    return root


@pytest.mark.parametrize(
    ("changed", "mine", "theirs"),
    [
        ({"scheme": "w4a16"}, "scheme w4a16", "scheme w4a4"),
        ({"order": "interleaved"}, "gate_up interleaved", "gate_up concatenated"),
    ],
)
def test_experts_of_another_kind(tmp_path, changed, mine, theirs):
    one, other = experts(tmp_path / "one", **changed), experts(tmp_path / "other")
    refused(mxfp4prep.load(other), mxfp4prep.load(one, "meta").experts(PREFIX), mine, theirs)


RANKS = {
    "tp": ({"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}, "tp_rank"),
    "ep": (
        {"tp_rank": 0, "tp_size": 2, "ep_rank": 0, "ep_size": 2},
        {"tp_rank": 1, "tp_size": 2, "ep_rank": 1, "ep_size": 2},
        "ep_rank",
    ),
}


@pytest.mark.parametrize("kind", RANKS)
@pytest.mark.parametrize("shared", [None, "auto"])
@pytest.mark.filterwarnings("ignore::mxfp4prep.RepackWarning")
def test_experts_of_another_rank(tmp_path, kind, shared):
    root = experts(tmp_path)
    mine, theirs, word = RANKS[kind]
    empty = mxfp4prep.load(root, "meta", **mine).experts(PREFIX, shared=shared)
    refused(mxfp4prep.load(root, **theirs), empty, f"{word} 0", f"{word} 1")
    same = mxfp4prep.load(root, **mine)
    same.materialize(empty)
    x, weights, ids = routing(4, 1024)
    wanted = same.experts(PREFIX, shared=shared)(x, weights, ids)
    assert torch.equal(empty(x, weights, ids), wanted)


def test_a_shared_expert_of_another_kind(tmp_path):
    """It is a layer inside the experts; its own facts count too."""
    one, other = experts(tmp_path / "one"), experts(tmp_path / "other")
    empty = mxfp4prep.load(one, "meta").experts(PREFIX, shared="auto", fusion="separate")
    empty.shared.down.scheme = "w4a16"
    refused(mxfp4prep.load(other), empty, "shared.down.scheme w4a16", "shared.down.scheme w4a4")


def test_a_layer_that_the_checkpoint_has_not(tmp_path):
    layer = mxfp4prep.load(linear(tmp_path / "one"), "meta")[NAME]
    build(tmp_path / "other", [Layer("fc1", 64, 64, "triton")])
    refused(mxfp4prep.load(tmp_path / "other"), layer, NAME, "no such layer")
