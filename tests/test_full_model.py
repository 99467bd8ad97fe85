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
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, MXFP4_FIXTURES
from prepared_factory import decode64
from safetensors.torch import load_file
from test_convert import converted
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import mxfp4prep
from mxfp4prep.restore import restore

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


def ml_dtypes_values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(..., k) float64 by ml_dtypes, NaN where a scale byte is 255."""
    return decode64(packed, scale.view(torch.uint8), 2 * packed.shape[-1])


def with_nan_scales(source: Path, copy: Path) -> Path:
    """A copy in which every scale tensor begins with the bytes 255 and 0."""
    shutil.copytree(source, copy)
    for path in copy.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name.endswith("scale") and entry["dtype"] == "U8":
                begin = start + entry["data_offsets"][0]
                raw[begin : begin + 2] = b"\xff\0"
        path.write_bytes(raw)
    return copy


NAN = [name for name in MXFP4_FIXTURES if name.startswith(("version-0.1", "qwen3"))]


@pytest.mark.parametrize(
    ("name", "nan"),
    [*((name, False) for name in MXFP4_FIXTURES), *((name, True) for name in NAN)],
)
def test_what_the_bytes_mean_is_what_they_meant(name, tmp_path, nan, tried):
    """Every tensor, decoded by ml_dtypes before and after the way there and back, bit for bit; and
    every layer in between, by one-hot rows through the runtime: each column of the product is a
    column of the weight."""
    source = FIXTURES / name
    if nan:
        source = with_nan_scales(source, tmp_path / "nan")
    out = converted(source, tmp_path / "out").out
    back = restore(out, tmp_path / "back").out
    before, after = (
        {k: v for p in sorted(root.glob("*.safetensors")) for k, v in load_file(p).items()}
        for root in (source, back)
    )
    assert before.keys() == after.keys()
    prepared = mxfp4prep.load(out)
    taken, seen_nan = set(), False
    for name in prepared:
        weight = f"{name}.weight"
        scale = next(
            s for s in (f"{name}.weight_scale", f"{name}.weight_quantizer.scale") if s in before
        )
        taken |= {weight, scale}
        dense = ml_dtypes_values(before[weight], before[scale])
        assert torch.equal(
            dense.view(torch.int64), ml_dtypes_values(after[weight], after[scale]).view(torch.int64)
        )
        seen_nan |= bool(dense.isnan().any())
        layer = prepared[name]
        layer.quantize_activations = False
        layer.bias = None
        y = layer(torch.eye(layer.k, dtype=torch.float32))
        whole = dense.isfinite().all(dim=1)  # 0 * NaN is NaN all over a row with a NaN block
        assert torch.equal(y.T[whole].double(), dense[whole])
        assert y.T[~whole].isnan().all()
    for name in before.keys() - taken:
        assert before[name].dtype == after[name].dtype
        one, other = (root[name].reshape(-1).view(torch.uint8) for root in (before, after))
        assert torch.equal(one, other)
    assert seen_nan is nan
    tried("N3")


def test_every_mxfp4_fixture_loads_and_runs(mxfp4_fixture, tmp_path):
    prepared = mxfp4prep.load(converted(mxfp4_fixture, tmp_path / "out").out)
    assert len(prepared) > 0
    for name in prepared:
        layer = prepared[name]
        y = layer(torch.ones(2, layer.k, dtype=torch.bfloat16))
        assert y.shape == (2, layer.n)
        assert torch.isfinite(y).all()
