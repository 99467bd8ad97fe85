"""How a manifest says inputs are quantized, against its schemes and against the source's config."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import FIXTURES
from prepared_factory import Layer, build, edit_config, edit_manifest

import mxfp4prep
from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest, Unsupported
from mxfp4prep.runtime.source_inputs import Inputs, named_inputs

WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
EVEN = {"dtype": "fp4", "is_dynamic": True, "scale_calculation_mode": "even"}
FP6 = {"dtype": "fp6_e2m3", "is_dynamic": True, "scale_calculation_mode": "even"}
TOKEN = {"dtype": "fp8_e4m3", "is_dynamic": True, "qscheme": "per_channel"}
TENSOR = {"dtype": "fp8_e4m3", "dynamic": True, "qscheme": "per_tensor"}
STATIC = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor"}

RECORDED: dict[str, dict[str, Any]] = {
    "w4a4": {"dtype": "fp4", "scale_mode": "even", "static": False},
    "w4a6": {"dtype": "fp6_e2m3", "scale_mode": "even", "static": False},
    "w4a8": {"dtype": "fp8_e4m3", "scale_mode": "per_token", "static": False},
    "w4a16": {"dtype": None, "scale_mode": None, "static": False},
}


def config_of(**sections: Any) -> dict[str, Any]:
    return {"quantization_config": {"source_quantization_config": sections}}


def part(inputs: Any) -> dict[str, Any]:
    return {"weight": WEIGHT, "input_tensors": inputs}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (EVEN, ("fp4", "even", False)),
        (FP6, ("fp6_e2m3", "even", False)),
        (TOKEN, ("fp8_e4m3", "per_token", False)),
        (TENSOR, ("fp8_e4m3", "per_tensor", False)),
        (STATIC, ("fp8_e4m3", None, True)),
        ({**STATIC, "is_dynamic": None, "dynamic": True}, ("fp8_e4m3", "per_tensor", False)),
        (None, (None, None, False)),
    ],
)
def test_each_section_is_looked_at(spec, expected):
    for sections in (
        {"global_quant_config": part(spec)},
        {"layer_quant_config": {"*": part(spec)}},
        {"layer_type_quant_config": {"Linear": part(spec)}},
    ):
        assert named_inputs(config_of(**sections)) == {Inputs(*expected)}


@pytest.mark.parametrize(
    "config",
    [{}, {"quantization_config": 3}, config_of(), config_of(global_quant_config={"weight": None}),
     config_of(layer_quant_config=[1], global_quant_config=4)],
)  # fmt: skip
def test_a_config_that_names_none(config):
    assert named_inputs(config) == frozenset()


def test_quarks_own_configs():
    found = {}
    for name in ("llama-w4a4-aligned", "qwen3-w4a16-misaligned", "llama-mixed-fp8attn-kvfp8"):
        source = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
        found[name] = named_inputs({"quantization_config": {"source_quantization_config": source}})
    even, none = Inputs("fp4", "even", False), Inputs(None, None, False)
    assert found["llama-w4a4-aligned"] == {even}
    assert found["qwen3-w4a16-misaligned"] == {none}
    assert found["llama-mixed-fp8attn-kvfp8"] >= {even, none}


def prepared(root, scheme: str, *specs: Any, **changed: Any):
    build(root, [Layer("fc1", 64, 192, "triton", scheme, activation=RECORDED[scheme])])
    sections = {f"*{number}": part(spec) for number, spec in enumerate(specs)}
    named = {"quant_method": "quark", "layer_quant_config": sections}
    edit_config(root, lambda c: c["quantization_config"].update(source_quantization_config=named))
    edit_manifest(root, lambda d: d["layers"][0]["activation"].update(changed))
    return mxfp4prep.load(root)["fc1"]


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        ("w4a4", {"dtype": "fp6_e2m3"}),
        ("w4a4", {"dtype": None}),
        ("w4a4", {"static": True}),
        ("w4a6", {"dtype": "fp4"}),
        ("w4a8", {"dtype": "fp8_e5m2"}),
        ("w4a8", {"scale_mode": None}),
        ("w4a8", {"scale_mode": "per_row"}),
        ("w4a8", {"static": True}),
        ("w4a16", {"dtype": "fp4"}),
        ("w4a16", {"scale_mode": "even"}),
    ],
)
def test_inputs_that_are_not_those_of_the_scheme(tmp_path, scheme, changed):
    assert prepared(tmp_path, scheme) is not None
    with pytest.raises(InvalidManifest, match=f"fc1: inputs that are not those of {scheme}: found"):
        prepared(tmp_path, scheme, **changed)


@pytest.mark.parametrize(
    ("scheme", "specs", "changed", "found"),
    [
        ("w4a6", [FP6, EVEN], {"dtype": "fp6_e3m2"}, "fp6_e3m2 dynamic even"),
        ("w4a8", [TOKEN], {"scale_mode": "per_tensor"}, "fp8_e4m3 dynamic per_tensor"),
        ("w4a8", [TOKEN, None], {"scale_mode": None, "static": True}, "fp8_e4m3 static"),
        ("w4a4", [EVEN], {"scale_mode": "floor"}, "fp4 dynamic floor"),
        ("w4a4", [EVEN], {"scale_mode": None}, "fp4 dynamic,"),
    ],
)
def test_inputs_that_the_source_does_not_name(tmp_path, scheme, specs, changed, found):
    """Another kind of the same scheme: no shape and no scheme tells, the source's config does."""
    assert prepared(tmp_path, scheme, *specs) is not None
    with pytest.raises(InvalidManifest, match=f"source's config does not name: found {found}"):
        prepared(tmp_path, scheme, *specs, **changed)


def test_a_scale_mode_of_the_source_that_is_not_even(tmp_path):
    """Not a contradiction: the model loads, and the layer says that nobody here can run it."""
    floor = EVEN | {"scale_calculation_mode": "floor"}
    with pytest.raises(Unsupported, match="scale mode"):
        prepared(tmp_path, "w4a4", floor, scale_mode="floor")


@pytest.mark.parametrize("key", ["dtype", "scale_calculation_mode"])
@pytest.mark.parametrize("value", [[], {}, [1], 1, 0, 1.5, True, False, {"a": 1}, [[]]])
def test_a_name_that_is_none(tmp_path, key, value):
    for sections in (
        {"global_quant_config": part(EVEN | {key: value})},
        {"layer_quant_config": {"*": part(EVEN | {key: value})}},
        {"layer_type_quant_config": {"Linear": part(TOKEN | {key: value})}},
    ):
        with pytest.raises(InvalidCheckpoint, match=f"input_tensors.{key}: not a name") as caught:
            named_inputs(config_of(**sections))
        assert caught.value.found == repr(value)
        assert caught.value.hint
    with pytest.raises(InvalidCheckpoint, match="not a name"):
        prepared(tmp_path, "w4a4", EVEN | {key: value})
