"""Whole models: transformers' architecture over prepared modules against Quark's own logits.

The reference files hold logits that Quark's importer computed in float32 from the original
checkpoints: `logits_weights_only` with every activation quantizer removed, `logits` with them.
Here every MXFP4 linear is a PreparedLinear and every expert bank a PreparedExperts, read from a
checkpoint that convert wrote; all else (embeddings, norms, routers, lm_head) is the BF16 tensor
widened to float32.

In llama-mixed-fp8attn-kvfp8 only the MLP is MXFP4. Its attention is FP8 and copied through, so
this file dequantizes those weights itself, quantizes their inputs as the scheme says,
and compares with `logits_no_output_quant`: KV-cache quantizers are an engine's business.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file
from test_convert import converted
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import mxfp4prep

REFERENCES = sorted(
    p.name.removesuffix(".reference.safetensors") for p in FIXTURES.glob("*.reference.safetensors")
)
TOLERANCE = 1e-4


class Fp8Linear(nn.Module):
    """A per-channel FP8 linear with dynamic inputs, as Quark's importer runs ptpc_fp8.

    The config says per_channel with ch_axis 1; on a (batch, token, hidden) input that is one scale
    per token position, shared by the batch.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, quantize_input: bool) -> None:
        super().__init__()
        self.weight = weight.float() * scale.float()[:, None]
        self.quantize_input = quantize_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quantize_input:
            scale = x.abs().amax((0, 2), keepdim=True) / 448
            x = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return x @ self.weight.T


class Experts(nn.Module):
    """transformers' call order around a PreparedExperts."""

    def __init__(self, prepared: nn.Module) -> None:
        super().__init__()
        self.prepared = prepared

    def forward(self, x, ids, weights):
        return self.prepared(x, weights, ids)


@cache
def original_tensors(name: str) -> dict[str, torch.Tensor]:
    return {
        k: v for path in (FIXTURES / name).glob("*.safetensors") for k, v in load_file(path).items()
    }


def bare_model(name: str) -> nn.Module:
    config = json.loads((FIXTURES / name / "config.json").read_text())
    del config["quantization_config"]
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    settings._attn_implementation = "eager"
    settings.dtype = torch.float32
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()


def build(name: str, prepared: mxfp4prep.Prepared, quantize: bool) -> nn.Module:
    """The model of fixture `name` with its MXFP4 modules taken from `prepared`."""
    model = bare_model(name)
    replaced = 0
    banks = {n.rpartition(".experts.")[0] + ".experts" for n in prepared if ".experts." in n}
    for bank in banks:
        experts = prepared.experts(bank)
        experts.quantize_activations = quantize
        model.set_submodule(bank, Experts(experts))
        replaced += sum(n.startswith(bank) for n in prepared)
    for layer in prepared:
        if ".experts." in layer:
            continue
        module = prepared[layer]
        module.quantize_activations = quantize
        model.set_submodule(layer, module)
        replaced += 1
    assert replaced == len(prepared)
    tensors = original_tensors(name)
    for key, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            module_name = key.removesuffix(".weight")
            scale = tensors[f"{module_name}.weight_scale"]
            model.set_submodule(module_name, Fp8Linear(tensor, scale, quantize))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(prepared.tensor(key).float())
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return model


@pytest.fixture(scope="module", params=REFERENCES)
def fixture_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["auto at tp 1", "auto at tp 1,2,4,8", "all triton"])
def prepared_dir(request, fixture_name, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    tp = (1, 2, 4, 8) if "8" in request.param else (1,)
    layout = "triton" if "triton" in request.param else "auto"
    return converted(FIXTURES / fixture_name, out, tp, layout=layout).out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("quantize", [False, True], ids=["weights only", "activations quantized"])
def test_logits_are_quarks(fixture_name, prepared_dir, quantize):
    reference = load_file(FIXTURES / f"{fixture_name}.reference.safetensors")
    key = "logits" if quantize else "logits_weights_only"
    if quantize and "logits_no_output_quant" in reference:
        key = "logits_no_output_quant"
    model = build(fixture_name, mxfp4prep.load(prepared_dir), quantize)
    with torch.no_grad():
        logits = model(reference["input_ids"]).logits
    difference = (logits - reference[key]).abs().max().item()
    assert difference <= TOLERANCE
    # Quantizing activations matters: the two references must not pass for one another.
    if quantize and not torch.equal(reference["logits"], reference["logits_weights_only"]):
        assert (logits - reference["logits_weights_only"]).abs().max().item() > TOLERANCE


def test_every_mxfp4_fixture_loads_and_runs(mxfp4_fixture, tmp_path):
    prepared = mxfp4prep.load(converted(mxfp4_fixture, tmp_path / "out").out)
    assert len(prepared) > 0
    for name in prepared:
        layer = prepared[name]
        y = layer(torch.ones(2, layer.k, dtype=torch.bfloat16))
        assert y.shape == (2, layer.n)
        assert torch.isfinite(y).all()
