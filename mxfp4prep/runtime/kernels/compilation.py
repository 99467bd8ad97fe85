"""One compilation of a kernel, and the GPUs that kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Choice = Mapping[str, Any]
"""A value for each thing that a kernel is specialized for."""

PIECES = {"*bf16": 1, "*fp16": 2, "*fp32": 3}
"""As launch.PIECES, by Triton's types."""

ALIGNED = "all", "but groups", "little"
"""Which sizes are multiples of 16: groups are not where k is no multiple of 512."""


class Target(NamedTuple):
    """A GPU as a compiler sees it.

    mxfp4    its matrix units take MXFP4
    ptx      it takes NVIDIA's instructions
    shared   bytes of LDS or shared memory that a program can have
    """

    mxfp4: bool
    ptx: bool
    shared: int


TARGETS = {
    "gfx942": Target(mxfp4=False, ptx=False, shared=64 << 10),
    "gfx950": Target(mxfp4=True, ptx=False, shared=160 << 10),
    "sm_90": Target(mxfp4=False, ptx=True, shared=227 << 10),
    "sm_100": Target(mxfp4=True, ptx=True, shared=227 << 10),
}
"""Sources: AMD's CDNA 3 and CDNA 4 instruction set guides, NVIDIA's CUDA C++ programming guide."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel with all that it is specialized for.

    name        what tells it from every other one of its target
    kernel      function of that name in a module of kernels, which is `module`
    constants   values of its constexpr arguments
    types       Triton's types of the others: "*bf16", "i32"
    unaligned   those of them that are no multiples of 16, or addresses that are none
    large       pointers to 2 GiB and more, which AMD's buffer instructions do not reach
    options     launch options: num_warps, launch_pdl
    """

    name: str
    kernel: str
    module: str
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    unaligned: frozenset[str]
    large: frozenset[str]
    options: Mapping[str, Any]


def named(head: str, choice: Choice) -> str:
    """`head` and what of `choice` is not plainly false, as words."""
    words = [head]
    for key, value in choice.items():
        if key in ("TILE", "SHAPE", "PTX") or value is False or value == "all":
            continue
        text = str(value).removeprefix("*").replace(" ", "-")
        words.append(key.lower() if value is True else f"{key.lower()}={text}")
    return " ".join(words)


def options(warps: int, choice: Choice) -> dict[str, Any]:
    """Launch options, as launch.dependent adds to them."""
    return {"num_warps": warps} | ({"launch_pdl": True} if choice.get("PDL") else {})
