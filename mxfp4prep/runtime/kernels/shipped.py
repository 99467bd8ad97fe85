"""Which kernels are launched on which GPU, and with what: what a compiler has to be asked about.

An enumeration of what `launch`, `dense` and `grouped` pass, from the tables of `configs`: every
value that an argument can have and every pair of values, which is far fewer than every combination.
It needs no Triton.
"""

from __future__ import annotations

from mxfp4prep.runtime.kernels.compilation import TARGETS, Compilation
from mxfp4prep.runtime.kernels.compiled_products import compiled_products
from mxfp4prep.runtime.kernels.compiled_rest import compiled_rest


def shipped(target: str) -> list[Compilation]:
    """What is compiled for a target of TARGETS, in the same order every time."""
    about = TARGETS[target]
    return [*compiled_products(about), *compiled_rest(about)]
