"""What an installed AITER answers wrongly or not at all: its faults by version, and which layers it
must not be given. Its kernels drop what they do not know, without an error.

Source: AITER's pull requests as named below, its fused_moe from v0.1.7 to after v0.1.20.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mxfp4prep.runtime.backends.aiter_functions import DISTRIBUTION, Functions

if TYPE_CHECKING:
    from mxfp4prep.runtime.backends import Needs

TAIL_FIXED = (0, 1, 12, 1)
"""First release whose gemm_afp4wfp4 masks the scales past k (AITER PR 2671, v0.1.12.post1). Before,
a k that TAIL_COLUMNS does not divide answers NaN."""

TAIL_COLUMNS = 256

SPLIT_K_FAULT = (0, 1, 16)
"""First release whose preshuffle GEMM splits k by elements where it means bytes (AITER PR 3359):
infinities wherever a tuned NUM_KSPLIT is above one."""

SWIGLU_LIMIT = 7.0
"""The clamp built into its swiglu kernels, gpt-oss' own."""


def splits_k_wrongly(known: Functions) -> bool:
    """Whether the preshuffle GEMM must be kept from splitting k.

    By version, or by the name that its first parameter got with the fault.
    """
    return known.preshuffle.parameters[0] == "x_fp4" or release(known.version) >= SPLIT_K_FAULT


def objection(known: Functions, needs: Needs, paths: tuple[str, ...]) -> str | None:
    """What about a layer this AITER would answer wrongly or not at all, or None."""
    for k in needs.k:
        if k % 32:
            return f"does not handle a short last group (k {k})"
        if k % TAIL_COLUMNS and "asm" not in paths and release(known.version) < TAIL_FIXED:
            return (
                f"{DISTRIBUTION} {known.version} answers NaN where {TAIL_COLUMNS} does not "
                f"divide k (k {k}): it needs 0.1.13 or later"
            )
    return None if needs.activation is None else _experts_objection(known, needs, paths)


def _experts_objection(known: Functions, needs: Needs, paths: tuple[str, ...]) -> str | None:
    """As `objection`, for banks of experts."""
    takes = known.fused_moe.parameters
    if set(paths) != {"asm"}:
        return f"does not handle experts on path {'+'.join(paths)}, only asm"
    if needs.gate_up != "concatenated":
        return f"does not handle {needs.gate_up} gate and up, only concatenated"
    if needs.activation == "swigluoai":
        if "gate_mode" not in takes:
            what = "reads gate and up of swigluoai in an order of its own"
            return f"{DISTRIBUTION} {known.version} {what}: it needs a fused_moe with gate_mode"
        if needs.limit != SWIGLU_LIMIT:
            return f"clamps swigluoai at {SWIGLU_LIMIT}, not at {needs.limit}"
    elif needs.activation != "silu":
        return f"does not handle activation {needs.activation}, only silu and swigluoai"
    elif needs.limit is not None:
        return "does not clamp before silu"
    elif needs.has_bias:
        return "drops the biases of experts with silu"
    missing = [name for name in ("bias1", "bias2") if name not in takes]
    if needs.has_bias and missing:
        return f"{DISTRIBUTION} {known.version}: its fused_moe has no {' and '.join(missing)}"
    return None


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, and of its post-release: (0, 1, 7, 2) for "0.1.7.post2.dev18"."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:\.?post(\d+))?", version)
    if match is None:
        return (0,)
    numbers = tuple(int(number) for number in match.group(1).split("."))
    return numbers if match.group(2) is None else (*numbers, int(match.group(2)))
