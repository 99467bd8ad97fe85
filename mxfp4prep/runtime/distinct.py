"""Which layers are alike for a GEMM: of one shape, path and scheme, whatever their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from mxfp4prep.errors import Unsupported
from mxfp4prep.runtime.agreement import path_name
from mxfp4prep.runtime.gathering import group_experts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mxfp4prep.manifest import LayerRecord
    from mxfp4prep.runtime.prepared import Prepared


class Alike(NamedTuple):
    """Layers of one shape. `name` is the first of them: a matrix, or a prefix of experts."""

    name: str
    layers: int
    experts: bool


def distinct(prepared: Prepared, names: Iterable[str] | None = None) -> list[Alike]:
    """What there is to run, each shape once, matrices before experts.

    names   layers and prefixes of experts to choose from; None takes all. Experts are run in their
            bank: a single one only where its prefix is not among the names

    Raises Unsupported where there is nothing.
    """
    groups = group_experts(prepared.manifest.layers)
    prefix_of = {record.name: prefix for prefix, records in groups.items() for record in records}
    wanted = None if names is None else set(names)
    matrices: dict[object, list[str]] = {}
    for record in prepared.manifest.layers:
        prefix = prefix_of.get(record.name)
        if wanted is None:
            chosen = prefix is None
        else:
            chosen = record.name in wanted and prefix not in wanted
        if chosen and record.experts is None:
            matrices.setdefault(_kind(record), []).append(record.name)
    banks: dict[object, list[str]] = {}
    for prefix, records in groups.items():
        if wanted is None or prefix in wanted:
            banks.setdefault(_kind_of_bank(records), []).append(prefix)
    found = [Alike(alike[0], len(alike), experts=False) for alike in matrices.values()]
    found += [Alike(alike[0], len(alike), experts=True) for alike in banks.values()]
    if not found:
        raise nothing_to_run(prepared)
    return found


def nothing_to_run(prepared: Prepared) -> Unsupported:
    """The error for a checkpoint without any: that nothing ran must not read as all being well."""
    hint = "`mxfp4prep show` lists what the checkpoint has"
    return Unsupported(prepared.path, "no MXFP4 layer to run", hint=hint)


def _kind(record: LayerRecord) -> tuple[object, ...]:
    activation = record.activation
    inputs = activation.dtype, activation.scale_mode, activation.static
    return record.n, record.k, path_name(record), record.scheme, inputs


def _kind_of_bank(records: Sequence[LayerRecord]) -> frozenset[tuple[object, int]]:
    parts = Counter((record.name.rpartition(".")[2], _kind(record)) for record in records)
    stacked = Counter(("experts", record.experts) for record in records)
    return frozenset((*parts.items(), *stacked.items()))


def top_k(config: Mapping[str, Any], experts: int) -> int:
    """How many of `experts` a token goes to by config.json; 2 where it does not say."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    for key in ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk"):
        value = text.get(key)
        if isinstance(value, int) and value > 0:
            return min(value, experts)
    return min(2, experts)
