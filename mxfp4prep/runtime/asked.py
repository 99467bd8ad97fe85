"""What experts are asked for by name, checked before anything is looked up or read."""

from __future__ import annotations

from typing import NamedTuple

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.gating import GATE_UP_ORDERS, check_names, checked_limit
from mxfp4prep.runtime.shared_parts import FUSIONS


class Asked(NamedTuple):
    """The experts below `prefix`, and how they are to be; None for what config.json says.

    shared   module of the shared expert, "auto" for the one beside the prefix, None for none
    fusion   a name of FUSIONS: what to do with it
    """

    prefix: str
    activation: str | None = None
    limit: float | None = None
    shared: str | None = None
    fusion: str = "auto"

    @classmethod
    def make(
        cls, prefix: object, activation: object, limit: object, shared: object, fusion: object
    ) -> Asked:
        """The question. Raises UsageError for what can be no answer's name."""
        where = _text("experts: prefix", prefix)
        if activation is not None:
            activation = _text("experts: activation", activation)
            check_names(where, activation, GATE_UP_ORDERS[0])
        number = checked_limit(f"{where}: limit", limit)
        shared = None if shared is None else _text("experts: shared", shared)
        if fusion not in FUSIONS:
            raise UsageError(
                "fusion",
                "unknown",
                found=repr(fusion),
                expected=" or ".join(FUSIONS),
                hint="fusion='auto' is the default",
            )
        if fusion == "fused" and shared is None:
            raise UsageError(
                "fusion",
                "'fused', but there is no shared expert to fuse",
                found="shared=None",
                expected="a shared expert",
                hint="add shared='auto', or leave fusion out",
            )
        return cls(where, activation, number, shared, str(fusion))


def _text(what: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise UsageError(what, "not a name", found=repr(value), expected="a str", hint=_HINTS[what])


_HINTS = {
    "experts: prefix": "prepared.expert_prefixes lists the prefixes",
    "experts: activation": "None takes what config.json says",
    "experts: shared": "'auto' takes the one beside the experts, None takes none",
}
