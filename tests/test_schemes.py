"""Tensor specs and whole configs, against the names of the files that Quark wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, Unsupported
from mxfp4prep.quark.config import read_config, scheme_of_config
from mxfp4prep.quark.schemes import Activation, Scheme, layer_scheme

VARIANTS = Path(__file__).parent / "data" / "fixtures" / "config-variants"

VARIANT_SCHEMES = {
    "0.9": "w4a4",
    "0.10": "w4a4",
    "0.11.2": "w4a4",
    "0.12.post1": "w4a4",
    "0.13-attention-fp8": "w4a4",
    "0.13-custom-mode-fp8": "fp8",
    "0.13-fake-quantized": "fake_quantized",
    "0.13-kv-cache-with-excluded-attention": "w4a4",
    "0.13-scheme-amdfp4": "amdfp4",
    "0.13-scheme-amdfp4_g32": "amdfp4_g32",
    "0.13-scheme-amdfp4_global32": "amdfp4_global32",
    "0.13-scheme-fp8": "fp8",
    "0.13-scheme-int4_fp8": "int4_fp8",
    "0.13-scheme-int4_wo_32": "int4_wo_32",
    "0.13-scheme-int8": "int8",
    "0.13-scheme-mxfp4_fp8": "w4a8",
    "0.13-scheme-mxfp4_mxfp6_e2m3": "w4a6",
    "0.13-scheme-mxfp4_weight_only": "w4a16",
    "0.13-scheme-mxfp6_e3m2": "mxfp6_e3m2",
    "0.13-scheme-nvfp4": "nvfp4",
    "0.13-scheme-ptpc_fp8": "ptpc_fp8",
}

FP4: dict[str, Any] = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "is_dynamic": False,
    "ch_axis": -1,
    "scale_calculation_mode": "even",
}
FP8: dict[str, Any] = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}


def spec(base: dict[str, Any] = FP4, **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


DYNAMIC = spec(is_dynamic=True)


def scheme(weight: object, inputs: object = None) -> Scheme:
    return layer_scheme({"weight": weight, "input_tensors": inputs}, "here")


def quark(**changes: Any) -> dict[str, Any]:
    section = {"quant_method": "quark", "global_quant_config": {"weight": FP4}, **changes}
    return {"quantization_config": section}


def test_every_variant_is_in_the_table() -> None:
    names = {path.stem.removeprefix("quantization_config-") for path in VARIANTS.glob("*.json")}
    assert names == set(VARIANT_SCHEMES)


@pytest.mark.parametrize(("name", "expected"), VARIANT_SCHEMES.items())
def test_config_variant_is_named(name: str, expected: str) -> None:
    path = VARIANTS / f"quantization_config-{name}.json"
    assert scheme_of_config(json.loads(path.read_text())) == expected


@pytest.mark.parametrize(
    ("inputs", "name", "activation"),
    [
        (None, "w4a16", (None, None, False)),
        (DYNAMIC, "w4a4", ("fp4", "even", False)),
        (spec(DYNAMIC, scale_calculation_mode="floor"), "w4a4", ("fp4", "floor", False)),
        (spec(DYNAMIC, scale_calculation_mode=None), "w4a4", ("fp4", None, False)),
        (spec(DYNAMIC, dtype="fp6_e2m3"), "w4a6", ("fp6_e2m3", "even", False)),
        (spec(DYNAMIC, dtype="fp6_e3m2"), "w4a6", ("fp6_e3m2", "even", False)),
        (FP8, "w4a8", ("fp8_e4m3", None, True)),
        (spec(FP8, is_dynamic=True), "w4a8", ("fp8_e4m3", "per_tensor", False)),
        (
            spec(FP8, is_dynamic=True, qscheme="per_channel"),
            "w4a8",
            ("fp8_e4m3", "per_token", False),
        ),
    ],
)
def test_inputs_of_mxfp4(inputs: object, name: str, activation: tuple[Any, ...]) -> None:
    found = scheme(FP4, inputs)
    assert found.is_mxfp4
    assert (found.name, found.activation) == (name, Activation(*activation))


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        (spec(), "mxfp4_fp4_static"),
        (spec(DYNAMIC, group_size=16), "mxfp4_fp4"),
        (spec(DYNAMIC, scale_format="e5m3"), "mxfp4_fp4"),
        ({"dtype": "int8", "is_dynamic": True}, "mxfp4_int8"),
        (spec(FP8, qscheme="per_channel"), "mxfp4_fp8_e4m3_static"),
        (spec(FP8, dtype="fp8_e5m2"), "mxfp4_fp8_e5m2_static"),
        ([DYNAMIC], "mxfp4_fp4"),
        ([DYNAMIC, FP8], "mxfp4_fp4_fp8_e4m3"),
    ],
)
def test_other_inputs_are_not_one_of_the_four(inputs: object, name: str) -> None:
    found = scheme(FP4, inputs)
    assert not found.is_mxfp4
    assert not found.is_twin
    assert found.name == name


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        (None, "unquantized"),
        (spec(ch_axis=1), "w4a16"),
        (spec(ch_axis=None), "w4a16"),
        ({k: v for k, v in FP4.items() if k not in ("ch_axis", "is_dynamic")}, "w4a16"),
        (spec(ch_axis=0), "fp4_g32_e8m0_axis0"),
        (spec(is_dynamic=True), "fp4_g32_e8m0_dynamic"),
        (spec(is_dynamic=None, dynamic=True), "fp4_g32_e8m0_dynamic"),
        (spec(ch_axis=None, axis=0), "fp4_g32_e8m0_axis0"),
        (spec(group_size=16), "fp4_g16_e8m0"),
        (spec(group_size=None), "fp4_gNone_e8m0"),
        (spec(scale_format=None), "fp4_g32_None"),
        (spec(scale_format="e5m3"), "amdfp4_g32"),
        (spec(scale_format="e5m3", group_size=16), "amdfp4"),
        ([spec(scale_format="float32", group_size=16), spec(FP8)], "nvfp4"),
        ([spec(group_size=16), spec(FP8, dtype="fp8_e5m3")], "amdfp4_global16"),
        ([spec(), spec(FP8, dtype="fp8_e5m3")], "amdfp4_global32"),
        ([spec()], "list_of_fp4"),
        ([spec(), spec(FP8)], "list_of_fp4_fp8_e4m3"),
        (spec(dtype="fp6_e2m3"), "mxfp6_e2m3"),
        (spec(dtype="fp6_e3m2"), "mxfp6_e3m2"),
        (spec(dtype="mx", mx_element_dtype="fp4"), "mx"),
        (spec(dtype="mx6"), "mx6"),
        (spec(dtype="bfp16"), "bfp16"),
        (spec(dtype="fp8_e4m3"), "mxfp8"),
        (FP8, "fp8"),
        (spec(FP8, qscheme="per_block"), "fp8_block"),
        (spec(FP8, qscheme="per_channel"), "fp8_per_channel"),
        (spec(FP8, qscheme="per_group"), "fp8_other"),
        ({"dtype": "int4", "qscheme": "per_group", "group_size": 128}, "int4_wo_128"),
        ({"dtype": "uint4", "qscheme": "per_group", "group_size": 32}, "uint4_wo_32"),
        ({"dtype": "int8", "qscheme": "per_tensor"}, "int8"),
    ],
)
def test_weights(weight: object, name: str) -> None:
    found = scheme(weight)
    assert found.name == name
    assert found.is_mxfp4 == (name == "w4a16")


@pytest.mark.parametrize("name", ["scale_format", "qscheme", "group_size", "dtype"])
def test_one_field_alone_decides(name: str) -> None:
    """Every one of these fields set to something else makes a weight another scheme."""
    other: Any = {"group_size": 64}.get(name, "other")
    assert not scheme(spec(**{name: other})).is_mxfp4


def test_only_amdfp4_g32_and_its_like_are_twins() -> None:
    assert scheme(spec(scale_format="e5m3")).is_twin
    assert scheme(spec(scale_format=None)).is_twin
    assert not scheme(spec(scale_format="e5m3", group_size=16)).is_twin
    assert not scheme(FP4).is_twin
    assert not scheme([spec(), spec(FP8, dtype="fp8_e5m3")]).is_twin
    assert not scheme(spec(dtype="fp6_e2m3")).is_twin


def test_unknown_keys_and_missing_ones_are_fine() -> None:
    legacy = {"weight": spec(observer_cls="x", new_key=[1]), "something": 3}
    assert layer_scheme(legacy, "here").name == "w4a16"


@pytest.mark.parametrize(
    ("config", "key", "found"),
    [
        ({"quantization_config": []}, "quantization_config", "a list"),
        ({"quantization_config": "quark"}, "quantization_config", "the string 'quark'"),
        ({"quantization_config": {}}, "quant_method", "null"),
        (quark(quant_method=3), "quant_method", "the number 3"),
        (quark(exclude="lm_head"), "exclude", "the string 'lm_head'"),
        (quark(exclude={"lm_head": True}), "exclude", "an object"),
        (quark(exclude=["a", 7]), r"exclude\[1\]", "the number 7"),
        (quark(exclude=[["a"]]), r"exclude\[0\]", "a list"),
        (quark(layer_quant_config=[]), "layer_quant_config", "a list"),
        (quark(layer_quant_config={"*q": None}), r"layer_quant_config\['\*q'\]", "null"),
        (quark(layer_quant_config={"*q": {"weight": "fp4"}}), r"\['\*q'\]\.weight", "the string"),
        (quark(layer_type_quant_config="Linear"), "layer_type_quant_config", "the string"),
        (quark(layer_type_quant_config={"Linear": 4}), r"\['Linear'\]", "the number 4"),
        (quark(kv_cache_quant_config=[1]), "kv_cache_quant_config", "a list"),
        (quark(global_quant_config=[FP4]), "global_quant_config", "a list"),
        (
            quark(global_quant_config={"weight": "fp4"}),
            r"global_quant_config\.weight",
            "the string",
        ),
        (quark(global_quant_config={"weight": 4}), r"global_quant_config\.weight", "the number 4"),
        (quark(global_quant_config={"weight": []}), r"\.weight", "an empty list"),
        (quark(global_quant_config={"weight": [3]}), r"\.weight\[0\]", "the number 3"),
        (quark(global_quant_config={"weight": {}}), r"\.weight\.dtype", "null"),
        (quark(global_quant_config={"weight": spec(dtype=4)}), r"\.weight\.dtype", "the number 4"),
        (quark(global_quant_config={"weight": spec(group_size="32")}), "group_size", "the string"),
        (quark(global_quant_config={"weight": spec(group_size=True)}), "group_size", "true"),
        (
            quark(global_quant_config={"weight": spec(group_size=32.0)}),
            "group_size",
            "the number 32.0",
        ),
        (quark(global_quant_config={"weight": spec(is_dynamic=0)}), "is_dynamic", "the number 0"),
        (quark(global_quant_config={"weight": spec(ch_axis="-1")}), "ch_axis", "the string"),
        (
            quark(global_quant_config={"weight": FP4, "input_tensors": 1}),
            "input_tensors",
            "the number 1",
        ),
        (quark(export=[]), r"export", "a list"),
        (quark(export={"weight_format": 1}), r"export\.weight_format", "the number 1"),
    ],
)
def test_odd_types_name_the_key(config: dict[str, Any], key: str, found: str) -> None:
    with pytest.raises(
        InvalidCheckpoint, match=rf"^config\.json: .*{key} .*found {found}"
    ) as raised:
        read_config(config)
    assert raised.value.exit_code == 3
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no quantization_config"),
        ({"quantization_config": None}, "no quantization_config"),
        ({"text_config": {"quantization_config": {}}}, "under text_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the checkpoint is fp8"),
        ({"quantization_config": {"quant_method": "awq"}}, "the checkpoint is awq"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "the checkpoint is mxfp4"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "mxfp4prep"}}, "prepared already"),
        (quark(export={"weight_format": "fake_quantized"}), "fake_quantized"),
        (quark(export={"weight_format": "other"}), "other"),
    ],
)
def test_other_methods_and_formats_are_unsupported(config: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words) as raised:
        read_config(config)
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)


def test_a_prepared_checkpoint_says_what_to_do() -> None:
    with pytest.raises(Mxfp4PrepError) as raised:
        read_config({"quantization_config": {"quant_method": "mxfp4prep"}})
    assert raised.value.hint is not None
    assert "mxfp4prep show" in raised.value.hint
    assert "mxfp4prep restore" in raised.value.hint


@pytest.mark.parametrize("key", ["exclude", "layer_quant_config", "layer_type_quant_config"])
@pytest.mark.parametrize("missing", [True, False])
def test_legacy_maps_may_be_null_or_missing(key: str, missing: bool) -> None:
    config = read_config(quark() if missing else quark(**{key: None}))
    assert (config.exclude, config.layers, config.types) == ((), (), {})
    assert config.default.name == "w4a16"


def test_a_missing_global_config_quantizes_nothing() -> None:
    assert read_config(quark(global_quant_config=None)).default.name == "unquantized"


def test_several_schemes_are_joined_the_global_one_first() -> None:
    layers = {"*a": {"weight": spec(FP8)}, "*b": {"weight": None}, "*c": {"weight": FP4}}
    assert scheme_of_config(quark(layer_quant_config=layers)["quantization_config"]) == "w4a16+fp8"
    assert scheme_of_config({"quant_method": "quark"}) == "unquantized"


def test_layer_patterns_keep_file_order() -> None:
    layers = {"*z": {"weight": FP8}, "*a": {"weight": FP4}}
    config = read_config(quark(layer_quant_config=layers))
    assert [(key, each.name) for key, each in config.layers] == [("*z", "fp8"), ("*a", "w4a16")]
