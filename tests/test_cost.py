"""The cost of a degree, against hand-computed numbers and ranks that are really cut."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FIXTURES, MXFP4_FIXTURES
from quark_factory import model_config, mxfp4_tensors, quant_config, write_checkpoint
from safetensors import safe_open

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.cost import (
    Cost,
    assumptions,
    costs,
    counts_all_experts,
    largest_clean,
    layers,
    reach,
    shapes_of,
    worst_path,
)
from mxfp4prep.decisions import decide
from mxfp4prep.deployment import TENSOR_PARALLEL, Deployment
from mxfp4prep.parallel import parse_rules
from mxfp4prep.report.cost_text import cost_lines, flops_share, nbytes_share, percent
from mxfp4prep.report.recommendation import recommend, recommendation_lines
from mxfp4prep.report.screen import Screen, cells
from mxfp4prep.survey import Survey, survey

EP = Deployment(expert_parallel=True)
SP = Deployment(sequence_parallel=True)
BF16 = torch.bfloat16
Linears = dict[str, tuple[int, int]]


def surveyed(
    root: Path, tp: Sequence[int] = (1, 2, 4, 8), deployment: Deployment = TENSOR_PARALLEL
) -> Survey:
    return survey(open_checkpoint(root), tp, (), deployment)


def costs_of(
    root: Path, tp: Sequence[int] = (1, 2, 4, 8), deployment: Deployment = TENSOR_PARALLEL
) -> dict[int, Cost]:
    found = surveyed(root, tp, deployment)
    return costs(found, decide(found))


def mxfp4(n: int, k: int) -> int:
    """Bytes of an (n, k) MXFP4 matrix: half a byte a value, and a byte for 32 of them."""
    return n * k * 17 // 32


def attention(i: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Linears:
    at = f"model.layers.{i}.self_attn"
    return {
        f"{at}.q_proj": (heads * head_dim, hidden),
        f"{at}.k_proj": (kv_heads * head_dim, hidden),
        f"{at}.v_proj": (kv_heads * head_dim, hidden),
        f"{at}.o_proj": (hidden, heads * head_dim),
    }


def mlp(at: str, hidden: int, width: int) -> Linears:
    return {
        f"{at}.gate_proj": (width, hidden),
        f"{at}.up_proj": (width, hidden),
        f"{at}.down_proj": (hidden, width),
    }


def experts(i: int, count: int, hidden: int, width: int) -> Linears:
    found: Linears = {}
    for expert in range(count):
        found |= mlp(f"model.layers.{i}.mlp.experts.{expert}", hidden, width)
    return found


# --- a dense model, by hand ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: hidden 512, 8 heads and 2 KV heads of 64, width 1024, a vocabulary of 1000."""
    linears = attention(0, 512, 8, 2, 64) | mlp("model.layers.0.mlp", 512, 1024)
    extra = {
        "model.embed_tokens.weight": torch.zeros(1000, 512, dtype=BF16),
        "lm_head.weight": torch.zeros(1000, 512, dtype=BF16),
        "model.norm.weight": torch.zeros(512, dtype=BF16),
    }
    return write_checkpoint(tmp_path_factory.mktemp("dense") / "m", linears, extra=extra)


def test_dense_bytes_of_a_rank(dense: Path) -> None:
    found = costs_of(dense)
    # q and o 139,264 each, k and v 34,816 each, gate, up and down 278,528 each
    assert found[1].rank_mxfp4_nbytes == 2 * 139_264 + 2 * 34_816 + 3 * 278_528 == 1_183_744
    assert found[1].rank_nbytes == 1_183_744 + 2 * 1000 * 512 * 2 + 512 * 2
    assert found[2].rank_mxfp4_nbytes == 1_183_744 // 2
    # 1000 rows are padded to 1024 before they are split: the first rank has 512, then 256
    assert found[2].rank_nbytes == 591_872 + 2 * 512 * 512 * 2 + 512 * 2
    assert found[4].rank_nbytes - found[4].rank_mxfp4_nbytes == 2 * 256 * 512 * 2 + 512 * 2


def test_p13_replicated_kv_heads_count_on_every_rank(dense: Path) -> None:
    found = costs_of(dense)
    # at 4 and 8 ranks each holds one whole KV head: 64 rows of k and 64 of v
    kv = 2 * mxfp4(64, 512)
    assert found[4].rank_mxfp4_nbytes == 2 * 139_264 // 4 + kv + 3 * 278_528 // 4 == 313_344
    assert found[8].rank_mxfp4_nbytes == 2 * 139_264 // 8 + kv + 3 * 278_528 // 8


def test_dense_flops_and_paths(dense: Path) -> None:
    found = costs_of(dense)
    assert found[1].paths["asm"].flops == 2 * (2 * 512 * 512 + 2 * 128 * 512 + 3 * 1024 * 512)
    assert found[1].paths["triton"] == found[1].paths["impossible"] == (0, 0)
    assert found[1].padding_nbytes == found[2].padding_nbytes == 0
    # at 4 the o_proj has 128 columns on a rank, so 4 of scale: triton
    paths = found[4].paths
    assert paths["triton"] == (mxfp4(512, 128), 2 * 512 * 128) == (34_816, 131_072)
    assert paths["asm"].flops == 2 * (128 * 512 + 2 * 64 * 512 + 3 * 256 * 512)
    assert paths["asm"].nbytes + paths["triton"].nbytes == found[4].rank_mxfp4_nbytes
    assert found[4].padding_nbytes == mxfp4(512, 256) - mxfp4(512, 128)


def test_a_layer_that_cannot_be_split_is_in_no_sum_but_has_its_share(dense: Path) -> None:
    found = costs_of(dense, (3,))[3]
    whole = 1_183_744 - mxfp4(1024, 512) * 3  # attention: 8 and 2 heads do not divide by 3
    assert found.rank_mxfp4_nbytes == 0
    assert found.paths["impossible"].nbytes == -(-(whole + 3 * mxfp4(1024, 512)) // 3)
    assert found.paths["impossible"].flops == -(-4_456_448 // 3)
    assert found.padding_nbytes == 0
    # what no verdict is about is rounded up: 1024 / 3 rows do not divide either, 334 of 1000 do
    assert found.rank_nbytes == 2 * 334 * 512 * 2 + 512 * 2


def test_a_tied_head_is_stored_once(dense: Path, tmp_path: Path) -> None:
    linears = attention(0, 512, 8, 2, 64)
    table = torch.zeros(1000, 512, dtype=BF16)
    extra = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    sizes = {}
    for tied in (True, False):
        config = model_config(tie_word_embeddings=tied)
        root = write_checkpoint(tmp_path / str(tied), linears, config=config, extra=extra)
        sizes[tied] = costs_of(root, (1, 2))
    both, once = sizes[False], sizes[True]
    assert both[1].rank_nbytes - once[1].rank_nbytes == 1000 * 512 * 2
    assert both[2].rank_nbytes - once[2].rank_nbytes == 512 * 512 * 2
    assert both[2].rank_mxfp4_nbytes == once[2].rank_mxfp4_nbytes
    extra["lm_head.weight"] = torch.zeros(999, 512, dtype=BF16)
    config = model_config(tie_word_embeddings=True)
    other = write_checkpoint(tmp_path / "other", linears, config=config, extra=extra)
    assert costs_of(other, (1,))[1].rank_nbytes == both[1].rank_nbytes - 512 * 2


# --- experts, by hand ---------------------------------------------------------------------------


def moe(root: Path, *, routed: int = 6, shared: int = 0, **config: Any) -> Path:
    """One layer: hidden 512, experts of width 256, 2 of them a token, maybe a shared expert."""
    linears = attention(0, 512, 8, 2, 64) | experts(0, routed, 512, 256)
    if shared:
        linears |= mlp("model.layers.0.mlp.shared_expert", 512, shared)
    extra = {"model.layers.0.mlp.gate.weight": torch.zeros(routed, 512, dtype=BF16)}
    settings = model_config(**{"num_experts_per_tok": 2, **config})
    return write_checkpoint(root, linears, config=settings, extra=extra)


EXPERT = 3 * 256 * 512
"""Values of one expert."""
ATTENTION = {1: 655_360, 2: 327_680, 4: 131_072 + 65_536, 8: 65_536 + 65_536}
"""Values of the attention layers on a rank: q and o, and k and v by KV heads."""


def flops(cost: Cost) -> int:
    return sum(part.flops for part in cost.paths.values())


def test_experts_under_tensor_parallelism(tmp_path: Path) -> None:
    found = costs_of(moe(tmp_path / "m"))
    for tp in (1, 2, 4, 8):
        values = ATTENTION[tp] + 6 * EXPERT // tp
        assert found[tp].rank_mxfp4_nbytes == values * 17 // 32, tp
        assert flops(found[tp]) == 2 * (ATTENTION[tp] + 2 * EXPERT // tp), tp
        assert found[tp].rank_nbytes - found[tp].rank_mxfp4_nbytes == 6 * 512 * 2  # the router


def test_experts_under_expert_parallelism(tmp_path: Path) -> None:
    found = costs_of(moe(tmp_path / "m"), deployment=EP)
    for tp, held in ((1, 6), (2, 3), (4, 2), (8, 1)):
        assert found[tp].rank_mxfp4_nbytes == (ATTENTION[tp] + held * EXPERT) * 17 // 32, tp
        assert flops(found[tp]) == 2 * (ATTENTION[tp] + 2 * EXPERT // tp), tp


def test_padding_counts_the_experts_that_a_rank_holds(tmp_path: Path) -> None:
    linears = experts(0, 5, 512, 96)  # gate and up 96 rows: the bad tile; down 3 scale columns
    root = write_checkpoint(tmp_path / "m", linears, config=model_config(num_experts_per_tok=1))
    one = 2 * (mxfp4(256, 512) - mxfp4(96, 512)) + mxfp4(512, 256) - mxfp4(512, 96)
    assert costs_of(root, (1,))[1].padding_nbytes == 5 * one
    found = costs_of(root, (1, 2, 4), EP)
    assert [found[tp].padding_nbytes for tp in (1, 2, 4)] == [5 * one, 3 * one, 2 * one]
    assert costs_of(root, (3,))[3].padding_nbytes == 5 * (
        2 * 0 + mxfp4(512, 256) - mxfp4(512, 32)  # 32 rows are no bad tile
    )


@pytest.mark.parametrize(
    ("rows", "columns", "padded"),
    [
        (48, 512, (256, 512)),  # rows miss
        (512, 640, (512, 768)),  # columns miss
        (96, 512, (256, 512)),  # the bad tile
        (352, 96, (352, 256)),  # 352 rows are legal as they are
        (300, 96, (512, 256)),
        (512, 512, None),  # asm
    ],
)
def test_padding_goes_to_the_multiples(
    tmp_path: Path, rows: int, columns: int, padded: tuple[int, int] | None
) -> None:
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.up_proj": (rows, columns)})
    extra = 0 if padded is None else mxfp4(*padded) - mxfp4(rows, columns)
    assert costs_of(root, (1,))[1].padding_nbytes == extra


def test_a_shared_expert_in_each_of_its_places(tmp_path: Path) -> None:
    apart = Deployment(shared_experts="separate")
    root = moe(tmp_path / "m", routed=8, shared=512)
    shared = 3 * 512 * 512
    rest = {tp: (ATTENTION[tp] + 8 * EXPERT // tp) * 17 // 32 for tp in (1, 2, 4, 8)}
    work = {tp: 2 * (ATTENTION[tp] + 2 * EXPERT // tp) for tp in (1, 2, 4, 8)}

    def check(deployment: Deployment, held: Sequence[float], run: Sequence[float]) -> None:
        found = costs_of(root, deployment=deployment)
        for tp, part, done in zip((1, 2, 4, 8), held, run, strict=True):
            assert found[tp].rank_mxfp4_nbytes == rest[tp] + part * shared * 17 // 32, tp
            assert flops(found[tp]) == work[tp] + 2 * shared * done, tp

    sliced = (1, 1 / 2, 1 / 4, 1 / 8)
    check(apart, sliced, sliced)  # cut like any other
    check(TENSOR_PARALLEL, sliced, sliced)  # fused, one more slot that is cut like the others
    check(EP, (1, 1, 1, 1), sliced)  # fused, whole on each rank, which runs it for its tokens
    narrow = moe(tmp_path / "narrow", routed=8, shared=160)  # 160 / 2 and / 4: no whole groups
    shared = 3 * 160 * 512
    for deployment, run in (
        (apart._replace(expert_parallel=True), (1, 1, 1, 1)),  # every rank, every token
        (apart._replace(sequence_parallel=True), sliced),
        (apart._replace(expert_parallel=True, sequence_parallel=True), sliced),
    ):
        found = costs_of(narrow, (2, 4, 8), deployment)
        for tp, done in zip((2, 4, 8), run[1:], strict=True):
            assert found[tp].rank_mxfp4_nbytes == rest[tp] + shared * 17 // 32, (deployment, tp)
            assert flops(found[tp]) == work[tp] + 2 * shared * done, (deployment, tp)


def test_like_shapes_in_different_places_are_told_apart(tmp_path: Path) -> None:
    """Two shared experts of one shape, one fusable; two gates of one shape, one with an odd up."""
    linears = experts(0, 4, 512, 512) | experts(1, 4, 512, 512)
    for i in (0, 1):
        linears |= mlp(f"model.layers.{i}.mlp.shared_expert", 512, 512)
    del linears["model.layers.1.mlp.shared_expert.up_proj"]
    extra = {"model.layers.1.mlp.shared_expert.up_proj.weight": torch.zeros(512, 512, dtype=BF16)}
    root = write_checkpoint(tmp_path / "shared", linears, extra=extra)
    matrix = mxfp4(512, 512)
    # 2 experts of 4 in each layer; fused, three whole matrices; apart, two halves
    assert costs_of(root, (2,), EP)[2].rank_mxfp4_nbytes == 2 * 2 * 3 * matrix + 3 * matrix + matrix
    # of width 160 neither can be cut in four: both are whole, but the one that is fused runs for a
    # rank's own tokens and the other for all
    at = "model.layers.{}.mlp.shared_expert.down_proj"
    linears = experts(0, 4, 512, 160) | experts(1, 4, 512, 160)
    linears |= {at.format(i): (512, 160) for i in (0, 1)}
    extra = {"model.layers.1.mlp.shared_expert.up_proj.weight": torch.zeros(160, 512, dtype=BF16)}
    config = model_config(num_experts_per_tok=1)
    narrow = write_checkpoint(tmp_path / "narrow", linears, config=config, extra=extra)
    one = 160 * 512
    assert flops(costs_of(narrow, (4,), EP)[4]) == 2 * (2 * 3 * one // 4 + one // 4 + one)
    linears = {
        "model.layers.0.mlp.gate_proj": (512, 512),
        "model.layers.0.mlp.up_proj": (512, 512),
        "model.layers.1.mlp.gate_proj": (512, 512),
        "model.layers.1.mlp.up_proj": (48, 512),
    }
    found = costs_of(write_checkpoint(tmp_path / "gates", linears), (1,))[1]
    assert found.paths["asm"].nbytes == 2 * matrix
    assert found.paths["triton"].nbytes == matrix + mxfp4(48, 512)
    assert found.padding_nbytes == mxfp4(256, 512) - mxfp4(48, 512)  # the gate needs none


def test_sequence_parallelism_is_about_the_moe_block_alone(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.self_attn.q_a_proj": (512, 512)})
    for deployment in (TENSOR_PARALLEL, SP, EP):
        found = costs_of(root, (4,), deployment)[4]
        assert found.rank_mxfp4_nbytes == mxfp4(512, 512)
        assert flops(found) == 2 * 512 * 512  # replicated: every rank runs it for every token


def test_stacked_banks_cost_what_single_experts_do(tmp_path: Path) -> None:
    single = moe(tmp_path / "single")
    generator = torch.Generator().manual_seed(0)
    at = "model.layers.0.mlp.experts"
    extra = {"model.layers.0.mlp.gate.weight": torch.zeros(6, 512, dtype=BF16)}
    for leaf, n, k in (("gate_up_proj", 512, 512), ("down_proj", 512, 256)):
        extra |= mxfp4_tensors(f"{at}.{leaf}", n, k, generator=generator, experts=6)
    linears = attention(0, 512, 8, 2, 64)
    config = model_config(num_experts_per_tok=2)
    stacked = write_checkpoint(tmp_path / "stacked", linears, config=config, extra=extra)
    for deployment in (TENSOR_PARALLEL, EP):
        one, other = (costs_of(root, deployment=deployment) for root in (single, stacked))
        for tp in (1, 2, 4, 8):
            assert one[tp].rank_nbytes == other[tp].rank_nbytes, (deployment, tp)
            assert flops(one[tp]) == flops(other[tp]), (deployment, tp)


def test_what_belongs_to_a_bank_goes_with_it(tmp_path: Path) -> None:
    """gpt-oss: banks without `.weight`, gate and up rows in turn, a bias for every expert."""
    at = "model.layers.0.mlp.experts"
    extra = {}
    for leaf, n, k in (("gate_up_proj", 512, 256), ("down_proj", 256, 256)):
        extra |= {
            f"{at}.{leaf}": torch.zeros(6, n, k // 2, dtype=torch.uint8),
            f"{at}.{leaf}_scale": torch.zeros(6, n, k // 32, dtype=torch.uint8),
            f"{at}.{leaf}_bias": torch.zeros(6, n, dtype=BF16),
        }
    config = model_config(model_type="gpt_oss", num_experts_per_tok=4)
    root = write_checkpoint(tmp_path / "m", {}, config=config, extra=extra)
    matrices = mxfp4(512, 256) + mxfp4(256, 256)
    found = costs_of(root, (1, 2, 4))
    # down's bias is added after the ranks' sums are: every rank has it whole
    assert [found[tp].rank_nbytes for tp in (1, 2, 4)] == [
        6 * (matrices // tp + 512 * 2 // tp + 256 * 2) for tp in (1, 2, 4)
    ]
    found = costs_of(root, (1, 2, 4), EP)
    assert [found[tp].rank_nbytes for tp in (1, 2, 4)] == [
        held * (matrices + 512 * 2 + 256 * 2) for held in (6, 3, 2)
    ]


def test_banks_are_counted_from_what_is_stored(tmp_path: Path) -> None:
    """config.json says 128; 6 are here in one layer and 3 in the other."""
    linears = experts(0, 6, 512, 256) | experts(1, 3, 512, 256)
    config = model_config(num_experts=128, num_experts_per_tok=2)
    root = write_checkpoint(tmp_path / "m", linears, config=config)
    found = costs_of(root, (1, 2, 4), EP)
    for tp, held in ((1, 9), (2, 3 + 2), (4, 2 + 1)):
        assert found[tp].rank_mxfp4_nbytes == held * EXPERT * 17 // 32
        assert flops(found[tp]) == 2 * (2 + 2) * EXPERT // tp


def test_a_token_takes_no_more_experts_than_there_are(tmp_path: Path) -> None:
    root = moe(tmp_path / "m", num_experts_per_tok=8)
    assert flops(costs_of(root, (1,))[1]) == 2 * (ATTENTION[1] + 6 * EXPERT)


def test_unknown_experts_per_token_counts_all_and_says_so(tmp_path: Path) -> None:
    root = moe(tmp_path / "m", num_experts_per_tok=None)
    found = surveyed(root, (1, 2))
    assert counts_all_experts(found)
    assert assumptions(found) == (
        "config.json does not say how many experts a token takes: FLOPs count all of them",
    )
    assert flops(costs(found, decide(found))[2]) == 2 * (ATTENTION[2] + 6 * EXPERT // 2)
    known = surveyed(moe(tmp_path / "known"), (1,))
    assert not counts_all_experts(known)
    assert assumptions(known) == ("FLOPs: a token takes 2 routed experts of each MoE layer",)


def test_what_no_token_of_text_multiplies_by_has_bytes_and_no_flops(tmp_path: Path) -> None:
    linears = attention(0, 512, 8, 2, 64)
    lookups = {
        "model.embed_tokens": (1024, 512),
        "visual.blocks.0.mlp.fc1": (512, 512),
        "model.layers.1.self_attn.o_proj": (512, 512),  # the draft layer
    }
    config = model_config(quant_config(exclude=[]), num_hidden_layers=1, num_nextn_predict_layers=1)
    root = write_checkpoint(tmp_path / "m", linears | lookups, config=config)
    found = surveyed(root, (1, 2))
    made = costs(found, decide(found))
    assert flops(made[1]) == 2 * ATTENTION[1]
    assert flops(made[2]) == 2 * ATTENTION[2]
    aside = mxfp4(1024, 512) + 2 * mxfp4(512, 512)
    assert made[1].rank_mxfp4_nbytes == ATTENTION[1] * 17 // 32 + aside
    # embedding and draft halves, the tower whole on both ranks
    halves = (mxfp4(1024, 512) + mxfp4(512, 512)) // 2 + mxfp4(512, 512)
    assert made[2].rank_mxfp4_nbytes == ATTENTION[2] * 17 // 32 + halves
    assert any("MTP" in sentence for sentence in assumptions(found))


def test_a_quantized_head_counts(tmp_path: Path) -> None:
    config = model_config(quant_config(exclude=[]))
    root = write_checkpoint(tmp_path / "m", {"lm_head": (1000, 512)}, config=config)
    found = costs_of(root, (1, 2))
    assert flops(found[1]) == 2 * 1000 * 512
    # 512 of 1000 rows on the first of two ranks
    assert flops(found[2]) == 2 * 512 * 512
    assert found[2].rank_mxfp4_nbytes == mxfp4(512, 512)


def test_weights_of_other_ranks_are_never_padded(tmp_path: Path) -> None:
    extra = {
        "model.conv1d.weight": torch.zeros(48, 1, 16, dtype=torch.uint8),
        "model.conv1d.weight_scale": torch.zeros(48, 1, dtype=torch.uint8),
        "model.norm.weight": torch.ones(8, dtype=BF16),
    }
    linears = {"model.layers.0.mlp.up_proj": (512, 512)}
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    found = costs_of(root, (1,))[1]
    assert found.paths["triton"].nbytes == 48 * 16 + 48
    assert found.padding_nbytes == 0


# --- copied tensors, by hand --------------------------------------------------------------------


def copied_at(root: Path, tp: int, deployment: Deployment = TENSOR_PARALLEL) -> int:
    cost = costs_of(root, (tp,), deployment)[tp]
    return cost.rank_nbytes - cost.rank_mxfp4_nbytes


@pytest.mark.parametrize(
    ("tensors", "held"),
    [
        ({"model.norm.weight": (512,)}, 512),
        ({"model.layers.1.self_attn.q_proj.weight": (512, 64)}, 512 * 64 // 4),
        ({"model.layers.1.self_attn.q_proj.bias": (512,)}, 512),  # of nothing that is known
        ({"model.layers.0.self_attn.q_proj.bias": (512,)}, 512 // 4),  # of an MXFP4 layer
        ({"model.layers.0.self_attn.k_proj.bias": (128,)}, 64),  # one KV head
        ({"model.layers.0.self_attn.o_proj.bias": (512,)}, 512),
        (
            {
                "model.layers.0.self_attn.q_proj.bias": (512,),
                "model.layers.0.self_attn.o_proj.bias": (512,),
            },
            512 // 4 + 512,
        ),
        ({"model.layers.0.self_attn.q_proj.input_scale": ()}, 1),
        ({"model.layers.0.self_attn.q_proj.input_scale": (1,)}, 1),
        ({"model.layers.0.self_attn.q_proj.input_quantizer.scale": (1,)}, 1),
        ({"model.layers.0.self_attn.k_scale": ()}, 1),
        ({"model.layers.1.mlp.down_proj.weight": (64, 1024)}, 64 * 1024 // 4),
        ({"model.layers.1.mlp.down_proj.weight": (64, 1022)}, 64 * 256),  # rounded up
        ({"model.layers.1.mlp.up_proj.weight": (102, 64)}, 26 * 64),  # rounded up
        (
            # block FP8: a scale per 128 x 128
            {
                "model.layers.1.mlp.up_proj.weight": (1024, 256),
                "model.layers.1.mlp.up_proj.weight_scale_inv": (8, 2),
            },
            1024 * 256 // 4 + 2 * 2,
        ),
        (
            {
                "model.layers.1.mlp.down_proj.weight": (256, 1024),
                "model.layers.1.mlp.down_proj.weight_scale_inv": (2, 8),
            },
            256 * 1024 // 4 + 2 * 2,
        ),
        (
            # a quarter of 640 rows is one block and a quarter of the next
            {
                "model.layers.1.mlp.up_proj.weight": (640, 256),
                "model.layers.1.mlp.up_proj.weight_scale_inv": (5, 2),
            },
            640 * 256 // 4 + 2 * 2,
        ),
        ({"model.layers.1.mlp.gate.weight": (8, 512)}, 8 * 512),
        ({"model.layers.1.mixer.weird.weight": (512, 512)}, 512 * 512),
        ({"visual.blocks.0.attn.q_proj.weight": (512, 512)}, 512 * 512),
        ({"model.layers.1.mlp.up_proj.weight": (64, 8, 4)}, 64 * 8 * 4),  # no matrix
        ({"model.layers.1.linear_attn.conv1d.weight": (64, 1, 4)}, 64 * 4),
        ({"model.embed_tokens.weight": (1000, 64)}, 256 * 64),
        ({"model.layers.1.mlp.experts.down_proj": (6, 64, 256)}, 6 * 64 * 256 // 4),
        ({"model.layers.1.mlp.experts.0.down_proj.weight": (64, 256)}, 64 * 256 // 4),
        ({"model.layers.1.mlp.shared_expert.down_proj.weight": (64, 256)}, 64 * 256 // 4),
    ],
)
def test_copied_tensors_at_four_ranks(
    tmp_path: Path, tensors: Mapping[str, tuple[int, ...]], held: int
) -> None:
    extra = {name: torch.zeros(shape, dtype=BF16) for name, shape in tensors.items()}
    root = write_checkpoint(tmp_path / "m", attention(0, 512, 8, 2, 64), extra=extra)
    assert copied_at(root, 4) == 2 * held
    assert copied_at(root, 1) == sum(2 * tensor.numel() for tensor in extra.values())


def test_copied_experts_are_spread_with_the_others(tmp_path: Path) -> None:
    """Two of six experts are bf16: on average a rank of four has ceil(6 / 4) = 2 of 6."""
    at = "model.layers.0.mlp.experts"
    linears = experts(0, 4, 512, 256)
    extra = {
        f"{at}.{expert}.{leaf}.weight": torch.zeros(shape, dtype=BF16)
        for expert in (4, 5)
        for leaf, shape in (("gate_proj", (256, 512)), ("down_proj", (512, 256)))
    }
    extra["model.layers.1.mlp.experts.down_proj"] = torch.zeros(5, 512, 256, dtype=BF16)
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    matrix = 256 * 512 * 2
    assert copied_at(root, 4, EP) == -(-4 * matrix * 2 // 6) + 2 * matrix
    assert copied_at(root, 4) == 4 * matrix // 4 + 5 * matrix // 4
    cost = costs_of(root, (4,), EP)[4]
    assert cost.rank_mxfp4_nbytes == -(-4 * EXPERT * 17 // 32 * 2 // 6)


def test_expert_parallelism_is_about_experts_alone(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.q_proj.weight": torch.zeros(512, 64, dtype=BF16)}
    root = write_checkpoint(tmp_path / "m", attention(0, 512, 8, 2, 64), extra=extra)
    assert copied_at(root, 4, EP) == 512 * 64 * 2 // 4


def test_what_belongs_to_banks_and_blocks_that_differ_is_told_apart(tmp_path: Path) -> None:
    linears, extra = {}, {}
    for i, count in enumerate((6, 3)):
        linears |= experts(i, count, 512, 256)
        linears |= mlp(f"model.layers.{i}.mlp.shared_expert", 512, 256)
        for expert in range(count):
            name = f"model.layers.{i}.mlp.experts.{expert}.up_proj.input_scale"
            extra[name] = torch.zeros(1, dtype=BF16)
        extra[f"model.layers.{i}.mlp.shared_expert.up_proj.bias"] = torch.zeros(256, dtype=BF16)
    gate = "model.layers.1.mlp.shared_expert.gate_proj"
    del linears[gate]
    extra[f"{gate}.weight"] = torch.zeros(256, 512, dtype=BF16)
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    # 3 of 6 and 2 of 3 experts; one shared expert fused and whole, the other apart and cut
    assert copied_at(root, 2, EP) == 2 * (3 + 2 + 256 + 128 + 128 * 512)


def test_what_belongs_to_an_mxfp4_expert_goes_with_it(tmp_path: Path) -> None:
    at = "model.layers.0.mlp"
    linears = experts(0, 4, 512, 256) | mlp(f"{at}.shared_expert", 512, 256)
    extra = {
        f"{at}.experts.{expert}.down_proj.{scale}": torch.zeros(1, dtype=BF16)
        for expert in range(4)
        for scale in ("input_scale", "input_quantizer.scale")
    }
    extra |= {f"{at}.shared_expert.up_proj.bias": torch.zeros(256, dtype=BF16)}
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    assert copied_at(root, 2) == 2 * (8 + 128)
    assert copied_at(root, 2, EP) == 2 * (4 + 256)  # fused: whole on every rank
    apart = Deployment(expert_parallel=True, shared_experts="separate")
    assert copied_at(root, 2, apart) == 2 * (4 + 128)
    assert copied_at(root, 16, apart) == 2 * (2 + 256)  # 256 / 16: replicated


def test_copied_parts_of_a_replicated_shared_expert_are_replicated(tmp_path: Path) -> None:
    at = "model.layers.0.mlp.shared_expert"
    extra = {f"{at}.gate_proj.weight": torch.zeros(160, 512, dtype=BF16)}
    linears = experts(0, 8, 512, 256) | {f"{at}.down_proj": (512, 160)}
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    assert copied_at(root, 4, EP) == 160 * 512 * 2
    assert copied_at(root, 4) == 40 * 512 * 2
    assert copied_at(root, 1, EP) == 160 * 512 * 2


def test_rules_of_the_user_hold_for_copied_tensors_too(tmp_path: Path) -> None:
    linears = {"a.mixer.into": (512, 512)}
    extra = {"b.mixer.into.weight": torch.zeros(512, 512, dtype=BF16)}
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    found = survey(open_checkpoint(root), (4,), parse_rules(["*mixer.into=column"]))
    cost = costs(found, decide(found))[4]
    assert cost.rank_mxfp4_nbytes == mxfp4(128, 512)
    assert cost.rank_nbytes - cost.rank_mxfp4_nbytes == 128 * 512 * 2


# --- ranks that are really cut ------------------------------------------------------------------


class Cutter:
    """Cuts real tensors for one rank, by rules of its own: what an engine's loader does."""

    def __init__(self, root: Path, tp: int, config: Mapping[str, Any], ep: bool) -> None:
        self.tp, self.ep = tp, ep
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.tensors = {}
        for file in sorted(root.glob("*.safetensors")):
            with safe_open(file, "pt") as reader:
                self.tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        numbers = re.findall(r"experts\.(\d+)\.", " ".join(self.tensors))
        self.experts = len(set(numbers))
        down = [t for n, t in self.tensors.items() if n.endswith("shared_expert.down_proj.weight")]
        width = 2 * down[0].shape[1] if down else 0
        self.shared_whole = ep and width % (32 * tp) != 0

    def rank(self, rank: int) -> dict[str, torch.Tensor]:
        """Every tensor of which this rank holds something."""
        pieces = {name: self._piece(name, tensor, rank) for name, tensor in self.tensors.items()}
        return {name: piece for name, piece in pieces.items() if piece is not None}

    def _piece(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert and self.ep:
            mine = torch.arange(self.experts).tensor_split(self.tp)[rank].tolist()
            return tensor if int(expert[1]) in mine else None
        if tensor.ndim == 0 or (self.shared_whole and ".shared_expert." in name):
            return tensor
        if re.search(r"\.(gate_proj|up_proj)\.", name):
            return tensor.chunk(self.tp)[rank]
        if ".q_proj." in name:
            return tensor.unflatten(0, (self.heads, -1)).chunk(self.tp)[rank].flatten(0, 1)
        if re.search(r"\.[kv]_proj\.", name):
            heads = tensor.unflatten(0, (self.kv, -1))
            copies = max(1, self.tp // self.kv)
            return heads.repeat_interleave(copies, 0).chunk(self.tp)[rank].flatten(0, 1)
        if re.search(r"\.(o_proj|down_proj)\.", name) and tensor.ndim == 2:
            return tensor.chunk(self.tp, 1)[rank]
        if "embed_tokens" in name or "lm_head" in name:
            rows = -(-tensor.shape[0] // 64) * 64 // self.tp
            return tensor[rank * rows : (rank + 1) * rows]
        return tensor


def size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_mxfp4(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.uint8, torch.float8_e8m0fnu)


def work(cutter: Cutter, per_token: int) -> Fraction:
    """FLOPs per token of a rank, the average, from tokens that visit every expert alike."""
    done, tokens = 0, max(1, cutter.experts)
    for rank, token in itertools.product(range(cutter.tp), range(tokens)):
        visited = {(token + i) % tokens for i in range(per_token)}
        for name, piece in cutter.rank(rank).items():
            expert = re.search(r"\.experts\.(\d+)\.", name)
            if piece.dtype == torch.uint8 and name.endswith(".weight"):
                rows, packed = piece.shape
                if expert is None or int(expert[1]) in visited:
                    done += 2 * rows * 2 * packed
    return Fraction(done, tokens * cutter.tp)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experts, a shared expert, biases, a bf16 layer, an odd vocabulary."""
    linears = attention(0, 256, 8, 2, 32) | experts(0, 5, 256, 256)
    linears |= mlp("model.layers.0.mlp.shared_expert", 256, 512)
    rows = {name: n for name, (n, _) in linears.items() if "self_attn" in name}
    extra = {f"{name}.bias": torch.zeros(n, dtype=BF16) for name, n in rows.items()}
    extra |= {
        f"{name}.weight": torch.zeros(shape, dtype=BF16)
        for name, shape in {
            **attention(1, 256, 8, 2, 32),
            **mlp("model.layers.1.mlp", 256, 512),
        }.items()
    }
    extra |= {
        "model.embed_tokens.weight": torch.zeros(333, 256, dtype=BF16),
        "lm_head.weight": torch.zeros(333, 256, dtype=BF16),
        "model.norm.weight": torch.zeros(256, dtype=BF16),
        "model.layers.0.mlp.gate.weight": torch.zeros(5, 256, dtype=torch.float32),
    }
    config = model_config(num_experts_per_tok=3, head_dim=32, hidden_size=256)
    root = tmp_path_factory.mktemp("mixed") / "m"
    return write_checkpoint(root, linears, config=config, extra=extra, shards=3)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["mixed", *MXFP4_FIXTURES])
def test_ranks_hold_what_a_loader_would_give_them(
    mixed: Path, name: str, tp: int, ep: bool
) -> None:
    root = mixed if name == "mixed" else FIXTURES / name
    deployment = Deployment(expert_parallel=ep, shared_experts="separate")
    found = surveyed(root, (tp,), deployment)
    decisions = decide(found)
    stuck = {name for name, made in decisions.items() if made[tp].path == "impossible"}
    config = open_checkpoint(root).config
    cutter = Cutter(root, tp, config, ep)
    for layer in stuck:  # they are in no sum
        for tensor in [t for t in cutter.tensors if t.startswith(f"{layer}.weight")]:
            del cutter.tensors[tensor]
    if tp % cutter.kv and cutter.kv % tp:
        assert stuck, "KV heads that neither divide nor are divided"
        cutter.kv = tp  # only their biases are left, cut alike
    if cutter.heads % tp:
        cutter.heads = tp
    ranks = [cutter.rank(rank) for rank in range(tp)]
    (cost,) = costs(found, decisions).values()
    most = max(ranks, key=lambda tensors: size(tensors.values()))
    assert cost.rank_nbytes == size(most.values())
    assert cost.rank_mxfp4_nbytes == size(filter(is_mxfp4, most.values()))
    possible = cost.paths["asm"].flops + cost.paths["triton"].flops
    per_token = config.get("num_experts_per_tok", 0)
    assert possible == pytest.approx(float(work(cutter, per_token)), abs=2)
    by_path = dict.fromkeys(("asm", "triton"), 0)
    for name, piece in most.items():
        if is_mxfp4(piece):
            by_path[decisions[name[: name.index(".weight")]][tp].path] += size([piece])
    assert {path: cost.paths[path].nbytes for path in ("asm", "triton")} == by_path


def test_every_byte_is_counted_at_one_rank(mxfp4_fixture: Path) -> None:
    checkpoint = open_checkpoint(mxfp4_fixture)
    cost = costs_of(mxfp4_fixture, (1,))[1]
    assert cost.rank_nbytes == sum(entry.nbytes for entry in checkpoint.tensors.values())
    assert cost.rank_mxfp4_nbytes == sum(
        entry.nbytes
        for name, entry in checkpoint.tensors.items()
        if entry.dtype in ("U8", "F8_E8M0")
    )
    assert sum(part.nbytes for part in cost.paths.values()) == cost.rank_mxfp4_nbytes


def test_like_layers_are_cut_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty times the layers take as many cuts: the audit of 36,000 layers must not wait."""
    calls: list[int] = []
    real = layers.shard
    monkeypatch.setattr(layers, "shard", lambda *args: calls.append(1) or real(*args))
    counts = []
    for number in (1, 40):
        linears = {}
        for i in range(number):
            linears |= attention(i, 256, 8, 2, 32) | experts(i, 3, 256, 64)
            linears |= mlp(f"model.layers.{i}.mlp.shared_expert", 256, 64)
        found = surveyed(write_checkpoint(tmp_path / str(number), linears))
        decisions = decide(found)
        calls.clear()
        costs(found, decisions)
        counts.append(len(calls))
        tried = shapes_of(found)
        # q, k and v, o; gate and up, down, of routed and shared experts. And qkv, two gate and up
        assert (len(tried.layers), len(tried.groups)) == (7, 3)
    assert counts[0] == counts[1] > 0


# --- how far it can be split --------------------------------------------------------------------

MOST = 70
DEPLOYMENTS = [
    Deployment(*each)
    for each in itertools.product((False, True), (False, True), ("auto", "separate"))
]


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
@pytest.mark.parametrize("name", ["mixed", "narrow", *MXFP4_FIXTURES])
def test_the_worst_path_is_the_surveys(
    mixed: Path, tmp_path: Path, name: str, deployment: Deployment
) -> None:
    root = FIXTURES / name
    if name == "mixed":
        root = mixed
    elif name == "narrow":
        root = moe(tmp_path / "m", routed=8, shared=160)
    degrees = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
    found = surveyed(root, degrees, deployment)
    decisions = decide(found)
    few = shapes_of(surveyed(root, (1,)))  # neither the degrees nor the deployment are asked for
    order = {"asm": 0, "triton": 1, "impossible": 2}
    for tp in degrees:
        paths = {made[tp].path for made in decisions.values()}
        assert worst_path(few, tp, deployment) == max(paths, key=order.__getitem__), tp
    clean = [tp for tp in degrees if {made[tp].path for made in decisions.values()} == {"asm"}]
    assert largest_clean(found) == (max(clean) if clean else None)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_empty_tensors_cost_nothing(tmp_path: Path, expert_parallel: bool) -> None:
    bf16 = {
        "model.layers.0.self_attn.k_proj.weight": (0, 256),
        "model.layers.0.self_attn.k_proj.bias": (128,),
        "model.layers.0.self_attn.o_proj.weight": (256, 0),
        "model.layers.0.mlp.experts.down_proj": (0, 256, 256),
    }
    extra = {name: torch.zeros(shape, dtype=BF16) for name, shape in bf16.items()}
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.o": (64, 256)}, extra=extra)
    for cost in costs_of(root, (1, 4), Deployment(expert_parallel=expert_parallel)).values():
        # an unknown name is held whole; of the empty ones' neighbours only the bias has bytes
        assert cost.rank_nbytes == mxfp4(64, 256) + 2 * 128


def test_mixed_groups_bind_nobody(tmp_path: Path) -> None:
    """k is bf16, so nobody fuses q, k and v; 32 + 64 rows of q and v would be the bad tile."""
    linears = {
        "model.layers.0.self_attn.q_proj": (32, 512),
        "model.layers.0.self_attn.v_proj": (64, 512),
    }
    extra = {"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 512, dtype=BF16)}
    root = write_checkpoint(tmp_path / "m", linears, extra=extra)
    assert worst_path(shapes_of(surveyed(root, (1,))), 1, TENSOR_PARALLEL) == "asm"


def test_a_whole_may_be_worse_than_its_parts(tmp_path: Path) -> None:
    """Parts of 64 and 32 rows are fine by themselves; joined they are the tile of 96 rows."""
    linears = {"model.layers.0.mlp.gate_proj": (64, 512), "model.layers.0.mlp.up_proj": (32, 512)}
    root = write_checkpoint(tmp_path / "m", linears)
    assert worst_path(shapes_of(surveyed(root, (1,))), 1, TENSOR_PARALLEL) == "triton"


def test_like_shapes_are_tried_in_their_places(tmp_path: Path) -> None:
    """The same 512 x 256 as an expert's, a shared expert's and a plain layer's down_proj."""
    apart = Deployment(expert_parallel=True, shared_experts="separate")
    routed = {"model.layers.0.mlp.experts.0.down_proj": (512, 256)}
    shared = {"model.layers.0.mlp.shared_expert.down_proj": (512, 256)}
    plain = {"model.layers.0.self_attn.o_proj": (512, 256)}
    for number, (linears, deployment, worst) in enumerate(
        [
            (routed, EP, "asm"),
            (routed | plain, EP, "triton"),
            (plain | routed, EP, "triton"),
            (routed | shared, EP, "asm"),  # fused
            (routed | shared, TENSOR_PARALLEL, "triton"),  # fused, and cut with the others
            (routed | shared, apart, "triton"),
            (shared | routed, apart, "triton"),
            (shared | plain, SP, "triton"),
            (routed, TENSOR_PARALLEL, "triton"),
        ]
    ):
        root = write_checkpoint(tmp_path / str(number), linears)
        assert worst_path(shapes_of(surveyed(root, (1,))), 4, deployment) == worst, number
        assert worst_path(shapes_of(surveyed(root, (1,))), 1, deployment) == "asm", number


def test_a_shared_expert_and_a_plain_layer_of_one_shape_are_two(tmp_path: Path) -> None:
    linears = {"model.layers.0.mlp.shared_expert.down_proj": (512, 160)}
    root = write_checkpoint(tmp_path / "shared", linears)
    assert worst_path(shapes_of(surveyed(root, (1,))), 4, SP) == "triton"  # replicated
    linears["model.layers.0.self_attn.o_proj"] = (512, 160)
    root = write_checkpoint(tmp_path / "both", linears)
    assert worst_path(shapes_of(surveyed(root, (1,))), 4, SP) == "impossible"


def test_a_shared_expert_is_no_routed_one_whatever_a_rule_calls_it(tmp_path: Path) -> None:
    linears = {"model.layers.0.mlp.shared_expert.down_proj": (512, 256)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", linears))
    rules = parse_rules(["*shared_expert.down_proj=expert", "*=row"])
    found = survey(checkpoint, (1, 4), rules, EP)
    paths = {made[4].path for made in decide(found).values()}
    assert {worst_path(shapes_of(found), 4, EP)} == paths


def minimax(root: Path) -> Path:
    at = "model.layers.0.block_sparse_moe.experts"
    linears = {}
    for expert in range(2):
        linears |= {
            f"{at}.{expert}.w1": (1536, 3072),
            f"{at}.{expert}.w3": (1536, 3072),
            f"{at}.{expert}.w2": (3072, 1536),
        }
    return write_checkpoint(root, linears, config=model_config(num_experts_per_tok=1))


@pytest.fixture(scope="module")
def p06(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minimax(tmp_path_factory.mktemp("p06") / "m")


def test_p06_the_largest_clean_degree_is_two_and_w2_is_named(p06: Path) -> None:
    found = surveyed(p06)
    assert largest_clean(found) == 2
    assert largest_clean(surveyed(p06, (8,))) == 2  # though only 8 is asked about
    text = recommend(audited(found))
    assert text.startswith("Serve at tp 2: every MXFP4 layer takes the ASM path there")
    assert (
        "model.layers.0.block_sparse_moe.experts.{0,1}.w2 (2 layers) at tp 4, 8 "
        "(12, 6 scale columns, not a multiple of 8)"
    ) in text
    assert "w1" not in text
    assert "w3" not in text


def test_p08_any_degree_can_be_asked_about(tmp_path: Path) -> None:
    linears = {"model.layers.0.mlp.shared_expert.down_proj": (512, 3072)}
    root = write_checkpoint(tmp_path / "m", linears)
    found = surveyed(root, (4, 16, 32))
    assert largest_clean(found) == 4
    assert decide(found)["model.layers.0.mlp.shared_expert.down_proj"][16].scale_shard == (512, 6)
    text = recommend(audited(found))
    assert text.startswith("Serve at tp 4: ")
    assert "down_proj (1 layer) at tp 16, 32 (6, 3 scale columns, not a multiple of 8)" in text
    odd = surveyed(root, (12,))
    assert largest_clean(odd) == 12  # 3072 / 12 = 256, of the asked ones


def test_expert_parallelism_needs_an_expert_for_every_rank(p06: Path) -> None:
    assert largest_clean(surveyed(p06, (1,), EP)) == 2
    assert largest_clean(surveyed(p06, (1, 8), EP)) == 8  # asked for is judged as it is
    assert "--ep" not in recommend(audited(surveyed(p06)))


def test_the_experts_of_a_stacked_bank_are_enough_for_as_many_ranks(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    at = "model.layers.0.mlp.experts"
    extra = mxfp4_tensors(f"{at}.gate_up_proj", 512, 256, generator=generator, experts=6)
    extra |= mxfp4_tensors(f"{at}.down_proj", 256, 256, generator=generator, experts=6)
    root = write_checkpoint(tmp_path / "m", {}, extra=extra)
    assert shapes_of(surveyed(root, (1,))).experts == 6
    assert largest_clean(surveyed(root, (1,), EP)) == 4
    assert largest_clean(surveyed(root, (1,))) == 1


def test_the_smallest_bank_limits_the_ranks(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "m", experts(0, 9, 512, 2048) | experts(1, 3, 512, 2048))
    assert shapes_of(surveyed(root, (1,))).experts == 3
    assert largest_clean(surveyed(root, (1,), EP)) == 2
    assert largest_clean(surveyed(root, (1,))) == 8  # cut experts are on every rank


def test_nothing_is_clean(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (512, 640)})
    assert largest_clean(surveyed(root)) is None


def test_degrees_tried_beside_the_asked_ones(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (32, 256 * 64)})
    assert reach.TRIED == (1, 2, 4, 8, 16, 32, 64)
    assert largest_clean(surveyed(root, (1,))) == 64
    assert largest_clean(surveyed(root, (1,)), tried=(1, 2)) == 2
    root = write_checkpoint(tmp_path / "n", {"model.layers.0.mlp.down_proj": (32, 256 * 65)})
    assert largest_clean(surveyed(root, (1, 65))) == 65


# --- the table ----------------------------------------------------------------------------------


def audited(found: Survey, prediction: Any = None) -> Any:
    decisions = decide(found)
    return SimpleNamespace(
        survey=found,
        decisions=decisions,
        costs=costs(found, decisions),
        largest_clean=largest_clean(found),
        shapes=shapes_of(found),
        prediction=prediction,
    )


def test_shares_are_of_what_a_rank_does() -> None:
    paths = {"asm": (30, 5), "triton": (10, 15), "impossible": (0, 0)}
    named = {path: SimpleNamespace(nbytes=b, flops=f) for path, (b, f) in paths.items()}
    cost: Any = SimpleNamespace(paths=named)
    assert (nbytes_share(cost, "asm"), flops_share(cost, "asm")) == (0.75, 0.25)
    assert (nbytes_share(cost, "impossible"), flops_share(cost, "triton")) == (0, 0.75)
    for part in named.values():
        part.flops = 0
    assert flops_share(cost, "asm") == 0


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0, "0%"),
        (1e-9, "<1%"),
        (0.0049, "<1%"),
        (0.0051, "1%"),
        (0.4, "40%"),
        (2 / 3, "67%"),
        (0.994, "99%"),
        (0.9951, ">99%"),
        (1 - 1e-9, ">99%"),
        (1, "100%"),
    ],
)
def test_only_all_is_all_and_only_nothing_is_nothing(part: float, text: str) -> None:
    assert percent(part) == text


def test_the_table_of_a_dense_model(dense: Path) -> None:
    found = surveyed(dense, (1, 4))
    text = cost_lines(found, costs(found, decide(found)), Screen())
    assert text == [
        "What the fullest rank holds, and how much of its MXFP4 bytes / FLOPs per token",
        "takes each path:",
        "a rank  tensors   MXFP4          asm     triton   padding",
        "tp 1     3.2 MB  1.2 MB  100% / 100%          -         -",
        "tp 4     839 kB  313 kB    89% / 89%  11% / 11%  +34.8 kB",
        "padding: what a rank would hold more with its triton layers zero-padded for ASM:",
        "columns, and rows that miss, to multiples of 256",
    ]


def test_the_table_has_no_more_than_there_is_to_say(dense: Path) -> None:
    found = surveyed(dense, (1, 2))
    text = "\n".join(cost_lines(found, costs(found, decide(found)), Screen()))
    assert "a rank  tensors   MXFP4          asm  triton  padding\n" in text
    assert "padding:" not in text
    found = surveyed(dense, (3,))
    text = "\n".join(cost_lines(found, costs(found, decide(found)), Screen()))
    assert "100% / 100%" in text
    assert "no split: " in text


def test_bytes_come_before_flops_and_assumptions_last(tmp_path: Path) -> None:
    found = surveyed(moe(tmp_path / "m"), (2,))
    text = cost_lines(found, costs(found, decide(found)), Screen())
    # down's 128 columns are triton: a third of the experts' bytes, and of two of six for FLOPs
    paths = costs(found, decide(found))[2].paths
    assert paths["triton"] == (6 * mxfp4(512, 128), 2 * 2 * 512 * 128)
    # 6 * 65,536 of 1,507,328 values; 2 * 65,536 of the 720,896 that a token passes
    assert " ".join(text[3].split()) == "tp 2 807 kB 801 kB 74% / 82% 26% / 18% +209 kB"
    assert text[-1] == "FLOPs: a token takes 2 routed experts of each MoE layer"


@pytest.mark.parametrize("columns", [24, 30, 47, 60, 80, 120])
@pytest.mark.parametrize("name", MXFP4_FIXTURES)
def test_table_and_paragraph_fit(name: str, columns: int) -> None:
    found = surveyed(FIXTURES / name, (1, 2, 4, 8, 16, 32, 64))
    audit = audited(found)
    screen = Screen(columns=columns, encoding="ascii")
    text = cost_lines(found, audit.costs, screen) + recommendation_lines(audit, screen)
    assert all(cells(line) <= columns for line in text)
    assert "\n".join(text).isascii()


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    linears = {"model.\x1b[31m\u202eé.down_proj": (512, 640)}
    audit = audited(surveyed(write_checkpoint(tmp_path / "m", linears)))
    text = recommend(audit)
    assert text.isprintable()
    assert "\\x1b[31m\\u202eé" in text
    shown = "\n".join(recommendation_lines(audit, Screen(encoding="ascii")))
    assert shown.isascii()
    assert "\\xe9" in shown


# --- the paragraph ------------------------------------------------------------------------------


def test_a_clean_model_needs_few_words(dense: Path) -> None:
    assert recommend(audited(surveyed(dense, (1, 2)))) == (
        "Serve at tp 2: every MXFP4 layer takes the ASM path there, and the fullest rank holds "
        "1.6 MB. `mxfp4prep convert --tp 2` prepares them all for it."
    )


def test_a_larger_clean_degree_than_asked_is_named(dense: Path) -> None:
    assert "The largest degree that puts every layer on ASM is tp 2." in recommend(
        audited(surveyed(dense, (1,)))
    )


def test_what_larger_degrees_cost_is_said(dense: Path) -> None:
    text = recommend(audited(surveyed(dense, (1, 2, 4))))
    assert text.startswith("Serve at tp 2: ")
    assert text.endswith(
        "If that is too much for a rank: at tp 4 it holds 839 kB, and Triton gets 11% of its FLOPs."
    )
    assert "These run on Triton: model.layers.0.self_attn.o_proj (1 layer) at tp 4 " in text
    every = recommend(audited(surveyed(dense, (1, 2, 4, 8))))
    assert "If that is too much for a rank: at tp 8 it holds " in every


def test_without_a_clean_degree_the_best_share_wins(tmp_path: Path) -> None:
    linears = {
        "model.layers.0.mlp.down_proj": (512, 640),
        "model.layers.0.self_attn.o_proj": (512, 1024),
    }
    root = write_checkpoint(tmp_path / "m", linears)
    text = recommend(audited(surveyed(root)))
    # o_proj: 1024 / 8 = 128 columns are 4 of scale; at 1, 2 and 4 it is asm, 1024 / 1664 = 62 %
    assert text.startswith(
        "Of tp 1, 2, 4, 8, tp 4 is best: ASM takes 62% of a rank's MXFP4 FLOPs per token there, "
        "and the fullest rank holds 113 kB. No degree of 1, 2, 4, 8, 16, 32, 64 puts every layer "
        "on ASM. These run on Triton: model.layers.0.mlp.down_proj (1 layer) at tp 1, 2, 4 (20, "
        "10, 5 scale columns, not a multiple of 8). Do not serve at tp 8: these cannot be split: "
        "model.layers.0.mlp.down_proj (1 layer) at tp 8 (no whole 32-groups: 640 / 8 = 80 columns "
        "= 2.5 groups)."
    )
    assert (
        "`mxfp4prep convert --tp 4` stores each layer for its path: Triton gets 38% of a rank's "
        "MXFP4 bytes and 38% of its FLOPs; padding those layers for ASM would add 26.1 kB."
    ) in text
    assert "too much" not in text  # nothing larger is possible
    alone = recommend(audited(surveyed(root, (2,))))
    assert alone.startswith("tp 2 is possible: ASM takes 62% ")
    only = recommend(audited(surveyed(root, (4, 8))))
    assert only.startswith("Of tp 4, 8, only tp 4 is possible: ")


def test_more_of_the_model_on_asm_is_better_than_more_ranks(tmp_path: Path) -> None:
    linears = {
        "model.layers.0.mlp.down_proj": (512, 640),
        "model.layers.0.self_attn.o_proj": (512, 512),  # asm at 1 and 2, triton at 4
    }
    text = recommend(audited(surveyed(write_checkpoint(tmp_path / "m", linears), (1, 2, 4))))
    assert text.startswith("Of tp 1, 2, 4, tp 2 is best: ASM takes 44% ")
    assert "If that is too much for a rank: at tp 4 it holds " in text


def test_the_share_is_of_flops_and_of_bytes_where_there_are_none(tmp_path: Path) -> None:
    text = recommend(audited(surveyed(moe(tmp_path / "m"), (2,))))
    # 26 % of the bytes are triton, 18 % of the FLOPs
    assert text.startswith("tp 2 is possible: ASM takes 82% of a rank's MXFP4 FLOPs per token ")
    assert "Triton gets 26% of a rank's MXFP4 bytes and 18% of its FLOPs;" in text
    drafts = {"mtp.layers.0.mlp.down_proj": (512, 640), "mtp.layers.0.mlp.up_proj": (512, 1280)}
    text = recommend(audited(surveyed(write_checkpoint(tmp_path / "mtp", drafts), (1,))))
    assert text.startswith("tp 1 is possible: ASM takes 67% of a rank's MXFP4 bytes there, ")


def test_nothing_on_asm_is_said_so(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "m", {"model.layers.0.mlp.down_proj": (512, 640)})
    assert "tp 4 is best: every MXFP4 layer runs on Triton there" in recommend(
        audited(surveyed(root))
    )


def test_no_possible_degree_names_a_smaller_one(dense: Path) -> None:
    text = recommend(audited(surveyed(dense, (12, 24))))
    assert text.startswith(
        "Do not serve at tp 12, 24: there some layers cannot be split. "
        "The next smaller degree that splits every layer is tp 8. "
        "The largest degree that puts every layer on ASM is tp 2. These cannot be split: "
    )
    assert "mxfp4prep convert" not in text


def test_the_smaller_degree_is_smaller_than_all_that_were_asked_about(tmp_path: Path) -> None:
    linears = {"model.layers.0.mlp.down_proj": (512, 2080)}
    text = recommend(audited(surveyed(write_checkpoint(tmp_path / "m", linears), (3, 65, 100))))
    assert text.startswith("Of tp 3, 65, 100, only tp 65 is possible")
    text = recommend(audited(surveyed(tmp_path / "m", (3, 100))))
    assert "The next smaller degree that splits every layer is tp 1. " in text
    assert "No degree of 1, 2, 3, 4, 8, 16, 32, 64, 100 puts every layer on ASM." in text
    linears = {"model.layers.0.mlp.down_proj": (512, 2048)}
    text = recommend(audited(surveyed(write_checkpoint(tmp_path / "n", linears), (3, 100))))
    assert "The next smaller degree that splits every layer is tp 2. " in text


def test_a_small_part_that_cannot_be_split_may_be_held_whole(tmp_path: Path) -> None:
    linears = {f"model.layers.{i}.self_attn.o_proj": (512, 2048) for i in range(8)}
    root = write_checkpoint(tmp_path / "s", linears | {"model.layers.0.mlp.down_proj": (512, 160)})
    assert (
        "At tp 2, 4, 8 it takes an engine that holds those layers whole on every rank "
        "(--parallel 'PATTERN=replicated')."
    ) in recommend(audited(surveyed(root)))
    # at 128 ranks nothing can be split
    assert "PATTERN" not in recommend(audited(surveyed(root, (1, 2, 128))))
    root = write_checkpoint(tmp_path / "l", {"model.layers.0.mlp.down_proj": (512, 160)})
    assert "PATTERN" not in recommend(audited(surveyed(root)))


def test_other_deployments_are_named_only_where_they_help(tmp_path: Path) -> None:
    wide = moe(tmp_path / "wide", routed=8)  # down: 256 columns, 128 at 2, attention's o at 4
    text = recommend(audited(surveyed(wide, (1, 2))))
    assert "With expert parallelism (--ep), every layer is on ASM at tp 2." in text
    assert "--sp" not in text
    narrow = moe(tmp_path / "narrow", routed=8, shared=160)
    text = recommend(audited(surveyed(narrow, (1, 2))))
    # width 160 is no multiple of 256, so the shared expert stays apart, and 160 / 2 = 2.5 groups
    assert "Do not serve at tp 2: these cannot be split: model.layers.0.mlp.shared_expert" in text
    assert (
        "With expert parallelism (--ep) or sequence parallelism (--sp), every layer can be split "
        "at tp 2."
    ) in text
    assert "it takes an engine" not in text
    bare = write_checkpoint(
        tmp_path / "bare", {"model.layers.0.mlp.shared_expert.down_proj": (512, 160)}
    )
    assert "With expert parallelism (--ep) or sequence parallelism (--sp), every" in recommend(
        audited(surveyed(bare, (1, 2)))
    )


def test_fusing_a_shared_expert_is_named_where_it_helps(tmp_path: Path) -> None:
    linears = experts(0, 8, 512, 256) | mlp("model.layers.0.mlp.shared_expert", 512, 256)
    root = write_checkpoint(tmp_path / "m", linears)
    apart = Deployment(expert_parallel=True, shared_experts="separate")
    # apart it is cut: 256 / 4 = 64 columns, 2 of scale. Fused it is whole on every rank.
    text = recommend(audited(surveyed(root, (4,), apart)))
    assert (
        "With shared experts fused (--shared-experts auto), every layer is on ASM at tp 4." in text
    )
    text = recommend(audited(surveyed(root, (4,), apart._replace(expert_parallel=False))))
    assert "--shared-experts" not in text
    assert "With expert parallelism (--ep), every layer" not in text


def test_more_ranks_than_experts_are_no_advice(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "m", experts(0, 8, 512, 256))
    text = recommend(audited(surveyed(root, (4, 8, 16), EP)))
    assert text.startswith("Serve at tp 8 with expert parallelism: ")
    assert "ranks have none" not in text
    text = recommend(audited(surveyed(root, (16,), EP)))
    assert text.startswith("Serve at tp 16 with expert parallelism: ")
    assert "There are 8 routed experts, so some of 16 ranks have none." in text


def test_expert_parallelism_is_part_of_the_advice(tmp_path: Path) -> None:
    root = moe(tmp_path / "m", routed=8)
    both = Deployment(expert_parallel=True, sequence_parallel=True)
    assert recommend(audited(surveyed(root, (2,), EP))).startswith(
        "Serve at tp 2 with expert parallelism: "
    )
    assert recommend(audited(surveyed(root, (2,), both))).startswith(
        "Serve at tp 2 with expert parallelism and sequence parallelism: "
    )


def test_unknown_experts_per_token_is_said_where_flops_are(p06: Path, tmp_path: Path) -> None:
    root = moe(tmp_path / "m", num_experts_per_tok=None)
    text = recommend(audited(surveyed(root, (1, 2))))
    assert "since config.json does not say how many a token takes" in text
    assert "config.json" not in recommend(audited(surveyed(root, (1,))))  # no share is quoted
    assert "config.json" not in recommend(audited(surveyed(p06)))


def test_many_families_are_counted_not_listed(tmp_path: Path) -> None:
    linears = {f"model.layers.{i}.part{i}.down_proj": (512, 640 + 256 * i) for i in range(5)}
    text = recommend(audited(surveyed(write_checkpoint(tmp_path / "m", linears), (1,))))
    # the heaviest first
    assert "model.layers.4.part4.down_proj (1 layer)" in text
    assert "model.layers.3.part3.down_proj (1 layer)" in text
    assert "part2" not in text
    assert "; and 3 more layers." in text


def predicted(found: Survey, outcomes: Mapping[int, tuple[str, str]], *, own: bool = False) -> Any:
    made = {
        tp: SimpleNamespace(outcome=outcome, path=None, message=message)
        for tp, (outcome, message) in outcomes.items()
    }
    fine = {tp: SimpleNamespace(outcome="ok", path="asm", message="") for tp in outcomes}
    names = [item.layer.name for item in found.layers]
    return SimpleNamespace(
        engine=SimpleNamespace(name="vllm-0.33", own=own),
        outcomes={name: made if i < 2 else fine for i, name in enumerate(names)},
    )


def test_what_the_engine_does_is_said(dense: Path) -> None:
    found = surveyed(dense)
    outcomes = {
        1: ("ok", ""),
        2: ("crash", "ValueError: no"),
        4: ("corrupt", "wrong scales"),
        8: ("unknown", ""),
    }
    text = recommend(audited(found, predicted(found, outcomes)))
    # 1 and 2 are clean, and the engine can serve 1 as it is
    assert text.startswith(
        "vllm-0.33 with the original checkpoint: it runs at tp 1; it crashes at tp 2 (2 layers, "
        "first model.layers.0.mlp.down_proj: ValueError: no); it answers wrongly without an error "
        "at tp 4 (2 layers, first model.layers.0.mlp.down_proj: wrong scales); it has some layers "
        "at tp 8 of which nothing is known. The rest is about the checkpoint once prepared, which "
        "this engine does not load yet. Serve at tp 1: "
    )


def test_a_runtime_of_its_own_refuses_and_nothing_else_follows(dense: Path) -> None:
    found = surveyed(dense, (1, 2))
    made = predicted(found, {1: ("ok", ""), 2: ("crash", "refused: no")}, own=True)
    assert recommend(audited(found, made)).startswith(
        "vllm-0.33 with the prepared checkpoint: it runs at tp 1; it refuses at tp 2 (2 layers, "
        "first model.layers.0.mlp.down_proj: refused: no). Serve at tp 1: "
    )


def test_a_clean_degree_that_the_engine_spoils_is_no_advice_to_serve(dense: Path) -> None:
    found = surveyed(dense, (1, 2))
    crash = ("crash", "x" * 500)
    text = recommend(audited(found, predicted(found, {1: crash, 2: crash})))
    assert "It runs every layer rightly at none of tp 1, 2. The rest is about" in text
    assert "By its shapes, tp 2 is best: every MXFP4 layer takes the ASM path" in text
    assert "crashes at tp 1, 2 (at tp 1: 2 layers, first " in text
    assert "x" * 117 + "...)" in text
    assert "x" * 118 not in text
    assert "it runs at" not in text
    fine = recommend(audited(found, predicted(found, {1: ("ok", ""), 2: ("ok", "")})))
    assert fine.startswith("vllm-0.33 with the original checkpoint: it runs at tp 1, 2. The rest")
    assert "Serve at tp 2: " in fine
    words = "scales are wrong " * 50
    cut = recommend(audited(found, predicted(found, {1: ("corrupt", words), 2: ("ok", "")})))
    # 117 characters hold six times 17, "scales are", and half a word that is left out
    assert "down_proj: " + "scales are wrong " * 6 + "scales are...)" in cut


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
@pytest.mark.parametrize("name", ["mixed", *MXFP4_FIXTURES])
def test_the_paragraph_never_contradicts_the_decisions(
    mixed: Path, name: str, deployment: Deployment
) -> None:
    root = mixed if name == "mixed" else FIXTURES / name
    every = (1, 2, 3, 4, 6, 8, 16)
    for degrees in (every, every[:1], every[1:3], (3,), (16,), (2, 4)):
        audit = audited(surveyed(root, degrees, deployment))
        text = recommend(audit)
        paths = {tp: {made[tp].path for made in audit.decisions.values()} for tp in degrees}
        clean = [tp for tp in degrees if paths[tp] == {"asm"}]
        stuck = [tp for tp in degrees if "impossible" in paths[tp]]
        serve = re.match(r"Serve at tp (\d+)", text)
        assert (serve is not None) == bool(clean), text
        if serve is not None:
            assert int(serve[1]) == max(clean)
        refused = re.search(r"Do not serve at tp ([\d, ]+):", text)
        assert ([int(tp) for tp in refused[1].split(",")] if refused else []) == stuck, text
        advised = re.search(r"convert --tp (\d+)(?: --ep)?`", text)
        assert (advised is None) == (len(stuck) == len(degrees)), text
        if advised is not None:
            assert int(advised[1]) not in stuck
        for flag, other in (
            ("--ep", deployment._replace(expert_parallel=True)),
            ("--sp", deployment._replace(sequence_parallel=True)),
        ):
            there = surveyed(root, degrees, other)
            now = decide(there)
            for sentence in re.findall(r"With [^.]*\.", text):
                if flag not in sentence:
                    continue
                for fact, allowed in (("is on ASM", {"asm"}), ("be split", {"asm", "triton"})):
                    found = re.search(rf"{fact} at tp ([\d, ]+\d)", sentence)
                    for tp in map(int, found[1].split(",")) if found else ():
                        assert {made[tp].path for made in now.values()} <= allowed, (text, tp)


def test_costs_do_not_depend_on_which_degrees_are_asked_together(mixed: Path) -> None:
    for deployment in DEPLOYMENTS:
        together = costs_of(mixed, (1, 2, 4, 8), deployment)
        for tp, cost in together.items():
            assert costs_of(mixed, (tp,), deployment)[tp] == cost
        assert dataclasses.astuple(together[1])[0] == together[1].rank_nbytes
