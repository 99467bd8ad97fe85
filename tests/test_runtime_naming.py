"""Names that a checkpoint does not have: what is like them, and where all of them are."""

from __future__ import annotations

import time

import pytest
import torch
from moe_cases import PREFIX, mlp
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.errors import Mxfp4PrepError, UsageError
from mxfp4prep.runtime.naming import near_names, unknown_name

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.12.mlp.down_proj"
BANKS = "model.layers.3.mlp.experts"
COPIED = "model.norm.weight"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("naming") / "prepared"
    generator = torch.Generator().manual_seed(0)
    layers = [Layer(Q, 64, 64, "triton"), Layer(DOWN, 64, 64, "triton")]
    layers += mlp(f"{PREFIX}.0", 64, 64, generator, paths=("triton", "triton"))
    layers += [
        Layer(f"{BANKS}.gate_up_proj", 128, 64, "triton", experts=2),
        Layer(f"{BANKS}.down_proj", 64, 64, "triton", experts=2),
    ]
    build(root, layers, copied={COPIED: torch.ones(4)})
    return mxfp4prep.load(root)


ASKING = {
    "prepared[...]": (lambda p, name: p[name], "prepared.names lists all 5"),
    "read": (lambda p, name: p.read(name), "prepared.names lists all 5"),
    "experts": (lambda p, name: p.experts(name), "prepared.expert_prefixes lists all 2"),
    "tensor": (lambda p, name: p.tensor(name), "prepared.manifest.tensors"),
}


@pytest.mark.parametrize(
    ("how", "name", "words"),
    [
        ("prepared[...]", "model.layers.0.self_attn.qproj", ["no MXFP4 layer", Q]),
        ("prepared[...]", "layers.12.mlp.down_proj", ["no MXFP4 layer", DOWN]),
        ("read", f"{Q}.weight", ["no MXFP4 layer", Q]),
        ("prepared[...]", "model.layers.11.mlp.down_proj", [f"expected {DOWN}"]),
        ("prepared[...]", "q_proj", ["no MXFP4 layer", Q]),
        ("experts", "model.layers.1.mlp", ["no MXFP4 experts", PREFIX]),
        ("experts", "model.layers.3.mlp.expert", ["no MXFP4 experts", f"expected {BANKS}"]),
        ("tensor", "model.norm", ["no copied tensor", COPIED]),
    ],
)
def test_names_that_are_like_it(prepared, how, name, words):
    ask, listed = ASKING[how]
    with pytest.raises(KeyError) as caught:
        ask(prepared, name)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).startswith(f"{name}: "), "KeyError alone shows a quoted literal"
    assert listed in caught.value.hint
    assert listed in str(caught.value), "a traceback shows no hint"
    assert isinstance(caught.value, Mxfp4PrepError)


@pytest.mark.parametrize(
    ("how", "name", "way"),
    [
        ("prepared[...]", f"{BANKS}.down_proj", f"use experts('{BANKS}')"),
        ("prepared[...]", BANKS, f"use experts('{BANKS}')"),
        ("prepared[...]", COPIED, f"use tensor('{COPIED}')"),
        ("experts", f"{PREFIX}.0", f"use experts('{PREFIX}')"),
        ("experts", f"{BANKS}.down_proj", f"use experts('{BANKS}')"),
        ("experts", Q, f"use prepared['{Q}']"),
        ("tensor", Q, f"use prepared['{Q}']"),
    ],
)
def test_names_that_are_something_else(prepared, how, name, way):
    with pytest.raises(KeyError) as caught:
        ASKING[how][0](prepared, name)
    assert f"expected {way}" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", [3, None, ["a"], {}, b"q_proj", ""])
def test_what_is_no_name(prepared, name):
    for how in ("prepared[...]", "read", "tensor"):
        with pytest.raises(KeyError) as caught:
            ASKING[how][0](prepared, name)
        assert repr(name) in str(caught.value)
    assert prepared.get(name) is None
    assert name not in prepared


def test_get_is_a_mappings(prepared):
    assert prepared.get(Q) is prepared[Q]
    assert prepared.get("none") is None
    assert prepared.get("none", 3) == 3


def test_a_checkpoint_without_experts_says_so(tmp_path):
    build(tmp_path, [Layer("fc1", 64, 64, "triton")])
    with pytest.raises(KeyError, match="no MXFP4 experts") as caught:
        mxfp4prep.load(tmp_path).experts("model.layers.0.mlp.experts")
    assert caught.value.hint == "prepared.expert_prefixes is empty here"


def test_the_numbers_of_a_name_count_after_its_words():
    names = [f"model.layers.{n}.mlp.{leaf}" for n in range(40) for leaf in ("up_proj", "fc2")]
    assert near_names("model.layers.61.mlp.up_proj", names)[0] == "model.layers.39.mlp.up_proj"
    assert near_names("model.layer.7.mlp.up_proj", names)[0] == "model.layers.7.mlp.up_proj"
    assert near_names("zzz", names) == []


def test_a_large_model_is_looked_through_at_once():
    names = [f"model.layers.{a}.mlp.experts.{b}.{leaf}_proj"
             for a in range(90) for b in range(256) for leaf in ("gate", "up", "down")]  # fmt: skip
    start = time.process_time()
    near = near_names("model.layers.3.mlp.expert.300.up_proj", names)
    assert time.process_time() - start < 3
    assert near[0] == "model.layers.3.mlp.experts.255.up_proj"


def test_a_hostile_name_is_escaped():
    error = unknown_name("x\x1b[31m" + "9" * 5000, "none", ["x9"], "prepared.names")
    assert "\x1b" not in str(error)
    assert isinstance(error, UsageError)
