"""The switches of an engine as a user gives them: NAME=VALUE, on or off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mxfp4prep.engines.rules import Engine
from mxfp4prep.engines.tables import engine_named
from mxfp4prep.errors import UsageError

_VALUES = {"1": "1", "true": "1", "on": "1", "yes": "1"}
_VALUES |= {"0": "0", "false": "0", "off": "0", "no": "0"}


def parse_switches(engine: str | Engine, given: Iterable[str]) -> Mapping[str, str]:
    """Switch -> "0" or "1" for every NAME=VALUE in `given`.

    Raises UsageError for an engine that is not in the tables, a switch that it does not have, a
    value that is neither on nor off, or a switch given twice with two values.
    """
    table = engine_named(engine) if isinstance(engine, str) else engine
    names = [switch.name for switch in table.switches]
    parsed: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        where = f"--switch {text}"
        if name not in names:
            known = f"it has {', '.join(names)}" if names else "it has none"
            raise UsageError(where, f"{table.name} has no such switch", hint=known)
        word = _VALUES.get(value.lower())
        if word is None:
            raise UsageError(
                where,
                "neither on nor off",
                found=value or "no value",
                expected=f"{name}=1 or {name}=0",
            )
        if parsed.setdefault(name, word) != word:
            raise UsageError(where, "given twice, with two values")
    return parsed


def assumed(engine: Engine, given: Mapping[str, str]) -> dict[str, str]:
    """Every switch of `engine`: as `given`, else as usual. Raises as `parse_switches`."""
    parsed = parse_switches(engine, (f"{name}={value}" for name, value in given.items()))
    return {s.name: parsed.get(s.name, "1" if s.taken else "0") for s in engine.switches}
