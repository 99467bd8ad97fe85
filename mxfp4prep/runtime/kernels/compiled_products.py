"""The compilations of the kernels that read stored weights: few, many, scaled and expand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mxfp4prep.layouts import PATHS
from mxfp4prep.runtime.kernels import configs
from mxfp4prep.runtime.kernels.compilation import (
    ALIGNED,
    PIECES,
    Choice,
    Compilation,
    Target,
    named,
    options,
)
from mxfp4prep.runtime.kernels.covering import Pair, covering

SPLITS = 1, 2, 7, 16
"""No split, the fewest, a number that an uneven division leaves, and the most."""

MODULES = {"few": "gemm", "many": "gemm", "scaled": "scaled", "expand": "expand"}

Axes = dict[str, Sequence[Any]]


def compiled_products(target: Target) -> Iterator[Compilation]:
    """Those of one target, each tile with each layout."""
    for kernel, axes in axes_of(target):
        for choice in covering(axes, _never(axes)):
            yield specialized(kernel, choice, target)


def axes_of(target: Target) -> Iterator[tuple[str, Axes]]:
    """Kernels and the values of all that they are specialized for."""
    reading: Axes = {
        "PATH": tuple(PATHS),
        "WHOLE_N": (True, False),
        "WHOLE_K": (True, False),
        "ALIGNED": ALIGNED,
        "ODD_K": (False, True),
        "LARGE": (False,) if target.ptx else (False, True),
    }
    yield "expand", reading
    product = reading | {
        "SPLITS": SPLITS,
        "GROUPED": (False, True),
        "IDS": ("*i32", "*i64"),
        "BIAS": (False, True),
        "OUT": tuple(PIECES),
    }
    rounded = {"ROW_SCALE": (False, True), "PDL": (False, True) if target.ptx else (False,)}
    for kernel, tiles in (("few", configs.FEW), ("many", configs.MANY)):
        shapes = {"TILE": _tiles(tiles.values(), target), "PIECES": (1, 2, 3)}
        yield kernel, shapes | product | rounded
    if target.mxfp4:
        for encoded, table in ((True, configs.SCALED), (False, configs.SCALED_BF16)):
            shapes = {"TILE": _tiles(table.values(), target)}
            yield "scaled", shapes | product | {"ENCODED": (encoded,)}


def _tiles(tiles: Iterable[configs.Tile], target: Target) -> tuple[configs.Tile, ...]:
    if not target.ptx:
        tiles = map(configs.on_amd, tiles)
    return tuple(dict.fromkeys(tiles))


def _never(axes: Axes) -> list[Pair]:
    never: list[Pair] = [("ODD_K", True, "WHOLE_K", True)]
    if "GROUPED" not in axes:
        return [*never, ("ODD_K", True, "PATH", "asm")]
    never += [("GROUPED", False, "IDS", "*i64")]
    never += [("GROUPED", True, "SPLITS", splits) for splits in SPLITS if splits > 1]
    never += [("GROUPED", True, "OUT", out) for out in PIECES if out != "*fp32"]
    never += [("ROW_SCALE", True, "PIECES", pieces) for pieces in (2, 3)]
    for dtype, pieces in PIECES.items():  # quantized activations are one piece of any dtype
        if dtype != "*fp32":  # of grouped products also where activations are not
            never += [("OUT", dtype, "PIECES", other) for other in (2, 3) if other != pieces]
    if axes["TILE"][0].kernel == "many":  # sums of pieces take it in groups only, and one tile
        others = [tile for tile in axes["TILE"] if tile[1:4] != configs.MANY["64"][1:4]]
        for pieces in (2, 3):
            never += [("PIECES", pieces, "GROUPED", False)]
            never += [("PIECES", pieces, "TILE", tile) for tile in others]
    if axes["TILE"][0].kernel == "few":
        tallest = max(axes["TILE"])  # of whole rows of dense products alone
        never += [("TILE", tallest, "PIECES", pieces) for pieces in (2, 3)]
        never += [("TILE", tallest, "GROUPED", True)]
    tall = [tile for tile in axes["TILE"] if tile.bm > 16]
    never += [("TILE", tile, "SPLITS", SPLITS[-1]) for tile in tall]
    return never


def specialized(kernel: str, choice: Choice, target: Target) -> Compilation:
    """The compilation that a choice of values makes."""
    layout, scales = PATHS[choice["PATH"]]
    constants: dict[str, Any] = {"TILED": layout == "tile16x16", "SCALES": scales}
    copied = ("WHOLE_N", "WHOLE_K", "ODD_K", "BIAS", "ROW_SCALE", "SPLITS", "GROUPED")
    for key in (*copied, "PIECES", "ENCODED", "PDL"):
        if key in choice:
            constants[key] = choice[key]
    pointers = {"weight": "*u8", "scale": "*u8"}
    sizes = ["N", "NS", "K", "P", "C"]
    if kernel != "scaled":
        constants["PTX"] = target.ptx
    if kernel == "expand":
        shape, warps = "32x256", 4
        constants |= {"BN": 32, "BK": 256}
        pointers["out"] = "*bf16"
    else:
        tile, out = choice["TILE"], choice["OUT"]
        shape, warps = f"{tile.bm}x{tile.bn}x{tile.bk}", tile.warps
        constants |= {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk}
        constants["STAGES"] = tile.loads(
            choice["WHOLE_K"], choice.get("PIECES", 1), amd=not target.ptx
        )
        grouped, split = choice["GROUPED"], choice["SPLITS"] > 1
        pointers |= {"out": out, "bias": out}
        pointers["block_rows"] = "*i32" if grouped else out
        pointers["block_expert"] = choice["IDS"] if grouped else out
        pointers |= {"partial": "*fp32" if split else out, "counters": "*i32" if split else out}
        sizes += ["M", "x_stride", "steps", "top", "E"]
        if kernel == "scaled":
            pointers["x"] = pointers["x_scale"] = "*u8" if choice["ENCODED"] else "*bf16"
            sizes.append("x_groups")
        else:
            constants["WIDE"] = False
            pointers["x"] = "*i32" if kernel == "few" else "*bf16"
            pointers["row_scale"] = "*fp32" if choice["ROW_SCALE"] else out
            sizes.append("piece_stride")
    return Compilation(
        named(f"{kernel} {shape}", choice),
        kernel,
        MODULES[kernel],
        constants,
        pointers | dict.fromkeys(sizes, "i32"),
        _unaligned(choice) & {*pointers, *sizes},
        frozenset({"weight", "scale"} if choice["LARGE"] else ()),
        options(warps, choice),
    )


def _unaligned(choice: Choice) -> frozenset[str]:
    found = {"K"} if choice["ODD_K"] else set()
    if choice["ALIGNED"] != "all":
        found |= {"C", "x_groups"}
    if choice["ALIGNED"] == "little":
        stored = choice["PATH"] != "asm"  # its layouts have whole tiles
        if not choice["WHOLE_N"]:
            found |= {"N", "NS"} if stored else {"N"}
        if not choice["WHOLE_K"]:
            found |= {"K", "P"} if stored else {"K"}
    return frozenset(found)
