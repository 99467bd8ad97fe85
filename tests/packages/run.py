"""Builds the wheel and the sdist and tries them in five clean environments.

    python tests/packages/run.py [-k ENVIRONMENT]

Each environment is a virtual environment of its own into which pip installs the wheel and what it asks for.
Torch alone, and what it needs, is not fetched again (gigabytes): it is linked from the environment that runs
this, or from the one of MXFP4PREP_TORCH_SITE (a site-packages folder), as are pytest and what the tests
themselves import. Nothing else of that environment can be seen from inside.

In each the command runs, the demo runs, and tests of the sdist run against what was installed: the sdist is
unpacked without the package. All of it with `python -W error`. About 3 minutes, and some 30 MB from the
package index.
"""
# ruff: noqa: E501 - prose

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

TESTED = (
    "test_exit_codes.py",
    "test_imports.py",
    "test_io.py",
    "test_staging.py",
    "test_workers.py",
)
"""Tests of the sdist that need no package beside TOOLS."""

WITH_NUMPY = ("test_convert.py", "test_resume.py", "test_verify.py")
"""Those that write with the safetensors library, which needs numpy for it."""

LEFT_OUT = "not p79 and not TestFailures and not real_checkpoint"
"""What takes long and depends on nothing that differs here."""

TOOLS = ("pytest", "pytest-timeout")
TORCHS_WORD = "ignore:Failed to initialize NumPy"
"""Of the absence of numpy, which nothing of ours needs; the command line leaves it out by itself."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A kind of installation.

    lowest   the oldest versions that the wheel's metadata allow
    extras   of the wheel
    more     other packages, by pip
    linked   other packages, from this environment
    """

    name: str
    lowest: bool = False
    extras: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()


ENVIRONMENTS = (
    Environment("lowest", lowest=True, more=("click==8.1.8",), linked=("numpy", "triton")),
    Environment("newest", extras=("hub",), linked=("numpy", "triton")),
    Environment("no-extras"),
    Environment("other-aiter", more=("aiter",), linked=("numpy", "triton")),
    Environment("no-triton", extras=("hub",), linked=("numpy",)),
)
"""Typer as old as allowed warns of newer versions of click itself; -W error makes that a failure."""


def build(target: Path) -> tuple[Path, Path]:
    """Builds both distributions into `target`: (wheel, sdist). The wheel is made of the sdist."""
    source = target / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:  # what a commit would hold, not what else lies about
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, source / name)
    else:
        source = ROOT
    tools = target / "tools"
    _run([sys.executable, "-m", "venv", tools])
    _run([tools / "bin/pip", "install", "-q", "build", "hatchling"])
    _run([tools / "bin/python", "-m", "build", "-q", "--no-isolation", "-o", target, source])
    [wheel], [sdist] = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


def unpack(sdist: Path, target: Path) -> Path:
    """The sdist's tests, with all that they read, and without the package."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    [root] = target.iterdir()
    shutil.rmtree(root / "mxfp4prep")
    return root


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel asks for without extras, torch left out."""
    [found] = metadata.distributions(name="mxfp4prep", path=[str(wheel)])
    asked = [Requirement(text) for text in found.requires or ()]
    return [r for r in asked if r.name != "torch" and (r.marker is None or r.marker.evaluate())]


def lowest(wheel: Path) -> list[str]:
    """`name==version` for the oldest version that is allowed of each requirement."""
    pins = []
    for requirement in requirements(wheel):
        [bound] = requirement.specifier
        assert bound.operator == ">=", requirement
        pins.append(f"{requirement.name}=={bound.version}")
    return pins


def make(environment: Environment, folder: Path, wheel: Path) -> Path:
    """A new virtual environment with the wheel in it; the path of its python."""
    _run([sys.executable, "-m", "venv", folder])
    python = folder / "bin/python"
    [site] = folder.glob("lib/python*/site-packages")
    linked = folder / "linked"
    linked.mkdir()
    torch_site = os.environ.get("MXFP4PREP_TORCH_SITE")
    link(linked, ("torch",), Path(torch_site) if torch_site else None)
    link(linked, (*TOOLS, *environment.linked), None)
    (site / "linked.pth").write_text(f"{linked}\n")
    extras = f"[{','.join(environment.extras)}]" if environment.extras else ""
    pins = lowest(wheel) if environment.lowest else []
    words = ["install", "-q", f"{wheel}{extras}", *pins, *environment.more]
    _run([python, "-m", "pip", "--disable-pip-version-check", *words])
    return python


def link(folder: Path, names: tuple[str, ...], site: Path | None) -> None:
    """Links those distributions, and all that they require, from `site` or this environment."""
    todo, done = list(names), set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        places = {} if site is None else {"path": [str(site)]}
        found = next(iter(metadata.distributions(name=name, **places)), None)
        if found is None:
            assert name not in names, f"{name} is not here"
            continue  # a requirement of another platform
        for file in {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "bin"}:
            path = Path(str(found.locate_file(file)))
            if path.exists() and not (folder / file).exists():
                (folder / file).symlink_to(path)
        for text in found.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(re.sub(r"[-_.]+", "-", requirement.name).lower())


def attempt(environment: Environment, python: Path, tests: Path, work: Path) -> None:
    """The command, the demo, and the sdist's tests, all of the installed package.

    Raises CalledProcessError with what was printed.
    """
    command = python.with_name("mxfp4prep")
    version = _run([python, "-W", "error", command, "--version"], work)
    assert version == f"mxfp4prep {_version(python, work)}\n", version
    where = _run([python, "-c", "import mxfp4prep; print(mxfp4prep.__file__)"], work)
    assert Path(where).is_relative_to(python.parents[1]), where
    shown = _run([python, "-W", "error", command, "demo", work / "demo"], work)
    assert shown.rstrip().endswith("all within rounding of float64"), shown
    tested = (*TESTED, *WITH_NUMPY) if "numpy" in environment.linked else TESTED
    names = [f"tests/{name}" for name in tested]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT, *names]
    _run([python, "-W", "error", *words, "-W", TORCHS_WORD], tests)


def _version(python: Path, work: Path) -> str:
    code = "from importlib.metadata import version; print(version('mxfp4prep'))"
    return _run([python, "-c", code], work).strip()


def _run(command: list[object], cwd: Path | None = None) -> str:
    """stdout of a command that must succeed, in an environment without this one's Python paths."""
    names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MXFP4PREP_COUNTS", "MXFP4PREP_AITER_SITE")
    env = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-6000:]
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(pytest.main([str(HERE), "-q", "-n", "0", "--durations=0", *sys.argv[1:]]))
