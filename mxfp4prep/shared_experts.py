"""What becomes of a shared expert: fused into the routed ones, sliced, replicated, or impossible.

Fusion is decided first. Where the shared expert's quantization is that of the routed experts, an
engine may hold it as one more expert, and then it goes where the experts go. Only a shared expert
that stays apart has to be cut by itself, and must give every rank whole groups of 32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mxfp4prep.deployment import Deployment
from mxfp4prep.parallel import SCALE_GROUP
from mxfp4prep.quark import QuarkLayer

Decision = Literal["fused", "sliced", "replicated", "impossible"]

_SHARED_PART = re.compile(r"(?:^|\.)(shared_experts?|shared_mlp)(?=\.)")


class SharedDecision(NamedTuple):
    """The decision at one degree; `message` does the arithmetic and names the way out, or is ""."""

    decision: Decision
    message: str = ""


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """One shared expert: its module, and what is known before a degree is chosen.

    width     its intermediate size: in_features of its down projection
    fusable   it may be `slots` more routed experts; `why` says what decides that
    members   names of its MXFP4 layers
    """

    name: str
    width: int
    fusable: bool
    why: str
    slots: int
    members: tuple[str, ...]


def shared_blocks(
    layers: Sequence[QuarkLayer], others: Mapping[str, str]
) -> dict[str, SharedBlock]:
    """Every shared expert with an MXFP4 layer, by module name.

    layers   all MXFP4 layers
    others   module -> dtype of every other module that owns a weight
    """
    if not any(layer.kind == "shared_expert" for layer in layers):
        return {}
    shared: dict[str, list[QuarkLayer]] = {}
    routed: dict[str, QuarkLayer] = {}
    routed_down: dict[str, QuarkLayer] = {}
    for layer in layers:
        if layer.kind == "shared_expert":
            found = _SHARED_PART.search(layer.name)
            if found is not None:
                shared.setdefault(layer.name[: found.end()], []).append(layer)
        elif layer.kind == "expert":
            block = layer.name[: layer.name.rfind("experts.")]
            routed.setdefault(block, layer)
            if _is_down(layer.name):
                routed_down.setdefault(block, layer)
    strangers = {
        name[: found.end()]: dtype
        for name, dtype in others.items()
        if (found := _SHARED_PART.search(name)) is not None
    }
    blocks = {}
    for name, members in shared.items():
        place = name[: name.rfind("shared_")]
        fusable, why, slots = _fusion(
            members, routed.get(place), routed_down.get(place), strangers.get(name)
        )
        names = tuple(member.name for member in members)
        blocks[name] = SharedBlock(name, _width(members), fusable, why, slots, names)
    return blocks


def decide(block: SharedBlock, tp: int, deployment: Deployment) -> SharedDecision:
    """What an engine can do with `block` at degree `tp`."""
    width = block.width
    if block.fusable and deployment.shared_experts != "separate":
        return SharedDecision("fused")
    if tp == 1 or (width % tp == 0 and (width // tp) % SCALE_GROUP == 0):
        return SharedDecision("sliced")
    each = f"{width} / {tp} = {width / tp:g} columns = {width / tp / SCALE_GROUP:g} groups of 32"
    if deployment.expert_parallel or deployment.sequence_parallel:
        return SharedDecision("replicated", f"{each}: every rank holds the whole")
    ways = []
    degrees = [d for d in range(tp - 1, 0, -1) if width % (d * SCALE_GROUP) == 0]
    if degrees:
        powers = [d for d in degrees if d & (d - 1) == 0]  # what servers of eight GPUs can do
        ways.append(f"choose tp {powers[0]}, which fits it")
    ways.append("replicate it with expert parallelism (--ep) or sequence parallelism (--sp)")
    if block.fusable:
        ways.append("let the engine fuse it into the routed experts")
    return SharedDecision("impossible", f"{each}; {', or '.join(ways)}")


def _fusion(
    members: Sequence[QuarkLayer],
    routed: QuarkLayer | None,
    routed_down: QuarkLayer | None,
    stranger: str | None,
) -> tuple[bool, str, int]:
    if stranger is not None:
        return False, f"parts of it are stored as {stranger}", 0
    if routed is None:
        return False, "there are no MXFP4 routed experts beside it", 0
    odd = [
        member
        for member in members
        if (member.scheme, member.activation) != (routed.scheme, routed.activation)
    ]
    if odd:
        return False, f"it is {odd[0].scheme}, the routed experts are {routed.scheme}", 0
    if routed_down is None or not routed_down.k:
        return False, "the routed experts have no down projection to compare with", 0
    width = _width(members)
    if width % routed_down.k:
        return False, f"its width {width} is no multiple of the routed experts' {routed_down.k}", 0
    slots = width // routed_down.k
    more = "one more expert" if slots == 1 else f"{slots} more experts"
    return True, f"same quantization as the routed experts: {more}", slots


def _width(members: Sequence[QuarkLayer]) -> int:
    """The intermediate size: what the down projection takes, or what gate and up give."""
    for member in members:
        if _is_down(member.name):
            return member.k
    return members[0].n // (2 if members[0].gate_up else 1)


def _is_down(name: str) -> bool:
    return name.endswith(("down_proj", "w2"))
