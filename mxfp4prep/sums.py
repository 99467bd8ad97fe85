"""SHA256SUMS as coreutils' sha256sum writes and reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ESCAPES = {"n": "\n", "r": "\r", "\\": "\\"}


def format_sums(sums: Mapping[str, str]) -> bytes:
    """The file's bytes for {name: sha256 hex}, sorted by name."""
    return "".join(_line(name, sums[name]) for name in sorted(sums)).encode()


def _line(name: str, sha256: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "" if escaped == name else "\\"
    return f"{mark}{sha256}  {escaped}\n"


def parse_sums(raw: bytes) -> dict[str, str]:
    """{name: sha256 hex}. Lines that are not such a pair stand under their own text."""
    sums: dict[str, str] = {}
    for line in raw.decode("utf-8", "surrogateescape").split("\n"):
        if not line:
            continue
        escaped = line.startswith("\\")
        sha256, separator, name = line.removeprefix("\\").partition("  ")
        if not separator:
            sums[line] = ""
            continue
        if escaped:
            name = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), name)
        sums[name] = sha256
    return sums
