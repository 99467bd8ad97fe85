"""What the plugin does inside vLLM, and what it leaves to vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import facts_of, needs_vllm
from models import prepare, write_model
from safetensors import safe_open

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"
FP8_ATTENTION = FIXTURES / "llama-mixed-fp8attn-kvfp8"


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("facts")
    dense = prepare(write_model(root / "model", "llama"), root / "dense")
    mixed = prepare(FP8_ATTENTION, root / "mixed")
    experts = write_model(root / "experts", "qwen2_moe", shared_expert_intermediate_size=512)
    moe = prepare(experts, root / "moe")
    return facts_of("vllm_facts.py", dense, mixed, moe)


def test_registering_twice_is_registering_once(facts):
    assert facts["registered"] == 1
    assert set(facts["loaders"]) == {1}, "each loader is watched, once"


def test_parameters_have_the_stored_shapes(facts):
    """down_proj of 256 rows and 1024 columns, in rows of tiles."""
    assert facts["method"] == "PreparedLinearMethod"
    assert facts["shapes"] == [[256 // 16, 16 * 1024 // 2], [256 // 32, 1024]]
    assert facts["dequantized"] == [256, 1024]
    assert facts["output"] == [1, 3, 256]


def test_weights_are_never_processed_twice(facts):
    assert facts["pre-processed"] is True
    assert facts["processed again"] is True


def test_a_replaced_config_need_not_be_a_mapping(facts):
    for said, found in zip(facts["replaced"], ("None", "'quark'", "None"), strict=True):
        assert "config.json was replaced" in said
        assert f"quant_method {found}" in said


@pytest.mark.parametrize(
    ("kind", "method"),
    [("linears", "PreparedLinearMethod"), ("experts", "PreparedExpertsMethod")],
)
def test_parameters_of_another_process_need_no_loading(facts, kind, method):
    """vLLM's weight cache: nothing arrives, and that is no error there."""
    found = facts[f"unloaded {kind}"]
    assert method in found["methods"]
    assert "did not arrive" in found["said"]
    assert found["kept"] is True


@pytest.mark.parametrize("answer", ["all", "no embeddings", "no norm", "nothing said"])
def test_what_a_model_says_that_it_loaded(facts, answer):
    """A draft has embeddings and head of its target, and some drafts say nothing."""
    of_model, of_draft = facts["accounts"][answer]
    refused_model = {
        "no embeddings": "model.embed_tokens.weight (and 1 more): ",
        "no norm": "model.norm.weight: ",
        "nothing said": "LlamaForCausalLM: its loading does not say",
    }
    refused_draft = {"no norm": "model.norm.weight: "}
    assert of_model.startswith(refused_model.get(answer, ""))
    assert bool(of_model) == (answer in refused_model)
    assert of_draft.startswith(refused_draft.get(answer, ""))
    assert bool(of_draft) == (answer in refused_draft)


def test_a_loader_that_nobody_watches_is_refused(facts):
    """What it leaves out would not be noticed. The same one from vLLM's table serves."""
    assert "--load-format auto: loads past" in facts["loaded by others"]


def test_the_config_goes_to_workers(facts):
    assert facts["pickled"] is True
    assert facts["is Quark's"] is True


def test_fp8_attention_and_its_cache_stay_vllms(facts):
    assert facts["attention method"] == "QuarkLinearMethod"
    assert facts["attention scheme"] == "QuarkW8A8Fp8"
    assert facts["cache method"] == "QuarkKVCacheMethod"
    name = "model.layers.0.self_attn.k_proj.output_scale"
    for path in FP8_ATTENTION.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118 - it is no mapping
                stored = float(file.get_tensor(name))
    assert facts["k_scale"] == pytest.approx(stored)


def test_fusing_a_shared_expert_is_decided_as_for_quark(facts):
    assert facts["fusible"] is True
    assert facts["group size"] == 32


def test_a_fused_shared_expert_is_one_more_expert(facts):
    """What vLLM does with AITER on; the slot is loaded as any other."""
    apart, fused, doubled = facts["fused"]
    at = "model.layers.0.mlp"
    parts = ("gate_proj", "up_proj", "down_proj")
    assert apart == [4, *(f"{at}.experts.3.{part}" for part in parts)]
    assert fused == [5, *(f"{at}.shared_expert.{part}" for part in parts)]
    assert "cannot be fused" in doubled
