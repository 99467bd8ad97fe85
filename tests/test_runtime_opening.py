"""What `verify` holds against its digest when a checkpoint is opened."""

from __future__ import annotations

import traceback

import pytest
import torch
from prepared_factory import Layer, build, edit_config

import mxfp4prep
from mxfp4prep.errors import InvalidCheckpoint, InvalidManifest

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def root(tmp_path):
    build(tmp_path, [Layer("fc1", 64, 256)], copied={"norm.weight": torch.ones(3)})
    assert mxfp4prep.load(tmp_path, verify=True)["fc1"] is not None
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu"}, {"swiglu_limit": 7.0}, {"num_experts_per_tok": 1}, {"unknown": 1}],
)
def test_a_config_that_was_edited(root, change):
    edit_config(root, lambda config: config.update(change))
    mxfp4prep.load(root)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json: not the one") as caught:
        mxfp4prep.load(root, verify=True)
    assert "mxfp4prep verify" in caught.value.hint
    assert caught.value.found.startswith("sha256 ")


def test_one_byte_of_a_config(root):
    """No word of it differs."""
    with (root / "config.json").open("a") as file:
        file.write(" ")
    mxfp4prep.load(root)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        mxfp4prep.load(root, verify=True)


def test_the_digests_themselves(root):
    path = root / "mxfp4prep.digests.json"
    path.write_bytes(path.read_bytes() + b" ")
    mxfp4prep.load(root)
    with pytest.raises(InvalidManifest, match=r"mxfp4prep\.digests\.json: sha256"):
        mxfp4prep.load(root, verify=True)


def test_a_traceback_tells_the_way_out_and_which_checkpoint(root):
    """Engines print no hint of ours, and have several checkpoints."""
    (root / SHARD).write_bytes(b"x" * 100)
    with pytest.raises(InvalidCheckpoint) as caught:
        mxfp4prep.load(root)
    said = "".join(traceback.format_exception(caught.value)).splitlines()
    assert said[-2:] == [f"hint: {caught.value.hint}", f"in the checkpoint {root}"]


def test_bytes_that_differ_are_of_that_checkpoint(root):
    path = root / SHARD
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    prepared = mxfp4prep.load(root, verify=True)
    with pytest.raises(InvalidCheckpoint, match="bytes differ") as caught:
        prepared.load_all()
    assert caught.value.__notes__.count(f"in the checkpoint {root}") == 1
