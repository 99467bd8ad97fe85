"""The plan made again from a prepared checkpoint alone, and where its manifest says otherwise.

Headers and source/config.json hold all that planning reads, and the manifest says what was asked
for: the same rules must come to the same decisions, layer by layer and field by field. An edited
manifest does not, even when every digest was edited along with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mxfp4prep import __version__
from mxfp4prep.alignment import RULE_VERSION, outdated
from mxfp4prep.checkpoint import Checkpoint, Shard
from mxfp4prep.deployment import Deployment
from mxfp4prep.documents import CONFIG_NAME, read_object
from mxfp4prep.manifest import Manifest
from mxfp4prep.marks import MANIFEST_NAME, SOURCE_DIR
from mxfp4prep.parallel import parse_rules
from mxfp4prep.plan import Plan, TensorPlan, make_plan, surveyed_degrees
from mxfp4prep.prepared import PreparedFiles
from mxfp4prep.records import NAN_HAZARD, copied_records, finding_records, layer_records
from mxfp4prep.safefile import Header
from mxfp4prep.survey import survey


class Disagreement(NamedTuple):
    """A layer or tensor that the manifest describes otherwise than the plan made again."""

    file: str
    name: str
    what: str


def can_rederive(prepared: PreparedFiles) -> bool:
    """Whether the decisions can be held against this version's, whoever wrote the manifest.

    Not those of earlier rules. Rules that are unknown here are a disagreement.
    """
    return not outdated(prepared.manifest.target.rule_version)


SHAPES = frozenset({"n", "k", "experts"})
"""What a way back relies on: the sizes that the shapes of the source lead to."""


_NOT_IN_HEADERS = frozenset(
    {"skipped_folder", "stray_file", "empty_shard", "not_in_index", "total_size", NAN_HAZARD}
)
"""Codes of findings that a prepared checkpoint no longer shows: they are of the source's folder and
index, or of tensor bytes."""


def disagreements(
    prepared: PreparedFiles,
    shards: Mapping[str, tuple[Header, list[TensorPlan]]],
    fields: frozenset[str] | None = None,
) -> Iterator[Disagreement]:
    """Every layer and copied tensor of which the manifest says something else than the plan.

    shards   by file name: the prepared header, and its tensors with their source's shapes
    fields   only these fields of a layer; None compares them all

    Raises what planning raises, for a source that this version refuses.
    """
    plan = _plan(prepared, shards)
    manifest = prepared.manifest
    nan = {layer.scale.tensor: 1 for layer in manifest.layers if NAN_HAZARD in layer.hazards}
    expected = {record.name: record for record in layer_records(plan, nan)}
    for found in manifest.layers:
        record = expected.pop(found.name, None)
        if record is None:
            yield Disagreement(
                found.weight.file, found.name, "no such layer by the source's config"
            )
            continue
        if record == found:
            continue
        wanted, given = record.model_dump(), found.model_dump()
        for key in fields or wanted:
            if wanted[key] != given[key]:
                what = f"{key}: found {given[key]}, the plan made again has {wanted[key]}"
                yield Disagreement(found.weight.file, found.name, what)
    if fields is not None:
        return
    for name, record in expected.items():
        yield Disagreement(record.weight.file, name, "the manifest lacks this layer")
    yield from _asked(manifest, plan)
    copied = {record.name: record for record in copied_records(plan)}
    listed = {record.name: record for record in manifest.tensors}
    for name in sorted(copied.keys() | listed.keys()):
        if copied.get(name) != listed.get(name):
            file = (listed.get(name) or copied[name]).file
            what = "is not listed as the copied tensor it is"
            yield Disagreement(file, name, what)


def _asked(manifest: Manifest, plan: Plan) -> Iterator[Disagreement]:
    """What stands beside the layers: the layouts in use, what was noticed in headers and config.

    Findings about files that are no longer here, and those that need tensor bytes, are left aside.
    """
    if manifest.target.rule_version != RULE_VERSION:
        what = (
            f"found {manifest.target.rule_version}, mxfp4prep {__version__} knows {RULE_VERSION}: "
            "verify it with the version that wrote it"
        )
        yield Disagreement(MANIFEST_NAME, "target.rule_version", what)
    layouts = sorted({x for p in plan.layers for x in (p.weight_layout, p.scale_layout)})
    if manifest.target.layouts != layouts:
        what = f"found {manifest.target.layouts}, the plan made again has {layouts}"
        yield Disagreement(MANIFEST_NAME, "target.layouts", what)
    found = Counter(tuple(record.model_dump().values()) for record in manifest.findings)
    made = Counter(tuple(record.model_dump().values()) for record in finding_records(plan.findings))
    for code, *_ in made - found:
        yield Disagreement(MANIFEST_NAME, f"findings.{code}", "is missing or says something else")
    for code, *_ in found - made:
        if code not in _NOT_IN_HEADERS:
            yield Disagreement(MANIFEST_NAME, f"findings.{code}", "is not what the plan finds")


def _plan(prepared: PreparedFiles, shards: Mapping[str, tuple[Header, list[TensorPlan]]]) -> Plan:
    path = prepared.root / SOURCE_DIR / CONFIG_NAME
    raw, config = read_object(path, f"{SOURCE_DIR}/{CONFIG_NAME}")
    sources = []
    for name, (header, tensors) in sorted(shards.items()):
        entries = tuple(tensor.source for tensor in tensors)
        source = Header(entries, header.metadata, header.data_start, header.file_nbytes)
        sources.append(Shard(name, prepared.root / name, source))
    checkpoint = Checkpoint(
        root=prepared.root,
        name=prepared.manifest.source.name,
        config=config,
        config_bytes=raw,
        index_bytes=None,
        index_metadata={},
        indexed={},
        shards=tuple(sources),
        side_files=(),
        tensors={entry.name: entry for shard in sources for entry in shard.header.tensors},
        shard_of={entry.name: shard for shard in sources for entry in shard.header.tensors},
        findings=(),
    )
    target = prepared.manifest.target
    deployment = Deployment(expert_parallel=target.expert_parallel)
    rules = parse_rules(target.parallel)
    judged = survey(checkpoint, surveyed_degrees(target.tp), rules, deployment)
    return make_plan(judged, target.tp, target.layout, target.keep, target.engine)
