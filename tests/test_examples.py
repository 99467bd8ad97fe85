"""The examples run as they stand and print what they promise."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, with_path
from prepared_factory import Layer, build
from test_convert import converted, files_of

import mxfp4prep

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
WITH_ENGINES = ("04_vllm.py", "05_transformers.py")
"""tests/serve runs them."""

NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))

NO_NUMPY = 'raise ModuleNotFoundError("No module named \'numpy\'", name="numpy")\n'


def run(name, *arguments, cwd):
    """What an example prints where there is no numpy, which is not a requirement."""
    (cwd.parent / "numpy").mkdir(exist_ok=True)
    (cwd.parent / "numpy/__init__.py").write_text(NO_NUMPY)
    torchs_word = "ignore:Failed to initialize NumPy"
    done = subprocess.run(
        [sys.executable, "-W", torchs_word, str(EXAMPLES / name), *map(str, arguments)],
        env=with_path(cwd.parent, ROOT),
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


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_opened_is_one_line_and_a_hint(name, empty, tmp_path, monkeypatch, capfd):
    if name == "05_transformers.py":  # 04 looks at the directory before it imports vLLM
        pytest.importorskip("transformers")
    where = tmp_path / "nowhere"
    monkeypatch.chdir(empty)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), str(where)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capfd.readouterr()
    assert (left.value.code, said.out) == (3, "")
    lines = said.err.splitlines()
    assert lines[0].startswith(f"error: {where}: no such directory")
    assert [line.partition(" ")[0] for line in lines[1:]] in ([], ["hint:"])


def test_load_and_run_without_the_layer_that_it_runs(empty, tmp_path):
    build(tmp_path / "out", [Layer("model.layers.0.mlp.fc1", 64, 256)])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "03_load_and_run.py"), str(tmp_path / "out")],
        env=with_path(ROOT),
        cwd=empty,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'out'}: no down_proj, which this example runs\n"


def test_no_example_is_left_out():
    tested = re.findall(r'run\(\s*"(0[^"]+)"', Path(__file__).read_text())
    assert {*tested, *WITH_ENGINES} == set(NAMES)
    serving = "".join(path.read_text() for path in (ROOT / "tests/serve").glob("test_*.py"))
    assert [name for name in WITH_ENGINES if name not in serving] == []


def test_audit(empty, tried):
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
    tried("E1")


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


def test_convert_and_verify(empty, tried):
    source = FIXTURES / "llama-w4a4-aligned"
    before = files_of(source)
    lines = run("02_convert_and_verify.py", cwd=empty).splitlines()
    assert lines[0] == "model.layers.0.mlp.down_proj: asm []"
    assert re.fullmatch(r"wrote \d+ files, \d+ tensor bytes", lines[3])
    assert lines[4] == "verify: 35 tensors, 0 problems"
    assert lines[5] == f"restored {len(before)} files; different or missing: []"
    assert files_of(source) == before
    tried("E1")


def test_load_and_run(empty, tried):
    text = run("03_load_and_run.py", cwd=empty)
    assert text.startswith("14 layers; backends:\n")
    assert re.search(r"^  torch: available$", text, re.MULTILINE)
    assert "PreparedLinear(n=256, k=512, path=asm, scheme=w4a4, bias=False, backend=torch)" in text
    difference = re.search(r"^two ranks of 256 x 256: (\S+)$", text, re.MULTILINE)
    assert difference is not None
    assert float(difference[1]) < 1e-3
    assert text.endswith("output: (4, 256) torch.bfloat16\n")
    tried("E1")


def test_load_and_run_a_prepared_directory(empty, tmp_path):
    out = converted(FIXTURES / "qwen2-w4a4-misaligned-tied", tmp_path / "out").out
    text = run("03_load_and_run.py", out, cwd=empty)
    assert "PreparedLinear(n=192, k=640, path=triton, scheme=w4a4" in text
    assert "two ranks of 192 x 320:" in text


BLOCKS = [
    "gate and up, column-parallel",
    "down, row-parallel",
    "gate and up, then down",
    "qkv, attention, then o",
    "experts",
]
"""What the tensor-parallel example adds up, in its order."""


def torchrun(ranks, *program, cwd):
    """The example's ranks as processes on the CPU; what they said, whatever their exit codes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(ranks), *map(str, program)],
        env=with_path(ROOT) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def bytes_read(text):
    """Per rank, and of the whole, as the example printed them."""
    found = re.findall(r"^rank \d+ read ([\d,]+) of ([\d,]+) bytes", text, re.MULTILINE)
    ranks = [int(each.replace(",", "")) for each, _ in found]
    return ranks, int(found[0][1].replace(",", ""))


def test_tensor_parallel_alone(empty, tried):
    lines = run("06_tensor_parallel.py", cwd=empty).splitlines()
    assert [line.partition(": error")[0] for line in lines[:5]] == BLOCKS
    assert lines[-1] == "5 blocks on 1 rank, gloo: sums equal the whole"
    tried("E1")


def test_tensor_parallel_under_torchrun(empty):
    done = torchrun(2, EXAMPLES / "06_tensor_parallel.py", cwd=empty)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, block in zip(lines, BLOCKS, strict=False):
        assert re.fullmatch(rf"{block}: error \S+, at most \S+: equal", line)
    assert lines[-1] == "5 blocks on 2 ranks, gloo: sums equal the whole"
    ranks, whole = bytes_read(done.stdout)
    kv = 2 * 64 * (512 // 2 + 512 // 32)  # rows of the one K and V head that both ranks hold
    assert sum(ranks) == whole + kv
    assert ranks[0] == ranks[1]
    assert list(empty.iterdir()) == []


def test_tensor_parallel_of_a_prepared_directory(empty, tmp_path):
    out = converted(FIXTURES / "llama-w4a4-aligned", tmp_path / "out").out
    text = run("06_tensor_parallel.py", out, cwd=empty)
    assert text.endswith("4 blocks on 1 rank, gloo: sums equal the whole\n")


def test_tensor_parallel_says_what_cannot_be_cut(empty, tmp_path):
    out = converted(FIXTURES / "qwen2moe-w4a4-shared-expert", tmp_path / "out").out
    done = torchrun(2, EXAMPLES / "06_tensor_parallel.py", out, cwd=empty)
    assert done.returncode != 0
    assert "exitcode  : 2" in done.stderr
    assert done.stdout.startswith("cannot be cut for 2 ranks: model.layers.0.mlp.experts.0.down")
    assert "1.5 groups; it can be cut at tp 1" in done.stdout


WRONG = """
import runpy, sys
import mxfp4prep
right = mxfp4prep.load
mxfp4prep.load = lambda *args, tp_rank=0, **rest: right(*args, tp_rank=0, **rest)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_tensor_parallel_fails_where_a_rank_holds_another_ranks_piece(empty, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    example = EXAMPLES / "06_tensor_parallel.py"
    done = torchrun(2, tmp_path / "wrong.py", example, cwd=empty)
    assert done.returncode != 0
    assert "exitcode  : 1" in done.stderr
    assert done.stdout.count("MISMATCH") == len(BLOCKS)
    assert done.stdout.endswith("5 blocks on 2 ranks, gloo: sums DIFFER from the whole\n")


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory):
    """The example as a module, and the checkpoint that it makes for two ranks."""
    path = EXAMPLES / "06_tensor_parallel.py"
    spec = importlib.util.spec_from_file_location("tensor_parallel_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module, module.prepare(tmp_path_factory.mktemp("tensor-parallel"), 4)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("wrong", [False, True])
def test_every_block_of_the_sum_can_fail(tensor_parallel, tp, wrong):
    """Rank 1 holding its own piece, or that of rank 0."""
    module, root = tensor_parallel
    whole = mxfp4prep.load(root)
    total = {}
    for rank in range(tp):
        held = 0 if wrong and rank == 1 else rank
        prepared = mxfp4prep.load(root, tp_rank=held, tp_size=tp)
        for what, _, output in module.partials(prepared, rank):
            total[what] = total.get(what, 0) + output
    assert list(total) == BLOCKS
    for what, bound, expected in module.partials(whole, 0):
        error = module.error(total[what], expected)
        assert error > 0.3 if wrong else error <= bound, what
