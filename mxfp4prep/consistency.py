"""Whether the small files of a prepared checkpoint say the same as each other and as its shards.

config.json must be what converting source/config.json makes of it, the index must name every
tensor's shard, and every file must have the role that its name gives it: a file in another role
would be left out of a restore. Where a shard's header is damaged, the entries that are not spelled
as converting spells them say in which tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from mxfp4prep import io
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME, JSON_LIMIT, parse_object
from mxfp4prep.errors import InvalidCheckpoint
from mxfp4prep.header_json import short
from mxfp4prep.inventory import TARGET_GFX, prepared_config
from mxfp4prep.manifest import FileRecord
from mxfp4prep.marks import (
    DIGESTS_NAME,
    HEADER_SUFFIX,
    MANIFEST_NAME,
    SOURCE_DIR,
    SUMS_NAME,
)
from mxfp4prep.prepared import PreparedFiles
from mxfp4prep.rederive import can_rederive
from mxfp4prep.safefile import DTYPE_BITS

ORIGINAL_CONFIG = f"{SOURCE_DIR}/{CONFIG_NAME}"
ORIGINAL_INDEX = f"{SOURCE_DIR}/{INDEX_NAME}"


def contradictions(
    prepared: PreparedFiles, shard_of: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it).

    shard_of   by tensor, the file whose header lists it
    """
    files = {record.name: record for record in prepared.manifest.files}
    yield from misplaced(files)
    source, gfx = prepared.manifest.source, prepared.manifest.target.gfx
    if can_rederive(prepared) and gfx != TARGET_GFX:
        yield MANIFEST_NAME, f"target.gfx: found {gfx}, expected {TARGET_GFX}"
    original = _read(prepared, ORIGINAL_CONFIG)
    if original is not None:  # else `misplaced`, or the listing of the directory, has said so
        if hashlib.sha256(original).hexdigest() != source.config_sha256:
            yield ORIGINAL_CONFIG, "is not the config.json that the manifest was made with"
        try:
            expected = prepared_config(parse_object(original, ORIGINAL_CONFIG))
        except InvalidCheckpoint as error:
            yield ORIGINAL_CONFIG, error.what
        else:
            found = _read(prepared, CONFIG_NAME)
            if found != expected:
                where = "" if found is None else _difference(found, expected)
                yield CONFIG_NAME, f"is not what converting {ORIGINAL_CONFIG} gives{where}"
    index = _read(prepared, ORIGINAL_INDEX if ORIGINAL_INDEX in files else INDEX_NAME)
    made = INDEX_NAME in files and files[INDEX_NAME].role == "new_index"
    digest = None if index is None or made else hashlib.sha256(index).hexdigest()
    lost = index is None and INDEX_NAME in files  # said by the listing of the directory
    if digest != source.index_sha256 and not lost:
        yield INDEX_NAME, "is not the index that the manifest was made with"
    yield from _index(prepared, shard_of)


def _difference(found: bytes, expected: bytes) -> str:
    """The first value that two JSON objects do not share, as a message goes on: `: KEY: found`."""
    one, other = parse_object(found, CONFIG_NAME), parse_object(expected, CONFIG_NAME)
    place: list[str] = []
    while True:
        key = next((k for k in {**other, **one} if _said(one, k) != _said(other, k)), None)
        if key is None:
            return ": the same values, spelled otherwise"
        place.append(key)
        if not isinstance(one.get(key), dict) or not isinstance(other.get(key), dict):
            at = short(".".join(place))
            return f": {at}: found {short(_said(one, key))}, expected {short(_said(other, key))}"
        one, other = one[key], other[key]


def _said(document: Mapping[str, object], key: str) -> str:
    """The value of a key as JSON, which tells 1 from true, or that there is none."""
    return json.dumps(document[key]) if key in document else "nothing"


def misplaced(files: Mapping[str, FileRecord]) -> Iterator[tuple[str, str]]:
    """Files whose role in the manifest is not the one that their name gives them."""
    shards = {name for name, record in files.items() if record.role == "shard"}
    originals = {ORIGINAL_CONFIG, ORIGINAL_INDEX, f"{SOURCE_DIR}/{SUMS_NAME}"}
    originals |= {
        f"{SOURCE_DIR}/{name}{HEADER_SUFFIX}"
        for name, record in files.items()
        if record.source_header == "stored"
    }
    for name, record in files.items():
        if name.startswith(f"{SOURCE_DIR}/") and name not in originals:
            yield name, "is not the original of a file that a conversion changes"
            continue
        if name.startswith(f"{SOURCE_DIR}/"):
            roles = {"original"}
        elif name == CONFIG_NAME:
            roles = {"config"}
        elif name == DIGESTS_NAME:
            roles = {"digests"}
        elif name == INDEX_NAME:
            roles = {"index"} if ORIGINAL_INDEX in files else {"side", "new_index"}
        else:
            roles = {"side", "shard"}
        if record.role not in roles or (name in shards) != (record.source_header is not None):
            yield name, f"role: found {record.role}, expected {' or '.join(sorted(roles))}"
    for name in (CONFIG_NAME, ORIGINAL_CONFIG, DIGESTS_NAME):
        if name not in files:
            yield name, "is not in the manifest"


_ENTRY = re.compile(
    r'"((?:[^"\\]|\\.)*+)":\{"dtype":"([A-Z0-9_]+)",'
    r'"shape":\[((?:\d{1,19},){0,15}\d{1,19})?\],"data_offsets":\[(\d{1,19}),(\d{1,19})\]\}'
)


def damaged_entries(header: bytes, names: Iterable[str]) -> list[str]:
    """Those of `names` that have no entry in a header that is spelled as convert spells one and
    whose sizes agree."""
    whole = set()
    for key, dtype, shape, begin, end in _ENTRY.findall(header.decode("utf-8", "replace")):
        count = math.prod(map(int, shape.split(","))) if shape else 1
        if DTYPE_BITS.get(dtype, 0) * count == 8 * (int(end) - int(begin)):
            try:
                whole.add(json.loads(f'"{key}"'))
            except ValueError:
                continue
    return [name for name in names if name not in whole]


def _index(prepared: PreparedFiles, shard_of: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    raw = _read(prepared, INDEX_NAME)
    if raw is None:
        return
    try:
        listed = parse_object(raw, INDEX_NAME).get("weight_map")
    except InvalidCheckpoint as error:
        yield INDEX_NAME, error.what
        return
    if listed != shard_of:
        yield INDEX_NAME, "does not name the shard of every tensor"


def _read(prepared: PreparedFiles, name: str) -> bytes | None:
    path = prepared.root / name
    return io.read_bytes(path, limit=JSON_LIMIT) if path.is_file() else None
