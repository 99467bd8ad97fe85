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


# 24 heads of 16 rows; 6 key heads of 8 and 12 value heads of 4; a K of 45 groups
ODD = Topology(
    heads=24,
    kv_heads=6,
    head_dim=16,
    linear_key_heads=6,
    linear_key_dim=8,
    linear_value_heads=12,
    linear_value_dim=4,
)
DIVISORS_OF_24 = {1, 2, 3, 4, 6, 8, 12, 24}


@pytest.mark.parametrize(
    ("role", "n", "degrees"),
    [
        (Role("qkv", "q", "g"), 384, DIVISORS_OF_24),
        # six KV heads: each rank has some, or each head has some ranks
        (Role("qkv", "k", "g"), 96, {1, 2, 3, 6, 12, 18, 24, 30, 36, 42, 48, 54, 60}),
        (Role("qkv", "qkv"), 576, {1, 2, 3, 6, 12, 24}),
        (Role("merged", "linear_qkv", "g"), 144, {1, 2, 3, 6}),
        (Role("merged", "linear_value", "g"), 48, {1, 2, 3, 4, 6, 12}),
        (Role("column", "linear_key"), 144, {1, 2, 3, 6}),
        (Role("merged", "gate_up"), 48, DIVISORS_OF_24),
        (Role("merged", "gate", "g"), 24, DIVISORS_OF_24),
        (Role("expert", "up", "g"), 24, DIVISORS_OF_24),
        (Role("column"), 60, {1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60}),
        # 45 groups of 32 columns
        (Role("row", "down"), 8, {1, 3, 5, 9, 15, 45}),
        (Role("expert", "down"), 8, {1, 3, 5, 9, 15, 45}),
        # 100 rows are padded to 128
        (Role("column", "vocab"), 100, {1, 2, 4, 8, 16, 32, 64}),
    ],
)
def test_p10_every_degree_divides_exactly_or_says_that_it_does_not(role, n, degrees):
    """No degree from 1 to 64 is rounded: ranks hold equal pieces that make the whole, or none."""
    k = 45 * 32
    cut = cut_of(role, n, ODD)
    possible = set()
    refused = {}
    for tp in range(1, 65):
        try:
            pieces = ranges(cut, n, k, tp)
        except CannotShard as error:
            refused[tp] = error.what
            continue
        possible.add(tp)
        held = [0] * n
        for piece in pieces:
            for start, stop in piece.rows:
                for row in range(start, stop):
                    held[row] += 1
        if cut.axis == "columns":
            assert held == [tp] * n
            edges = [piece.columns for piece in pieces]
            assert edges == [(rank * k // tp, (rank + 1) * k // tp) for rank in range(tp)]
            assert k // tp % 32 == 0
        else:
            assert {piece.columns for piece in pieces} == {(0, k)}
            if role.part == "vocab":
                assert held == [1] * n
            else:
                assert len({piece.n for piece in pieces}) == 1
                # q and what has no heads: one rank each; a KV head: its share of the ranks
                assert set(held) <= {1, max(1, tp // 6)}
    assert possible == degrees
    assert all(f" {tp} ranks" in why or f"at tp {tp}:" in why for tp, why in refused.items())


def test_p13_more_ranks_than_kv_heads():
    """8 q heads, 2 KV heads of 64, tp 4: two q heads and one KV head a rank, 256 rows in all."""
    parts = {"q": 512, "k": 128, "v": 128}
    cuts = {part: cut_of(Role("qkv", part, "g"), n, LLAMA) for part, n in parts.items()}
    for rank in range(4):
        pieces = {part: shard(cuts[part], n, 512, 4, rank) for part, n in parts.items()}
        assert sum(piece.n for piece in pieces.values()) == 256
        assert pieces["k"].rows == pieces["v"].rows == (((rank // 2) * 64, (rank // 2) * 64 + 64),)
    with pytest.raises(CannotShard, match="2 heads of 64 rows do not divide by 3 ranks"):
        shard(cuts["k"], 128, 512, 3)


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
