"""The table of names against what engines do, and its cuts against rows that carry labels."""

from __future__ import annotations

import re
from itertools import chain
from typing import get_args

import pytest

from mxfp4prep.architectures import ARCHITECTURES, COMMON, PARTS, Parallel, Row, row_of
from mxfp4prep.errors import CannotShard, InvalidCheckpoint
from mxfp4prep.parallel import (
    FUSED_LEAVES,
    Role,
    Topology,
    assign_roles,
    cut_of,
    gate_up_order,
    kind_of,
    shard,
)

ALL_ROWS = [*COMMON.items(), *chain.from_iterable(t.items() for t in ARCHITECTURES.values())]


def test_rows_say_what_can_be_understood():
    for key, row in ALL_ROWS:
        assert row.parallel in get_args(Parallel), key
        assert row.part in PARTS or row.part == "", key
        assert re.fullmatch(r"\w+(\.\w+)?", key), key
        assert row.parallel != "unknown", key  # a name without a row is that
        # a gated part that is not fused has nothing to be fused with
        assert row.fused is None or row.parallel in ("qkv", "merged", "replicated"), key


def test_a_fused_projection_has_at_least_two_parts():
    for table in (COMMON, *ARCHITECTURES.values()):
        fused = [row.fused for row in table.values() if row.fused is not None]
        assert all(fused.count(name) > 1 for name in fused)


def test_every_part_of_the_list_is_used():
    assert {row.part for _, row in ALL_ROWS} - {""} == set(PARTS)


# (model_type, the modules of one layer and more: name -> (parallel, part, group))
LAYERS = {
    "llama": {
        "model.layers.0.self_attn.q_proj": ("qkv", "q", "model.layers.0.self_attn.qkv_proj"),
        "model.layers.0.self_attn.k_proj": ("qkv", "k", "model.layers.0.self_attn.qkv_proj"),
        "model.layers.0.self_attn.v_proj": ("qkv", "v", "model.layers.0.self_attn.qkv_proj"),
        "model.layers.0.self_attn.o_proj": ("row", "", None),
        "model.layers.0.mlp.gate_proj": ("merged", "gate", "model.layers.0.mlp.gate_up_proj"),
        "model.layers.0.mlp.up_proj": ("merged", "up", "model.layers.0.mlp.gate_up_proj"),
        "model.layers.0.mlp.down_proj": ("row", "down", None),
        "model.layers.0.self_attn.q_norm": ("unknown", "", None),
        "model.embed_tokens": ("column", "vocab", None),
        "lm_head": ("column", "vocab", None),
    },
    "phi3": {
        "model.layers.0.self_attn.qkv_proj": ("qkv", "qkv", None),
        "model.layers.0.self_attn.o_proj": ("row", "", None),
        "model.layers.0.mlp.gate_up_proj": ("merged", "gate_up", None),
        "model.layers.0.mlp.down_proj": ("row", "down", None),
    },
    "glm4": {
        "model.layers.0.mlp.gate_up_proj": ("merged", "gate_up", None),
        "model.layers.0.mlp.down_proj": ("row", "down", None),
    },
    "glm4_moe": {
        "model.layers.1.mlp.gate": ("replicated", "", None),
        "model.layers.1.mlp.experts.7.gate_proj": (
            "expert",
            "gate",
            "model.layers.1.mlp.experts.7.gate_up_proj",
        ),
        "model.layers.1.mlp.experts.7.up_proj": (
            "expert",
            "up",
            "model.layers.1.mlp.experts.7.gate_up_proj",
        ),
        "model.layers.1.mlp.experts.7.down_proj": ("expert", "down", None),
        "model.layers.1.mlp.shared_experts.down_proj": ("row", "down", None),
        # layer 46 of 46 is the MTP layer
        "model.layers.46.eh_proj": ("replicated", "", None),
        "model.layers.46.shared_head.head": ("column", "vocab", None),
        "model.layers.46.mlp.experts.0.down_proj": ("expert", "down", None),
    },
    "llama4_text": {
        "language_model.model.layers.0.feed_forward.router": ("replicated", "", None),
        "language_model.model.layers.0.feed_forward.shared_expert.down_proj": (
            "row",
            "down",
            None,
        ),
        "language_model.model.layers.0.feed_forward.experts.gate_up_proj": (
            "expert",
            "gate_up",
            None,
        ),
        "language_model.model.layers.0.feed_forward.experts.down_proj": ("expert", "down", None),
        "vision_model.model.layers.0.self_attn.q_proj": ("unknown", "", None),
        "multi_modal_projector.fc1": ("unknown", "", None),
        "mm_projector.fc2": ("unknown", "", None),
        "model.visual.merger.fc1": ("unknown", "", None),
    },
    "mixtral": {
        "model.layers.0.block_sparse_moe.gate": ("replicated", "", None),
        "model.layers.0.block_sparse_moe.experts.0.w1": (
            "expert",
            "gate",
            "model.layers.0.block_sparse_moe.experts.0.w13",
        ),
        "model.layers.0.block_sparse_moe.experts.0.w3": (
            "expert",
            "up",
            "model.layers.0.block_sparse_moe.experts.0.w13",
        ),
        "model.layers.0.block_sparse_moe.experts.0.w2": ("expert", "down", None),
        # the next expert's numbers differ, and so do w1, w2 and w3
        "model.layers.0.block_sparse_moe.experts.1.w2": ("expert", "down", None),
        "model.layers.0.block_sparse_moe.experts.1.w3": ("expert", "up", None),
    },
    "deepseek_v2": {  # V2-Lite: q_lora_rank is null
        "model.layers.0.self_attn.q_proj": ("column", "q", None),
        "model.layers.0.self_attn.kv_a_proj_with_mqa": ("replicated", "kv_a", None),
        "model.layers.0.self_attn.kv_b_proj": ("column", "heads", None),
    },
    "deepseek_v32": {
        "model.layers.0.self_attn.q_a_proj": (
            "replicated",
            "q_a",
            "model.layers.0.self_attn.fused_qkv_a_proj",
        ),
        "model.layers.0.self_attn.kv_a_proj_with_mqa": (
            "replicated",
            "kv_a",
            "model.layers.0.self_attn.fused_qkv_a_proj",
        ),
        "model.layers.0.self_attn.q_b_proj": ("column", "heads", None),
        "model.layers.0.self_attn.indexer.wq_b": ("replicated", "", None),
        "model.layers.0.self_attn.indexer.wk": ("replicated", "", None),
        "model.layers.0.self_attn.indexer.weights_proj": ("replicated", "", None),
    },
    "deepseek_v4": {
        "layers.0.attn.wq_a": ("replicated", "q_a", "layers.0.attn.fused_wqa_wkv"),
        "layers.0.attn.wkv": ("replicated", "kv_a", "layers.0.attn.fused_wqa_wkv"),
        "layers.0.attn.wq_b": ("column", "heads", None),
        "layers.0.attn.wo_a": ("column", "output_groups", None),
        "layers.0.attn.wo_b": ("row", "", None),
        "layers.0.attn.indexer.wq_b": ("replicated", "", None),
        "layers.0.attn.indexer.compressor.wkv": ("replicated", "", None),
        "layers.0.attn.compressor.wgate": ("replicated", "", None),
        "layers.0.ffn.gate": ("replicated", "", None),
        "layers.0.ffn.experts.0.w2": ("expert", "down", None),
        "layers.0.ffn.shared_experts.w2": ("row", "down", None),
        "mtp.0.attn.wq_b": ("column", "heads", None),
        "mtp.0.e_proj": ("replicated", "", None),
        "head": ("column", "vocab", None),
        # the same in transformers' names
        "model.layers.1.self_attn.q_b_proj": ("column", "heads", None),
        "model.layers.1.self_attn.kv_proj": ("replicated", "kv_a", None),
        "model.layers.1.self_attn.o_b_proj": ("row", "", None),
        "model.layers.1.self_attn.compressor.gate_proj": ("replicated", "", None),
        "model.layers.1.self_attn.compressor.indexer.q_b_proj": ("replicated", "", None),
        "model.layers.1.mlp.gate_proj": ("column", "gate", None),
    },
    "qwen3_next": {
        "model.layers.0.linear_attn.in_proj_qkvz": ("column", "linear_key", None),
        "model.layers.0.linear_attn.in_proj_ba": ("column", "linear_key", None),
        "model.layers.0.linear_attn.out_proj": ("row", "", None),
        "model.layers.0.mlp.shared_expert.down_proj": ("row", "down", None),
        "model.layers.0.mlp.shared_expert_gate": ("replicated", "", None),
        "mtp.fc": ("column", "", None),
        "mtp.layers.0.self_attn.o_proj": ("row", "", None),
    },
    "qwen3_5_moe_text": {
        "model.language_model.layers.0.linear_attn.in_proj_qkv": (
            "merged",
            "linear_qkv",
            "model.language_model.layers.0.linear_attn.in_proj_qkvz",
        ),
        "model.language_model.layers.0.linear_attn.in_proj_z": (
            "merged",
            "linear_value",
            "model.language_model.layers.0.linear_attn.in_proj_qkvz",
        ),
        "model.language_model.layers.0.linear_attn.in_proj_b": (
            "merged",
            "linear_value",
            "model.language_model.layers.0.linear_attn.in_proj_ba",
        ),
        "model.language_model.layers.0.linear_attn.in_proj_a": (
            "merged",
            "linear_value",
            "model.language_model.layers.0.linear_attn.in_proj_ba",
        ),
        "model.visual.blocks.0.mlp.gate_proj": ("unknown", "", None),
    },
    "qwen4_exp_text": {
        "model.language_model.layers.3.self_attn.indexer.index_qk_proj": ("replicated", "", None),
        "model.language_model.layers.3.ple.key_proj": ("replicated", "", None),
    },
    "gpt_oss": {
        "model.layers.0.mlp.router": ("replicated", "", None),
        "model.layers.0.mlp.experts.5.gate_up_proj": ("expert", "gate_up", None),
        "model.layers.0.mlp.experts.gate_up_proj": ("expert", "gate_up", None),
        "model.layers.0.mlp.experts.down_proj": ("expert", "down", None),
    },
    "hunyuan_v1_moe": {
        "model.layers.0.mlp.gate.wg": ("replicated", "", None),
        "model.layers.0.mlp.shared_mlp.up_proj": ("column", "up", None),
        "model.layers.0.mlp.shared_mlp.down_proj": ("row", "down", None),
    },
    "ernie4_5_moe": {
        "model.layers.1.mlp.shared_experts.down_proj": ("row", "down", None),
        "model.mtp_linear_proj.0": ("unknown", "", None),
        "model.mtp_linear_proj": ("replicated", "", None),
    },
    "granitemoehybrid": {
        "model.layers.0.block_sparse_moe.input_linear": ("expert", "gate_up", None),
        "model.layers.0.block_sparse_moe.output_linear": ("expert", "down", None),
        "model.layers.0.block_sparse_moe.router.layer": ("replicated", "", None),
        "model.layers.0.shared_mlp.input_linear": ("merged", "gate_up", None),
        "model.layers.0.shared_mlp.output_linear": ("row", "down", None),
        "model.layers.0.mamba.in_proj": ("unknown", "", None),  # Mamba-2
        "model.layers.0.mamba.out_proj": ("row", "", None),
    },
    "jamba": {
        "model.layers.0.mamba.in_proj": ("merged", "halves", None),
        "model.layers.0.mamba.x_proj": ("row", "", None),
        "model.layers.0.mamba.dt_proj": ("column", "", None),
        "model.layers.0.mamba.out_proj": ("row", "", None),
        "model.layers.1.feed_forward.router": ("replicated", "", None),
        "model.layers.1.feed_forward.experts.0.down_proj": ("expert", "down", None),
    },
    "mamba": {"backbone.layers.0.mixer.in_proj": ("merged", "halves", None)},
    "gpt_neox": {
        "gpt_neox.layers.0.attention.query_key_value": ("qkv", "grouped_qkv", None),
        "gpt_neox.layers.0.attention.dense": ("row", "", None),
        "gpt_neox.layers.0.mlp.dense_h_to_4h": ("column", "", None),
        "gpt_neox.layers.0.mlp.dense_4h_to_h": ("row", "", None),
        "embed_out": ("column", "vocab", None),
    },
    "chatglm": {
        "transformer.encoder.layers.0.self_attention.query_key_value": ("qkv", "qkv", None),
        "transformer.encoder.layers.0.self_attention.dense": ("row", "", None),
        "transformer.encoder.layers.0.mlp.dense_h_to_4h": ("merged", "gate_up", None),
        "transformer.encoder.layers.0.mlp.dense_4h_to_h": ("row", "down", None),
        "transformer.output_layer": ("column", "vocab", None),
    },
    "bailing_moe": {
        "model.layers.0.attention.query_key_value": ("qkv", "qkv", None),
        "model.layers.0.attention.dense": ("row", "", None),
    },
    "qwen": {
        "transformer.h.0.attn.c_attn": ("qkv", "qkv", None),
        "transformer.h.0.attn.c_proj": ("row", "", None),
        "transformer.h.0.mlp.w1": ("merged", "up", "transformer.h.0.mlp.gate_up_proj"),
        "transformer.h.0.mlp.w2": ("merged", "gate", "transformer.h.0.mlp.gate_up_proj"),
        "transformer.h.0.mlp.c_proj": ("row", "down", None),
    },
    "gpt2": {
        "transformer.h.0.attn.c_attn": ("unknown", "", None),
        "transformer.h.0.mlp.c_proj": ("unknown", "", None),
    },
    "starcoder2": {
        "model.layers.0.mlp.c_fc": ("column", "", None),
        "model.layers.0.mlp.c_proj": ("row", "", None),
    },
    "gpt_bigcode": {
        "transformer.h.0.attn.c_attn": ("qkv", "qkv", None),
        "transformer.h.0.attn.c_proj": ("row", "", None),
    },
    "internlm2": {
        "model.layers.0.attention.wqkv": ("qkv", "grouped_qkv", None),
        "model.layers.0.attention.wo": ("row", "", None),
        "model.layers.0.feed_forward.w2": ("row", "down", None),
        "output": ("column", "vocab", None),
    },
    "dbrx": {
        "transformer.blocks.0.norm_attn_norm.attn.Wqkv": ("qkv", "qkv", None),
        "transformer.blocks.0.norm_attn_norm.attn.out_proj": ("row", "", None),
        "transformer.blocks.0.ffn.router.layer": ("replicated", "", None),
        "transformer.blocks.0.ffn.experts.mlp.w2_weight": ("unknown", "", None),
    },
    "minimax": {
        "model.layers.0.self_attn.qkv_proj": ("column", "heads", None),
        "model.layers.0.self_attn.output_gate": ("column", "heads", None),
        "model.layers.0.self_attn.out_proj": ("row", "", None),
    },
    "step3_text": {
        "model.layers.0.self_attn.q_proj": (
            "replicated",
            "",
            "model.layers.0.self_attn.qkv_proj",
        ),
        "model.layers.0.self_attn.k_proj": (
            "replicated",
            "",
            "model.layers.0.self_attn.qkv_proj",
        ),
        "model.layers.0.self_attn.wq": ("column", "heads", None),
    },
    "kimi_linear": {
        "model.layers.0.self_attn.f_a_proj": ("replicated", "", None),
        "model.layers.0.self_attn.f_b_proj": ("column", "heads", None),
        "model.layers.0.self_attn.b_proj": ("column", "heads", None),
    },
    "nemotron_h": {
        "backbone.layers.1.mixer.fc1_latent_proj": ("replicated", "", None),
        "backbone.layers.1.mixer.experts.0.up_proj": ("expert", "up", None),
        "backbone.layers.1.mixer.shared_experts.up_proj": ("column", "up", None),
        "backbone.layers.0.mixer.in_proj": ("unknown", "", None),  # Mamba-2
    },
}


@pytest.mark.parametrize("model_type", LAYERS)
def test_names_of_an_architecture(model_type):
    expected = {name: Role(*role) for name, role in LAYERS[model_type].items()}
    assert assign_roles(list(expected), (), model_type) == expected


def test_names_mean_the_common_thing_where_the_model_is_not_known():
    names = ["l.0.mlp.w1", "l.0.mlp.w2", "l.0.attention.query_key_value", "l.0.attn.c_attn"]
    assert [role.parallel for role in assign_roles(names).values()] == [
        "column",
        "row",
        "unknown",
        "unknown",
    ]
    assert assign_roles(names, (), "qwen")["l.0.mlp.w2"].part == "gate"


def test_two_last_parts_come_before_one():
    assert row_of("a.indexer.q_b_proj", "deepseek_v4").parallel == "replicated"
    assert row_of("a.self_attn.q_b_proj", "deepseek_v4").parallel == "column"
    assert row_of("a.self_attn.q_b_proj").part == "heads"
    assert row_of("q_proj").part == "q"
    assert row_of("layers.0.router.layer").parallel == "replicated"
    assert row_of("layers.0.layer") is None
    assert row_of("") is None


def test_the_architecture_comes_first_and_a_closer_name_before_a_shorter_one(monkeypatch):
    table = {"o_proj": Row("column"), "fine.o_proj": Row("replicated"), "fine.x": Row("row")}
    monkeypatch.setitem(ARCHITECTURES, "made_up", table)
    assert row_of("a.o_proj", "made_up") == Row("column")
    assert row_of("a.fine.o_proj", "made_up_text") == Row("replicated")
    assert row_of("a.fine.x", "made_up") == Row("row")
    assert row_of("a.x", "made_up") is None
    assert row_of("a.fine.o_proj", "made") == Row("row")


def test_layers_that_differ_in_numbers_have_the_same_role():
    names = [f"model.layers.{i}.mlp.experts.{e}.w{w}" for i in (9, 10) for e in (0, 99) for w in
             (1, 2, 3)]  # fmt: skip
    roles = assign_roles(names)
    for name, role in roles.items():
        parent, _, leaf = name.rpartition(".")
        assert (
            role
            == {
                "w1": Role("expert", "gate", f"{parent}.w13"),
                "w2": Role("expert", "down"),
                "w3": Role("expert", "up", f"{parent}.w13"),
            }[leaf]
        )


def test_user_rules_win_over_an_architecture_too():
    roles = assign_roles(["l.0.attention.dense"], [("*.dense", "column")], "bloom")
    assert roles["l.0.attention.dense"] == Role("column")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.shared_mlp.up_proj", "shared_expert"),
        ("model.layers.0.shared_mlp.input_linear", "shared_expert"),
        ("model.layers.0.block_sparse_moe.input_linear", "expert"),
        ("model.layers.0.block_sparse_moe.output_linear", "expert"),
        ("model.layers.0.block_sparse_moe.router.layer", "linear"),
        ("model.layers.0.not_shared_mlp.up_proj", "linear"),
        ("layers.0.ffn.shared_experts.w1", "shared_expert"),
    ],
)
def test_kind_of(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("model_type", "name", "order"),
    [
        ("gpt_oss", "l.0.mlp.experts.3.gate_up_proj", "interleaved"),
        ("gpt_oss_text", "l.0.mlp.experts.gate_up_proj", "interleaved"),
        ("llama4_text", "l.0.feed_forward.experts.gate_up_proj", "concatenated"),
        ("granitemoe", "l.0.block_sparse_moe.input_linear", "concatenated"),
        ("granitemoehybrid", "l.0.shared_mlp.input_linear", "concatenated"),
        ("chatglm", "l.0.mlp.dense_h_to_4h", "concatenated"),
        ("bloom", "h.0.mlp.dense_h_to_4h", None),
        ("gpt_oss", "l.0.mlp.experts.3.down_proj", None),
        ("", "l.0.mlp.experts.0.w13", "concatenated"),
    ],
)
def test_order_of_gate_and_up(model_type, name, order):
    assert gate_up_order(name, Topology(model_type=model_type)) == order


def test_fused_names_for_exclude_entries():
    assert FUSED_LEAVES["q_proj"] == "qkv_proj"
    assert FUSED_LEAVES["up_proj"] == "gate_up_proj"
    assert FUSED_LEAVES["in_proj_a"] == "in_proj_ba"
    assert FUSED_LEAVES["kv_a_proj_with_mqa"] == "fused_qkv_a_proj"
    assert not {leaf for leaf in FUSED_LEAVES if "." in leaf}


# Rows that carry labels: how transformers lays a stored tensor out, and what a rank must own.


def heads_of(letter: str, heads: range, size: int) -> list[str]:
    return [f"{letter}{head}.{row}" for head in heads for row in range(size)]


def owned(model_type: str, name: str, labels: list[str], topology: Topology, tp: int):
    """The labels of the rows that each rank holds of module `name`."""
    role = assign_roles([name], (), model_type)[name]
    interleaved = gate_up_order(name, topology) == "interleaved"
    cut = cut_of(role, len(labels), topology, interleaved)
    for rank in range(tp):
        piece = shard(cut, len(labels), 64, tp, rank)
        yield [label for start, stop in piece.rows for label in labels[start:stop]]


def per_rank(count: int, tp: int, rank: int, ranks_share: bool = False) -> range:
    """Numbers of the heads of one rank; with more ranks than heads, the head they share."""
    if ranks_share and count < tp:
        return range(rank * count // tp, rank * count // tp + 1)
    return range(rank * count // tp, (rank + 1) * count // tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model_type", ["gpt_neox", "bloom", "falcon", "minimax"])
def test_q_k_and_v_head_by_head(model_type, tp):
    """(heads, 3, head_dim): BLOOM, GPT-NeoX, old Falcon, MiniMax's lightning attention."""
    topology = Topology(model_type=model_type, heads=4, kv_heads=4, head_dim=3)
    stored = [
        label for head in range(4) for letter in "qkv"
        for label in heads_of(letter, range(head, head + 1), 3)
    ]  # fmt: skip
    name = f"h.0.a.{'qkv_proj' if model_type == 'minimax' else 'query_key_value'}"
    for rank, got in enumerate(owned(model_type, name, stored, topology, tp)):
        mine = per_rank(4, tp, rank)
        assert sorted(got) == sorted(chain(*(heads_of(letter, mine, 3) for letter in "qkv")))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model_type", "leaf"), [("falcon", "query_key_value"), ("internlm2", "wqkv")]
)
def test_q_k_and_v_group_by_group(model_type, leaf, tp):
    """(kv heads, q heads per kv head + 2, head_dim): Falcon-40B, InternLM2."""
    topology = Topology(model_type=model_type, heads=6, kv_heads=2, head_dim=2)
    stored = []
    for group in range(2):
        stored += heads_of("q", range(3 * group, 3 * group + 3), 2)
        stored += heads_of("k", range(group, group + 1), 2)
        stored += heads_of("v", range(group, group + 1), 2)
    for rank, got in enumerate(owned(model_type, f"h.0.{leaf}", stored, topology, tp)):
        wanted = heads_of("q", per_rank(6, tp, rank), 2)
        wanted += heads_of("k", per_rank(2, tp, rank), 2) + heads_of("v", per_rank(2, tp, rank), 2)
        assert sorted(got) == sorted(wanted)
    for more in (3, 4):  # with two ranks a group, a rank would hold the other one's q heads
        with pytest.raises(CannotShard, match=f"2 heads of 10 rows do not divide by {more} ranks"):
            list(owned(model_type, f"h.0.{leaf}", stored, topology, more))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("model_type", "leaf", "kv_heads", "gated"),
    [
        ("phi3", "qkv_proj", 2, False),
        ("some_model", "qkv_proj", 4, True),
        ("chatglm", "query_key_value", 2, False),
        ("bailing_moe", "query_key_value", 4, False),
        ("qwen", "c_attn", 8, False),
        ("gpt_bigcode", "c_attn", 1, False),
        ("dbrx", "Wqkv", 2, False),
        ("falcon", "query_key_value", 1, False),  # Falcon-7B
    ],
)
def test_q_k_and_v_one_after_the_other(model_type, leaf, kv_heads, gated, tp):
    topology = Topology(model_type=model_type, heads=8, kv_heads=kv_heads, head_dim=2)
    q_size = 4 if gated else 2
    stored = heads_of("q", range(8), q_size)
    stored += heads_of("k", range(kv_heads), 2) + heads_of("v", range(kv_heads), 2)
    for rank, got in enumerate(owned(model_type, f"h.0.attn.{leaf}", stored, topology, tp)):
        kv = per_rank(kv_heads, tp, rank, ranks_share=True)
        wanted = heads_of("q", per_rank(8, tp, rank), q_size)
        assert got == wanted + heads_of("k", kv, 2) + heads_of("v", kv, 2)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_linear_attention_key_head_by_key_head(tp):
    """Qwen3-Next: per key head its q, its k, its value heads' v, then their z; or b, then a."""
    topology = Topology(
        linear_key_heads=4, linear_value_heads=8, linear_key_dim=3, linear_value_dim=5
    )
    qkvz, ba = [], []
    for key in range(4):
        values = range(2 * key, 2 * key + 2)
        qkvz += heads_of("q", range(key, key + 1), 3) + heads_of("k", range(key, key + 1), 3)
        qkvz += heads_of("v", values, 5) + heads_of("z", values, 5)
        ba += heads_of("b", values, 1) + heads_of("a", values, 1)
    for rank, got in enumerate(owned("qwen3_next", "l.in_proj_qkvz", qkvz, topology, tp)):
        keys, values = per_rank(4, tp, rank), per_rank(8, tp, rank)
        wanted = heads_of("q", keys, 3) + heads_of("k", keys, 3)
        assert sorted(got) == sorted(wanted + heads_of("v", values, 5) + heads_of("z", values, 5))
    for rank, got in enumerate(owned("qwen3_next", "l.in_proj_ba", ba, topology, tp)):
        values = per_rank(8, tp, rank)
        assert sorted(got) == sorted(heads_of("b", values, 1) + heads_of("a", values, 1))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_linear_attention_block_by_block(tp):
    """Qwen3.5: q | k | v in one tensor."""
    topology = Topology(
        linear_key_heads=4, linear_value_heads=8, linear_key_dim=3, linear_value_dim=5
    )
    stored = heads_of("q", range(4), 3) + heads_of("k", range(4), 3) + heads_of("v", range(8), 5)
    for rank, got in enumerate(owned("qwen3_5", "l.in_proj_qkv", stored, topology, tp)):
        keys = per_rank(4, tp, rank)
        wanted = heads_of("q", keys, 3) + heads_of("k", keys, 3)
        assert got == wanted + heads_of("v", per_rank(8, tp, rank), 5)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("phi3", "l.mlp.gate_up_proj"),
        ("chatglm", "l.mlp.dense_h_to_4h"),
        ("granitemoe", "l.block_sparse_moe.input_linear"),
        ("granitemoeshared", "l.shared_mlp.input_linear"),
        ("jamba", "l.mamba.in_proj"),
        ("falcon_mamba", "l.mixer.in_proj"),
    ],
)
def test_two_halves_are_cut_apart(model_type, name):
    """gate | up, and x | z of a state-space layer."""
    stored = heads_of("first", range(1), 12) + heads_of("second", range(1), 12)
    topology = Topology(model_type=model_type)
    for rank, got in enumerate(owned(model_type, name, stored, topology, 3)):
        rows = range(4 * rank, 4 * rank + 4)
        assert got == [f"{half}0.{row}" for half in ("first", "second") for row in rows]


def test_pairs_of_gate_and_up_stay_together():
    stored = [f"{letter}{row}" for row in range(12) for letter in ("gate", "up")]
    topology = Topology(model_type="gpt_oss")
    for rank, got in enumerate(owned("gpt_oss", "l.experts.0.gate_up_proj", stored, topology, 4)):
        assert got == [f"{c}{row}" for row in range(3 * rank, 3 * rank + 3) for c in ("gate", "up")]
    with pytest.raises(CannotShard, match="12 pairs of rows do not divide by 8 ranks"):
        list(owned("gpt_oss", "l.experts.0.gate_up_proj", stored, topology, 8))


def test_output_projection_in_groups_of_heads():
    """DeepSeek-V4-Flash: 8 groups of 1024 rows."""
    topology = Topology(model_type="deepseek_v4", heads=64, output_groups=8)
    role = assign_roles(["layers.0.attn.wo_a"], (), "deepseek_v4")["layers.0.attn.wo_a"]
    cut = cut_of(role, 8192, topology)
    assert shard(cut, 8192, 4096, 8, 7).rows == ((7168, 8192),)
    with pytest.raises(CannotShard, match="8 heads of 1024 rows do not divide by 16 ranks"):
        shard(cut, 8192, 4096, 16)


@pytest.mark.parametrize(
    ("model_type", "name", "n"),
    [
        ("phi3", "l.self_attn.qkv_proj", 768),  # no head counts
        ("chatglm", "l.self_attention.query_key_value", 768),
        ("bloom", "h.0.self_attention.query_key_value", 768),
        ("qwen3_next", "l.linear_attn.in_proj_qkvz", 768),
        ("qwen3_5", "l.linear_attn.in_proj_qkv", 768),
        ("deepseek_v4", "layers.0.attn.wo_a", 768),
        ("phi3", "l.mlp.gate_up_proj", 767),
        ("jamba", "l.mamba.in_proj", 767),
    ],
)
def test_rows_of_several_things_are_not_cut_where_nobody_counts_them(model_type, name, n):
    """A cut in the wrong place would go unnoticed; in a whole piece nothing can go wrong."""
    role = assign_roles([name], (), model_type)[name]
    cut = cut_of(role, n, Topology(model_type=model_type))
    assert shard(cut, n, 64, 1).n == n
    with pytest.raises(CannotShard, match=f"{n} rows that stay together .* by 2 ranks") as caught:
        shard(cut, n, 64, 2)
    assert caught.value.reason == "split_rows"


def test_a_fused_tensor_that_does_not_add_up_is_not_cut():
    """Rows that are not what the head counts say: no guess at where k begins."""
    topology = Topology(heads=8, kv_heads=2, head_dim=64)
    for n in (768 + 64, 3 * 768, 256):
        with pytest.raises(CannotShard):
            shard(cut_of(Role("qkv", "qkv"), n, topology), n, 512, 2)
    gated = cut_of(Role("qkv", "qkv"), 2 * 512 + 2 * 128, topology)
    assert shard(gated, 1280, 512, 2, 1).rows == ((512, 1024), (1088, 1152), (1216, 1280))


# What config.json counts, in each architecture's own words.
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_hidden_layers": 4, "hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
            {"layers": 4, "hidden": 64, "experts": 8, "experts_per_token": 2},
        ),
        (
            {"num_local_experts": 16, "experts_per_token": 4},
            {"experts": 16, "experts_per_token": 4},
        ),
        (
            {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048},
            {"experts": 256, "shared_experts": 1, "moe_width": 2048},
        ),
        (
            {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2},
            {"experts": 64, "experts_per_token": 6, "shared_experts": 2},
        ),
        (
            {"num_experts": 256, "num_experts_per_token": 8},
            {"experts": 256, "experts_per_token": 8},
        ),
        ({"num_experts": 128, "top_k_experts": 8}, {"experts": 128, "experts_per_token": 8}),
        (  # Hunyuan counts layer by layer
            {
                "num_experts": 64,
                "moe_topk": [8, 8],
                "num_shared_expert": [1, 1],
                "moe_intermediate_size": [3072, 3072],
            },
            {"experts": 64, "experts_per_token": 8, "shared_experts": 1, "moe_width": 3072},
        ),
        ({"moe_topk": [8, 4]}, {"experts_per_token": 0}),
        ({"num_experts": [16, 16, 16]}, {"experts": 16}),
        ({"multi_query": True}, {"heads": 0, "kv_heads": 0}),
        (
            {
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 48,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 256,
            },
            {
                "linear_key_heads": 16,
                "linear_value_heads": 48,
                "linear_key_dim": 128,
                "linear_value_dim": 256,
            },
        ),
        ({"moe_topk": []}, {"experts_per_token": 0}),
        ({"num_experts": None, "num_local_experts": 4}, {"experts": 4}),
        (
            {"n_head": 8, "n_embd": 64, "n_layer": 2},
            {"heads": 8, "kv_heads": 8, "head_dim": 8, "hidden": 64, "layers": 2},
        ),
        (  # DBRX
            {
                "n_heads": 48,
                "d_model": 6144,
                "n_layers": 40,
                "attn_config": {"kv_n_heads": 8},
                "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
            },
            {"heads": 48, "kv_heads": 8, "head_dim": 128, "experts": 16, "experts_per_token": 4},
        ),
        (  # ChatGLM3
            {"num_attention_heads": 32, "multi_query_group_num": 2, "kv_channels": 128},
            {"heads": 32, "kv_heads": 2, "head_dim": 128},
        ),
        ({"num_attention_heads": 71, "multi_query": True}, {"kv_heads": 1}),  # Falcon-7B
        (
            {
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "multi_query": True,
                "new_decoder_architecture": True,
            },
            {"kv_heads": 8},
        ),
        ({"num_attention_heads": 64, "multi_query": False}, {"kv_heads": 64}),
        ({"o_groups": 8}, {"output_groups": 8}),
        ({"text_config": {"num_experts": 4}, "num_experts": 9}, {"experts": 4}),
        ({"attn_config": "flash", "ffn_config": None}, {"kv_heads": 0}),
        ({}, {"layers": 0, "hidden": 0, "experts": 0, "experts_per_token": 0, "moe_width": 0}),
    ],
)
def test_counts_of_config_json(config, expected):
    topology = Topology.from_config(config)
    assert {key: getattr(topology, key) for key in expected} == expected
    assert hash(topology) == hash(Topology.from_config(config))


@pytest.mark.parametrize("value", ["8", "", -1, 8.0, True, {}, [8, "8"], [[8]], [True]])
@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size", "moe_topk"])
def test_a_count_that_is_none(key, value):
    with pytest.raises(InvalidCheckpoint, match=f"{key}: not a count"):
        Topology.from_config({"text_config": {key: value}})


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "n_head", "o_groups"])
def test_a_count_that_may_not_be_a_list(key):
    with pytest.raises(InvalidCheckpoint, match=f"{key}: not a count"):
        Topology.from_config({key: [8, 8]})
