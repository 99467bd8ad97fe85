"""A checkpoint directory as it really is: shards by their headers, the index, config, side files.

Headers decide what exists; the index only says which files belong together. Nothing is read but
config.json, the index and the shards' headers, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxfp4prep.collector import collector_paused
from mxfp4prep.directory import SKIPPED_DIRS, list_files
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME, read_object
from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.findings import Finding
from mxfp4prep.manifest import MANIFEST_NAME, QUANT_METHOD
from mxfp4prep.safefile import Header, TensorEntry, read_header


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file. `name` is its path inside the checkpoint, with forward slashes."""

    name: str
    path: Path
    header: Header


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that headers and JSON files say about a checkpoint directory.

    tensors      every tensor of every shard, by name
    side_files   every other file that a faithful copy needs, sorted, paths inside the directory
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


@collector_paused()
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
    given, root = root, root.resolve()
    if not (root / CONFIG_NAME).exists() and not (root / CONFIG_NAME).is_symlink():
        raise InvalidCheckpoint(given, f"no {CONFIG_NAME} in it", hint=_place_hint(root))
    files = list_files(root)
    refuse_prepared(root, files)
    config_bytes, config = _read_config(root)
    index_bytes, indexed, metadata = _read_index(root, files)
    findings: list[Finding] = []
    skipped = [name for name in sorted(SKIPPED_DIRS) if (root / name).is_dir()]
    if skipped:
        message = "a download tool's bookkeeping, not part of the checkpoint: not copied"
        findings.append(Finding("skipped_folder", "note", ", ".join(skipped), message))
    names = _shard_names(root, files, indexed, findings)
    shards = tuple(Shard(name, root / name, read_header(root / name, name=name)) for name in names)
    shard_of, tensors = _collect(shards, findings)
    if index_bytes is not None:
        _check_index(indexed, shard_of, tensors, metadata, findings)
    weights = set(names)
    side = [f for f in files if f not in weights and f not in (CONFIG_NAME, INDEX_NAME)]
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


def refuse_prepared(root: Path, files: list[str]) -> None:
    """Raises Unsupported when `root` carries our manifest: preparing twice would shuffle twice."""
    if MANIFEST_NAME in files:
        raise Unsupported(
            root,
            f"is already prepared: found {MANIFEST_NAME}",
            hint="read it with `mxfp4prep show`, or undo it with `mxfp4prep restore`",
        )


def _read_config(root: Path) -> tuple[bytes, dict[str, Any]]:
    raw, config = read_object(root / CONFIG_NAME, CONFIG_NAME)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD:
        raise Unsupported(
            root,
            f"is already prepared: config.json says quant_method {QUANT_METHOD}",
            hint="undo it with `mxfp4prep restore`, or start from the original checkpoint",
        )
    return raw, config


def _read_index(
    root: Path, files: list[str]
) -> tuple[bytes | None, dict[str, str], dict[str, Any]]:
    if INDEX_NAME not in files:
        return None, {}, {}
    raw, document = read_object(root / INDEX_NAME, INDEX_NAME)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidCheckpoint(
            INDEX_NAME, "weight_map", found=type(weight_map).__name__, expected="tensor -> file"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_inside(name):
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


def _shard_names(
    root: Path, files: list[str], indexed: dict[str, str], findings: list[Finding]
) -> list[str]:
    present = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    if not indexed:
        if not present:
            found = next((f for f in files if f.endswith((".bin", ".pt", ".pth", ".gguf"))), None)
            raise InvalidCheckpoint(
                root,
                "no .safetensors file",
                found=f"{found}, which is not safetensors and is never unpickled"
                if found
                else None,
                hint="export the model with safetensors",
            )
        return present
    wanted = sorted(set(indexed.values()))
    missing = [name for name in wanted if name not in set(files)]
    if missing:
        raise InvalidCheckpoint(
            INDEX_NAME,
            f"{len(missing)} of {len(wanted)} files it names are not here: "
            + ", ".join(missing[:5])
            + (", ..." if len(missing) > 5 else ""),
            hint="download the checkpoint again",
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
                hint="download the checkpoint again",
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


def _some(names: list[str], most: int = 3) -> str:
    """`1 file (a)` or `5 (a, b, c, ...)`: a count and the first few."""
    tail = ", ..." if len(names) > most else ""
    return f"{len(names)} ({', '.join(names[:most])}{tail})"
