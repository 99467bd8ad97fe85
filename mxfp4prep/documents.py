"""The JSON files of a checkpoint, read strictly: one object, no key twice, of a sane size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxfp4prep import io
from mxfp4prep.collector import collector_paused
from mxfp4prep.errors import InvalidCheckpoint

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
JSON_LIMIT = 512 << 20
"""Largest JSON file that is read, in bytes: 140,000 tensors make a 15 MB index."""


MEMORY_LIMIT = 5 << 28
"""Most memory that the values of a JSON file may take, in bytes, by the estimate below."""


def check_size(raw: bytes, where: str) -> None:
    """Raises InvalidCheckpoint for JSON whose values would fill the memory: 40 MB of empty lists
    become 1 GB. In CPython a pair of an object takes some 150 bytes, an item or a container 64."""
    pairs, others = raw.count(b":"), raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    nbytes = 2 * len(raw) + 150 * pairs + 64 * others
    if nbytes > MEMORY_LIMIT:
        raise InvalidCheckpoint(
            where,
            "more JSON values than fit",
            found=f"about {nbytes >> 20} MiB of them",
            expected=f"at most {MEMORY_LIMIT >> 20} MiB",
        )


def read_object(path: Path, name: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the JSON file at `path`, called `name` in errors, and the object in them."""
    raw = io.read_bytes(path, limit=JSON_LIMIT)
    return raw, parse_object(raw, name)


def format_object(document: Mapping[str, Any]) -> bytes:
    """`document` as indented JSON in UTF-8; in ASCII where UTF-8 cannot hold a lone surrogate."""
    try:
        return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(document, indent=2) + "\n").encode()


@collector_paused()
def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `raw`. Raises InvalidCheckpoint on anything else, repeated keys too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise ValueError(f"key {twice!r} stands twice")
        return result

    check_size(raw, where)
    try:
        document = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(where, f"not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidCheckpoint(
            where, "not a JSON object", found=type(document).__name__, expected="object"
        )
    return document
