"""Survey and plan: one decision per fused group, with the reason, before a byte moves."""

from __future__ import annotations

import pytest
import torch
from quark_factory import (
    FP4_INPUT,
    FP8_WEIGHT,
    model_config,
    quant_config,
    quant_layer,
    write_checkpoint,
)

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.errors import InvalidCheckpoint, Unsupported, UsageError
from mxfp4prep.parallel import parse_rules
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.survey import check_tp, survey

ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
DENSE = {
    f"{ATTN}.q_proj": (512, 512),
    f"{ATTN}.k_proj": (128, 512),
    f"{ATTN}.v_proj": (128, 512),
    f"{ATTN}.o_proj": (512, 512),
    f"{MLP}.gate_proj": (1024, 512),
    f"{MLP}.up_proj": (1024, 512),
    f"{MLP}.down_proj": (512, 1024),
}


def planned(root, tp=(1,), rules=(), **kwargs):
    surveyed = survey(open_checkpoint(root), surveyed_degrees(tp), parse_rules(rules))
    return make_plan(surveyed, tp, **kwargs)


def decisions(plan):
    return {p.layer.name: (p.path, p.reasons) for p in plan.layers}


def codes(plan):
    return [finding.code for finding in plan.findings]


@pytest.fixture
def dense(tmp_path):
    return write_checkpoint(tmp_path / "m", DENSE)


def test_aligned_model_is_all_asm_at_1_and_mixed_at_4(dense):
    assert set(decisions(planned(dense)).values()) == {("asm", ())}
    at4 = decisions(planned(dense, (1, 2, 4)))
    # o_proj: 512 / 4 = 128 columns = 4 scale columns; down_proj: 256 columns = 8
    assert at4[f"{ATTN}.o_proj"] == ("triton", ("scale_cols",))
    assert at4[f"{MLP}.down_proj"] == ("asm", ())
    assert at4[f"{ATTN}.k_proj"] == ("asm", ())


def test_a_misfit_member_takes_its_whole_group_along(tmp_path):
    root = write_checkpoint(
        tmp_path / "m", {**DENSE, f"{ATTN}.k_proj": (48, 512), f"{ATTN}.v_proj": (96, 512)}
    )
    made = decisions(planned(root))
    assert made[f"{ATTN}.k_proj"] == ("triton", ("scale_rows",))
    assert made[f"{ATTN}.v_proj"] == ("triton", ("bad_tile", "scale_rows"))
    # 512 + 48 + 96 = 656 fused rows
    assert made[f"{ATTN}.q_proj"] == ("triton", ("scale_rows", "group_part"))
    assert made[f"{ATTN}.o_proj"] == ("asm", ())


def test_fused_rows_of_96_make_both_members_triton(tmp_path):
    # 32 + 64 = 96 rows: each member is legal alone, the concatenation is the bad tile
    at = "model.layers.0.mlp"
    root = write_checkpoint(
        tmp_path / "m", {f"{at}.gate_proj": (32, 256), f"{at}.up_proj": (64, 256)}
    )
    plan = planned(root)
    assert decisions(plan) == {
        f"{at}.gate_proj": ("triton", ("bad_tile",)),
        f"{at}.up_proj": ("triton", ("bad_tile",)),
    }
    group = plan.survey.groups[0]
    assert group.verdicts[1].scale_shard == (96, 8)
    assert plan.survey.layers[0].verdicts[1].path == "asm"


def test_p02_stored_and_fused_views_are_both_there(tmp_path):
    at = "model.layers.0.linear_attn"
    root = write_checkpoint(
        tmp_path / "m",
        {f"{at}.in_proj_b": (48, 5120), f"{at}.in_proj_a": (48, 5120)},
        config=model_config(linear_num_value_heads=48),
    )
    plan = planned(root)
    assert plan.survey.layers[0].verdicts[1].scale_shard == (48, 160)
    group = plan.survey.groups[0]
    assert {tp: v.scale_shard for tp, v in group.verdicts.items()} == {
        1: (96, 160),
        2: (48, 160),
        4: (24, 160),
        8: (12, 160),
    }
    assert decisions(plan)[f"{at}.in_proj_a"] == ("triton", ("scale_rows", "bad_tile"))


def test_p37_members_of_different_schemes_are_converted_one_by_one(tmp_path):
    root = write_checkpoint(
        tmp_path / "m",
        {f"{ATTN}.q_proj": (512, 512), f"{ATTN}.o_proj": (512, 512)},
        config=model_config(
            quant_config(layer_quant_config={"*k_proj": quant_layer(FP8_WEIGHT, None)})
        ),
        extra={
            f"{ATTN}.k_proj.weight": torch.zeros(128, 512).to(torch.float8_e4m3fn),
            f"{ATTN}.k_proj.weight_scale": torch.ones(128),
            f"{ATTN}.v_proj.weight": torch.zeros(128, 512, dtype=torch.bfloat16),
        },
    )
    plan = planned(root)
    assert decisions(plan)[f"{ATTN}.q_proj"] == ("asm", ())
    assert "mixed_group" in codes(plan)
    group = plan.survey.groups[0]
    assert group.mixed
    assert (group.verdicts[1].path, group.verdicts[1].reasons) == ("triton", ("mixed_group",))
    hazards = {p.layer.name: p.hazards for p in plan.layers}
    assert hazards == {f"{ATTN}.q_proj": ("mixed_group",), f"{ATTN}.o_proj": ()}


def test_p38_quantized_pair_beside_an_unquantized_pair_is_two_groups(tmp_path):
    at = "model.layers.0.linear_attn"
    root = write_checkpoint(
        tmp_path / "m",
        {f"{at}.in_proj_qkv": (512, 256), f"{at}.in_proj_z": (256, 256)},
        extra={
            f"{at}.in_proj_a.weight": torch.zeros(48, 256, dtype=torch.bfloat16),
            f"{at}.in_proj_b.weight": torch.zeros(48, 256, dtype=torch.bfloat16),
        },
    )
    plan = planned(root)
    assert [(g.name, g.mixed) for g in plan.survey.groups] == [(f"{at}.in_proj_qkvz", False)]
    assert "mixed_group" not in codes(plan)
    assert set(decisions(plan)) == {f"{at}.in_proj_qkv", f"{at}.in_proj_z"}


def test_impossible_layers_are_stored_triton_and_reported(tmp_path):
    root = write_checkpoint(
        tmp_path / "m",
        {f"{MLP}.experts.0.down_proj": (256, 1408), f"{MLP}.experts.0.gate_proj": (1408, 256)},
    )
    plan = planned(root, (8,))
    made = decisions(plan)
    assert made[f"{MLP}.experts.0.down_proj"] == ("triton", ("split_groups", "scale_cols"))
    assert "impossible" in codes(plan)
    finding = next(f for f in plan.findings if f.code == "impossible")
    assert "1408 / 8 = 176 columns = 5.5 groups" in finding.message


def test_layout_triton_and_asm(dense, tmp_path):
    assert set(decisions(planned(dense, layout="triton")).values()) == {("triton", ("forced",))}
    planned(dense, layout="asm")
    root = write_checkpoint(tmp_path / "odd", {**DENSE, f"{MLP}.down_proj": (512, 640)})
    with pytest.raises(
        Unsupported, match="1 of 7 layers cannot take the ASM path: found scale_cols"
    ):
        planned(root, layout="asm")


def test_keep_leaves_layers_raw_and_their_group_triton(dense):
    plan = planned(dense, keep=[f"{ATTN}.k_*"])
    made = {p.layer.name: p for p in plan.layers}
    kept = made[f"{ATTN}.k_proj"]
    assert (kept.path, kept.reasons) == ("triton", ("kept",))
    assert (kept.weight_layout, kept.scale_layout) == ("raw", "raw")
    assert made[f"{ATTN}.q_proj"].reasons == ("group_part",)
    assert made[f"{MLP}.down_proj"].path == "asm"


def test_patterns_that_match_nothing_are_refused_before_anything_is_written(dense):
    with pytest.raises(UsageError, match="--keep down_proj: matches no MXFP4 layer") as caught:
        planned(dense, keep=["down_proj"])
    assert "'*down_proj'" in (caught.value.hint or "")
    with pytest.raises(UsageError, match=r"--parallel foo=row: matches no MXFP4 layer"):
        planned(dense, rules=["foo=row"])


def test_a_rule_that_says_what_the_table_says_changes_nothing(dense):
    plain = planned(dense, (8,))
    told = planned(dense, (8,), rules=["*k_proj=qkv", "*.down_proj=row"])
    assert decisions(told) == decisions(plain)
    assert [i.cut for i in told.survey.layers] == [i.cut for i in plain.survey.layers]


def test_inputs_of_another_scale_mode_are_reported(tmp_path):
    floor = {**FP4_INPUT, "scale_calculation_mode": "floor"}
    section = quant_config(global_quant_config=quant_layer(inputs=floor))
    root = write_checkpoint(
        tmp_path / "m", {f"{MLP}.down_proj": (64, 256)}, config=model_config(section)
    )
    [finding] = [f for f in planned(root).findings if f.code == "scale_mode"]
    assert "scale mode floor" in finding.message


def test_a_finding_that_is_an_error_stops_the_plan(tmp_path):
    root = write_checkpoint(
        tmp_path / "m",
        {"lm_head": (64, 256)},
        config=model_config(quant_config(exclude=[]), tie_word_embeddings=True),
        extra={"model.embed_tokens.weight": torch.zeros(64, 256, dtype=torch.bfloat16)},
    )
    with pytest.raises(InvalidCheckpoint, match="lm_head"):
        planned(root)


def test_three_dimensional_expert_banks_take_the_same_layouts_per_expert(tmp_path):
    generator = torch.Generator().manual_seed(1)
    bank = {
        "model.layers.0.mlp.experts.down_proj.weight": torch.randint(
            0, 256, (3, 64, 128), generator=generator, dtype=torch.uint8
        ),
        "model.layers.0.mlp.experts.down_proj.weight_scale": torch.randint(
            1, 255, (3 * 64, 8), generator=generator, dtype=torch.uint8
        ),
    }
    plan = planned(write_checkpoint(tmp_path / "m", {}, extra=bank))
    [layer] = plan.layers
    assert (layer.layer.experts, layer.path) == (3, "asm")
    shapes = {t.source.name.rpartition(".")[2]: t.stored.shape for t in plan.shards[0].tensors}
    assert shapes == {"weight": (3, 4, 2048), "weight_scale": (3, 2, 256)}


def test_p62_other_three_dimensional_weights_are_not_2d(tmp_path):
    conv = {
        "model.layers.0.linear_attn.conv1d.weight": torch.ones(64, 1, 2, dtype=torch.uint8),
        "model.layers.0.linear_attn.conv1d.weight_scale": torch.ones(64, 1, dtype=torch.uint8),
    }
    [layer] = planned(write_checkpoint(tmp_path / "m", {}, extra=conv)).layers
    assert layer.path == "triton"
    assert "not_2d" in layer.reasons


def test_unknown_names_are_judged_unsharded_until_the_user_says_more(tmp_path):
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mixer.out": (512, 1024)})
    plan = planned(root, (8,))
    assert "unknown_parallel" in codes(plan)
    assert decisions(plan)["model.layers.0.mixer.out"] == ("asm", ())
    told = planned(root, (8,), rules=["*mixer.out=row"])
    assert decisions(told)["model.layers.0.mixer.out"] == ("triton", ("scale_cols",))
    assert "unknown_parallel" not in codes(told)


def test_offsets_and_sizes_never_change(mxfp4_fixture):
    plan = planned(mxfp4_fixture, (1, 2, 4, 8))
    for shard in plan.shards:
        for tensor in shard.tensors:
            assert tensor.stored[0:2] == tensor.source[0:2]
            assert (tensor.stored.begin, tensor.stored.end) == (
                tensor.source.begin,
                tensor.source.end,
            )
            count = 1
            for extent in tensor.stored.shape:
                count *= extent
            assert tensor.layout is None or count == tensor.source.nbytes


def test_p13_replicated_kv_heads_are_reported(dense):
    surveyed = survey(open_checkpoint(dense), (2, 4, 8))
    [finding] = [f for f in surveyed.findings if f.code == "kv_replicated"]
    assert "each of the 2 KV heads is held by 2 ranks at tp 4, 4 ranks at tp 8" in finding.message
    alone = survey(open_checkpoint(dense), (1, 2))
    assert "kv_replicated" not in [f.code for f in alone.findings]


def test_degrees():
    assert check_tp([8, 1, 8]) == (1, 8)
    assert surveyed_degrees((3,)) == (1, 2, 3, 4, 8)
    for bad in ([], [0], [-2], [4096]):
        with pytest.raises(UsageError, match="tensor-parallel degree"):
            check_tp(bad)


def test_p08_any_degree_is_judged(dense):
    surveyed = survey(open_checkpoint(dense), (3, 6, 16, 32))
    by_name = {item.layer.name: item for item in surveyed.layers}
    down = by_name[f"{MLP}.down_proj"].verdicts
    assert [down[tp].path for tp in (3, 6, 16, 32)] == [
        "impossible",
        "impossible",
        "triton",
        "triton",
    ]
    assert down[32].scale_shard == (512, 1)
