"""A prepared checkpoint by the names that vLLM gives its modules: which stored layers each one is.

The manifest has the checkpoint's names. vLLM renames some (a mapper of the model class) and fuses
others (`packed_modules_mapping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mxfp4prep.documents import INDEX_NAME, read_object
from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.manifest import LayerRecord
from mxfp4prep.marks import MANIFEST_NAME, SUMS_NAME
from mxfp4prep.parallel import Topology, assign_roles
from mxfp4prep.prepared import VERIFY_HINT, open_prepared
from mxfp4prep.runtime.gathering import Gathered, gather, group_experts
from mxfp4prep.runtime.opening import Opened, checked_for_serving
from mxfp4prep.runtime.shared_parts import SharedParts, beside, group_shared, shared_parts
from mxfp4prep.safefile import FLOAT_DTYPES

Rename = Callable[[str], str | None]
"""From a checkpoint's name to vLLM's; None for one that the model drops."""

RESTORE_HINT = "`mxfp4prep restore` gives the Quark checkpoint back, for what cannot be served so"


LEFT_OUT = frozenset({"bias", "input_scale", "weight_scale"})
"""Names that vLLM's models drop where they have no place for them."""


@dataclass(frozen=True)
class Stored:
    """An opened checkpoint and the renaming of its model.

    layers   the manifest's layers by their own names
    copied   every other tensor, by its own name
    floats   modules whose weight was copied and is a plain floating one, by their own names
    rename   the model's renaming
    """

    layers: Mapping[str, LayerRecord]
    copied: frozenset[str]
    floats: frozenset[str]
    topology: Topology
    rename: Rename

    @cached_property
    def records(self) -> dict[str, LayerRecord]:
        """The manifest's layers by vLLM's names."""
        return {name: record for own, record in self.layers.items() if (name := self.rename(own))}

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(name for own in self.floats if (name := self.rename(own)))

    @cached_property
    def tensors(self) -> frozenset[str]:
        """Every tensor that was copied, by vLLM's names."""
        return frozenset(name for own in self.copied if (name := self.rename(own)))

    @cached_property
    def _experts(self) -> dict[str, tuple[str, list[LayerRecord]]]:
        """vLLM's prefix -> the checkpoint's prefix and the layers of the experts below it."""
        groups: dict[str, tuple[str, list[LayerRecord]]] = {}
        for own, records in group_experts(self.layers.values()).items():
            rest = records[0].name.removeprefix(own)
            name = self.rename(records[0].name)
            if name:
                groups[name.removesuffix(rest)] = own, records
        return groups

    def members(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> tuple[LayerRecord, ...]:
        """The layers that linear module `prefix` is made of, in its order; none if it is not MXFP4.

        packed   leaf of a fused module -> the leaves of its parts

        Raises Unsupported where only some parts are MXFP4.
        """
        if prefix in self.records:
            return (self.records[prefix],)
        names = self.parts(prefix, packed)
        found = [self.records[name] for name in names if name in self.records]
        if found and len(found) < len(names):
            missing = [name for name in names if name not in self.records]
            raise Unsupported(
                prefix,
                "vLLM fuses layers of which only some are MXFP4",
                found=f"{', '.join(record.name for record in found)}, but not {', '.join(missing)}",
                hint=RESTORE_HINT,
            )
        return tuple(found)

    def is_plain(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> bool:
        """Whether module `prefix`, or every part of it, is stored with a plain floating weight."""
        return all(name in self._plain for name in self.parts(prefix, packed) or [prefix])

    @staticmethod
    def parts(prefix: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
        """The modules that module `prefix` is fused from; none where it is not known to be."""
        parent, dot, leaf = prefix.rpartition(".")
        return [f"{parent}{dot}{part}" for part in packed.get(leaf, ())]

    def experts(self, prefix: str) -> Gathered | None:
        """The routed experts of module `prefix` in order, None if they are not MXFP4.

        Raises InvalidCheckpoint or Unsupported where they cannot be one module.
        """
        if prefix not in self._experts:
            return None
        own, records = self._experts[prefix]
        for record in records:
            if record.experts is not None:
                raise Unsupported(
                    record.name,
                    "experts that are stored in one tensor are not served by vLLM yet",
                    hint=RESTORE_HINT,
                )
        gathered = gather(own, records, self._roles(records))
        if len(gathered.w13[0]) != 2:
            raise Unsupported(
                records[0].name,
                "gate and up of an expert that are stored in one matrix are not served by vLLM yet",
                hint=RESTORE_HINT,
            )
        return gathered

    def shared_expert(self, prefix: str) -> SharedParts:
        """The shared expert beside routed experts `prefix`.

        Raises InvalidCheckpoint where there is none, Unsupported where it is not all MXFP4.
        """
        own, _ = self._experts[prefix]
        groups = group_shared(self.layers)
        name = beside(own, groups)
        if name is None:
            raise InvalidCheckpoint(prefix, "no MXFP4 shared expert to fuse with these experts")
        mine = {key: self.layers[key] for key in groups[name]}
        return shared_parts(name, mine, {}, self._roles(mine.values()))

    def _roles(self, records: Iterable[LayerRecord]) -> dict[str, str]:
        names = [record.name for record in records]
        roles = assign_roles(names, (), self.topology.model_type)
        return {name: role.part for name, role in roles.items()}


def open_stored(root: Path, rename: Rename, *, is_download: bool = False) -> Stored:
    """The prepared checkpoint in directory `root`, whose files have been checked against each other
    and config.json against its digest, unless there are no weights at all (they may be streamed
    from elsewhere).

    is_download   of a model on the Hub: vLLM fetches weights that are not there yet

    Raises InvalidManifest, InvalidCheckpoint or Unsupported for whatever does not agree.
    """
    prepared = open_prepared(root)
    manifest = prepared.manifest
    copied = frozenset(tensor.name for tensor in manifest.tensors)
    _check_vectors(manifest.layers, copied)
    floats: frozenset[str] = frozenset()
    here = [(root / record.name).exists() for record in prepared.files("shard")]
    if any(here) and not (is_download and not all(here)):
        opened = checked_for_serving(prepared, verify=True)
        _check_files(opened)
        floats = _floats(opened)
    topology = Topology.from_config(prepared.config)
    layers = {record.name: record for record in manifest.layers}
    return Stored(layers, copied, floats, topology, rename)


def _check_vectors(layers: Iterable[LayerRecord], copied: frozenset[str]) -> None:
    """Refuses a bias or a scale that belongs to nothing: the loading of vLLM's models leaves out
    such names when no module has them, without a word."""
    used = {tensor for record in layers for tensor in (record.bias, record.input_scale)}
    for name in sorted(copied - used):
        module, _, leaf = name.rpartition(".")
        if leaf in LEFT_OUT and f"{module}.weight" not in copied:
            what = "belongs to no layer that is stored, and vLLM would leave it out"
            raise InvalidCheckpoint(name, what, hint=RESTORE_HINT)


def _check_files(opened: Opened) -> None:
    """Refuses weight files that vLLM would read otherwise than the manifest says: by the index it
    leaves out what is not named there, and without one it reads every file that there is."""
    shards = {record.name for record in opened.manifest.files if record.role == "shard"}
    found = {path.name for path in opened.root.glob("*.safetensors")}
    if found - shards:
        stray = ", ".join(sorted(found - shards))
        what = f"a weight file that {MANIFEST_NAME} does not list"
        raise InvalidCheckpoint(stray, what, hint=VERIFY_HINT)
    if not (opened.root / INDEX_NAME).is_file():
        return
    _, index = read_object(opened.root / INDEX_NAME, INDEX_NAME)
    if index.get("weight_map") != {name: place.file for name, place in opened.places.items()}:
        what = "it does not name the files that the tensors are in"
        raise InvalidCheckpoint(INDEX_NAME, what, hint=VERIFY_HINT)


def _floats(opened: Opened) -> frozenset[str]:
    names = (tensor.name for tensor in opened.manifest.tensors)
    return frozenset(
        name.removesuffix(".weight")
        for name in names
        if name.endswith(".weight")
        and opened.places[name].entry.dtype in FLOAT_DTYPES
        and f"{name}_scale" not in opened.places
    )


def directory_of(model: str, revision: str | None) -> Path:
    """The directory of model `model`: itself, or where its small files have been put."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", SUMS_NAME, MANIFEST_NAME]
    return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
