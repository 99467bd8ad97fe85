"""What an engine will get wrong about the checkpoint as a whole: one finding per kind.

Names first (entries of `exclude` that it does not understand, modules that it builds otherwise than
they are stored, projections that it refuses), then how many layers do not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mxfp4prep.engines.fusion import Apart
from mxfp4prep.engines.modules import UNQUANTIZED, Module, Modules, is_draft
from mxfp4prep.engines.outcomes import Outcome
from mxfp4prep.engines.rules import Engine
from mxfp4prep.engines.specs import ConfigReader, Reading
from mxfp4prep.findings import Finding, Severity
from mxfp4prep.quark.binding import bind
from mxfp4prep.quark.patterns import parse_patterns
from mxfp4prep.quark.remarks import places_text
from mxfp4prep.survey import Survey

_EXCLUDE = "quantization_config.exclude"
_BUILT = "and their unquantized tensors do not fit"


def findings_of(
    engine: Engine,
    survey: Survey,
    modules: Modules,
    reader: ConfigReader,
    apart: Mapping[str, Apart],
    outcomes: Mapping[str, Mapping[int, Outcome]],
) -> tuple[Finding, ...]:
    """The findings about the whole checkpoint; `outcomes` as judged.

    apart   shared experts, by module name, that the engine does not fuse although it is asked to
    """
    found: list[Finding] = []
    if not reader.refusal:
        stray = list(_stray(modules, reader))
        found += _names(engine, survey, reader, stray)
        found += _mixed(engine, modules, reader)
        found += _shared_apart(engine, apart)
    found += _totals(engine, survey, outcomes)
    return tuple(found)


def _stray(modules: Modules, reader: ConfigReader) -> Iterator[str]:
    """Modules stored unquantized that the engine builds quantized, by their names on disk."""
    for name, dtype in modules.single:
        if dtype in UNQUANTIZED and _quantizes(reader.linear(name)):
            yield name
    for group in modules.groups.values():
        if reader.unsettled(group.name):
            continue
        plain = [name for name, dtype in group.others if dtype in UNQUANTIZED]
        if plain and _quantizes(reader.fused(group.name, group.parts)):
            yield from plain
    for bank in modules.banks.values():
        plain = [name for name, dtype in bank.others if dtype in UNQUANTIZED]
        if plain and _quantizes(reader.bank(bank.name)):
            yield from plain


def _quantizes(reading: Reading) -> bool:
    return reading.spec is not None and reading.spec.scheme.weight_dtype is not None


def _names(
    engine: Engine, survey: Survey, reader: ConfigReader, stray: Sequence[str]
) -> Iterator[Finding]:
    label = engine.label
    doubt = engine.names.doubtful.get(str(survey.checkpoint.config.get("model_type")))
    if doubt is not None:
        message = f"nothing is known of how {label} reads the names of this model: {doubt}"
        yield Finding("engine_names_unknown", "warning", _EXCLUDE, message)
    labels = survey.classified.labels
    unread = {
        use.text: use.kind
        for use in survey.classified.patterns.get("exclude", ())
        if use.modules and use.text not in reader.matched
    }
    patterns = parse_patterns(list(unread), "exclude")
    covering = bind(patterns, list(stray), parents=True)
    useful = dict.fromkeys(
        use.text for use in covering.uses if use.modules and use.reading != "ambiguous"
    )
    if useful:
        entries = places_text([f"{text!r} ({unread.get(text, 'exact')})" for text in useful])
        covered = [name for name in stray if name in covering.hits or name in covering.below]
        yield Finding(
            "engine_exclude_unmatched",
            "error",
            _EXCLUDE,
            f"{label} does not match exclude entries that Quark does: {entries}. It builds what "
            f"they name quantized, {_BUILT}: {places_text(covered)}",
        )
    left = [name for name in stray if name not in covering.hits and name not in covering.below]
    main = [name for name in left if not is_draft(name, labels)]
    draft = [name for name in left if is_draft(name, labels)]
    if main:
        yield Finding(
            "engine_builds_quantized",
            "error",
            main[0],
            f"the config does not exclude what is stored unquantized: {label} builds it quantized, "
            f"{_BUILT}: {places_text(main)}",
        )
    if draft:
        yield Finding(
            "engine_builds_draft_quantized",
            "warning",
            draft[0],
            "the config does not exclude draft (multi-token prediction) layers that are stored "
            f"unquantized: with speculative decoding, {label} builds them quantized, {_BUILT}: "
            f"{places_text(draft)}",
        )


def _mixed(engine: Engine, modules: Modules, reader: ConfigReader) -> Iterator[Finding]:
    """Fused projections that the engine refuses, or of which nobody knows what it makes."""
    refused: list[Module] = []
    unknown: list[Module] = []
    reason = ""
    for group in modules.groups.values():
        if len(group.parts) < 2 or reader.unsettled(group.name):
            continue
        reading = reader.fused(group.name, group.parts)
        if reading.refusal:
            reason = reason or reading.refusal
            refused.append(group)
        elif reading.spec is None and not reading.excluded:
            unknown.append(group)
    if refused:
        yield Finding(
            "engine_mixed_group",
            "error",
            refused[0].name,
            f"{engine.label} refuses fused projections whose parts differ, {reason} "
            f"({places_text([group.name for group in refused])})",
        )
    if unknown:
        yield Finding(
            "engine_mixed_group",
            "warning",
            unknown[0].name,
            f"parts of fused projections differ: not known what {engine.label} makes of them "
            f"({places_text([group.name for group in unknown])})",
        )


def _shared_apart(engine: Engine, apart: Mapping[str, Apart]) -> Iterator[Finding]:
    """Shared experts that stay apart although a switch asks for their fusion, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, kept in apart.items():
        if not kept.refusal:
            reasons.setdefault(kept.why, []).append(name)
    for why, names in reasons.items():
        yield Finding(
            "engine_shared_apart",
            "warning",
            names[0],
            f"{engine.label} is asked to fuse shared experts into the routed ones and keeps some "
            f"apart, with a warning in its log: {why} ({places_text(names)})",
        )


_TOTALS: tuple[tuple[str, str, Severity, str], ...] = (
    ("crash", "engine_crash", "error", "stops with an error"),
    ("corrupt", "engine_corrupt", "error", "loads without an error and computes wrongly"),
    ("unknown", "engine_unknown", "note", "is not known to run or to fail"),
)


def _totals(
    engine: Engine, survey: Survey, outcomes: Mapping[str, Mapping[int, Outcome]]
) -> Iterator[Finding]:
    """How many layers crash, are corrupt or unknown at which degrees, and the first of each."""
    counts: dict[int, int] = {}
    first: dict[int, tuple[str, Mapping[int, Outcome]]] = {}
    for name, made in outcomes.items():
        key = id(made)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, (name, made))
    for word, code, severity, says in _TOTALS:
        layers = {
            tp: sum(counts[key] for key, (_, made) in first.items() if made[tp].outcome == word)
            for tp in survey.tp
        }
        degrees = [tp for tp, count in layers.items() if count]
        if not degrees:
            continue
        where, message = next(
            (name, made[tp].message)
            for tp in degrees
            for name, made in first.values()
            if made[tp].outcome == word
        )
        per_degree = ", ".join(f"tp {tp} ({_layers(layers[tp])})" for tp in degrees)
        yield Finding(
            code, severity, where, f"{engine.label} {says} at {per_degree}; {where}: {message}"
        )


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count != 1 else ''}"
