"""Verdicts on shapes from real crashes and corruptions, worked out by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from mxfp4prep import alignment
from mxfp4prep.alignment import (
    ASM_HAZARDS,
    HAZARDS,
    REASONS,
    RULE,
    RULE_VERSION,
    Path,
    Verdict,
    demoted,
    judge_group,
    judge_layer,
    judge_matrix,
    scale_columns,
    stricter,
)
from mxfp4prep.parallel import Block, Cut

COLUMNS = Cut("columns")
WHOLE = Cut("none")


def rows(n: int, units: int | None = None, replicate: bool = False) -> Cut:
    return Cut("rows", (Block(n, units or n, replicate),))


@pytest.mark.parametrize(
    ("case", "cut", "n", "k", "tp", "path", "shard", "reasons"),
    [
        # P01: the unfused shared expert that crashed vLLM: 640 / 32 = 20 columns, 20 % 8 = 4
        ("P01", WHOLE, 2560, 640, 1, "triton", (2560, 20), ("scale_cols",)),
        # P02: 48 rows of in_proj_b, 5120 / 32 = 160 columns
        ("P02 tp1", rows(48), 48, 5120, 1, "triton", (48, 160), ("scale_rows",)),
        ("P02 tp2", rows(48), 48, 5120, 2, "triton", (24, 160), ("scale_rows",)),
        ("P02 tp4", rows(48), 48, 5120, 4, "triton", (12, 160), ("scale_rows",)),
        ("P02 tp8", rows(48), 48, 5120, 8, "triton", (6, 160), ("scale_rows",)),
        # P03: 96 rows fit the tiles, and the kernel is wrong; 128 rows are fine
        ("P03 96x5120", WHOLE, 96, 5120, 1, "triton", (96, 160), ("bad_tile",)),
        ("P03 96x2560", WHOLE, 96, 2560, 1, "triton", (96, 80), ("bad_tile",)),
        ("P03 128", WHOLE, 128, 5120, 1, "asm", (128, 160), ()),
        ("P03 at tp2", rows(192), 192, 5120, 2, "triton", (96, 160), ("bad_tile",)),
        # P04: K a multiple of 32 and not of 256 is silent garbage on ASM
        ("P04 1664", WHOLE, 512, 1664, 1, "triton", (512, 52), ("scale_cols",)),
        ("P04 1824", WHOLE, 512, 1824, 1, "triton", (512, 57), ("scale_cols",)),
        ("P04 1856", WHOLE, 512, 1856, 1, "triton", (512, 58), ("scale_cols",)),
        # P06: MiniMax experts, width 1536: clean at 2, not at 4 and 8
        ("P06 tp2", COLUMNS, 3072, 1536, 2, "asm", (3072, 24), ()),
        ("P06 tp4", COLUMNS, 3072, 1536, 4, "triton", (3072, 12), ("scale_cols",)),
        ("P06 tp8", COLUMNS, 3072, 1536, 8, "triton", (3072, 6), ("scale_cols",)),
        # P08: any degree the user names
        ("P08 tp16", COLUMNS, 2048, 3072, 16, "triton", (2048, 6), ("scale_cols",)),
        # P10: odd group counts, and shards that are not whole groups
        ("P10 672", WHOLE, 64, 672, 1, "triton", (64, 21), ("scale_cols",)),
        ("P10 1440 tp2", COLUMNS, 64, 1440, 2, "impossible", None, ("split_groups",)),
        # expert width 1408 at tp 8: 176 columns, 5.5 groups
        ("1408", COLUMNS, 2048, 1408, 8, "impossible", None, ("split_groups",)),
        ("1408 tp4", COLUMNS, 2048, 1408, 4, "triton", (2048, 11), ("scale_cols",)),
        ("cols", COLUMNS, 64, 1024, 3, "impossible", None, ("split_cols",)),
        ("rows", rows(100), 100, 256, 8, "impossible", None, ("split_rows",)),
        # 8 columns, but 250 values: the last group is short, so the tile is not whole
        ("short", WHOLE, 32, 250, 1, "triton", (32, 8), ("scale_cols",)),
        ("both", WHOLE, 33, 96, 1, "triton", (33, 3), ("scale_rows", "scale_cols")),
    ],
)
def test_verdict_on_real_shapes(case, cut, n, k, tp, path, shard, reasons):
    verdict = judge_layer(cut, n, k, tp)
    assert (verdict.path, verdict.scale_shard, verdict.reasons) == (path, shard, reasons)


def test_p13_kv_heads_replicate_and_count_in_the_fused_rows():
    # 8 q heads, 2 kv heads, head_dim 64, tp 4: 2 * 64 + 64 + 64 rows
    q, k, v = rows(512, 8), rows(128, 2, True), rows(128, 2, True)
    verdict = judge_group([(q, 512), (k, 128), (v, 128)], 512, 4)
    assert verdict.scale_shard == (256, 16)
    assert verdict.path == "asm"


def test_p02_fused_view_of_two_48_row_projections():
    members = [(rows(48, 48), 48), (rows(48, 48), 48)]
    paths = {tp: judge_group(members, 5120, tp) for tp in (1, 2, 4, 8)}
    assert {tp: v.scale_shard for tp, v in paths.items()} == {
        1: (96, 160),
        2: (48, 160),
        4: (24, 160),
        8: (12, 160),
    }
    assert paths[1].reasons == ("bad_tile",)
    assert paths[2].reasons == ("scale_rows",)


def test_group_with_a_member_that_cannot_split_is_impossible():
    verdict = judge_group([(rows(512, 8), 512), (rows(96, 3, True), 96)], 512, 2)
    why = "3 heads of 32 rows do not divide by 2 ranks"
    assert verdict == Verdict("impossible", None, ("split_rows",), (), why)


def test_a_layer_that_cannot_be_cut_says_why():
    why = "100 rows do not divide by 8 ranks"
    expected = Verdict("impossible", None, ("split_rows",), (), why)
    assert judge_layer(rows(100), 100, 256, 8) == expected


def test_short_last_group_is_a_hazard_and_not_a_matrix_is_a_reason():
    assert judge_matrix(32, 250).hazards == ("short_group",)
    assert judge_matrix(32, 256, is_matrix=False).reasons == ("not_2d",)


def test_scale_columns_round_up():
    assert [scale_columns(k) for k in (32, 80, 96, 97)] == [1, 3, 3, 4]


def test_stricter_keeps_the_first_of_equals():
    asm, triton = judge_matrix(32, 256), judge_matrix(33, 256)
    assert stricter(asm, triton) is triton
    assert stricter(triton, asm) is triton
    other = judge_matrix(96, 256)
    assert stricter(triton, other) is triton
    impossible = judge_layer(rows(100), 100, 256, 8)
    for less in (asm, triton):
        assert stricter(less, impossible) is impossible
        assert stricter(impossible, less) is impossible


def test_every_code_is_explained_by_its_fact_and_no_two_alike():
    told = {
        "scale_rows": "multiple of 32",
        "scale_cols": "multiple of 256",
        "bad_tile": "96 scale rows",
        "not_2d": "neither a matrix nor a bank",
        "group_part": "same fused projection",
        "mixed_group": "different schemes",
        "kept": "--keep",
        "forced": "--layout triton",
        "engine": "does not run it on the ASM GEMM",
        "engine_all": "one choice for all",
        "engine_pad": "fills experts",
        "split_rows": "rows (or heads) do not divide",
        "split_cols": "columns do not divide",
        "split_groups": "not whole groups of 32",
    }
    assert told.keys() == REASONS.keys()
    assert [code for code, words in told.items() if words not in REASONS[code]] == []
    assert len(set(REASONS.values())) == len(REASONS)
    told = {
        "short_group": "fewer than 32 values",
        "mixed_group": "different schemes",
        "nan_scale": "255",
        "small_n": "fewer than 256 rows on a rank",
    }
    assert told.keys() == HAZARDS.keys()
    assert [code for code, words in told.items() if words not in HAZARDS[code]] == []
    assert set(HAZARDS) > ASM_HAZARDS


def test_the_rule_that_is_told_is_the_rule_that_is_followed():
    for n in (1, 31, 32, 33, 64, 95, 96, 97, 128, 192, 256, 288):
        for columns in (1, 7, 8, 9, 16, 20):
            sizes = {"rows": n, "columns": columns}
            holds = [eval(part, {}, sizes) for part in RULE.split(",")]
            assert len(holds) == 3
            assert (judge_matrix(n, columns * 32).path == "asm") == all(holds), sizes


def test_another_rule_has_another_version():
    """Manifests carry the number: what was written under one rule is not judged by another."""
    assert (RULE_VERSION, RULE) == (1, "rows % 32 == 0, columns % 8 == 0, rows != 96")


def test_every_path_has_its_name():
    assert set(get_args(Path)) == {"asm", "triton", "impossible"}


@pytest.mark.parametrize(
    ("n", "k", "path", "hazards"),
    [
        (32, 256, "asm", ("small_n",)),
        (64, 256, "asm", ("small_n",)),
        (128, 5120, "asm", ("small_n",)),
        (224, 256, "asm", ("small_n",)),
        (256, 256, "asm", ()),
        (288, 256, "asm", ()),  # no multiple of 256: said in words, not in a code of its own
        (4096, 256, "asm", ()),
        (96, 256, "triton", ()),
        (48, 256, "triton", ()),
        (128, 640, "triton", ()),
        (64, 80, "triton", ("short_group",)),
    ],
)
def test_few_rows_are_a_hazard_of_the_asm_path_alone(n, k, path, hazards):
    verdict = judge_matrix(n, k, dense_a4w4=True)
    assert (verdict.path, verdict.hazards) == (path, hazards)
    others = tuple(hazard for hazard in hazards if hazard != "small_n")
    assert judge_matrix(n, k) == verdict._replace(hazards=others)


def test_few_rows_are_counted_on_a_rank():
    made = {tp: judge_layer(rows(1024), 1024, 512, tp, dense_a4w4=True) for tp in (1, 2, 4, 8)}
    assert {tp: verdict.hazards for tp, verdict in made.items()} == {
        1: (),
        2: (),
        4: (),
        8: ("small_n",),
    }
    assert judge_layer(rows(1024), 1024, 512, 8).hazards == ()
    # A row-parallel layer keeps its rows.
    assert judge_layer(COLUMNS, 256, 2048, 8, dense_a4w4=True).hazards == ()
    assert judge_layer(COLUMNS, 128, 2048, 8, dense_a4w4=True).hazards == ("small_n",)


def test_few_rows_of_a_fused_projection_are_counted_together():
    members = [(rows(512), 512), (rows(512), 512)]
    assert judge_group(members, 512, 8, dense_a4w4=True).hazards == ("small_n",)
    assert judge_group(members, 512, 4, dense_a4w4=True).hazards == ()
    assert judge_group(members, 512, 8).hazards == ()


def test_the_short_last_rank_of_a_vocabulary_brings_its_own_hazard():
    # 480 rows are padded to 512: 256 on the first of two ranks, 224 on the last
    head = Cut("rows", (Block(480, 480, vocab=True),))
    verdict = judge_layer(head, 480, 512, 2, dense_a4w4=True)
    assert (verdict.path, verdict.scale_shard) == ("asm", (256, 16))
    assert verdict.hazards == ("small_n",)
    assert judge_layer(head, 480, 512, 1, dense_a4w4=True).hazards == ()


def test_a_rank_without_rows_has_no_hazard():
    assert judge_matrix(0, 256, dense_a4w4=True).hazards == ()


def test_stricter_takes_the_hazards_of_the_whole():
    part = Verdict("asm", (128, 16), (), ("small_n",))
    whole = Verdict("asm", (384, 16), (), ())
    assert stricter(part, whole) == Verdict("asm", (128, 16), (), ())
    assert stricter(part, whole) is stricter(part, whole)
    assert stricter(whole, part) == Verdict("asm", (384, 16), (), ("small_n",))
    slow = Verdict("triton", (384, 20), ("scale_cols",), ("short_group",))
    assert stricter(part, slow) is slow
    assert stricter(slow, part) is slow


def test_demoted_leaves_the_hazards_of_asm_behind():
    part = Verdict("asm", (128, 16), (), ("small_n", "mixed_group"))
    assert demoted(part, "group_part") == Verdict(
        "triton", (128, 16), ("group_part",), ("mixed_group",)
    )


def test_rules_are_outdated_that_an_earlier_version_had(monkeypatch):
    assert not any(alignment.outdated(version) for version in (0, 1, 2))
    monkeypatch.setattr(alignment, "RULE_VERSION", 3)
    assert [alignment.outdated(version) for version in (-1, 0, 1, 2, 3, 4)] == [
        False, False, True, True, False, False,
    ]  # fmt: skip
