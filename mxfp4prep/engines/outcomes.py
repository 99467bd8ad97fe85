"""What an engine does with one layer: runs it, stops, answers wrongly, or nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mxfp4prep.engines.rules import Engine
from mxfp4prep.findings import Finding

PATHS: dict[str, str] = {
    "asm": "AITER's ASM GEMM (gemm_a4w4), where the engine does so with Triton's preshuffle GEMM "
    "for small M",
    "triton": "AITER's Triton GEMM on weights as stored (gemm_afp4wfp4)",
    "asm or triton": "one or the other, depending on AITER's tuned tables",
    "triton-preshuffle": "AITER's Triton GEMM on shuffled weights (gemm_afp4wfp4_preshuffle)",
    "triton-a8w4": "AITER's Triton GEMM with FP8 inputs (gemm_a8wfp4)",
    "bf16": "weights decoded to bf16 once, at load",
    "emulation": "weights decoded for every call",
    "moe-aiter": "AITER's fused MoE with MXFP4 inputs",
    "moe-aiter-bf16": "AITER's fused MoE with bf16 inputs",
    "moe-aiter-fp8": "AITER's fused MoE with FP8 inputs",
    "moe-emulation": "experts' weights decoded for every call",
}
"""The paths an outcome may name."""


class Outcome(NamedTuple):
    """What an engine does with one layer at one degree.

    outcome   ok: it runs; crash: the engine stops with an error; corrupt: it runs, no error, and
              the numbers are wrong; unknown: the facts at hand do not say
    path      a key of PATHS; None where the engine does not get there, or it is not known
    message   the engine's error, what goes wrong, what is not known, or what an ok rests on
    """

    outcome: Literal["ok", "crash", "corrupt", "unknown"]
    path: str | None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one engine does with the original checkpoint on gfx950.

    switches      every switch of the engine with the value that was assumed, "0" or "1"
    assumptions   what else was assumed
    outcomes      layer name -> tp -> outcome; layers that fare alike share one mapping
    findings      about the checkpoint as a whole
    padding       per degree, bytes of zeros that the fullest rank holds for its routed experts
    """

    engine: Engine
    switches: Mapping[str, str]
    assumptions: tuple[str, ...]
    outcomes: Mapping[str, Mapping[int, Outcome]]
    findings: tuple[Finding, ...]
    padding: Mapping[int, int] = field(default_factory=dict)
