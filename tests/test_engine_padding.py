"""The zeros that pad routed experts, in bytes of a rank, against sums done by hand."""

from __future__ import annotations

import pytest
from engine_cases import SGLANG_ON, VLLM_ON, ask

from mxfp4prep.deployment import Deployment

MLP = "model.layers.0.mlp"


def bank(width: int, hidden: int, experts: int = 4):
    linears = {}
    for e in range(experts):
        at = f"{MLP}.experts.{e}"
        linears[f"{at}.gate_proj"] = (width, hidden)
        linears[f"{at}.up_proj"] = (width, hidden)
        linears[f"{at}.down_proj"] = (hidden, width)
    return linears | {f"{MLP}.shared_expert.down_proj": (hidden, width)}


MOE = {"model_type": "qwen3_moe", "num_experts": 4}
# Three matrices of an expert of width 384 and hidden 512, four experts, 17/32 bytes a value:
ONE_ROW = 4 * 3 * 512 * 17 // 32  # of zeros in each


@pytest.mark.parametrize(
    ("engine", "switches", "zeros"),
    [
        # vLLM pads a rank's width to 128: 384, 192 -> 256, 96 -> 128
        ("vllm-0.33", VLLM_ON, {1: 0, 2: 64 * ONE_ROW, 4: 32 * ONE_ROW}),
        # SGLang and ATOM to 256: 384 -> 512, 192 -> 256, 96 -> 256
        ("sglang-0.5", SGLANG_ON, {1: 128 * ONE_ROW, 2: 64 * ONE_ROW, 4: 160 * ONE_ROW}),
        ("atom", {}, {1: 128 * ONE_ROW, 2: 64 * ONE_ROW, 4: 160 * ONE_ROW}),
    ],
)
def test_a_ranks_width_is_padded(tmp_path, engine, switches, zeros):
    made = ask(tmp_path, engine, bank(384, 512), switches, tp=(1, 2, 4), **MOE)
    assert made.padding == zeros


def test_hidden_is_padded_where_the_engine_does_that(tmp_path):
    # hidden 576 -> 768 with vLLM, width 256 as it is: 192 more in each of 3 matrices
    grown = 4 * 3 * 192 * 256 * 17 // 32
    made = ask(tmp_path / "v", "vllm-0.33", bank(256, 576), VLLM_ON, **MOE)
    assert made.padding == {1: grown}
    made = ask(tmp_path / "s", "sglang-0.5", bank(256, 576), SGLANG_ON, **MOE)
    assert made.padding == {1: 0}


def test_gate_and_up_in_one_tensor_are_padded_apart(tmp_path):
    at = f"{MLP}.experts.0"
    linears = {f"{at}.gate_up_proj": (2 * 2880, 2880), f"{at}.down_proj": (2880, 2880)}
    config = {"model_type": "gpt_oss", "num_local_experts": 1}
    made = ask(tmp_path, "vllm-0.33", linears, VLLM_ON, **config)
    # gpt-oss: 2880 -> 2944 wide and 3072 deep, three times
    assert made.padding == {1: 3 * (2944 * 3072 - 2880 * 2880) * 17 // 32}


def test_whole_experts_are_padded_where_they_are(tmp_path):
    # four experts over 2 and 3 ranks: the fullest holds two, each of width 384 -> 512 whole
    ep = Deployment(expert_parallel=True)
    made = ask(
        tmp_path, "sglang-0.5", bank(384, 512), SGLANG_ON, tp=(1, 2, 3), deployment=ep, **MOE
    )
    assert made.padding == {1: 128 * ONE_ROW, 2: 64 * ONE_ROW, 3: 64 * ONE_ROW}


def test_nothing_is_counted_where_nothing_runs_or_is_known(tmp_path):
    emulated = ask(tmp_path / "e", "vllm-0.33", bank(384, 512), **MOE)
    assert emulated.padding == {1: 0}
    dense = ask(tmp_path / "d", "vllm-0.33", {f"{MLP}.down_proj": (512, 384)}, VLLM_ON)
    assert dense.padding == {}
    own = ask(tmp_path / "o", "mxfp4prep", bank(384, 512), **MOE)
    assert own.padding == {}
