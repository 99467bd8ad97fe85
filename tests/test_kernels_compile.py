"""Every kernel that is launched compiles for every GPU, and is what that GPU should run.

No GPU is needed: Triton's compiler knows them all. The compilers run in processes of their own,
since these tests run where kernels are interpreted. All of it takes eight minutes of a core: with
MXFP4PREP_ALL_KERNELS everything is compiled (`make kernels`), without, each N-th of a kernel's.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mxfp4prep.layouts import PATHS
from mxfp4prep.runtime.gating import GATES
from mxfp4prep.runtime.input_quant import INPUT_QUANT
from mxfp4prep.runtime.kernels import (
    arrange,
    configs,
    dense,
    expand,
    gates,
    gemm,
    grouped,
    launch,
    routing,
    scaled,
)
from mxfp4prep.runtime.kernels.compilation import TARGETS, Compilation
from mxfp4prep.runtime.kernels.covering import covering
from mxfp4prep.runtime.kernels.shipped import shipped

REPORT = Path(__file__).parents[1] / "bench" / "compile_report.py"

ALL = bool(os.environ.get("MXFP4PREP_ALL_KERNELS"))

KIB = 1024
ROOM = {"gfx942": 64 * KIB, "gfx950": 160 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB}
"""Bytes of LDS or shared memory that one program can have."""

REST = "arrange", "encode", "gate", "count_pairs", "list_pairs", "combine"
PARTS = (("few",), ("many",), ("scaled",), ("expand", *REST))
BATCHES = [
    (target, kernels)
    for target in ROOM
    for kernels in (PARTS if ALL else (tuple(name for part in PARTS for name in part),))
    if kernels != ("scaled",) or target in ("gfx950", "sm_100")
]
EVERY = dict.fromkeys(ROOM, 1) if ALL else dict.fromkeys(ROOM, 40) | {"gfx950": 12}


def compiled(target: str, kernels: tuple[str, ...]) -> list[dict[str, Any]]:
    """What bench/compile_report.py says of these kernels."""
    jobs = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    command = [sys.executable, REPORT, "--target", target, "--kernel", ",".join(kernels), "--json"]
    done = subprocess.run(
        [*map(str, command), f"--jobs={jobs}", f"--every={EVERY[target]}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def faults(one: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one compilation."""
    if one["error"]:
        yield one["error"]
        return
    target, kernel, step = one["target"], one["kernel"], one["per_step"]
    if one["shared"] > ROOM[target]:
        yield f"{one['shared']} bytes of LDS or shared memory, {ROOM[target]} are there"
    spilled = {name: count for name, count in one["spilled"].items() if count}
    if target == "gfx950" and spilled:
        yield f"spills {spilled}"
    if not all(one["registers"].get(name) for name in REGISTERS[target[:2]]):
        yield f"no registers: {one['registers']}"
    if kernel == "scaled" and target == "gfx950":
        encoded = "encoded" in one["name"].split()
        wanted = {"scaled MFMA"} if encoded else {"MFMA", "scaled conversion"}
        if set(step) != wanted:
            yield f"{step} in the loop, {wanted} expected"
    elif kernel in ("few", "many", "scaled") and not set(step) & MATRIX[target]:
        yield f"{step} in the loop, one of {MATRIX[target]} expected"


REGISTERS = {"gf": ("VGPR", "SGPR"), "sm": ("registers",)}
MATRIX = {
    "gfx942": {"MFMA"},
    "gfx950": {"MFMA"},
    "sm_90": {"mma", "wgmma"},
    "sm_100": {"mma", "tcgen05", "tcgen05 MXFP4"},
}
"""Matrix instructions, one of which each product's loop has."""


@pytest.mark.parametrize(
    ("target", "kernels"), BATCHES, ids=[f"{target}-{names[0]}" for target, names in BATCHES]
)
def test_all_that_is_shipped_compiles(target, kernels):
    results = compiled(target, kernels)
    named = {
        kernel: [one.name for one in shipped(target) if one.kernel == kernel] for kernel in KERNELS
    }
    wanted = [name for kernel in kernels for name in named[kernel][:: EVERY[target]]]
    assert sorted(one["name"] for one in results) == sorted(wanted)
    assert [f"{one['name']}: {why}" for one in results for why in faults(one)] == []


def test_each_tile_is_compiled_with_each_layout():
    tables = [*configs.FEW.values(), *configs.MANY.values()]
    native = [*configs.SCALED.values(), *configs.SCALED_BF16.values()]
    for target, about in TARGETS.items():
        found = {
            (one.kernel, *tile_of(one), layout_of(one))
            for one in shipped(target)
            if one.kernel in ("few", "many", "scaled")
        }
        tiles = tables + (native if about.mxfp4 else [])
        if not about.ptx:
            tiles = [configs.on_amd(tile) for tile in tiles]
        for tile in tiles:
            for path in PATHS:
                key = (tile.kernel, tile.bm, tile.bn, tile.bk, tile.warps, PATHS[path])
                assert key in found, f"{target}: {key}"


def tile_of(one: Compilation) -> tuple[int, ...]:
    sizes = (one.constants[key] for key in ("BM", "BN", "BK"))
    return *sizes, one.options["num_warps"]


def layout_of(one: Compilation) -> tuple[str, str]:
    return "tile16x16" if one.constants["TILED"] else "raw", one.constants["SCALES"]


# What is launched, recorded


KERNELS = {
    "few": gemm, "many": gemm, "scaled": scaled, "expand": expand, "arrange": arrange,
    "encode": arrange, "gate": gates, "count_pairs": routing, "list_pairs": routing,
    "combine": routing,
}  # fmt: skip
TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64",
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
}  # fmt: skip


SAMPLED = {"SPLITS": 7}
"""Of the counts between 2 and 16, one is compiled."""

FOLLOWS = {"x", "bias", "row_scale", "partial", "counters", "block_rows", "block_expert"}
"""Tensors whose types follow from constants and from that of `out`."""

META = torch.device("meta")


@dataclass
class Recorder:
    """Takes the launches of one kernel in its place."""

    name: str
    launches: list[tuple[str, dict[str, Any]]]

    def __getitem__(self, grid: object) -> Any:
        def record(*arguments: Any, **given: Any) -> None:
            kernel = getattr(KERNELS[self.name], self.name)
            parameters = inspect.signature(kernel.fn).parameters
            found = dict(zip(parameters, arguments, strict=False)) | given
            assert parameters.keys() == found.keys() - {"num_warps", "launch_pdl"}
            runtime = {name for name, one in parameters.items() if "constexpr" not in str(one)}
            for name in runtime:
                found[name] = type_of(found[name])
            self.launches.append((self.name, found))

        return record


def type_of(value: torch.Tensor | float) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def launches(monkeypatch):
    """A function of a target's name that lists what is launched from then on, as if on that GPU."""

    def on(target: str) -> list[tuple[str, dict[str, Any]]]:
        about = TARGETS[target]
        found: list[tuple[str, dict[str, Any]]] = []
        recorders = {name: Recorder(name, found) for name in KERNELS}
        products = SimpleNamespace(few=recorders["few"], many=recorders["many"])
        pdl = {"PDL": True, "launch_pdl": True} if about.ptx else {"PDL": False}
        stand_ins = recorders | {
            "gemm": products,
            "speaks_ptx": lambda device: about.ptx,
            "is_amd": lambda device: not about.ptx,
            "multiplies_mxfp4": lambda device: about.mxfp4,
            "dependent": lambda device, weights=0: (
                pdl if weights < configs.SMALL else {"PDL": False}
            ),
        }
        for module in (launch, dense, grouped):
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, stand_in)
        return found

    return on


def tensor(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


SHAPES = {
    # stored rows and columns: whole tiles or not, few columns and many
    "asm": [(4096, 256), (96, 1792), (32, 8192), (4096, 4096), (7168, 16384)],
    "triton": [(4096, 256), (100, 2880), (33, 95), (4096, 4096), (64, 16384), (7168, 16384)],
    "kept": [(4096, 256), (100, 2880), (33, 95), (4096, 4096), (64, 16384), (7168, 16384)],
}
ROWS = (1, 12, 32, 64, 100, 1200)
ROUTED = (
    # tokens, experts of each, experts
    (1, 4, 8), (1, 8, 255), (16, 1, 15), (64, 8, 60), (500, 4, 15), (1000, 8, 250), (999, 10, 512),
    (99, 4, 60), (8, 10, 60),
)  # fmt: skip
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def launch_dense(path: str, dtype: torch.dtype, quant: str, *, bias: bool) -> None:
    for (n, k), m in product(SHAPES[path], ROWS):
        dense.dense(
            tensor(m, k, dtype=dtype), tensor(1), tensor(1), tensor(m, n, dtype=dtype), path,
            quant, tensor(n, dtype=dtype) if bias else None, tensor(1, dtype=torch.float32),
        )  # fmt: skip


def launch_experts(path: str, dtype: torch.dtype, quant: str, *, bias: bool) -> None:
    for number, (tokens, top, count) in enumerate(ROUTED):
        (n, k), pad = SHAPES[path][number % 3], number % 2
        n += n % 2
        halves = launch.Stored(
            tensor(count), tensor(1), tensor(count, n, dtype=torch.float32) if bias else None,
            path, n, k - pad, n, k,
        )  # fmt: skip
        down = halves._replace(bias=None)
        if path != "asm":
            down = down._replace(n=k, k=n // 2, n_stored=k, k_stored=n // 2)
        between = grouped.Gate(
            tuple(GATES)[number % 4], 7.0 if number % 2 else None, interleaved=number % 3 == 0
        )
        ids = torch.int64 if number % 2 else torch.int32
        scales = tensor(count, dtype=torch.float32)
        grouped.experts(
            tensor(tokens, k - pad, dtype=dtype), tensor(tokens, k, dtype=dtype), halves, down,
            between, tensor(tokens, top, dtype=dtype), tensor(tokens, top, dtype=ids), quant,
            (scales, scales),
        )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_launched_is_what_is_compiled(target, launches):
    found = launches(target)
    bias = False
    for path, dtype, quant in product(PATHS, FLOATS, INPUT_QUANT):
        bias = not bias
        launch_dense(path, dtype, quant, bias=bias)
        launch_experts(path, dtype, quant, bias=bias)
    compilations: dict[str, set[Any]] = {}
    for one in shipped(target):
        given = {**one.constants, **one.types, **one.options}
        compilations.setdefault(one.kernel, set()).update(decisive(given))
    launched: dict[str, set[Any]] = {}
    for kernel, given in found:
        if given.get("SPLITS", 1) not in (1, 2, 16):
            given |= SAMPLED
        launched.setdefault(kernel, set()).update(decisive(given))
    assert launched.keys() == compilations.keys()
    unknown = {kernel: launched[kernel] - compilations[kernel] for kernel in launched}
    assert {kernel: sorted(map(str, pairs)) for kernel, pairs in unknown.items() if pairs} == {}


def decisive(given: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Each argument's value or type, and each pair of values; "out" tells the other tensors'."""
    yield from given.items()
    values = [(name, value) for name, value in sorted(given.items()) if name not in FOLLOWS]
    yield from combinations(values, 2)


def test_all_that_decides_a_compilation_is_launched(launches):
    """Nothing is compiled for a value that no launch has."""
    found = launches("sm_100")
    for path, dtype, quant in product(PATHS, FLOATS, INPUT_QUANT):
        launch_dense(path, dtype, quant, bias=True)
        launch_dense(path, dtype, quant, bias=False)
    launched = {(kernel, *item) for kernel, arguments in found for item in arguments.items()}
    launched |= {(kernel, *item) for kernel, _ in found for item in SAMPLED.items()}
    for one in shipped("sm_100"):
        if one.kernel in ("arrange", "encode", "expand"):
            for item in one.constants.items():
                assert (one.kernel, *item) in launched


# Choosing few of many


def test_a_covering_holds_every_pair_that_may_be():
    axes = {"a": (1, 2, 3), "b": (1, 2), "c": ("x", "y", "z"), "d": (False, True)}
    never = [("a", 1, "b", 2), ("c", "x", "d", True)]
    rows = covering(axes, never)
    held = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    banned = {frozenset({(a, x), (b, y)}) for a, x, b, y in never}
    every = {
        frozenset({(a, x), (b, y)})
        for a, b in combinations(axes, 2)
        for x, y in product(axes[a], axes[b])
    }
    assert held == every - banned
    assert len(rows) < 18  # of 36


def test_a_pair_that_cannot_be_completed_is_left_out():
    axes = {"a": (1, 2), "b": (1, 2), "c": (1,)}
    rows = covering(axes, [("a", 1, "c", 1)])
    assert rows == [{"a": 2, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 1}]
