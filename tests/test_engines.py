"""What an engine does with a checkpoint as a whole: switches, schemes, findings, fixtures."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from conftest import FIXTURES
from engine_cases import (
    ASM_032,
    SGLANG_ASM,
    SGLANG_ON,
    VLLM_ON,
    ask,
    codes,
    message,
    only,
    surveyed,
    words_of,
)
from quark_factory import FP8_WEIGHT, quant_layer

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.decisions import decide
from mxfp4prep.engines import ENGINES, PATHS, find_tuned, parse_switches, predict
from mxfp4prep.errors import UsageError
from mxfp4prep.survey import survey

AT = "model.layers.0"
OUT = f"{AT}.self_attn.o_proj"
DOWN = f"{AT}.mlp.down_proj"
LINEAR = {OUT: (512, 512)}
SERVERS = [name for name in ENGINES if name != "mxfp4prep"]
STATIC_FP8 = {**FP8_WEIGHT, "qscheme": "per_tensor", "ch_axis": None, "symmetric": True}
MXFP6 = {**quant_layer()["input_tensors"], "dtype": "fp6_e3m2"}


def fixture(name: str, *tp: int):
    return survey(open_checkpoint(FIXTURES / name), tp or (1, 2, 4, 8))


def tally(prediction, tp: int) -> dict[tuple[str, str | None], int]:
    """(outcome, path) -> how many layers."""
    return dict(Counter(made[tp][:2] for made in prediction.outcomes.values()))


# The tables ---------------------------------------------------------------------------------------


def test_the_engines():
    assert list(ENGINES) == [
        "vllm-0.32",
        "vllm-0.33",
        "vllm-main",
        "sglang-0.5",
        "atom",
        "mxfp4prep",
    ]
    for name, engine in ENGINES.items():
        assert engine.name == name
        assert engine.version
        assert engine.sources
        assert engine.label.split()[0] in engine.version or name == "mxfp4prep"
        assert len({switch.name for switch in engine.switches}) == len(engine.switches)


@pytest.mark.parametrize("name", SERVERS)
def test_tables_name_only_switches_and_paths_that_there_are(name):
    engine = ENGINES[name]
    switches = {switch.name for switch in engine.switches}
    dense = engine.dense
    named = {*dense.needs, *(switch for switch, _ in dense.instead), *engine.experts.needs}
    named |= {*(engine.shared.fusion or ()), *([dense.small_m_asm] if dense.small_m_asm else ())}
    assert named <= switches
    assert all(not switch.says.endswith(".") and switch.says for switch in engine.switches)
    paths = {path for _, path in dense.instead} | {runs.path for runs in engine.schemes.values()}
    assert paths - {"", None} <= PATHS.keys()
    assert engine.experts.without[0] in {None, *PATHS}


def test_defaults_are_the_engines_own():
    on = {(name, s.name) for name, engine in ENGINES.items() for s in engine.switches if s.on}
    assert on == {(f"vllm-{v}", "VLLM_ROCM_USE_AITER_MOE") for v in ("0.32", "0.33", "main")}
    assert "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM" not in {s.name for s in ENGINES["vllm-0.33"].switches}


# Switches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "word"),
    [(v, "1") for v in ("1", "true", "True", "ON", "yes")]
    + [(v, "0") for v in ("0", "false", "off", "No")],
)
def test_values_of_switches(value, word):
    name = "SGLANG_USE_AITER"
    assert parse_switches("sglang-0.5", [f"{name}={value}"]) == {name: word}


def test_switches_may_be_repeated_but_not_contradict():
    again = ["SGLANG_USE_AITER=1", "SGLANG_USE_AITER=on", "AITER_FORCE_A8W4=0"]
    assert parse_switches("sglang-0.5", again) == {
        "SGLANG_USE_AITER": "1",
        "AITER_FORCE_A8W4": "0",
    }
    assert parse_switches(ENGINES["sglang-0.5"], []) == {}


@pytest.mark.parametrize(
    ("engine", "given", "says"),
    [
        ("vllm", [], "vllm-0.32, vllm-0.33, vllm-main, sglang-0.5, atom, mxfp4prep"),
        ("atom", ["VLLM_ROCM_USE_AITER=1"], "atom has no such switch"),
        ("vllm-0.33", ["vllm_rocm_use_aiter=1"], "vllm-0.33 has no such switch"),
        ("vllm-0.33", ["VLLM_ROCM_USE_AITER"], "neither on nor off: found no value"),
        ("vllm-0.33", ["VLLM_ROCM_USE_AITER="], "found no value"),
        ("vllm-0.33", ["VLLM_ROCM_USE_AITER=2"], "found 2, expected VLLM_ROCM_USE_AITER=1 or"),
        ("vllm-0.33", ["VLLM_ROCM_USE_AITER=1=1"], "found 1=1"),
        ("vllm-0.33", ["VLLM_ROCM_USE_AITER=1", "VLLM_ROCM_USE_AITER=0"], "with two values"),
        ("vllm-0.33", [""], "no such switch"),
    ],
)
def test_switches_that_are_refused(engine, given, says):
    with pytest.raises(UsageError) as error:
        parse_switches(engine, given)
    assert says in str(error.value)
    if given:
        assert f"--switch {given[-1]}" in str(error.value)


def test_the_hint_lists_the_switches():
    with pytest.raises(UsageError) as error:
        parse_switches("atom", ["X=1"])
    assert error.value.hint == ("it has ATOM_USE_TRITON_GEMM, ATOM_USE_FP4_NON_SHUFFLE_TRITON_GEMM")
    with pytest.raises(UsageError) as error:
        parse_switches("mxfp4prep", ["X=1"])
    assert error.value.hint == "it has none"


def test_predictions_tell_every_switch(tmp_path):
    found = surveyed(tmp_path, LINEAR)
    made = predict("vllm-0.33", found, switches={"VLLM_BATCH_INVARIANT": "yes"})
    assert made.switches == {
        "VLLM_ROCM_USE_AITER": "1",
        "VLLM_ROCM_USE_AITER_MOE": "1",
        "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": "0",
        "VLLM_BATCH_INVARIANT": "1",
    }
    off = predict("vllm-0.33", found, switches={"VLLM_ROCM_USE_AITER_MOE": "0"})
    assert off.switches["VLLM_ROCM_USE_AITER_MOE"] == "0"
    for engine, switches in (("nobody", {}), ("atom", {"X": "1"}), ("vllm-0.33", {"X": "0"})):
        with pytest.raises(UsageError):
            predict(engine, found, switches=switches)


# Assumptions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVERS)
def test_the_machine_is_an_assumption(tmp_path, name):
    made = ask(tmp_path, name, LINEAR)
    assert made.assumptions[0] == "gfx950, 256 compute units (MI350X or MI355X, not partitioned)"
    assert "the engine's modules have the names they have on disk" in made.assumptions


@pytest.mark.parametrize(
    ("engine", "switches", "off"),
    [
        ("vllm-0.33", {}, "VLLM_ROCM_USE_AITER off"),
        ("vllm-0.33", VLLM_ON, None),
        ("vllm-0.32", {}, "VLLM_ROCM_USE_AITER, VLLM_ROCM_USE_AITER_FP4_ASM_GEMM off"),
        ("vllm-0.32", VLLM_ON, "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM off"),
        ("vllm-0.32", ASM_032, None),
        ("sglang-0.5", {}, "SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM, SGLANG_USE_AITER off"),
        ("sglang-0.5", SGLANG_ON, "SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM off"),
        ("sglang-0.5", {**SGLANG_ON, **SGLANG_ASM}, None),
        ("atom", {}, None),
    ],
)
def test_what_a_faster_path_needs_is_an_assumption_where_it_is_off(tmp_path, engine, switches, off):
    made = ask(tmp_path, engine, LINEAR, switches)
    said = [text for text in made.assumptions if " off, as by default" in text]
    assert [text.split(", as by default")[0] for text in said] == ([] if off is None else [off])


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3_5_text", None),
        ("gpt_oss", None),
        ("glm4_moe", "glm4_moe is taken to be built alike"),
        (None, "a model of no type is taken to be built alike"),
        ("qwen4_exp_text", "ATOM ffdf3bb has no model file of this family (pull request 2048"),
    ],
)
def test_atom_tells_the_families_it_was_not_read_for(tmp_path, model_type, said):
    made = ask(tmp_path / "a", "atom", LINEAR, model_type=model_type)
    found = [text for text in made.assumptions if "model files were read" in text]
    assert len(found) == (said is not None)
    if said is not None:
        families = "gpt_oss, llama, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next"
        assert found[0].startswith(f"ATOM's model files were read for {families}: {said}")
    others = ask(tmp_path / "v", "vllm-0.33", LINEAR, model_type=model_type)
    assert not any("model files" in text for text in others.assumptions)


@pytest.mark.parametrize("name", SERVERS)
def test_a_switch_that_is_taken_to_be_on_against_its_default_is_an_assumption(tmp_path, name):
    aiter = {"sglang-0.5": "SGLANG_USE_AITER", "atom": None}.get(name, "VLLM_ROCM_USE_AITER")
    found = surveyed(tmp_path, LINEAR)
    said = [text for text in predict(name, found).assumptions if "own default" in text]
    assert [text.split(" on, ")[0] for text in said] == ([] if aiter is None else [aiter])
    if aiter is not None:
        assert said[0].endswith(f"--switch {aiter}=0 asks about")
        off = predict(name, found, switches={aiter: "0"})
        assert not any("own default" in text for text in off.assumptions)


# What is built ------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [f"{AT}.self_attn", "re:o_proj"], ids=["parent", "search"])
def test_entries_that_exclude_a_packed_module_in_atom_alone(tmp_path, entry):
    words = {"quant": {"exclude": [entry]}}
    found = only(ask(tmp_path / "atom", "atom", LINEAR, **words), OUT)
    assert (found.outcome, found.path) == ("crash", None)
    said = "sees it as excluded and builds 512 x 512 unquantized: the packed weight of 512 x 256"
    assert said in found.message
    assert only(ask(tmp_path / "vllm", "vllm-0.33", LINEAR, **words), OUT).outcome == "ok"


@pytest.mark.parametrize("engine", SERVERS)
def test_p49_heads_are_never_built_packed(tmp_path, engine):
    made = ask(tmp_path, engine, {**LINEAR, "lm_head": (1024, 512)}, quant={"exclude": []})
    assert only(made, "lm_head").outcome == "crash"
    assert "builds heads and embeddings unquantized" in only(made, "lm_head").message
    assert only(made, OUT).outcome == "ok"


def test_packed_routers_are_unknown(tmp_path):
    made = ask(tmp_path, "vllm-0.33", {f"{AT}.mlp.gate": (64, 512)})
    assert only(made, f"{AT}.mlp.gate").outcome == "unknown"
    assert codes(made) == ["engine_unknown"]


def test_names_that_no_rule_knows_are_unknown_beyond_one_rank(tmp_path):
    name = f"{AT}.strange.thing"
    made = ask(tmp_path, "vllm-0.33", {name: (512, 512)}, tp=(1, 2))
    assert words_of(made, name) == {1: ("ok", "triton"), 2: ("unknown", None)}


@pytest.mark.parametrize(
    ("engine", "outcome", "says"),
    [
        ("vllm-0.32", "crash", "amd/Quark issue 44"),
        ("vllm-0.33", "crash", "amd/Quark issue 44"),
        ("sglang-0.5", "unknown", "not found in params_dict"),
        ("atom", "unknown", "not known how it loads them"),
    ],
)
def test_scales_under_the_names_of_quark_0_11(engine, outcome, says):
    made = predict(engine, fixture("version-0.11.2", 1))
    assert tally(made, 1) == {(outcome, None): 7}
    assert says in only(made, DOWN).message
    assert "weight_quantizer.scale" in only(made, DOWN).message
    assert {outcome for (outcome, _) in tally(predict(engine, fixture("version-0.10", 1)), 1)} <= {
        "ok",
        "corrupt",
        "crash" if engine == "atom" else "ok",
    }


@pytest.mark.parametrize(
    ("engine", "inputs", "outcome", "path", "says"),
    [
        ("vllm-0.33", None, "ok", "emulation", "amd-quark"),
        ("vllm-0.33", MXFP6, "ok", "emulation", "amd-quark"),
        ("vllm-0.33", STATIC_FP8, "ok", "triton-a8w4", ""),
        ("vllm-0.33", {**STATIC_FP8, "symmetric": None}, "crash", None, "not symmetric"),
        ("vllm-0.33", {**STATIC_FP8, "is_dynamic": True}, "crash", None, "dynamic FP8"),
        ("sglang-0.5", None, "crash", None, "NotImplementedError"),
        ("sglang-0.5", MXFP6, "crash", None, "NotImplementedError"),
        ("sglang-0.5", STATIC_FP8, "crash", None, "NotImplementedError"),
        ("atom", None, "ok", "asm", "inputs become MXFP4"),
        ("atom", MXFP6, "ok", "asm", "inputs become MXFP4"),
        ("atom", STATIC_FP8, "ok", "asm", "inputs become MXFP4"),
        ("atom", {**STATIC_FP8, "symmetric": None}, "ok", "asm", "inputs become MXFP4"),
    ],
)
def test_other_schemes_of_linears(tmp_path, engine, inputs, outcome, path, says):
    words = {"quant": {"global_quant_config": quant_layer(inputs=inputs)}}
    made = only(ask(tmp_path, engine, LINEAR, **words), OUT)
    assert (made.outcome, made.path) == (outcome, path)
    assert says in made.message
    assert bool(says) == bool(made.message)


# Findings -----------------------------------------------------------------------------------------


def test_a_checkpoint_that_runs_has_no_findings(tmp_path):
    linears = {DOWN: (512, 512), f"{AT}.mlp.up_proj": (512, 512)}
    for name in SERVERS:
        assert codes(ask(tmp_path / name, name, linears)) == []


def test_totals_count_layers_at_each_degree(tmp_path):
    linears = {f"model.layers.{i}.mlp.down_proj": (512, 1408) for i in range(3)}
    linears["model.layers.3.mlp.down_proj"] = (512, 704)
    made = ask(tmp_path, "vllm-0.33", linears, tp=(1, 2, 4, 8))
    # 704 / 4 = 176, 704 / 8 = 88, 1408 / 8 = 176
    found = made.findings[0]
    assert (found.code, found.severity, found.where) == (
        "engine_crash",
        "error",
        "model.layers.3.mlp.down_proj",
    )
    assert found.message.startswith(
        "vLLM 0.33 stops with an error at tp 4 (1 layer), tp 8 (4 layers); "
        "model.layers.3.mlp.down_proj: ValueError: input size per partition of 176"
    )
    assert codes(made) == ["engine_crash"]


def test_severities(tmp_path):
    linears = {DOWN: (512, 1408), f"{AT}.mlp.gate": (64, 512)}
    made = ask(tmp_path, "sglang-0.5", linears, tp=(8,))
    assert [(f.code, f.severity) for f in made.findings] == [
        ("engine_corrupt", "error"),
        ("engine_unknown", "note"),
    ]
    assert "loads without an error and computes wrongly at tp 8 (1 layer)" in (
        message(made, "engine_corrupt")
    )


def test_like_layers_share_one_mapping(tmp_path):
    linears = {
        f"model.layers.{i}.{name}": shape
        for i in range(2)
        for name, shape in {
            "self_attn.o_proj": (512, 512),
            "mlp.down_proj": (512, 1408),
            "mlp.experts.0.down_proj": (512, 1408),
            "mlp.experts.1.down_proj": (512, 1408),
        }.items()
    }
    for engine in ENGINES:
        made = ask(tmp_path / engine, engine, linears, tp=(1, 8)).outcomes
        assert list(made) == sorted(linears)
        by_kind = {}
        for name, outcomes in made.items():
            kind = name.replace("layers.1", "layers.0").replace("experts.1", "experts.0")
            by_kind.setdefault(kind, set()).add(id(outcomes))
        assert {len(ids) for ids in by_kind.values()} == {1}


def test_layers_are_told_apart_by_what_matters(tmp_path):
    linears = {f"model.layers.{i}.mlp.down_proj": (512, 512) for i in range(2)}
    keys = {"model.layers.1.mlp.down_proj": quant_layer(inputs=None)}
    made = ask(tmp_path, "vllm-0.33", linears, quant={"layer_quant_config": keys})
    assert only(made, "model.layers.0.mlp.down_proj").path == "triton"
    assert only(made, "model.layers.1.mlp.down_proj").path == "emulation"


# mxfp4prep's own runtime --------------------------------------------------------------------------


def test_the_prepared_checkpoint_runs_as_decided(tmp_path):
    linears = {DOWN: (512, 1408), OUT: (512, 512), f"{AT}.mlp.experts.0.down_proj": (512, 512)}
    found = surveyed(tmp_path, linears, tp=(1, 8))
    made = predict("mxfp4prep", found)
    decided = decide(found)
    assert made.outcomes.keys() == decided.keys() == linears.keys()
    assert only(made, OUT) == ("ok", "asm", "")
    assert only(made, DOWN).path == decided[DOWN][1].path == "triton"
    refused = only(made, DOWN, 8)
    assert (refused.outcome, refused.path) == ("crash", None)
    assert refused.message.startswith("refused: ")
    assert "1408 / 8 = 176" in refused.message
    for name, outcomes in made.outcomes.items():
        for tp, outcome in outcomes.items():
            verdict = decided[name][tp]
            assert outcome.path == (None if verdict.path == "impossible" else verdict.path)
    assert (made.switches, made.findings) == ({}, ())
    assert "prepared" in made.assumptions[0]
    assert made.engine.version == "this version"


# Fixtures that Quark itself wrote -----------------------------------------------------------------


def test_an_aligned_checkpoint():
    found = fixture("llama-w4a4-aligned", 1)
    assert {o for o, _ in tally(predict("vllm-0.33", found), 1)} == {"ok"}
    made = predict("vllm-0.32", found, switches=ASM_032)
    assert set(tally(made, 1)) == {("ok", "asm")}
    assert set(tally(predict("atom", found), 1)) == {("ok", "asm")}


def test_a_misaligned_checkpoint():
    """q, k and v have 192 + 48 + 48 rows and 6 scale columns; down_proj has 640 columns."""
    found = fixture("qwen2-w4a4-misaligned-tied", 1)
    made = predict("vllm-0.32", found, switches=ASM_032)
    assert set(tally(made, 1)) == {("ok", "triton")}
    assert only(made, DOWN).message == "the scale of 192 x 20 does not fill tiles of 32 x 8"
    atom = predict("atom", found)
    assert only(atom, DOWN).outcome == "corrupt"
    assert "640 % 256 = 128 columns" in only(atom, DOWN).message
    assert only(atom, f"{AT}.self_attn.k_proj").message == (
        "192 % 256 = 192 columns: the scale is padded with bytes that were never set (AITER issue "
        "4176)"
    )


def test_a_checkpoint_with_four_schemes():
    found = fixture("llama-mixed-fp8attn-kvfp8", 1, 8)
    vllm = predict("vllm-0.33", found)
    for layer, path in ((0, "triton"), (1, "triton-a8w4"), (2, "emulation")):
        assert only(vllm, f"model.layers.{layer}.mlp.down_proj").path == path
    # 384 / 8 = 48: only the scheme with FP8 inputs lets it pass
    outcomes = [only(vllm, f"model.layers.{i}.mlp.down_proj", 8).outcome for i in range(3)]
    assert outcomes == ["crash", "corrupt", "crash"]
    sglang = predict("sglang-0.5", found)
    errors = [only(sglang, f"model.layers.{i}.mlp.down_proj").message for i in range(3)]
    assert errors[0] == ""
    assert all(error.startswith("NotImplementedError") for error in errors[1:])


def test_a_checkpoint_with_a_shared_expert():
    """Experts 96 wide: 48 at tp 2; 4 heads, so tp 8 is refused as a whole."""
    found = fixture("qwen2moe-w4a4-shared-expert", 1, 2, 8)
    made = predict("vllm-0.33", found, switches=VLLM_ON)
    name = f"{AT}.mlp.experts.0.down_proj"
    assert only(made, name).message == (
        "96 a rank, padded to 128 with zeros; hidden 128 padded to 256"
    )
    assert only(made, name, 2).outcome == "corrupt"
    assert "48 columns a rank = 1.5 groups of 32" in only(made, name, 2).message
    assert {outcome for outcome, _ in tally(made, 8)} == {"crash"}
    assert "attention heads (4)" in only(made, name, 8).message
    # the router is bf16 and nowhere excluded: no engine looks it up
    assert codes(made) == ["engine_crash", "engine_corrupt"]
    sglang = predict("sglang-0.5", found, switches=SGLANG_ON)
    assert only(sglang, name, 2).outcome == "crash"


# Cost ---------------------------------------------------------------------------------------------


def test_aiter_and_torch_are_never_imported():
    code = (
        "import sys; from mxfp4prep.engines import find_tuned, predict; find_tuned(None); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'aiter', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert torch.__name__ in sys.modules
    assert find_tuned(None) is None


def test_time_does_not_grow_with_the_layers_kinds(tmp_path):
    linears = {
        f"model.layers.{i}.mlp.experts.{j}.{leaf}_proj": (32, 32)
        for i in range(20)
        for j in range(100)
        for leaf in ("gate", "up", "down")
    }
    excluded = [f"model.layers.{i}.self_attn.{leaf}_proj" for i in range(20) for leaf in "qkvo"]
    found = surveyed(tmp_path, linears, quant={"exclude": excluded}, tp=(1, 2, 4, 8))
    for engine in SERVERS:
        start = time.perf_counter()
        made = predict(engine, found)
        assert time.perf_counter() - start < 1.0  # 6,000 layers; some 0.05 s on an idle machine
        assert len({id(outcomes) for outcomes in made.outcomes.values()}) <= 3
