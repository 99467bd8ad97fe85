"""The document of a comparison: `mxfp4prep diff --format json`."""

from __future__ import annotations

# pydantic takes typing's own TypedDict from Python 3.12 on only
from typing_extensions import TypedDict

from mxfp4prep.report.contract.audit import (
    CostDocument,
    EngineVerdictDocument,
    SharedExpertDocument,
)
from mxfp4prep.report.contract.parts import (
    EngineOutcome,
    FindingDocument,
    Kind,
    Path,
    PathsDocument,
    Placement,
    SchemaVersion,
    Scheme,
)

Fact = str | bool | int | list[int] | None


class DiffSideDocument(TypedDict):
    """One of the two audits."""

    name: str
    tp: list[int]
    engine: str | None
    layers: int
    mxfp4_nbytes: int


class DiffFactDocument(TypedDict):
    """One fact that is not the same in both."""

    fact: str
    a: Fact
    b: Fact


class DiffRenameDocument(TypedDict):
    """Modules that are compared as the same: `a` in A and `b` in B, and the same rest."""

    a: str
    b: str
    modules: int


class DiffLayersDocument(TypedDict):
    """Layers that are MXFP4 in one audit only. `name` stands for all of `names`.

    other: the dtype that the module has in the other audit, "absent" where it has none there, null
    where that audit does not list what is not MXFP4.
    """

    name: str
    layers: int
    names: list[str]
    kind: Kind
    scheme: Scheme
    n: int
    k: int
    experts: int | None
    other: str | None


class DiffVerdictDocument(TypedDict):
    """A layer at one degree. `path` counts its fused group in, the rest is about its own tensor.

    engine is null where the two audits did not ask about the same engine.
    """

    path: Path
    own_path: Path
    scale_shard: list[int] | None
    reasons: list[str]
    hazards: list[str]
    placement: Placement
    engine: EngineVerdictDocument | None


class DiffVerdictsDocument(TypedDict):
    """The two verdicts at one degree."""

    a: DiffVerdictDocument
    b: DiffVerdictDocument


class DiffChangeDocument(TypedDict):
    """Layers that are MXFP4 in both audits and changed alike. `name` stands for all of `names`.

    Names are A's. facts do not depend on a degree; verdict holds the degrees that differ.
    """

    name: str
    layers: int
    names: list[str]
    facts: list[DiffFactDocument]
    verdict: dict[str, DiffVerdictsDocument]


class DiffOtherDocument(TypedDict):
    """Modules that are MXFP4 in neither audit, with their dtypes; null where there is no weight."""

    name: str
    modules: int
    names: list[str]
    a: str | None
    b: str | None


class DiffGroupDocument(TypedDict):
    """Fused projections of both audits that changed alike: their parts, or whether they are mixed.

    `path.N` is the fact that the verdict at degree N changed.
    """

    name: str
    groups: int
    names: list[str]
    facts: list[DiffFactDocument]


class DiffSharedExpertDocument(TypedDict):
    """What happens to shared experts, null where an audit has none of that name."""

    name: str
    a: SharedExpertDocument | None
    b: SharedExpertDocument | None


class DiffPathsDocument(TypedDict):
    """Layers and bytes per path at one degree."""

    a: PathsDocument
    b: PathsDocument


class DiffCostDocument(TypedDict):
    """The cost of one degree."""

    a: CostDocument
    b: CostDocument


class DiffOutcomesDocument(TypedDict):
    """How many layers end how on the engine at one degree."""

    a: dict[EngineOutcome, int]
    b: dict[EngineOutcome, int]


class DiffDocument(TypedDict):
    """`mxfp4prep diff --format json`: what differs between two audits, at the degrees of both.

    asked: how the two audits were made, where that differs; skipped: what could not be compared.
    Neither makes the audits different. All that follows does; it is empty where `same` is true.
    """

    schema_version: SchemaVersion
    same: bool
    a: DiffSideDocument
    b: DiffSideDocument
    tp: list[int]
    asked: list[DiffFactDocument]
    skipped: list[str]
    source: list[DiffFactDocument]
    renames: list[DiffRenameDocument]
    only_a: list[DiffLayersDocument]
    only_b: list[DiffLayersDocument]
    changed: list[DiffChangeDocument]
    others: list[DiffOtherDocument]
    groups: list[DiffGroupDocument]
    shared_experts: list[DiffSharedExpertDocument]
    findings_a: list[FindingDocument]
    findings_b: list[FindingDocument]
    summary: list[DiffFactDocument]
    paths: dict[str, DiffPathsDocument]
    cost: dict[str, DiffCostDocument]
    engine: dict[str, DiffOutcomesDocument]
    values: list[DiffFactDocument]
