"""The compilations of the kernels around the products: activations, routing, gate and sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mxfp4prep.mxfp4 import ELEMENTS
from mxfp4prep.runtime.gating import GATES
from mxfp4prep.runtime.kernels import configs
from mxfp4prep.runtime.kernels.compilation import (
    PIECES,
    Choice,
    Compilation,
    Target,
    named,
    options,
)
from mxfp4prep.runtime.kernels.covering import Pair, covering

EXPERTS = 16, 64, 256, 1024
"""Powers of two above the numbers of experts that known models have."""

TOP = 1, 4, 8, 10
"""Experts per token of known models."""

BLOCK_ROWS = tuple(sorted({t.bm for t in (*configs.FEW.values(), *configs.MANY.values())}))

NEVER: list[Pair] = [
    *(("KIND", kind, "PIECES", pieces) for kind in ("fp8", *ELEMENTS) for pieces in (2, 3)),
    *(("X", x, "PIECES", pieces) for x, own in PIECES.items() for pieces in {2, 3} - {own}),
]
"""Activations that are quantized are one piece, others as many as their dtype needs."""

Types = dict[str, str]


class Kernel(NamedTuple):
    """A kernel with the values of all that it is specialized for.

    arguments   from a choice of values to constants, types of the other arguments, and warps
    unaligned   arguments that need not be multiples of 16
    """

    module: str
    axes: dict[str, Sequence[Any]]
    arguments: Callable[[Choice], tuple[dict[str, Any], Types, int]]
    unaligned: frozenset[str] = frozenset()


def compiled_rest(target: Target) -> Iterator[Compilation]:
    """Those of one target."""
    pdl = (False, True) if target.ptx else (False,)
    for name, kernel in KERNELS.items():
        if name == "encode" and not target.mxfp4:
            continue
        axes = kernel.axes | ({} if name == "encode" else {"PDL": pdl})
        if kernel.unaligned:
            axes["ALIGNED"] = ("all", "little")
        for choice in covering(axes, NEVER):
            constants, types, warps = kernel.arguments(choice)
            if "PDL" in choice:
                constants["PDL"] = choice["PDL"]
            shape = "x".join(
                str(constants[key]) for key in ("BM", "BK", "BLOCK") if key in constants
            )
            yield Compilation(
                named(f"{name} {shape}", choice),
                name,
                kernel.module,
                constants,
                types,
                kernel.unaligned if choice.get("ALIGNED") == "little" else frozenset(),
                frozenset(),
                options(warps, choice),
            )


def _integers(*names: str) -> Types:
    return dict.fromkeys(names, "i32")


def _element(kind: str) -> dict[str, Any]:
    element = ELEMENTS.get(kind, ELEMENTS["fp4"])
    return {
        "KIND": "mx" if kind in ELEMENTS else kind,
        "MANT": element.mantissa_bits,
        "LOW": element.smallest_exponent,
        "TOP": element.largest_exponent,
    }


def _arrange(choice: Choice) -> tuple[dict[str, Any], Types, int]:
    x, kind, (rows, warps) = choice["X"], choice["KIND"], choice["SHAPE"]
    pointers = {"x": x, "out": "*bf16", "row_scale": "*fp32" if kind == "fp8" else x}
    constants = _element(kind) | {"PIECES": choice["PIECES"], "BM": rows, "BK": 256}
    return constants, pointers | _integers("M", "K", "x_stride", "width", "piece_stride"), warps


def _encode(choice: Choice) -> tuple[dict[str, Any], Types, int]:
    rows, warps = choice["SHAPE"]
    pointers = {"x": choice["X"], "codes": "*u8", "scales": "*u8"}
    return (
        {"BM": rows, "BK": 256},
        pointers | _integers("M", "K", "x_stride", "P", "C"),
        warps,
    )


def _gate(choice: Choice) -> tuple[dict[str, Any], Types, int]:
    rows, warps = choice["SHAPE"]
    constants = _element(choice["KIND"]) | {"BM": rows, "BK": 256}
    for key in ("ACTIVATION", "LIMITED", "INTERLEAVED", "PIECES"):
        constants[key] = choice[key]
    types = {"both": "*fp32", "out": choice["OUT"], "limit": "fp32"}
    sizes = _integers("M", "both_stride", "up_start", "K", "width", "piece_stride")
    return constants, types | sizes, warps


def _count_pairs(choice: Choice) -> tuple[dict[str, Any], Types, int]:
    types = {"ids": choice["IDS"], "counts": "*i32"} | _integers("pairs", "span", "E")
    return (
        {"EXPERTS": choice["EXPERTS"], "CHUNK": configs.CHUNKS[-1][0]},
        types,
        configs.CHUNKS[-1][1],
    )


def _list_pairs(choice: Choice) -> tuple[dict[str, Any], Types, int]:
    constants, types, _ = _count_pairs(choice)
    counted, chunk, warps = choice["PAIRS"]
    constants |= {"COUNTED": counted, "CHUNK": chunk, "BM": choice["BM"]}
    types |= {"rows": "*i32", "block_expert": "*i32", "parts": "i32", "blocks": "i32"}
    return constants, types, warps


def _combine(choice: Choice) -> tuple[dict[str, Any], Types, int]:
    block, warps = choice["SHAPE"]
    types = {"results": "*fp32", "weights": choice["WEIGHTS"], "ids": choice["IDS"]}
    types |= {"out": choice["OUT"]} | _integers("E", "width", "H")
    return {"TOP": choice["TOP"], "BLOCK": block}, types, warps


FLOATS = tuple(PIECES)
ROWS = (1, 1), (2, 2)
"""Rows and warps of a program."""

SORTING: dict[str, Sequence[Any]] = {"IDS": ("*i32", "*i64"), "EXPERTS": EXPERTS}

PAIRS = [(False, *configs.CHUNKS[0]), (False, *configs.CHUNKS[1]), (True, *configs.CHUNKS[1])]
"""Whether they were counted before, how many are looked at together, and warps."""

KERNELS = {
    "arrange": Kernel(
        "arrange",
        {
            "KIND": ("none", "fp8", *ELEMENTS),
            "X": FLOATS,
            "PIECES": (1, 2, 3),
            "SHAPE": (*ROWS, (16, 4)),
        },
        _arrange,
        frozenset({"x", "K", "x_stride", "width"}),
    ),
    "encode": Kernel(
        "arrange", {"X": FLOATS, "SHAPE": ROWS}, _encode, frozenset({"x", "K", "x_stride", "C"})
    ),
    "gate": Kernel(
        "gates",
        {
            "ACTIVATION": tuple(GATES),
            "KIND": ("none", *ELEMENTS),
            "PIECES": (1, 2, 3),
            "OUT": ("*bf16", "*fp32"),
            "LIMITED": (False, True),
            "INTERLEAVED": (False, True),
            "SHAPE": (*ROWS, (8, 4)),
        },
        _gate,
        frozenset({"K", "both_stride", "up_start", "width"}),
    ),
    "count_pairs": Kernel("routing", SORTING, _count_pairs),
    "list_pairs": Kernel(
        "routing",
        SORTING | {"BM": BLOCK_ROWS, "PAIRS": PAIRS},
        _list_pairs,
    ),
    "combine": Kernel(
        "routing",
        {
            "SHAPE": ((256, 1), (1024, 4)),
            "TOP": TOP,
            "OUT": FLOATS,
            "WEIGHTS": FLOATS,
            "IDS": ("*i32", "*i64"),
        },
        _combine,
        frozenset({"width", "H"}),
    ),
}
