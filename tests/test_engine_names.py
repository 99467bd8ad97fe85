"""How engines read names: exclude entries, layer_quant_config keys, fused projections, drafts.

The table below is what the engines' own functions answered when they were run.
"""

from __future__ import annotations

import pytest
from engine_cases import ask, codes, message, only, surveyed
from quark_factory import FP8_WEIGHT, quant_config, quant_layer

from mxfp4prep.engines import ENGINES, predict
from mxfp4prep.engines.excludes import Excludes, rename
from mxfp4prep.engines.specs import ConfigReader

AT = "model.layers.0"
FP8_LAYER = quant_layer(FP8_WEIGHT, {"dtype": "fp8_e4m3", "is_dynamic": True})

TABLE = """
| exclude entry | vLLM | SGLang | ATOM |
|---|---|---|---|
| exact shard names of a fused layer | ignored | ignored | only via ATOM's name mapping |
| one of two shards | ValueError | ValueError | False |
| `*self_attn*` (glob) | not ignored | not ignored | ignored |
| parent module name | not ignored | not ignored | ignored |
| `re:.*self_attn.*` | ignored | ignored | ignored |
| one expert of a MoE | all experts ignored | all ignored | all ignored |
| `lm_head` vs module `language_model.lm_head` | no | no | no |
"""
ROWS = {
    cells[0]: dict(zip(("vllm-0.33", "sglang-0.5", "atom"), cells[1:], strict=True))
    for line in TABLE.strip().splitlines()[2:]
    if (cells := [cell.strip() for cell in line.strip("|").split("|")])
}
QUESTIONS = {  # row -> entries, what is asked about, how
    "exact shard names of a fused layer": (
        [f"{AT}.mlp.gate_proj", f"{AT}.mlp.up_proj"],
        f"{AT}.mlp.gate_up_proj",
        "fused",
    ),
    "one of two shards": ([f"{AT}.mlp.gate_proj"], f"{AT}.mlp.gate_up_proj", "fused"),
    "`*self_attn*` (glob)": (["*self_attn*"], f"{AT}.self_attn.o_proj", "linear"),
    "parent module name": ([f"{AT}.self_attn"], f"{AT}.self_attn.o_proj", "linear"),
    "`re:.*self_attn.*`": (["re:.*self_attn.*"], f"{AT}.self_attn.o_proj", "linear"),
    "one expert of a MoE": ([f"{AT}.mlp.experts.3.up_proj"], f"{AT}.mlp.experts", "bank"),
    "`lm_head` vs module `language_model.lm_head`": (
        ["lm_head"],
        "language_model.lm_head",
        "linear",
    ),
}


def reader(engine, model_type="x", family="x", **quant):
    return ConfigReader(ENGINES[engine], quant_config(**quant), model_type, family)


@pytest.mark.parametrize("engine", ["vllm-0.33", "sglang-0.5", "atom"])
@pytest.mark.parametrize("row", list(ROWS))
def test_exclude_entries_are_read_as_each_engine_reads_them(row, engine):
    entries, name, how = QUESTIONS[row]
    read = reader(engine, exclude=entries)
    parts = [f"{AT}.mlp.gate_proj", f"{AT}.mlp.up_proj"]
    found = {
        "fused": lambda: read.fused(name, parts),
        "linear": lambda: read.linear(name),
        "bank": lambda: read.bank(name),
    }[how]()
    raw = Excludes(entries, ENGINES[engine].names).match(name)
    expected = ROWS[row][engine]
    if expected == "ValueError":
        assert found.refusal.startswith("ValueError: different quantization schemes")
        assert "gate_proj, up_proj, of which 1 excluded" in found.refusal
    elif expected in ("ignored", "all ignored", "all experts ignored"):
        assert found.excluded
    elif expected == "only via ATOM's name mapping":
        assert found.excluded
        assert not raw
    else:
        assert expected in ("not ignored", "no", "False")
        assert not raw
        assert not found.excluded


def test_a_fused_name_is_tried_before_its_parts():
    parts = [f"{AT}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    for engine in ("vllm-0.33", "sglang-0.5", "atom"):
        for entry in (f"{AT}.self_attn.qkv_proj", "re:.*qkv_proj"):
            assert reader(engine, exclude=[entry]).fused(f"{AT}.self_attn.qkv_proj", parts).excluded


@pytest.mark.parametrize(
    ("engine", "entry", "name", "excluded"),
    [
        ("vllm-0.33", "re:layers", "model.layers.0.mlp.down_proj", False),  # match, not search
        ("sglang-0.5", "re:layers", "model.layers.0.mlp.down_proj", False),
        ("atom", "re:layers", "model.layers.0.mlp.down_proj", True),
        ("vllm-0.33", "re:model", "model.layers.0.mlp.down_proj", True),  # a start is enough
        ("atom", "re:^layers", "model.layers.0.mlp.down_proj", False),
        ("atom", "re:a|down", "model.layers.0.mlp.down_proj", True),
        ("atom", "re:x|z", "model.layers.0.mlp.down_proj", False),
        ("atom", "re:(?i)DOWN", "model.layers.0.mlp.down_proj", True),
        ("atom", "re:(?x) down # proj", "model.layers.0.mlp.down_proj", True),
        ("atom", "re:(?i)LAYERS|x", "model.layers.0.mlp.down_proj", True),
        ("vllm-0.33", "re:(?i)MODEL", "model.layers.0.mlp.down_proj", True),
        ("atom", "*.mlp", "model.layers.0.mlp.down_proj", True),  # a glob speaks for what is below
        ("atom", "model.layers.?", "model.layers.0.mlp.down_proj", True),
        ("atom", "model.layers.?", "model.layers.10.mlp.down_proj", False),
        ("atom", "model.layers.[0]", "model.layers.0", False),  # no * or ?: a name
        ("atom", "lm_head", "lm_head", True),
        ("atom", "odel.layers.0", "model.layers.0.mlp", False),
    ],
)
def test_kinds_of_entries(engine, entry, name, excluded):
    assert Excludes([entry], ENGINES[engine].names).match(name) is excluded


def test_matched_entries_are_remembered():
    entries = ["a.b", "re:.*zz", "bank.experts.0.w1", "*never*"]
    excludes = Excludes(entries, ENGINES["vllm-0.33"].names)
    assert excludes.match("a.b")
    assert excludes.matched == {0}
    assert not excludes.match_bank("other.experts")
    assert excludes.match_bank("bank.experts")
    assert excludes.match("a.zz")
    assert excludes.matched == {0, 1, 2}


@pytest.mark.parametrize("engine", ["vllm-0.33", "atom"])
def test_a_key_without_a_star_matches_the_names_that_are_part_of_it(engine):
    read = reader(engine, layer_quant_config={"model.layers.1.mlp.down_proj": FP8_LAYER})
    for name, scheme in {
        "model.layers.1.mlp.down_proj": "ptpc_fp8",
        "layers.1.mlp.down_proj": "ptpc_fp8",
        "down_proj": "ptpc_fp8",
        "model.layers.11.mlp.down_proj": "w4a4",
        "model.layers.1.mlp.down_proj.x": "w4a4",
    }.items():
        found = read.linear(name).spec.scheme.name
        assert found == (scheme if scheme == "w4a4" else "fp8_per_channel")


def test_sglang_reads_every_key_as_a_glob():
    read = reader("sglang-0.5", layer_quant_config={"model.layers.?.x": FP8_LAYER})
    assert read.linear("model.layers.1.x").spec.word is None
    assert read.linear("layers.1.x").spec.word == "w4a4"
    read = reader("vllm-0.33", layer_quant_config={"model.layers.?.x": FP8_LAYER})
    assert read.linear("model.layers.1.x").spec.word == "w4a4"  # no *: not a glob


def test_the_first_matching_key_decides_whatever_its_kind():
    plain, weight_only = quant_layer(), quant_layer(inputs=None)
    for keys in (["*mlp*", "a.mlp.down_proj"], ["a.mlp.down_proj", "*mlp*"]):
        for engine in ("vllm-0.33", "sglang-0.5", "atom"):
            config = {keys[0]: weight_only, keys[1]: plain}
            assert reader(engine, layer_quant_config=config).linear(
                "a.mlp.down_proj"
            ).spec.word == ("w4a16")


def test_sglang_lets_entries_for_experts_speak_for_the_bank():
    low = quant_layer(inputs=None)
    keys = {f"{AT}.mlp.experts.{i}.down_proj": low for i in range(2)}
    assert reader("sglang-0.5", layer_quant_config=keys).bank(f"{AT}.mlp.experts").spec.word == (
        "w4a16"
    )
    # vLLM takes the first key that the bank's name is part of, and does not look at the others
    keys[f"{AT}.mlp.experts.1.down_proj"] = quant_layer()
    found = reader("vllm-0.33", layer_quant_config=keys).bank(f"{AT}.mlp.experts")
    assert found.spec.word == "w4a16"


LOW, HIGH = quant_layer(inputs=None), quant_layer()


@pytest.mark.parametrize("engine", ["vllm-0.32", "vllm-0.33", "vllm-main", "atom"])
def test_globs_below_a_bank_do_not_speak_for_it(engine):
    read = reader(engine, layer_quant_config={f"{AT}.mlp.experts.*.down_proj": LOW})
    assert read.bank(f"{AT}.mlp.experts").spec.word == "w4a4"


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"0.down_proj": LOW, "1.down_proj": HIGH}, "different quantization configurations"),
        ({"1.down_proj": LOW}, "skip experts [0]"),
        ({"0.w1": LOW, "8.w1": LOW}, "skip experts [1, 2, 3, 4]"),
        ({"0.w1": LOW, "999999999.w1": LOW}, "skip experts [1, 2, 3, 4]"),
        ({"0.w1": LOW, "0.w2": LOW, "1.w1": LOW}, "different projections"),
        ({"0": LOW}, "'0' in model.layers.0.mlp.experts is not <expert index>.<projection>"),
        ({"shared.w1": LOW}, "'shared.w1'"),
        ({"\u00b2.w1": LOW}, "is not <expert index>"),
        ({"9" * 5000 + ".w1": LOW}, "is not <expert index>"),
        ({"1.w1": LOW, "0.w1": LOW}, ""),
        ({"0.w1": HIGH, "*": LOW, "7.w1": LOW}, ""),  # a glob that matches comes first
    ],
)
def test_keys_for_single_experts_that_sglang_refuses(keys, error):
    bank = f"{AT}.mlp.experts"
    quant = {key if key == "*" else f"{bank}.{key}": config for key, config in keys.items()}
    found = reader("sglang-0.5", layer_quant_config=quant).bank(bank)
    assert error in found.refusal
    assert bool(found.refusal) == bool(error)
    assert found.refusal.startswith("ValueError: ") or found.spec.word == "w4a16"


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        (
            "model.language_model.layers.0.mlp.down_proj",
            "language_model.model.layers.0.mlp.down_proj",
        ),
        ("model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"),
        ("lm_head", "lm_head"),  # the rule names lm_head with its dot
        ("lm_head.x", "language_model.lm_head.x"),
        ("re:model.language_model.*", "re:model.language_model.*"),
    ],
)
def test_names_of_multimodal_models(name, renamed):
    assert rename(name, ENGINES["vllm-0.33"].names.renames["qwen3_vl"]) == renamed


def test_renames_are_applied_in_turn():
    old = ENGINES["vllm-0.33"].names.renames["qwen2_5_vl"]
    assert rename("model.layers.0.x", old) == "language_model.model.layers.0.x"
    assert rename("model.language_model.layers.0.x", old) == "language_model.model.layers.0.x"


# Reports ------------------------------------------------------------------------------------------

ATTENTION = [f"{AT}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
MLP = {f"{AT}.mlp.gate_proj": (512, 512), f"{AT}.mlp.up_proj": (512, 512)}
DOWN = {f"{AT}.mlp.down_proj": (512, 512)}


def test_p27_names_on_disk_and_names_of_modules(tmp_path):
    """vllm#54547: the exclude list names model.language_model, the tensors language_model.model."""
    entry = "model.language_model.layers.0.self_attn.o_proj"
    linears = {"language_model.model.layers.0.mlp.down_proj": (512, 512)}
    plain = ["language_model.model.layers.0.self_attn.o_proj"]
    words = {"plain": plain, "quant": {"exclude": [entry]}}
    text = ask(tmp_path / "a", "vllm-0.33", linears, **words)
    assert codes(text) == ["engine_exclude_unmatched"]
    assert f"'{entry}' (exact)" in message(text, "engine_exclude_unmatched")
    assert plain[0] in message(text, "engine_exclude_unmatched")
    renamed = ask(tmp_path / "b", "vllm-0.33", linears, model_type="qwen3_vl", **words)
    assert codes(renamed) == []
    assert any("model.language_model. is language_model.model." in a for a in renamed.assumptions)
    glm = ask(tmp_path / "c", "vllm-0.33", linears, model_type="glm5_next", **words)
    assert "54547" in message(glm, "engine_names_unknown")


def test_p28_shared_experts_that_only_a_glob_excludes(tmp_path):
    shared = [f"{AT}.mlp.shared_experts.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    linears = {f"{AT}.mlp.experts.0.{leaf}": (512, 512) for leaf in ("gate_proj", "up_proj")}
    linears[f"{AT}.mlp.experts.0.down_proj"] = (512, 512)
    words = {"plain": shared, "quant": {"exclude": ["*shared_experts*"]}}
    vllm = ask(tmp_path / "a", "vllm-0.33", linears, **words)
    found = message(vllm, "engine_exclude_unmatched")
    assert "1 place: '*shared_experts*' (glob)" in found
    assert "3 places: " in found
    assert codes(ask(tmp_path / "b", "atom", linears, **words)) == []


def test_p29_excludes_by_fused_name_and_expert_by_expert(tmp_path):
    experts = [
        f"model.layers.3.mlp.experts.{i}.{leaf}"
        for i in range(8)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    fused = f"{AT}.self_attn.qkv_proj"
    words = {"plain": [*ATTENTION, *experts], "quant": {"exclude": [fused, *experts]}}
    for engine in ("vllm-0.32", "vllm-0.33", "vllm-main", "sglang-0.5", "atom"):
        assert codes(ask(tmp_path / engine, engine, DOWN, **words)) == []
    # one expert excluded, the others packed: the bank is all or nothing
    packed = dict.fromkeys(experts[3:], (512, 512))
    words = {"plain": experts[:3], "quant": {"exclude": experts[:3]}}
    made = ask(tmp_path / "part", "vllm-0.33", packed, **words)
    outcome = only(made, experts[3])
    assert outcome.outcome == "crash"
    assert "w13_weight_scale" in outcome.message


def test_p30_globs_regexes_and_the_router_that_nobody_lists(tmp_path):
    output = f"{AT}.self_attn.o_proj"
    words = {
        "plain": [output, f"{AT}.mlp.gate", "lm_head"],
        "quant": {"exclude": ["*lm_head", "re:.*self_attn.*", "model.layers.?.mlp.gate"]},
    }
    made = ask(tmp_path / "a", "vllm-0.33", DOWN, **words)
    assert codes(made) == []  # nobody builds heads or routers quantized
    words["quant"] = {"exclude": ["*o_proj", "lm_head"]}
    made = ask(tmp_path / "b", "vllm-0.33", DOWN, **words)
    assert "'*o_proj' (glob)" in message(made, "engine_exclude_unmatched")
    assert "lm_head" not in message(made, "engine_exclude_unmatched")


def test_p31_substrings_and_commas_in_keys(tmp_path):
    # "attn" is part of the key "self_attn", the key is not part of the name
    read = reader("vllm-0.33", layer_quant_config={"self_attn": FP8_LAYER})
    assert read.linear("attn").spec.word is None
    assert read.linear(f"{AT}.self_attn.o_proj").spec.word == "w4a4"
    # no engine splits commas
    both = {f"{AT}.a,{AT}.b": FP8_LAYER}
    assert reader("vllm-0.33", layer_quant_config=both).linear(f"{AT}.a").spec.word is None
    assert reader("sglang-0.5", layer_quant_config=both).linear(f"{AT}.a").spec.word == "w4a4"
    stars = {"*a,*b": FP8_LAYER}
    assert reader("vllm-0.33", layer_quant_config=stars).linear(f"{AT}.a").spec.word == "w4a4"


def test_p32_layer_1_is_not_layer_11(tmp_path):
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(13)]
    linears = {name: (512, 512) for name in names if ".1." not in name}
    words = {"plain": [names[1]], "quant": {"exclude": ["model.layers.1"]}}
    atom = ask(tmp_path / "a", "atom", linears, **words)
    assert codes(atom) == []
    assert {only(atom, name).outcome for name in linears} == {"ok"}
    vllm = ask(tmp_path / "b", "vllm-0.33", linears, **words)
    assert {only(vllm, name).outcome for name in linears} == {"ok"}
    assert names[1] in message(vllm, "engine_exclude_unmatched")


def test_p35_block_fp8_parts_of_a_fused_layer_keep_their_scheme(tmp_path):
    block = quant_layer(
        {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]},
        {"dtype": "fp8_e4m3", "is_dynamic": True},
    )
    words = {"fp8": list(MLP), "quant": {"layer_quant_config": dict.fromkeys(MLP, block)}}
    for engine in ("vllm-0.33", "sglang-0.5"):
        assert codes(ask(tmp_path / engine, engine, DOWN, **words)) == []


def test_p37_parts_of_one_fused_layer_with_three_schemes(tmp_path):
    q, k, v = ATTENTION
    words = {
        "fp8": [k],
        "plain": [v],
        "quant": {"layer_quant_config": {k: FP8_LAYER}, "exclude": [v]},
        "model_type": "qwen3_moe",
    }
    for engine, label in (("vllm-0.33", "vLLM 0.33"), ("sglang-0.5", "SGLang 0.5")):
        made = ask(tmp_path / engine, engine, {q: (512, 512)}, **words)
        assert only(made, q).outcome == "crash"
        assert "ValueError: different quantization schemes" in only(made, q).message
        assert message(made, "engine_mixed_group").startswith(
            f"{label} refuses fused projections whose parts differ, ValueError: different "
            f"quantization schemes for the shards of {AT}.self_attn.qkv_proj: "
        )
    made = ask(tmp_path / "atom", "atom", {q: (512, 512)}, **words)
    assert only(made, q).outcome == "unknown"
    assert "not known what ATOM makes of them" in message(made, "engine_mixed_group")
    # nothing excluded: the configurations of the parts differ
    words = {"fp8": [k], "quant": {"layer_quant_config": {k: FP8_LAYER}}}
    packed = {q: (512, 512), v: (128, 512)}
    made = ask(tmp_path / "keys", "vllm-0.33", packed, **words)
    assert "ValueError: a different quantization configuration" in only(made, v).message
    # the config tells no difference, the tensors do
    made = ask(tmp_path / "quiet", "vllm-0.33", packed, plain=[k])
    assert only(made, q).outcome == "crash"
    assert "k_proj, bf16, does not fit" in only(made, q).message
    assert message(made, "engine_builds_quantized").endswith(f"1 place: {k}")


def test_p38_two_groups_of_one_input_projection(tmp_path):
    linears = {
        f"{AT}.linear_attn.in_proj_qkv": (512, 512),
        f"{AT}.linear_attn.in_proj_z": (256, 512),
    }
    small = [f"{AT}.linear_attn.in_proj_{leaf}" for leaf in "ab"]
    words = {"plain": small, "quant": {"exclude": small}, "model_type": "qwen3_5"}
    names = list(linears)
    for engine in ("vllm-0.33", "sglang-0.5"):
        made = ask(tmp_path / engine, engine, linears, **words)
        assert {only(made, name).outcome for name in names} == {"ok"}
        assert codes(made) == []
    made = ask(tmp_path / "atom", "atom", linears, **words)  # 768 x 512, 768 = 24 x 32
    assert {only(made, name) for name in names} == {("ok", "asm", "")}
    assert codes(made) == []


PROJECTIONS = {
    f"{AT}.linear_attn.in_proj_qkv": (512, 512),
    f"{AT}.linear_attn.in_proj_z": (240, 512),
    f"{AT}.linear_attn.in_proj_b": (16, 512),
    f"{AT}.linear_attn.in_proj_a": (16, 512),
}


def test_atom_fuses_all_six_parts_where_the_global_scheme_quantizes_nothing(tmp_path):
    """512 + 240 = 752 = 23.5 x 32 and 16 + 16 = 32; all together 784 = 24.5 x 32."""
    words = {"model_type": "qwen3_5"}
    made = ask(tmp_path / "a", "atom", PROJECTIONS, **words)
    for leaf, path in (("qkv", "corrupt"), ("z", "corrupt"), ("b", "corrupt"), ("a", "corrupt")):
        assert only(made, f"{AT}.linear_attn.in_proj_{leaf}").outcome == path
    assert "752 % 32 = 16 rows" in only(made, f"{AT}.linear_attn.in_proj_z").message
    assert "32 rows: wrong results" in only(made, f"{AT}.linear_attn.in_proj_b").message
    plain = {"global_quant_config": {**quant_layer(), "weight": None, "input_tensors": None}}
    words["quant"] = {**plain, "layer_quant_config": {"*in_proj*": quant_layer()}}
    made = ask(tmp_path / "b", "atom", PROJECTIONS, **words)
    assert len({id(made.outcomes[name]) for name in PROJECTIONS}) == 1
    assert "784 % 32 = 16 rows" in only(made, f"{AT}.linear_attn.in_proj_b").message
    vllm = ask(tmp_path / "c", "vllm-0.33", PROJECTIONS, **words)
    assert {only(vllm, name).outcome for name in PROJECTIONS} == {"ok"}


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "qwen3_8_flash_next"])
def test_atom_on_input_projections_of_a_model_that_came_later(tmp_path, model_type):
    words = {"model_type": model_type, "tp": (1, 2), "linear_num_value_heads": 16}
    linears = {**PROJECTIONS, f"{AT}.self_attn.o_proj": (512, 512)}
    made = ask(tmp_path / "a", "atom", linears, **words)
    for name in PROJECTIONS:
        for tp in (1, 2):
            assert only(made, name, tp).outcome == "unknown"
            assert "requires unquantized GDN input projections" in only(made, name, tp).message
    assert only(made, f"{AT}.self_attn.o_proj").outcome == "ok"
    assert codes(made) == ["engine_unknown"]
    # unquantized and not excluded: nothing is known of that either
    plain = list(PROJECTIONS)
    made = ask(tmp_path / "b", "atom", {f"{AT}.self_attn.o_proj": (512, 512)}, plain=plain, **words)
    assert codes(made) == []
    words["model_type"] = "qwen3_5"
    made = ask(tmp_path / "c", "atom", {f"{AT}.self_attn.o_proj": (512, 512)}, plain=plain, **words)
    assert codes(made) == ["engine_builds_quantized"]


def test_p39_doubled_prefixes_and_a_bare_draft_module(tmp_path):
    words = {
        "plain": ["mtp.fc", f"{AT}.self_attn.o_proj"],
        "quant": {"exclude": ["model.layers.language_model.layers.0.self_attn.o_proj"]},
    }
    made = ask(tmp_path, "vllm-0.33", DOWN, **words)
    assert message(made, "engine_builds_quantized").endswith(f"1 place: {AT}.self_attn.o_proj")
    # vLLM's draft model hands mtp.fc the Quark config as it is
    assert message(made, "engine_builds_draft_quantized").endswith("1 place: mtp.fc")


def test_p41_entries_without_the_root(tmp_path):
    words = {"plain": [f"{AT}.mlp.down_proj"], "quant": {"exclude": ["layers.0.mlp.down_proj"]}}
    for engine in ("vllm-0.33", "sglang-0.5", "atom"):
        made = ask(tmp_path / engine, engine, {f"{AT}.self_attn.o_proj": (512, 512)}, **words)
        assert "'layers.0.mlp.down_proj' (exact)" in message(made, "engine_exclude_unmatched")


def test_p42_draft_layers_that_the_config_does_not_list(tmp_path):
    plain = [f"model.layers.2.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    words = {"plain": plain, "num_nextn_predict_layers": 1}
    made = ask(tmp_path / "a", "vllm-0.33", DOWN, **words)
    (finding,) = made.findings
    assert (finding.code, finding.severity) == ("engine_builds_draft_quantized", "warning")
    assert "3 places: " in finding.message
    words["quant"] = {"exclude": plain}
    assert codes(ask(tmp_path / "b", "vllm-0.33", DOWN, **words)) == []


def test_p43_draft_names_that_no_rule_knows_raise_no_alarm(tmp_path):
    made = ask(tmp_path, "vllm-0.33", DOWN, plain=["mtp.0.attn.wq_x"], num_nextn_predict_layers=1)
    assert codes(made) == []
    assert any(
        "1 unquantized matrices with names that no rule knows" in a for a in made.assumptions
    )


# More of what names decide ------------------------------------------------------------------------


def test_experts_left_unquantized_and_unlisted(tmp_path):
    plain = [
        f"{AT}.mlp.experts.{i}.{leaf}" for i in range(2) for leaf in ("gate_proj", "down_proj")
    ]
    made = ask(tmp_path, "vllm-0.33", {f"{AT}.self_attn.o_proj": (512, 512)}, plain=plain)
    assert "4 places: " in message(made, "engine_builds_quantized")


def test_sglang_does_not_know_what_some_models_fuse(tmp_path):
    words = {"plain": ATTENTION, "quant": {"exclude": ATTENTION}}
    llama = ask(tmp_path / "a", "sglang-0.5", DOWN, **words)
    assert "3 exclude" not in message(llama, "engine_exclude_unmatched")
    assert "3 places: " in message(llama, "engine_exclude_unmatched")
    assert codes(ask(tmp_path / "b", "sglang-0.5", DOWN, model_type="qwen3_moe", **words)) == []
    assert codes(ask(tmp_path / "c", "vllm-0.33", DOWN, **words)) == []


@pytest.mark.parametrize(
    ("model_type", "entry", "found"),
    [
        ("qwen3_vl", "language_model.model.layers.0.self_attn.o_proj", []),
        ("llama", "language_model.model.layers.0.self_attn.o_proj", ["engine_exclude_unmatched"]),
    ],
)
def test_sglang_takes_entries_below_language_model_without_it(tmp_path, model_type, entry, found):
    words = {"plain": [f"{AT}.self_attn.o_proj"], "quant": {"exclude": [entry]}}
    made = ask(tmp_path, "sglang-0.5", DOWN, model_type=model_type, **words)
    assert codes(made) == found


def test_layers_built_as_another_scheme_do_not_fit(tmp_path):
    # the weight is MXFP4 by the later, global scheme; vLLM takes the first key that matches
    words = {"quant": {"layer_quant_config": {"*down_proj": FP8_LAYER, "*mlp*": quant_layer()}}}
    made = ask(tmp_path, "vllm-0.33", DOWN, **words)
    outcome = only(made, f"{AT}.mlp.down_proj")
    assert outcome.outcome == "crash"
    assert "builds it as fp8_per_channel: the packed weight of 512 x 256" in outcome.message


@pytest.mark.parametrize(
    ("engine", "missing", "error"),
    [
        ("vllm-0.33", "export", "ValueError: the export key should be included"),
        ("vllm-0.32", "exclude", "TypeError: exclude is None"),
        ("vllm-main", "layer_type_quant_config", "AttributeError"),
        ("sglang-0.5", "export", "ValueError: the export key should be included"),
        ("sglang-0.5", "layer_quant_config", "TypeError"),
    ],
)
def test_configs_that_an_engine_cannot_do_with(tmp_path, engine, missing, error):
    quant = {key: value for key, value in quant_config().items() if key != missing}
    found = surveyed(tmp_path, DOWN)
    config = {**found.checkpoint.config, "quantization_config": quant}
    object.__setattr__(found.checkpoint, "config", config)
    made = predict(engine, found)
    assert only(made, f"{AT}.mlp.down_proj").message.startswith(error)
    assert codes(made) == ["engine_crash"]
    assert only(predict("atom", found), f"{AT}.mlp.down_proj").outcome == "ok"


KV = quant_layer(outputs={"dtype": "fp8_e4m3", "qscheme": "per_tensor"})
OTHER_KV = quant_layer(outputs={"dtype": "fp8_e4m3", "qscheme": "per_channel"})


@pytest.mark.parametrize(
    ("engine", "group", "keys", "refusal"),
    [
        ("vllm-0.33", ["*k_proj"], {"*k_proj": KV}, ""),
        ("vllm-0.33", ["*k_proj"], {"model.layers.0.k_proj": KV}, ""),
        ("vllm-0.33", ["*k_proj"], {}, "no kv_cache configuration was found"),
        ("vllm-0.33", ["*k_proj", "*v_proj"], {"*k_proj": KV, "*v_proj": OTHER_KV}, "differ"),
        ("vllm-0.33", ["*k_proj"], {"*k_proj": quant_layer()}, "is empty"),
        ("sglang-0.5", ["*k_proj"], {"*k_proj": KV}, ""),
        ("sglang-0.5", ["*k_proj"], {"model.layers.0.k_proj": KV}, "no kv_cache configuration"),
        ("sglang-0.5", ["*k_proj", "*v_proj"], {"*k_proj": KV, "*v_proj": OTHER_KV}, "differ"),
        ("atom", ["*k_proj"], {}, ""),
    ],
)
def test_the_cache_group(engine, group, keys, refusal):
    export = {**quant_config()["export"], "kv_cache_group": group}
    read = reader(engine, export=export, layer_quant_config=keys)
    assert refusal in read.refusal
    assert bool(read.refusal) == bool(refusal)


def test_the_caches_scales_do_not_count_as_quantized_outputs(tmp_path):
    keys = {"*o_proj": KV}
    export = {**quant_config()["export"], "kv_cache_group": ["*o_proj"]}
    linears = {f"{AT}.self_attn.o_proj": (512, 512)}
    name = f"{AT}.self_attn.o_proj"
    words = {"quant": {"layer_quant_config": keys, "export": export}}
    assert only(ask(tmp_path / "a", "vllm-0.33", linears, **words), name).outcome == "ok"
    words = {"quant": {"layer_quant_config": keys}}
    for engine, outcome in (("vllm-0.33", "crash"), ("sglang-0.5", "crash"), ("atom", "ok")):
        made = ask(tmp_path / engine, engine, linears, **words)
        assert only(made, name).outcome == outcome
