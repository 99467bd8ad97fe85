"""What an audit says about a checkpoint that loads but may not serve well: an example for each.

Checkpoints here are headers of real shapes over holes, opened from disk like any other.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from quark_factory import FP4_INPUT, FP4_WEIGHT, FP8_WEIGHT, quant_config, quant_layer

from mxfp4prep.alignment import HAZARDS
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.deployment import Deployment
from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.findings import Finding
from mxfp4prep.plan import make_plan
from mxfp4prep.quark.remarks import TEXTS
from mxfp4prep.survey import LayerSurvey, Survey, survey

Rows = dict[str, tuple[str, tuple[int, ...]]]
ITEMSIZE = {"U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "I64": 8}

LAYER = "model.layers.0"
MLP = f"{LAYER}.mlp"
ATTN = f"{LAYER}.self_attn"
MOE: dict[str, Any] = {"model_type": "qwen3_moe"}


def fp4(name: str, n: int = 512, k: int = 512, ending: str = ".weight_scale") -> Rows:
    return {f"{name}.weight": ("U8", (n, k // 2)), f"{name}{ending}": ("U8", (n, -(-k // 32)))}


def bf16(name: str, *shape: int) -> Rows:
    return {f"{name}.weight": ("BF16", shape or (512, 512))}


def surveyed(
    root: Path,
    rows: Rows,
    config: dict[str, Any] | None = None,
    tp: tuple[int, ...] = (1, 2, 4, 8),
    **section: Any,
) -> Survey:
    """The survey of a checkpoint in `root` whose one shard is `rows` over a hole."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in rows.items():
        end = offset + prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    root.mkdir(parents=True, exist_ok=True)
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    whole = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "quantization_config": quant_config(**{"exclude": [], **section}),
        **(config or {}),
    }
    (root / "config.json").write_text(json.dumps(whole))
    return survey(open_checkpoint(root), tp)


def the(found: Survey, code: str) -> Finding:
    """The one finding with `code`."""
    hits = [finding for finding in found.findings if finding.code == code]
    assert len(hits) == 1, [finding.code for finding in found.findings]
    return hits[0]


def codes(found: Survey) -> set[str]:
    """Every code but those that each W4A4 or W4A16 checkpoint has, and unknown names."""
    return {finding.code for finding in found.findings} - {
        "activation_rounding",
        "weight_only",
        "unknown_parallel",
    }


def layer(found: Survey, name: str) -> LayerSurvey:
    (item,) = [item for item in found.layers if item.layer.name == name]
    return item


# Every remark with an exact example: code -> tensors, config, quantization_config, severity,
# place, and words that the sentence must hold.

W4A16 = quant_layer(FP4_WEIGHT, None)
W8 = quant_layer(FP8_WEIGHT, None)
W4A8 = quant_layer(FP4_WEIGHT, {**FP8_WEIGHT, "qscheme": "per_tensor", "ch_axis": None})
TIED = {"tie_word_embeddings": True}
DRAFTS = {"num_nextn_predict_layers": 1}
BASE = fp4(f"{MLP}.up_proj")


def rounded(mode: str | None) -> dict[str, Any]:
    return quant_layer(FP4_WEIGHT, {**FP4_INPUT, "scale_calculation_mode": mode})


EXAMPLES: dict[str, tuple[Rows, dict[str, Any], dict[str, Any], str, str, list[str]]] = {
    "tied_quantized_head": (
        {**BASE, **fp4("lm_head"), **bf16("model.embed_tokens")},
        TIED,
        {},
        "error",
        "lm_head",
        ["tie_word_embeddings to false", "1 place: lm_head"],
    ),
    "quantized_head": (
        {**BASE, **fp4("lm_head"), **bf16("model.embed_tokens")},
        {},
        {},
        "note",
        "lm_head",
        ["like any column layer", "multiple of 64", "vLLM issue 57532"],
    ),
    "activation_rounding": (
        {**BASE, **fp4(f"{MLP}.down_proj")},
        {},
        {},
        "note",
        f"{MLP}.up_proj",
        ["scale_calculation_mode even", "up by default", "0.1.16", "1601", "2 layers"],
    ),
    "weight_only": (
        {**BASE, **fp4(f"{MLP}.down_proj")},
        {},
        {"layer_quant_config": {"*up_proj": W4A16}},
        "note",
        f"{MLP}.up_proj",
        ["FP4 inputs", "vLLM decodes", "1 layer"],
    ),
    "rounding_unstated": (
        BASE,
        {},
        {"global_quant_config": rounded(None)},
        "note",
        f"{MLP}.up_proj",
        ["no scale_calculation_mode", "even"],
    ),
    "rounding_not_even": (
        BASE,
        {},
        {"global_quant_config": rounded("floor")},
        "warning",
        f"{MLP}.up_proj (floor)",
        ["another scale_calculation_mode than even", "(floor)"],
    ),
    "missing_input_scale": (
        BASE,
        {},
        {"global_quant_config": W4A8},
        "error",
        f"{MLP}.up_proj",
        ["no input_scale is stored"],
    ),
    "unexpected_input_scale": (
        {**BASE, f"{MLP}.up_proj.input_scale": ("F32", ())},
        {},
        {},
        "warning",
        f"{MLP}.up_proj",
        ["declares no static activations"],
    ),
    "pattern_order": (
        BASE,
        {},
        {"layer_quant_config": {"*up_proj": W8, "model.*": W4A16}},
        "warning",
        f"{MLP}.up_proj",
        ["contradicts the stored tensors"],
    ),
    "overlapping_patterns": (
        BASE,
        {},
        {"layer_quant_config": {"*up_proj": W4A16, "model.*": quant_layer()}},
        "note",
        f"{MLP}.up_proj",
        ["the first in file order decides"],
    ),
    "config_disagrees": (
        {**BASE, f"{MLP}.down_proj.weight": ("F8_E4M3", (512, 512))},
        {},
        {},
        "warning",
        f"{MLP}.down_proj",
        ["another dtype than the config says"],
    ),
    "unquantized": (
        {**BASE, **bf16(f"{ATTN}.o_proj")},
        {},
        {},
        "note",
        f"{ATTN}.o_proj",
        ["not excluded by the config", "builds a linear among them as FP4"],
    ),
    "unquantized_router": (
        {**BASE, **bf16(f"{MLP}.gate", 8, 512)},
        {},
        {},
        "note",
        f"{MLP}.gate",
        ["as they should be", "cannot load them", "PR 48606"],
    ),
    "unquantized_experts": (
        {**BASE, f"{MLP}.experts.gate_up_proj": ("BF16", (8, 1024, 512))},
        {},
        {},
        "warning",
        f"{MLP}.experts.gate_up_proj (bf16)",
        ["split into linears first", "8,388,608 bytes in 1 place"],
    ),
    "quantized_router": (
        {**BASE, **fp4(f"{MLP}.gate", 8, 512)},
        {},
        {},
        "warning",
        f"{MLP}.gate",
        ["which experts are chosen", "cannot load it"],
    ),
    "quantized_convolution": (
        {
            **BASE,
            f"{LAYER}.linear_attn.conv1d.weight": ("U8", (96, 1, 2)),
            f"{LAYER}.linear_attn.conv1d.weight_scale": ("U8", (96, 1)),
        },
        {},
        {},
        "warning",
        f"{LAYER}.linear_attn.conv1d",
        ["no matrix", "build these unquantized"],
    ),
    "exclude_parent": (
        BASE,
        {},
        {"exclude": [LAYER]},
        "warning",
        f"{MLP}.up_proj",
        ["names a module above"],
    ),
    "mtp_layers": (
        {**BASE, **bf16("mtp.fc")},
        {},
        {"exclude": ["mtp.fc"]},
        "note",
        "mtp.fc.weight",
        ["--speculative-config", '"method": "mtp"', "--speculative-algorithm EAGLE"],
    ),
    "mtp_mixed": (
        {
            **BASE,
            **bf16(f"{MLP}.gate", 8, 512),
            **bf16("mtp.fc"),
            **bf16("mtp.norm", 512),
            **fp4("mtp.layers.0.mlp.up_proj"),
        },
        {},
        {"exclude": ["mtp.fc", f"{MLP}.gate"]},
        "note",
        "mtp.fc (bf16)",
        ["quantized in part", "1 place: mtp.fc (bf16)"],
    ),
    "mtp_unlisted": (
        {**BASE, **bf16("model.layers.4.eh_proj"), **bf16("model.layers.4.mlp.up_proj")},
        DRAFTS,
        {},
        "warning",
        "model.layers.4.eh_proj",
        ["build them as FP4", "speculative decoding", "2 places"],
    ),
    "partial_experts": (
        {**BASE, **fp4(f"{MLP}.experts.0.up_proj"), **bf16(f"{MLP}.experts.1.up_proj")},
        {},
        {"exclude": [f"{MLP}.experts.1.up_proj"]},
        "warning",
        f"{MLP}.experts (bf16, w4a4)",
        ["one excluded expert as all of them"],
    ),
    "shared_expert_not_fusable": (
        {**fp4(f"{MLP}.experts.0.up_proj"), **bf16(f"{MLP}.shared_expert.up_proj")},
        {},
        {"exclude": ["*shared_expert.*"]},
        "warning",
        f"{MLP} (bf16 beside w4a4)",
        ["cannot be fused into their bank"],
    ),
    "quantized_embedding": (
        {**BASE, **fp4("model.embed_tokens")},
        {},
        {},
        "warning",
        "model.embed_tokens",
        ["look its rows up"],
    ),
    "short_group": (
        fp4(f"{MLP}.up_proj", k=80),
        {},
        {},
        "note",
        f"{MLP}.up_proj",
        ["the last scale group is short"],
    ),
    "scale_spelling": (
        fp4(f"{MLP}.up_proj", ending=".weight_quantizer.scale"),
        {},
        {},
        "note",
        f"{MLP}.up_proj",
        ["Quark 0.11"],
    ),
    "kv_scales": (
        {**BASE, f"{ATTN}.k_scale": ("F32", ()), f"{ATTN}.v_proj.output_scale": ("F32", ())},
        {},
        {},
        "note",
        f"{ATTN}.k_scale",
        ["--kv-cache-dtype fp8", "scale 1.0 without an error", "54623", "2 places"],
    ),
    "rotation": (
        {**BASE, f"{MLP}.up_proj.input_rotation": ("F32", (32, 32))},
        {},
        {},
        "warning",
        f"{MLP}.up_proj.input_rotation",
        ["rotated at run time"],
    ),
    "scale_without_weight": (
        {**BASE, f"{MLP}.x.weight_scale": ("F32", ())},
        {},
        {},
        "warning",
        f"{MLP}.x.weight_scale",
        ["without a weight"],
    ),
    "scale_beside_float": (
        {**BASE, **bf16(f"{MLP}.x"), f"{MLP}.x.weight_scale": ("F32", (512, 16))},
        {},
        {"exclude": [f"{MLP}.x"]},
        "warning",
        f"{MLP}.x.weight_scale",
        ["beside an unquantized weight"],
    ),
    "u8_buffer": (
        {**BASE, "tokenizer_blob": ("U8", (1000,))},
        {},
        {},
        "note",
        "tokenizer_blob",
        ["no matrices"],
    ),
    "layer_type_ignored": (
        BASE,
        {},
        {"layer_type_quant_config": {"Linear": quant_layer(), "Conv2d": W8}},
        "note",
        "Conv2d",
        ["classes other than Linear"],
    ),
}


def test_every_remark_has_an_example() -> None:
    assert set(EXAMPLES) == set(TEXTS)


@pytest.mark.parametrize("code", EXAMPLES)
def test_remark(code: str, tmp_path: Path) -> None:
    """P29, P31, P42, P43, P45, P50, P60, P62 and others: each noticed, and nothing else."""
    rows, config, section, severity, where, words = EXAMPLES[code]
    found = surveyed(tmp_path / "m", rows, config, **section)
    remark = the(found, code)
    assert (remark.severity, remark.where) == (severity, where)
    assert [word for word in words if word not in remark.message] == []
    beside = {"quantized_convolution": {"short_group"}, "mtp_mixed": {"mtp_layers"}}
    beside["mtp_unlisted"] = {"mtp_layers"}
    assert codes(found) <= {code} | beside.get(code, set())


@pytest.mark.parametrize("code", EXAMPLES)
def test_no_remark_without_its_cause(code: str, tmp_path: Path) -> None:
    found = surveyed(tmp_path / "m", BASE | bf16("model.embed_tokens") | bf16("model.norm", 512))
    assert (code in {finding.code for finding in found.findings}) is (code == "activation_rounding")


# Rounding of inputs


def test_rounding_concerns_inputs_in_an_mx_format_only(tmp_path: Path) -> None:
    for name, scheme in {"w4a16": W4A16, "w4a8": W4A8}.items():
        rows = BASE | {f"{MLP}.up_proj.input_scale": ("F32", ())} if name == "w4a8" else BASE
        found = surveyed(tmp_path / name, rows, global_quant_config=scheme)
        assert [layer.layer.scheme for layer in found.layers] == [name]
        assert not [f for f in found.findings if "rounding" in f.code]
    fp6 = {**FP4_INPUT, "dtype": "fp6_e2m3"}
    even = surveyed(tmp_path / "e", BASE, global_quant_config=quant_layer(FP4_WEIGHT, fp6))
    assert [f.code for f in even.findings] == []
    ceil = quant_layer(FP4_WEIGHT, {**fp6, "scale_calculation_mode": "ceil"})
    found = surveyed(tmp_path / "c", BASE, global_quant_config=ceil)
    assert the(found, "rounding_not_even").where == f"{MLP}.up_proj (ceil)"


def test_the_mode_of_weights_says_nothing_about_inputs(tmp_path: Path) -> None:
    weights = quant_layer({**FP4_WEIGHT, "scale_calculation_mode": "floor"})
    found = surveyed(tmp_path / "m", BASE, global_quant_config=weights)
    assert codes(found) == set()
    the(found, "activation_rounding")


def test_layers_of_different_modes_are_told_apart(tmp_path: Path) -> None:
    rows = BASE | fp4(f"{MLP}.down_proj") | fp4(f"{ATTN}.o_proj")
    patterns = {"*down_proj": rounded("ceil"), "*o_proj": rounded(None)}
    found = surveyed(tmp_path / "m", rows, layer_quant_config=patterns)
    places = {f.code: f.where for f in found.findings}
    assert places == {
        "activation_rounding": f"{MLP}.up_proj",
        "rounding_not_even": f"{MLP}.down_proj (ceil)",
        "rounding_unstated": f"{ATTN}.o_proj",
    }


# Routers, experts, convolutions, heads

ROUTERS = ["mlp.gate", "mlp.router", "mlp.shared_expert_gate", "mlp.router.proj", "mixer.gate"]
NO_ROUTERS = ["mlp.gate_proj", "self_attn.gate", "linear_attention.gate", "mlp.experts.0.gate"]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("leaf", [*ROUTERS, *NO_ROUTERS])
def test_p30_what_is_a_router(leaf: str, quantized: bool, tmp_path: Path) -> None:
    rows = BASE | (fp4 if quantized else bf16)(f"{LAYER}.{leaf}", 64, 512)
    found = surveyed(tmp_path / "m", rows)
    expected = "quantized_router" if quantized else "unquantized_router"
    assert (expected in codes(found)) is (leaf in ROUTERS)
    if not quantized:
        assert f"{LAYER}.{leaf}.weight" in found.classified.copied
        assert ("unquantized" in codes(found)) is (leaf not in ROUTERS)


def test_p30_a_router_in_the_exclude_list_is_as_it_should_be(tmp_path: Path) -> None:
    rows = BASE | bf16(f"{MLP}.gate", 8, 512)
    for i, entry in enumerate((f"{MLP}.gate", "model.layers.?.mlp.gate", r"re:.*\.gate$")):
        assert codes(surveyed(tmp_path / str(i), rows, exclude=[entry])) == set()


def test_p62_experts_that_stayed_bf16_are_counted_in_bytes(tmp_path: Path) -> None:
    """Qwen3.5-MoE through Quark's file2file without a converter: neither quantized nor listed."""
    rows = dict(BASE)
    for i in range(2):
        bank = f"model.language_model.layers.{i}.mlp.experts"
        rows[f"{bank}.gate_up_proj"] = ("BF16", (256, 1024, 2048))
        rows[f"{bank}.down_proj"] = ("BF16", (256, 2048, 512))
    found = the(surveyed(tmp_path / "m", rows, MOE), "unquantized_experts")
    # 2 layers * 256 experts * (1024 * 2048 + 2048 * 512) values * 2 bytes
    assert "3,221,225,472 bytes in 4 places" in found.message
    listed = surveyed(tmp_path / "l", rows, MOE, exclude=["*.mlp.experts*"])
    assert codes(listed) == set()


def test_p62_a_bank_under_a_weight_name_counts_too_and_others_do_not(tmp_path: Path) -> None:
    rows = BASE | bf16(f"{LAYER}.block_sparse_moe.input_linear", 4, 64, 128)
    found = surveyed(tmp_path / "m", rows)
    assert the(found, "unquantized_experts").message.endswith(
        f"65,536 bytes in 1 place: {LAYER}.block_sparse_moe.input_linear (bf16)"
    )
    rows = BASE | bf16(f"{LAYER}.linear_attn.conv1d", 64, 1, 4) | bf16(f"{MLP}.experts.0.up_proj")
    assert codes(surveyed(tmp_path / "n", rows)) == {"unquantized"}


def test_p62_packed_banks_are_audited_matrix_by_matrix(tmp_path: Path) -> None:
    bank = f"{MLP}.experts.gate_up_proj"
    rows: Rows = {bank: ("U8", (8, 2048, 256)), f"{bank}_scale": ("U8", (8, 2048, 16))}
    item = layer(surveyed(tmp_path / "m", rows, MOE), bank)
    assert (item.layer.experts, item.role.parallel) == (8, "expert")
    # each of gate's and up's 1024 rows is cut by 8 ranks: 2 * 128
    assert item.verdicts[8].scale_shard == (256, 16)
    assert {verdict.path for verdict in item.verdicts.values()} == {"asm"}


def test_p49_a_quantized_head_is_judged_like_a_column_layer(tmp_path: Path) -> None:
    found = surveyed(tmp_path / "m", fp4("lm_head", 1001, 512) | bf16("model.embed_tokens"))
    item = layer(found, "lm_head")
    assert item.role.parallel == "column"
    # padded to 1024; the last of 2 ranks has 1001 - 512 = 489 rows, which is no multiple of 32
    paths = {tp: (v.path, v.scale_shard, v.reasons) for tp, v in item.verdicts.items()}
    assert paths[1] == ("triton", (1001, 16), ("scale_rows",))
    assert paths[2] == ("triton", (489, 16), ("scale_rows",))
    llama = layer(surveyed(tmp_path / "l", fp4("lm_head", 128256, 4096)), "lm_head")
    assert {tp: (v.path, v.scale_shard) for tp, v in llama.verdicts.items()} == {
        tp: ("asm", (128256 // tp, 128)) for tp in (1, 2, 4, 8)
    }
    assert codes(found) == {"quantized_head"}


def test_p50_tied_and_bf16_is_one_copy(tmp_path: Path) -> None:
    rows = BASE | bf16("model.embed_tokens", 1024, 512)
    found = surveyed(tmp_path / "m", rows, TIED, exclude=["lm_head"])
    assert codes(found) == set()
    assert found.classified.copied == ("model.embed_tokens.weight",)


# Draft layers


def test_p42_p43_draft_layers_are_taken_as_stored(tmp_path: Path) -> None:
    rows = BASE | bf16("model.layers.4.eh_proj") | bf16("model.layers.4.mlp.up_proj")
    found = surveyed(tmp_path / "m", rows, DRAFTS)
    assert [item.layer.name for item in found.layers] == [f"{MLP}.up_proj"]
    assert codes(found) == {"mtp_layers", "mtp_unlisted"}
    listed = surveyed(tmp_path / "l", rows, DRAFTS, exclude=["model.layers.4.*"])
    assert codes(listed) == {"mtp_layers"}
    assert set(listed.classified.labels.values()) == {"mtp"}
    packed = surveyed(tmp_path / "p", BASE | fp4("model.layers.4.mlp.up_proj"), DRAFTS)
    assert codes(packed) == {"mtp_layers"}
    assert {v.path for v in layer(packed, "model.layers.4.mlp.up_proj").verdicts.values()} == {
        "asm"
    }


def test_p47_draft_tensors_in_a_sidecar_outside_the_index(tmp_path: Path) -> None:
    main = surveyed(tmp_path / "m", BASE).checkpoint.root
    side = surveyed(tmp_path / "s", bf16("model.mtp.eh_proj") | BASE).checkpoint.root
    content = (side / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    (main / "model_mtp.safetensors").write_bytes(content)
    index = {"metadata": {}, "weight_map": dict.fromkeys(BASE, "model.safetensors")}
    (main / "model.safetensors.index.json").write_text(json.dumps(index))
    found = survey(open_checkpoint(main))
    assert the(found, "stray_file").where == "model_mtp.safetensors"
    # in the index, but for one tensor
    keep = {"model.mtp.eh_proj.weight": header["model.mtp.eh_proj.weight"]}
    raw = json.dumps(keep).encode()
    nbytes = keep["model.mtp.eh_proj.weight"]["data_offsets"][1]
    sidecar = main / "model_mtp.safetensors"
    sidecar.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(nbytes))
    index["weight_map"] = {**index["weight_map"], **dict.fromkeys(keep, sidecar.name)}
    (main / "model.safetensors.index.json").write_text(json.dumps(index))
    found = survey(open_checkpoint(main))
    assert "mtp_unlisted" in codes(found)
    assert "model.mtp.eh_proj.weight" in found.classified.copied
    del index["weight_map"][f"{MLP}.up_proj.weight_scale"]
    (main / "model.safetensors.index.json").write_text(json.dumps(index))
    found = survey(open_checkpoint(main))
    assert f"{MLP}.up_proj.weight_scale" in the(found, "not_in_index").message
    assert len(found.layers) == 1


@pytest.mark.parametrize("stored", ["bf16", "w4a4"])
def test_p44_p45_two_revisions_that_differ_in_the_shared_expert(
    stored: str, tmp_path: Path
) -> None:
    rows: Rows = {}
    for leaf, (n, k) in {"gate_proj": (512, 1024), "down_proj": (1024, 512)}.items():
        rows |= fp4(f"{MLP}.experts.0.{leaf}", n, k)
        name = f"{MLP}.shared_experts.{leaf}"
        rows |= bf16(name, n, k) if stored == "bf16" else fp4(name, n, k)
    found = surveyed(tmp_path / "m", rows, MOE, exclude=["*shared_experts*"] * (stored == "bf16"))
    names = {item.layer.name for item in found.layers}
    assert (f"{MLP}.shared_experts.down_proj" in names) is (stored == "w4a4")
    if stored == "bf16":
        said = the(found, "shared_expert_not_fusable")
        assert said.where == f"{MLP} (bf16 beside w4a4)"
        assert found.shared == ()
    else:
        assert "shared_expert_not_fusable" not in codes(found)
        assert [item.block.fusable for item in found.shared] == [True]


# Names


def test_p27_every_entry_that_matched_nothing_is_kept_and_counted(tmp_path: Path) -> None:
    entries = [f"visual.blocks.{i}.attn.proj" for i in range(1550)]
    found = surveyed(tmp_path / "m", BASE, exclude=entries)
    said = the(found, "pattern_unmatched")
    assert "of 1550 patterns, these match nothing: 1,550 places" in said.message
    unmatched = [use.text for use in found.classified.patterns["exclude"] if not use.modules]
    assert unmatched == entries


@pytest.mark.parametrize(
    ("entry", "kind"), [("nothing.at.all", "exact"), ("*nothing", "glob"), ("re:nothing", "regex")]
)
def test_p30_p39_each_unmatched_entry_is_shown_with_its_kind(
    entry: str, kind: str, tmp_path: Path
) -> None:
    for key, section in {
        "exclude": {"exclude": [entry]},
        "layer_quant_config": {"layer_quant_config": {entry: W4A16}},
    }.items():
        said = the(surveyed(tmp_path / key, BASE, **section), "pattern_unmatched")
        assert said.where == f"quantization_config.{key}"
        assert said.message.endswith(f"1 place: {entry!r} ({kind})")


def test_p28_an_excluded_name_that_is_packed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="excluded by the config but stored quantized"):
        surveyed(tmp_path / "m", BASE, exclude=["*up_proj"])


def test_p29_one_excluded_expert_of_a_bank(tmp_path: Path) -> None:
    rows: Rows = {}
    excluded = f"{MLP}.experts.3.down_proj"
    for expert in range(8):
        name = f"{MLP}.experts.{expert}.down_proj"
        rows |= bf16(name) if name == excluded else fp4(name)
    found = surveyed(tmp_path / "m", rows, MOE, exclude=[excluded])
    assert codes(found) == {"partial_experts"}
    whole = surveyed(tmp_path / "w", {n: r for n, r in rows.items() if "experts.3" not in n}, MOE)
    assert codes(whole) == set()


def test_p35_gate_and_up_pinned_to_block_fp8_pass_through(tmp_path: Path) -> None:
    block = {**FP8_WEIGHT, "qscheme": "per_block", "block_size": [128, 128], "ch_axis": None}
    for i, spelling in enumerate(("weight_scale", "weight_scale_inv")):
        rows = fp4(f"{MLP}.down_proj")
        for leaf in ("gate_proj", "up_proj"):
            rows[f"{MLP}.{leaf}.weight"] = ("F8_E4M3", (512, 512))
            rows[f"{MLP}.{leaf}.{spelling}"] = ("F32", (4, 4))
        pinned = dict.fromkeys((f"{MLP}.gate_proj", f"{MLP}.up_proj"), quant_layer(block, None))
        found = surveyed(tmp_path / str(i), rows, layer_quant_config=pinned)
        assert [item.layer.name for item in found.layers] == [f"{MLP}.down_proj"]
        assert found.groups == ()
        assert len(found.classified.copied) == 4
        assert codes(found) == set()


def test_p41_names_without_their_root_are_seen_through_and_said(tmp_path: Path) -> None:
    rows = BASE | bf16(f"{MLP}.down_proj")
    found = surveyed(tmp_path / "m", rows, exclude=["layers.0.mlp.down_proj"])
    assert codes(found) == {"exclude_renamed"}
    assert "'layers.0.mlp.down_proj' (exact)" in the(found, "exclude_renamed").message


def test_p37_p38_fused_projections_of_several_schemes(tmp_path: Path) -> None:
    rows = fp4(f"{ATTN}.q_proj") | bf16(f"{ATTN}.v_proj")
    rows[f"{ATTN}.k_proj.weight"] = ("F8_E4M3", (512, 512))
    found = surveyed(tmp_path / "m", rows, layer_quant_config={"*k_proj": W8}, exclude=["*v_proj"])
    assert the(found, "mixed_group").where == f"{ATTN}.qkv_proj"
    assert found.groups[0].mixed
    at = f"{LAYER}.linear_attn"
    rows = fp4(f"{at}.in_proj_qkv") | fp4(f"{at}.in_proj_z")
    rows |= bf16(f"{at}.in_proj_a", 48, 512) | bf16(f"{at}.in_proj_b", 48, 512)
    found = surveyed(tmp_path / "n", rows)
    assert [(group.name, group.mixed) for group in found.groups] == [(f"{at}.in_proj_qkvz", False)]
    assert codes(found) == {"unquantized"}


# Shapes


def test_p01_p04_an_audit_names_the_layers_that_miss_and_why(tmp_path: Path) -> None:
    rows = fp4(f"{MLP}.shared_expert.down_proj", 2560, 640) | fp4(f"{ATTN}.o_proj", 2560, 4096)
    odd = {f"{LAYER}.odd{k}": k for k in (1664, 1824, 1856)}
    for name, k in odd.items():
        rows |= fp4(name, 512, k)
    found = surveyed(tmp_path / "m", rows, tp=(1,))
    made = {item.layer.name: item.verdicts[1] for item in found.layers}
    missed = made.pop(f"{MLP}.shared_expert.down_proj")
    assert (missed.path, missed.scale_shard, missed.reasons) == (
        "triton",
        (2560, 20),
        ("scale_cols",),
    )
    assert made.pop(f"{ATTN}.o_proj").path == "asm"
    assert {(v.path, v.reasons) for v in made.values()} == {("triton", ("scale_cols",))}
    assert {v.scale_shard[1] for v in made.values()} == {52, 57, 58}


def test_p02_stored_and_fused_view_at_every_degree(tmp_path: Path) -> None:
    at = f"{LAYER}.linear_attn"
    heads = {"linear_num_value_heads": 48, "linear_num_key_heads": 16}
    rows = fp4(f"{at}.in_proj_a", 48, 5120) | fp4(f"{at}.in_proj_b", 48, 5120)
    found = surveyed(tmp_path / "m", rows, heads)
    (group,) = found.groups
    assert {tp: v.scale_shard for tp, v in group.verdicts.items()} == {
        1: (96, 160),
        2: (48, 160),
        4: (24, 160),
        8: (12, 160),
    }
    own = layer(found, f"{at}.in_proj_a").verdicts
    assert {tp: (v.path, v.scale_shard) for tp, v in own.items()} == {
        1: ("triton", (48, 160)),
        2: ("triton", (24, 160)),
        4: ("triton", (12, 160)),
        8: ("triton", (6, 160)),
    }


def test_p06_p08_p10_degrees_at_which_experts_miss_or_cannot_split(tmp_path: Path) -> None:
    name = f"{MLP}.experts.0.down_proj"
    item = layer(
        surveyed(tmp_path / "m", fp4(name, 3072, 1536), MOE, tp=(1, 2, 4, 8, 16, 32)), name
    )
    assert {tp: v.scale_shard and v.scale_shard[1] for tp, v in item.verdicts.items()} == {
        1: 48,
        2: 24,
        4: 12,
        8: 6,
        16: 3,
        32: None,  # 48 columns a rank are one and a half groups
    }
    assert [tp for tp, v in item.verdicts.items() if v.path == "asm"] == [1, 2]
    odd = fp4(f"{MLP}.down_proj", 512, 672) | fp4(f"{ATTN}.o_proj", 512, 1440)
    found = surveyed(tmp_path / "o", odd)
    assert layer(found, f"{MLP}.down_proj").verdicts[1].scale_shard == (512, 21)
    uneven = layer(found, f"{ATTN}.o_proj").verdicts[2]
    assert (uneven.path, uneven.reasons) == ("impossible", ("split_groups",))
    assert uneven.detail == "no whole 32-groups at tp 2: 1440 / 2 = 720 columns = 22.5 groups"


def test_p15_the_number_of_inputs_is_no_part_of_a_verdict(tmp_path: Path) -> None:
    """Small M is for the kernels to pad: an aligned layer is clean, with no hazard, at any M."""
    found = surveyed(tmp_path / "m", fp4(f"{MLP}.down_proj", 512, 2048))
    made = layer(found, f"{MLP}.down_proj").verdicts
    assert {(v.path, v.reasons, v.hazards) for v in made.values()} == {("asm", (), ())}


def test_p03_rows_that_the_asm_kernel_gets_wrong(tmp_path: Path) -> None:
    rows = fp4(f"{MLP}.x", 96, 5120) | fp4(f"{MLP}.y", 96, 2560) | fp4(f"{MLP}.z", 128, 5120)
    found = surveyed(tmp_path / "m", rows, tp=(1,))
    verdicts = {item.layer.name[-1]: item.verdicts[1] for item in found.layers}
    made = {name: (verdict.path, verdict.reasons) for name, verdict in verdicts.items()}
    assert made == {
        "x": ("triton", ("bad_tile",)),
        "y": ("triton", ("bad_tile",)),
        "z": ("asm", ()),
    }


def test_few_rows_on_a_rank_are_a_hazard_of_lone_layers_on_the_asm_path(tmp_path: Path) -> None:
    # 8 heads of 64 rows each: 64 rows a rank at tp 8, three times as many once fused
    rows = {**fp4(f"{LAYER}.self_attn.q_b_proj", 512, 2048)}
    for leaf in "qkv":
        rows |= fp4(f"{ATTN}.{leaf}_proj", 1024, 512)
    found = surveyed(tmp_path / "m", rows)
    lone = layer(found, f"{ATTN}.q_b_proj").verdicts
    assert {tp: v.hazards for tp, v in lone.items()} == {
        1: (),
        2: (),
        4: ("small_n",),
        8: ("small_n",),
    }
    assert {v.path for v in lone.values()} == {"asm"}
    # 128 rows of k alone, but an engine runs the three as one matrix of 384.
    own = layer(found, f"{ATTN}.k_proj").verdicts[8]
    assert (own.scale_shard, own.hazards) == ((128, 16), ())
    (group,) = found.groups
    assert (group.verdicts[8].scale_shard, group.verdicts[8].hazards) == ((384, 16), ())
    decided = found.decided(8)[f"{ATTN}.k_proj"]
    assert (decided.path, decided.hazards) == ("asm", ())


def test_few_rows_count_where_the_dense_w4a4_gemm_runs_them(tmp_path: Path) -> None:
    pair = fp4(f"{MLP}.gate_proj", 64, 512) | fp4(f"{MLP}.up_proj", 64, 512)
    found = surveyed(tmp_path / "fused", pair, tp=(1, 2))
    assert [found.groups[0].verdicts[tp].hazards for tp in (1, 2)] == [("small_n",)] * 2
    assert found.decided(1)[f"{MLP}.up_proj"].hazards == ("small_n",)
    # The part of 96 rows takes the other path, and with it the part that would have the hazard.
    uneven = fp4(f"{MLP}.gate_proj", 96, 512) | fp4(f"{MLP}.up_proj", 32, 512)
    parts = surveyed(tmp_path / "part", uneven, tp=(1,)).decided(1)
    assert {(v.path, v.hazards) for v in parts.values()} == {("triton", ())}
    experts = {name.replace("mlp.", "mlp.experts.0."): row for name, row in pair.items()}
    lone = fp4(f"{MLP}.experts.0.down_proj", 128, 512)
    found = surveyed(tmp_path / "experts", experts | lone, MOE, tp=(1,))
    assert {item.verdicts[1].path for item in found.layers} == {"asm"}
    assert {item.verdicts[1].hazards for item in (*found.layers, *found.groups)} == {()}
    both = surveyed(tmp_path / "both", lone | fp4(f"{MLP}.down_proj", 128, 512), MOE, tp=(1,))
    assert [item.verdicts[1].hazards for item in both.layers] == [(), ("small_n",)]
    weights_only = surveyed(
        tmp_path / "w4a16", pair | fp4(f"{MLP}.down_proj", 128, 512), global_quant_config=W4A16
    )
    made = (*weights_only.layers, *weights_only.groups)
    assert {item.verdicts[1].hazards for item in made} == {()}


def test_few_rows_of_a_shared_expert_count_unless_it_is_fused(tmp_path: Path) -> None:
    rows = fp4(f"{MLP}.experts.0.down_proj", 128, 512)
    rows |= fp4(f"{MLP}.shared_expert.down_proj", 128, 512)
    for choice, hazards in (("fused", ()), ("separate", ("small_n",))):
        checkpoint = surveyed(tmp_path / choice, rows, MOE).checkpoint
        found = survey(checkpoint, (1,), (), Deployment(shared_experts=choice))
        assert layer(found, f"{MLP}.shared_expert.down_proj").verdicts[1].hazards == hazards


def test_few_rows_reach_the_manifest_of_what_is_stored_for_asm(tmp_path: Path) -> None:
    rows = fp4(f"{MLP}.down_proj", 128, 512) | fp4(f"{ATTN}.o_proj", 1024, 512)
    rows |= fp4(f"{LAYER}.self_attn.q_b_proj", 1024, 512)
    found = surveyed(tmp_path / "m", rows)
    made = {}
    for tp in (1, 8):
        plans = {plan.layer.name: plan for plan in make_plan(found, (tp,)).layers}
        made[tp] = {name.rpartition(".")[2]: plan for name, plan in plans.items()}
    assert {leaf: plan.hazards for leaf, plan in made[1].items()} == {
        "down_proj": ("small_n",),
        "o_proj": (),
        "q_b_proj": (),
    }
    assert made[8]["q_b_proj"].hazards == ("small_n",)  # 8 heads of 128 rows
    assert (made[8]["down_proj"].path, made[8]["down_proj"].hazards) == ("triton", ())


def test_the_hazard_of_few_rows_says_how_far_it_is_known() -> None:
    text = HAZARDS["small_n"]
    for word in ("256 rows", "tuned entry", "unconfirmed on hardware", "rows % 256 != 0"):
        assert word in text
