"""What is not whole, not ours or not understood is not served: vLLM stops, and says why."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import NONE, PREPARED, REFERENCE, needs_vllm, run_jobs
from models import prepare, write_model
from quark_factory import quant_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

LAYER = "model.layers.1.mlp.down_proj"
K = "model.layers.1.self_attn.k_proj"
NORM = "model.norm.weight"
NOT_STORED = "the checkpoint does not have it"
NO_PLACE = "vLLM's module has no place for it"


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """`change` on what a JSON file says."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def rewrite_manifest(root: Path, change: Callable[[dict], object]) -> None:
    """So that it is the one that SHA256SUMS names."""
    path = root / "mxfp4prep.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(path, change)
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    sums = root / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(before, after))


def rewrite_shard(root: Path, change: Callable[[dict], object]) -> None:
    """Tensors changed, and the manifest made to know the new file."""
    path = root / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})

    def record(manifest: dict) -> None:
        (file,) = [each for each in manifest["files"] if each["name"] == path.name]
        file["nbytes"] = path.stat().st_size

    rewrite_manifest(root, record)


def record_of(manifest: dict, name: str = LAYER) -> dict:
    (record,) = [each for each in manifest["layers"] if each["name"] == name]
    return record


def relabelled(root: Path) -> None:
    """config.json says what the original one said: the bytes are not in that order."""
    shutil.copy(root / "source" / "config.json", root / "config.json")


def relabelled_in_place(root: Path) -> None:
    rewrite(
        root / "config.json",
        lambda config: config["quantization_config"].update(quant_method="quark"),
    )


def from_the_future(root: Path) -> None:
    rewrite_manifest(root, lambda manifest: manifest.update(schema_version=2))


def format_from_the_future(root: Path) -> None:
    rewrite(
        root / "config.json",
        lambda config: config["quantization_config"].update(format_version=2),
    )


def without_original_config(root: Path) -> None:
    rewrite(
        root / "config.json",
        lambda config: config["quantization_config"].pop("source_quantization_config"),
    )


def stale_mark(root: Path) -> None:
    """Stored tiled, and said to be plain."""

    def change(manifest: dict) -> None:
        record = record_of(manifest)
        record["path"] = "triton"
        record["weight"]["layout"], record["scale"]["layout"] = "raw", "transposed"

    rewrite_manifest(root, change)


def edited_manifest(root: Path) -> None:
    rewrite(
        root / "mxfp4prep.json", lambda manifest: record_of(manifest).update(hazards=["edited"])
    )


def without_manifest(root: Path) -> None:
    (root / "mxfp4prep.json").unlink()


def without_weight(root: Path) -> None:
    rewrite_shard(root, lambda tensors: tensors.pop(f"{LAYER}.weight"))


def without_norm(root: Path) -> None:
    rewrite_shard(root, lambda tensors: tensors.pop("model.norm.weight"))


def unknown_tensor(root: Path) -> None:
    rewrite_shard(root, lambda tensors: tensors.update({"model.more.weight": torch.ones(4)}))


def edited_config(root: Path) -> None:
    rewrite(root / "config.json", lambda config: config.update(num_hidden_layers=1))


def unused_layer(root: Path) -> None:
    """Whole and right, but the model has one layer less than there are."""
    edited_config(root)
    path = root / "config.json"

    def record(manifest: dict) -> None:
        (file,) = [each for each in manifest["files"] if each["name"] == path.name]
        file["nbytes"] = path.stat().st_size
        file["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()

    rewrite_manifest(root, record)


def layer_forgotten(root: Path) -> None:
    """The manifest has an MXFP4 layer among what was copied."""

    def change(manifest: dict) -> None:
        record = record_of(manifest)
        manifest["layers"].remove(record)
        for operand in ("weight", "scale"):
            stored = record[operand]
            manifest["tensors"].append({"name": stored["tensor"], "file": stored["file"]})

    rewrite_manifest(root, change)


def unlisted_shard(root: Path) -> None:
    """A shard that the index does not name: vLLM would not read it."""
    tensors = load_file(root / "model.safetensors")
    moved = {"model.norm.weight": tensors["model.norm.weight"]}
    save_file(moved, root / "more.safetensors", metadata={"format": "pt"})
    rewrite_shard(root, lambda tensors: tensors.pop("model.norm.weight"))

    def change(manifest: dict) -> None:
        (file,) = [each for each in manifest["files"] if each["role"] == "shard"]
        nbytes = (root / "more.safetensors").stat().st_size
        manifest["files"].append({**file, "name": "more.safetensors", "nbytes": nbytes})
        (norm,) = [each for each in manifest["tensors"] if each["name"] == "model.norm.weight"]
        norm["file"] = "more.safetensors"

    rewrite_manifest(root, change)
    weight_map = dict.fromkeys(set(tensors) - set(moved), "model.safetensors")
    index = root / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def stray_shard(root: Path) -> None:
    """A file that nobody knows: vLLM would read it too."""
    tensors = {"model.norm.weight": torch.ones(256, dtype=torch.bfloat16)}
    save_file(tensors, root / "more.safetensors", metadata={"format": "pt"})


def prepared_from(
    root: Path, change: Callable[[dict], object], family: str = "llama", **config: object
) -> None:
    """A checkpoint that was this way before it was prepared: nothing in it disagrees.

    change   of the source's tensors
    config   changes of the source's config.json
    """
    source = write_model(root.with_name(f"{root.name}-source"), family, **config)
    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.rmtree(root)
    prepare(source, root)


def add(name: str, size: int = 256, **config: Any) -> Callable[[Path], None]:
    """A vector that the model has no parameter for, and would leave out without a word."""
    vector = torch.ones(size, dtype=torch.bfloat16)
    return lambda root: prepared_from(
        root, lambda tensors: tensors.update({name: vector}), **config
    )


def without(*names: str, **config: Any) -> Callable[[Path], None]:
    """Without tensors that the model has parameters for: vLLM would serve what memory holds."""

    def change(tensors: dict) -> None:
        for name in names:
            del tensors[name]

    return lambda root: prepared_from(root, change, **config)


def plain(tensors: dict) -> None:
    """down_proj of layer 1 as a plain matrix."""
    del tensors[f"{LAYER}.weight_scale"]
    tensors[f"{LAYER}.weight"] = torch.ones(256, 1024, dtype=torch.bfloat16)


EXCLUDED = quant_config(exclude=["lm_head", LAYER])


def plain_without_bias(root: Path) -> None:
    """Every layer that is MXFP4 has its bias."""

    def change(tensors: dict) -> None:
        plain(tensors)
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            rows = tensors[name].shape[0]
            bias = torch.ones(rows, dtype=torch.bfloat16)
            tensors[name.replace(".weight_scale", ".bias")] = bias

    prepared_from(root, change, attention_bias=True, mlp_bias=True, quantization_config=EXCLUDED)


def plain_bias_without_place(root: Path) -> None:
    def change(tensors: dict) -> None:
        plain(tensors)
        tensors[f"{LAYER}.bias"] = torch.ones(256, dtype=torch.bfloat16)

    prepared_from(root, change, quantization_config=EXCLUDED)


def plain_attention(root: Path, *lacking: str) -> None:
    """All of it, with biases: qkv_proj is three of them.

    lacking   tensors that are not stored
    """

    def change(tensors: dict) -> None:
        for name in [name for name in tensors if ".self_attn." in name]:
            if name.endswith("_scale"):
                del tensors[name]
            else:
                rows, packed = tensors[name].shape
                tensors[name] = torch.full((rows, packed * 2), 0.01, dtype=torch.bfloat16)
                bias = torch.ones(rows, dtype=torch.bfloat16)
                tensors[name.replace(".weight", ".bias")] = bias
        for name in lacking:
            del tensors[name]

    excluded = quant_config(exclude=["lm_head", "*self_attn*"])
    prepared_from(root, change, attention_bias=True, quantization_config=excluded)


def plain_missing(root: Path) -> None:
    def change(tensors: dict) -> None:
        plain(tensors)
        del tensors[f"{LAYER}.weight"]

    prepared_from(root, change, quantization_config=EXCLUDED)


def flip(root: Path, name: str) -> None:
    """One bit of a tensor."""
    path = root / "model.safetensors"
    with safe_open(path, "pt") as file:
        whole = file.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
    raw = bytearray(path.read_bytes())
    at = raw.index(whole) + len(whole) // 2
    raw[at] ^= 1
    path.write_bytes(raw)


def flipped_weight(root: Path) -> None:
    flip(root, f"{LAYER}.weight")


def flipped_norm(root: Path) -> None:
    flip(root, "model.norm.weight")


VERIFIED = {"load_format": "mxfp4prep"}
SLICED = {**VERIFIED, "model_loader_extra_config": {"verify": False}}
MOE = {"family": "qwen2_moe", "num_hidden_layers": 1}
GATE = "model.layers.0.mlp.gate"
REFUSALS: dict[str, tuple[Callable[[Path], None], dict, tuple[str, ...]]] = {
    # name -> what is done to the directory, options, words of the error; experts first: vLLM sets
    # up no group for them once a dense model ran in a process
    "router missing": (without(f"{GATE}.weight", **MOE), {}, (f"{GATE}.weight: ", NOT_STORED)),
    "router's bias without place": (
        add(f"{GATE}.bias", 4, **MOE),
        {},
        (f"{GATE}.bias: ", NO_PLACE),
    ),
    "relabelled": (relabelled, {}, ("mxfp4prep.json is there, but config.json was replaced",)),
    "relabelled in place": (relabelled_in_place, {}, ("config.json was replaced", "'quark'")),
    "manifest from the future": (from_the_future, {}, ("cannot read it", "schema_version 2")),
    "format from the future": (format_from_the_future, {}, ("format_version", "found 2")),
    "no original config": (without_original_config, {}, ("source_quantization_config",)),
    "stale layout mark": (stale_mark, {}, (f"{LAYER}.weight", "layout raw")),
    "edited manifest": (edited_manifest, {}, ("not the one that SHA256SUMS was written with",)),
    "manifest missing": (without_manifest, {}, ("no mxfp4prep.json",)),
    "weight missing": (without_weight, {}, (f"{LAYER}.weight: the tensor is missing",)),
    "norm missing": (without_norm, {}, ("model.norm.weight: the tensor is missing",)),
    "unknown tensor": (unknown_tensor, {}, ("does not say what tensor model.more.weight is",)),
    "unused layer": (unused_layer, {}, ("no module or parameter named", "layers.1")),
    "unused layer, sliced": (unused_layer, SLICED, ("no module or parameter", "layers.1")),
    "edited config": (edited_config, {}, ("config.json: not the one that convert wrote",)),
    "edited config, verified": (edited_config, VERIFIED, ("not the one that convert wrote",)),
    "head missing": (without("lm_head.weight"), {}, ("lm_head.weight: ", NOT_STORED)),
    "embeddings missing": (
        without("model.embed_tokens.weight"),
        {},
        ("model.embed_tokens.weight: ", NOT_STORED),
    ),
    "norm never stored": (without(NORM), {}, (f"{NORM}: ", NOT_STORED)),
    "norm never stored, sliced": (without(NORM), SLICED, (f"{NORM}: ", NOT_STORED)),
    "norms never stored": (
        without(NORM, "model.layers.1.input_layernorm.weight"),
        {},
        ("model.layers.1.input_layernorm.weight (and 1 more): ", NOT_STORED),
    ),
    "norm's bias without place": (
        add("model.norm.bias"),
        {},
        ("model.norm.bias: ", NO_PLACE),
    ),
    "norm's scale without place": (
        add("model.norm.weight_scale"),
        {},
        ("model.norm.weight_scale: ", NO_PLACE),
    ),
    "biases missing": (
        without(attention_bias=True),
        {},
        ("self_attn.qkv_proj.bias (and 3 more): ", NOT_STORED),
    ),
    "plain weight missing": (plain_missing, {}, (f"{LAYER}.weight: ", NOT_STORED)),
    "plain part missing": (
        lambda root: plain_attention(root, f"{K}.weight", f"{K}.bias"),
        {},
        ("self_attn.qkv_proj: ", "the manifest has no such layer"),
    ),
    "plain part's bias missing": (
        lambda root: plain_attention(root, f"{K}.bias"),
        {},
        (f"{K}.bias: ", NOT_STORED),
    ),
    "plain bias missing": (plain_without_bias, {}, (f"{LAYER}.bias: ", NOT_STORED)),
    "plain bias without place": (
        plain_bias_without_place,
        {},
        (f"{LAYER}.bias", NO_PLACE),
    ),
    "head's bias without place": (add("lm_head.bias"), {}, ("lm_head.bias", NO_PLACE)),
    "bias of nothing": (
        add("model.layers.1.mlp.act_fn.bias"),
        {},
        ("mlp.act_fn.bias: belongs to no layer",),
    ),
    "input scale of nothing": (
        add("model.layers.1.mlp.act_fn.input_scale"),
        {},
        ("mlp.act_fn.input_scale: belongs to no layer",),
    ),
    "sharded state": (
        lambda root: None,
        {"load_format": "sharded_state"},
        ("--load-format sharded_state", "checks nothing"),
    ),
    "layer forgotten": (layer_forgotten, {}, (LAYER, "the manifest has no such layer")),
    "unlisted shard": (unlisted_shard, {}, ("index.json: it does not name the files",)),
    "stray shard": (stray_shard, {}, ("more.safetensors: a weight file that mxfp4prep.json",)),
    "bias without place": (add(f"{LAYER}.bias"), {}, (f"{LAYER}.bias", NO_PLACE)),
    "flipped weight": (flipped_weight, VERIFIED, (f"{LAYER}.weight", "bytes differ")),
    "flipped norm": (flipped_norm, VERIFIED, ("model.norm.weight", "bytes differ")),
    "unknown option": (
        lambda root: None,
        {**VERIFIED, "model_loader_extra_config": {"verfy": True}},
        ("verfy", "one option"),
    ),
}


SERVED: dict[str, tuple[Callable[[Path], None], dict]] = {
    # name -> what is done to the directory, options
    "untouched": (lambda root: None, {}),
    "plain attention with biases": (plain_attention, {}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    return prepare(write_model(root / "model", "llama"), root / "prepared")


@pytest.fixture(scope="module")
def errors(whole, tmp_path_factory) -> dict[str, str]:
    """What vLLM stopped with, by name of REFUSALS or SERVED, "" where it did not."""
    root = tmp_path_factory.mktemp("broken")
    jobs = []
    cases = {**REFUSALS, **SERVED}
    for number, (change, options, *_) in enumerate(cases.values()):
        path = root / str(number)
        shutil.copytree(whole, path)
        change(path)
        jobs.append({"model": str(path), "options": options})
    run = run_jobs(root / "run", jobs, PREPARED)
    return {name: result.get("error", "") for name, result in zip(cases, run.results, strict=True)}


@pytest.mark.parametrize("name", SERVED)
def test_serves(errors, name):
    assert errors[name] == ""


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(errors, name):
    for word in REFUSALS[name][2]:
        assert word in errors[name]


def test_without_the_plugin_vllm_refuses(whole, tmp_path):
    run = run_jobs(tmp_path, [{"model": str(whole)}], NONE)
    assert "Unknown quantization method: mxfp4prep" in run[0]["error"]


def test_relabelled_and_without_the_plugin_shapes_do_not_fit(whole, tmp_path):
    """With a kernel for Quark's MXFP4, and nobody there who knows the manifest."""
    path = tmp_path / "relabelled"
    shutil.copytree(whole, path)
    relabelled(path)
    run = run_jobs(tmp_path / "run", [{"model": str(path)}], REFERENCE)
    assert "AssertionError" in run[0]["error"]
    assert run.lines("assert", "shape == loaded_weight.shape")


def test_ranks_that_would_cut_a_group_of_32(tmp_path):
    """Half of 96 columns are one and a half groups: engines have rounded that down."""
    source = write_model(tmp_path / "model", "qwen2_moe", moe_intermediate_size=96)
    out = prepare(source, tmp_path / "prepared")
    run = run_jobs(tmp_path / "run", [{"model": str(out), "tp": 2}], PREPARED)
    assert "no whole 32-groups on a rank" in run[0]["error"]
    assert "model.layers.0.mlp.experts.0.down_proj" in run[0]["error"]
