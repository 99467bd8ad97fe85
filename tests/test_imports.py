"""Importing does nothing but define names: of the package, and of every module in it.

One process imports the package alone, another one every module, after what it is made of: torch and
Typer have side effects of their own, which are not ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import PACKAGE, environment

STATE = '''
import atexit, gc, logging, os, resource, signal, sys, threading, warnings

def state():
    """What an import could change, in words."""
    torch = sys.modules.get("torch")
    umask = os.umask(0)
    os.umask(umask)
    return {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": umask,
        "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)],
        "warnings": [str(warnings.filters), str(warnings.showwarning)],
        "logging": [logging.root.level, str(logging.root.handlers), logging.root.manager.disable],
        "loggers": sorted(n for n in logging.root.manager.loggerDict if n.startswith("mxfp4prep")),
        "logger class": str(logging.getLoggerClass()),
        "hooks": [str(h) for h in (sys.excepthook, sys.displayhook, sys.unraisablehook,
            threading.excepthook, sys.gettrace(), sys.getprofile(), sys.stdout, sys.stderr)],
        "paths": [sys.path[:], str(sys.meta_path), str(sys.path_hooks), sys.dont_write_bytecode],
        "limits of python": [sys.getrecursionlimit(), sys.get_int_max_str_digits(),
            sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()],
        "at exit": atexit._ncallbacks(),
        "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in range(200)
            if os.path.lexists(f"/proc/self/fd/{n}")),
        "threads": len(os.listdir("/proc/self/task")),
        "torch": torch and [torch.get_num_threads(), str(torch.get_default_dtype()),
            str(torch.get_default_device()), torch.is_grad_enabled(), torch.initial_seed(),
            torch.get_rng_state().sum().item(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.cuda.is_initialized()],
    }
'''
ALONE = """
import json
before = state()
known = set(sys.modules)
import mxfp4prep
after = state()
new = sorted({name.partition(".")[0] for name in set(sys.modules) - known})
print(json.dumps([before, after, new]))
"""
EVERYTHING = """
import importlib, json, pathlib
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, where there is none
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
before = state()
names = json.loads(sys.argv[2])
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # who wants its backend is told before
            raise
print(json.dumps([before, state(), len(names)]))
"""


def told(program: str, folder: Path, *words: object) -> list[Any]:
    """What a process says on its last line; it has nothing but `folder`, and leaves it empty."""
    places = {name: str(folder) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STATE + program, *map(json.dumps, words)],
        cwd=folder,
        env=environment(**places),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert len(done.stdout.splitlines()) == 1, "an import printed something"
    assert list(folder.iterdir()) == [], "an import wrote a file"
    answer: list[Any] = json.loads(done.stdout)
    return answer


STANDARD = set(sys.stdlib_module_names)


def test_importing_the_package_does_nothing(tmp_path: Path, tried: Callable[..., None]) -> None:
    before, after, new = told(ALONE, tmp_path)
    assert after == before
    assert set(new) - STANDARD == {"mxfp4prep"}
    assert not set(new) & {"asyncio", "subprocess", "socket", "ssl", "multiprocessing"}
    tried("P2")


def modules() -> list[str]:
    """Every module, but those that belong to an engine or to a kernel: their hosts import them."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if not name.startswith(("mxfp4prep.integrations.", "mxfp4prep.runtime.kernels.")):
            found.append(name.removesuffix(".__init__"))
    return sorted(found)


def test_importing_every_module_does_nothing(tmp_path: Path, tried: Callable[..., None]) -> None:
    first = ["torch", "typer", "rich.progress", "pydantic", "xxhash", "safetensors"]
    if importlib.util.find_spec("triton") is not None:
        first.append("triton")
    before, after, count = told(EVERYTHING, tmp_path, first, modules())
    assert after == before
    assert count > 150
    tried("P2")


@pytest.mark.parametrize("effect", ["os.environ['X'] = '1'", "import os; os.open('/', 0)"])
def test_an_effect_would_be_seen(tmp_path: Path, effect: str) -> None:
    program = ALONE.replace("import mxfp4prep\n", f"import mxfp4prep\n{effect}\n")
    before, after, _ = told(program, tmp_path)
    assert after != before
    assert os.environ.get("X") is None
