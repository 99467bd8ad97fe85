"""Routed and shared experts in the engines: how they are cut, padded, fused and run."""

from __future__ import annotations

import pytest
import torch
from engine_cases import SGLANG_ON, VLLM_ON, ask, codes, message, only, surveyed, words_of
from quark_factory import FP8_WEIGHT, mxfp4_tensors, quant_layer, write_checkpoint

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.deployment import Deployment
from mxfp4prep.engines import predict
from mxfp4prep.survey import survey

AT = "model.layers.0.mlp"
EP = Deployment(expert_parallel=True)
SP = Deployment(sequence_parallel=True)
ENGINES_ON = {"vllm-0.32": VLLM_ON, "vllm-0.33": VLLM_ON, "sglang-0.5": SGLANG_ON, "atom": {}}
STATIC_FP8 = {**FP8_WEIGHT, "qscheme": "per_tensor", "ch_axis": None, "symmetric": True}
DYNAMIC_FP8 = {**STATIC_FP8, "is_dynamic": True}
LEAVES = ("gate_proj", "up_proj", "down_proj")


def experts(width: int, hidden: int = 512, count: int = 2) -> dict[str, tuple[int, int]]:
    return {
        f"{AT}.experts.{index}.{leaf}": shape
        for index in range(count)
        for leaf, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        )
    }


GATE, UP, DOWN = (f"{AT}.experts.1.{leaf}_proj" for leaf in ("gate", "up", "down"))


@pytest.mark.parametrize(
    ("engine", "padded"),
    [("vllm-0.32", 128), ("vllm-0.33", 128), ("sglang-0.5", 256), ("atom", 256)],
)
def test_p06_experts_of_whole_groups_run_and_are_padded(tmp_path, engine, padded):
    made = ask(tmp_path, engine, experts(1536), ENGINES_ON[engine], tp=(1, 4, 8, 16), num_experts=2,
               num_attention_heads=16)  # fmt: skip
    for name in (GATE, UP, DOWN):
        assert {path for _, path in words_of(made, name).values()} == {"moe-aiter"}
        assert {outcome for outcome, _ in words_of(made, name).values()} == {"ok"}
        assert only(made, name, 1).message == ""  # 1536 = 6 x 256
    # 1536 / 4 = 384 = 3 x 128; / 8 = 192; / 16 = 96
    assert only(made, DOWN, 4).message == (
        "" if padded == 128 else "384 a rank, padded to 512 with zeros"
    )
    assert only(made, DOWN, 8).message == "192 a rank, padded to 256 with zeros"
    assert only(made, DOWN, 16).message == f"96 a rank, padded to {padded} with zeros"


SHARES = (
    "1408 / 8 = 176 columns a rank = 5.5 groups of 32, floored: w2 gets wrong scales for 9 % of "
    "rank 0's weights, 55 % of rank 1's, 100 % of ranks 2 to 7's, no error"
)


@pytest.mark.parametrize(
    ("engine", "outcome", "text"),
    [
        ("vllm-0.32", "corrupt", SHARES),
        ("vllm-0.33", "corrupt", SHARES),
        ("atom", "corrupt", SHARES),
        (
            "sglang-0.5",
            "crash",
            "AssertionError without a message: 44 scale columns of w2 are not 8 equal pieces "
            "(1408 / 8 = 176)",
        ),
    ],
)
def test_split_groups_of_experts(tmp_path, engine, outcome, text):
    made = ask(tmp_path / "a", engine, experts(1408), ENGINES_ON[engine], tp=(4, 8))
    assert only(made, DOWN, 4).outcome == "ok"  # 352 = 11 x 32
    assert (only(made, DOWN, 8).outcome, only(made, DOWN, 8).message) == (outcome, text)
    assert only(made, DOWN, 8).path == ("moe-aiter" if outcome == "corrupt" else None)
    for name in (GATE, UP):  # their scales are cut along rows
        assert only(made, name, 8).outcome == "ok"
    assert codes(made) == [f"engine_{outcome}"]
    assert "at tp 8 (2 layers)" in message(made, f"engine_{outcome}")
    # whole experts are not cut
    made = ask(tmp_path / "b", engine, experts(1408), ENGINES_ON[engine], tp=(4, 8), deployment=EP)
    assert words_of(made, DOWN) == {4: ("ok", "moe-aiter"), 8: ("ok", "moe-aiter")}


@pytest.mark.parametrize("engine", list(ENGINES_ON))
def test_a_width_that_the_ranks_do_not_divide(tmp_path, engine):
    words = {"tp": (3,), "num_attention_heads": 12}
    made = ask(tmp_path, engine, experts(640), ENGINES_ON[engine], **words)
    for name in (GATE, UP, DOWN):
        assert only(made, name, 3).message == (
            "AssertionError without a message: intermediate size 640 % 3 = 1"
        )


def test_engines_with_a_loader_for_gpt_oss(tmp_path):
    """2880 / 8 = 360 = 11.25 groups; vLLM and SGLang cut whole ones, ATOM floors."""
    words = {"tp": (8,), "model_type": "gpt_oss"}
    for engine in ("vllm-0.33", "sglang-0.5"):
        made = ask(tmp_path / engine, engine, experts(2880), ENGINES_ON[engine], **words)
        assert only(made, DOWN, 8).outcome == "ok"
    made = only(ask(tmp_path / "atom", "atom", experts(2880), **words), DOWN, 8)
    assert made.outcome == "corrupt"
    assert "360 columns a rank = 11.25 groups of 32" in made.message


@pytest.mark.parametrize(
    ("engine", "inputs", "tp", "padded", "hidden"),
    [
        ("vllm-0.32", "w4a4", 1, "2880 a rank, padded to 2944", "3072"),
        ("vllm-0.33", "w4a4", 1, "2880 a rank, padded to 2944", "3072"),
        ("vllm-0.33", "w4a4", 2, "1440 a rank, padded to 1536", "3072"),
        ("vllm-0.33", STATIC_FP8, 1, "2880 a rank, padded to 3072", "3072"),
        ("vllm-0.33", None, 1, "2880 a rank, padded to 3072", "3072"),
        ("sglang-0.5", "w4a4", 1, "2880 a rank, padded to 3072", None),
        ("sglang-0.5", STATIC_FP8, 1, "2880 a rank, padded to 3072", "3072"),
        ("atom", "w4a4", 1, "2880 a rank, padded to 3072", "3072"),
        ("atom", None, 2, "1440 a rank, padded to 1536", "3072"),
        ("atom", STATIC_FP8, 1, "2880 a rank, padded to 3072", "3072"),
    ],
)
def test_experts_of_gpt_oss_are_padded_both_ways(tmp_path, engine, inputs, tp, padded, hidden):
    """2880 = 22.5 x 128 = 11.25 x 256; 1440 = 11.25 x 128 = 5.625 x 256."""
    words = {"tp": (tp,), "model_type": "gpt_oss"}
    if inputs != "w4a4":
        words["quant"] = {"global_quant_config": quant_layer(inputs=inputs)}
    made = ask(tmp_path, engine, experts(2880, 2880, 1), ENGINES_ON[engine], **words)
    expected = f"{padded} with zeros" + (f"; hidden 2880 padded to {hidden}" if hidden else "")
    for leaf in LEAVES:
        assert only(made, f"{AT}.experts.0.{leaf}", tp).message == expected


def test_hidden_alone_may_be_padded(tmp_path):
    made = ask(tmp_path / "a", "vllm-0.33", experts(512, 2880, 1), VLLM_ON)
    assert only(made, f"{AT}.experts.0.up_proj").message == "hidden 2880 padded to 3072"
    made = ask(tmp_path / "b", "vllm-0.33", experts(512, 2880, 1))  # emulated: whole groups do
    assert only(made, f"{AT}.experts.0.up_proj").message == (
        "AITER's fused MoE is off: emulated, which needs amd-quark"
    )


def test_experts_without_aiter(tmp_path):
    for engine in ("vllm-0.32", "vllm-0.33"):
        made = only(ask(tmp_path / engine, engine, experts(512)), DOWN)
        assert (made.outcome, made.path) == ("ok", "moe-emulation")
        assert "needs amd-quark" in made.message
    off = {**VLLM_ON, "VLLM_ROCM_USE_AITER_MOE": "0"}
    assert only(ask(tmp_path / "off", "vllm-0.33", experts(512), off), DOWN).path == "moe-emulation"
    # emulation or not, scales are cut the same
    made = only(ask(tmp_path / "cut", "vllm-0.33", experts(1408), tp=(8,)), DOWN, 8)
    assert (made.outcome, made.path) == ("corrupt", "moe-emulation")
    made = only(ask(tmp_path / "sg", "sglang-0.5", experts(512)), DOWN)
    assert (made.outcome, made.path) == ("crash", None)
    assert made.message.startswith("NameError: e8m0_shuffle")


@pytest.mark.parametrize(
    ("changes", "tp", "path"),
    [
        ({}, 8, "moe-emulation"),
        ({}, 4, "moe-aiter"),
        ({"num_experts": 256}, 8, "moe-aiter"),
        ({"deployment": Deployment()}, 8, "moe-aiter"),
    ],
)
def test_the_bank_that_vllm_032_emulates(tmp_path, changes, tp, path):
    words = {"tp": (tp,), "num_experts": 512, "deployment": EP, "num_attention_heads": 8, **changes}
    if words["deployment"] == Deployment():
        words["tp"] = (4,)  # 640 / 4 = 160 = 5 groups
        tp = 4
    for engine, expected in (("vllm-0.32", path), ("vllm-0.33", "moe-aiter")):
        made = ask(tmp_path / engine, engine, experts(640, 2560, 1), VLLM_ON, **words)
        assert only(made, f"{AT}.experts.0.down_proj", tp).path == expected


@pytest.mark.parametrize(
    ("engine", "inputs", "outcome", "path"),
    [
        ("vllm-0.33", None, "ok", "moe-aiter-bf16"),
        ("vllm-0.33", STATIC_FP8, "ok", "moe-aiter-fp8"),
        ("vllm-0.33", DYNAMIC_FP8, "crash", None),
        ("sglang-0.5", None, "crash", None),
        ("sglang-0.5", STATIC_FP8, "ok", "moe-aiter-fp8"),
        ("sglang-0.5", DYNAMIC_FP8, "crash", None),
        ("atom", None, "ok", "moe-aiter-bf16"),
        ("atom", STATIC_FP8, "ok", "moe-aiter-fp8"),
        ("atom", DYNAMIC_FP8, "ok", "moe-aiter-fp8"),
    ],
)
def test_other_schemes_of_experts(tmp_path, engine, inputs, outcome, path):
    words = {"quant": {"global_quant_config": quant_layer(inputs=inputs)}}
    made = ask(tmp_path / "a", engine, experts(512), ENGINES_ON[engine], **words)
    assert (only(made, DOWN).outcome, only(made, DOWN).path) == (outcome, path)
    if outcome == "crash":
        assert "Error" in only(made, DOWN).message
    if engine != "atom" and outcome == "ok":
        made = ask(tmp_path / "b", engine, experts(512), **words)
        assert only(made, DOWN).message.startswith("not known what runs ")


def test_gate_and_up_stored_in_one_tensor(tmp_path):
    linears = {
        f"{AT}.experts.0.gate_up_proj": (1024, 512),
        f"{AT}.experts.0.down_proj": (512, 512),
    }
    name = f"{AT}.experts.0.gate_up_proj"
    for engine, outcome in (("vllm-0.33", "ok"), ("sglang-0.5", "unknown"), ("atom", "unknown")):
        made = ask(tmp_path / engine, engine, linears, ENGINES_ON[engine])
        assert only(made, name).outcome == outcome
        made = ask(tmp_path / f"o{engine}", engine, linears, ENGINES_ON[engine],
                   model_type="gpt_oss")  # fmt: skip
        assert only(made, name).outcome == "ok"


def test_experts_in_one_three_dimensional_tensor(tmp_path):
    generator = torch.Generator().manual_seed(0)
    extra = {"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}
    name = f"{AT}.experts.down_proj"
    extra |= mxfp4_tensors(name, 64, 64, generator=generator, experts=4)
    write_checkpoint(tmp_path / "model", {}, extra=extra)
    found = survey(open_checkpoint(tmp_path / "model"), (1,))
    for engine, switches in ENGINES_ON.items():
        made = predict(engine, found, switches=switches).outcomes[name][1]
        assert made.outcome == "unknown"


def test_widths_that_are_no_whole_groups(tmp_path):
    made = ask(tmp_path, "vllm-0.33", experts(80), VLLM_ON)
    assert only(made, DOWN).message == "80 columns are not whole groups of 32"
    assert only(made, DOWN).outcome == "unknown"
    assert only(made, GATE).outcome == "ok"


# Shared experts -----------------------------------------------------------------------------------


def shared(name: str, width: int, hidden: int = 512) -> dict[str, tuple[int, int]]:
    return {
        f"{AT}.{name}.gate_proj": (width, hidden),
        f"{AT}.{name}.up_proj": (width, hidden),
        f"{AT}.{name}.down_proj": (hidden, width),
    }


ONE = f"{AT}.shared_expert.down_proj"
ONE_UP = f"{AT}.shared_expert.up_proj"
MANY = f"{AT}.shared_experts.down_proj"
MANY_UP = f"{AT}.shared_experts.up_proj"


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe", "alice_ai"])
@pytest.mark.parametrize("deployment", [EP, SP], ids=["ep", "sp"])
def test_models_that_hold_a_misaligned_shared_expert_whole(tmp_path, model_type, deployment):
    """704 / 4 = 176."""
    words = {"tp": (2, 4), "model_type": model_type, "deployment": deployment}
    made = ask(tmp_path, "vllm-0.33", shared("shared_expert", 704), **words)
    for name in (ONE, ONE_UP):
        assert words_of(made, name) == {2: ("ok", "triton"), 4: ("ok", "triton")}
        assert only(made, name, 2).message == ""
        assert only(made, name, 4).message == "whole on every rank"


def test_a_whole_shared_expert_is_the_whole_matrix(tmp_path):
    """704 rows of gate and up each, 704 = 22 groups: down goes to Triton, gate and up are tuned."""
    words = {"tp": (4,), "model_type": "qwen3_next", "deployment": EP}
    made = ask(tmp_path, "vllm-0.33", shared("shared_expert", 704), VLLM_ON, **words)
    assert only(made, ONE_UP, 4).path == "asm or triton"
    assert only(made, ONE, 4).message == "the scale of 512 x 22 does not fill tiles of 32 x 8"


def test_models_that_refuse_a_misaligned_shared_expert(tmp_path):
    words = {"tp": (2, 4, 8), "model_type": "qwen3_next"}
    made = ask(tmp_path / "a", "vllm-0.33", shared("shared_expert", 704), **words)
    for name in (ONE, ONE_UP):
        assert words_of(made, name)[2] == ("ok", "triton")
        for tp, each in ((4, 176), (8, 88)):
            assert only(made, name, tp).message == (
                f"ValueError: the shared expert cannot be tensor-parallelized: 704 / {tp} = {each},"
                " not divisible by the group size 32; choose another tp or enable expert "
                "parallelism"
            )
    words = {"tp": (3,), "model_type": "qwen3_next", "num_attention_heads": 9}
    made = ask(tmp_path / "b", "vllm-0.33", shared("shared_expert", 704), **words)
    assert only(made, ONE, 3).message == (
        "ValueError: shared-expert intermediate size 704 must be divisible by tensor-parallel size "
        "3"
    )


def test_alice_ai_is_new_in_033(tmp_path):
    words = {"tp": (4,), "model_type": "alice_ai", "deployment": EP}
    made = ask(tmp_path, "vllm-0.32", shared("shared_expert", 704), **words)
    assert only(made, ONE, 4).message.startswith("ValueError: input size per partition of 176")


@pytest.mark.parametrize("deployment", [Deployment(), EP], ids=["tp", "ep"])
def test_other_models_stop_at_the_down_projection(tmp_path, deployment):
    words = {"tp": (4,), "model_type": "deepseek_v3", "deployment": deployment}
    made = ask(tmp_path, "vllm-0.33", shared("shared_experts", 704), **words)
    assert only(made, MANY, 4).message.startswith("ValueError: input size per partition of 176")
    assert words_of(made, MANY_UP) == {4: ("ok", "triton")}


def test_deepseek_holds_shared_experts_whole_under_sequence_parallelism(tmp_path):
    words = {"tp": (2, 4), "deployment": SP}
    name = shared("shared_experts", 704)
    made = ask(tmp_path / "a", "vllm-0.33", name, VLLM_ON, model_type="deepseek_v3", **words)
    for tp in (2, 4):  # aligned or not
        assert only(made, MANY, tp).message == "the scale of 512 x 22 does not fill tiles of 32 x 8"
    made = ask(tmp_path / "b", "vllm-0.33", name, VLLM_ON, model_type="mixtral", **words)
    assert only(made, MANY, 2).message == "the scale of 512 x 11 does not fill tiles of 32 x 8"
    assert only(made, MANY, 4).outcome == "crash"


FUSION = {**VLLM_ON, "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": "1"}


def test_vllm_fuses_by_its_switches(tmp_path):
    linears = {**experts(704), **shared("shared_experts", 1408)}
    words = {"tp": (1, 8), "model_type": "deepseek_v3"}
    apart = ask(tmp_path / "a", "vllm-0.33", linears, VLLM_ON, **words)
    assert only(apart, MANY, 1).path == "triton"
    fused = ask(tmp_path / "b", "vllm-0.33", linears, FUSION, **words)
    assert only(fused, MANY, 1).path == "moe-aiter"
    # one of two slots: 704 / 8 = 88
    assert only(fused, MANY, 8).outcome == "corrupt"
    assert only(fused, MANY, 8).message.startswith("704 / 8 = 88 columns a rank")
    assert only(fused, MANY_UP, 8).message == "88 a rank, padded to 128 with zeros"
    off = {**FUSION, "VLLM_ROCM_USE_AITER_MOE": "0"}
    assert only(ask(tmp_path / "c", "vllm-0.33", linears, off, **words), MANY, 1).path == "triton"
    words["deployment"] = Deployment(shared_experts="separate")
    made = ask(tmp_path / "d", "vllm-0.33", linears, FUSION, **words)
    assert only(made, MANY, 1).path == "triton"
    words["deployment"] = EP
    made = ask(tmp_path / "e", "vllm-0.33", linears, FUSION, **words)
    assert words_of(made, MANY) == {1: ("ok", "moe-aiter"), 8: ("ok", "moe-aiter")}


LOW = quant_layer(inputs=None)
NAMED = {**quant_layer(), "output_tensors": []}
"""Quantizes as the global scheme does, and is not equal to it."""


@pytest.mark.parametrize(
    ("shared_is", "quant", "switches", "mode", "why"),
    [
        ("plain", "exclude", FUSION, "auto", "the config excludes them"),
        ("plain", "exclude", FUSION, "fused", "the config excludes them"),
        ("plain", "exclude", FUSION, "separate", None),
        ("plain", "exclude", VLLM_ON, "auto", None),
        ("packed", LOW, FUSION, "auto", "the config quantizes them otherwise"),
        ("packed", LOW, VLLM_ON, "auto", None),
        ("packed", NAMED, FUSION, "auto", "the config quantizes them otherwise"),
        ("packed", quant_layer(), FUSION, "auto", None),
    ],
)
def test_shared_experts_that_vllm_is_asked_to_fuse_and_does_not(
    tmp_path, shared_is, quant, switches, mode, why
):
    names = [f"{AT}.shared_experts.{leaf}" for leaf in LEAVES]
    words = {"deployment": Deployment(shared_experts=mode)}
    linears = experts(704)
    if shared_is == "plain":
        words |= {"plain": names, "quant": {"exclude": names}}
    else:
        linears |= shared("shared_experts", 704)
        words["quant"] = {"layer_quant_config": {"*shared_experts*": quant}}
    for engine in ("vllm-0.32", "vllm-0.33"):
        made = ask(tmp_path / engine, engine, linears, switches, **words)
        assert codes(made) == ([] if why is None else ["engine_shared_apart"])
        if why is not None:
            (finding,) = made.findings
            assert (finding.severity, finding.where) == ("warning", f"{AT}.shared_experts")
            assert why in finding.message
            assert finding.message.endswith(f"(1 place: {AT}.shared_experts)")
        if shared_is == "packed":
            apart = "emulation" if quant is LOW else "triton"
            fused = switches is FUSION and why is None
            assert only(made, MANY).path == ("moe-aiter" if fused else apart)


def test_reasons_to_keep_shared_experts_apart_are_told_once(tmp_path):
    linears, excluded = {}, []
    for layer in range(3):
        at = f"model.layers.{layer}.mlp"
        linears |= {f"{at}.experts.0.{leaf}": (512, 512) for leaf in LEAVES}
        excluded += [f"{at}.shared_expert.{leaf}" for leaf in LEAVES]
    words = {"plain": excluded, "quant": {"exclude": excluded}}
    made = ask(tmp_path / "a", "vllm-0.33", linears, FUSION, **words)
    assert "3 places: model.layers.0.mlp.shared_expert" in message(made, "engine_shared_apart")
    # where there are no routed experts, nothing is asked
    dense = {f"{AT}.down_proj": (512, 512)}
    assert codes(ask(tmp_path / "b", "vllm-0.33", dense, FUSION, **words)) == []


def test_one_excluded_part_of_a_shared_expert_that_is_to_be_fused_is_an_error(tmp_path):
    linears = {**experts(704), **shared("shared_experts", 704)}
    gate = f"{AT}.shared_experts.gate_proj"
    del linears[gate]
    words = {"plain": [gate], "quant": {"exclude": [gate]}}
    made = ask(tmp_path / "a", "vllm-0.33", linears, FUSION, **words)
    for name in (MANY, MANY_UP):
        assert only(made, name).outcome == "crash"
        assert only(made, name).message == (
            "ValueError: different quantization schemes for the shards of "
            f"{AT}.shared_experts.gate_up_proj: up_proj, gate_proj, of which 1 excluded"
        )
    assert codes(made) == ["engine_mixed_group", "engine_crash"]
    made = ask(tmp_path / "b", "vllm-0.33", linears, VLLM_ON, **words)  # not asked to fuse
    assert only(made, MANY).outcome == "ok"
    assert only(made, MANY_UP).outcome == "crash"


def test_shared_experts_of_another_width_are_never_fused(tmp_path):
    linears = {**experts(512), **shared("shared_experts", 704)}
    made = ask(tmp_path, "vllm-0.33", linears, FUSION)
    assert only(made, MANY).path == "triton"


def test_a_fused_shared_expert_is_judged_as_a_routed_one(tmp_path):
    linears = {**experts(704, 80), **shared("shared_experts", 704, 80)}
    made = ask(tmp_path, "vllm-0.33", linears, FUSION)
    for name in (MANY_UP, UP):
        assert only(made, name).message == "80 columns are not whole groups of 32"
    for name in (MANY, DOWN):
        assert only(made, name).message == (
            "704 a rank, padded to 768 with zeros; hidden 80 padded to 256"
        )


def test_engines_of_which_it_is_not_known_whether_they_fuse(tmp_path):
    linears = {**experts(704), **shared("shared_experts", 704)}
    made = ask(tmp_path / "a", "sglang-0.5", linears, SGLANG_ON, tp=(2, 4))
    assert only(made, MANY, 2) == ("ok", "triton", "or moe-aiter, where SGLang 0.5 fuses it")
    assert only(made, MANY, 4) == (
        "unknown",
        None,
        "not known whether SGLang 0.5 fuses it: fused, crash; apart, corrupt (triton)",
    )
    assert any("when SGLang 0.5 fuses shared experts" in a for a in made.assumptions)
    words = {"tp": (2, 4), "deployment": Deployment(shared_experts="fused")}
    made = ask(tmp_path / "b", "sglang-0.5", linears, SGLANG_ON, **words)
    assert words_of(made, MANY) == {2: ("ok", "moe-aiter"), 4: ("crash", None)}
    words["deployment"] = Deployment(shared_experts="separate")
    made = ask(tmp_path / "c", "sglang-0.5", linears, SGLANG_ON, **words)
    assert words_of(made, MANY) == {2: ("ok", "triton"), 4: ("corrupt", "triton")}
    vllm = ask(tmp_path / "d", "vllm-0.33", linears)
    assert not any("fuses shared experts" in a for a in vllm.assumptions)


def test_shared_parts_of_one_module_share_their_outcome(tmp_path):
    found = surveyed(tmp_path, shared("shared_expert", 704), tp=(1, 4), model_type="qwen3_next")
    made = predict("vllm-0.33", found)
    gate = f"{AT}.shared_expert.gate_proj"
    assert made.outcomes[gate] is made.outcomes[ONE_UP]
