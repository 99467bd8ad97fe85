"""What changed about layers and fused projections that both audits have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mxfp4prep.comparison.alike import gather_alike

if TYPE_CHECKING:
    from mxfp4prep.comparison.renames import Renames
    from mxfp4prep.report import contract as c

_FACTS = ("kind", "parallel", "scheme", "n", "k", "experts")
_SHAPE = frozenset({"n", "k", "experts"})
_ACTIVATION = ("dtype", "scale_mode", "static")

Fact = tuple[str, "c.Fact", "c.Fact"]


class _State(NamedTuple):
    """A layer at one degree, comparable."""

    path: c.Path
    own_path: c.Path
    scale_shard: tuple[int, ...] | None
    reasons: tuple[str, ...]
    hazards: tuple[str, ...]
    placement: c.Placement
    engine: tuple[c.EngineOutcome, str | None] | None


class _Change(NamedTuple):
    """What changed about one layer: facts, and (degree, A's state, B's state)."""

    facts: tuple[Fact, ...]
    states: tuple[tuple[str, _State, _State], ...]


def changed_layers(
    pairs: Iterable[tuple[c.LayerDocument, c.LayerDocument]],
    tp: Sequence[int],
    renames: Renames,
    *,
    engines: bool,
) -> list[c.DiffChangeDocument]:
    """Layers of (A's, B's) that are not the same, those that changed alike together.

    tp        the degrees that both audits have
    engines   both audits asked about the same engine
    """
    degrees = [str(degree) for degree in tp]
    firsts: dict[str, tuple[c.LayerDocument, c.LayerDocument]] = {}

    def changes() -> Iterator[tuple[str, _Change]]:
        for a, b in pairs:
            if a == b:
                continue
            facts = _facts(a, b, renames)
            reshaped = any(fact in _SHAPE for fact, _, _ in facts)
            states = tuple(_states(a, b, degrees, reshaped, engines))
            if facts or states:
                firsts[a["name"]] = a, b
                yield a["name"], _Change(tuple(facts), states)

    found: list[c.DiffChangeDocument] = []
    for alike in gather_alike(changes()):
        a, b = firsts[alike.names[0]]
        found.append(
            {
                "name": alike.name,
                "layers": len(alike.names),
                "names": alike.names,
                "facts": [{"fact": fact, "a": x, "b": y} for fact, x, y in alike.key.facts],
                "verdict": {
                    degree: {"a": _verdict(x, a, degree), "b": _verdict(y, b, degree)}
                    for degree, x, y in alike.key.states
                },
            }
        )
    return found


def _facts(a: c.LayerDocument, b: c.LayerDocument, renames: Renames) -> list[Fact]:
    """What differs whatever the degree."""
    facts: list[Fact] = []
    for key in _FACTS:
        if a[key] != b[key]:  # type: ignore[literal-required]
            facts.append((key, a[key], b[key]))  # type: ignore[literal-required]
    if not _SHAPE.intersection(fact for fact, _, _ in facts) and a["nbytes"] != b["nbytes"]:
        facts.append(("nbytes", a["nbytes"], b["nbytes"]))
    for key in _ACTIVATION:
        x, y = a["activation"][key], b["activation"][key]  # type: ignore[literal-required]
        if x != y:
            facts.append((f"activation.{key}", x, y))
    if a["group"] != b["group"]:
        x, y = _group_beside(a), _group_beside(b)
        moved = None if a["group"] is None else renames.text(a["group"])
        if x != y and moved != b["group"]:
            facts.append(("group", x, y))
    return facts


def _group_beside(layer: c.LayerDocument) -> str | None:
    """The layer's fused projection; without its parent where that is the layer's own, so that
    like-built layers say the same."""
    group = layer["group"]
    if group is None:
        return None
    parent, _, leaf = group.rpartition(".")
    return leaf if parent == layer["name"].rpartition(".")[0] else group


def _states(
    a: c.LayerDocument, b: c.LayerDocument, degrees: Sequence[str], reshaped: bool, engines: bool
) -> Iterator[tuple[str, _State, _State]]:
    """The degrees at which the verdicts differ.

    Other scale shards alone are no change where the shape is another already.
    """
    for degree in degrees:
        x, y = _state(a, degree, engines), _state(b, degree, engines)
        if x != y and not (reshaped and x._replace(scale_shard=y.scale_shard) == y):
            yield degree, x, y


def _state(layer: c.LayerDocument, degree: str, engines: bool) -> _State:
    verdict = layer["verdict"][degree]
    shard = verdict["scale_shard"]
    engine = None
    if engines:
        made = layer["engine"][degree]
        engine = made["outcome"], made["path"]
    return _State(
        layer["decided"][degree],
        verdict["path"],
        None if shard is None else tuple(shard),
        tuple(verdict["reasons"]),
        tuple(verdict["hazards"]),
        layer["placement"][degree] if "placement" in layer else "sliced",
        engine,
    )


def _verdict(state: _State, layer: c.LayerDocument, degree: str) -> c.DiffVerdictDocument:
    return {
        "path": state.path,
        "own_path": state.own_path,
        "scale_shard": None if state.scale_shard is None else list(state.scale_shard),
        "reasons": list(state.reasons),
        "hazards": list(state.hazards),
        "placement": state.placement,
        "engine": None if state.engine is None else layer["engine"][degree],
    }


def changed_groups(
    pairs: Iterable[tuple[c.GroupDocument, c.GroupDocument]], tp: Sequence[int]
) -> list[c.DiffGroupDocument]:
    """Fused projections of (A's, B's) with other parts, another path, or mixed in one only."""

    def changes() -> Iterator[tuple[str, tuple[Fact, ...]]]:
        for a, b in pairs:
            facts: list[Fact] = []
            parts = _parts(a), _parts(b)
            if parts[0] != parts[1]:
                facts.append(("members", *parts))
            if a["mixed"] != b["mixed"]:
                facts.append(("mixed", a["mixed"], b["mixed"]))
            for degree in map(str, tp):
                x, y = a["verdict"][degree]["path"], b["verdict"][degree]["path"]
                if x != y:
                    facts.append((f"path.{degree}", x, y))
            if facts:
                yield a["name"], tuple(facts)

    return [
        {
            "name": alike.name,
            "groups": len(alike.names),
            "names": alike.names,
            "facts": [{"fact": fact, "a": x, "b": y} for fact, x, y in alike.key],
        }
        for alike in gather_alike(changes())
    ]


def _parts(group: c.GroupDocument) -> str:
    return " + ".join(member.rpartition(".")[2] for member in group["members"])
