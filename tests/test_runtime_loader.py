"""load(): what it gives, and everything it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import with_path
from prepared_factory import Layer, build, edit_config, edit_manifest, lay_out
from safetensors.torch import load_file, save_file

import mxfp4prep
from mxfp4prep.errors import (
    InvalidCheckpoint,
    InvalidManifest,
    IOFailed,
    Mxfp4PrepError,
    Unsupported,
)
from mxfp4prep.runtime.linear import PreparedLinear

ROOT = Path(__file__).parent.parent
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
FIXTURES = Path(__file__).parent / "data" / "fixtures"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("loader") / "prepared"
    copied = {
        "model.norm.weight": torch.arange(8, dtype=torch.bfloat16),
        "model.layers.0.mlp.gate.weight": torch.rand(4, 8),
        "ids": torch.arange(3),
    }
    layers = build(
        root,
        [Layer(Q, 64, 256, bias=True), Layer(DOWN, 48, 96, "triton", "w4a8", input_scale=0.5)],
        copied=copied,
        shards=2,
    )
    return root, layers, copied


@pytest.fixture
def prepared_dir(pristine, tmp_path):
    return Path(shutil.copytree(pristine[0], tmp_path / "prepared"))


def layer_of(document: dict, name: str = Q) -> dict:
    return next(layer for layer in document["layers"] if layer["name"] == name)


def test_it_is_a_mapping_of_layers(pristine):
    root, layers, _ = pristine
    prepared = mxfp4prep.load(root)
    assert list(prepared) == [Q, DOWN] == list(prepared.names)
    assert len(prepared) == 2
    assert Q in prepared
    assert "model.norm" not in prepared
    assert 3 not in prepared
    assert prepared.bytes_read == 0, "membership reads nothing"
    assert isinstance(prepared[Q], PreparedLinear)
    assert prepared[Q] is prepared[Q]
    assert prepared.read(Q) is not prepared[Q]
    assert dict(prepared.items()).keys() == layers.keys()
    assert prepared.get("nothing") is None


def test_layers_hold_what_was_stored(pristine):
    root, layers, _ = pristine
    prepared = mxfp4prep.load(str(root))
    for name, layer in layers.items():
        found = prepared[name]
        assert (found.n, found.k, found.path) == (layer.n, layer.k, layer.path)
        assert found.scheme == layer.scheme
        assert torch.equal(found.dequantize().double(), layer.dense)
    assert torch.equal(prepared[Q].bias, layers[Q].bias_values)
    assert prepared[DOWN].bias is None
    assert prepared[DOWN].input_scale.item() == 0.5
    assert prepared[DOWN].input_scale.dtype == torch.float32
    assert prepared[DOWN].input_quant == "fp8_static"


def test_manifest_config_and_copied_tensors(pristine):
    root, _, copied = pristine
    prepared = mxfp4prep.load(root)
    assert prepared.manifest.layer(Q).n == 64
    assert prepared.config["model_type"] == "llama"
    assert prepared.path == root
    assert prepared.device == torch.device("cpu")
    assert (prepared.tp_rank, prepared.tp_size) == (0, 1)
    for name, tensor in copied.items():
        found = prepared.tensor(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("name", ["nothing", Q, f"{Q}.weight"])
def test_tensor_gives_copied_tensors_only(pristine, name):
    with pytest.raises(KeyError, match=r"no copied tensor"):
        mxfp4prep.load(pristine[0]).tensor(name)


def test_unknown_names_are_key_errors(pristine):
    prepared = mxfp4prep.load(pristine[0])
    with pytest.raises(KeyError, match="no MXFP4 layer"):
        prepared["model.norm"]
    with pytest.raises(KeyError, match="no MXFP4 experts"):
        prepared.experts("model.layers.0.mlp.experts")


def test_the_result_outlives_the_files(prepared_dir):
    layer = mxfp4prep.load(prepared_dir)[Q]
    before = layer.weight.clone()
    for shard in prepared_dir.glob("*.safetensors"):
        shard.write_bytes(b"")
    assert torch.equal(layer.weight, before)


def refused(root: Path, error: type[Mxfp4PrepError], *words: str) -> Mxfp4PrepError:
    with pytest.raises(error) as caught:
        mxfp4prep.load(root)
    for word in words:
        assert word in str(caught.value) + str(caught.value.hint), word
    return caught.value


def test_a_directory_that_is_not_there(tmp_path):
    refused(tmp_path / "none", InvalidCheckpoint, "no such directory")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", InvalidCheckpoint, "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", InvalidManifest, "mxfp4prep.json", "mxfp4prep convert")


def test_a_quark_checkpoint_says_how_to_prepare_it():
    root = FIXTURES / "llama-w4a4-aligned"
    error = refused(root, InvalidManifest, "Quark checkpoint", "mxfp4prep convert")
    assert str(root) in error.hint


def test_a_manifest_beside_a_quark_config(prepared_dir):
    shutil.copy(FIXTURES / "llama-w4a4-aligned" / "config.json", prepared_dir)
    refused(prepared_dir, InvalidManifest, "config.json was replaced")


def test_missing_manifest(prepared_dir):
    (prepared_dir / "mxfp4prep.json").unlink()
    refused(prepared_dir, InvalidManifest, "no mxfp4prep.json")


def test_missing_config(prepared_dir):
    (prepared_dir / "config.json").unlink()
    refused(prepared_dir, InvalidManifest, "no config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "fp8"),
        ("quant_method", None),
        ("format_version", 2),
        ("format_version", "1"),
        ("format_version", True),
        ("manifest", "other.json"),
        ("manifest", None),
    ],
)
def test_config_of_another_format(prepared_dir, key, value):
    edit_config(prepared_dir, lambda c: c["quantization_config"].__setitem__(key, value))
    refused(prepared_dir, InvalidManifest, f"quantization_config.{key}", repr(value))


def test_config_without_quantization(prepared_dir):
    edit_config(prepared_dir, lambda c: c.pop("quantization_config"))
    refused(prepared_dir, InvalidManifest, "quant_method")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"schema_version": 2}'])
def test_manifest_that_is_none(prepared_dir, content):
    (prepared_dir / "mxfp4prep.json").write_bytes(content)
    refused(prepared_dir, InvalidManifest, "mxfp4prep.json")


LAYER_EDITS = [
    # the layout marks
    (lambda x: x["weight"].pop("layout"), InvalidManifest, ["layout"]),
    (lambda x: x["weight"].update(layout="tile8x8"), InvalidManifest, ["layout"]),
    (lambda x: x["weight"].update(layout="raw"), InvalidManifest, ["path asm", "raw + tile32x8"]),
    (lambda x: x["scale"].update(layout="raw"), InvalidManifest, ["path asm", "tile16x16 + raw"]),
    (lambda x: x["scale"].update(layout="transposed"), InvalidManifest, ["path asm"]),
    (lambda x: x.update(path="triton"), InvalidManifest, ["path triton", "raw + transposed"]),
    (lambda x: x.update(path="fast"), InvalidManifest, ["path"]),
    (lambda x: x.update(reasons=["kept"]), InvalidManifest, ["path kept"]),
    (lambda x: x.pop("path"), InvalidManifest, ["path"]),
    # shapes
    (lambda x: x.update(n=128, n_padded=128), InvalidManifest, ["n 128", "[4, 2048]"]),
    (lambda x: x.update(n=72, n_padded=72), InvalidManifest, ["72 rows"]),
    (lambda x: x.update(k=512, k_padded=512), InvalidManifest, ["k 512"]),
    (lambda x: x["weight"].update(shape=[64, 128]), InvalidManifest, ["[64, 128] in the manifest"]),
    (lambda x: x["scale"].update(shape=[64, 8]), InvalidManifest, ["[64, 8] in the manifest"]),
    (lambda x: x.update(experts=1), InvalidManifest, ["[1, 4, 2048]"]),
    (lambda x: x.update(n=0, n_padded=0), InvalidManifest, ["size"]),
    (lambda x: x.update(k=-2, k_padded=-2), InvalidManifest, ["size"]),
    (lambda x: x.update(experts=0), InvalidManifest, ["size"]),
    (lambda x: x.update(n_padded=256), Unsupported, ["padded"]),
    (lambda x: x.update(k_padded=512), Unsupported, ["padded"]),
    # tensors
    (lambda x: x["weight"].update(tensor="gone"), InvalidCheckpoint, ["gone", "missing"]),
    (lambda x: x["scale"].update(tensor="gone"), InvalidCheckpoint, ["gone", "missing"]),
    (
        lambda x: x["weight"].update(file="model-00002-of-00002.safetensors"),
        InvalidCheckpoint,
        ["missing"],
    ),
    (lambda x: x["weight"].update(tensor=f"{Q}.bias"), InvalidCheckpoint, ["missing", "bias"]),
    (lambda x: x.update(bias="gone"), InvalidCheckpoint, ["gone", "missing"]),
    (lambda x: x.update(bias="model.norm.weight"), InvalidCheckpoint, ["[8]", "[64]"]),
    (lambda x: x.update(bias=f"{Q}.weight"), InvalidCheckpoint, ["dtype", "U8"]),
    (lambda x: x.update(input_scale="model.norm.weight"), InvalidCheckpoint, ["[8]"]),
    (lambda x: x.update(surprise=1), InvalidManifest, ["surprise"]),
]


@pytest.mark.parametrize(("edit", "error", "words"), LAYER_EDITS)
def test_layers_that_contradict_themselves(prepared_dir, edit, error, words):
    edit_manifest(prepared_dir, lambda document: edit(layer_of(document)))
    refused(prepared_dir, error, *words)


def test_a_source_shape_of_another_size(tmp_path):
    """Raw tensors keep their source's shape; n must agree with it all the same."""
    build(tmp_path, [Layer("fc1", 96, 64, "kept")])
    edit_manifest(tmp_path, lambda d: layer_of(d, "fc1").update(n=48, n_padded=48))
    refused(tmp_path, InvalidManifest, "n 48", "[96, 32] in the file")


def test_swapped_weight_and_scale(prepared_dir):
    def swap(document):
        layer = layer_of(document)
        layer["weight"]["tensor"], layer["scale"]["tensor"] = (
            layer["scale"]["tensor"],
            layer["weight"]["tensor"],
        )
        layer["weight"]["file"], layer["scale"]["file"] = (
            layer["scale"]["file"],
            layer["weight"]["file"],
        )

    edit_manifest(prepared_dir, swap)
    refused(prepared_dir, InvalidManifest, "shape")


def test_a_layer_listed_twice(prepared_dir):
    edit_manifest(prepared_dir, lambda d: d["layers"].append(d["layers"][0]))
    refused(prepared_dir, InvalidManifest, "twice")


def test_a_tensor_that_the_manifest_does_not_know(prepared_dir):
    edit_manifest(prepared_dir, lambda d: d["tensors"].pop(0))
    refused(prepared_dir, InvalidManifest, "does not say what tensor")


def test_a_layer_lost_from_the_manifest(prepared_dir):
    edit_manifest(prepared_dir, lambda d: d["layers"].pop(0))
    refused(prepared_dir, InvalidManifest, "does not say what tensor", Q)


def test_a_copied_tensor_that_is_not_there(prepared_dir):
    edit_manifest(prepared_dir, lambda d: d["tensors"][0].update(name="gone"))
    refused(prepared_dir, InvalidCheckpoint, "gone", "missing")


def test_a_missing_shard(prepared_dir):
    (prepared_dir / "model-00002-of-00002.safetensors").unlink()
    refused(prepared_dir, InvalidCheckpoint, "model-00002-of-00002.safetensors", "not there")


def test_a_shard_left_out_of_the_manifest(prepared_dir):
    edit_manifest(prepared_dir, lambda d: d["files"].pop(0))
    refused(prepared_dir, InvalidCheckpoint, "missing")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../b", "", "./a"])
def test_file_names_cannot_leave_the_directory(prepared_dir, name):
    edit_manifest(prepared_dir, lambda d: d["files"][0].update(name=name))
    refused(prepared_dir, InvalidManifest, "file name")


def test_a_file_of_another_size(prepared_dir):
    edit_manifest(prepared_dir, lambda d: d["files"][0].update(nbytes=7))
    refused(prepared_dir, InvalidCheckpoint, "7", "size")


def test_a_truncated_shard(prepared_dir):
    shard = prepared_dir / "model-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refused(prepared_dir, InvalidCheckpoint, shard.name)


def rewrite(root: Path, change) -> None:
    """Changes a shard's tensors and keeps the manifest's file size in step."""
    for shard in sorted(root.glob("*.safetensors")):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})
        size = shard.stat().st_size
        name = shard.name

        def resize(document, name=name, size=size):
            for record in document["files"]:
                if record["name"] == name:
                    record["nbytes"] = size

        edit_manifest(root, resize)


def test_a_shard_in_another_layout_than_the_manifest_says(prepared_dir):
    def unshuffle(tensors):
        name = f"{Q}.weight"
        if name in tensors:
            tensors[name] = tensors[name].reshape(64, 128)

    rewrite(prepared_dir, unshuffle)
    refused(prepared_dir, InvalidManifest, "[64, 128] in the file")


@pytest.mark.parametrize("suffix", ["weight", "weight_scale"])
def test_a_shard_with_another_dtype(prepared_dir, suffix):
    def as_signed(tensors):
        name = f"{Q}.{suffix}"
        if name in tensors:
            tensors[name] = tensors[name].view(torch.int8)

    rewrite(prepared_dir, as_signed)
    refused(prepared_dir, InvalidCheckpoint, "dtype", "I8", "U8")


def test_scales_of_dtype_e8m0_are_read(pristine, prepared_dir):
    def as_e8m0(tensors):
        for name in list(tensors):
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    rewrite(prepared_dir, as_e8m0)
    prepared = mxfp4prep.load(prepared_dir)
    for name, layer in pristine[1].items():
        assert prepared[name].scale.dtype == torch.uint8
        assert torch.equal(prepared[name].dequantize().double(), layer.dense)


def test_a_tensor_in_two_shards(prepared_dir):
    extra = torch.zeros(2)

    def add(tensors):
        tensors["twice"] = extra

    rewrite(prepared_dir, add)
    refused(prepared_dir, InvalidCheckpoint, "twice", "too")


def flip_a_byte(root: Path, name: str) -> None:
    """In the middle of a tensor, leaving everything else as it is."""
    for shard in root.glob("*.safetensors"):
        raw = bytearray(shard.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        if name in header:
            begin, end = header[name]["data_offsets"]
            raw[8 + length + (begin + end) // 2] ^= 1
            shard.write_bytes(raw)
            return
    raise LookupError(name)


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "bias"])
@pytest.mark.parametrize("tp", [1, 2])
def test_digests_find_a_flipped_bit(prepared_dir, suffix, tp):
    assert mxfp4prep.load(prepared_dir, verify=True, tp_rank=0, tp_size=tp)[Q] is not None
    flip_a_byte(prepared_dir, f"{Q}.{suffix}")
    assert mxfp4prep.load(prepared_dir, tp_rank=0, tp_size=tp)[Q] is not None, "not asked for"
    prepared = mxfp4prep.load(prepared_dir, verify=True, tp_rank=0, tp_size=tp)
    with pytest.raises(InvalidCheckpoint, match="xxh3_128") as caught:
        prepared[Q]
    assert f"{Q}.{suffix}" in caught.value.where
    assert ".safetensors" in caught.value.where


def test_digests_cover_copied_tensors(prepared_dir):
    flip_a_byte(prepared_dir, "model.norm.weight")
    with pytest.raises(InvalidCheckpoint, match="xxh3_128"):
        mxfp4prep.load(prepared_dir, verify=True).tensor("model.norm.weight")


def test_verified_pieces_are_the_same_pieces(pristine):
    root, layers, _ = pristine
    for rank in (0, 1):
        checked = mxfp4prep.load(root, verify=True, tp_rank=rank, tp_size=2)
        assert torch.equal(
            checked[Q].dequantize().double(), layers[Q].dense[rank * 32 : rank * 32 + 32]
        )
        assert checked.bytes_read == 64 * 128 + 64 * 8 + 128, "whole tensors"


def test_digests_that_are_not_the_manifests(prepared_dir):
    side = prepared_dir / "mxfp4prep.digests.json"
    side.write_bytes(side.read_bytes() + b" ")
    assert mxfp4prep.load(prepared_dir) is not None
    with pytest.raises(InvalidManifest, match="sha256"):
        mxfp4prep.load(prepared_dir, verify=True)
    side.unlink()
    with pytest.raises(InvalidCheckpoint, match="digests"):
        mxfp4prep.load(prepared_dir, verify=True)


@pytest.mark.parametrize(
    "content",
    [
        {"algorithm": "md5", "tensors": {}},
        {"algorithm": "xxh3_128", "tensors": []},
        {"algorithm": "xxh3_128", "tensors": {"a": "b"}},
        {"algorithm": "xxh3_128", "tensors": {"a": ["b"]}},
        {"algorithm": "xxh3_128", "tensors": {"a": None}},
    ],
)
def test_digests_in_another_form(prepared_dir, content):
    import hashlib

    raw = json.dumps(content).encode()
    (prepared_dir / "mxfp4prep.digests.json").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    edit_manifest(prepared_dir, lambda d: d["digests"].update(sha256=digest))
    with pytest.raises(InvalidManifest, match="digest"):
        mxfp4prep.load(prepared_dir, verify=True)


def test_a_tensor_without_a_digest(prepared_dir):
    import hashlib

    raw = json.dumps({"algorithm": "xxh3_128", "tensors": {}}).encode()
    (prepared_dir / "mxfp4prep.digests.json").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    edit_manifest(prepared_dir, lambda d: d["digests"].update(sha256=digest))
    with pytest.raises(InvalidCheckpoint, match="expected a digest"):
        mxfp4prep.load(prepared_dir, verify=True)[Q]


def test_a_shard_that_shrinks_raises_and_does_not_kill(prepared_dir):
    prepared = mxfp4prep.load(prepared_dir)
    for shard in prepared_dir.glob("*.safetensors"):
        os.truncate(shard, 16)
    with pytest.raises(IOFailed, match="was changed or replaced after"):
        prepared[Q]


def test_static_fp8_without_its_scale(prepared_dir):
    edit_manifest(prepared_dir, lambda d: layer_of(d, DOWN).update(input_scale=None))
    with pytest.raises(InvalidCheckpoint, match="input_scale"):
        mxfp4prep.load(prepared_dir)[DOWN]


def test_a_scale_of_a_kept_flat_bank_is_read(tmp_path):
    """A 3-D weight whose scale Quark flattened to two dimensions, left as it was."""
    layer = Layer("model.experts.w", 8, 64, "kept", experts=2, parallel="replicated")
    build(tmp_path, [layer])
    name = "model.experts.w.weight_scale"

    def flatten(tensors):
        tensors[name] = tensors[name].reshape(16, 2)

    rewrite(tmp_path, flatten)
    change = {"shape": [16, 2], "source_shape": [16, 2]}
    edit_manifest(tmp_path, lambda d: d["layers"][0]["scale"].update(change))
    assert mxfp4prep.load(tmp_path).names == ()


def test_weights_that_are_no_matrices(tmp_path):
    """A convolution that Quark quantized: n is the product of the leading dimensions."""
    layer = Layer("conv1d", 12, 64, "triton", reasons=["not_2d"])
    build(tmp_path, [layer])

    def unflatten(tensors):
        tensors["conv1d.weight"] = tensors["conv1d.weight"].reshape(4, 3, 32)

    rewrite(tmp_path, unflatten)
    change = {"shape": [4, 3, 32], "source_shape": [4, 3, 32]}
    edit_manifest(tmp_path, lambda d: d["layers"][0]["weight"].update(change))
    found = mxfp4prep.load(tmp_path)["conv1d"]
    assert torch.equal(found.dequantize().double(), layer.dense)


IMPORTS = """
import sys
import mxfp4prep
assert "torch" not in sys.modules, "torch"
mxfp4prep.Mxfp4PrepError, mxfp4prep.__version__, dir(mxfp4prep)
assert "torch" not in sys.modules, "torch after errors and version"
mxfp4prep.backends
assert "torch" not in sys.modules, "torch after naming backends"
mxfp4prep.load(sys.argv[1])
late = [name for name in sys.modules if name in ("typer", "rich", "aiter")
        or name.startswith("mxfp4prep.") and name.split(".")[1] in
        ("cli", "convert", "plan", "quark", "survey", "checkpoint", "report", "restore", "verify")]
assert not late, late
"""


def test_imports_are_late_and_few(pristine):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS, str(pristine[0])],
        cwd=ROOT,
        env=with_path(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_public_names():
    assert set(mxfp4prep.__all__) <= set(dir(mxfp4prep))
    for name in mxfp4prep.__all__:
        assert getattr(mxfp4prep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(mxfp4prep, "nothing")  # noqa: B009 - what is tested
    assert mxfp4prep.__version__.split(".")[0].split("+")[0].isdigit()


def test_the_factory_writes_the_documented_byte_order():
    """One byte each of design formulas, so that factory and layouts cannot be wrong together."""
    raw = torch.arange(32 * 64, dtype=torch.int32).remainder(251).to(torch.uint8).view(32, 64)
    n, p = 21, 39
    offset = ((n // 16) * 2 + p // 32) * 512 + ((p % 32) // 16) * 256 + (n % 16) * 16 + p % 16
    assert lay_out(raw, "tile16x16").flatten()[offset] == raw[n, p]
    r, c = 19, 13
    offset = (c // 8) * 256 + (c % 4) * 64 + (r % 16) * 4 + ((c % 8) // 4) * 2 + (r % 32) // 16
    assert lay_out(raw[:, :16].contiguous(), "tile32x8").flatten()[offset] == raw[r, c]
