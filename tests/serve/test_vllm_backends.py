"""Who runs a prepared model's layers in vLLM: AITER on gfx950, Triton on other GPUs, the reference
on a CPU; and each is handed the parameters themselves, in the layout that it takes.

No GPU: the machine is made up, AITER is a stand-in that checks its operands, Triton's kernels are
interpreted. Answers are compared with float64 from the original checkpoint.
"""

from __future__ import annotations

import os

import pytest
from aiter_stub import NEWEST, install
from engine import HERE, ROOT, facts_of, needs_vllm
from models import prepare, write_model
from quark_factory import quant_config, quant_layer

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]

KEPT = ["*.layers.0.mlp.experts.*", "*.layers.1.self_attn.o_proj"]
KEPT_EXPERTS = "model.layers.0.mlp.experts.routed_experts"
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
TOLERANCE = {"gfx950": 2.0**-8, "gfx942": 2.0**-7}
"""In parts of the largest value: answers are bfloat16, and the interpreter cuts where a GPU rounds
to it."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("facts")
    install(root / "site", NEWEST)
    source = write_model(root / "model", "qwen2_moe")
    plain_inputs = quant_config(global_quant_config=quant_layer(inputs=None))
    weights_only = write_model(root / "weights-only", "llama", quantization_config=plain_inputs)
    imports = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(HERE)])
    return facts_of(
        "vllm_backends.py",
        root / "site",
        source,
        prepare(source, root / "prepared", keep=KEPT),
        prepare(weights_only, root / "prepared-weights-only"),
        PYTHONPATH=imports,
        TRITON_INTERPRET="1",
    )


def test_layers_of_every_path_are_there(facts):
    paths = [path for path in facts["paths"].values() if isinstance(path, str)]
    banks = [path for path in facts["paths"].values() if not isinstance(path, str)]
    assert set(paths) == {"asm", "triton", "kept"}
    assert sorted(banks) == [["asm", "asm"], ["kept", "kept"]]


def test_aiter_runs_what_it_can_on_gfx950(facts):
    """All linears, and experts in its one layout; the others run on Triton."""
    found = facts["chosen"]["gfx950"]["cuda"]
    assert found.pop(KEPT_EXPERTS) == "triton"
    assert len(found) == 9
    assert set(found.values()) == {"aiter"}


@pytest.mark.parametrize("machine", ["gfx950 without AITER", "gfx942", "no AMD GPU"])
def test_triton_runs_all_on_other_gpus(facts, machine):
    found = facts["chosen"][machine]["cuda"]
    assert len(found) == 10
    assert set(found.values()) == {"triton"}


@pytest.mark.parametrize("machine", ["gfx950", "gfx942", "no AMD GPU", "no GPU"])
def test_the_reference_runs_all_on_a_cpu(facts, machine):
    """Whatever else is in the machine."""
    found = facts["chosen"][machine]["cpu"]
    assert len(found) == 10
    assert set(found.values()) == {"torch"}


def test_inputs_that_are_not_quantized_are_not_for_aiter(facts):
    found = facts["weights only"]["gfx950"]
    assert set(found["cuda"].values()) == {"triton"}
    assert set(found["cpu"].values()) == {"torch"}


HANDED = [
    # machine, module, rows, the function, shapes of the module's own parameters
    # an asm matrix of 512 rows, 256 columns: rows of tiles up to 64 rows, then (n, k / 2)
    ("gfx950", f"{ATTENTION}.qkv_proj", 4, "gemm_afp4wfp4_preshuffle", ([32, 2048], [16, 256])),
    ("gfx950", f"{ATTENTION}.qkv_proj", 100, "gemm_a4w4", ([512, 128], [512, 8])),
    # 256 rows, 256 columns, kept: as Quark stores it
    ("gfx950", f"{ATTENTION}.o_proj", 4, "gemm_afp4wfp4", ([256, 128], [256, 8])),
    # 256 rows, 640 columns for the Triton path: its scale, stored transposed, seen as (n, k / 32)
    ("gfx950", f"{MLP}.shared_expert.down_proj", 4, "gemm_afp4wfp4", ([256, 320], [256, 20])),
    ("gfx942", f"{ATTENTION}.qkv_proj", 4, "gemm", ([32, 2048], [16, 256])),
    ("gfx942", f"{MLP}.shared_expert.down_proj", 4, "gemm", ([256, 320], [20, 256])),
]


@pytest.mark.parametrize(("machine", "module", "rows", "function", "shapes"), HANDED)
def test_a_linear_is_handed_over_as_it_is_stored(facts, machine, module, rows, function, shapes):
    found = facts[machine][f"{module} x {rows}"]
    weight, scale = shapes
    assert found["calls"] == [[function, {"weight": weight, "weight_scale": scale}]]
    assert found["error"] <= TOLERANCE[machine]


EXPERTS_HANDED = {
    # four experts of 512: as AITER's fused_moe takes them, and as they are stored
    "gfx950": ([4, 1024, 128], [4 * 1024, 8], [4, 256, 256], [4 * 256, 16]),
    "gfx942": ([4, 64, 2048], [4, 32, 256], [4, 16, 4096], [4, 8, 512]),
}


@pytest.mark.parametrize("machine", EXPERTS_HANDED)
def test_experts_are_handed_over_as_they_are_stored(facts, machine):
    found = facts[machine][f"{MLP}.experts.routed_experts x 4"]
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    shapes = dict(zip(names, EXPERTS_HANDED[machine], strict=True))
    assert found["calls"] == [["fused_moe", shapes]]
    assert found["error"] <= TOLERANCE[machine]
