"""The demo: a checkpoint that is real, and a walk that stops where something goes wrong."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from test_cli import tree

from mxfp4prep import cli, demo
from mxfp4prep.errors import IntegrityError, UnsafeOutput


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo") / "model"
    demo.build(root)
    return root


def test_the_same_bytes_every_time(model: Path, tmp_path: Path) -> None:
    demo.build(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(model)


def test_it_is_what_quark_writes(model: Path) -> None:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    config = json.loads((model / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "quark"
    shapes = {}
    total = 0
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(model / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for tensor in file.keys():  # noqa: SIM118 - not a dict
                assert index["weight_map"][tensor] == name
                value = file.get_tensor(tensor)
                shapes[tensor] = (value.dtype, tuple(value.shape))
                total += value.numel() * value.element_size()
    assert total == index["metadata"]["total_size"]
    assert shapes.keys() == index["weight_map"].keys()
    down, k = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"
    assert shapes[f"{down}.weight"] == (torch.uint8, (256, 320))
    assert shapes[f"{down}.weight_scale"] == (torch.uint8, (256, 20))
    assert shapes[f"{k}.weight_scale"] == (torch.uint8, (96, 8))
    assert shapes[f"{k}.bias"] == (torch.bfloat16, (96,))
    files = [
        index["weight_map"][f"model.layers.1.mlp.up_proj.{t}"] for t in ("weight", "weight_scale")
    ]
    assert files[0] != files[1]


def test_weights_decode_to_sensible_numbers(model: Path) -> None:
    with safe_open(model / "model-00001-of-00002.safetensors", "np") as file:
        packed = file.get_tensor("model.layers.0.mlp.down_proj.weight")
        scale = file.get_tensor("model.layers.0.mlp.down_proj.weight_scale")
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(256, 640)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    weights = values * np.exp2(scale.astype(np.float64) - 127).repeat(32, axis=1)
    assert abs(weights.std() * np.sqrt(640) - 1) < 0.05


def test_the_walk_runs_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "a [bold] place"
    assert cli.main(["demo", str(root)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    commands = [line.split()[2] for line in lines if line.startswith("$ mxfp4prep ")]
    assert commands == ["audit", "convert", "show", "verify", "restore", "selfcheck"]
    assert f"$ mxfp4prep audit '{root}/model'" in lines
    assert "# 8 files, all of them byte for byte the same" in lines
    assert "torch.bfloat16 (4, 256), all finite: True" in lines
    assert lines[-1].endswith("all within rounding of float64")
    for step in ("IMPOSSIBLE", "bad_tile", "is the source, byte for byte"):
        assert step in " ".join(out.split())
    assert tree(root / "restored") == tree(root / "model")
    assert cli.main(["demo", str(root)]) == 5


def test_without_a_place_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cli.main(["demo"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "code", "expected"),
    [
        ("audit", 130, 130),
        ("audit", 0, 1),
        ("convert", 6, 6),
        ("verify", 1, 1),
        ("restore", 130, 130),
    ],
)
def test_the_walk_stops_where_a_verb_fails(
    tmp_path: Path, verb: str, code: int, expected: int
) -> None:
    seen = []

    def run(words: list[str]) -> int:
        seen.append(words[0])
        return code if words[0] == verb else int(words[0] == "audit")

    assert demo.walk(tmp_path, run, lambda line: None) == expected
    assert seen[-1] == verb


def test_a_difference_is_not_passed_over(model: Path, tmp_path: Path) -> None:
    def run(words: list[str]) -> int:
        if words[0] == "restore":
            demo.build(Path(words[2]))
            (Path(words[2]) / "README.md").write_text("other\n")
        return int(words[0] == "audit")

    with pytest.raises(IntegrityError, match=r"README\.md: differs"):
        demo.walk(tmp_path, run, lambda line: None)


def test_it_never_writes_over_anything(tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    with pytest.raises(UnsafeOutput):
        demo.walk(tmp_path, lambda words: 0, lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]
