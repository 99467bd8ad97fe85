"""Linears in the engines: cut by the ranks, put together again, and handed to a GEMM."""

from __future__ import annotations

import pytest
import torch
from engine_cases import ASM_032, SGLANG_ASM, VLLM_ON, ask, codes, message, only, words_of
from quark_factory import FP8_WEIGHT, quant_layer

from mxfp4prep.engines import PATHS, Tuned
from mxfp4prep.engines.dense import shares_text, wrong_shares

AT = "model.layers.0"
OUT = f"{AT}.self_attn.o_proj"
DOWN = f"{AT}.mlp.down_proj"
INVARIANT = {**VLLM_ON, "VLLM_BATCH_INVARIANT": "1"}
INVARIANT_032 = {**ASM_032, "VLLM_BATCH_INVARIANT": "1"}
BF16 = {"AITER_FORCE_A8W4": "1"}
PLAIN = {"ATOM_USE_FP4_NON_SHUFFLE_TRITON_GEMM": "1"}
SHUFFLED = {"ATOM_USE_TRITON_GEMM": "1"}


def tuned_for(*shapes: tuple[int, int], at: tuple[int, ...] = (1024, 8192)) -> Tuned:
    """Tables that have the (N, K) of `shapes` at every M of `at`, and the Triton kernel's."""
    return Tuned(
        origin="a test",
        gemm=frozenset((m, n, k) for m in at for n, k in shapes),
        triton=frozenset(shapes),
    )


@pytest.mark.parametrize(
    ("engine", "switches", "rows", "k", "outcome", "path", "says"),
    [
        ("vllm-0.32", {}, 512, 512, "ok", "triton", ""),
        ("vllm-0.32", VLLM_ON, 512, 512, "ok", "triton", ""),
        ("vllm-0.32", ASM_032, 512, 512, "ok", "asm", ""),
        ("vllm-0.32", ASM_032, 256, 256, "ok", "asm", ""),
        ("vllm-0.32", ASM_032, 528, 512, "ok", "triton", "528 x 16 does not fill tiles of 32 x 8"),
        ("vllm-0.32", ASM_032, 512, 544, "ok", "triton", "512 x 17 does not fill tiles of 32 x 8"),
        ("vllm-0.32", ASM_032, 512, 384, "ok", "triton", "512 x 12 does not fill tiles of 32 x 8"),
        ("vllm-0.32", ASM_032, 96, 512, "unknown", None, "have 96 x 1024 (2 times the 512"),
        ("vllm-0.32", ASM_032, 128, 512, "unknown", None, "128 rows may be wrong at M <= 64"),
        ("vllm-0.32", INVARIANT_032, 96, 512, "corrupt", "asm", "96 rows: wrong results at M <="),
        ("vllm-0.32", INVARIANT_032, 512, 512, "ok", "asm", ""),
        ("vllm-0.32", ASM_032, 160, 512, "ok", "asm", "160 x 512 (not confirmed on hardware)"),
        ("vllm-0.32", ASM_032, 224, 512, "ok", "asm", "224 rows, fewer than 256"),
        ("vllm-0.32", {"VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "1"}, 512, 512, "ok", "triton", ""),
        ("vllm-0.33", {}, 512, 512, "ok", "triton", ""),
        ("vllm-0.33", VLLM_ON, 512, 512, "ok", "asm or triton", "they are not known here"),
        ("vllm-0.33", VLLM_ON, 96, 512, "ok", "asm or triton", "here; M <= 64 goes to Triton's"),
        ("vllm-0.33", VLLM_ON, 512, 384, "ok", "triton", "does not fill tiles"),
        ("vllm-0.33", INVARIANT, 512, 512, "ok", "asm or triton", "they are not known here"),
        ("vllm-0.33", INVARIANT, 96, 512, "unknown", None, "96 rows may be wrong at M <= 64"),
        ("vllm-main", VLLM_ON, 96, 512, "ok", "triton", "96 rows are kept from the ASM GEMM"),
        ("vllm-main", VLLM_ON, 64, 512, "ok", "asm or triton", ""),
        ("vllm-main", VLLM_ON, 128, 512, "ok", "asm or triton", ""),
        ("sglang-0.5", {}, 512, 512, "ok", "triton", ""),
        ("sglang-0.5", SGLANG_ASM, 512, 512, "ok", "asm", ""),
        ("sglang-0.5", SGLANG_ASM, 96, 512, "ok", "triton", "96 rows are kept from the ASM GEMM"),
        ("sglang-0.5", SGLANG_ASM, 128, 512, "ok", "triton", "128 rows are kept"),
        ("sglang-0.5", SGLANG_ASM, 160, 512, "ok", "asm", "not confirmed on hardware"),
        ("sglang-0.5", SGLANG_ASM, 512, 384, "ok", "triton", "does not fill tiles"),
        ("sglang-0.5", BF16, 40, 96, "ok", "bf16", ""),
        ("sglang-0.5", {**BF16, **SGLANG_ASM}, 512, 512, "ok", "bf16", ""),
        ("atom", {}, 512, 512, "ok", "asm", ""),
        ("atom", {}, 40, 512, "crash", None, "shuffle_weight: 40 rows % 16 = 8"),
        ("atom", {}, 512, 544, "crash", None, "shuffle_weight: 544 columns % 64 = 32"),
        ("atom", {}, 40, 544, "crash", None, "40 rows % 16 = 8, 544 columns % 64 = 32"),
        ("atom", {}, 528, 512, "corrupt", "asm", "528 % 32 = 16 rows"),
        ("atom", {}, 512, 320, "corrupt", "asm", "320 % 256 = 64 columns: the scale is padded"),
        ("atom", {}, 128, 512, "corrupt", "asm", "128 rows: wrong results"),
        ("atom", {}, 160, 512, "ok", "asm", "not confirmed on hardware"),
        ("atom", PLAIN, 40, 544, "ok", "triton", ""),
        ("atom", SHUFFLED, 512, 512, "ok", "triton-preshuffle", ""),
        ("atom", SHUFFLED, 96, 512, "ok", "triton-preshuffle", ""),
        ("atom", SHUFFLED, 40, 512, "crash", None, "shuffle_weight: 40 rows"),
        ("atom", SHUFFLED, 512, 544, "crash", None, "shuffle_weight: 544 columns"),
        ("atom", SHUFFLED, 512, 320, "crash", None, "320 % 256 = 64 columns"),
        ("atom", SHUFFLED, 528, 512, "unknown", None, "528 % 32 = 16 rows"),
        ("atom", {**SHUFFLED, **PLAIN}, 512, 512, "ok", "triton", ""),
    ],
)
def test_a_matrix_in_each_engine(tmp_path, engine, switches, rows, k, outcome, path, says):
    made = only(ask(tmp_path, engine, {OUT: (rows, k)}, switches), OUT)
    assert (made.outcome, made.path) == (outcome, path)
    assert says in made.message
    assert path is None or path in PATHS
    if "% 16" in says or "% 64" in says:
        assert made.message.endswith(says)
    if (rows, k, outcome) == (512, 512, "ok") and path != "asm or triton":
        assert made.message == ""


def test_p01_scale_columns_that_fill_no_tile(tmp_path):
    for engine, switches in (("vllm-0.32", ASM_032), ("vllm-0.33", VLLM_ON)):
        made = only(ask(tmp_path / engine, engine, {DOWN: (2560, 640)}, switches), DOWN)
        assert made == ("ok", "triton", "the scale of 2560 x 20 does not fill tiles of 32 x 8")


def test_p02_p03_a_small_projection_loses_its_rows(tmp_path):
    """48 + 48 rows at tp 1, 2, 4, 8: 96 (which the ASM GEMM gets wrong), 48, 24, 12."""
    linears = {f"{AT}.linear_attn.in_proj_{leaf}": (48, 5120) for leaf in "ab"}
    words = {"tp": (1, 2, 4, 8), "model_type": "qwen3_5", "linear_num_value_heads": 48}
    made = ask(tmp_path, "vllm-0.32", linears, ASM_032, **words)
    name = f"{AT}.linear_attn.in_proj_b"
    found = made.outcomes[name]
    assert found[1][:2] == ("unknown", None)  # AITER's tables decide, and they are not known
    for tp, rows in ((2, 48), (4, 24), (8, 12)):
        said = f"the scale of {rows} x 160 does not fill tiles of 32 x 8"
        assert found[tp] == ("ok", "triton", said)
    spared = (
        "M <= 64 goes to Triton's preshuffle GEMM: vLLM PR 58139 reports 96 rows numerically wrong "
        "there on the ASM GEMM"
    )
    for engine, switches, tables, expected in (
        # 0.32 looks for twice the K, which no table has; 0.33 for the K
        ("vllm-0.32", ASM_032, tuned_for((96, 5120)), ("corrupt", "asm")),
        ("vllm-0.32", ASM_032, tuned_for((96, 10240)), ("ok", "asm", spared)),
        ("vllm-0.33", VLLM_ON, tuned_for((96, 5120)), ("ok", "asm", spared)),
        ("vllm-main", VLLM_ON, tuned_for((96, 5120)), ("ok", "triton")),
    ):
        root = tmp_path / f"{engine}-{len(tables.gemm)}-{min(tables.triton)[1]}"
        made = ask(root, engine, linears, switches, tables, **{**words, "tp": (1,)})
        assert only(made, name)[: len(expected)] == expected


@pytest.mark.parametrize("k", [1664, 1824, 1856])
def test_p04_the_asm_gemm_never_sees_a_k_that_is_no_multiple_of_256(tmp_path, k):
    for engine, switches in (
        ("vllm-0.32", ASM_032),
        ("vllm-0.33", VLLM_ON),
        ("vllm-main", VLLM_ON),
        ("sglang-0.5", SGLANG_ASM),
    ):
        tables = tuned_for((512, k), at=(16, 32, 64, 1024, 8192))
        made = ask(tmp_path / engine, engine, {OUT: (512, k)}, switches, tables)
        assert only(made, OUT).path == "triton"
    made = only(ask(tmp_path / "atom", "atom", {OUT: (512, k)}), OUT)
    assert made.outcome == ("crash" if k % 64 else "corrupt")


# AITER's tables -----------------------------------------------------------------------------------

SMALL = (16, 32, 64)


@pytest.mark.parametrize(
    ("engine", "switches", "tuned", "rows", "outcome", "path", "says"),
    [
        ("vllm-0.33", VLLM_ON, tuned_for((512, 512)), 512, "ok", "asm", ""),
        ("vllm-0.33", VLLM_ON, tuned_for((512, 512)), 544, "ok", "triton", "no row for 544 x 512"),
        ("vllm-0.33", VLLM_ON, tuned_for((512, 512), at=(1024,)), 512, "ok", "triton", "no row"),
        ("vllm-0.33", VLLM_ON, tuned_for((512, 512), at=(8192,)), 512, "ok", "triton", "no row"),
        (
            "vllm-0.33",
            VLLM_ON,
            Tuned("x", tuned_for((512, 512)).gemm, frozenset()),
            512,
            "ok",
            "triton",
            "no row",
        ),
        ("vllm-0.33", {}, tuned_for((512, 512)), 512, "ok", "triton", ""),
        ("vllm-0.33", VLLM_ON, tuned_for((96, 512)), 96, "ok", "asm", "PR 58139 reports 96 rows"),
        ("vllm-0.33", VLLM_ON, tuned_for((128, 512)), 128, "ok", "asm", "measured up to 128 rows"),
        ("vllm-0.33", VLLM_ON, tuned_for((160, 512)), 160, "ok", "asm", ""),
        ("vllm-0.33", INVARIANT, tuned_for((96, 512)), 96, "corrupt", "asm", "96 rows"),
        ("vllm-0.33", INVARIANT, tuned_for((160, 512)), 160, "ok", "asm", "not confirmed"),
        (
            "vllm-0.33",
            INVARIANT,
            tuned_for((96, 512), at=(*SMALL, 1024, 8192)),
            96,
            "ok",
            "asm",
            "",
        ),
        ("vllm-main", VLLM_ON, tuned_for((96, 512)), 96, "ok", "triton", "96 rows are kept"),
        ("vllm-main", VLLM_ON, tuned_for((160, 512)), 160, "ok", "asm", ""),
        ("vllm-0.32", ASM_032, tuned_for((96, 512), at=SMALL), 96, "ok", "asm", ""),
        ("vllm-0.32", ASM_032, tuned_for((96, 512), at=(16, 32)), 96, "corrupt", "asm", "96 rows"),
        ("vllm-0.32", ASM_032, tuned_for((96, 1024)), 96, "ok", "asm", "PR 58139 reports 96 rows"),
        ("vllm-0.32", INVARIANT_032, tuned_for((96, 1024)), 96, "corrupt", "asm", "96 rows: wrong"),
        ("vllm-0.32", ASM_032, tuned_for((160, 1024)), 160, "ok", "asm", ""),
        ("vllm-0.32", ASM_032, tuned_for((160, 512)), 160, "ok", "asm", "not confirmed"),
        ("sglang-0.5", SGLANG_ASM, tuned_for((160, 512), at=SMALL), 160, "ok", "asm", ""),
        ("atom", {}, tuned_for((96, 512), at=SMALL), 96, "ok", "asm", ""),
        ("atom", {}, tuned_for((528, 512), at=SMALL), 528, "corrupt", "asm", "528 % 32"),
    ],
)
def test_what_tables_decide(tmp_path, engine, switches, tuned, rows, outcome, path, says):
    made = ask(tmp_path, engine, {OUT: (rows, 512)}, switches, tuned)
    found = only(made, OUT)
    assert (found.outcome, found.path) == (outcome, path)
    assert says in found.message
    assert bool(says) == bool(found.message)
    assert ("AITER's tuned tables are those of a test" in made.assumptions) == (tuned.origin != "x")


def test_tables_that_matter_and_are_not_known_are_an_assumption(tmp_path):
    said = "AITER's tuned tables are not known: give them with --aiter-configs"
    for engine, switches, matters in (
        ("vllm-0.33", VLLM_ON, True),
        ("vllm-0.33", {}, False),
        ("vllm-0.32", ASM_032, True),
        ("vllm-0.32", VLLM_ON, False),
        ("sglang-0.5", SGLANG_ASM, False),
    ):
        made = ask(tmp_path / f"{engine}-{len(switches)}", engine, {OUT: (512, 512)}, switches)
        assert (said in made.assumptions) == matters


# Cut by the ranks, and merged ---------------------------------------------------------------------

QKV = {
    f"{AT}.self_attn.q_proj": (512, 512),
    f"{AT}.self_attn.k_proj": (128, 512),
    f"{AT}.self_attn.v_proj": (128, 512),
}


@pytest.mark.parametrize(
    ("tp", "rows"), [(1, 512 + 128 + 128), (2, 256 + 64 + 64), (4, 128 + 64 + 64), (8, 64 * 3)]
)
def test_p13_queries_keys_and_values_are_one_matrix(tmp_path, tp, rows):
    """8 heads of 64 rows, 2 key heads: from tp 4 on every rank holds a whole key head."""
    degrees = (1, 2, 4, 8)
    made = ask(tmp_path, "vllm-0.33", QKV, VLLM_ON, tuned_for((rows, 512)), tp=degrees)
    for name in QKV:
        paths = {degree: path for degree, (_, path) in words_of(made, name).items()}
        assert paths == {degree: "asm" if degree == tp else "triton" for degree in degrees}
    assert len({id(made.outcomes[name]) for name in QKV}) == 1


def test_gate_and_up_are_one_matrix(tmp_path):
    linears = {f"{AT}.mlp.gate_proj": (96, 512), f"{AT}.mlp.up_proj": (96, 512)}
    made = ask(tmp_path, "vllm-main", linears, VLLM_ON, tuned_for((192, 512), (96, 512)), tp=(1, 2))
    assert words_of(made, f"{AT}.mlp.up_proj") == {1: ("ok", "asm"), 2: ("ok", "triton")}
    assert only(made, f"{AT}.mlp.up_proj", 2).message == "96 rows are kept from the ASM GEMM"


def test_a_part_alone_is_the_matrix(tmp_path):
    made = ask(
        tmp_path, "vllm-0.33", {f"{AT}.mlp.up_proj": (96, 512)}, VLLM_ON, tuned_for((96, 512))
    )
    assert only(made, f"{AT}.mlp.up_proj").path == "asm"


def test_low_rank_projections_are_merged_and_whole(tmp_path):
    linears = {
        f"{AT}.self_attn.q_a_proj": (256, 512),
        f"{AT}.self_attn.kv_a_proj_with_mqa": (64, 512),
    }
    for engine, switches in (("vllm-0.33", VLLM_ON), ("vllm-main", VLLM_ON)):
        made = ask(
            tmp_path / engine,
            engine,
            linears,
            switches,
            tuned_for((320, 512)),
            tp=(1, 8),
            model_type="deepseek_v3",
        )
        for name in linears:
            assert words_of(made, name) == {1: ("ok", "asm"), 8: ("ok", "asm")}


def test_parts_with_different_inputs_are_unknown(tmp_path):
    linears = {f"{AT}.mlp.gate_proj": (512, 512), f"{AT}.mlp.up_proj": (512, 256)}
    made = only(ask(tmp_path, "vllm-0.33", linears), f"{AT}.mlp.up_proj")
    assert (made.outcome, made.message) == (
        "unknown",
        "parts of one projection have different inputs",
    )


def test_rows_are_merged_after_they_are_cut(tmp_path):
    """10240 rows and 1024 + 1024 are one matrix of 12288; at tp 8, 1536 rows a rank."""
    linears = {
        f"{AT}.self_attn.q_proj": (10240, 512),
        f"{AT}.self_attn.k_proj": (1024, 512),
        f"{AT}.self_attn.v_proj": (1024, 512),
    }
    words = {"num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "tp": (8,)}
    made = ask(tmp_path, "vllm-0.33", linears, VLLM_ON, tuned_for((1536, 512)), **words)
    assert only(made, f"{AT}.self_attn.k_proj", 8).path == "asm"


# Groups of 32 that the ranks would have to share --------------------------------------------------

NARROW = {DOWN: (512, 1408)}
"""1408 / 8 = 176 columns a rank = 5.5 groups; floor(44 / 8) = 5 scale columns."""


def test_vllm_refuses_split_groups(tmp_path):
    for engine in ("vllm-0.32", "vllm-0.33", "vllm-main"):
        made = ask(tmp_path / engine, engine, NARROW, tp=(4, 8))
        assert words_of(made, DOWN) == {4: ("ok", "triton"), 8: ("crash", None)}
        assert only(made, DOWN, 8).message == (
            "ValueError: input size per partition of 176 must be divisible by the OCP MX group "
            "size 32"
        )
        assert "tp 8 (1 layer)" in message(made, "engine_crash")


def test_sglang_floors_split_groups_and_says_nothing(tmp_path):
    made = ask(tmp_path / "a", "sglang-0.5", NARROW, tp=(4, 8))
    assert words_of(made, DOWN) == {4: ("ok", "triton"), 8: ("corrupt", "triton")}
    assert only(made, DOWN, 8).message == (
        "1408 / 8 = 176 columns a rank = 5.5 groups of 32, floored: the layer gets wrong scales "
        "for 9 % of rank 0's weights, 55 % of rank 1's, 100 % of ranks 2 to 7's, no error"
    )
    assert codes(made) == ["engine_corrupt"]
    made = ask(tmp_path / "b", "sglang-0.5", NARROW, BF16, tp=(8,))
    assert only(made, DOWN, 8).message == (
        "RuntimeError in view: 176 columns are not 5 groups of 32"
    )


def test_atom_asks_for_scales_that_are_not_there(tmp_path):
    made = only(ask(tmp_path, "atom", NARROW, tp=(8,)), DOWN, 8)
    assert made.outcome == "crash"
    assert made.message == (  # ceil(176 / 32) = 6 a rank, 7 * 6 = 42
        "RuntimeError in narrow on the last rank: scale columns 42 to 48 of 44 (1408 / 8 = 176)"
    )
    with pytest.raises(RuntimeError):
        torch.zeros(512, 44).narrow(1, 42, 6)


def test_vllm_floors_inputs_in_fp8(tmp_path):
    """The scheme with static FP8 inputs has no check of its own."""
    inputs = {**FP8_WEIGHT, "qscheme": "per_tensor", "ch_axis": None, "symmetric": True}
    words = {"quant": {"global_quant_config": quant_layer(inputs=inputs)}, "tp": (4, 8)}
    made = ask(tmp_path, "vllm-0.33", NARROW, **words)
    assert words_of(made, DOWN) == {4: ("ok", "triton-a8w4"), 8: ("corrupt", "triton-a8w4")}


@pytest.mark.parametrize(
    ("engine", "outcome"), [("vllm-0.33", "crash"), ("sglang-0.5", "unknown"), ("atom", "unknown")]
)
def test_inputs_that_are_no_whole_groups(tmp_path, engine, outcome):
    made = only(ask(tmp_path, engine, {OUT: (64, 80)}), OUT)
    assert made.outcome == outcome
    assert "80" in made.message


@pytest.mark.parametrize("engine", ["sglang-0.5", "atom"])
def test_sizes_that_the_ranks_do_not_divide(tmp_path, engine):
    made = only(ask(tmp_path, engine, {DOWN: (512, 512)}, tp=(3,)), DOWN, 3)
    assert made.outcome == "crash"
    assert made.message.startswith("AssertionError: ")


def test_heads_that_the_ranks_do_not_divide_stop_vllm(tmp_path):
    linears = {DOWN: (768, 768), "model.layers.0.mlp.experts.0.down_proj": (768, 768)}
    made = ask(tmp_path, "vllm-0.33", linears, tp=(2, 3))
    for name in linears:
        assert only(made, name, 2).outcome == "ok"
        assert only(made, name, 3).message == (
            "ValueError: total number of attention heads (8) must be divisible by tensor parallel "
            "size (3)"
        )


def test_rows_that_config_json_does_not_say_how_to_cut(tmp_path):
    words = {"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None}
    name = f"{AT}.self_attn.qkv_proj"
    made = ask(tmp_path, "sglang-0.5", {name: (768, 512)}, tp=(1, 2), **words)
    assert words_of(made, name) == {1: ("ok", "triton"), 2: ("unknown", None)}
    assert only(made, name, 2).message == "config.json does not say where the rows may be cut"


# The share of weights with wrong scales -----------------------------------------------------------


def simulated(k: int, ranks: int, floored_starts: bool) -> list[float]:
    """The same by cutting arrays: every weight carries the number of its group, as its scale."""
    weight = torch.arange(k) // 32
    scale = torch.arange(k // 32)
    width = k // ranks
    shares = []
    for rank in range(ranks):
        mine = weight.narrow(0, rank * width, width)
        loaded = torch.full((-(-width // 32),), -1)
        if floored_starts:
            first, last = rank * width // 32, (rank + 1) * width // 32
            # The buffer holds what came, even where it is one more than the rank's width needs.
            count = min(last - first, len(loaded))
            loaded[:count] = scale.narrow(0, first, count)
        else:
            count = len(scale) // ranks
            loaded[:count] = scale.narrow(0, rank * count, count)
        used = loaded.repeat_interleave(32)[:width]
        shares.append((used != mine).double().mean().item())
    return shares


@pytest.mark.parametrize("floored_starts", [False, True])
def test_wrong_shares_are_what_cut_arrays_show(floored_starts):
    for k in range(32, 1600, 32):
        for ranks in (2, 3, 4, 5, 8, 16):
            if k % ranks or k // ranks < 32:
                continue
            expected = simulated(k, ranks, floored_starts)
            assert wrong_shares(k, ranks, floored_starts) == pytest.approx(expected)
            if k // ranks % 32 == 0:
                assert not any(expected)


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ((0.5, 0.5), "50 % of ranks 0 to 1's weights"),
        ((0.0, 1.0), "0 % of rank 0's weights, 100 % of rank 1's"),
        ((0.1, 0.2, 0.3, 0.4), "10 % of rank 0's weights, 20 % of rank 1's, 30 % of rank 2's, "
         "40 % of rank 3's"),
        ((0.1, 0.2, 0.3, 0.4, 0.5), "10 to 50 % of the weights of a rank"),
        ((1 / 11, 6 / 11, 1.0, 1.0), "9 % of rank 0's weights, 55 % of rank 1's, 100 % of ranks 2 "
         "to 3's"),
    ],
)  # fmt: skip
def test_shares_in_words(shares, text):
    assert shares_text(shares) == text
