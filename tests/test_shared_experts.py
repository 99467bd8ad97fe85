"""Shared experts and expert parallelism: fusion first, then sliced, replicated or impossible."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from quark_factory import FP4_WEIGHT, model_config, quant_config, quant_layer, write_checkpoint

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.cli import main
from mxfp4prep.deployment import Deployment
from mxfp4prep.shared_experts import SharedBlock, decide, shared_blocks
from mxfp4prep.survey import survey

MLP = "model.layers.0.mlp"
HIDDEN = 512


def bank(width: int, shared: int, experts: int = 2, name: str = "shared_expert"):
    """Per-expert linears and a shared expert of one block."""
    at = {f"{MLP}.experts.{e}": width for e in range(experts)} | {f"{MLP}.{name}": shared}
    linears = {}
    for module, size in at.items():
        linears |= {
            f"{module}.gate_proj": (size, HIDDEN),
            f"{module}.up_proj": (size, HIDDEN),
            f"{module}.down_proj": (HIDDEN, size),
        }
    return linears


def surveyed(root, tp=(1, 2, 4, 8), **deployment):
    return survey(open_checkpoint(root), tp, (), Deployment(**deployment))


def outcome(found, name):
    """(placement, path, scale_shard) per degree of one layer."""
    (item,) = [item for item in found.layers if item.layer.name == name]
    return {
        tp: (item.placements[tp], verdict.path, verdict.scale_shard)
        for tp, verdict in item.verdicts.items()
    }


def block(width: int, fusable: bool) -> SharedBlock:
    return SharedBlock("m.shared_expert", width, fusable, "why", int(fusable), ())


# What vLLM 0.33's rule gives for an unfused shared expert (its size, ranks, expert or sequence
# parallelism), written out by hand: 640 = 20 groups, 1408 = 44, 5632 = 176, 768 = 24.
@pytest.mark.parametrize(
    ("width", "tp", "alone", "beside_ep"),
    [
        (80, 1, "sliced", "sliced"),
        (640, 1, "sliced", "sliced"),
        (640, 2, "sliced", "sliced"),
        (640, 3, "impossible", "replicated"),
        (640, 4, "sliced", "sliced"),
        (640, 5, "sliced", "sliced"),
        (640, 8, "impossible", "replicated"),
        (1408, 4, "sliced", "sliced"),
        (1408, 8, "impossible", "replicated"),
        (5632, 8, "sliced", "sliced"),
        (5632, 16, "sliced", "sliced"),
        (5632, 32, "impossible", "replicated"),
        (768, 6, "sliced", "sliced"),
        (768, 7, "impossible", "replicated"),
    ],
)
def test_a_shared_expert_that_stays_apart(width, tp, alone, beside_ep):
    for fusable in (True, False):
        part = block(width, fusable)
        assert decide(part, tp, Deployment(shared_experts="separate")).decision == alone
    part = block(width, fusable=False)
    assert decide(part, tp, Deployment()).decision == alone
    assert decide(part, tp, Deployment(expert_parallel=True)).decision == beside_ep
    assert decide(part, tp, Deployment(sequence_parallel=True)).decision == beside_ep


@pytest.mark.parametrize("tp", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("wish", ["auto", "fused"])
def test_fusion_is_decided_before_the_degree_is_looked_at(tp, wish):
    for ep, sp in itertools.product((False, True), repeat=2):
        assert decide(block(640, fusable=True), tp, Deployment(ep, sp, wish)).decision == "fused"


def test_the_message_does_the_arithmetic_and_names_each_way_out():
    made = decide(block(640, fusable=True), 8, Deployment(shared_experts="separate"))
    assert made.message == (
        "640 / 8 = 80 columns = 2.5 groups of 32; choose tp 4, which fits it, or replicate it with "
        "expert parallelism (--ep) or sequence parallelism (--sp), or let the engine fuse it into "
        "the routed experts"
    )
    assert "fuse" not in decide(block(640, fusable=False), 8, Deployment()).message
    # 96 = 3 groups: no power of two above 1 divides them
    assert "choose tp 1," in decide(block(96, fusable=False), 8, Deployment()).message
    # 80 columns are no whole groups on any rank count
    assert "choose tp" not in decide(block(80, fusable=False), 8, Deployment()).message
    replicated = decide(block(640, fusable=False), 8, Deployment(expert_parallel=True))
    assert (
        replicated.message == "640 / 8 = 80 columns = 2.5 groups of 32: every rank holds the whole"
    )


def blocks_of(root):
    found = open_checkpoint(root)
    classified = survey(found).classified
    return shared_blocks(classified.layers, classified.others)


def test_same_quantization_and_width_can_be_fused(tmp_path):
    (made,) = blocks_of(write_checkpoint(tmp_path / "m", bank(256, 256))).values()
    assert (made.name, made.width, made.fusable, made.slots) == (
        f"{MLP}.shared_expert",
        256,
        True,
        1,
    )
    assert set(made.members) == {
        f"{MLP}.shared_expert.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize("name", ["shared_expert", "shared_experts"])
def test_two_shared_experts_in_one_module_are_two_slots(tmp_path, name):
    (made,) = blocks_of(write_checkpoint(tmp_path / "m", bank(128, 256, name=name))).values()
    assert (made.fusable, made.slots) == (True, 2)


def test_p45_another_width_scheme_or_dtype_cannot_be_fused(tmp_path):
    odd = write_checkpoint(tmp_path / "width", bank(256, 320))
    assert [made.why for made in blocks_of(odd).values()] == [
        "its width 320 is no multiple of the routed experts' 256"
    ]
    weight_only = quant_config(
        layer_quant_config={"*shared_expert.*": quant_layer(FP4_WEIGHT, None)}
    )
    scheme = write_checkpoint(tmp_path / "scheme", bank(256, 256), config=model_config(weight_only))
    assert [made.why for made in blocks_of(scheme).values()] == [
        "it is w4a16, the routed experts are w4a4"
    ]
    linears = bank(256, 256)
    del linears[f"{MLP}.shared_expert.up_proj"]
    half = write_checkpoint(
        tmp_path / "half",
        linears,
        config=model_config(quant_config(exclude=[f"{MLP}.shared_expert.up_proj"])),
        extra={
            f"{MLP}.shared_expert.up_proj.weight": torch.zeros(256, HIDDEN, dtype=torch.bfloat16)
        },
    )
    assert [made.why for made in blocks_of(half).values()] == ["parts of it are stored as bf16"]
    assert not any(
        made.fusable for root in (odd, scheme, half) for made in blocks_of(root).values()
    )


def test_blocks_are_told_apart(tmp_path):
    other = {
        name.replace("layers.0", "layers.1"): shape
        for name, shape in bank(320, 640).items()
        if ".experts." not in name
    }
    found = surveyed(write_checkpoint(tmp_path / "m", bank(640, 640) | other), (8,))
    assert {item.block.name: item.decisions[8].decision for item in found.shared} == {
        f"{MLP}.shared_expert": "fused",
        f"{MLP}.shared_expert".replace("layers.0", "layers.1"): "impossible",
    }


def test_a_shared_expert_without_routed_ones_stays_apart(tmp_path):
    linears = {name: shape for name, shape in bank(256, 256).items() if ".experts." not in name}
    (made,) = blocks_of(write_checkpoint(tmp_path / "m", linears)).values()
    assert (made.fusable, made.why) == (False, "there are no MXFP4 routed experts beside it")


def test_the_gate_of_a_shared_expert_does_not_count_as_a_part(tmp_path):
    gate = {f"{MLP}.shared_expert_gate.weight": torch.zeros(1, HIDDEN, dtype=torch.bfloat16)}
    (made,) = blocks_of(write_checkpoint(tmp_path / "m", bank(256, 256), extra=gate)).values()
    assert made.fusable


def test_expert_parallelism_leaves_experts_whole(tmp_path):
    # 1408 / 8 = 176 = 5.5 groups: what tensor parallelism cannot split, expert parallelism need not
    root = write_checkpoint(tmp_path / "m", bank(1408, 1408))
    down = f"{MLP}.experts.0.down_proj"
    assert outcome(surveyed(root), down) == {
        1: ("sliced", "triton", (512, 44)),
        2: ("sliced", "triton", (512, 22)),
        4: ("sliced", "triton", (512, 11)),
        8: ("sliced", "impossible", None),
    }
    assert outcome(surveyed(root, expert_parallel=True), down) == {
        1: ("sliced", "triton", (512, 44)),
        2: ("distributed", "triton", (512, 44)),
        4: ("distributed", "triton", (512, 44)),
        8: ("distributed", "triton", (512, 44)),
    }


def test_a_fused_shared_expert_goes_where_the_experts_go(tmp_path):
    root = write_checkpoint(tmp_path / "m", bank(1408, 1408))
    down = f"{MLP}.shared_expert.down_proj"
    assert outcome(surveyed(root, (8,)), down) == {8: ("fused", "impossible", None)}
    whole = surveyed(root, (8,), expert_parallel=True)
    assert outcome(whole, down) == {8: ("fused", "triton", (512, 44))}
    apart = surveyed(root, (8,), expert_parallel=True, shared_experts="separate")
    assert outcome(apart, down) == {8: ("replicated", "triton", (512, 44))}
    sequence = surveyed(root, (8,), sequence_parallel=True, shared_experts="separate")
    assert outcome(sequence, down) == {8: ("replicated", "triton", (512, 44))}
    assert outcome(sequence, f"{MLP}.experts.0.down_proj") == {8: ("sliced", "impossible", None)}


def test_groups_follow_the_placement(tmp_path):
    root = write_checkpoint(tmp_path / "m", bank(640, 640))
    apart = surveyed(root, (2, 8), expert_parallel=True, shared_experts="separate")
    shards = {
        group.name: {tp: v.scale_shard for tp, v in group.verdicts.items()}
        for group in apart.groups
    }
    assert shards == {
        # experts whole at both; the shared one sliced at 2 (320 + 320 rows) and whole at 8
        f"{MLP}.experts.0.gate_up_proj": {2: (1280, 16), 8: (1280, 16)},
        f"{MLP}.experts.1.gate_up_proj": {2: (1280, 16), 8: (1280, 16)},
        f"{MLP}.shared_expert.gate_up_proj": {2: (640, 16), 8: (1280, 16)},
    }


def test_a_wish_for_fusion_that_cannot_be_is_a_finding(tmp_path):
    root = write_checkpoint(tmp_path / "m", bank(256, 320))
    codes = {finding.code for finding in surveyed(root, shared_experts="fused").findings}
    assert "shared_expert_apart" in codes
    for wish in ("auto", "separate"):
        found = surveyed(root, shared_experts=wish).findings
        assert "shared_expert_apart" not in {finding.code for finding in found}


def test_dense_layers_do_not_care(tmp_path):
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (512, 1408)})
    plain = surveyed(root)
    other = surveyed(root, expert_parallel=True, sequence_parallel=True, shared_experts="fused")
    assert plain.layers[0].verdicts == other.layers[0].verdicts
    assert set(other.layers[0].placements.values()) == {"sliced"}
    assert (plain.shared, other.shared) == ((), ())


def test_convert_for_expert_parallelism_stores_and_remembers_whole_experts(tmp_path):
    # 1536 / 8 = 192 columns are 6 scale columns: asm only as a whole
    root = write_checkpoint(tmp_path / "m", bank(1536, 1536))
    down = f"{MLP}.experts.0.down_proj"
    for words, path in ((("--ep",), "asm"), ((), "triton")):
        out = tmp_path / f"out{len(words)}"
        assert main(["convert", str(root), str(out), "--tp", "8", *words, "-q"]) == 0
        manifest = json.loads((out / "mxfp4prep.json").read_text())
        stored = {layer["name"]: layer["path"] for layer in manifest["layers"]}
        assert stored[down] == path
        assert manifest["target"]["expert_parallel"] is bool(words)
        assert main(["verify", str(out), "--source", str(root)]) == 0
        manifest["target"]["expert_parallel"] = not words
        (out / "mxfp4prep.json").write_text(json.dumps(manifest))
        assert main(["verify", str(out)]) == 1  # planned again, it comes out otherwise


def test_convert_says_that_experts_need_not_be_split(tmp_path, capsys):
    root = write_checkpoint(tmp_path / "m", bank(1408, 1408))
    assert main(["convert", str(root), str(tmp_path / "tp"), "--tp", "8"]) == 0
    assert "for expert parallelism convert with --ep" in capsys.readouterr().err
    assert main(["convert", str(root), str(tmp_path / "ep"), "--tp", "8", "--ep"]) == 0
    assert "--ep" not in capsys.readouterr().err


def test_convert_counts_all_that_a_fused_group_keeps_from_splitting(tmp_path, capsys):
    at = "model.layers.0.self_attn"
    linears = {f"{at}.q_proj": (128, 512), f"{at}.k_proj": (64, 512), f"{at}.v_proj": (64, 512)}
    config = model_config(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    root = write_checkpoint(tmp_path / "m", linears, config=config)
    # two KV heads can be repeated over eight ranks, four query heads cannot be cut, and they join
    assert main(["convert", str(root), str(tmp_path / "out"), "--tp", "8"]) == 0
    told = capsys.readouterr().err
    assert "cannot be split: 3 layers at tp 8 (4 heads of 32 rows do not divide by 8 ranks)" in told
