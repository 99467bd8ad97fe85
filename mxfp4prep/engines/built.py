"""What an engine builds for a module, whatever the degree: packed, unquantized, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from mxfp4prep.engines.modules import Module
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.rules import Engine, Kind, SchemeWord
from mxfp4prep.engines.specs import Reading
from mxfp4prep.survey import LayerSurvey

QUANTIZER_SCALE = ".weight_quantizer.scale"
"""How Quark 0.11 names scales; see rules.Engine.scale_names."""


def built(
    engine: Engine, parts: Sequence[LayerSurvey], reading: Reading, kind: Kind
) -> Outcome | SchemeWord:
    """The scheme by which the engine builds the module of `parts`, or what settles its outcome."""
    layer = parts[0].layer
    roles = [item.role for item in parts]
    packed = f"the packed weight of {layer.n} x {layer.k // 2} does not fit"
    if any(role.part == "vocab" for role in roles):
        return _crash(f"{engine.label} builds heads and embeddings unquantized: {packed}")
    if any(role.parallel == "replicated" and not role.part for role in roles):
        return _unknown("most models build routers and the like unquantized: not known here")
    if not all(item.layer.is_matrix for item in parts):
        return _unknown("the weight is neither a matrix nor a bank of matrices")
    if reading.excluded:
        return _crash(_excluded(engine.label, kind, layer.n, layer.k))
    if reading.refusal:
        return _crash(reading.refusal)
    spec = reading.spec
    if spec is None:
        return _unknown("parts of one projection differ: not known what is built")
    if engine.outputs and spec.outputs:
        return _crash("NotImplementedError: quantized output_tensors or bias")
    if spec.word is None:
        return _crash(f"{engine.label} builds it as {spec.scheme.name}: {packed}")
    if spec.word == "w4a8 static" and spec.uneven and engine.symmetric:
        return _crash(f"{engine.no_scheme[kind]} (static FP8 input, not symmetric)")
    if any(item.layer.scale.name.endswith(QUANTIZER_SCALE) for item in parts):
        outcome, message = engine.scale_names
        return Outcome(outcome, None, message)
    return spec.word


def mixed(engine: Engine, module: Module, reading: Reading) -> Outcome:
    """The outcome of a fused projection of which only some parts are MXFP4."""
    if reading.refusal:
        return _crash(reading.refusal)
    name, dtype = module.others[0]
    leaf = name.rpartition(".")[2]
    if engine.names.mixed == "unknown":
        return _unknown(f"{leaf} is stored as {dtype}: not known what is built")
    if reading.excluded:
        return _crash(f"{engine.label} builds the projection unquantized, but parts are packed")
    return _crash(f"{engine.label} builds the projection packed: {leaf}, {dtype}, does not fit")


def _excluded(label: str, kind: Kind, n: int, k: int) -> str:
    if kind == "expert":
        return (
            f"{label} sees the bank as excluded and builds it unquantized: no parameter "
            "w13_weight_scale or w2_weight_scale for the stored scales"
        )
    return (
        f"{label} sees it as excluded and builds {n} x {k} unquantized: the packed weight of "
        f"{n} x {k // 2} does not fit"
    )


def _crash(message: str) -> Outcome:
    return Outcome("crash", None, message)


def _unknown(message: str) -> Outcome:
    return Outcome("unknown", None, message)
