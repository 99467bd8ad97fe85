"""What a stage noticed without having to stop: a code, a severity, a place and a sentence."""

from __future__ import annotations

from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Finding(NamedTuple):
    """One remark. `code` is stable and machine-readable; `where` names a file, tensor or layer."""

    code: str
    severity: Severity
    where: str
    message: str
