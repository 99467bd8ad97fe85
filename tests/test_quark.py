"""Classification of whole checkpoints: Quark's own exports, and small tables of tensors."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, Unsupported
from mxfp4prep.findings import Finding
from mxfp4prep.parallel import Topology
from mxfp4prep.quark import Activation, Classified, QuarkLayer, classify
from mxfp4prep.safefile import TensorEntry

FIXTURES = Path(__file__).parent / "data" / "fixtures"

FP4: dict[str, Any] = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "is_dynamic": False,
    "ch_axis": -1,
    "scale_calculation_mode": "even",
}
FP4_INPUT = {**FP4, "is_dynamic": True}
FP8: dict[str, Any] = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
FP8_ROWS: dict[str, Any] = {**FP8, "qscheme": "per_channel", "ch_axis": 0}
AMDFP4_G32: dict[str, Any] = {**FP4, "scale_format": "e5m3"}
NVFP4: list[dict[str, Any]] = [{**FP4, "group_size": 16, "scale_format": "float32"}, FP8]

W4A4 = {"weight": FP4, "input_tensors": FP4_INPUT}
W4A16 = {"weight": FP4, "input_tensors": None}
W4A8 = {"weight": FP4, "input_tensors": FP8}
W8 = {"weight": FP8_ROWS, "input_tensors": None}

Rows = dict[str, tuple[str, tuple[int, ...]]]


def packed(name: str, n: int = 64, k: int = 128, ending: str = ".weight_scale") -> Rows:
    """A weight and its scale as Quark stores them; K need not be a multiple of 32."""
    return {
        f"{name}.weight": ("U8", (n, k // 2)),
        f"{name}{ending}": ("U8", (n, (k + 31) // 32)),
    }


def plain(name: str, *shape: int, dtype: str = "BF16") -> Rows:
    return {f"{name}.weight": (dtype, shape or (64, 128))}


def entries(rows: Rows) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, dtype, shape, 0, 0) for name, (dtype, shape) in rows.items()}


def run(rows: Rows, config: dict[str, Any] | None = None, **section: Any) -> Classified:
    """`rows` classified under a W4A4 config with `section` on top."""
    whole = {
        **(config or {}),
        "quantization_config": {
            "quant_method": "quark",
            "global_quant_config": W4A4,
            "exclude": [],
            **section,
        },
    }
    return classify(entries(rows), whole, Topology.from_config(whole))


def names(result: Classified) -> list[str]:
    return [layer.name for layer in result.layers]


def finding(result: Classified, code: str) -> Finding:
    found = [each for each in result.findings if each.code == code]
    assert len(found) == 1, [each.code for each in result.findings]
    return found[0]


def codes(result: Classified) -> set[str]:
    """Every code but that of the rounding of inputs, which stands on each W4A4 checkpoint."""
    return {each.code for each in result.findings} - {"activation_rounding", "weight_only"}


def accounted(result: Classified) -> list[str]:
    """Every tensor name, once for each part it plays."""
    parts = [name for each in result.layers for name in (each.weight.name, each.scale.name)]
    return sorted([*parts, *result.copied])


def headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint, by a parser that shares nothing with the package."""
    tensors: dict[str, TensorEntry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, fields in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = fields["data_offsets"]
                shape = tuple(fields["shape"])
                tensors[name] = TensorEntry(name, fields["dtype"], shape, begin, end)
    return tensors


def read(folder: str) -> Classified:
    config = json.loads((FIXTURES / folder / "config.json").read_text())
    return classify(headers(FIXTURES / folder), config, Topology.from_config(config))


# Quark's own exports


@pytest.mark.parametrize(
    ("folder", "layers", "copied", "scheme"),
    [
        ("llama-w4a4-aligned", 14, 7, "w4a4"),
        ("llama-w4a4-file2file", 14, 7, "w4a4"),
        ("qwen2-w4a4-misaligned-tied", 14, 12, "w4a4"),
        ("qwen2moe-w4a4-shared-expert", 62, 17, "w4a4"),
        ("qwen3-w4a16-misaligned", 14, 11, "w4a16"),
        ("version-0.9", 7, 5, "w4a4"),
        ("version-0.10", 7, 5, "w4a4"),
        ("version-0.11.2", 7, 5, "w4a4"),
        ("version-0.12.post1", 7, 5, "w4a4"),
    ],
)
def test_real_exports(folder: str, layers: int, copied: int, scheme: str) -> None:
    result = read(folder)
    assert (len(result.layers), len(result.copied)) == (layers, copied)
    assert {layer.scheme for layer in result.layers} == {scheme}
    dtype = "fp4" if scheme == "w4a4" else None
    assert {layer.activation.dtype for layer in result.layers} == {dtype}
    assert accounted(result) == sorted(headers(FIXTURES / folder))
    assert all(each.severity == "note" for each in result.findings)


def test_a_layer_of_a_real_export_in_full() -> None:
    result = read("qwen2-w4a4-misaligned-tied")
    (layer,) = (each for each in result.layers if each.name == "model.layers.0.self_attn.k_proj")
    tensors = headers(FIXTURES / "qwen2-w4a4-misaligned-tied")
    assert layer == QuarkLayer(
        name="model.layers.0.self_attn.k_proj",
        kind="linear",
        scheme="w4a4",
        activation=Activation("fp4", "even", False),
        n=48,
        k=192,
        experts=None,
        is_matrix=True,
        weight=tensors["model.layers.0.self_attn.k_proj.weight"],
        scale=tensors["model.layers.0.self_attn.k_proj.weight_scale"],
        bias="model.layers.0.self_attn.k_proj.bias",
        input_scale=None,
        gate_up=None,
    )
    assert result.others["model.embed_tokens"] == "bf16"
    assert "model.layers.0.self_attn.k_proj.bias" in result.copied


def test_real_mixed_export_layer_by_layer() -> None:
    """P35: FP8 attention passes through with its scales; three MLPs have three input schemes."""
    result = read("llama-mixed-fp8attn-kvfp8")
    schemes = {layer.name: (layer.scheme, layer.activation.static) for layer in result.layers}
    assert schemes == {
        f"model.layers.{i}.mlp.{leaf}": pair
        for i, pair in enumerate([("w4a4", False), ("w4a8", True), ("w4a16", False)])
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    assert {bool(each.input_scale) == (each.scheme == "w4a8") for each in result.layers} == {True}
    attention = {module for module, label in result.others.items() if label == "fp8"}
    assert len(attention) == 12
    for module in attention:
        assert {f"{module}.weight", f"{module}.weight_scale"} <= set(result.copied)
    assert "6 places" in finding(result, "kv_scales").message
    assert codes(result) == {"kv_scales"}


def test_real_moe_export_kinds() -> None:
    """P30: the router is in no list and BF16: copied, and mentioned once for both layers."""
    result = read("qwen2moe-w4a4-shared-expert")
    kinds = {layer.name: layer.kind for layer in result.layers}
    assert sum(kind == "expert" for kind in kinds.values()) == 2 * 8 * 3
    assert sum(kind == "shared_expert" for kind in kinds.values()) == 2 * 3
    assert "model.layers.0.mlp.gate.weight" in result.copied
    assert finding(result, "unquantized_router").where == "model.layers.0.mlp.gate"
    assert "2 places" in finding(result, "unquantized_router").message


@pytest.mark.parametrize(
    ("folder", "scheme"),
    [
        ("lookalike-amdfp4-g32", "amdfp4_g32"),
        ("lookalike-nvfp4", "nvfp4"),
        ("lookalike-mxfp6-e2m3", "mxfp6_e2m3"),
    ],
)
def test_real_lookalikes_are_refused_by_name(folder: str, scheme: str) -> None:
    with pytest.raises(
        Unsupported, match=rf"^model\.layers\.0\..*the weight is {scheme},"
    ) as raised:
        read(folder)
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)


STORED_AS: dict[str, Rows] = {
    "fp8": {"m.weight": ("F8_E4M3", (64, 128)), "m.weight_scale": ("BF16", ())},
    "ptpc_fp8": {"m.weight": ("F8_E4M3", (64, 128)), "m.weight_scale": ("BF16", (64,))},
    "int8": {"m.weight": ("I8", (64, 128)), "m.weight_scale": ("F32", ())},
    "int4_wo_32": {"m.weight": ("I32", (128, 8)), "m.weight_scale": ("BF16", (4, 64))},
    "int4_fp8": {"m.weight": ("I32", (64, 16)), "m.weight_scale": ("F32", ())},
    "amdfp4": {"m.weight": ("U8", (64, 64)), "m.weight_scale": ("U8", (64, 8))},
    "amdfp4_g32": packed("m"),
    "amdfp4_global32": {**packed("m"), "m.weight_scale_2": ("F32", ())},
    "nvfp4": {
        "m.weight": ("U8", (64, 64)),
        "m.weight_scale": ("F8_E4M3", (64, 8)),
        "m.weight_scale_2": ("F32", ()),
    },
    "mxfp6_e3m2": {"m.weight": ("U8", (64, 96)), "m.weight_scale": ("U8", (64, 4))},
}

VARIANTS = {
    "0.9": "w4a4",
    "0.10": "w4a4",
    "0.11.2": "w4a4",
    "0.12.post1": "w4a4",
    "0.13-attention-fp8": "w4a4",
    "0.13-kv-cache-with-excluded-attention": "w4a4",
    "0.13-scheme-mxfp4_fp8": "w4a8",
    "0.13-scheme-mxfp4_mxfp6_e2m3": "w4a6",
    "0.13-scheme-mxfp4_weight_only": "w4a16",
    "0.13-custom-mode-fp8": "the checkpoint is fp8, not AMD Quark MXFP4",
    "0.13-fake-quantized": "the weights are fake_quantized",
    "0.13-scheme-fp8": "no MXFP4 layer: the checkpoint is fp8",
    "0.13-scheme-ptpc_fp8": "no MXFP4 layer: the checkpoint is ptpc_fp8",
    "0.13-scheme-int8": "no MXFP4 layer: the checkpoint is int8",
    "0.13-scheme-int4_wo_32": "no MXFP4 layer: the checkpoint is int4_wo_32",
    "0.13-scheme-int4_fp8": "no MXFP4 layer: the checkpoint is int4_fp8",
    "0.13-scheme-amdfp4": "m.weight: the weight is amdfp4, not MXFP4",
    "0.13-scheme-amdfp4_g32": "m.weight: the weight is amdfp4_g32, not MXFP4",
    "0.13-scheme-amdfp4_global32": "m.weight: the weight is amdfp4_global32, not MXFP4",
    "0.13-scheme-mxfp6_e3m2": "m.weight: the weight is mxfp6_e3m2, not MXFP4",
    "0.13-scheme-nvfp4": "m.weight: the weight is nvfp4, not MXFP4",
}


def test_every_config_variant_is_in_the_table() -> None:
    folder = FIXTURES / "config-variants"
    stems = {path.stem.removeprefix("quantization_config-") for path in folder.glob("*.json")}
    assert stems == set(VARIANTS)


@pytest.mark.parametrize(("variant", "expected"), VARIANTS.items())
def test_config_variants_with_tensors_as_that_scheme_stores_them(
    variant: str, expected: str, tried: Any
) -> None:
    tried("Q1")
    path = FIXTURES / "config-variants" / f"quantization_config-{variant}.json"
    config = {"quantization_config": json.loads(path.read_text())}
    rows = STORED_AS.get(variant.rpartition("scheme-")[2], packed("m"))
    tensors = entries({**rows, **plain("lm_head")})
    if expected.startswith("w4a"):
        (layer,) = classify(tensors, config, Topology()).layers
        assert layer.scheme == expected
        return
    with pytest.raises(Unsupported) as raised:
        classify(tensors, config, Topology())
    assert expected in str(raised.value)
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)


def test_kv_cache_config_with_excluded_attention() -> None:
    """exclude wins over a layer_quant_config entry that only exists for its output scale."""
    variant = "quantization_config-0.13-kv-cache-with-excluded-attention.json"
    section = json.loads((FIXTURES / "config-variants" / variant).read_text())
    rows = packed("model.layers.0.mlp.up_proj") | plain("lm_head")
    for leaf in "qkvo":
        rows |= plain(f"model.layers.0.self_attn.{leaf}_proj")
    rows["model.layers.0.self_attn.k_proj.output_scale"] = ("BF16", ())
    result = classify(entries(rows), {"quantization_config": section}, Topology())
    assert names(result) == ["model.layers.0.mlp.up_proj"]
    assert codes(result) == {"kv_scales"}


# Synthetic tables: what is accepted


def test_both_scale_spellings_and_both_scale_dtypes() -> None:
    """P52: U8 and F8_E8M0 scales give the same layers. 0.11 names scales its own way."""
    rows = packed("a") | packed("b", ending=".weight_quantizer.scale")
    as_u8 = run(rows)
    as_e8m0 = run({n: ("F8_E8M0" if n.endswith("scale") else d, s) for n, (d, s) in rows.items()})
    for result in (as_u8, as_e8m0):
        assert names(result) == ["a", "b"]
        assert finding(result, "scale_spelling").where == "b"
    assert [(x.n, x.k, x.scale.shape) for x in as_u8.layers] == [
        (x.n, x.k, x.scale.shape) for x in as_e8m0.layers
    ]


@pytest.mark.parametrize(
    ("shape", "scale", "n", "k", "experts", "is_matrix"),
    [
        ((64, 64), (64, 4), 64, 128, None, True),
        ((4, 40), (4, 3), 4, 80, None, True),
        ((1, 1), (1, 1), 1, 2, None, True),
        ((8, 96, 64), (8, 96, 4), 96, 128, 8, True),
        ((8, 96, 64), (768, 4), 96, 128, 8, True),
        ((16, 1, 2), (16, 1), 16, 4, None, False),
        ((16, 3, 8, 8), (384, 1), 384, 16, None, False),
        ((16, 3, 8, 8), (16, 3, 8, 1), 384, 16, None, False),
        ((768, 64), (8, 96, 4), 96, 128, 8, True),
    ],
)
def test_shapes(
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    n: int,
    k: int,
    experts: int | None,
    is_matrix: bool,
) -> None:
    result = run({"m.weight": ("U8", shape), "m.weight_scale": ("U8", scale)})
    (layer,) = result.layers
    assert (layer.n, layer.k, layer.experts, layer.is_matrix) == (n, k, experts, is_matrix)
    assert layer.kind == ("expert" if experts else "linear")
    assert ("short_group" in codes(result)) == (k % 32 != 0)


def test_a_convolution_is_no_bank_of_experts() -> None:
    rows: Rows = {"b.conv1d.weight": ("U8", (64, 2, 2)), "b.conv1d.weight_scale": ("U8", (128, 1))}
    (layer,) = run(rows).layers
    assert (layer.n, layer.experts, layer.is_matrix) == (128, None, False)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_scale"),
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_weight_scale"),
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj.weight_scale"),
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj.weight_quantizer.scale"),
        ("mlp.experts.gate_up_proj.weight", "mlp.experts.gate_up_proj.weight_scale"),
        ("ffn.experts.mlp.w1_weight", "ffn.experts.mlp.w1_weight_scale"),
    ],
)
def test_p62_stacked_experts_are_recognised(weight: str, scale: str) -> None:
    result = run({weight: ("U8", (8, 96, 64)), scale: ("U8", (8, 96, 4))})
    (layer,) = result.layers
    assert (layer.kind, layer.experts, layer.n, layer.k) == ("expert", 8, 96, 128)
    assert layer.name == weight.removesuffix(".weight")
    assert result.copied == ()


def test_p62_the_bias_and_input_scale_of_a_bank() -> None:
    bank = "model.layers.0.mlp.experts.gate_up_proj"
    rows: Rows = {
        bank: ("U8", (8, 96, 64)),
        f"{bank}_scale": ("U8", (8, 96, 4)),
        f"{bank}_bias": ("BF16", (8, 96)),
        f"{bank}_input_scale": ("F32", (8,)),
    }
    (layer,) = run(rows, global_quant_config=W4A8).layers
    assert (layer.bias, layer.input_scale) == (f"{bank}_bias", f"{bank}_input_scale")


def test_a_bias_is_the_modules_own() -> None:
    rows = packed("mlp.gate") | {"mlp.gate_bias": ("F32", (64,)), "mlp.gate.x.bias": ("F32", (1,))}
    assert run(rows).layers[0].bias is None
    assert run(rows | {"mlp.gate.bias": ("F32", (64,))}).layers[0].bias == "mlp.gate.bias"


@pytest.mark.parametrize(
    ("model_type", "order"), [("gpt_oss", "interleaved"), ("qwen3_moe", "concatenated")]
)
def test_gate_up_order_follows_the_model_type(model_type: str, order: str) -> None:
    rows = packed("model.layers.0.mlp.experts.0.gate_up_proj") | packed("model.layers.0.x")
    result = run(rows, {"model_type": model_type})
    assert [layer.gate_up for layer in result.layers] == [order, None]


@pytest.mark.parametrize("reversed_order", [False, True])
def test_layers_keep_the_order_of_their_weights(reversed_order: bool) -> None:
    rows = packed("b") | {"c": ("U8", (2, 4, 16)), "c_scale": ("U8", (2, 4, 1))} | packed("a")
    if reversed_order:
        rows = dict(reversed(rows.items()))
    assert names(run(rows)) == (["a", "c", "b"] if reversed_order else ["b", "c", "a"])


def test_every_tensor_is_accounted_for_once() -> None:
    rows = (
        packed("model.layers.0.a")
        | plain("model.norm", 64)
        | plain("model.layers.0.b", dtype="F8_E4M3")
        | {
            "model.layers.0.a.bias": ("BF16", (64,)),
            "model.layers.0.b.weight_scale_inv": ("F32", (1, 1)),
            "model.layers.0.attn.k_scale": ("F32", ()),
            "extra": ("I64", (3,)),
            "tokenizer_blob": ("U8", (1000,)),
            "h.0.attn.bias": ("U8", (1, 1, 8, 8)),
        }
    )
    result = run(rows, layer_quant_config={"*.b": W8})
    assert accounted(result) == sorted(rows)
    assert result.others == {"model.norm": "bf16", "model.layers.0.b": "fp8"}
    assert "2 places: tokenizer_blob, h.0.attn.bias" in finding(result, "u8_buffer").message


def test_p43_a_draft_block_without_scales_is_copied() -> None:
    rows = packed("layers.0.attn.wq_a") | plain("mtp.0.attn.wq_a")
    result = run(rows)
    assert names(result) == ["layers.0.attn.wq_a"]
    assert result.labels == {"mtp.0.attn.wq_a.weight": "mtp"}


@pytest.mark.parametrize("listed", [False, True])
def test_p42_draft_layers_by_index(listed: bool) -> None:
    rows = packed("model.layers.3.mlp.up_proj") | packed("visual.layers.9.up_proj")
    for leaf in ("mlp.up_proj", "eh_proj", "input_layernorm"):
        rows |= plain(f"model.layers.4.{leaf}")
    config = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    result = run(rows, config, exclude=["model.layers.4*"] if listed else [])
    assert set(result.labels.values()) == {"mtp"}
    assert set(result.labels) == {name for name in rows if name.startswith("model.layers.4.")}
    assert "3 places" in finding(result, "mtp_layers").message
    assert ("mtp_unlisted" in codes(result)) is (not listed)
    assert "unquantized" not in codes(result)


def test_p42_without_a_draft_count_no_index_is_a_draft() -> None:
    rows = packed("model.layers.3.mlp.up_proj") | plain("model.layers.4.eh_proj")
    assert run(rows, {"num_hidden_layers": 4}).labels == {}


@pytest.mark.parametrize("name", ["mtp.fc", "model.mtp.eh_proj", "model.mtp_layers.0.x"])
def test_p39_draft_layers_by_name(name: str) -> None:
    result = run(packed(name) | plain("model.mtprojector"))
    assert set(result.labels) == {f"{name}.weight", f"{name}.weight_scale"}


def test_nested_text_config_holds_the_layer_count() -> None:
    rows = packed("model.language_model.layers.3.a") | plain("model.language_model.layers.4.a")
    config = {"text_config": {"num_hidden_layers": 4, "mtp_num_hidden_layers": 1}}
    assert set(run(rows, config).labels) == {"model.language_model.layers.4.a.weight"}


def test_a_layer_index_of_a_thousand_digits_is_no_trap() -> None:
    name = f"model.layers.{'9' * 5000}.a"
    config = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    assert names(run(packed(name), config)) == [name]


# Synthetic tables: how the config resolves


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        ({}, "w4a4"),
        ({"layer_quant_config": {"*.a": W4A16}}, "w4a16"),
        ({"layer_quant_config": {"m.b": W4A16}}, "w4a4"),
        ({"layer_quant_config": {"m": W4A16}}, "w4a4"),
        ({"layer_quant_config": {"a": W4A16}}, "w4a4"),
        ({"layer_quant_config": {"re:m": W4A16}}, "w4a16"),
        ({"layer_quant_config": {"*.b, *.a": W4A16}}, "w4a16"),
        ({"layer_quant_config": {"*.a": W4A16, "m.a": W4A4}}, "w4a16"),
        ({"layer_quant_config": {"m.a": W4A4, "*.a": W4A16}}, "w4a4"),
        ({"layer_type_quant_config": {"Linear": W4A16}}, "w4a16"),
        ({"layer_type_quant_config": {"Conv2d": W4A16}}, "w4a4"),
        (
            {"layer_type_quant_config": {"Linear": W4A16}, "layer_quant_config": {"*a": W4A4}},
            "w4a4",
        ),
        ({"global_quant_config": None, "layer_quant_config": {"*": W4A16}}, "w4a16"),
        ({"global_quant_config": W8, "layer_quant_config": {"*.a": W4A16}}, "w4a16"),
        ({"kv_cache_quant_config": {"*.a": W8}}, "w4a4"),
        ({"exclude": None, "layer_quant_config": None}, "w4a4"),
    ],
)
def test_p31_the_first_matching_pattern_decides(section: dict[str, Any], scheme: str) -> None:
    assert [layer.scheme for layer in run(packed("m.a"), **section).layers] == [scheme]


def test_p31_overlapping_patterns_are_shown() -> None:
    result = run(packed("m.a"), layer_quant_config={"*.a": W4A16, "m.*": W4A4})
    assert finding(result, "overlapping_patterns").where == "m.a"
    same = run(packed("m.a"), layer_quant_config={"*.a": W4A16, "m.*": copy.deepcopy(W4A16)})
    assert codes(same) == set()


def test_sorted_patterns_yield_to_what_is_stored() -> None:
    """Quark sorts the patterns on export: the first match may be one that was never applied."""
    result = run(packed("m.a"), layer_quant_config={"*.a": W8, "m.*": W4A16})
    assert [layer.scheme for layer in result.layers] == ["w4a16"]
    assert finding(result, "pattern_order").severity == "warning"


def test_the_global_config_never_replaces_a_matching_pattern() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"m\.a\.weight: .*scheme fp8_per_channel"):
        run(packed("m.a"), layer_quant_config={"*.a": W8})


def test_sorted_patterns_that_are_stored_alike_are_refused() -> None:
    both = {"*.a": W4A4, "m.*": {"weight": AMDFP4_G32}}
    with pytest.raises(Unsupported, match="either w4a4 or amdfp4_g32"):
        run(packed("m.a"), layer_quant_config=both)
    with pytest.raises(Unsupported, match="either w4a4 or amdfp4_g32"):
        run(packed("m.a"), layer_quant_config={"*": W8, **both})
    with pytest.raises(Unsupported, match="the weight is amdfp4_g32"):
        run(packed("m.a"), layer_quant_config=dict(reversed(both.items())))


def test_a_pattern_of_another_shape_does_not_stop_the_first() -> None:
    """nvfp4 stores other scales: the stored ones agree with the first pattern only."""
    section = {"*.a": W4A4, "m.*": {"weight": NVFP4}}
    assert names(run(packed("m.a"), layer_quant_config=section)) == ["m.a"]


@pytest.mark.parametrize(
    ("entry", "reading"),
    [
        ("model.layers.0.mlp.down_proj", "exact"),
        ("*down_proj", "glob"),
        ("re:.*down_proj", "regex"),
        ("layers.0.mlp.down_proj", "exact, renamed"),
    ],
)
def test_excluded_but_packed_is_an_error_with_both_facts(entry: str, reading: str) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        run(packed("model.layers.0.mlp.down_proj"), exclude=["lm_head", entry])
    text = str(raised.value)
    assert text.startswith("model.layers.0.mlp.down_proj.weight: excluded by the config")
    assert f"U8 [64, 64] and exclude entry {entry!r} ({reading})" in text
    assert raised.value.exit_code == 3


def test_p32_layer_one_is_not_layer_eleven() -> None:
    rows: Rows = {}
    for i in range(13):
        name = f"model.layers.{i}.mlp.down_proj"
        rows |= plain(name) if i == 1 else packed(name)
    result = run(rows, exclude=["model.layers.1"])
    assert len(result.layers) == 12
    assert codes(result) == set()


def test_p32_a_parent_entry_does_not_overrule_what_is_stored() -> None:
    """Quark 0.12 reads the entry as everything below, other releases as that module alone."""
    rows = packed("model.layers.1.a") | packed("model.layers.11.a")
    result = run(rows, exclude=["model.layers.1"])
    assert names(result) == ["model.layers.1.a", "model.layers.11.a"]
    assert finding(result, "exclude_parent").message.endswith("1 place: model.layers.1.a")


def test_p27_exclude_names_of_another_root_are_applied_and_reported() -> None:
    rows = packed("lm.x")
    entries_ = []
    for i in range(50):
        rows |= plain(f"language_model.model.layers.{i}.self_attn.q_proj")
        entries_.append(f"model.language_model.layers.{i}.self_attn.q_proj")
    result = run(rows, exclude=entries_)
    found = finding(result, "exclude_renamed")
    assert "50 places" in found.message
    assert entries_[0] in found.message
    assert "unquantized" not in codes(result)
    assert "pattern_unmatched" not in codes(result)


def test_p41_ambiguous_names_are_not_applied() -> None:
    rows = packed("model.layers.0.x") | packed("language_model.layers.0.x")
    result = run(rows, exclude=["layers.0.x"])
    assert len(result.layers) == 2
    assert "'layers.0.x' (exact)" in finding(result, "exclude_ambiguous").message


def test_p39_unmatched_entries_are_one_finding_per_list() -> None:
    result = run(
        packed("model.layers.0.mlp.a"),
        exclude=["model.layers.language_model.layers.0.mlp", "*.nope", "re:nope", "b", "c"],
        layer_quant_config={"*.other": W8},
    )
    found = [each for each in result.findings if each.code == "pattern_unmatched"]
    assert [each.where for each in found] == [
        "quantization_config.exclude",
        "quantization_config.layer_quant_config",
    ]
    assert "of 5 patterns" in found[0].message
    assert "'*.nope' (glob), 're:nope' (regex) and 2 more" in found[0].message
    assert [use.kind for use in result.patterns["exclude"]][:3] == ["exact", "glob", "regex"]


@pytest.mark.parametrize("head", ["lm_head", "*lm_head", "language_model.lm_head"])
def test_a_tied_head_may_be_excluded(head: str) -> None:
    rows = packed("model.a") | plain("model.embed_tokens")
    tied = run(rows, {"tie_word_embeddings": True}, exclude=[head, f"{head}.*"])
    assert codes(tied) == set()
    untied = run(rows, {"tie_word_embeddings": False}, exclude=[head, f"{head}.*"])
    assert codes(untied) == {"pattern_unmatched"}


def test_quark_012_writes_each_entry_with_its_children() -> None:
    rows = packed("model.a") | plain("lm_head")
    assert codes(run(rows, exclude=["lm_head.*", "lm_head"])) == set()


def test_p29_fused_names_and_single_experts() -> None:
    rows = packed("model.layers.0.o_proj") | plain("visual.blocks.0.attn.qkv")
    entries_ = ["visual.blocks.0.attn.qkv_proj"]
    for expert in range(8):
        for leaf in ("gate", "up", "down"):
            name = f"model.layers.3.mlp.experts.{expert}.{leaf}_proj"
            rows |= plain(name)
            entries_.append(name)
    result = run(rows, exclude=entries_)
    assert codes(result) == {"exclude_fused"}
    assert finding(result, "exclude_fused").severity == "note"


def test_p29_partly_excluded_banks_are_reported() -> None:
    rows: Rows = {}
    for expert in range(8):
        name = f"model.layers.3.mlp.experts.{expert}.up_proj"
        rows |= plain(name) if expert == 5 else packed(name)
    result = run(rows, exclude=["model.layers.3.mlp.experts.5.up_proj"])
    found = finding(result, "partial_experts")
    assert (found.severity, found.where) == ("warning", "model.layers.3.mlp.experts (bf16, w4a4)")


@pytest.mark.parametrize("shared", ["bf16", "fp8", "w4a4", "w4a16"])
@pytest.mark.parametrize("spelling", ["shared_expert", "shared_experts"])
def test_p44_p45_a_shared_expert_unlike_the_routed_ones(shared: str, spelling: str) -> None:
    rows: Rows = plain("m.0.mlp.shared_expert_gate", 1, 128)
    for expert in range(64):
        rows |= packed(f"m.0.mlp.experts.{expert}.down_proj")
    name = f"m.0.mlp.{spelling}.down_proj"
    dtypes = {"bf16": "BF16", "fp8": "F8_E4M3"}
    rows |= plain(name, dtype=dtypes[shared]) if shared in dtypes else packed(name)
    layers = {"*shared*": {"fp8": W8, "w4a16": W4A16}.get(shared, W4A4)}
    result = run(rows, exclude=["*shared_expert_gate"], layer_quant_config=layers)
    if shared == "w4a4":
        assert "shared_expert_not_fusable" not in codes(result)
    else:
        where = finding(result, "shared_expert_not_fusable").where
        assert where == f"m.0.mlp ({shared} beside w4a4)"


def test_p28_stored_dtypes_beat_a_stale_exclude_list() -> None:
    """Routed experts packed, shared ones BF16: the list that names neither changes nothing."""
    rows = packed("m.mlp.experts.0.up_proj") | plain("m.mlp.shared_experts.up_proj")
    result = run(rows, exclude=["*shared_expert.*"])
    assert names(result) == ["m.mlp.experts.0.up_proj"]
    assert {"pattern_unmatched", "unquantized", "shared_expert_not_fusable"} == codes(result)


def test_p37_members_of_a_fused_group_may_differ() -> None:
    rows = packed("m.q_proj") | plain("m.k_proj", dtype="F8_E4M3") | plain("m.v_proj")
    result = run(rows, layer_quant_config={"*k_proj": W8}, exclude=["*v_proj"])
    assert names(result) == ["m.q_proj"]
    assert result.others == {"m.k_proj": "fp8", "m.v_proj": "bf16"}


def test_p38_small_projections_stay_unquantized() -> None:
    rows = packed("m.in_proj_qkv") | packed("m.in_proj_z")
    rows |= plain("m.in_proj_a", 48, 128) | plain("m.in_proj_b", 48, 128)
    result = run(rows)
    assert names(result) == ["m.in_proj_qkv", "m.in_proj_z"]
    assert "2 places: m.in_proj_a, m.in_proj_b" in finding(result, "unquantized").message


def test_p21_block_fp8_beside_mxfp4_is_left_alone() -> None:
    rows = packed("m.b") | {
        "m.a.weight": ("F8_E4M3", (256, 256)),
        "m.a.weight_scale_inv": ("F32", (2, 2)),
        "m.c.weight": ("F8_E4M3", (256, 256)),
        "m.c.weight_scale": ("F8_E8M0", (2, 2)),
        "m.d.weight": ("F8_E4M3", (256, 256)),
        "m.d.weight_scale": ("U8", (256, 8)),
    }
    block = {"weight": {**FP8, "qscheme": "per_block"}}
    result = run(rows, layer_quant_config={"m.[acd]": block})
    assert names(result) == ["m.b"]
    assert len(result.copied) == 6
    assert codes(result) == set()


def test_fp8_where_the_config_says_mxfp4_is_copied_with_a_warning() -> None:
    rows = packed("m.a") | plain("m.b", dtype="F8_E4M3")
    assert finding(run(rows), "config_disagrees").where == "m.b"


def test_fp8_that_a_later_pattern_explains() -> None:
    rows = packed("m.a") | plain("m.b", dtype="F8_E4M3")
    assert codes(run(rows, layer_quant_config={"*.b": W4A4, "m.b": W8})) == {"pattern_order"}
    assert codes(run(rows, layer_quant_config={"*.b": W8, "m.b": W4A4})) == set()


def test_p53_other_formats_pass_through_tensor_by_tensor() -> None:
    rows = packed("m.a") | {
        "m.b.weight": ("U32", (64, 16)),
        "m.b.scales": ("BF16", (64, 4)),
        "m.b.biases": ("BF16", (64, 4)),
    }
    result = run(rows, exclude=["m.b"])
    assert result.copied == ("m.b.weight", "m.b.scales", "m.b.biases")
    assert result.others == {"m.b": "u32"}


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "k_proj.output_scale"])
def test_p60_cache_scales_are_copied_and_listed(name: str) -> None:
    full = f"model.layers.0.self_attn.{name}"
    result = run(packed("model.layers.0.self_attn.k_proj") | {full: ("F32", ())})
    assert result.labels == {full: "kv_scale"}
    assert finding(result, "kv_scales").where == full
    assert full in result.copied


def test_rotations_are_a_warning() -> None:
    rows = packed("m.a") | {
        "m.a.input_rotation": ("F32", (32, 32)),
        "shared_input_rotation_64": ("F32", (64, 64)),
    }
    result = run(rows)
    assert set(result.labels.values()) == {"rotation"}
    assert finding(result, "rotation").severity == "warning"


@pytest.mark.parametrize("ending", ["input_scale", "input_quantizer.scale"])
def test_static_input_scales(ending: str) -> None:
    rows = packed("m.a") | {f"m.a.{ending}": ("BF16", ())}
    result = run(rows, global_quant_config=W4A8)
    assert result.layers[0].input_scale == f"m.a.{ending}"
    assert result.layers[0].activation == Activation("fp8_e4m3", None, True)
    assert codes(result) == set()
    assert finding(run(rows), "unexpected_input_scale").where == "m.a"
    missing = finding(run(packed("m.a"), global_quant_config=W4A8), "missing_input_scale")
    assert missing.severity == "error"


@pytest.mark.parametrize("nested", [False, True])
def test_p50_a_tied_head_that_is_quantized(nested: bool) -> None:
    rows = packed("lm_head") | plain("model.embed_tokens")
    tied: dict[str, Any] = {"tie_word_embeddings": True}
    result = run(rows, {"text_config": tied} if nested else tied)
    assert names(result) == ["lm_head"]
    assert finding(result, "tied_quantized_head").severity == "error"


def test_p49_an_untied_quantized_head_is_a_layer() -> None:
    result = run(packed("lm_head", n=1001) | plain("model.embed_tokens", 1001, 128))
    assert [(layer.name, layer.n) for layer in result.layers] == [("lm_head", 1001)]
    assert codes(result) == {"quantized_head"}
    assert finding(result, "quantized_head").severity == "note"


def test_a_quantized_embedding_is_a_warning() -> None:
    result = run(packed("model.embed_tokens"))
    assert finding(result, "quantized_embedding").severity == "warning"


def test_scales_of_no_weight_and_of_floats_are_mentioned() -> None:
    rows = (
        packed("m.a")
        | plain("m.b")
        | {
            "m.b.weight_scale": ("F32", (64, 4)),
            "m.c.weight_scale": ("F32", ()),
        }
    )
    result = run(rows, exclude=["m.b"])
    assert finding(result, "scale_beside_float").where == "m.b.weight_scale"
    assert finding(result, "scale_without_weight").where == "m.c.weight_scale"


# Synthetic tables: what is refused

REFUSED: dict[str, tuple[Rows, dict[str, Any], type[Mxfp4PrepError], str]] = {
    "no_scale": (
        plain("m.a", 64, 64, dtype="U8"),
        {},
        InvalidCheckpoint,
        "U8 weight without a scale",
    ),
    "no_scale_bank": (
        {"m.experts.w": ("U8", (8, 4, 16))},
        {},
        InvalidCheckpoint,
        "without a scale",
    ),
    "scale_alone": (
        packed("m.a") | {"m.b.weight_scale": ("U8", (64, 4))},
        {},
        InvalidCheckpoint,
        r"^m\.b\.weight_scale: a scale without a weight: found U8 \[64, 4\] alone",
    ),
    "e8m0_alone": (
        packed("m.a") | {"m.b.weight_scale": ("F8_E8M0", (64, 4))},
        {},
        InvalidCheckpoint,
        "a scale without a weight",
    ),
    "quantizer_scale_alone": (
        packed("m.a") | {"m.b.weight_quantizer.scale": ("U8", (64, 4))},
        {},
        InvalidCheckpoint,
        "a scale without a weight",
    ),
    "bank_scale_alone": (
        packed("m.a") | {"m.experts.w_scale": ("U8", (8, 4, 1))},
        {},
        InvalidCheckpoint,
        "a scale without a weight",
    ),
    "scale_beside_bf16": (
        packed("m.a") | plain("m.b") | {"m.b.weight_scale": ("U8", (64, 4))},
        {"exclude": ["m.b"]},
        InvalidCheckpoint,
        r"beside m\.b\.weight in BF16",
    ),
    "two_scales": (
        packed("m.a") | packed("m.a", ending=".weight_quantizer.scale"),
        {},
        InvalidCheckpoint,
        "two scales: found m.a.weight_scale and m.a.weight_quantizer.scale",
    ),
    "bank_with_foreign_scale": (
        packed("m.a") | {"m.a_scale": ("U8", (64, 4))},
        {},
        InvalidCheckpoint,
        "a scale that its weight does not have",
    ),
    "fp8_scale": (
        plain("m.a", 64, 64, dtype="U8") | {"m.a.weight_scale": ("F8_E4M3", (64, 4))},
        {},
        InvalidCheckpoint,
        r"not an MXFP4 scale: found F8_E4M3 \[64, 4\]",
    ),
    "bf16_scale": (
        plain("m.a", 64, 64, dtype="U8") | {"m.a.weight_scale": ("BF16", (64, 4))},
        {},
        InvalidCheckpoint,
        "not an MXFP4 scale",
    ),
    "scale_of_16": (
        plain("m.a", 64, 64, dtype="U8") | {"m.a.weight_scale": ("U8", (64, 8))},
        {},
        InvalidCheckpoint,
        r"does not fit its weight: found U8 \[64, 8\], expected \[64, 4\] for U8 \[64, 64\]",
    ),
    "scale_floored": (
        plain("m.a", 4, 40, dtype="U8") | {"m.a.weight_scale": ("U8", (4, 2))},
        {},
        InvalidCheckpoint,
        r"expected \[4, 3\]",
    ),
    "scale_transposed": (
        plain("m.a", 64, 64, dtype="U8") | {"m.a.weight_scale": ("U8", (4, 64))},
        {},
        InvalidCheckpoint,
        "does not fit",
    ),
    "scale_flat": (
        plain("m.a", 64, 64, dtype="U8") | {"m.a.weight_scale": ("U8", (256,))},
        {},
        InvalidCheckpoint,
        "does not fit",
    ),
    "width_of_fp6": (
        plain("m.a", 64, 96, dtype="U8") | {"m.a.weight_scale": ("U8", (64, 4))},
        {},
        InvalidCheckpoint,
        r"expected \[64, 6\]",
    ),
    "stacked_scale_of_other_rows": (
        {"m.a.weight": ("U8", (768, 64)), "m.a.weight_scale": ("U8", (8, 95, 4))},
        {},
        InvalidCheckpoint,
        "does not fit",
    ),
    "bank_scale_of_other_bank": (
        {"m.experts.w": ("U8", (8, 4, 16)), "m.experts.w_scale": ("U8", (4, 8, 1))},
        {},
        InvalidCheckpoint,
        "does not fit",
    ),
    "vector": (
        plain("m.a", 64, dtype="U8") | {"m.a.weight_scale": ("U8", (4,))},
        {},
        InvalidCheckpoint,
        "not a packed weight",
    ),
    "empty": (
        plain("m.a", 0, 64, dtype="U8") | {"m.a.weight_scale": ("U8", (0, 4))},
        {},
        InvalidCheckpoint,
        "not a packed weight",
    ),
    "second_scale": (
        packed("m.a") | {"m.a.weight_scale_2": ("F32", ())},
        {},
        InvalidCheckpoint,
        r"^m\.a\.weight_scale_2: .* has no such tensor",
    ),
    "second_scale_0.11": (
        packed("m.a") | {"m.a.weight_quantizer.1.scale": ("F32", ())},
        {},
        InvalidCheckpoint,
        "has no such tensor",
    ),
    "zero_point": (
        packed("m.a") | {"m.a.weight_zero_point": ("I8", ())},
        {},
        InvalidCheckpoint,
        "has no such tensor",
    ),
    "packed_but_config_fp8": (
        packed("m.a"),
        {"global_quant_config": W8},
        InvalidCheckpoint,
        r"^m\.a\.weight: .*U8 \[64, 64\] and scheme fp8_per_channel in config\.json",
    ),
    "packed_but_config_null": (
        packed("m.a"),
        {"global_quant_config": None},
        InvalidCheckpoint,
        "scheme unquantized",
    ),
    "packed_but_type_config_int8": (
        packed("m.a"),
        {"layer_type_quant_config": {"Linear": {"weight": {"dtype": "int8"}}}},
        InvalidCheckpoint,
        "scheme int8",
    ),
    "excluded": (packed("m.a"), {"exclude": ["m.a"]}, InvalidCheckpoint, "excluded by the config"),
    "unexplained_u8": (
        packed("m.a") | {"m.table": ("U8", (16, 16))},
        {},
        InvalidCheckpoint,
        r"^m\.table: a U8 weight without a scale",
    ),
    "bad_regex": (
        packed("m.a"),
        {"exclude": ["re:("]},
        InvalidCheckpoint,
        "bad regular expression",
    ),
    "input_int8": (
        packed("m.a"),
        {"global_quant_config": {"weight": FP4, "input_tensors": {"dtype": "int8"}}},
        Unsupported,
        "an input quantized in a way that is not known here: found mxfp4_int8_static",
    ),
    "lookalike_in_one_layer": (
        packed("m.a") | packed("m.b"),
        {"layer_quant_config": {"m.b": {"weight": AMDFP4_G32}}},
        Unsupported,
        r"^m\.b\.weight: the weight is amdfp4_g32, not MXFP4",
    ),
    "mx_legacy": (
        packed("m.a"),
        {"global_quant_config": {"weight": {"dtype": "mx", "mx_element_dtype": "fp4"}}},
        Unsupported,
        "the weight is mx, not MXFP4",
    ),
    "f4": (
        plain("m.a", 64, 128, dtype="F4"),
        {},
        Unsupported,
        r"stored in dtype F4: found F4 \[64",
    ),
    "i8": (
        packed("m.b") | plain("m.a", 64, 64, dtype="I8"),
        {},
        Unsupported,
        r"found I8 \[64, 64\], expected U8",
    ),
    "gpt_oss_blocks": (
        {"m.experts.w_blocks": ("U8", (8, 4, 2, 16)), "m.experts.w_scales": ("U8", (8, 4, 2))},
        {},
        Unsupported,
        "the _blocks and _scales form of gpt-oss",
    ),
    "all_bf16": (
        plain("m.a"),
        {},
        Unsupported,
        "no MXFP4 layer: config.json says w4a4 but nothing is stored so: found weights in bf16",
    ),
    "all_fp8": (
        plain("m.a", dtype="F8_E4M3"),
        {"global_quant_config": W8},
        Unsupported,
        "no MXFP4 layer: the checkpoint is fp8_per_channel: found weights in fp8",
    ),
    "nothing": ({}, {}, Unsupported, "no MXFP4 layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tried: Any) -> None:
    """P56 (f4), P28 (packed_but...), P43 (no_scale, scale_alone): found and expected, one line."""
    rows, section, error, words = REFUSED[case]
    with pytest.raises(Mxfp4PrepError, match=words) as raised:
        run(rows, **section)
    assert type(raised.value) is error
    assert "\n" not in str(raised.value)
    tried("Q1")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value):
            yield from places(inner, (*path, key))


WHOLE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "text_config": {},
    "quantization_config": {
        "quant_method": "quark",
        "global_quant_config": W4A4,
        "layer_quant_config": {"*.b": W4A8, "m.*": {"weight": NVFP4}},
        "layer_type_quant_config": {"Linear": W4A16},
        "kv_cache_quant_config": {},
        "exclude": ["lm_head", "*.c", "re:.*d$"],
        "export": {"weight_format": "real_quantized"},
    },
}


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(list(places(WHOLE))[1:]), value=JSON)
def test_any_json_in_any_place_of_the_config_is_read_or_refused(
    place: tuple[Any, ...], value: Any
) -> None:
    config = copy.deepcopy(WHOLE)
    holder: Any = config
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    tensors = entries(packed("layers.0.b") | packed("layers.1.a") | plain("x.c"))
    try:
        result = classify(tensors, config, Topology())
    except Mxfp4PrepError as error:
        text = str(error)
    else:
        text = ""
        assert accounted(result) == sorted(tensors)
    assert "\n" not in text


@settings(max_examples=300, deadline=None)
@given(
    tensors=st.dictionaries(
        st.sampled_from(["a", "b", "experts.w", "mtp.c"]).flatmap(
            lambda module: st.sampled_from(
                ["", ".weight", ".weight_scale", "_scale", ".bias", ".weight_scale_2", ".k_scale"]
            ).map(lambda ending: module + ending)
        ),
        st.tuples(
            st.sampled_from(["U8", "BF16", "F8_E4M3", "F8_E8M0", "F4", "I8"]),
            st.lists(st.integers(0, 4), max_size=4).map(tuple),
        ),
        max_size=6,
    )
)
def test_any_tensors_are_accounted_for_or_refused(tensors: Rows) -> None:
    rows = packed("z") | tensors
    try:
        result = run(rows)
    except Mxfp4PrepError:
        return
    assert accounted(result) == sorted(rows)
    for name in result.copied:
        dtype, shape = rows[name]
        if dtype == "U8" and len(shape) == 2:  # the scale of a weight in another format
            owner = name.removesuffix(".weight_scale").removesuffix("_scale")
            beside = {rows[each][0] for each in (owner, f"{owner}.weight") if each in rows}
            assert beside & {"F8_E4M3", "F8_E8M0", "I8"}


def test_names_from_files_are_escaped_in_errors() -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        run(plain("m\x1b[31m\n", 64, 64, dtype="U8"))
    assert "\x1b" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_findings_are_one_per_kind_however_many_layers() -> None:
    rows: Rows = {}
    for i in range(2000):
        rows |= packed(f"m.{i}.a", k=80, ending=".weight_quantizer.scale") | plain(f"m.{i}.router")
    result = run(rows)
    assert codes(result) == {"short_group", "scale_spelling", "unquantized_router"}
    assert len(result.findings) == 4
    *others, rounding = sorted(result.findings, key=lambda each: each.code == "activation_rounding")
    assert all("2,000 places: " in each.message for each in others)
    assert rounding.message.endswith(": 2,000 layers")
    assert finding(result, "unquantized_router").message.endswith(
        "m.0.router, m.1.router, m.2.router and 1,997 more"
    )


@pytest.mark.timeout(60)
def test_a_hundred_thousand_tensors() -> None:
    rows: Rows = {}
    for layer in range(61):
        for expert in range(256):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                rows |= packed(f"model.layers.{layer}.mlp.experts.{expert}.{leaf}")
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            rows |= plain(f"model.layers.{layer}.self_attn.{leaf}")
    tensors = entries(rows)
    section = {
        "quant_method": "quark",
        "global_quant_config": W4A4,
        "layer_quant_config": {"*mlp.experts*": W4A4, "*shared*": W8},
        "exclude": ["lm_head", "*self_attn*", r"re:.*mlp\.gate$"],
    }
    result = classify(tensors, {"quantization_config": section}, Topology())
    assert len(result.layers) == 61 * 256 * 3
