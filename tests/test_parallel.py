"""The table of names and the cuts it makes, against hand-computed shards."""

from __future__ import annotations

import pytest

from mxfp4prep.errors import CannotShard, InvalidCheckpoint, UsageError
from mxfp4prep.parallel import (
    Block,
    Cut,
    Role,
    Topology,
    assign_roles,
    cut_of,
    gate_up_order,
    kind_of,
    parse_rules,
    shard,
)

LLAMA = Topology(model_type="llama", heads=8, kv_heads=2, head_dim=64)
AT = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.experts.7.down_proj", "expert"),
        ("model.layers.0.mlp.experts.gate_up_proj", "expert"),
        ("model.layers.0.block_sparse_moe.experts.0.w2", "expert"),
        ("model.layers.0.mlp.shared_expert.down_proj", "shared_expert"),
        ("model.layers.0.mlp.shared_experts.gate_proj", "shared_expert"),
        ("model.layers.0.mlp.shared_expert_gate", "linear"),
        ("model.layers.0.mlp.down_proj", "linear"),
        ("experts_of_the_past.down_proj", "linear"),
    ],
)
def test_kind_of(name, kind):
    assert kind_of(name) == kind


def test_roles_of_a_dense_layer():
    names = [f"{AT}.{p}_proj" for p in "qkvo"] + [
        f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")
    ]
    roles = assign_roles([*names, "lm_head"])
    assert roles[f"{AT}.k_proj"] == Role("qkv", "k", f"{AT}.qkv_proj")
    assert roles[f"{AT}.o_proj"] == Role("row")
    assert roles["model.layers.0.mlp.up_proj"] == Role(
        "merged", "up", "model.layers.0.mlp.gate_up_proj"
    )
    assert roles["model.layers.0.mlp.down_proj"].parallel == "row"
    assert roles["lm_head"].parallel == "column"


def test_roles_of_mla_experts_linear_attention_and_strangers():
    names = [
        f"{AT}.q_a_proj",
        f"{AT}.kv_a_proj_with_mqa",
        f"{AT}.q_b_proj",
        f"{AT}.kv_b_proj",
        "l.mlp.experts.0.w1",
        "l.mlp.experts.0.w3",
        "l.mlp.experts.0.w2",
        "l.linear_attn.in_proj_qkv",
        "l.linear_attn.in_proj_z",
        "l.linear_attn.in_proj_b",
        "l.linear_attn.in_proj_a",
        "l.mixer.whatever",
        "visual.blocks.0.attn.q_proj",
        "l.mlp.experts.0.router",
    ]
    roles = assign_roles(names)
    assert roles[f"{AT}.q_a_proj"] == Role("replicated", "q_a", f"{AT}.fused_qkv_a_proj")
    assert roles[f"{AT}.kv_b_proj"].parallel == "column"
    assert roles["l.mlp.experts.0.w1"] == Role("expert", "gate", "l.mlp.experts.0.w13")
    assert roles["l.mlp.experts.0.w2"] == Role("expert", "down", None)
    assert roles["l.linear_attn.in_proj_z"].group == "l.linear_attn.in_proj_qkvz"
    assert roles["l.linear_attn.in_proj_a"].group == "l.linear_attn.in_proj_ba"
    for name in names[-3:]:
        assert roles[name] == Role("unknown"), name


def test_a_part_without_siblings_is_no_group():
    roles = assign_roles([f"{AT}.q_proj", f"{AT}.kv_a_proj_with_mqa"])
    assert roles[f"{AT}.q_proj"] == Role("column", "q", None)
    assert roles[f"{AT}.kv_a_proj_with_mqa"] == Role("replicated", "kv_a", None)


def test_user_rules_win_over_the_table_and_first_match_wins():
    rules = parse_rules(["l.mixer.*=row", "*.out=column", "*q_proj=replicated"])
    roles = assign_roles(["l.mixer.out", "m.out", f"{AT}.q_proj"], rules)
    assert [r.parallel for r in roles.values()] == ["row", "column", "replicated"]


@pytest.mark.parametrize("rule", ["row", "=row", "a=sideways", "a="])
def test_bad_user_rule(rule):
    with pytest.raises(UsageError, match="not a rule"):
        parse_rules([rule])


def ranges(cut, n, k, tp):
    return [shard(cut, n, k, tp, rank) for rank in range(tp)]


def test_kv_heads_replicate_beyond_their_number():
    cut = cut_of(Role("qkv", "k", "g"), 128, LLAMA)
    starts = [piece.rows[0] for piece in ranges(cut, 128, 512, 4)]
    assert starts == [(0, 64), (0, 64), (64, 128), (64, 128)]


def test_q_heads_never_replicate_and_heads_stay_whole():
    cut = cut_of(Role("qkv", "q", "g"), 512, LLAMA)
    assert [p.rows[0] for p in ranges(cut, 512, 512, 2)] == [(0, 256), (256, 512)]
    with pytest.raises(CannotShard, match="8 heads of 64 rows") as caught:
        shard(cut, 512, 512, 16)
    assert caught.value.reason == "split_rows"


def test_fused_qkv_on_disk_is_cut_block_by_block():
    cut = cut_of(Role("qkv", "qkv"), 768, LLAMA)
    first, last = shard(cut, 768, 512, 2, 0), shard(cut, 768, 512, 2, 1)
    assert first.rows == ((0, 256), (512, 576), (640, 704))
    assert last.rows == ((256, 512), (576, 640), (704, 768))
    assert first.n == 384


def test_gate_up_on_disk_concatenated_and_interleaved():
    role = Role("merged", "gate_up")
    assert shard(cut_of(role, 64, LLAMA), 64, 32, 2, 1).rows == ((16, 32), (48, 64))
    assert shard(cut_of(role, 64, LLAMA, True), 64, 32, 2, 1).rows == ((32, 64),)


def test_linear_attention_blocks_are_cut_apart():
    # Qwen3.5-like: 16 key heads and 48 value heads of 128: q 2048 | k 2048 | v 6144
    t = Topology(
        linear_key_heads=16, linear_value_heads=48, linear_key_dim=128, linear_value_dim=128
    )
    cut = cut_of(Role("merged", "linear_qkv", "g"), 10240, t)
    assert shard(cut, 10240, 2560, 2, 1).rows == ((1024, 2048), (3072, 4096), (7168, 10240))
    assert cut_of(Role("merged", "linear_value", "g"), 48, t) == Cut("rows", (Block(48, 48),))
    assert shard(cut_of(Role("column", "linear_key"), 12288, t), 12288, 2048, 16, 3).rows == (
        (2304, 3072),
    )


def test_p11_row_parallel_scale_starts_where_the_weight_does():
    piece = shard(Cut("columns"), 4096, 3072, 2, 1)
    assert piece.columns == (1536, 3072)
    assert piece.rows == ((0, 4096),)
    # in scale columns: 48 from column 48 on, the same offset in K
    assert (piece.columns[0] // 32, piece.k // 32) == (48, 48)


def test_p12_rank_1_starts_at_the_stored_row_not_the_padded_one():
    # stored expert width 384 at tp 2: 192 rows per rank, whatever a runtime pads them to
    cut = cut_of(Role("expert", "gate", "g"), 384, LLAMA)
    assert shard(cut, 384, 256, 2, 1).rows == ((192, 384),)


def test_p49_vocabulary_need_not_divide():
    cut = cut_of(Role("column", "vocab"), 32003, LLAMA)
    pieces = ranges(cut, 32003, 256, 2)
    assert [p.rows[0] for p in pieces] == [(0, 16032), (16032, 32003)]
    with pytest.raises(CannotShard, match="vocabulary of 32003, padded to 32064"):
        shard(cut, 32003, 256, 5)


def test_replicated_and_unknown_are_never_cut():
    for role in (Role("replicated"), Role("unknown")):
        piece = shard(cut_of(role, 97, LLAMA), 97, 33, 8, 5)
        assert (piece.rows, piece.columns) == (((0, 97),), (0, 33))


def test_pieces_tile_the_matrix_exactly():
    for n, k, role in (
        (512, 512, Role("row")),
        (768, 512, Role("qkv", "qkv")),
        (640, 64, Role("column")),
    ):
        for tp in (1, 2):
            cut = cut_of(role, n, LLAMA)
            area = sum(p.n * p.k for p in ranges(cut, n, k, tp))
            assert area == n * k


def test_topology_reads_nested_text_config_and_defaults():
    t = Topology.from_config(
        {
            "model_type": "outer",
            "text_config": {"model_type": "inner", "num_attention_heads": 4, "hidden_size": 64},
        }
    )
    assert (t.model_type, t.heads, t.kv_heads, t.head_dim) == ("inner", 4, 4, 16)
    assert Topology.from_config({"num_attention_heads": None}).heads == 0


@pytest.mark.parametrize("value", ["32", -4, 4.0, True, [8]])
def test_a_head_count_that_is_none(value):
    with pytest.raises(InvalidCheckpoint, match="num_attention_heads: not a count"):
        Topology.from_config({"num_attention_heads": value})


def test_gate_up_order_depends_on_the_architecture():
    name = "model.layers.0.mlp.experts.0.gate_up_proj"
    assert gate_up_order(name, Topology(model_type="gpt_oss")) == "interleaved"
    assert gate_up_order(name, LLAMA) == "concatenated"
    assert gate_up_order("a.gate_proj", LLAMA) is None
