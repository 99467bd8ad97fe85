"""The examples run as they stand and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FIXTURES, with_path
from test_convert import converted, files_of

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(name, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        env=with_path(ROOT),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(cwd.iterdir()) == [], "it leaves nothing where it ran"
    return done.stdout


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "cwd"
    folder.mkdir()
    return folder


def test_no_example_is_left_out():
    tested = re.findall(r'run\(\s*"(0[^"]+)"', Path(__file__).read_text())
    assert set(tested) == {path.name for path in EXAMPLES.glob("*.py")}


def test_audit(empty):
    lines = run("01_audit.py", cwd=empty).splitlines()
    starts = [line.partition(";")[0] for line in lines[:8:2]]
    assert starts == [
        "tp 1: 62 triton",
        "tp 2: 16 impossible, 46 triton",  # the routed experts' down_proj: 96 columns
        "tp 4: 16 impossible, 46 triton",
        "tp 8: 26 impossible, 36 triton",
    ]
    assert lines[3] == "    vllm-0.33: {'corrupt': 16, 'ok': 46}"
    assert lines[-1].startswith("vllm-0.33 with the original checkpoint: ")
    at = "model.layers.0.mlp.experts.0"
    assert f"{at}.down_proj: scale (128, 3): triton (scale_cols)" in lines
    assert f"{at}.gate_proj: scale (96, 4): triton (scale_cols, bad_tile)" in lines
    assert any(line.startswith("note: model.layers.0.mlp.gate: ") for line in lines)


def test_audit_of_a_named_model(empty):
    text = run("01_audit.py", FIXTURES / "llama-w4a4-aligned", cwd=empty)
    starts = [line.partition(";")[0] for line in text.splitlines()[:6:2]]
    assert starts == ["tp 1: 14 asm", "tp 2: 12 asm, 2 triton", "tp 4: 10 asm, 4 triton"]
    assert "scale (256, 16): asm (nothing stands in the way)" in text


def test_audit_does_without_torch(empty):
    program = (
        "import runpy, sys\n"
        "path, sys.argv = sys.argv[1], sys.argv[1:]\n"
        "runpy.run_path(path, run_name='__main__')\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(EXAMPLES / "01_audit.py")],
        env=with_path(ROOT),
        cwd=empty,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_convert_and_verify(empty):
    source = FIXTURES / "llama-w4a4-aligned"
    before = files_of(source)
    lines = run("02_convert_and_verify.py", cwd=empty).splitlines()
    assert lines[0] == "model.layers.0.mlp.down_proj: asm []"
    assert re.fullmatch(r"wrote \d+ files, \d+ tensor bytes", lines[3])
    assert lines[4] == "verify: 35 tensors, 0 problems"
    assert lines[5] == f"restored {len(before)} files; different or missing: []"
    assert files_of(source) == before


def test_load_and_run(empty):
    text = run("03_load_and_run.py", cwd=empty)
    assert text.startswith("14 layers; backends:\n")
    assert re.search(r"^  torch: available$", text, re.MULTILINE)
    assert "PreparedLinear(n=256, k=512, path=asm, scheme=w4a4, bias=False, backend=torch)" in text
    difference = re.search(r"^two ranks of 256 x 256: (\S+)$", text, re.MULTILINE)
    assert difference is not None
    assert float(difference[1]) < 1e-3
    assert text.endswith("output: (4, 256) torch.bfloat16\n")


def test_load_and_run_a_prepared_directory(empty, tmp_path):
    out = converted(FIXTURES / "qwen2-w4a4-misaligned-tied", tmp_path / "out").out
    text = run("03_load_and_run.py", out, cwd=empty)
    assert "PreparedLinear(n=192, k=640, path=triton, scheme=w4a4" in text
    assert "two ranks of 192 x 320:" in text
