"""What serving costs at a degree: a rank's bytes and FLOPs per path, padding, clean degrees."""

from mxfp4prep.cost.banks import banks_of
from mxfp4prep.cost.ranks import Cost, PathCost, assumptions, costs, counts_all_experts
from mxfp4prep.cost.reach import TRIED, Shapes, largest_clean, shapes_of, worst_path

__all__ = [
    "TRIED",
    "Cost",
    "PathCost",
    "Shapes",
    "assumptions",
    "banks_of",
    "costs",
    "counts_all_experts",
    "largest_clean",
    "shapes_of",
    "worst_path",
]
