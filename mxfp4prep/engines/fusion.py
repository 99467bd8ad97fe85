"""Shared experts that an engine is asked to fuse into the routed ones, and keeps apart.

The engine looks at the config alone: a shared expert that is excluded, or quantized by another
spec than the routed experts, stays apart with a warning, and one of which only some parts are
excluded is an error.

Source: vLLM 0.33.0, model_executor/layers/quantization/utils/config_utils.py,
is_shared_expert_quant_fse_compatible, and layers/fused_moe/utils.py,
resolve_layer_fused_shared_expert; the same in 0.32.0 for Quark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mxfp4prep.engines.modules import Modules
from mxfp4prep.engines.setting import Setting
from mxfp4prep.engines.specs import ConfigReader, Reading
from mxfp4prep.survey import Survey

_BLOCK = re.compile(r"(?:^|\.)shared_(?:experts?|mlp)(?=\.)")


class Apart(NamedTuple):
    """Why a shared expert is not fused: the engine's error, or else what it warns of."""

    refusal: str
    why: str


def kept_apart(
    setting: Setting, survey: Survey, modules: Modules, reader: ConfigReader
) -> dict[str, Apart]:
    """The shared experts, by module name, that are to be fused and are not.

    Those that are not MXFP4 count too. None where no switch asks for fusion, or where the engine
    does not get as far as its modules.
    """
    fusion = setting.engine.shared.fusion
    if (
        fusion is None
        or not setting.on.issuperset(fusion)
        or setting.deployment.shared_experts == "separate"
        or reader.refusal
    ):
        return {}
    readings: dict[str, list[Reading]] = {}
    for name, reading in _readings(survey, modules, reader):
        readings.setdefault(name, []).append(reading)
    apart = {}
    for name, parts in readings.items():
        bank = f"{name[: name.rfind('shared_')]}experts"
        if bank in modules.banks:
            kept = _apart(parts, reader.bank(bank))
            if kept is not None:
                apart[name] = kept
    return apart


def _readings(
    survey: Survey, modules: Modules, reader: ConfigReader
) -> Iterator[tuple[str, Reading]]:
    """Every module of a shared expert as the engine reads it: (the shared expert, reading)."""
    for group in modules.groups.values():
        found = _BLOCK.search(group.name)
        if found is not None:
            yield group.name[: found.end()], reader.fused(group.name, group.parts)
    single = [name for name, _ in modules.single]
    single += [
        item.layer.name
        for item in survey.layers
        if item.role.parallel != "expert" and item.layer.name not in modules.group_of
    ]
    for name in single:
        found = _BLOCK.search(name)
        if found is not None:
            yield name[: found.end()], reader.linear(name)


def _apart(parts: list[Reading], bank: Reading) -> Apart | None:
    """What keeps a shared expert apart; None where it is fused."""
    refusal = next((part.refusal for part in parts if part.refusal), "")
    if refusal:
        return Apart(refusal, "")
    if any(part.excluded for part in parts):
        return Apart("", "the config excludes them")
    specs = {reading.spec.text for reading in (*parts, bank) if reading.spec is not None}
    if len(specs) > 1:
        return Apart("", "the config quantizes them otherwise than the routed experts")
    return None
