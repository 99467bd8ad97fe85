"""Where a model's parts are put: device maps with accelerate, tensor and expert parallel ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from test_transformers import (
    DENSE,
    ENGINES_ARE_DUE,
    FIXTURES,
    IMPORTS,
    MIXED,
    MOE,
    TOLERANCE,
    files_of,
    loaded,
    logits_of,
    prepare,
    reference,
)
from test_transformers_moe import (
    FP8_INPUT,
    FP8_PER_TENSOR,
    FP8_PER_TOKEN,
    IDS,
    SMALL,
    gpt_oss,
    quark_like,
    qwen3_moe,
    stack_experts,
)
from transformers import LlamaConfig, PretrainedConfig
from transformers.quantizers.base import HfQuantizer

import mxfp4prep
from mxfp4prep.integrations.hf.linear import StoredLinear

HAS_ACCELERATE = ENGINES_ARE_DUE or importlib.util.find_spec("accelerate") is not None
needs_accelerate = pytest.mark.skipif(not HAS_ACCELERATE, reason="accelerate is not installed")
needs_plans = pytest.mark.skipif(
    not HAS_ACCELERATE or not hasattr(HfQuantizer, "update_parallel_plan"),
    reason="needs accelerate, and a transformers whose quantizers may extend parallel plans (5.24)",
)
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    def get(name):
        return prepare(FIXTURES / name, tmp_path_factory.mktemp("placed") / "prepared")

    return get


@needs_accelerate
@pytest.mark.parametrize("name", [DENSE, MOE, MIXED])
@pytest.mark.parametrize("where", ["cpu", "auto", "cpu and disk", "disk"])
def test_device_maps(prepared, tmp_path, name, where):
    path = prepared(name)
    device_map = where
    if "disk" in where:
        rest = "disk" if where == "disk" else "cpu"
        device_map = {"model.embed_tokens": rest, "model.norm": rest, "model.rotary_emb": "cpu"}
        device_map |= {"lm_head": rest, "model.layers.0": rest, "model.layers.1": "disk"}
        if name == MIXED:
            device_map["model.layers.2"] = rest
    model = loaded(path, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    if "disk" in where:
        assert model.model.layers[1].self_attn.o_proj.weight.is_meta
    expected = reference(name)
    ids, on_a_gpu = expected["input_ids"], where == "auto" and torch.cuda.is_available()
    got = logits_of(model, ids.cuda() if on_a_gpu else ids).cpu()
    if not on_a_gpu:  # whose sums have another order: `test_on_a_gpu`
        assert (got - expected["logits"]).abs().max() <= TOLERANCE
    out = tmp_path / "saved"
    model.save_pretrained(out)
    assert files_of(out) == files_of(path)


@needs_accelerate
@needs_a_gpu
@pytest.mark.parametrize("layout", ["auto", "triton"])
@pytest.mark.parametrize("name", [DENSE, MOE, MIXED])
def test_on_a_gpu(tmp_path, name, layout):
    """Through the backend that is best there; its sums are in another order than the CPU's."""
    path = prepare(FIXTURES / name, tmp_path / "prepared", layout=layout)
    model = loaded(path, device_map="cuda")
    stored = [module for module in model.modules() if isinstance(module, StoredLinear)]
    assert {module.weight.device.type for module in stored} == {"cuda"}
    expected = reference(name)
    got = logits_of(model, expected["input_ids"].cuda()).cpu()
    alike = torch.nn.functional.cosine_similarity(got, expected["logits"], dim=-1)
    assert alike.min() > 0.999
    model.save_pretrained(tmp_path / "saved")
    assert files_of(tmp_path / "saved") == files_of(path)


CHILD = """
import json, sys, warnings
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
import mxfp4prep.integrations.hf
from mxfp4prep import Mxfp4PrepError

def run(path, wish, out):
    more = {"ep_size": 2} if wish == "ep" else {}
    if wish == "own":
        more = {"tp_plan": {"model.layers.*.mlp.up_proj.weight_scale": "colwise"}}
    config = DistributedConfig(tp_size=2, **more)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", distributed_config=config
            )
        except Mxfp4PrepError as error:
            return {"refused": str(error)}
    with torch.no_grad():
        logits = model(torch.load(f"{out}/ids.pt")).logits
    banks = [m.gate_up_proj for m in model.modules() if hasattr(m, "gate_up_proj_scale")]
    bank = banks[0].full_tensor() if banks and hasattr(banks[0], "full_tensor") else None
    held = sum(p._local_tensor.numel() if hasattr(p, "_local_tensor") else p.numel()
               for p in model.parameters() if p.dtype == torch.uint8)
    repacked = sorted(str(w.message) for w in said if w.category.__name__ == "RepackWarning")
    model.save_pretrained(f"{out}/saved")
    return {"logits": logits, "held": held, "repacked": repacked, "bank": bank}

torch.set_num_threads(1)
for case in json.loads(sys.argv[1]):
    result = run(*case)
    if dist.get_rank() == 0:
        torch.save(result, f"{case[2]}/result.pt")
dist.barrier()
dist.destroy_process_group()
"""


class Case(NamedTuple):
    """A checkpoint on two ranks.

    source   a fixture, or what makes a config for quark_like
    wish     "tp", "ep", or "own" for a plan of one's own
    layout   of convert
    form     of stack_experts
    inputs   of quark_like
    """

    source: str | Callable[[], PretrainedConfig]
    wish: str
    layout: str = "auto"
    form: str | None = None
    inputs: dict[str, object] | None = None


def llama() -> PretrainedConfig:
    return LlamaConfig(**SMALL, head_dim=64, intermediate_size=512)


CASES = {
    "dense, asm": Case(DENSE, "tp"),
    "dense, triton": Case(DENSE, "tp", "triton"),
    "fp8 attention": Case(MIXED, "tp"),
    "fp8 inputs scaled by token": Case(llama, "tp", inputs=FP8_PER_TOKEN),
    "fp8 inputs scaled as a whole": Case(llama, "tp", inputs=FP8_PER_TENSOR),
    "experts, sliced": Case(lambda: qwen3_moe(512), "tp"),
    "experts, triton": Case(lambda: qwen3_moe(192), "tp"),
    "experts, repacked": Case(lambda: qwen3_moe(256), "tp"),
    "experts that cannot be cut": Case(MOE, "tp"),
    "experts whose inputs cannot be": Case(lambda: qwen3_moe(512), "tp", inputs=FP8_PER_TOKEN),
    "a plan of one's own": Case(DENSE, "own", "triton"),
    "whole experts": Case(lambda: qwen3_moe(256), "ep"),
    "whole experts with biases": Case(lambda: gpt_oss(96), "ep"),
    "whole experts, static inputs": Case(lambda: qwen3_moe(256), "ep", inputs=FP8_INPUT),
    "whole experts, dynamic inputs": Case(lambda: qwen3_moe(256), "ep", inputs=FP8_PER_TENSOR),
    "bank": Case(lambda: qwen3_moe(256), "tp", form="fused"),
    "bank, static inputs": Case(lambda: qwen3_moe(512), "tp", form="apart", inputs=FP8_INPUT),
    "whole experts of a bank": Case(lambda: qwen3_moe(256), "ep", form="fused", inputs=FP8_INPUT),
    "whole experts of a bank with biases": Case(lambda: gpt_oss(96), "ep", form="bare"),
}


O_PROJ, GATE_UP, DOWN = "self_attn.o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
REPACKED = {  # what is read whole, where it is not o_proj alone, whose ranks get 128 columns
    "dense, triton": set(),
    "fp8 attention": set(),
    "experts, triton": {O_PROJ, GATE_UP},  # 96 scale rows a rank, which ASM kernels get wrong
    "experts, repacked": {O_PROJ, DOWN},
    "whole experts with biases": set(),
    "bank": {O_PROJ, GATE_UP, DOWN},
    "bank, static inputs": {O_PROJ, GATE_UP, DOWN},
    "whole experts of a bank with biases": set(),
}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """Every case's directory, once two ranks have been through all of them in turn."""
    root = tmp_path_factory.mktemp("ranks")
    for number, case in enumerate(CASES.values()):
        out = root / str(number)
        out.mkdir()
        if callable(case.source):
            source, config = out / "quark", case.source()
            gpt = config.model_type == "gpt_oss"
            leaves = ("gate_up_proj", "down_proj") if gpt else ("gate_proj", "up_proj", "down_proj")
            plain = quark_like(source, config, leaves, inputs=case.inputs)
            if case.form is not None:
                stack_experts(source, case.form)
            ids, logits = IDS, logits_of(plain, IDS)
        else:
            source, expected = FIXTURES / case.source, reference(case.source)
            ids, logits = expected["input_ids"], expected["logits"]
        path = prepare(source, out / "prepared", layout=case.layout)
        if case.inputs is not None:  # the float model has others: one rank alone is the reference
            logits = logits_of(loaded(path), ids)
        torch.save(ids, out / "ids.pt")
        torch.save(logits, out / "expected.pt")
    script = root / "child.py"
    script.write_text(CHILD)
    cases = [
        (f"{root}/{i}/prepared", case.wish, f"{root}/{i}") for i, case in enumerate(CASES.values())
    ]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", script, json.dumps(cases)),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": IMPORTS,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # two ranks, and one GPU at most
        },
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return lambda name: root / str(list(CASES).index(name))


@needs_plans
@pytest.mark.parametrize(
    "name", [name for name in CASES if "cannot" not in name and "own" not in name]
)
def test_two_ranks_make_the_same_logits(on_two_ranks, name):
    out = on_two_ranks(name)
    result, expected = torch.load(out / "result.pt"), torch.load(out / "expected.pt")
    # a sum in another order may move an input over the border between two FP8 numbers
    tolerance = 1e-2 if CASES[name].inputs in (FP8_PER_TENSOR, FP8_PER_TOKEN) else TOLERANCE
    assert (result["logits"] - expected).abs().max() <= tolerance
    model = loaded(out / "prepared")
    alone = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    if "whole experts" in name:
        assert alone // 2 <= result["held"] < alone
    else:
        assert result["held"] == alone // 2
    if result["bank"] is not None:  # what ranks hold, joined, is the bank: the placement is true
        assert torch.equal(result["bank"], model.model.layers[0].mlp.experts.gate_up_proj)
    assert {
        message.split(":")[0].rpartition("layers.")[2][2:] for message in result["repacked"]
    } == REPACKED.get(name, {O_PROJ})
    assert files_of(out / "saved") == files_of(out / "prepared")


@needs_plans
def test_a_plan_of_ones_own_does_not_slice_stored_layers(on_two_ranks):
    result = torch.load(on_two_ranks("a plan of one's own") / "result.pt")
    assert "sliced by a plan of your own" in result["refused"]


def test_ranks_of_experts_add_up(tmp_path):
    """With biases, and gate and up in one: no plan of transformers cuts those, but it may come."""
    quark_like(tmp_path / "quark", gpt_oss(256), ("gate_up_proj", "down_proj"))
    path = prepare(tmp_path / "quark", tmp_path / "prepared")
    whole, *ranks = (loaded(path).model.layers[0].mlp.experts for _ in range(3))
    with pytest.warns(mxfp4prep.RepackWarning, match="read whole and repacked"):
        _ = [experts.cut(rank, 2) for rank, experts in enumerate(ranks)]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(9, 256, generator=generator)
    ids = torch.randint(0, 4, (9, 2), generator=generator)
    weights = torch.rand(9, 2, generator=generator)
    with torch.no_grad():
        expected = whole(x, ids, weights)
        parts = [experts(x, router_indices=ids, routing_weights=weights) for experts in ranks]
    assert expected.std() > 0.1
    assert torch.allclose(sum(parts), expected, rtol=1e-5, atol=1e-5)


@needs_plans
def test_what_cannot_be_cut_is_refused_on_every_rank(on_two_ranks):
    result = torch.load(on_two_ranks("experts that cannot be cut") / "result.pt")
    assert "no whole 32-groups at tp 2: 96 / 2 = 48 columns" in result["refused"]


@needs_plans
def test_inputs_whose_scale_ranks_would_share_are_refused(on_two_ranks):
    result = torch.load(on_two_ranks("experts whose inputs cannot be") / "result.pt")
    assert "experts.down_proj: the scales of its FP8 inputs" in result["refused"]
