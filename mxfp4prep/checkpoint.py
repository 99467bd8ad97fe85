"""A checkpoint as it really is: shards by their headers, the index, config, side files.

Headers decide what exists; the index only says which files belong together. Nothing is read but
config.json, the index and the shards' headers, and nothing is written. Where the files lie is the
business of `Files`: everything that is checked is checked here, once, for a directory and for a
repository on the Hub alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mxfp4prep.collector import collector_paused
from mxfp4prep.directory import SKIPPED_DIRS, list_files
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME, read_object
from mxfp4prep.errors import InvalidCheckpoint, Unsupported, naming
from mxfp4prep.findings import Finding
from mxfp4prep.marks import (
    MANIFEST_NAME,
    QUANT_METHOD,
)
from mxfp4prep.safefile import Header, TensorEntry, read_header

_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file. `name` is its path inside the checkpoint, with forward slashes.

    `path` is where it lies; where it would lie after a download if it is on the Hub only.
    """

    name: str
    path: Path
    header: Header


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that headers and JSON files say about a checkpoint.

    root         its directory; for one on the Hub its snapshot in the cache, where config and
                 index lie
    side_files   every other file that a faithful copy needs, sorted, paths inside the directory
    tensors      every tensor of every shard, by name
    absent       names of files that are on the Hub and not in `root`; none of a directory's own
    """

    root: Path
    name: str
    config: dict[str, Any]
    config_bytes: bytes
    index_bytes: bytes | None
    index_metadata: dict[str, Any]
    indexed: dict[str, str]
    shards: tuple[Shard, ...]
    side_files: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    shard_of: dict[str, Shard]
    findings: tuple[Finding, ...]
    absent: frozenset[str] = frozenset()

    @property
    def repo(self) -> str | None:
        """The Hub repository it comes from, as ORG/NAME, where that is known."""
        return hub_origin(self.root)[0]

    @property
    def commit(self) -> str | None:
        """The commit of `repo`, where that is known."""
        return hub_origin(self.root)[1]

    def require_local(self, names: Iterable[str] | None = None) -> None:
        """Raises Unsupported unless the files `names` are in `root`; all files by default."""
        missing = sorted(self.absent if names is None else self.absent.intersection(names))
        if missing:
            raise Unsupported(
                missing[0],
                f"{_some(missing)} on the Hub only: an audit reads no more than headers there",
                hint=f"download it first: hf download {self.repo} --revision {self.commit}",
            )


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one checkpoint and how to read them, wherever they are.

    where     what errors call the checkpoint
    root      see Checkpoint
    names     every file, sorted, paths inside the checkpoint
    skipped   folders of SKIPPED_DIRS that are there and not in `names`, sorted
    document  from a JSON file's name its bytes and the object in them
    headers   from shard names and the index (tensor -> shard) the headers, in the same order
    again     the way out when a file is missing
    absent    see Checkpoint
    """

    where: object
    root: Path
    names: Sequence[str]
    skipped: Sequence[str]
    document: Callable[[str], tuple[bytes, dict[str, Any]]]
    headers: Callable[[Sequence[str], Mapping[str, str]], Iterable[Header]]
    again: str
    absent: frozenset[str] = frozenset()


AGAIN = (
    "download the checkpoint again; if it stays so, it is not as this version knows AMD Quark's: "
    "please report it"
)
"""The way out of a fault that has none of its own."""


def open_checkpoint(root: Path) -> Checkpoint:
    """The checkpoint in directory `root`, checked for everything headers can tell.

    Raises InvalidCheckpoint where files are missing, damaged or contradict each other, and
    Unsupported for a directory that mxfp4prep itself has written.
    """
    if not root.is_dir():
        what = "is a file, not a checkpoint directory" if root.exists() else "no such directory"
        raise InvalidCheckpoint(
            root,
            what,
            hint=f"give the directory: {root.parent}"
            if root.exists()
            else "for a Hub repository, download it first: hf download ORG/NAME --local-dir DIR",
        )
    with naming(root, AGAIN):
        return read_checkpoint(local_files(root))


def local_files(root: Path, *, again: str = "download the checkpoint again") -> Files:
    """The files of the directory `root`. Raises InvalidCheckpoint unless it holds a config.json."""
    given, root = root, root.resolve()
    if not (root / CONFIG_NAME).exists() and not (root / CONFIG_NAME).is_symlink():
        raise InvalidCheckpoint(given, f"no {CONFIG_NAME} in it", hint=_place_hint(root))
    return Files(
        where=root,
        root=root,
        names=list_files(root),
        skipped=[name for name in sorted(SKIPPED_DIRS) if (root / name).is_dir()],
        document=lambda name: read_object(root / name, name),
        headers=lambda names, _: [read_header(root / name, name=name) for name in names],
        again=again,
    )


@collector_paused()
def read_checkpoint(files: Files) -> Checkpoint:
    """The checkpoint that `files` are, checked for everything headers can tell.

    Raises as open_checkpoint, and whatever reading raises.
    """
    root = files.root
    refuse_prepared(files.where, files.names)
    config_bytes, config = _read_config(files)
    index_bytes, indexed, metadata = _read_index(files)
    findings: list[Finding] = []
    if files.skipped:
        message = "a download tool's bookkeeping, not part of the checkpoint: not copied"
        findings.append(Finding("skipped_folder", "note", ", ".join(files.skipped), message))
    names = _shard_names(files, indexed, findings)
    headers = files.headers(names, indexed)
    shards = tuple(
        Shard(name, root / name, header) for name, header in zip(names, headers, strict=True)
    )
    shard_of, tensors = _collect(shards, findings)
    if index_bytes is not None:
        _check_index(files, indexed, shard_of, tensors, metadata, findings)
    weights = set(names)
    side = [f for f in files.names if f not in weights and f not in (CONFIG_NAME, INDEX_NAME)]
    return Checkpoint(
        root=root,
        name=(hub_origin(root)[0] or root.name).rpartition("/")[2],
        config=config,
        config_bytes=config_bytes,
        index_bytes=index_bytes,
        index_metadata=metadata,
        indexed=indexed,
        shards=shards,
        side_files=tuple(side),
        tensors=tensors,
        shard_of=shard_of,
        findings=tuple(findings),
        absent=files.absent,
    )


def _place_hint(root: Path) -> str:
    """Where the checkpoint may be instead, when a directory is none."""
    if (root / "snapshots").is_dir():
        return f"give the snapshot: {root / 'snapshots'}/COMMIT"
    below = sorted(path.parent.name for path in root.glob(f"*/{CONFIG_NAME}"))
    if below:
        return f"give a checkpoint in it, such as {root / below[0]}"
    return f"a checkpoint directory holds {CONFIG_NAME} and *.safetensors"


def hub_origin(root: Path) -> tuple[str | None, str | None]:
    """(repo id, commit) when `root` is a snapshot in the Hugging Face cache, else (None, None)."""
    repo = root.parent.parent.name
    if root.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/", 1), root.name
    return None, None


def refuse_prepared(where: object, names: Iterable[str]) -> None:
    """Raises Unsupported when our manifest is there: preparing twice would shuffle twice."""
    if MANIFEST_NAME in names:
        raise Unsupported(
            where,
            f"is already prepared: found {MANIFEST_NAME}",
            hint="read it with `mxfp4prep show`, or undo it with `mxfp4prep restore`",
        )


def _read_config(files: Files) -> tuple[bytes, dict[str, Any]]:
    raw, config = files.document(CONFIG_NAME)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD:
        raise Unsupported(
            files.where,
            f"is already prepared: config.json says quant_method {QUANT_METHOD}",
            hint="undo it with `mxfp4prep restore`, or start from the original checkpoint",
        )
    return raw, config


def _read_index(files: Files) -> tuple[bytes | None, dict[str, str], dict[str, Any]]:
    if INDEX_NAME not in files.names:
        return None, {}, {}
    raw, document = files.document(INDEX_NAME)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidCheckpoint(
            INDEX_NAME, "weight_map", found=type(weight_map).__name__, expected="tensor -> file"
        )
    inside: set[str] = set()  # tens of thousands of tensors stand in some dozens of files
    for tensor, name in weight_map.items():
        if isinstance(name, str) and (name in inside or _is_inside(name)):
            inside.add(name)
        else:
            raise InvalidCheckpoint(
                INDEX_NAME,
                f"weight_map entry of {tensor}",
                found=repr(name),
                expected="the name of a .safetensors file in this directory",
            )
    metadata = document.get("metadata", {})
    return raw, weight_map, metadata if isinstance(metadata, dict) else {}


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return (
        name.endswith(".safetensors")
        and "\\" not in name
        and name.isprintable()
        and all(part not in ("", ".", "..") for part in parts)
    )


def _shard_names(files: Files, indexed: dict[str, str], findings: list[Finding]) -> list[str]:
    present = [name for name in files.names if name.endswith(".safetensors") and "/" not in name]
    if not indexed:
        if not present:
            other = (".bin", ".pt", ".pth", ".gguf")
            found = next((name for name in files.names if name.endswith(other)), None)
            raise InvalidCheckpoint(
                files.where,
                "no .safetensors file",
                found=f"{found}, which is not safetensors and is never unpickled"
                if found
                else None,
                hint="export the model with safetensors" if found else files.again,
            )
        _refuse_gaps(files, present)
        return present
    wanted = sorted(set(indexed.values()))
    here = set(files.names)
    missing = [name for name in wanted if name not in here]
    if missing:
        raise InvalidCheckpoint(
            INDEX_NAME,
            f"{len(missing)} of {len(wanted)} files it names are not here: {_few(missing, 5)}",
            hint=files.again,
        )
    strays = [name for name in present if name not in set(wanted)]
    if strays:
        findings.append(
            Finding(
                "stray_file",
                "warning",
                strays[0],
                f"{_some(strays)} not named by the index: copied as it is, never prepared; "
                "loaders that take every .safetensors file would read it too",
            )
        )
    return wanted


def _refuse_gaps(files: Files, present: Sequence[str]) -> None:
    """Without an index only the names say how many shards there are: `NAME-00001-of-00003`."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in present:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, total), numbers in sets.items():
        missing = total - len(numbers.intersection(range(1, total + 1)))
        if missing:
            gone = (number for number in range(1, total + 1) if number not in numbers)
            names = [f"{stem}-{n:05d}-of-{total:05d}.safetensors" for n in islice(gone, 6)]
            raise InvalidCheckpoint(
                files.where,
                f"{missing} of {total} shards are not here, by the names of the others: "
                + _few(names, 5),
                hint=files.again,
            )


def _collect(
    shards: tuple[Shard, ...], findings: list[Finding]
) -> tuple[dict[str, Shard], dict[str, TensorEntry]]:
    shard_of: dict[str, Shard] = {}
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        if not shard.header.tensors:
            findings.append(Finding("empty_shard", "note", shard.name, "holds no tensor"))
        for entry in shard.header.tensors:
            other = shard_of.setdefault(entry.name, shard)
            if other is not shard:
                raise InvalidCheckpoint(
                    shard.name,
                    f"tensor {entry.name} stands in {other.name} too",
                    hint="keep one set of shards: remove the files of the other",
                )
            tensors[entry.name] = entry
    return shard_of, tensors


def _check_index(
    files: Files,
    indexed: dict[str, str],
    shard_of: dict[str, Shard],
    tensors: dict[str, TensorEntry],
    metadata: dict[str, Any],
    findings: list[Finding],
) -> None:
    for tensor, name in indexed.items():
        shard = shard_of.get(tensor)
        if shard is None:
            raise InvalidCheckpoint(
                INDEX_NAME,
                f"tensor {tensor} is not in {name}, nor in any other shard",
                hint=files.again,
            )
        if shard.name != name:
            raise InvalidCheckpoint(
                INDEX_NAME, f"tensor {tensor}", found=f"in {shard.name}", expected=f"in {name}"
            )
    unlisted = [name for name in tensors if name not in indexed]
    if unlisted:
        findings.append(
            Finding(
                "not_in_index",
                "warning",
                INDEX_NAME,
                f"{_some(unlisted)} in a shard but not in the index: kept, and indexed in the "
                "output",
            )
        )
    total = sum(entry.nbytes for entry in tensors.values())
    stated = metadata.get("total_size")
    if stated != total:
        findings.append(
            Finding(
                "total_size",
                "note",
                INDEX_NAME,
                f"total_size is {stated}, the tensors are {total} bytes",
            )
        )


def _some(names: Sequence[str], most: int = 3) -> str:
    """`1 file (a)` or `5 (a, b, c, ...)`: a count and the first few."""
    return f"{len(names)} ({_few(names, most)})"


def _few(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
