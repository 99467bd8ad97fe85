"""How far a checkpoint can be split: the worst path of its layers at a degree, asked for or not.

A checkpoint has few distinct shapes, so degrees beyond the survey's, or another deployment, cost
next to nothing to try.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mxfp4prep.alignment import Path, judge_group, judge_layer, stricter
from mxfp4prep.collector import collector_paused
from mxfp4prep.cost.banks import banks_of
from mxfp4prep.deployment import Deployment
from mxfp4prep.parallel import Cut
from mxfp4prep.shared_experts import SharedBlock, decide
from mxfp4prep.survey import Survey

TRIED = (1, 2, 4, 8, 16, 32, 64)
"""Degrees that `largest_clean` tries beside those of the survey."""


class Shape(NamedTuple):
    """What decides a layer's verdict at any degree.

    place   "expert" where expert parallelism keeps it whole, "shared" with its block for a part of
            a shared expert, "plain" otherwise
    """

    cut: Cut
    n: int
    k: int
    is_matrix: bool
    place: Literal["plain", "expert", "shared"]
    block: SharedBlock | None = None

    def cut_at(self, tp: int, deployment: Deployment) -> Cut:
        """What is cut at degree `tp`."""
        whole = False
        if self.place == "expert":
            whole = deployment.expert_parallel
        elif self.block is not None:
            decision = decide(self.block, tp, deployment).decision
            whole = decision == "replicated" or (decision == "fused" and deployment.expert_parallel)
        return Cut("none") if whole else self.cut


@dataclass(frozen=True, slots=True)
class Shapes:
    """The distinct shapes of a checkpoint's layers, and of its fused groups, part by part.

    experts   routed experts in the smallest bank with MXFP4 layers, 0 without any
    """

    layers: tuple[Shape, ...]
    groups: tuple[tuple[Shape, ...], ...]
    experts: int

    def has_experts_for(self, tp: int, deployment: Deployment) -> bool:
        """Whether every one of `tp` ranks gets an expert where whole ones are spread."""
        return not deployment.expert_parallel or not self.experts or tp <= self.experts


@collector_paused()
def shapes_of(survey: Survey, banks: Mapping[str, int] | None = None) -> Shapes:
    """The distinct shapes in a survey. Mixed groups are left out: nobody fuses them.

    banks   what `banks_of` says, where the caller knows it
    """
    blocks = {name: item.block for item in survey.shared for name in item.block.members}
    alike: dict[tuple[int, bool], SharedBlock] = {}
    found: dict[tuple[object, ...], Shape] = {}
    of: dict[str, Shape] = {}
    for item in survey.layers:
        layer = item.layer
        block = blocks.get(layer.name) if blocks else None
        if block is not None:
            block = alike.setdefault((block.width, block.fusable), block)
        expert = item.role.parallel == "expert"
        key = (item.cut, layer.n, layer.k, layer.is_matrix, expert, id(block))
        shape = found.get(key)
        if shape is None:
            place: Literal["plain", "expert", "shared"] = "expert" if expert else "plain"
            if block is not None:
                place = "shared"
            shape = Shape(item.cut, layer.n, layer.k, layer.is_matrix, place, block)
            found[key] = shape
        of[layer.name] = shape
    groups: dict[tuple[int, ...], tuple[Shape, ...]] = {}
    for group in survey.groups:
        if not group.mixed:
            parts = [of[name] for name in group.members]
            ids = tuple(map(id, parts))
            if ids not in groups:
                groups[ids] = tuple(parts)
    sizes = [*(banks_of(survey) if banks is None else banks).values()]
    sizes += {item.layer.experts for item in survey.layers if item.layer.experts is not None}
    return Shapes(tuple(found.values()), tuple(groups.values()), min(sizes, default=0))


def worst_path(shapes: Shapes, tp: int, deployment: Deployment) -> Path:
    """The path of the worst layer at degree `tp`: "asm" says that every layer takes it."""
    verdicts = [
        judge_layer(shape.cut_at(tp, deployment), shape.n, shape.k, tp, shape.is_matrix)
        for shape in shapes.layers
    ]
    verdicts += [
        judge_group([(part.cut_at(tp, deployment), part.n) for part in parts], parts[0].k, tp)
        for parts in shapes.groups
    ]
    worst = verdicts[0]
    for verdict in verdicts[1:]:
        worst = stricter(worst, verdict)
    return worst.path


def largest_clean(
    survey: Survey, tried: Iterable[int] = TRIED, shapes: Shapes | None = None
) -> int | None:
    """The largest degree at which every layer takes the ASM path; None if there is none.

    Of the degrees of the survey, and of those `tried` at which expert parallelism, if asked for,
    leaves no rank without an expert.
    """
    shapes, deployment = shapes or shapes_of(survey), survey.deployment
    degrees = {tp for tp in tried if shapes.has_experts_for(tp, deployment)}
    for tp in sorted({*degrees, *survey.tp}, reverse=True):
        if worst_path(shapes, tp, deployment) == "asm":
            return tp
    return None
