"""JSON schemas of everything that `--format json` prints, generated from the types."""

from __future__ import annotations

from importlib import resources

DOCUMENTS = (
    "audit",
    "diff",
    "plan",
    "convert",
    "verify",
    "restore",
    "show",
    "selfcheck",
    "bench",
)
"""One schema each; `plan` is `convert --dry-run`, `show` is the manifest, mxfp4prep.json."""


def read(document: str) -> str:
    """The shipped schema of one of DOCUMENTS, as JSON text."""
    return resources.files(__name__).joinpath(f"{document}.schema.json").read_text("utf-8")
