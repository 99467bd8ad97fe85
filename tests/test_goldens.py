"""Committed digests of prepared checkpoints, and one of each format version: still the same."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DATA, FIXTURES
from test_convert import converted

import mxfp4prep
from mxfp4prep.errors import InvalidManifest
from mxfp4prep.marks import FORMAT_VERSION
from mxfp4prep.prepared import open_prepared
from mxfp4prep.restore import restore
from mxfp4prep.verify import verify

GOLDENS = DATA / "goldens"
DIGESTS = GOLDENS / "digests.json"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "aligned, tp 1": ("llama-w4a4-aligned", {}),
    "file2file, tp 1, 2": ("llama-w4a4-file2file", {"tp": (1, 2)}),
    "misaligned and tied, tp 1": ("qwen2-w4a4-misaligned-tied", {}),
    "weight only, all triton": ("qwen3-w4a16-misaligned", {"layout": "triton"}),
    "experts and a shared one, tp 1": ("qwen2moe-w4a4-shared-expert", {}),
    "mixed with FP8, tp 1, 2, 4": ("llama-mixed-fp8attn-kvfp8", {"tp": (1, 2, 4)}),
    "Quark 0.9, layers kept": ("version-0.9", {"keep": ["*.mlp.*"]}),
    "Quark 0.11, other scale names": ("version-0.11.2", {}),
}


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def neutral(raw: bytes) -> bytes:
    """A manifest without what a later version may word otherwise."""
    document = json.loads(raw)
    del document["tool_version"]
    document["findings"] = [finding["code"] for finding in document["findings"]]
    return json.dumps(document, sort_keys=True).encode()


def digests_of(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name, raw = path.relative_to(root).as_posix(), path.read_bytes()
        if name != "SHA256SUMS":
            found[name] = sha256(neutral(raw) if name == "mxfp4prep.json" else raw)
    return found


def made(case: str, out: Path) -> dict[str, str]:
    folder, options = CASES[case]
    return digests_of(converted(FIXTURES / folder, out, workers=2, **options).out)


@pytest.mark.parametrize("case", CASES)
def test_conversions_give_the_committed_bytes(case, tmp_path, tried):
    assert made(case, tmp_path / "out") == json.loads(DIGESTS.read_text())[case]
    tried("D2")


def test_the_cases_are_unlike_one_another():
    goldens = json.loads(DIGESTS.read_text())
    assert list(goldens) == list(CASES)
    assert len({json.dumps(digests) for digests in goldens.values()}) == len(CASES)


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_every_format_version_loads_verifies_and_restores(version, tmp_path, tried):
    root = GOLDENS / f"format-{version}"
    assert verify(root).problems == ()
    prepared = mxfp4prep.load(root, verify=True)
    for name in prepared:
        layer = prepared[name]
        assert layer(torch.ones(2, layer.k, dtype=torch.bfloat16)).shape == (2, layer.n)
    back = restore(root, tmp_path / "back").out
    found = {
        p.relative_to(back).as_posix(): sha256(p.read_bytes())
        for p in back.rglob("*")
        if p.is_file()
    }
    assert found == json.loads((GOLDENS / "restored.json").read_text())[f"format-{version}"]
    tried("D2")


def edited(root: Path, name: str, change: Any) -> None:
    document = json.loads((root / name).read_text())
    change(document)
    (root / name).write_text(json.dumps(document))


def test_a_later_version_is_refused_by_everybody(tmp_path, tried):
    later = FORMAT_VERSION + 1
    config = ("config.json", lambda d: d["quantization_config"].update(format_version=later))
    manifest = ("mxfp4prep.json", lambda d: d.update(schema_version=later))
    for marks in ((config,), (manifest,), (config, manifest)):
        root = Path(shutil.copytree(GOLDENS / f"format-{FORMAT_VERSION}", tmp_path / "later"))
        for mark in marks:
            edited(root, *mark)
        for read in (open_prepared, verify, mxfp4prep.load, lambda r: restore(r, tmp_path / "b")):
            with pytest.raises(
                InvalidManifest, match=rf"found .*{later}.*expected .*{FORMAT_VERSION}"
            ):
                read(root)
        assert not (tmp_path / "b").exists()
        shutil.rmtree(root)
        tried("D2")


def write() -> None:
    """Writes the digests of what this version makes."""
    with tempfile.TemporaryDirectory() as base:
        document = {case: made(case, Path(base) / str(i)) for i, case in enumerate(CASES)}
    DIGESTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write())
