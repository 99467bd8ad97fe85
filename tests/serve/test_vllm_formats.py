"""vLLM's streaming load formats bring a prepared checkpoint as its default one does; the package's
own has each rank read its part and no more. Two ranks, started once for all of it."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine import PREPARED, Run, needs_vllm, run_jobs
from models import prepare, write_model
from safetensors import safe_open
from vllm_transports import NAMES, install

import mxfp4prep

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

STREAMERS = {"runai_streamer": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}
"""Load format -> the package that it needs."""
RANKS = 2
SLICED = {"load_format": "mxfp4prep", "model_loader_extra_config": {"verify": False}}
READ: dict[str, tuple[str, dict]] = {
    "dense": ("dense", SLICED),
    "experts": ("experts", SLICED),
    "whole experts": ("experts", {**SLICED, "enable_expert_parallel": True}),
    "verified": ("dense", {"load_format": "mxfp4prep"}),
}
"""Name -> model, options of vLLM."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """What is loaded, by name: a directory of its own for each load whose bytes are counted."""
    root = tmp_path_factory.mktemp("models")
    wide = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sources = {
        # biases, a shared expert, layers of both paths
        "streamed": write_model(root / "a", "qwen2_moe"),
        "dense": write_model(root / "b", "llama", intermediate_size=4096, **wide),
        "experts": write_model(root / "c", "qwen3_moe", moe_intermediate_size=1024, **wide),
    }
    made = {
        name: prepare(source, root / f"prepared-{name}", (1, RANKS))
        for name, source in sources.items()
    }
    for name, (model, _) in READ.items():
        if name != model:
            made[name] = shutil.copytree(made[model], root / name.replace(" ", "-"))
    return made


@pytest.fixture(scope="module")
def formats() -> tuple[str, ...]:
    """The streamers that are installed: all of them where engines must be there."""
    if os.environ.get("MXFP4PREP_ENGINES"):
        return tuple(STREAMERS)
    return tuple(name for name, package in STREAMERS.items() if find_spec(package))


@pytest.fixture(scope="module")
def loaded(models, formats, tmp_path_factory) -> tuple[dict[str, dict], Run, list[dict[str, int]]]:
    """What vLLM answered, by load format; all it said; the bytes that each rank read, by file."""
    folder = tmp_path_factory.mktemp("loaded")
    options = [{}, *({"load_format": name} for name in formats)]
    jobs = [
        {"model": str(models["streamed"]), "weights": True, "options": each} for each in options
    ]
    jobs += [
        {"model": str(models[name]), "load_only": True, "options": each}
        for name, (_, each) in READ.items()
    ]
    install(folder / "site")
    plugins = [PREPARED, *(n for n in NAMES if n != "fast_on_cpu" or "fastsafetensors" in formats)]
    run = run_jobs(folder, [{**job, "tp": RANKS} for job in jobs], ",".join(plugins))
    answers = dict(zip(("default", *formats, *READ), run.results, strict=True))
    read = [json.loads((folder / f"read{rank}.json").read_text()) for rank in range(RANKS)]
    return answers, run, read


@pytest.mark.parametrize("name", STREAMERS)
def test_a_streamer_brings_the_same_model(loaded, formats, name):
    if name not in formats:
        pytest.skip(f"{STREAMERS[name]} is not installed here")
    answers, _, _ = loaded
    default, found = answers["default"], answers[name]
    assert "error" not in default, default["error"]
    assert "error" not in found, found["error"]
    assert len(found["weights"]) == RANKS
    assert all(found["weights"])
    assert found["weights"] == default["weights"]
    assert found["tokens"] == default["tokens"]
    assert found["logprobs"] == default["logprobs"]


def stored(root: Path) -> tuple[int, int, int]:
    """Bytes of a checkpoint's MXFP4 layers, of its other tensors, of its headers."""
    manifest = mxfp4prep.load(root).manifest
    layers = {t.tensor for record in manifest.layers for t in (record.weight, record.scale)}
    sizes = {True: 0, False: 0}
    headers = 0
    for path in root.glob("*.safetensors"):
        headers += path.stat().st_size
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                nbytes = file.get_tensor(name).nbytes
                sizes[name in layers] += nbytes
                headers -= nbytes
    return sizes[True], sizes[False], headers


@pytest.mark.parametrize("name", READ)
def test_a_rank_reads_its_part_of_each_layer(loaded, models, name):
    """All of what is not MXFP4, and headers twice; everything where digests are compared."""
    answers, _, read = loaded
    assert "error" not in answers[name], answers[name]["error"]
    layers, others, headers = stored(models[name])
    whole = layers + others + headers
    share = layers if name == "verified" else layers // RANKS
    for rank in read:
        found = sum(
            nbytes
            for path, nbytes in rank.items()
            if Path(path).parent == models[name] and path.endswith(".safetensors")
        )
        assert share + others < found <= share + others + 3 * headers
        if name != "verified":
            assert found < 0.6 * whole
