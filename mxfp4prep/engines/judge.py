"""The outcome of every MXFP4 layer of a checkpoint with one engine, at every degree.

Work is done once per kind of layer, not once per layer: a model has tens of thousands of layers
and some dozens of kinds. Layers that fare alike share one mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mxfp4prep.engines.built import QUANTIZER_SCALE, built, mixed
from mxfp4prep.engines.experts import run_expert
from mxfp4prep.engines.fusion import Apart
from mxfp4prep.engines.linears import run_linear
from mxfp4prep.engines.modules import Module, Modules, bank_of
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.rules import SchemeWord
from mxfp4prep.engines.setting import Setting
from mxfp4prep.engines.shared import run_shared
from mxfp4prep.engines.specs import ConfigReader, Reading
from mxfp4prep.shared_experts import SharedBlock
from mxfp4prep.survey import LayerSurvey, Survey

Outcomes = Mapping[int, Outcome]
_AtDegree = Callable[[int], Outcome]


def judge(
    setting: Setting,
    survey: Survey,
    modules: Modules,
    reader: ConfigReader,
    apart: Mapping[str, Apart],
) -> dict[str, Outcomes]:
    """Layer name -> tp -> outcome, in the survey's order.

    apart   shared experts, by module name, that the engine does not fuse although it is asked to
    """
    return _Judge(setting, survey, modules, reader, apart).judge()


class _Judge:
    """One engine's rules, ready for the layers of one survey."""

    def __init__(
        self,
        setting: Setting,
        survey: Survey,
        modules: Modules,
        reader: ConfigReader,
        apart: Mapping[str, Apart],
    ) -> None:
        self._setting = setting
        self._survey = survey
        self._modules = modules
        self._reader = reader
        self._blocks: dict[str, SharedBlock] = {}
        self._refused: dict[str, str] = {}
        for item in survey.shared:
            block = item.block
            if block.name in apart:
                block = replace(block, fusable=False)
                self._refused |= dict.fromkeys(block.members, apart[block.name].refusal)
            self._blocks |= dict.fromkeys(block.members, block)
        self._known: dict[tuple[object, ...], Outcomes] = {}
        self._equal: dict[tuple[tuple[int, Outcome], ...], Outcomes] = {}
        self._stopped = _stopped(setting, survey)

    def judge(self) -> dict[str, Outcomes]:
        if self._reader.refusal:
            refused = Outcome("crash", None, self._reader.refusal)
            stop = dict.fromkeys(self._survey.tp, refused)
            return {item.layer.name: stop for item in self._survey.layers}
        groups = {
            name: self._group(module)
            for name, module in self._modules.groups.items()
            if module.layers
        }
        group_of = self._modules.group_of
        banks = {name: self._reader.bank(name) for name in self._modules.banks}
        made: dict[str, Outcomes] = {}
        for item in self._survey.layers:
            name = item.layer.name
            if item.role.parallel == "expert":
                made[name] = self._expert(item, banks[bank_of(name) or name])
            else:
                group = group_of.get(name)
                made[name] = self._single(item) if group is None else groups[group]
        return made

    def _expert(self, item: LayerSurvey, reading: Reading) -> Outcomes:
        layer = item.layer
        key = (
            reading,
            item.role.part,
            layer.n,
            layer.k,
            layer.experts is None,
            layer.is_matrix,
            layer.scale.name.endswith(QUANTIZER_SCALE),
            id(item.placements),
        )
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = self._settle(self._expert_at(item, reading))
        return made

    def _single(self, item: LayerSurvey) -> Outcomes:
        reading = self._reader.linear(item.layer.name)
        key = (reading, self._signature(item))
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = self._settle(self._linear_at([item], reading))
        return made

    def _group(self, module: Module) -> Outcomes:
        reading = self._reader.fused(module.name, module.parts)
        others = tuple((name.rpartition(".")[2], dtype) for name, dtype in module.others)
        key = (reading, others, *(self._signature(item) for item in module.layers))
        made = self._known.get(key)
        if made is None:
            unsettled = self._reader.unsettled(module.name)
            if unsettled:
                made = self._settle(_always(Outcome("unknown", None, unsettled)))
            elif module.others:
                outcome = mixed(self._setting.engine, module, reading)
                made = self._settle(_always(outcome))
            elif len({item.layer.k for item in module.layers}) > 1:
                odd = Outcome("unknown", None, "parts of one projection have different inputs")
                made = self._settle(_always(odd))
            else:
                made = self._settle(self._linear_at(module.layers, reading))
            self._known[key] = made
        return made

    def _signature(self, item: LayerSurvey) -> tuple[object, ...]:
        """All that a linear's outcome depends on, but for what the config says."""
        layer = item.layer
        block = self._blocks.get(layer.name)
        return (
            item.role.parallel,
            item.role.part,
            item.cut,
            layer.n,
            layer.k,
            layer.is_matrix,
            layer.scale.name.endswith(QUANTIZER_SCALE),
            None if block is None else (block.width, block.fusable, block.slots),
            self._refused.get(layer.name),
        )

    def _settle(self, outcome: _AtDegree) -> Outcomes:
        """The outcome at every degree; equal mappings are one mapping."""
        made = {tp: self._stopped.get(tp) or outcome(tp) for tp in self._survey.tp}
        return self._equal.setdefault(tuple(made.items()), made)

    def _expert_at(self, item: LayerSurvey, reading: Reading) -> _AtDegree:
        word = built(self._setting.engine, [item], reading, "expert")
        if isinstance(word, Outcome):
            return _always(word)
        layer, part = item.layer, item.role.part
        if layer.experts is not None:
            message = "experts stored in one 3-D tensor: not known how they are loaded"
            return _always(Outcome("unknown", None, message))
        down = part == "down"
        width = layer.k if down else layer.n // (2 if part == "gate_up" else 1)
        hidden = layer.n if down else layer.k
        return lambda tp: self._expert_on(item, word, width, hidden, tp)

    def _expert_on(
        self, item: LayerSurvey, word: SchemeWord, width: int, hidden: int, tp: int
    ) -> Outcome:
        whole = item.placements[tp] == "distributed"
        return run_expert(
            self._setting,
            word,
            part=item.role.part,
            width=width,
            hidden=hidden,
            ranks=1 if whole else tp,
            spread=tp if whole else 1,
        )

    def _linear_at(self, parts: list[LayerSurvey], reading: Reading) -> _AtDegree:
        word = built(self._setting.engine, parts, reading, "linear")
        if isinstance(word, Outcome):
            return _always(word)
        block: SharedBlock | None = self._blocks.get(parts[0].layer.name)
        if block is None:
            return lambda tp: run_linear(self._setting, parts, word, tp)
        refused = self._refused.get(parts[0].layer.name)
        if refused:
            return _always(Outcome("crash", None, refused))
        return lambda tp: run_shared(self._setting, parts, block, word, tp)


def _always(outcome: Outcome) -> _AtDegree:
    return lambda _: outcome


def _stopped(setting: Setting, survey: Survey) -> dict[int, Outcome]:
    """The degrees at which the engine does not take the model at all."""
    heads, error = survey.topology.heads, setting.engine.heads
    if not error or not heads:
        return {}
    return {
        tp: Outcome("crash", None, error.format(heads=heads, tp=tp))
        for tp in survey.tp
        if heads % tp
    }
