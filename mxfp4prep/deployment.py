"""How the ranks share a model beyond tensor parallelism: experts, sequences, shared experts."""

from __future__ import annotations

from typing import Literal, NamedTuple

Placement = Literal["sliced", "replicated", "distributed", "fused"]
"""How the ranks share one layer.

sliced        every rank holds its part, by the layer's cut
replicated    every rank holds the whole
distributed   whole experts, spread over the ranks
fused         a shared expert that is one more routed expert, and goes where those go
"""


class Deployment(NamedTuple):
    """What an operator chooses beside the tensor-parallel degree.

    expert_parallel     whole routed experts are spread over the ranks instead of each being cut
    sequence_parallel   the MoE block works on each rank's own tokens
    shared_experts      auto: fused into the routed experts where their quantization is the same;
                        fused: the same, and a warning where it cannot be; separate: never fused
    """

    expert_parallel: bool = False
    sequence_parallel: bool = False
    shared_experts: Literal["auto", "fused", "separate"] = "auto"


TENSOR_PARALLEL = Deployment()
"""Tensor parallelism and nothing else."""
