"""Writes a package that looks like AITER of some release: its files, functions and parameters, as
tests/data/aiter/signatures.json has them. What the functions do is in aiter_recorder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mxfp4prep.runtime.backends import aiter_backend, aiter_functions, availability

DATA = Path(__file__).parent / "data" / "aiter"
SIGNATURES: dict[str, dict[str, Any]] = {
    record["version"]: record for record in json.loads((DATA / "signatures.json").read_text())
}
TOO_OLD = ("0.1.4", "0.1.5")
"""Releases without a function that the backend needs."""

USABLE = tuple(version for version in SIGNATURES if version not in TOO_OLD)
NEWEST = USABLE[-1]

ENUMS = """
from enum import Enum

ActivationType = Enum("ActivationType", "No Silu Gelu Swiglu")
QuantType = Enum("QuantType", "No per_Tensor per_Token per_1x32 per_1x128 per_128x128")
"""


def distribution(folder: Path, name: str, version: str = "0.1") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)


def install(
    folder: Path, version: str, *, init: str = "", changes: dict[str, str] | None = None
) -> Path:
    """Distribution and package of one release in `folder`, which is to be on sys.path.

    init      what aiter/__init__.py holds
    changes   file of the package -> its whole text instead
    """
    distribution(folder, "amd-aiter", version)
    package = folder / "aiter"
    texts = {"__init__.py": init, "ops/shuffle.py": "raise RuntimeError\n"}
    for file, functions in SIGNATURES[version]["functions"].items():
        texts[file] = _module(version, file, functions)
    for file, text in (texts | (changes or {})).items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in package.rglob("*"):
        if path.is_dir() and not (path / "__init__.py").exists():
            (path / "__init__.py").write_text("")
    return package


def _module(version: str, file: str, functions: dict[str, list[str]]) -> str:
    lines = ["import aiter_recorder", "import torch"]
    if file == "fused_moe.py":
        lines.append(ENUMS)
    for name, parameters in functions.items():
        lines += [
            f"def {name}({', '.join(parameters)}):",
            f"    return aiter_recorder.call({name!r}, {version!r}, locals())",
        ]
    if "gemm_afp4wfp4" in functions:
        lines += [
            "def _get_config(M, N, K, shuffle=False):",
            f"    return aiter_recorder.get_config({version!r}, M, N, K, shuffle)",
        ]
    return "\n".join(lines) + "\n"


def forget() -> None:
    """As if no AITER had been looked for in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    for cached in (
        aiter_backend.load,
        aiter_functions._import,
        aiter_functions.read_functions,
        availability._installed_aiter,
    ):
        cached.cache_clear()
