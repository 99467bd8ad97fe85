"""Imports go one way, importing does nothing, and the light commands stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FIXTURES, MXFP4_FIXTURES

import mxfp4prep

PACKAGE = Path(mxfp4prep.__file__).parent

# Rooms from the ground up: a room imports only from rooms above it in this list, and itself.
ROOMS = [
    "errors",
    "stopping",
    "marks",
    "findings",
    "collector",
    "exchange",
    "io",
    "directory",
    "documents",
    "sums",
    "lookalikes",
    "header_json",
    "safefile",
    "architectures",
    "parallel",
    "alignment",
    "deployment",
    "layer_defaults",
    "manifest",
    "prepared",
    "layouts",
    "mxfp4",
    "quark",
    "checkpoint",
    "hub",
    "values",
    "shared_experts",
    "survey",
    "decisions",
    "cost",
    "engines",
    "auditing",
    "targets",
    "plan",
    "records",
    "workers",
    "stream",
    "sink",
    "leftovers",
    "staging",
    "rewrite",
    "undo",
    "original",
    "runtime",
    "",  # the package itself, which offers the runtime
    "integrations",
    "rederive",
    "inventory",
    "convert",
    "consistency",
    "restore",
    "file_checks",
    "verify",
    "report",
    "comparison",
    "schemas",
    "demo",
    "options",
    "commands",
    "diff_command",
    "prepared_commands",
    "bench_command",
    "cli",
    "__main__",
]
RUNTIME_MAY_USE = {
    "errors", "marks", "io", "safefile", "parallel", "alignment", "manifest", "prepared",
    "layouts", "mxfp4",
}  # fmt: skip


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Rooms that a file imports from, at any depth of the code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "mxfp4prep":
            names = [
                f"mxfp4prep.{alias.name}" if alias.name in ROOMS else "mxfp4prep"
                for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        else:
            continue
        found |= {room_of(name) for name in names if name.split(".")[0] == "mxfp4prep"}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path, tried):
    relative = path.relative_to(PACKAGE).with_suffix("").parts
    room = "" if relative == ("__init__",) else relative[0]
    assert room in ROOMS, f"give {room} its place in ROOMS"
    above = set(ROOMS[: ROOMS.index(room) + 1])
    assert imported(path) <= above, f"{path.name} imports from a room below it"
    if room == "runtime":
        assert imported(path) <= RUNTIME_MAY_USE | {"runtime"}
    tried("P2")


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = {"torch", "numpy", "safetensors", "transformers", "huggingface_hub"}


def test_help_version_and_audit_leave_torch_alone(tried):
    calls = [["--help"], ["--version"]]
    calls += [["audit", str(FIXTURES / name), "--fail-on", "never"] for name in MXFP4_FIXTURES]
    code = (
        "import json, sys\n"
        "from mxfp4prep.__main__ import main\n"
        f"for arguments in {calls!r}:\n"
        "    sys.argv = ['mxfp4prep', *arguments]\n"
        "    code = main()\n"
        f"    heavy = sorted({HEAVY!r} & set(sys.modules))\n"
        "    print(json.dumps([code, heavy]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert [json.loads(line) for line in done.stderr.splitlines()] == [[0, []]] * len(calls)
    tried("R3", 2)


def test_the_runtime_leaves_the_command_line_and_the_converter_alone(tmp_path):
    code = (
        "import sys, mxfp4prep\n"
        "try:\n    mxfp4prep.load('nowhere')\nexcept mxfp4prep.Mxfp4PrepError:\n    pass\n"
        "print(sorted(m for m in sys.modules if m in "
        "('typer', 'rich', 'mxfp4prep.convert', 'mxfp4prep.cli', 'mxfp4prep.plan')))"
    )
    assert python(code) == "[]"
