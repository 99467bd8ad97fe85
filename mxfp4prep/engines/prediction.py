"""The question of `audit --engine`: what does this engine do with the original checkpoint?

The answer is for gfx950 with 256 compute units (MI350X, MI355X), from tables of facts about each
engine's source. What the tables do not say is "unknown", and what is taken for granted is listed.
"""

from __future__ import annotations

from collections.abc import Mapping

from mxfp4prep.collector import collector_paused
from mxfp4prep.decisions import Decisions, decide
from mxfp4prep.engines.fusion import kept_apart
from mxfp4prep.engines.judge import judge
from mxfp4prep.engines.modules import Modules, modules_of
from mxfp4prep.engines.outcomes import Outcome, Prediction
from mxfp4prep.engines.padding import padding_nbytes
from mxfp4prep.engines.remarks import findings_of
from mxfp4prep.engines.rules import Engine
from mxfp4prep.engines.setting import Setting
from mxfp4prep.engines.specs import ConfigReader
from mxfp4prep.engines.switches import assumed
from mxfp4prep.engines.tables import engine_named
from mxfp4prep.engines.tuned import COMPUTE_UNITS, GFX, Tuned
from mxfp4prep.survey import Survey

_NO_SWITCHES: Mapping[str, str] = {}


@collector_paused()
def predict(
    engine: str,
    survey: Survey,
    *,
    switches: Mapping[str, str] = _NO_SWITCHES,
    tuned: Tuned | None = None,
    decisions: Decisions | None = None,
) -> Prediction:
    """What `engine` does with every MXFP4 layer of `survey`'s checkpoint, at every degree.

    switches   those that are not at their defaults
    tuned      AITER's tuned tables, None where they are not known
    decisions  what `decide` says of the survey, where the caller knows it

    Raises UsageError for an engine or a switch that does not exist.
    """
    table = engine_named(engine)
    values = assumed(table, switches)
    if table.own:
        return _own(table, decide(survey) if decisions is None else decisions)
    config = survey.checkpoint.config
    model_type = str(config.get("model_type", ""))
    setting = Setting(
        engine=table,
        on=frozenset(name for name, value in values.items() if value == "1"),
        tuned=tuned,
        topology=survey.topology,
        deployment=survey.deployment,
    )
    reader = ConfigReader(table, config["quantization_config"], model_type, setting.family)
    modules = modules_of(survey, reader.fused_names)
    apart = kept_apart(setting, survey, modules, reader)
    outcomes = judge(setting, survey, modules, reader, apart)
    return Prediction(
        engine=table,
        switches=values,
        assumptions=tuple(_assumptions(setting, survey, modules, model_type)),
        outcomes=outcomes,
        findings=findings_of(table, survey, modules, reader, apart, outcomes),
        padding=padding_nbytes(table.experts, survey, outcomes),
    )


def _own(engine: Engine, decisions: Decisions) -> Prediction:
    """mxfp4prep's own runtime: the path that the checkpoint is prepared for."""
    known: dict[int, Mapping[int, Outcome]] = {}
    outcomes: dict[str, Mapping[int, Outcome]] = {}
    for name, verdicts in decisions.items():
        made = known.get(id(verdicts))
        if made is None:
            made = known[id(verdicts)] = {
                tp: Outcome("crash", None, f"refused: {verdict.detail or verdict.reasons[0]}")
                if verdict.path == "impossible"
                else Outcome("ok", verdict.path)
                for tp, verdict in verdicts.items()
            }
        outcomes[name] = made
    assumptions = ("the checkpoint is prepared first, for the degrees asked about",)
    return Prediction(engine, {}, assumptions, outcomes, ())


def _assumptions(setting: Setting, survey: Survey, modules: Modules, model_type: str) -> list[str]:
    engine, tuned = setting.engine, setting.tuned
    made = [f"{GFX}, {COMPUTE_UNITS} compute units (MI350X or MI355X, not partitioned)"]
    probes = engine.dense.asm == "tuned" or engine.dense.small_m_triton
    if probes and setting.on.issuperset(engine.dense.needs):
        made.append(
            "AITER's tuned tables are not known: give them with --aiter-configs"
            if tuned is None
            else f"AITER's tuned tables are those of {tuned.origin}"
        )
    elif tuned is not None:
        made.append(f"AITER's tuned tables are those of {tuned.origin}")
    made += [
        f"{switch.name} on, as it is meant to be on an MI350: the engine's own default is off, "
        f"which --switch {switch.name}=0 asks about"
        for switch in engine.switches
        if switch.usual and not switch.on and switch.name in setting.on
    ]
    off = [name for name in _wanted(engine) if name not in setting.on]
    if off:
        made.append(f"{', '.join(off)} off, as by default: set with --switch NAME=1 if yours is on")
    family = setting.family
    if engine.read and family not in engine.read:
        read = ", ".join(sorted(engine.read))
        alike = f"{family or 'a model of no type'} is taken to be built alike"
        made.append(
            f"{engine.label}'s model files were read for {read}: {engine.unread.get(family, alike)}"
        )
    renames = engine.names.renames.get(model_type)
    if renames:
        arrows = ", ".join(f"{old} is {new}" for old, new in renames)
        made.append(f"the engine renames modules of {model_type}: {arrows}")
    else:
        made.append("the engine's modules have the names they have on disk")
    if survey.shared and engine.shared.fusion is None:
        made.append(f"not known when {engine.label} fuses shared experts (--shared-experts says)")
    if modules.unknown:
        made.append(
            f"{modules.unknown} unquantized matrices with names that no rule knows (towers, "
            "convolutions and the like) are not held against the excludes"
        )
    return made


def _wanted(engine: Engine) -> list[str]:
    """Switches that AITER's faster paths need, each once."""
    return list(dict.fromkeys([*engine.dense.needs, *engine.experts.needs]))
