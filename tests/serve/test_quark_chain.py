"""The whole way with AMD's own tools: quantize, export, audit, convert, verify, serve, restore.

amd-quark quantizes tiny models from random weights in another process, writes them by both of its
routes, and says what logits its importer gets from them in float32. The commands and transformers
then have to agree with it, and vLLM with itself on the original. Skipped where amd-quark is not
installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
import torch
from engine import PREPARED, REFERENCE, needs_vllm, run_jobs
from safetensors.torch import load_file
from test_transformers import ENGINES_ARE_DUE, LOAD, ROOT, TOLERANCE, files_of, loaded, logits_of
from test_vllm import TOLERANCE as LOGPROB_TOLERANCE
from test_vllm import difference

try:
    QUARK = metadata.version("amd-quark")
except metadata.PackageNotFoundError:
    QUARK = None

pytestmark = [
    pytest.mark.skipif(QUARK is None and not ENGINES_ARE_DUE, reason="amd-quark is not installed"),
    pytest.mark.timeout(900),
]

KINDS = ("qwen2_moe", "llama")  # experts first: vLLM sets up no group for them after a dense model
ROUTES = ("memory", "file2file")

EXPORT = """
import sys
from pathlib import Path

import torch
from quark.torch import (
    LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
)
from quark.torch.utils.llm import preprocess_for_quantization
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2MoeConfig

SIZES = dict(
    vocab_size=320, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    hidden_size=256, max_position_embeddings=64, tie_word_embeddings=False,
)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=640),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, intermediate_size=256, moe_intermediate_size=96, num_experts=4,
        shared_expert_intermediate_size=320, num_experts_per_tok=2,
    ),
}
IDS = torch.randint(0, 128, (2, 7), generator=torch.Generator().manual_seed(1))


def through_memory(source, out, kind):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    preprocess_for_quantization(model)
    quantizer = ModelQuantizer(LLMTemplate.get(kind).get_config(scheme="mxfp4"))
    model = quantizer.quantize_model(model, [{"input_ids": IDS}])
    export_safetensors(quantizer.freeze(model), str(out))


def file_to_file(source, out, kind):
    quantizer = ModelQuantizer(LLMTemplate.get(kind).get_config(scheme="mxfp4"))
    quantizer.direct_quantize_checkpoint(str(source), str(out), device="cpu")


def imported_logits(path):
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    preprocess_for_quantization(model, reload=True)
    model = import_model_from_safetensors(model, str(path)).float()
    with torch.no_grad():
        return model(IDS).logits


root = Path(sys.argv[1])
for kind, config in CONFIGS.items():
    torch.manual_seed(0)
    source = root / f"{kind}-float"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
    for route, run in (("memory", through_memory), ("file2file", file_to_file)):
        out = root / f"{kind}-{route}"
        run(source, out, kind)
        tensors = {"ids": IDS, "logits": imported_logits(out).contiguous()}
        save_file(tensors, root / f"{kind}-{route}.reference.safetensors")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with both models by both routes, and the reference files beside them."""
    root = tmp_path_factory.mktemp("quark")
    (root / "export.py").write_text(EXPORT)
    run(sys.executable, root / "export.py", root)
    return root


@pytest.fixture(scope="module")
def prepared(exported) -> dict[tuple[str, str], Path]:
    """(kind, route) -> what `convert` made of it."""
    found = {}
    for kind, route in product(KINDS, ROUTES):
        found[kind, route] = exported / f"{kind}-{route}-prepared"
        mxfp4prep("convert", exported / f"{kind}-{route}", found[kind, route])
    return found


@pytest.fixture(scope="module")
def served(exported, prepared) -> dict[tuple[str, str], tuple[dict, dict]]:
    """(kind, route) -> what vLLM answers from the original with the reference, and from the
    prepared one with the plugin."""
    originals = [{"model": str(exported / f"{kind}-{route}")} for kind, route in prepared]
    expected = run_jobs(exported / "expected", originals, REFERENCE)
    jobs = [{"model": str(path)} for path in prepared.values()]
    found = run_jobs(exported / "found", jobs, PREPARED)
    pairs = zip(expected.results, found.results, strict=True)
    return dict(zip(prepared, pairs, strict=True))


def run(*command, fails: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=800
    )
    assert (done.returncode != 0) == fails, done.stderr[-4000:] or done.stdout[-4000:]
    return done


def mxfp4prep(*arguments) -> str:
    return run(sys.executable, "-m", "mxfp4prep", *arguments).stdout


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(exported, prepared, tmp_path, kind, route):
    source, prepared = exported / f"{kind}-{route}", prepared[kind, route]
    before = files_of(source)
    audit = json.loads(mxfp4prep("audit", source, "--tp", "1", "--format", "json"))
    matrices = 7 if kind == "llama" else 4 + 4 * 3 + 3
    assert len(audit["layers"]) == matrices
    paths = {layer["name"]: layer["verdict"]["1"]["path"] for layer in audit["layers"]}
    assert paths["model.layers.0.self_attn.q_proj"] == "asm"
    misaligned = "mlp.down_proj" if kind == "llama" else "mlp.experts.0.down_proj"
    assert paths[f"model.layers.0.{misaligned}"] == "triton"  # 640 and 96 columns

    mxfp4prep("verify", prepared, "--source", source)
    model, expected = loaded(prepared), load_file(f"{source}.reference.safetensors")
    logits = logits_of(model, expected["ids"])
    assert expected["logits"].std() > 0.1
    assert (logits - expected["logits"]).abs().max() <= TOLERANCE

    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(prepared)
    mxfp4prep("restore", tmp_path / "saved", tmp_path / "restored")
    assert files_of(tmp_path / "restored") == files_of(source) == before


@needs_vllm
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_answers_as_from_the_original(served, kind, route):
    expected, found = served[kind, route]
    assert "error" not in expected, expected["error"]
    assert "error" not in found, found["error"]
    assert found["tokens"] == expected["tokens"]
    assert difference(found, expected) <= LOGPROB_TOLERANCE


def test_both_routes_are_one_model(exported):
    """Quark's routes write the same bytes; what is computed from them differs in nothing."""
    for kind in KINDS:
        one, other = (
            load_file(exported / f"{kind}-{route}.reference.safetensors")["logits"]
            for route in ROUTES
        )
        assert torch.equal(one, other)


@pytest.mark.parametrize(("layout", "known"), [("auto", True), ("triton", False)])
def test_relabelled_as_quarks(exported, tmp_path, layout, known):
    """transformers has amd-quark here and would read it: our guard stops it, or else its shapes.

    known   whether this package is imported
    """
    prepared = tmp_path / "prepared"
    mxfp4prep("convert", exported / "llama-memory", prepared, "--layout", layout)
    config = json.loads((prepared / "config.json").read_text())
    config["quantization_config"] = config["quantization_config"]["source_quantization_config"]
    (prepared / "config.json").write_text(json.dumps(config))
    code = ("import mxfp4prep.integrations.hf; " if known else "") + LOAD
    done = run(sys.executable, "-c", code, prepared, fails=True)
    assert "served" not in done.stdout
    assert ("config.json was replaced" in done.stderr) == known
