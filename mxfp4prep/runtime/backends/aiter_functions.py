"""AITER's functions: which of them an installed package has, and how each is to be called.

Names, files and parameters changed from release to release. All that is read from the package's
source, once and without importing it: importing compiles, asks HIP for its GPU and raises on one it
does not know. `bound` imports.

Source: the stored texts of ROCm/aiter from v0.1.5 to after v0.1.20, and the wheel of v0.1.7.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mxfp4prep.errors import BackendUnavailable

DISTRIBUTION = "amd-aiter"

GEMM_FILES = ("ops/triton/gemm/basic/gemm_afp4wfp4.py", "ops/triton/gemm_afp4wfp4.py")


class Sought(NamedTuple):
    """A function that the backend calls: where it may be, and what it is called with.

    files, names   newest first
    positional     how many arguments are passed by place
    keywords       what is passed by name, so must be there
    optional       what is passed by name where it is there
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    positional: int
    keywords: frozenset[str]
    optional: frozenset[str] = frozenset()


SOUGHT: dict[str, Sought] = {
    "gemm_a4w4": Sought(
        files=("ops/gemm_op_a4w4.py",),
        names=("gemm_a4w4",),
        positional=4,
        keywords=frozenset({"bpreshuffle"}),
        optional=frozenset({"out"}),
    ),
    "preshuffle": Sought(
        files=GEMM_FILES,
        names=("gemm_afp4wfp4_preshuffle", "gemm_afp4wfp4_preshuffled_weight_scales"),
        positional=4,
        keywords=frozenset({"dtype", "config"}),
    ),
    "plain": Sought(
        files=GEMM_FILES, names=("gemm_afp4wfp4",), positional=4, keywords=frozenset({"dtype"})
    ),
    "quantize": Sought(
        files=("ops/triton/quant/quant.py", "ops/triton/quant.py"),
        names=("dynamic_mxfp4_quant",),
        positional=1,
        keywords=frozenset({"scaling_mode"}),
    ),
    "fused_moe": Sought(
        files=("fused_moe.py",),
        names=("fused_moe",),
        positional=5,
        keywords=frozenset({"expert_mask", "activation", "quant_type", "w1_scale", "w2_scale"}),
        optional=frozenset({"hidden_pad", "intermediate_pad", "bias1", "bias2", "gate_mode"}),
    ),
}
"""What each function is for -> what is known of it."""


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the package: where it is and what it takes, `required` without a default."""

    module: str
    name: str
    parameters: tuple[str, ...]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Functions:
    """What an installed AITER has of what the backend needs."""

    version: str
    gemm_a4w4: Function
    preshuffle: Function
    plain: Function
    quantize: Function
    fused_moe: Function


@lru_cache(maxsize=8)
def read_functions(package: Path, version: str) -> Functions:
    """The functions of the package in this folder.

    Raises BackendUnavailable where one is missing, or wants an argument that is not known here.
    """
    return Functions(version, **{use: _find(package, version, use) for use in SOUGHT})


def _find(package: Path, version: str, use: str) -> Function:
    sought = SOUGHT[use]
    for file in sought.files:
        found = _functions_in(package / file, sought.names)
        for name in sought.names:
            if name in found:
                module = ".".join(("aiter", *Path(file).with_suffix("").parts))
                function = Function(module, name, *found[name])
                _check_call(function, sought, version)
                return function
    raise BackendUnavailable(f"{DISTRIBUTION} {version}", f"it has no {sought.names[0]}")


def _check_call(function: Function, sought: Sought, version: str) -> None:
    """Raises BackendUnavailable unless it can be called as the backend does."""
    where = f"{DISTRIBUTION} {version}"
    passed = {*function.parameters[: sought.positional], *sought.keywords, *sought.optional}
    unknown = [name for name in function.required if name not in passed]
    missing = sorted(sought.keywords - set(function.parameters[sought.positional :]))
    if unknown:
        what = f"its {function.name} wants {', '.join(unknown)}, unknown to this mxfp4prep"
        raise BackendUnavailable(where, what)
    if missing:
        raise BackendUnavailable(where, f"its {function.name} has no {', '.join(missing)}")


def _functions_in(
    path: Path, names: tuple[str, ...]
) -> Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Name -> its parameters, and those of them without a default."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        node.name: _parameters(node.args)
        for node in _statements(tree.body)
        if isinstance(node, ast.FunctionDef) and node.name in names
    }


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        for branch in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, branch, ()))


def _parameters(arguments: ast.arguments) -> tuple[tuple[str, ...], tuple[str, ...]]:
    plain = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = plain[: len(plain) - len(arguments.defaults)]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [argument.arg for argument, default in named if default is None]
    return (*plain, *(argument.arg for argument in arguments.kwonlyargs)), tuple(required)


@dataclass(frozen=True, slots=True)
class Bound:
    """AITER's functions, imported.

    config   (m, n, bytes of a row, shuffled) -> what the tuned tables have for the Triton GEMMs
    """

    known: Functions
    gemm_a4w4: Callable[..., Any]
    preshuffle: Callable[..., Any]
    plain: Callable[..., Any]
    quantize: Callable[..., Any]
    fused_moe: Callable[..., Any]
    config: Callable[..., Any]
    activation_type: Any
    quant_type: Any


def bound(known: Functions) -> Bound:
    """The functions, imported on the first call.

    Raises BackendUnavailable with what importing raised, each time, without trying again.
    """
    outcome = _import(known)
    if isinstance(outcome, str):
        raise BackendUnavailable("backend aiter", outcome, hint="name another backend, or none")
    return outcome


@lru_cache(maxsize=8)
def _import(known: Functions) -> Bound | str:
    """Whatever it raises: a wrong GPU, a failed build, a missing library all say "not here"."""
    uses = {use: getattr(known, use) for use in SOUGHT}
    try:
        modules = {use: importlib.import_module(found.module) for use, found in uses.items()}
        return Bound(
            known,
            **{use: getattr(modules[use], found.name) for use, found in uses.items()},
            config=modules["preshuffle"]._get_config,
            activation_type=modules["fused_moe"].ActivationType,
            quant_type=modules["fused_moe"].QuantType,
        )
    except (Exception, SystemExit) as error:
        text = str(error).strip().partition("\n")[0]
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return f"importing {DISTRIBUTION} {known.version} fails ({what})"
