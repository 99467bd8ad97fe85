"""What `bench` measured as the JSON document of `contract`: a pure function of its rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mxfp4prep.runtime.benching import BenchRow, Skipped

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c


def bench_document(
    name: str, device: c.BenchDeviceDocument, results: Iterable[BenchRow | Skipped]
) -> c.BenchDocument:
    """The times of checkpoint `name` on `device`."""
    rows: list[c.BenchRowDocument] = []
    skipped: list[c.BenchSkippedDocument] = []
    for result in results:
        if isinstance(result, Skipped):
            skipped.append(
                {
                    "layer": result.layer,
                    "backend": result.backend,
                    "m": result.m,
                    "reason": result.reason,
                }
            )
        else:
            rows.append(_row(result))
    return {
        "schema_version": 1,
        "name": name,
        "device": device,
        "rows": rows,
        "skipped": skipped,
    }


def _row(row: BenchRow) -> c.BenchRowDocument:
    median = row.timing.median_us
    beside = None if row.bf16 is None else row.bf16.timing
    bf16 = None if beside is None else beside.median_us
    return {
        "layer": row.layer,
        "layers": row.layers,
        "n": row.size.n,
        "k": row.size.k,
        "experts": row.size.experts,
        "top_k": row.size.top_k,
        "path": row.path,
        "scheme": row.scheme,
        "backend": row.backend,
        "m": row.m,
        "median_us": median,
        "spread_us": row.timing.spread_us,
        "fastest_us": row.timing.fastest_us,
        "runs": row.timing.runs,
        "waited": row.timing.waited,
        "method": row.timing.method,
        "bf16_us": bf16,
        "bf16_spread_us": None if beside is None else beside.spread_us,
        "bf16_by": None if row.bf16 is None else row.bf16.by,
        "bf16_ratio": None if bf16 is None else bf16 / median,
        "floor_us": row.floor.microseconds,
        "floor_bound": row.floor.bound,
        "floor_share": row.floor.microseconds / median,
        "steady": row.timing.steady and (beside is None or beside.steady),
    }
