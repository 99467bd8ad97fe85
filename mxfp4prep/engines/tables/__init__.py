"""The engines, each as one small table of facts with its sources.

To add an engine or a version, add a table and its place in ENGINES. Defaults of switches are those
of the engine's source, not those of a vendor's image or recipe.
"""

from __future__ import annotations

from dataclasses import replace

from mxfp4prep.engines.rules import Engine
from mxfp4prep.engines.tables.atom import ATOM
from mxfp4prep.engines.tables.sglang import SGLANG_05
from mxfp4prep.engines.tables.vllm import VLLM_032, VLLM_033, VLLM_MAIN
from mxfp4prep.errors import UsageError

_OWN = replace(
    ATOM,
    name="mxfp4prep",
    label="mxfp4prep",
    version="this version",
    sources=("mxfp4prep: alignment.py, decisions.py",),
    switches=(),
    own=True,
)

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (VLLM_032, VLLM_033, VLLM_MAIN, SGLANG_05, ATOM, _OWN)
}
"""Every engine, by the name that `--engine` takes."""


def engine_named(name: str) -> Engine:
    """The table of engine `name`. Raises UsageError where there is none."""
    engine = ENGINES.get(name)
    if engine is None:
        raise UsageError(f"--engine {name}", "no such engine", expected=", ".join(ENGINES))
    return engine
