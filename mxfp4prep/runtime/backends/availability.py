"""Whether a GEMM backend could run on this machine, and if not, why not.

Nothing here initialises a GPU or imports a backend: importing ROCm's aiter compiles, logs and
raises on GPUs it does not know, and PyPI has an unrelated package of the same import name.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mxfp4prep.errors import BackendUnavailable
from mxfp4prep.runtime.backends.aiter_functions import (
    DISTRIBUTION,
    Functions,
    bound,
    read_functions,
)
from mxfp4prep.runtime.backends.aiter_limits import objection

if TYPE_CHECKING:
    from mxfp4prep.runtime.backends import Needs

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""One folder per CPU and GPU that the amdgpu driver drives (Linux, amdkfd)."""

AITER_GFX = "gfx950"
INSTALL_AITER = "install ROCm's with `pip install amd-aiter`"


def gfx_targets(nodes: Path = KFD_NODES) -> tuple[str, ...]:
    """The instruction set of every AMD GPU, in node order ("gfx950", ...); () where there is none.

    nodes   the KFD topology folder

    gfx_target_version is major * 10000 + minor * 100 + stepping: 90500 for gfx950, 0 for a CPU.
    """
    targets = []
    try:
        folders = sorted(nodes.iterdir(), key=lambda folder: (len(folder.name), folder.name))
    except OSError:
        return ()
    for folder in folders:
        try:
            lines = (folder / "properties").read_text(encoding="ascii", errors="replace")
        except OSError:  # a container may hide some nodes
            continue
        for line in lines.splitlines():
            key, _, value = line.partition(" ")
            if key == "gfx_target_version" and value.strip().isdigit() and int(value):
                targets.append(_gfx_name(int(value)))
    return tuple(targets)


def _gfx_name(version: int) -> str:
    major, rest = divmod(version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def aiter_obstacle(nodes: Path = KFD_NODES) -> str | None:
    """Why AITER's FP4 GEMMs cannot run here, or None where they can: the one place that says so.

    The GPU by KFD, the package by its distribution, its functions by their source. Whether they
    also import is only known once a layer wants them.
    """
    targets = gfx_targets(nodes)
    if AITER_GFX not in targets:
        found = ", ".join(dict.fromkeys(targets)) or "no AMD GPU"
        return f"needs an MI350-class GPU ({AITER_GFX}): found {found}"
    return aiter_package_obstacle()


def aiter_package_obstacle() -> str | None:
    """Why the installed packages do not hold ROCm's aiter as the backend needs it, or None."""
    try:
        installed_aiter()
    except BackendUnavailable as error:
        return f"{error.where}: {error.what}" if error.where != DISTRIBUTION else error.what
    return None


def installed_aiter() -> Functions:
    """The functions of the installed amd-aiter, read without importing it.

    Raises BackendUnavailable where it is not installed, hidden by another module, or lacks one.
    """
    return _installed_aiter(tuple(sys.path))


@lru_cache(maxsize=4)
def _installed_aiter(_search: tuple[str, ...]) -> Functions:
    """As `installed_aiter`, which a model with thousands of layers asks for each."""
    location = _module_location("aiter")
    if not _installed(DISTRIBUTION):
        raise BackendUnavailable(DISTRIBUTION, _without_distribution(location))
    if location is None:
        what = f"{DISTRIBUTION} is installed, but its module aiter is not found"
        raise BackendUnavailable(DISTRIBUTION, what)
    if not (location / "ops" / "shuffle.py").is_file():
        what = f"module aiter at {location} hides the one of {DISTRIBUTION}"
        raise BackendUnavailable(DISTRIBUTION, what)
    return read_functions(location, metadata.version(DISTRIBUTION))


def aiter_objection(needs: Needs, paths: tuple[str, ...]) -> str | None:
    """What about a layer the installed amd-aiter does not handle, or None."""
    return objection(installed_aiter(), needs, paths)


def aiter_failure() -> str | None:
    """Why the installed amd-aiter does not import, or None. Imports it, the first time."""
    try:
        bound(installed_aiter())
    except BackendUnavailable as error:
        return error.what
    return None


def _without_distribution(location: Path | None) -> str:
    if _installed("aiter"):
        return (
            "the installed package aiter is another one (asynchronous iterators, from PyPI): "
            f"uninstall it, then {INSTALL_AITER}"
        )
    if location is not None:
        return f"module aiter at {location} is not ROCm's: {INSTALL_AITER}"
    return f"{DISTRIBUTION} is not installed: {INSTALL_AITER}"


def triton_obstacle() -> str | None:
    """Why Triton kernels cannot run here, or None where they can."""
    import torch

    missing = None
    if _module_location("triton") is None:
        missing = "triton is not installed: it comes with the GPU builds of torch"
    if torch.cuda.is_available():
        return missing
    return "no GPU that torch can use" + ("" if missing is None else f"; {missing}")


def _installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _module_location(name: str) -> Path | None:
    """Where a top-level module lies, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # half-loaded modules have no spec
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None
