"""What has to be said beside a verdict, in the same words wherever a verdict is shown."""

from __future__ import annotations

EXPERTS = (
    "For routed experts that is what can be prepared: today's engines run them in AITER's fused "
    "MoE, padded with zeros where they miss; --engine says what they do."
)
"""Beside verdicts on routed experts. Source: the tables in engines/."""
