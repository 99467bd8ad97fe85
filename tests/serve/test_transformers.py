"""transformers loads prepared checkpoints: Quark's own logits, whole files back, or an error.

The reference files hold logits that Quark's importer computed in float32 from the original
checkpoints. Models are built by `AutoModelForCausalLM.from_pretrained` alone.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import Hub, serving
from safetensors.torch import load_file, save_file

if not os.environ.get("MXFP4PREP_ENGINES"):
    pytest.importorskip("transformers", minversion="5.0")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import mxfp4prep
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.integrations.hf import Mxfp4PrepQuantizer, register
from mxfp4prep.integrations.hf.experts import StoredExperts
from mxfp4prep.integrations.hf.linear import StoredLinear
from mxfp4prep.manifest import dump, parse
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.restore import restore
from mxfp4prep.survey import survey
from mxfp4prep.verify import verify

ENGINES_ARE_DUE = bool(os.environ.get("MXFP4PREP_ENGINES"))
"""Whether an engine that is not installed is a failure and no reason to skip: `make test-serve`."""

ROOT = Path(__file__).parent.parent.parent
IMPORTS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
FIXTURES = ROOT / "tests/data/fixtures"
REFERENCES = sorted(
    path.name.removesuffix(".reference.safetensors")
    for path in FIXTURES.glob("*.reference.safetensors")
)
TOLERANCE = 1e-4
DENSE, MOE = "llama-w4a4-aligned", "qwen2moe-w4a4-shared-expert"
TIED, MIXED = "qwen2-w4a4-misaligned-tied", "llama-mixed-fp8attn-kvfp8"


def prepare(source: Path, out: Path, tp=(1,), **wishes) -> Path:
    """The prepared checkpoint of `source` at `out`."""
    plan = make_plan(survey(open_checkpoint(source), surveyed_degrees(tp)), tp, **wishes)
    return convert(plan, out).out


def loaded(path: Path, kind=AutoModelForCausalLM, **wishes):
    """The model in float32, and what transformers says of its loading, which must be nothing."""
    wishes = {"dtype": torch.float32, "attn_implementation": "eager", **wishes}
    model, said = kind.from_pretrained(path, output_loading_info=True, **wishes)
    assert not any(said.values()), said
    return model


def logits_of(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def reference(name: str) -> dict[str, torch.Tensor]:
    found = load_file(FIXTURES / f"{name}.reference.safetensors")
    if "logits_no_output_quant" in found:  # the cache is transformers' and is not quantized
        found["logits"] = found["logits_no_output_quant"]
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A function: the prepared checkpoint of a fixture, made once."""
    made: dict[str, Path] = {}

    def get(name: str, tp=(1,), **wishes) -> Path:
        key = f"{name}-{tp}-{wishes}"
        if key not in made:
            out = tmp_path_factory.mktemp("hf") / "prepared"
            made[key] = prepare(FIXTURES / name, out, tp, **wishes)
        return made[key]

    return get


@pytest.fixture
def mine(prepared, tmp_path):
    """A function: the same, in a copy that may be spoilt."""

    def get(name: str) -> Path:
        out = tmp_path / "spoilt"
        for file, content in files_of(prepared(name)).items():
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            (out / file).write_bytes(content)
        return out

    return get


@pytest.fixture
def wishes():
    """`register`, whose wishes end with the test."""
    yield register
    register()


# ---- logits


@pytest.mark.parametrize("tp", [(1,), (1, 2, 4, 8)], ids=["tp 1", "tp 1,2,4,8"])
@pytest.mark.parametrize("layout", ["auto", "triton"])
@pytest.mark.parametrize("name", REFERENCES)
def test_logits_are_quarks(prepared, name, layout, tp):
    model = loaded(prepared(name, tp, layout=layout))
    expected = reference(name)
    assert (logits_of(model, expected["input_ids"]) - expected["logits"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_without_quantized_inputs_are_quarks(prepared, name):
    model = loaded(prepared(name))
    for module in model.modules():
        if hasattr(module, "quantize_activations"):
            module.quantize_activations = False
    expected = reference(name)
    difference = logits_of(model, expected["input_ids"]) - expected["logits_weights_only"]
    assert difference.abs().max() <= TOLERANCE


def test_every_layer_runs_from_the_stored_bytes(prepared):
    """Not from anything decoded: as many bytes as the files have, and as many modules."""
    path = prepared(MOE)
    model = loaded(path)
    stored = [module for module in model.modules() if isinstance(module, StoredLinear)]
    experts = [module for module in model.modules() if isinstance(module, StoredExperts)]
    manifest = mxfp4prep.load(path).manifest
    assert len(stored) + sum(3 * bank.num_experts for bank in experts) == len(manifest.layers)
    packed = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    tensors = mxfp4prep.load(path, device="meta")
    assert packed == sum(tensors[n].weight.numel() + tensors[n].scale.numel() for n in tensors)


def test_layers_kept_as_quark_wrote_them(prepared):
    model = loaded(prepared(DENSE, keep=("*.mlp.*",)))
    assert {layer.mlp.down_proj.path for layer in model.model.layers} == {"kept"}
    expected = reference(DENSE)
    assert (logits_of(model, expected["input_ids"]) - expected["logits"]).abs().max() <= TOLERANCE


def test_older_names_of_scales(prepared):
    """Quark 0.11.2 calls them weight_quantizer.scale; the weights of all versions are the same."""
    ids = torch.arange(12).reshape(2, 6)
    old, new = (loaded(prepared(f"version-{version}")) for version in ("0.11.2", "0.12.post1"))
    assert torch.equal(logits_of(old, ids), logits_of(new, ids))
    assert logits_of(old, ids).std() > 0


def test_generating_with_the_cache_is_computing_anew(prepared):
    model = loaded(prepared(DENSE))
    ids = reference(DENSE)["input_ids"][:1]
    got = model.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0)
    for _ in range(6):
        ids = torch.cat((ids, logits_of(model, ids)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(got, ids)


def test_the_checkpoints_own_dtype_is_the_default(prepared):
    model = AutoModelForCausalLM.from_pretrained(prepared(MIXED), dtype="auto")
    kinds = {p.dtype for p in model.parameters()}
    assert kinds == {torch.bfloat16, torch.uint8, torch.float8_e4m3fn}
    static = model.model.layers[1].mlp.down_proj.input_scale
    assert static.dtype == torch.float32
    assert model.bfloat16().model.layers[1].mlp.down_proj.input_scale.dtype == torch.float32
    ids = reference(MIXED)["input_ids"]
    assert logits_of(model, ids).dtype == torch.bfloat16


def test_a_model_without_its_head(prepared):
    path = prepared(DENSE)
    base = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    whole = loaded(path)
    ids = reference(DENSE)["input_ids"]
    with torch.no_grad():
        hidden = base(ids).last_hidden_state
        assert torch.equal(whole.lm_head(hidden), whole(ids).logits)


def test_tied_embeddings_stay_tied(prepared):
    model = loaded(prepared(TIED))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_kv_cache_scales_are_kept_and_not_applied(prepared):
    model = loaded(prepared(MIXED))
    stored = mxfp4prep.load(prepared(MIXED)).tensor("model.layers.0.self_attn.k_proj.output_scale")
    assert torch.equal(model.model.layers[0].self_attn.k_proj.output_scale, stored)


def test_compiled(prepared):
    model = loaded(prepared(MOE))
    ids = reference(MOE)["input_ids"]
    layer = model.model.layers[0].mlp
    x = torch.randn(1, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = layer(x)
        got = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert torch.equal(got, expected)
    assert ids.numel()


def test_a_deep_copy_is_a_model(prepared, tmp_path):
    model = loaded(prepared(DENSE))
    assert not {key for key in vars(model) if key.startswith("_adjust")}, "a hook is left behind"
    twin = copy.deepcopy(model)
    ids = reference(DENSE)["input_ids"]
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert logits_of(twin, ids).std() > 0
    twin.save_pretrained(tmp_path / "twin")
    assert files_of(tmp_path / "twin") == files_of(prepared(DENSE))
    with pytest.raises(mxfp4prep.UsageError, match="changes"):
        model.save_pretrained(tmp_path / "model")


# ---- saving


@pytest.mark.parametrize("name", [DENSE, MOE, TIED, MIXED, "version-0.11.2"])
@pytest.mark.parametrize("dtype", ["auto", torch.float32], ids=str)
def test_what_is_saved_is_the_checkpoint(prepared, tmp_path, name, dtype):
    path, out = prepared(name), tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(path, dtype=dtype).save_pretrained(out)
    assert files_of(out) == files_of(path)
    assert verify(out, "deep", FIXTURES / name).problems == ()
    restore(out, tmp_path / "restored")
    assert files_of(tmp_path / "restored") == files_of(FIXTURES / name)
    loaded(out)


def test_saving_over_an_older_save_and_into_its_own_folder(mine, tmp_path):
    path, out = mine(DENSE), tmp_path / "saved"
    model = loaded(path)
    before = files_of(path)
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_text("an older save, which transformers would read first")
    model.save_pretrained(out)
    model.save_pretrained(path)
    assert files_of(out) == files_of(path) == before


@pytest.mark.parametrize("change", ["norm", "bank", "extra"])
def test_a_changed_model_is_not_saved_as_the_checkpoint(prepared, tmp_path, change):
    model = loaded(prepared(MOE))
    with torch.no_grad():
        if change == "norm":
            model.model.norm.weight[3] += 1e-3
        elif change == "bank":
            model.model.layers[1].mlp.gate.weight[0, 0] += 1e-3
        else:
            model.model.layers[0].mlp.register_buffer("extra", torch.ones(2))
    with pytest.raises(mxfp4prep.UsageError, match=r"cannot be saved with changes") as raised:
        model.save_pretrained(tmp_path / "out")
    assert {"norm": "model.norm.weight", "bank": "mlp.gate.weight", "extra": "mlp.extra"}[
        change
    ] in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["config", "generation_config"])
def test_settings_are_not_saved_and_that_is_said(prepared, tmp_path, which):
    model = loaded(prepared(DENSE))
    model.generate(torch.arange(3)[None], do_sample=False, max_new_tokens=2, pad_token_id=0)
    model.save_pretrained(tmp_path / "before")
    if which == "config":
        model.config.rope_theta = 77.0
    else:
        model.generation_config.max_new_tokens = 77
    with pytest.warns(UserWarning, match=f"^{which} was changed"):
        model.save_pretrained(tmp_path / "after")
    assert files_of(tmp_path / "after") == files_of(prepared(DENSE))


def test_what_saving_cannot_do_is_said(prepared, tmp_path):
    model = loaded(prepared(DENSE))
    with pytest.raises(mxfp4prep.UsageError, match="state_dict"):
        model.save_pretrained(tmp_path / "out", state_dict=model.state_dict())
    with pytest.raises(mxfp4prep.UsageError, match="would not upload the checkpoint"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(mxfp4prep.UsageError, match="is a file"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="not serializable"):
        type(model).save_pretrained(model, tmp_path / "out")


# ---- closed


def resave(path: Path, change) -> None:
    """The manifest rewritten, with its line in SHA256SUMS gone, as an attacker or a tool would."""
    manifest = parse((path / "mxfp4prep.json").read_bytes())
    (path / "mxfp4prep.json").write_bytes(dump(change(manifest)))
    (path / "SHA256SUMS").unlink()


def stale_mark(path: Path) -> None:
    def change(manifest):
        layers = list(manifest.layers)
        at = next(i for i, layer in enumerate(layers) if layer.path == "asm")
        layer = layers[at]
        weight = layer.weight.model_copy(update={"layout": "raw"})
        scale = layer.scale.model_copy(update={"layout": "transposed"})
        update = {"path": "triton", "weight": weight, "scale": scale}
        layers[at] = layer.model_copy(update=update)
        return manifest.model_copy(update={"layers": layers})

    resave(path, change)


def from_the_future(path: Path) -> None:
    text = (
        (path / "mxfp4prep.json").read_text().replace('"schema_version": 1', '"schema_version": 2')
    )
    (path / "mxfp4prep.json").write_text(text)


def config_from_the_future(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= {"format_version": 2, "layouts": ["new"]}
    (path / "config.json").write_text(json.dumps(config))


def unknown_key(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["layouts"] = ["new"]
    (path / "config.json").write_text(json.dumps(config))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def without_tensor(path: Path, name: str) -> Path:
    """Takes a tensor out of its shard, which is returned."""
    (shard,) = [shard for shard in shards(path) if name in load_file(shard)]
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    return shard


def shorten(path: Path) -> None:
    without_tensor(path, "model.norm.weight")


def drop_tensor(name: str):
    """A function that drops a tensor, and has the manifest know the new file."""

    def spoil(path: Path) -> None:
        shard = without_tensor(path, name)

        def change(manifest):
            size = {"nbytes": shard.stat().st_size}
            files = [
                file.model_copy(update=size if file.name == shard.name else {})
                for file in manifest.files
            ]
            return manifest.model_copy(update={"files": files})

        resave(path, change)

    return spoil


LOST_WEIGHT = "model.layers.1.mlp.up_proj.weight"
LOST_SCALE = "model.layers.1.mlp.up_proj.weight_scale"


def rename_layer(path: Path) -> None:
    """config.json describes one layer less than there is."""
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (path / "config.json").write_text(json.dumps(config))


def wider(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["intermediate_size"] *= 2
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "mxfp4prep.json").unlink(), "no mxfp4prep.json"),
        (from_the_future, "schema_version 2"),
        (config_from_the_future, r"format_version: .*found '?2"),
        (unknown_key, "unknown keys: found layouts"),
        (stale_mark, "the shape of layout raw"),
        (shorten, r"model-.*: the file's size"),
        (drop_tensor(LOST_WEIGHT), rf"safetensors: {LOST_WEIGHT}: the tensor is missing"),
        (drop_tensor(LOST_SCALE), rf"safetensors: {LOST_SCALE}: the tensor is missing"),
        (drop_tensor("model.norm.weight"), r"safetensors: model\.norm\.weight: the tensor is mis"),
        (lambda path: shards(path)[0].unlink(), r"model-00001-of-00002\.safetensors"),
        (rename_layer, r"model\.layers\.\d.*no such module"),
        (wider, "not the size that config.json gives"),
    ],
    ids=[
        "manifest missing",
        "manifest from the future",
        "config from the future",
        "a key that is not known",
        "stale layout mark",
        "shard of another size",
        "MXFP4 weight missing",
        "MXFP4 scale missing",
        "norm missing",
        "shard missing",
        "a layer too many",
        "another width",
    ],
)
def test_what_is_not_whole_is_refused(mine, spoil, message):
    path = mine(DENSE)
    spoil(path)
    with pytest.raises((mxfp4prep.Mxfp4PrepError, OSError), match=message):
        AutoModelForCausalLM.from_pretrained(path)


def plain(path: Path) -> tuple[Path, dict]:
    """A copy whose manifest agrees with its files, for what only transformers can notice."""
    return path, json.loads((path / "config.json").read_text())


def test_a_tensor_that_the_model_has_no_place_for(mine):
    """The bias that config.json of Qwen2 implies, in a model whose config.json is a Llama's."""
    path, config = plain(mine(TIED))
    config["model_type"], config["architectures"] = "llama", ["LlamaForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mxfp4prep.InvalidCheckpoint, match="the model's layer has none"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_tensor_that_the_checkpoint_lacks(mine):
    """A head of its own, which the tied checkpoint does not have."""
    path, config = plain(mine(TIED))
    config["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mxfp4prep.InvalidCheckpoint, match=r"lm_head\.weight missing"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("ignore", [False, True])
def test_a_tensor_of_another_shape(mine, ignore):
    """transformers would fill it with random values where it is told to ignore that."""
    path, config = plain(mine(DENSE))
    config["vocab_size"] += 2
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mxfp4prep.InvalidCheckpoint, match=r"embed_tokens\.weight.* mismatched"):
        AutoModelForCausalLM.from_pretrained(path, ignore_mismatched_sizes=ignore)


def test_a_tensor_left_over(mine):
    """q_norm and k_norm of Qwen3, in a model without them: transformers would only warn."""
    path, config = plain(mine("qwen3-w4a16-misaligned"))
    config["model_type"], config["architectures"] = "qwen2", ["Qwen2ForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mxfp4prep.InvalidCheckpoint) as raised:
        AutoModelForCausalLM.from_pretrained(path)
    assert "k_norm" in str(raised.value)


def test_one_flipped_byte_with_digests(mine, wishes):
    path = mine(DENSE)
    shard = shards(path)[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    loaded(path)  # nothing but the digest can tell
    wishes(verify=True)
    with pytest.raises(mxfp4prep.InvalidCheckpoint, match="differ from what convert wrote"):
        AutoModelForCausalLM.from_pretrained(path)


def test_digests_are_those_of_whole_checkpoints(prepared, wishes):
    wishes(verify=True)
    loaded(prepared(MOE))


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Another Python, which has not imported this package for transformers."""
    environment = {**os.environ, "PYTHONPATH": IMPORTS, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *(["-c", code] if code else []), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


LOAD = (
    "import sys; from transformers import AutoModelForCausalLM as A; "
    "m = A.from_pretrained(sys.argv[1]); import torch; m(torch.arange(3)[None]); "
    "print('served', type(m.model.layers[0].mlp.up_proj))"
)


@pytest.mark.parametrize("layout", ["auto", "triton"])
@pytest.mark.parametrize("known", [True, False], ids=["with this package", "without"])
def test_relabelled_quark(prepared, tmp_path, layout, known):
    """transformers then asks for Quark; where that is installed, this package's guard stops it,
    and without this package its shapes do, while it loads or when it runs."""
    path = tmp_path / "relabelled"
    for file, content in files_of(prepared(DENSE, layout=layout)).items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(content)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = config["quantization_config"]["source_quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    done = child(("import mxfp4prep.integrations.hf; " if known else "") + LOAD, str(path))
    assert done.returncode != 0
    assert "served" not in done.stdout
    if known and "latest version of Quark" not in done.stderr:
        assert "config.json was replaced" in done.stderr


@pytest.mark.parametrize("layout", ["auto", "triton"])
def test_without_the_package_transformers_stops(prepared, layout):
    done = child(LOAD, str(prepared(DENSE, layout=layout)))
    assert done.returncode != 0
    assert "served" not in done.stdout
    assert "mxfp4prep" in done.stderr  # the quantization it does not know, by its name


def test_a_program_that_is_not_yours(prepared, tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(LOAD)
    done = child("", "-m", "mxfp4prep.integrations.hf", str(script), str(prepared(DENSE)))
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout
    assert "StoredLinear" in done.stdout


# ---- registration, and where a checkpoint may come from


def test_registering_again_is_nothing_new(wishes):
    wishes()
    wishes(backend="torch")
    assert AUTO_QUANTIZER_MAPPING["mxfp4prep"] is Mxfp4PrepQuantizer


def test_a_name_that_is_taken(monkeypatch):
    class Other(Mxfp4PrepQuantizer):
        pass

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "mxfp4prep", Other)
    with pytest.raises(mxfp4prep.UsageError, match="taken"):
        register()


def test_a_backend_that_cannot_run_says_so(prepared, wishes):
    wishes(backend="aiter")
    with pytest.raises(mxfp4prep.BackendUnavailable):
        AutoModelForCausalLM.from_pretrained(prepared(DENSE))


FROM_THE_HUB = """
import sys, torch
from pathlib import Path
import mxfp4prep.integrations.hf
from mxfp4prep import InvalidCheckpoint
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(
    "org/model", dtype=torch.float32, attn_implementation="eager")
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[1])).logits, sys.argv[2])
try:
    model.save_pretrained("saved")
except InvalidCheckpoint as error:
    print("not saved:", error, error.hint)
"""


def test_from_a_hub(prepared, tmp_path):
    """transformers fetches config.json and shards, this package the manifest and its companions."""
    expected = reference(TIED)
    torch.save(expected["input_ids"], tmp_path / "ids.pt")
    with serving(Hub(prepared(TIED), "org/model")) as hub:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            **{
                "PYTHONPATH": IMPORTS,
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / "hf"),
            },
        }
        done = subprocess.run(
            [sys.executable, "-c", FROM_THE_HUB, "ids.pt", "logits.pt"],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "logits.pt")
    assert (got - expected["logits"]).abs().max() <= TOLERANCE
    assert "not the whole checkpoint" in done.stdout
    assert "hf download" in done.stdout
    assert not (tmp_path / "saved").exists()


def test_from_a_config_nothing_is_made(prepared):
    """A model without weights is not a prepared one."""
    config = AutoConfig.from_pretrained(prepared(DENSE))
    assert (
        json.loads(config.to_json_string())["quantization_config"]
        == (json.loads((prepared(DENSE) / "config.json").read_text())["quantization_config"])
    )
    model = AutoModelForCausalLM.from_config(config)
    assert not any(isinstance(module, StoredLinear) for module in model.modules())


def test_the_example(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/05_transformers.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": IMPORTS},
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "{'StoredLinear': 14, 'StoredExperts': 2}" in done.stdout
    assert "saved: 10 files, 0 problems" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_block_of_the_readme(prepared, tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "integrations" in block]
    (tmp_path / "model-mxfp4prep").symlink_to(prepared(DENSE))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block, names)
    assert any(isinstance(module, StoredLinear) for module in names["model"].modules())
