"""The table of names and the cuts, on real models at real size, against numbers computed by hand.

Every table below was worked out from the sizes in data/models.json with a pencil: rows and scale
columns (K / 32) of one rank's piece, per degree. Nothing in it comes from the code under test.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter

import pytest
import real_models

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.decisions import decide
from mxfp4prep.deployment import Deployment
from mxfp4prep.parallel import shard
from mxfp4prep.survey import survey

TP = (1, 2, 3, 4, 6, 8, 16, 32, 64)

# One word per degree of TP. "768x128" is ASM. After a colon stands why it is Triton: r, scale rows
# are not whole 32s; c, scale columns are not whole 8s; b, 96 rows. A bare word is impossible: rows
# or cols do not divide by the ranks, or columns per rank are not whole groups of 32.
SHARED_AND_ROUTED_2048 = {
    "gate_proj": "2048x224 1024x224 rows 512x224 rows 256x224 128x224 64x224 32x224",
    "up_proj": "2048x224 1024x224 rows 512x224 rows 256x224 128x224 64x224 32x224",
    "down_proj": "7168x64 7168x32 cols 7168x16 cols 7168x8 7168x4:c 7168x2:c 7168x1:c",
}
DENSE_18432 = {
    "mlp.gate_proj": "18432x224 9216x224 6144x224 4608x224 3072x224 2304x224 1152x224 576x224 "
    "288x224",
    "mlp.up_proj": "18432x224 9216x224 6144x224 4608x224 3072x224 2304x224 1152x224 576x224 "
    "288x224",
    "mlp.down_proj": "7168x576 7168x288 7168x192 7168x144 7168x96 7168x72 7168x36:c 7168x18:c "
    "7168x9:c",
}
DENSE_18432_GROUP = (
    "36864x224 18432x224 12288x224 9216x224 6144x224 4608x224 2304x224 1152x224 576x224"
)
GROUP_2048 = "4096x224 2048x224 rows 1024x224 rows 512x224 256x224 128x224 64x224"


def everywhere(word: str) -> str:
    return " ".join([word] * len(TP))


LAYERS: dict[str, dict[str, tuple[int, str, str]]] = {
    # 128 heads of 128, 8 KV heads; hidden 16384, MLP 53248 = 13 * 4096
    "llama-405b": {
        "self_attn.q_proj": (
            126,
            "qkv",
            "16384x512 8192x512 rows 4096x512 rows 2048x512 1024x512 512x512 256x512",
        ),
        "self_attn.k_proj": (
            126,
            "qkv",
            "1024x512 512x512 rows 256x512 rows 128x512 128x512 128x512 128x512",
        ),
        "self_attn.v_proj": (
            126,
            "qkv",
            "1024x512 512x512 rows 256x512 rows 128x512 128x512 128x512 128x512",
        ),
        "self_attn.o_proj": (
            126,
            "row",
            "16384x512 16384x256 cols 16384x128 cols 16384x64 16384x32 16384x16 16384x8",
        ),
        "mlp.gate_proj": (
            126,
            "merged",
            "53248x512 26624x512 rows 13312x512 rows 6656x512 3328x512 1664x512 832x512",
        ),
        "mlp.up_proj": (
            126,
            "merged",
            "53248x512 26624x512 rows 13312x512 rows 6656x512 3328x512 1664x512 832x512",
        ),
        "mlp.down_proj": (
            126,
            "row",
            "16384x1664 16384x832 cols 16384x416 cols 16384x208 16384x104 16384x52:c 16384x26:c",
        ),
        # 128256 = 2004 * 64: the padded vocabulary is the vocabulary
        "lm_head": (
            1,
            "column",
            "128256x512 64128x512 42752x512 32064x512 21376x512 16032x512 8016x512:r 4008x512:r "
            "2004x512:r",
        ),
    },
    # 40 heads of 128, 8 KV heads; hidden 5120, experts and shared expert 8192
    "llama4-scout": {
        "self_attn.q_proj": (
            48,
            "qkv",
            "5120x160 2560x160 rows 1280x160 rows 640x160 rows rows rows",
        ),
        "self_attn.k_proj": (
            48,
            "qkv",
            "1024x160 512x160 rows 256x160 rows 128x160 128x160 128x160 128x160",
        ),
        "self_attn.v_proj": (
            48,
            "qkv",
            "1024x160 512x160 rows 256x160 rows 128x160 128x160 128x160 128x160",
        ),
        "self_attn.o_proj": (
            48,
            "row",
            "5120x160 5120x80 cols 5120x40 cols 5120x20:c 5120x10:c 5120x5:c groups",
        ),
        **{
            f"feed_forward.{place}.{leaf}": (count, parallel[leaf == "down_proj"], words)
            for place, count, parallel in (
                ("shared_expert", 48, ("merged", "row")),
                ("experts.*", 768, ("expert", "expert")),
            )
            for leaf, words in {
                "gate_proj": "8192x160 4096x160 rows 2048x160 rows 1024x160 512x160 256x160 "
                "128x160",
                "up_proj": "8192x160 4096x160 rows 2048x160 rows 1024x160 512x160 256x160 128x160",
                "down_proj": "5120x256 5120x128 cols 5120x64 cols 5120x32 5120x16 5120x8 5120x4:c",
            }.items()
        },
    },
    # 128 heads; q 1536 and kv 512 + 64 low-rank; per head 128 + 64 (q), 128 + 128 (kv), 128 (o)
    "deepseek-r1": {
        "self_attn.q_a_proj": (61, "replicated", everywhere("1536x224")),
        "self_attn.kv_a_proj_with_mqa": (61, "replicated", everywhere("576x224")),
        "self_attn.q_b_proj": (
            61,
            "column",
            "24576x48 12288x48 rows 6144x48 rows 3072x48 1536x48 768x48 384x48",
        ),
        "self_attn.kv_b_proj": (
            61,
            "column",
            "32768x16 16384x16 rows 8192x16 rows 4096x16 2048x16 1024x16 512x16",
        ),
        "self_attn.o_proj": (
            61,
            "row",
            "7168x512 7168x256 cols 7168x128 cols 7168x64 7168x32 7168x16 7168x8",
        ),
        "mlp.gate_proj": (3, "merged", DENSE_18432["mlp.gate_proj"]),
        "mlp.up_proj": (3, "merged", DENSE_18432["mlp.up_proj"]),
        "mlp.down_proj": (3, "row", DENSE_18432["mlp.down_proj"]),
        "mlp.shared_experts.gate_proj": (58, "merged", SHARED_AND_ROUTED_2048["gate_proj"]),
        "mlp.shared_experts.up_proj": (58, "merged", SHARED_AND_ROUTED_2048["up_proj"]),
        "mlp.shared_experts.down_proj": (58, "row", SHARED_AND_ROUTED_2048["down_proj"]),
        "mlp.experts.*.gate_proj": (14848, "expert", SHARED_AND_ROUTED_2048["gate_proj"]),
        "mlp.experts.*.up_proj": (14848, "expert", SHARED_AND_ROUTED_2048["up_proj"]),
        "mlp.experts.*.down_proj": (14848, "expert", SHARED_AND_ROUTED_2048["down_proj"]),
    },
    # attention is BF16
    "kimi-k2.5": {
        "mlp.gate_proj": (1, "merged", DENSE_18432["mlp.gate_proj"]),
        "mlp.up_proj": (1, "merged", DENSE_18432["mlp.up_proj"]),
        "mlp.down_proj": (1, "row", DENSE_18432["mlp.down_proj"]),
        "mlp.shared_experts.gate_proj": (60, "merged", SHARED_AND_ROUTED_2048["gate_proj"]),
        "mlp.shared_experts.up_proj": (60, "merged", SHARED_AND_ROUTED_2048["up_proj"]),
        "mlp.shared_experts.down_proj": (60, "row", SHARED_AND_ROUTED_2048["down_proj"]),
        "mlp.experts.*.gate_proj": (23040, "expert", SHARED_AND_ROUTED_2048["gate_proj"]),
        "mlp.experts.*.up_proj": (23040, "expert", SHARED_AND_ROUTED_2048["up_proj"]),
        "mlp.experts.*.down_proj": (23040, "expert", SHARED_AND_ROUTED_2048["down_proj"]),
    },
    # 64 heads of 128, 4 KV heads; hidden 4096, experts 1536
    "qwen3-235b": {
        "self_attn.q_proj": (
            94,
            "qkv",
            "8192x128 4096x128 rows 2048x128 rows 1024x128 512x128 256x128 128x128",
        ),
        "self_attn.k_proj": (
            94,
            "qkv",
            "512x128 256x128 rows 128x128 rows 128x128 128x128 128x128 128x128",
        ),
        "self_attn.v_proj": (
            94,
            "qkv",
            "512x128 256x128 rows 128x128 rows 128x128 128x128 128x128 128x128",
        ),
        "self_attn.o_proj": (
            94,
            "row",
            "4096x256 4096x128 cols 4096x64 cols 4096x32 4096x16 4096x8 4096x4:c",
        ),
        "mlp.experts.*.gate_proj": (
            12032,
            "expert",
            "1536x128 768x128 512x128 384x128 256x128 192x128 96x128:b 48x128:r 24x128:r",
        ),
        "mlp.experts.*.up_proj": (
            12032,
            "expert",
            "1536x128 768x128 512x128 384x128 256x128 192x128 96x128:b 48x128:r 24x128:r",
        ),
        "mlp.experts.*.down_proj": (
            12032,
            "expert",
            "4096x48 4096x24 4096x16 4096x12:c 4096x8 4096x6:c 4096x3:c groups groups",
        ),
    },
    # 16 heads of 2 * 256 (output gate), 2 KV heads of 256; 16 key heads of 128 + 128 + 256 + 256
    "qwen3-next": {
        "self_attn.q_proj": (
            12,
            "qkv",
            "8192x64 4096x64 rows 2048x64 rows 1024x64 512x64 rows rows",
        ),
        "self_attn.k_proj": (
            12,
            "qkv",
            "512x64 256x64 rows 256x64 256x64 256x64 256x64 256x64 256x64",
        ),
        "self_attn.v_proj": (
            12,
            "qkv",
            "512x64 256x64 rows 256x64 256x64 256x64 256x64 256x64 256x64",
        ),
        "self_attn.o_proj": (
            12,
            "row",
            "2048x128 2048x64 cols 2048x32 cols 2048x16 2048x8 2048x4:c 2048x2:c",
        ),
        "linear_attn.in_proj_qkvz": (
            36,
            "column",
            "12288x64 6144x64 rows 3072x64 rows 1536x64 768x64 rows rows",
        ),
        "linear_attn.in_proj_ba": (
            36,
            "column",
            "64x64 32x64 rows 16x64:r rows 8x64:r 4x64:r rows rows",
        ),
        "linear_attn.out_proj": (
            36,
            "row",
            "2048x128 2048x64 cols 2048x32 cols 2048x16 2048x8 2048x4:c 2048x2:c",
        ),
        **{
            f"mlp.{place}.{leaf}": (count, parallel[leaf == "down_proj"], words)
            for place, count, parallel in (
                ("shared_expert", 48, ("merged", "row")),
                ("experts.*", 24576, ("expert", "expert")),
            )
            for leaf, words in {
                "gate_proj": "512x64 256x64 rows 128x64 rows 64x64 32x64 16x64:r 8x64:r",
                "up_proj": "512x64 256x64 rows 128x64 rows 64x64 32x64 16x64:r 8x64:r",
                "down_proj": "2048x16 2048x8 cols 2048x4:c cols 2048x2:c 2048x1:c groups groups",
            }.items()
        },
    },
    # q and k: 16 key heads of 128 each; v and z: 48 value heads of 128; hidden 2560, experts 640
    "qwen3.8-flash-next": {
        "linear_attn.in_proj_qkv": (
            36,
            "merged",
            "10240x80 5120x80 rows 2560x80 rows 1280x80 640x80 rows rows",
        ),
        "linear_attn.in_proj_z": (
            36,
            "merged",
            "6144x80 3072x80 2048x80 1536x80 1024x80 768x80 384x80 rows rows",
        ),
        "linear_attn.in_proj_b": (
            36,
            "merged",
            "48x80:r 24x80:r 16x80:r 12x80:r 8x80:r 6x80:r 3x80:r rows rows",
        ),
        "linear_attn.in_proj_a": (
            36,
            "merged",
            "48x80:r 24x80:r 16x80:r 12x80:r 8x80:r 6x80:r 3x80:r rows rows",
        ),
        "linear_attn.out_proj": (
            36,
            "row",
            "2560x192 2560x96 2560x64 2560x48 2560x32 2560x24 2560x12:c 2560x6:c 2560x3:c",
        ),
        **{
            f"mlp.{place}.{leaf}": (count, parallel[leaf == "down_proj"], words)
            for place, count, parallel in (
                ("shared_expert", 48, ("merged", "row")),
                ("experts.*", 24576, ("expert", "expert")),
            )
            for leaf, words in {
                "gate_proj": "640x80 320x80 rows 160x80 rows 80x80:r 40x80:r 20x80:r 10x80:r",
                "up_proj": "640x80 320x80 rows 160x80 rows 80x80:r 40x80:r 20x80:r 10x80:r",
                "down_proj": "2560x20:c 2560x10:c cols 2560x5:c cols groups groups groups groups",
            }.items()
        },
    },
    # attention is BF16; hidden 3072, experts 1536
    "minimax-m2.1": {
        "block_sparse_moe.experts.*.w1": (
            15872,
            "expert",
            "1536x96 768x96 512x96 384x96 256x96 192x96 96x96:b 48x96:r 24x96:r",
        ),
        "block_sparse_moe.experts.*.w3": (
            15872,
            "expert",
            "1536x96 768x96 512x96 384x96 256x96 192x96 96x96:b 48x96:r 24x96:r",
        ),
        "block_sparse_moe.experts.*.w2": (
            15872,
            "expert",
            "3072x48 3072x24 3072x16 3072x12:c 3072x8 3072x6:c 3072x3:c groups groups",
        ),
    },
    # attention is BF16; 2880 pairs of a gate and an up row, 2880 columns = 90 groups
    "gpt-oss-120b": {
        "mlp.experts.*.gate_up_proj": (
            4608,
            "expert",
            "5760x90:c 2880x90:c 1920x90:c 1440x90:c 960x90:c 720x90:rc 360x90:rc 180x90:rc "
            "90x90:rc",
        ),
        "mlp.experts.*.down_proj": (
            4608,
            "expert",
            "2880x90:c 2880x45:c 2880x30:c groups 2880x15:c groups groups groups groups",
        ),
    },
    # 64 heads of 128, 8 KV heads; hidden 5120, MLP 25600
    "qwen3-32b": {
        "self_attn.q_proj": (
            64,
            "qkv",
            "8192x160 4096x160 rows 2048x160 rows 1024x160 512x160 256x160 128x160",
        ),
        "self_attn.k_proj": (
            64,
            "qkv",
            "1024x160 512x160 rows 256x160 rows 128x160 128x160 128x160 128x160",
        ),
        "self_attn.v_proj": (
            64,
            "qkv",
            "1024x160 512x160 rows 256x160 rows 128x160 128x160 128x160 128x160",
        ),
        "self_attn.o_proj": (
            64,
            "row",
            "5120x256 5120x128 cols 5120x64 cols 5120x32 5120x16 5120x8 5120x4:c",
        ),
        "mlp.gate_proj": (
            64,
            "merged",
            "25600x160 12800x160 rows 6400x160 rows 3200x160 1600x160 800x160 400x160:r",
        ),
        "mlp.up_proj": (
            64,
            "merged",
            "25600x160 12800x160 rows 6400x160 rows 3200x160 1600x160 800x160 400x160:r",
        ),
        "mlp.down_proj": (
            64,
            "row",
            "5120x800 5120x400 cols 5120x200 cols 5120x100:c 5120x50:c 5120x25:c groups",
        ),
    },
}
"""model -> layer -> (how many, parallel kind, per degree)."""

GROUPS: dict[str, dict[str, tuple[int, str]]] = {
    "llama-405b": {
        "self_attn.qkv_proj": (
            126,
            "18432x512 9216x512 rows 4608x512 rows 2304x512 1280x512 768x512 512x512",
        ),
        "mlp.gate_up_proj": (
            126,
            "106496x512 53248x512 rows 26624x512 rows 13312x512 6656x512 3328x512 1664x512",
        ),
    },
    "llama4-scout": {
        "self_attn.qkv_proj": (48, "7168x160 3584x160 rows 1792x160 rows 896x160 rows rows rows"),
        "feed_forward.shared_expert.gate_up_proj": (
            48,
            "16384x160 8192x160 rows 4096x160 rows 2048x160 1024x160 512x160 256x160",
        ),
        "feed_forward.experts.*.gate_up_proj": (
            768,
            "16384x160 8192x160 rows 4096x160 rows 2048x160 1024x160 512x160 256x160",
        ),
    },
    "deepseek-r1": {
        "self_attn.fused_qkv_a_proj": (61, everywhere("2112x224")),
        "mlp.gate_up_proj": (3, DENSE_18432_GROUP),
        "mlp.shared_experts.gate_up_proj": (58, GROUP_2048),
        "mlp.experts.*.gate_up_proj": (14848, GROUP_2048),
    },
    "kimi-k2.5": {
        "mlp.gate_up_proj": (1, DENSE_18432_GROUP),
        "mlp.shared_experts.gate_up_proj": (60, GROUP_2048),
        "mlp.experts.*.gate_up_proj": (23040, GROUP_2048),
    },
    "qwen3-235b": {
        "self_attn.qkv_proj": (
            94,
            "9216x128 4608x128 rows 2304x128 rows 1280x128 768x128 512x128 384x128",
        ),
        "mlp.experts.*.gate_up_proj": (
            12032,
            "3072x128 1536x128 1024x128 768x128 512x128 384x128 192x128 96x128:b 48x128:r",
        ),
    },
    "qwen3-next": {
        "self_attn.qkv_proj": (12, "9216x64 4608x64 rows 2560x64 rows 1536x64 1024x64 rows rows"),
        "mlp.shared_expert.gate_up_proj": (
            48,
            "1024x64 512x64 rows 256x64 rows 128x64 64x64 32x64 16x64:r",
        ),
        "mlp.experts.*.gate_up_proj": (
            24576,
            "1024x64 512x64 rows 256x64 rows 128x64 64x64 32x64 16x64:r",
        ),
    },
    "qwen3.8-flash-next": {
        "linear_attn.in_proj_qkvz": (
            36,
            "16384x80 8192x80 rows 4096x80 rows 2048x80 1024x80 rows rows",
        ),
        "linear_attn.in_proj_ba": (
            36,
            "96x80:b 48x80:r 32x80 24x80:r 16x80:r 12x80:r 6x80:r rows rows",
        ),
        "mlp.shared_expert.gate_up_proj": (
            48,
            "1280x80 640x80 rows 320x80 rows 160x80 80x80:r 40x80:r 20x80:r",
        ),
        "mlp.experts.*.gate_up_proj": (
            24576,
            "1280x80 640x80 rows 320x80 rows 160x80 80x80:r 40x80:r 20x80:r",
        ),
    },
    "minimax-m2.1": {
        "block_sparse_moe.experts.*.w13": (
            15872,
            "3072x96 1536x96 1024x96 768x96 512x96 384x96 192x96 96x96:b 48x96:r",
        ),
    },
    "gpt-oss-120b": {},
    "qwen3-32b": {
        "self_attn.qkv_proj": (
            64,
            "10240x160 5120x160 rows 2560x160 rows 1280x160 768x160 512x160 384x160",
        ),
        "mlp.gate_up_proj": (
            64,
            "51200x160 25600x160 rows 12800x160 rows 6400x160 3200x160 1600x160 800x160",
        ),
    },
}
"""model -> fused projection -> (how many, per degree)."""

LETTERS = {"scale_rows": "r", "scale_cols": "c", "bad_tile": "b"}
WORDS = {"split_rows": "rows", "split_cols": "cols", "split_groups": "groups"}


@pytest.fixture(scope="module", params=list(real_models.MODELS))
def real(request, tmp_path_factory):
    """(key, survey) of one model after the other; the files go when the headers have been read."""
    root = tmp_path_factory.mktemp("real") / request.param
    real_models.write(root, real_models.MODELS[request.param])
    surveyed = survey(open_checkpoint(root), TP)
    shutil.rmtree(root)
    return request.param, surveyed


def only(*keys: str):
    return pytest.mark.parametrize("real", keys, indirect=True)


def kind(name: str) -> str:
    """A module's name without what stands before the layer's number, expert numbers as *."""
    return re.sub(r"\.\d+(?=\.)", ".*", name).rpartition("layers.*.")[2]


def words(verdicts) -> str:
    found = []
    for tp in TP:
        verdict = verdicts[tp]
        if verdict.path == "impossible":
            found.append(WORDS[verdict.reasons[0]])
            continue
        rows, columns = verdict.scale_shard
        why = "".join(LETTERS[reason] for reason in verdict.reasons)
        found.append(f"{rows}x{columns}" + (f":{why}" if verdict.path == "triton" else ""))
    return " ".join(found)


def test_every_layer_is_cut_as_computed_by_hand(real):
    key, surveyed = real
    expected = LAYERS[key]
    spelled: dict[int, str] = {}
    found = Counter()
    for item in surveyed.layers:
        # layers that are alike share one mapping of verdicts
        at = id(item.verdicts)
        if at not in spelled:
            spelled[at] = words(item.verdicts)
        found[kind(item.layer.name), item.role.parallel, spelled[at]] += 1
    assert found == {(name, how, cut): count for name, (count, how, cut) in expected.items()}


def test_every_fused_projection_is_cut_as_computed_by_hand(real):
    key, surveyed = real
    assert not any(group.mixed for group in surveyed.groups)
    spelled: dict[int, str] = {}
    found = Counter()
    for group in surveyed.groups:
        at = id(group.verdicts)
        if at not in spelled:
            spelled[at] = words(group.verdicts)
        found[kind(group.name), spelled[at]] += 1
    assert found == {(name, cut): count for name, (count, cut) in GROUPS[key].items()}


def test_checkpoints_have_as_many_layers_as_the_models(real):
    """Guards the factory: the numbers in models.json, part by part."""
    key, surveyed = real
    model = real_models.MODELS[key]
    quantized = 0
    for layer in real_models.FACTS[model.fact]["layers"]:
        if layer["quantized"] is not False:
            split = 1 if key == "gpt-oss-120b" else len(layer.get("parts", [1]))
            quantized += split * layer["count"]
    assert len(surveyed.layers) == quantized
    topology = surveyed.topology
    assert topology.layers == model.dims["num_hidden_layers"]
    assert topology.hidden == model.dims["hidden_size"]
    assert topology.experts == model.experts


def paths(surveyed, ending: str) -> dict[int, set[str]]:
    """degree -> paths of all layers whose names end so, their groups counted in."""
    decided = decide(surveyed)
    chosen = [verdicts for name, verdicts in decided.items() if name.endswith(ending)]
    assert chosen
    return {tp: {verdicts[tp].path for verdicts in chosen} for tp in TP}


@only("llama-405b")
def test_llama_405b_is_clean_at_1_to_8(real):
    found = paths(real[1], "")
    assert [found[tp] for tp in (1, 2, 4, 8)] == [{"asm"}] * 4
    assert found[3] == {"impossible", "asm"}  # the head alone divides by 3


@only("qwen3-235b")
def test_qwen3_235b_experts_down_proj_misses_at_4_and_8(real):
    found = paths(real[1], ".down_proj")
    assert [found[tp] for tp in (1, 2, 4, 8)] == [{"asm"}, {"asm"}, {"triton"}, {"triton"}]
    assert paths(real[1], ".gate_proj")[8] == {"asm"}
    # 96 rows per rank: legal for the scale's layout, wrong in the kernel
    assert paths(real[1], ".gate_proj")[16] == {"triton"}


@only("qwen3.8-flash-next")
def test_p01_qwen3_8_down_proj_misses_everywhere_and_cannot_split_at_8(real):
    for place in (".shared_expert.down_proj", ".experts.0.down_proj"):
        found = paths(real[1], place)
        assert [found[tp] for tp in (1, 2, 4)] == [{"triton"}] * 3
        assert found[8] == {"impossible"}
    verdict = next(
        item.verdicts for item in real[1].layers if item.layer.name.endswith("expert.down_proj")
    )
    assert (verdict[1].scale_shard, verdict[1].reasons) == ((2560, 20), ("scale_cols",))
    assert "640 / 8 = 80 columns = 2.5 groups" in verdict[8].detail


@only("qwen3.8-flash-next")
def test_p02_p03_small_projections_of_linear_attention_never_take_asm(real):
    """As stored 48 rows; fused 96 rows, which is the bad tile; at tp 3 two times 16 make 32."""
    found = paths(real[1], (".in_proj_b", ".in_proj_a"))
    assert [found[tp] for tp in TP] == [{"triton"}] * 7 + [{"impossible"}] * 2


@only("gpt-oss-120b")
def test_gpt_oss_experts_miss_everywhere_and_cannot_split_from_4(real):
    found = paths(real[1], "")
    assert not any("asm" in at for at in found.values())
    assert paths(real[1], ".gate_up_proj")[64] == {"triton"}
    down = paths(real[1], ".down_proj")
    assert {tp: down[tp] for tp in (1, 2, 3, 4, 6, 8)} == {
        1: {"triton"},
        2: {"triton"},
        3: {"triton"},
        4: {"impossible"},  # 2880 / 4 = 720 = 22.5 groups
        6: {"triton"},  # 2880 / 6 = 480 = 15 groups
        8: {"impossible"},
    }


@only("minimax-m2.1")
def test_p06_minimax_experts_miss_at_4_and_8(real):
    found = paths(real[1], ".w2")
    assert [found[tp] for tp in (1, 2, 4, 8)] == [{"asm"}, {"asm"}, {"triton"}, {"triton"}]
    assert paths(real[1], (".w1", ".w3"))[8] == {"asm"}


@only("qwen3-32b")
def test_qwen3_32b_down_proj_misses_at_8_alone(real):
    found = paths(real[1], "")
    assert [found[tp] for tp in (1, 2, 4)] == [{"asm"}] * 3
    assert paths(real[1], ".down_proj")[8] == {"triton"}
    assert paths(real[1], ".o_proj")[8] == {"asm"}


@only("qwen3-32b")
def test_a_fused_projection_that_would_do_does_not_lift_its_parts(real):
    """400 rows each are no whole 32s, 800 together are."""
    group = next(item for item in real[1].groups if item.name.endswith("gate_up_proj"))
    assert group.verdicts[64].path == "asm"
    assert paths(real[1], ".gate_proj")[64] == {"triton"}


@only("deepseek-r1", "kimi-k2.5")
def test_deepseek_and_kimi_are_clean_up_to_8_and_p08_experts_miss_at_16(real):
    found = paths(real[1], "")
    assert [found[tp] for tp in (1, 2, 4, 8)] == [{"asm"}] * 4
    assert paths(real[1], ".experts.0.down_proj")[16] == {"triton"}
    assert paths(real[1], ".shared_experts.down_proj")[16] == {"triton"}


@only("llama4-scout")
def test_llama4_o_proj_misses_at_8_and_16_ranks_have_too_few_heads(real):
    assert paths(real[1], ".o_proj")[8] == {"triton"}  # 5120 / 8 = 640 = 20 groups
    assert paths(real[1], ".q_proj")[16] == {"impossible"}


@only("kimi-k2.5", "minimax-m2.1", "gpt-oss-120b")
def test_attention_that_is_not_quantized_is_no_layer(real):
    key, surveyed = real
    attention = {"kimi-k2.5": 61 * 5, "minimax-m2.1": 62 * 4, "gpt-oss-120b": 36 * 4}
    others = surveyed.classified.others
    found = [name for name in others if ".self_attn." in name]
    assert len(found) == attention[key]
    assert {others[name] for name in found} == {"bf16"}


@only("llama-405b", "qwen3-235b")
def test_p13_ranks_that_share_a_kv_head_are_counted(real):
    """8 and 4 KV heads: how many ranks hold each, at the degrees that have more ranks."""
    key, surveyed = real
    note = next(item for item in surveyed.findings if item.code == "kv_replicated")
    shares = {"llama-405b": "2 ranks at tp 16, 4", "qwen3-235b": "2 ranks at tp 8, 4"}
    assert shares[key] in note.message
    item = next(item for item in surveyed.layers if item.layer.name.endswith("k_proj"))
    n, k = item.layer.n, item.layer.k
    starts = [shard(item.cut, n, k, 16, rank).rows[0][0] for rank in (0, 1, 2, 5, 15)]
    assert (
        starts
        == {
            "llama-405b": [0, 0, 128, 256, 896],  # two ranks a head
            "qwen3-235b": [0, 0, 0, 128, 384],  # four ranks a head
        }[key]
    )


@only("qwen3.8-flash-next")
def test_blocks_of_a_fused_tensor_are_cut_apart(real):
    """q | k | v of 2048, 2048 and 6144 rows: rank 3 of 8 has 256, 256 and 768 of them."""
    item = next(item for item in real[1].layers if item.layer.name.endswith("in_proj_qkv"))
    piece = shard(item.cut, 10240, 2560, 8, 3)
    assert piece.rows == ((768, 1024), (2816, 3072), (6400, 7168))


@only("qwen3-next")
def test_what_belongs_to_a_key_head_stays_together(real):
    """768 rows of in_proj_qkvz and 4 of in_proj_ba per key head, in one run."""
    items = {item.layer.name.rpartition(".")[2]: item for item in real[1].layers}
    assert shard(items["in_proj_qkvz"].cut, 12288, 2048, 8, 3).rows == ((4608, 6144),)
    assert shard(items["in_proj_ba"].cut, 64, 2048, 8, 3).rows == ((24, 32),)


@only("gpt-oss-120b")
def test_gate_and_up_rows_that_alternate_stay_pairs(real):
    item = next(item for item in real[1].layers if item.layer.name.endswith("gate_up_proj"))
    assert item.layer.gate_up == "interleaved"
    assert item.layer.bias == f"{item.layer.name}.bias"
    assert shard(item.cut, 5760, 2880, 64, 1).rows == ((90, 180),)


def test_gpt_oss_as_two_banks_is_cut_as_expert_by_expert(tmp_path):
    root = tmp_path / "stacked"
    real_models.write(root, real_models.MODELS["gpt-oss-120b"], stacked=True)
    surveyed = survey(open_checkpoint(root), TP)
    assert len(surveyed.layers) == 2 * 36
    expected = LAYERS["gpt-oss-120b"]
    for item in surveyed.layers:
        leaf = item.layer.name.rpartition(".")[2]
        assert words(item.verdicts) == expected[f"mlp.experts.*.{leaf}"][2]
        assert (item.layer.experts, item.layer.kind) == (128, "expert")
        assert item.layer.bias == f"{item.layer.name}_bias"
    assert {item.layer.gate_up for item in surveyed.layers} == {"interleaved", None}


def test_whole_experts_are_judged_whole_at_every_degree(tmp_path):
    """With expert parallelism nothing of an expert is cut; attention still is."""
    root = tmp_path / "ep"
    real_models.write(root, real_models.MODELS["qwen3-235b"])
    surveyed = survey(open_checkpoint(root), TP, deployment=Deployment(expert_parallel=True))
    found = {kind(item.layer.name): words(item.verdicts) for item in surveyed.layers}
    assert found["mlp.experts.*.down_proj"] == everywhere("4096x48")
    assert found["mlp.experts.*.up_proj"] == everywhere("1536x128")
    assert found["self_attn.q_proj"] == LAYERS["qwen3-235b"]["self_attn.q_proj"][2]
    fused = {kind(group.name): words(group.verdicts) for group in surveyed.groups}
    assert fused["mlp.experts.*.gate_up_proj"] == everywhere("3072x128")


def test_the_facts_are_those_that_were_collected():
    """Ten models, each with its sources."""
    assert len(real_models.FACTS) == len(real_models.MODELS) == 10
    assert sorted(model.fact for model in real_models.MODELS.values()) == list(range(10))
    for fact in real_models.FACTS:
        assert fact["source_urls"]
        assert all(url.startswith("https://") for url in fact["source_urls"])
