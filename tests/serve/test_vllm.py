"""vLLM answers from a prepared checkpoint what it answers from the original one: the same tokens,
the same log probabilities of prompts, for every layout, at one rank and at two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine import PREPARED, REFERENCE, Run, needs_vllm, run_jobs
from models import prepare, write_model

import mxfp4prep

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"
TOLERANCE = 1e-5
"""Of log probabilities."""


@dataclass(frozen=True)
class Case:
    """A model and how it is prepared.

    model     family and what write_model takes beside, or the name of a fixture
    tp        degrees that it is stored for
    paths     what the manifest's layers are stored for
    scheme    of all of them, if it is one
    repacked  modules that must be repacked, by the degree it is served at
    engine    options of vLLM
    """

    model: tuple[str, tuple[tuple[str, Any], ...]] | str
    tp: tuple[int, ...] = (1, 2)
    options: dict[str, Any] = field(default_factory=dict)
    paths: frozenset[str] = frozenset({"asm"})
    scheme: str | None = "w4a4"
    repacked: dict[int, list[str]] = field(default_factory=dict)
    engine: tuple[tuple[str, Any], ...] = ()

    @property
    def original(self) -> tuple[Any, Any]:
        """What is compared with: the model, and how it is served."""
        return self.model, self.engine


NARROW = (("intermediate_size", 768),)
"""Columns of down_proj: whole tiles of 256, but not half of them."""
NARROW_EXPERTS = (("moe_intermediate_size", 256),)
WEIGHTS_ONLY = (("weights_only", True), ("num_hidden_layers", 1))
BOTH = frozenset({"asm", "triton"})
CASES = {  # experts first: vLLM sets up no group for them once a dense model ran in a process
    "qwen3-moe-asm": Case(("qwen3_moe", ())),
    "qwen3-moe-triton": Case(
        ("qwen3_moe", ()), options={"layout": "triton"}, paths=frozenset({"triton"})
    ),
    "qwen3-moe-repacked": Case(
        ("qwen3_moe", NARROW_EXPERTS),
        tp=(1,),
        repacked={2: [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]},
    ),
    "qwen3-moe-whole-experts": Case(("qwen3_moe", ()), engine=(("enable_expert_parallel", True),)),
    "qwen2-moe-mixed": Case(("qwen2_moe", ()), paths=BOTH),
    "qwen2-moe-kept": Case(
        ("qwen2_moe", ()),
        options={"keep": ["*.layers.0.mlp.experts.*", "*.layers.1.self_attn.o_proj"]},
        paths=BOTH,
    ),
    "qwen3-moe-w4a16": Case(("qwen3_moe", WEIGHTS_ONLY), scheme="w4a16"),
    "llama-asm": Case(("llama", ())),
    "llama-triton": Case(("llama", ()), options={"layout": "triton"}, paths=frozenset({"triton"})),
    "llama-repacked": Case(
        ("llama", NARROW),
        tp=(1,),
        repacked={2: [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]},
    ),
    "qwen2-mixed": Case(("qwen2", (("intermediate_size", 640),)), paths=BOTH),
    "llama-w4a16": Case(
        ("llama", (*WEIGHTS_ONLY, ("intermediate_size", 640))), paths=BOTH, scheme="w4a16"
    ),
    "fp8-attention": Case("llama-mixed-fp8attn-kvfp8", paths=BOTH, scheme=None),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[Any, Path]:
    """Case.model -> the Quark checkpoint."""
    root = tmp_path_factory.mktemp("originals")
    found: dict[Any, Path] = {}
    for case in CASES.values():
        if isinstance(case.model, str):
            found[case.model] = FIXTURES / case.model
        elif case.model not in found:
            family, changes = case.model
            found[case.model] = write_model(root / f"{len(found)}", family, **dict(changes))
    return found


@pytest.fixture(scope="module")
def prepared(originals, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("prepared")
    return {
        name: prepare(originals[case.model], root / name, case.tp, **case.options)
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def tp(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def expected(originals, tp, tmp_path_factory) -> dict[Any, dict]:
    """Case.original -> what the reference answers."""
    wanted = list(dict.fromkeys(case.original for case in CASES.values()))
    jobs = [
        {"model": str(originals[model]), "tp": tp, "options": dict(engine)}
        for model, engine in wanted
    ]
    run = run_jobs(tmp_path_factory.mktemp("expected"), jobs, REFERENCE)
    return dict(zip(wanted, run.results, strict=True))


LOADERS = {
    "default": {},
    "sliced": {
        "load_format": "mxfp4prep",
        "model_loader_extra_config": {"verify": False},
    },
    "verified": {"load_format": "mxfp4prep"},
}
"""Ways to load. The last two must fill parameters with the bytes that the first does."""
VERIFIED = AGAIN = "qwen2-moe-mixed"
LOADED = (
    "qwen3-moe-repacked",
    "qwen3-moe-whole-experts",
    "qwen2-moe-mixed",
    "llama-repacked",
    "qwen2-mixed",
)
"""Cases that are loaded in all ways, and one of them with digests compared."""


@pytest.fixture(scope="module")
def answered(prepared, tp, tmp_path_factory) -> tuple[dict[tuple[str, str], dict], Run]:
    """(case, loader) -> what vLLM answered with the plugin, and all it said."""
    pairs = [
        (name, loader)
        for name in CASES
        for loader in LOADERS
        if loader == "default" or (name in LOADED and (loader == "sliced" or name == VERIFIED))
    ]
    jobs = [
        {
            "model": str(prepared[name]),
            "tp": tp,
            "weights": True,
            "options": {**dict(CASES[name].engine), **LOADERS[loader]},
            "load_only": loader == "verified",
            "again": name == AGAIN and loader == "default",
        }
        for name, loader in pairs
    ]
    run = run_jobs(tmp_path_factory.mktemp("answered"), jobs, PREPARED)
    return dict(zip(pairs, run.results, strict=True)), run


def difference(first: dict, second: dict) -> float:
    pairs = zip(first["logprobs"], second["logprobs"], strict=True)
    return max(abs(a - b) for ones, others in pairs for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_case_is_stored_as_it_says(prepared, name):
    manifest = mxfp4prep.load(prepared[name]).manifest
    assert {record.path for record in manifest.layers} == CASES[name].paths
    if CASES[name].scheme is not None:
        assert {record.scheme for record in manifest.layers} == {CASES[name].scheme}


@pytest.mark.parametrize("name", CASES)
def test_same_answers(expected, answered, name):
    reference, found = expected[CASES[name].original], answered[0][name, "default"]
    assert "error" not in reference, reference["error"]
    assert "error" not in found, found["error"]
    assert found["tokens"] == reference["tokens"]
    assert difference(found, reference) <= TOLERANCE
    flat = [value for values in found["logprobs"] for value in values]
    assert len(set(flat)) == len(flat), "answers that say something"


@pytest.mark.parametrize("name", LOADED)
def test_every_way_to_load_fills_the_same_bytes(expected, answered, name):
    default = answered[0][name, "default"]
    for loader in ("sliced", "verified") if name == VERIFIED else ("sliced",):
        found = answered[0][name, loader]
        assert "error" not in found, found["error"]
        assert found["weights"] == default["weights"]
        assert all(found["weights"])
    assert answered[0][name, "sliced"]["tokens"] == default["tokens"]


def test_processing_weights_again_changes_nothing(answered):
    """Linear layers and experts, in an engine that runs."""
    found = answered[0][AGAIN, "default"]
    assert found["again"]["methods"] == ["PreparedExpertsMethod", "PreparedLinearMethod"]
    assert found["again"]["tokens"] == found["tokens"]
    assert found["again"]["logprobs"] == found["logprobs"]


def test_one_warning_for_each_module_that_is_repacked(answered, prepared, tp):
    said = [line.partition("] ")[2] for line in answered[1].lines("WARNING", "repacked for")]
    found = sorted(line.partition(": ")[0] for line in said)
    loads = {name: sum(key[0] == name for key in answered[0]) for name in CASES}
    wanted = sorted(
        module
        for name, case in CASES.items()
        for module in case.repacked.get(tp, [])
        for _ in range(loads[name])
    )
    assert found == wanted


@pytest.mark.parametrize("tp", [2], ids=["tp2"], indirect=True)
def test_workers_that_vllm_starts_itself(prepared, expected, tp, tmp_path):
    """A server's way: another process for the engine, more for its ranks; the config is pickled."""
    job = {"model": str(prepared["qwen2-mixed"]), "tp": tp}
    run = run_jobs(tmp_path, [job], PREPARED, spawn=True, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert "error" not in run[0], run[0]["error"]
    assert run[0]["tokens"] == expected[CASES["qwen2-mixed"].original]["tokens"]


def test_a_draft_of_the_checkpoint_itself(tmp_path):
    """A layer that predicts the next token but one, from the same prepared files: it shares the
    model's embeddings and head, and answers stay as they are."""
    out = prepare(write_model(tmp_path / "model", "glm4_moe"), tmp_path / "prepared")
    draft = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    jobs = [{"model": str(out)}, {"model": str(out), "options": draft}]
    run = run_jobs(tmp_path / "run", jobs, PREPARED)
    for each in run.results:
        assert "error" not in each, each["error"]
    assert run.lines("Loading drafter model")
    assert run[1]["tokens"] == run[0]["tokens"]


def test_compiled(originals, prepared, tmp_path):
    """What vLLM does by default: it compiles the model around the runtime's operators."""
    name = "qwen2-moe-mixed"
    options = {"enforce_eager": False}
    reference = run_jobs(
        tmp_path / "reference",
        [{"model": str(originals[CASES[name].model]), "options": options}],
        REFERENCE,
    )
    found = run_jobs(
        tmp_path / "found", [{"model": str(prepared[name]), "options": options}], PREPARED
    )
    assert "error" not in found[0], found[0]["error"]
    assert found.lines("AOT compiled function"), "it was compiled"
    assert found[0]["tokens"] == reference[0]["tokens"]
    assert difference(found[0], reference[0]) <= TOLERANCE
