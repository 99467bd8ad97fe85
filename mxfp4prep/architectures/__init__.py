"""What is known of model architectures: what their modules' names mean, and what they count."""

from mxfp4prep.architectures.table import (
    ARCHITECTURES,
    COMMON,
    INTERLEAVED_GATE_UP,
    OTHER_TOWERS,
    PARTS,
    Parallel,
    Row,
    family_of,
    row_of,
)
from mxfp4prep.architectures.topology import Topology

__all__ = [
    "ARCHITECTURES",
    "COMMON",
    "INTERLEAVED_GATE_UP",
    "OTHER_TOWERS",
    "PARTS",
    "Parallel",
    "Row",
    "Topology",
    "family_of",
    "row_of",
]
