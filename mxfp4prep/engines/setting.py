"""The setting in which an engine is asked about a checkpoint: all that its rules depend on."""

from __future__ import annotations

from dataclasses import dataclass

from mxfp4prep.architectures import Topology, family_of
from mxfp4prep.deployment import Deployment
from mxfp4prep.engines.rules import Engine
from mxfp4prep.engines.tuned import Tuned


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine with its switches, on gfx950, before a model of this topology.

    on      switches that are on
    tuned   AITER's tuned tables, None where they are not known
    """

    engine: Engine
    on: frozenset[str]
    tuned: Tuned | None
    topology: Topology
    deployment: Deployment

    @property
    def family(self) -> str:
        """The model's family, as the engine's rules name it."""
        return family_of(self.topology.model_type)
