"""One mutant against the tests: a forked child of a process that has everything slow imported.

The child works in a folder of its own, a copy of the package and the tests, where the mutated
source stands in place of the module. The tree itself is never written to.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = (
    "hypothesis.strategies",
    "ml_dtypes",
    "numpy",
    "pydantic",
    "safetensors.numpy",
    "safetensors.torch",
    "torch",
    "xxhash",
)
"""What tests and package import; the package itself is imported by each child."""

CPU_SECONDS = 10
"""Most CPU time of one test, its fixtures included: more is an endless loop, and the mutant dead.
A slow test gets ten times that."""

WALL_SECONDS = 300
"""Most time of a whole trial, for mutants that wait for ever."""

MEMORY = 32 << 30
"""Most address space: a wrong size must not take the machine."""


def warm_up() -> None:
    """Imports what children need; no threads may be running when they are forked."""
    for name in LIBRARIES:
        importlib.import_module(name)
    import hypothesis

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # no shrinking: dead is dead
    hypothesis.settings.register_profile("mutation", phases=phases, database=None)
    gc.freeze()  # pytest collects garbage at its end, which would walk all of torch in each child


def make_room(tree: Path, folder: Path) -> Path:
    """A copy of package and tests to work in."""
    shutil.copytree(tree / "mxfp4prep", folder / "mxfp4prep")
    (folder / "tests").mkdir()
    for path in (tree / "tests").glob("*.py"):
        shutil.copy2(path, folder / "tests")
    (folder / "tests" / "data").symlink_to((tree / "tests" / "data").resolve())
    shutil.copy2(tree / "pyproject.toml", folder)
    return folder


@dataclass
class Result:
    """What became of one trial.

    killer    the test that failed first, or what else ended it; None: all passed
    passed    tests that passed, and how long each took
    cpu       seconds
    """

    killer: str | None = None
    passed: dict[str, float] = field(default_factory=dict)
    foreign: str | None = None
    cpu: float = 0.0


@dataclass(frozen=True)
class Trial:
    """What a child is told."""

    number: int
    file: str
    source: str
    tests: Sequence[str]
    first: Sequence[str] = ()
    quick: bool = False


class _Plugin:
    """Orders the tests, limits each one's time, keeps what happened."""

    def __init__(self, trial: Trial, slow: Iterable[str]) -> None:
        self.trial, self.slow = trial, set(slow)
        self.rank = {name: i for i, name in enumerate(trial.first)}
        self.result = Result()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.trial.quick:
            items[:] = [item for item in items if not self._is_slow(item)]
        items.sort(key=lambda item: (self._is_slow(item), self.rank.get(item.nodeid, 1 << 30)))

    def _is_slow(self, item: pytest.Item) -> bool:
        test = getattr(item, "obj", None)
        name = getattr(item, "originalname", item.name)
        return getattr(test, "is_hypothesis_test", False) or name in self.slow

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        limit_cpu(CPU_SECONDS * 10 if self._is_slow(item) else CPU_SECONDS)
        return (yield)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.result.killer = self.result.killer or "collecting"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.result.killer = self.result.killer or report.nodeid
        elif report.when == "call" and report.passed:
            self.result.passed[report.nodeid] = report.duration


def limit_cpu(seconds: float) -> None:
    """From now on this process may compute so long; then SIGPROF ends it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def run_all(
    trials: Iterable[Trial], rooms: Sequence[Path], slow: Iterable[str]
) -> Iterator[tuple[Trial, Result]]:
    """Results as they come, one child a room at a time."""
    free, waiting = list(rooms), iter(trials)
    running: dict[int, tuple[Trial, Path, int, float, bytearray]] = {}
    with selectors.DefaultSelector() as ready:
        while True:
            while free and (trial := next(waiting, None)) is not None:
                room = free.pop()
                pid, pipe = _start(trial, room, slow)
                ready.register(pipe, selectors.EVENT_READ)
                running[pipe] = (trial, room, pid, time.monotonic() + WALL_SECONDS, bytearray())
            if not running:
                return
            for key, _ in ready.select(timeout=5):
                trial, room, pid, _, received = running[key.fd]
                if chunk := os.read(key.fd, 1 << 16):
                    received += chunk
                    continue
                ready.unregister(key.fd)
                del running[key.fd]
                os.close(key.fd)
                free.append(room)
                yield trial, _end(pid, bytes(received))
            for _, _, pid, deadline, _ in running.values():
                if time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)


def _start(trial: Trial, room: Path, slow: Iterable[str]) -> tuple[int, int]:
    module = room / "mxfp4prep" / f"{trial.file}.py"
    for stale in (room / "mxfp4prep" / "__pycache__").glob(f"{trial.file}.*"):
        stale.unlink()
    module.write_text(trial.source)
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    # From here on nothing returns: this is the child.
    try:
        os.setpgid(0, 0)
        result = _child(trial, room, slow)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(vars(result)).encode())
    finally:
        os._exit(0)


def _child(trial: Trial, room: Path, slow: Iterable[str]) -> Result:
    os.chdir(room)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    sys.dont_write_bytecode = bool(trial.first)  # the control run, the first, warms the cache
    os.environ |= {"PYTHONPATH": str(room), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path[:0] = [str(room)]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_cpu(CPU_SECONDS)
    import hypothesis

    hypothesis.settings.load_profile("mutation")
    plugin = _Plugin(trial, slow)
    tests = [f"tests/{name}" for name in trial.tests]
    options = ["-x", "-q", "--rootdir=.", "--tb=short", "--assert=plain"]
    options += ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
    code: Any = 3
    try:
        code = pytest.main([*options, *tests], plugins=[plugin])
    except BaseException:  # SystemExit of a mutant at import is a death too
        traceback.print_exc()
    limit_cpu(CPU_SECONDS)
    result = plugin.result
    if code and result.killer is None and code != pytest.ExitCode.NO_TESTS_COLLECTED:
        result.killer = f"pytest ended with {int(code)}"
    module = sys.modules.get(f"mxfp4prep.{trial.file}")
    if module is not None and not str(module.__file__).startswith(str(room)):
        result.foreign = str(module.__file__)
    return result


def _end(pid: int, received: bytes) -> Result:
    _, status, usage = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError):  # what its tests may have left running
        os.killpg(pid, signal.SIGKILL)
    try:
        result = Result(**json.loads(received))
    except ValueError:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        result = Result(
            "time" if number in (signal.SIGPROF, signal.SIGKILL) else f"signal {number}"
        )
    result.cpu = usage.ru_utime + usage.ru_stime
    return result
