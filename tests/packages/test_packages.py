"""What an installation of the built package does, in environments without anything else.

Run by `python tests/packages/run.py`, which says how; not a part of the ordinary suite.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run as packages


class Built(NamedTuple):
    """The distributions, the sdist's tests, and a folder for environments."""

    wheel: Path
    sdist: Path
    tests: Path
    work: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    work: Path = tmp_path_factory.mktemp("packages")
    wheel, sdist = packages.build(work)
    return Built(wheel, sdist, packages.unpack(sdist, work / "sdist"), work)


def test_the_wheel_holds_the_package_alone(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"mxfp4prep", built.wheel.name.partition("-py3")[0] + ".dist-info"}
    root = next(path for path in (built.work / "tree", packages.ROOT) if path.exists())
    files = (path for path in (root / "mxfp4prep").rglob("*") if path.is_file())
    expected = {path.relative_to(root).as_posix() for path in files if path.suffix != ".pyc"}
    assert {name for name in names if name.startswith("mxfp4prep/")} == expected


def test_the_sdist_can_be_built_and_tested(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "Makefile"} <= names
    assert "tests/conftest.py" in names
    assert any(name.startswith("tests/data/fixtures/") for name in names)


@pytest.mark.parametrize("environment", packages.ENVIRONMENTS, ids=lambda e: e.name)
def test_the_package_works_where_it_was_installed(
    built: Built, environment: packages.Environment, tried: Callable[..., None]
) -> None:
    work = built.work / environment.name
    work.mkdir()
    python = packages.make(environment, work / "env", built.wheel)
    packages.attempt(environment, python, built.tests, work)
    CHECKS[environment.name](python, built, work)
    tried("P1")


def ask(python: Path, code: str) -> str:
    """What a program prints in an environment."""
    done = subprocess.run(
        [python, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


VERSIONS = "from importlib.metadata import version as v; print(*map(v, {!r}))"
HERE = "import importlib.util as u; print([n for n in {!r} if u.find_spec(n)])"


def the_oldest(python: Path, built: Built, work: Path) -> None:
    """Are what the metadata name, so that no newer one was tried by mistake."""
    pins = dict(pin.split("==") for pin in packages.lowest(built.wheel))
    found = ask(python, VERSIONS.format(list(pins))).split()
    for (name, pin), version in zip(pins.items(), found, strict=True):
        assert version == pin or version.startswith(f"{pin}.0"), name


def the_newest(python: Path, built: Built, work: Path) -> None:
    """The Hub is there."""
    assert ask(python, HERE.format(["huggingface_hub", "triton"])) == (
        "['huggingface_hub', 'triton']\n"
    )


def without_extras(python: Path, built: Built, work: Path) -> None:
    """No package but those asked for, and who wants the Hub is told what to install."""
    absent = ["huggingface_hub", "numpy", "transformers", "hypothesis", "jsonschema", "aiter"]
    assert ask(python, HERE.format(absent)) == "[]\n"
    done = subprocess.run(
        [python, "-m", "mxfp4prep", "audit", "org/name"],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 4
    assert "pip install 'mxfp4prep[hub]'" in done.stderr


def the_other_aiter(python: Path, built: Built, work: Path) -> None:
    """It is not taken for ROCm's, and its name is said."""
    assert ask(python, HERE.format(["aiter"])) == "['aiter']\n"
    code = "from mxfp4prep.runtime.backends.availability import aiter_package_obstacle as why"
    told = ask(python, f"{code}; print(why())")
    assert told.startswith("the installed package aiter is another one")
    assert "pip install amd-aiter" in told


def without_triton(python: Path, built: Built, work: Path) -> None:
    """Another backend does the work, and the absence is a reason, not an error."""
    assert ask(python, HERE.format(["triton"])) == "[]\n"
    words = ["selfcheck", str(work / "demo/prepared"), "--backend", "triton", "--m", "1"]
    done = subprocess.run(
        [python, "-W", "error", "-m", "mxfp4prep", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert "triton" in done.stderr
    document = json.loads(
        subprocess.run(
            [python, "-m", "mxfp4prep", *words[:2], "--m", "1", "--format", "json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
    )
    assert document["ok"] is True


CHECKS: dict[str, Callable[[Path, Built, Path], None]] = {
    "lowest": the_oldest,
    "newest": the_newest,
    "no-extras": without_extras,
    "other-aiter": the_other_aiter,
    "no-triton": without_triton,
}
