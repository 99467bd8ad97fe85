"""Whether a GEMM backend could run on this machine, and if not, why not.

Nothing here initialises a GPU or imports a backend: importing ROCm's aiter compiles, logs and
raises on GPUs it does not know, and PyPI has an unrelated package of the same import name.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""One folder per CPU and GPU that the amdgpu driver drives (Linux, amdkfd)."""

AITER_GFX = "gfx950"
AITER_DISTRIBUTION = "amd-aiter"
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
    """Why AITER's FP4 GEMMs cannot run here, or None where they can."""
    targets = gfx_targets(nodes)
    if AITER_GFX not in targets:
        found = ", ".join(dict.fromkeys(targets)) or "no AMD GPU"
        return f"needs an MI350-class GPU ({AITER_GFX}): found {found}"
    return aiter_package_obstacle()


def aiter_package_obstacle() -> str | None:
    """Why the installed packages do not hold ROCm's aiter, or None where they do."""
    location = _module_location("aiter")
    if _installed(AITER_DISTRIBUTION):
        if location is None:
            return f"{AITER_DISTRIBUTION} is installed, but its module aiter is not found"
        if not (location / "ops" / "shuffle.py").is_file():
            return f"module aiter at {location} hides the one of {AITER_DISTRIBUTION}"
        return None
    if _installed("aiter"):
        return (
            "the installed package aiter is another one (asynchronous iterators, from PyPI): "
            f"uninstall it, then {INSTALL_AITER}"
        )
    if location is not None:
        return f"module aiter at {location} is not ROCm's: {INSTALL_AITER}"
    return f"{AITER_DISTRIBUTION} is not installed: {INSTALL_AITER}"


def triton_obstacle() -> str | None:
    """Why Triton kernels cannot run here, or None where they can."""
    if _module_location("triton") is None:
        return "triton is not installed: it comes with the GPU builds of torch"
    import torch

    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    return None


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
