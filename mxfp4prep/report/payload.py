"""What a verb found as the JSON document of `contract`: pure functions of the verbs' values."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxfp4prep.findings import Finding
from mxfp4prep.report.tally import stored_shares

if TYPE_CHECKING:
    from mxfp4prep.checkpoint import Checkpoint
    from mxfp4prep.convert import ConvertResult
    from mxfp4prep.manifest import Manifest
    from mxfp4prep.plan import LayerPlan, Plan
    from mxfp4prep.report import contract as c
    from mxfp4prep.restore import RestoreReport
    from mxfp4prep.runtime.selfcheck import Row
    from mxfp4prep.verify import VerifyReport


RECORDS_AT_A_TIME = 1000
MOST_SHARED = 4096
"""Objects whose text is kept; a checkpoint's layers share a handful."""


def dumps(document: Mapping[str, Any]) -> str:
    """`document` as JSON in ASCII: a line for each key, and for each record of a list."""
    return "".join(pieces(document))


def pieces(document: Mapping[str, Any]) -> Iterator[str]:
    """The text of `dumps` in pieces: 50,000 layers are 40 MB that need not be in memory twice."""
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode
    shared: dict[int, str] = {}
    before = "{\n"
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{before}{encode(key)}: [\n"
            nested = [name for name, item in value[0].items() if type(item) is dict]
            for start in range(0, len(value), RECORDS_AT_A_TIME):
                part = value[start : start + RECORDS_AT_A_TIME]
                lines = [_line(record, nested, encode, shared) for record in part]
                yield (",\n" if start else "") + ",\n".join(lines)
            yield "\n]"
        else:
            yield f"{before}{encode(key)}: {encode(value)}"
        before = ",\n"
    yield "\n}\n"


def _line(
    record: Mapping[str, Any],
    nested: Sequence[str],
    encode: Callable[[Any], str],
    shared: dict[int, str],
) -> str:
    """One record. Its `nested` objects come last, and are encoded once where records share them."""
    rest = ""
    for key in nested:
        if key in record:
            value = record[key]
            text = shared.get(id(value))  # the document holds it, so no other takes its id
            if text is None:
                if len(shared) >= MOST_SHARED:
                    shared.clear()
                text = shared[id(value)] = encode(value)
            rest += f',"{key}":{text}'
    if not rest:
        return encode(record)
    own = encode({key: value for key, value in record.items() if key not in nested})
    return f"{own[:-1]}{rest}}}" if len(own) > len("{}") else f"{{{rest[1:]}}}"


def plan(plan: Plan, out: Path) -> c.PlanDocument:
    """What convert would do, before it does it."""
    return {
        "schema_version": 1,
        "source": source(plan.survey.checkpoint),
        "output": str(out),
        "tp": list(plan.tp),
        "expert_parallel": plan.survey.deployment.expert_parallel,
        "engine": plan.engine,
        "layout": plan.layout,
        "nbytes": plan.nbytes,
        "layers": [_planned(layer) for layer in plan.layers],
        "files": [
            {"name": s.shard.name, "tensors": len(s.tensors), "nbytes": s.nbytes}
            for s in plan.shards
        ],
        "findings": findings(plan.findings),
        "summary": stored_shares(
            (p.path, p.reasons, p.layer.weight.nbytes + p.layer.scale.nbytes) for p in plan.layers
        ),
    }


def _planned(plan: LayerPlan) -> c.PlannedLayerDocument:
    layer = plan.layer
    return {
        "name": layer.name,
        "kind": layer.kind,
        "group": plan.role.group,
        "scheme": layer.scheme,
        "n": layer.n,
        "k": layer.k,
        "experts": layer.experts,
        "path": plan.path,
        "reasons": list(plan.reasons),
        "hazards": list(plan.hazards),
        "weight_layout": plan.weight_layout,
        "scale_layout": plan.scale_layout,
        "verdict": {str(tp): verdict.path for tp, verdict in plan.verdicts.items()},
    }


def convert(result: ConvertResult) -> c.ConvertDocument:
    """What convert wrote."""
    manifest = result.manifest
    return {
        "schema_version": 1,
        "name": manifest.source.name,
        "output": str(result.out),
        "tp": list(manifest.target.tp),
        "expert_parallel": manifest.target.expert_parallel,
        "engine": manifest.target.engine,
        "files": len(manifest.files),
        "nbytes": sum(file.nbytes for file in manifest.files),
        "reused": list(result.reused),
        "findings": findings(result.findings),
        "summary": manifest_shares(manifest),
    }


def manifest_shares(manifest: Manifest) -> c.StoredPathsDocument:
    """Layers and bytes per stored path of a prepared checkpoint."""
    return stored_shares(
        (record.path, record.reasons, (record.experts or 1) * record.n * (k // 2 + -(-k // 32)))
        for record in manifest.layers
        for k in (record.k,)
    )


def verify(report: VerifyReport) -> c.VerifyDocument:
    """What verify checked and found."""
    return {
        "schema_version": 1,
        "name": report.name,
        "level": report.level,
        "ok": not report.problems,
        "files": report.files,
        "tensors": report.tensors,
        "nbytes": report.nbytes,
        "problems": [
            {"file": problem.file, "tensor": problem.tensor, "what": problem.what}
            for problem in report.problems
        ],
        "skipped": list(report.skipped),
    }


def restore(report: RestoreReport) -> c.RestoreDocument:
    """What restore wrote."""
    return {
        "schema_version": 1,
        "output": str(report.out),
        "files": report.files,
        "nbytes": report.nbytes,
        "header_only": list(report.header_only),
    }


def selfcheck(name: str, device: str, rows: Iterable[Row]) -> c.SelfcheckDocument:
    """What the layers of checkpoint `name` answered on `device`."""
    documents: list[c.SelfcheckRow] = [
        {
            "layer": row.layer,
            "path": row.path,
            "backend": row.backend,
            "m": row.m,
            "max_abs_error": _finite(row.max_abs_error),
            "max_rel_error": _finite(row.max_rel_error),
            "nan": row.nan,
            "milliseconds": row.milliseconds,
            "ok": row.ok,
        }
        for row in rows
    ]
    return {
        "schema_version": 1,
        "name": name,
        "device": device,
        "ok": all(row["ok"] for row in documents),
        "rows": documents,
    }


def _finite(value: float) -> float | None:
    """`value`, or None for what JSON cannot say."""
    return value if math.isfinite(value) else None


def source(checkpoint: Checkpoint) -> c.SourceDocument:
    """The checkpoint that was read."""
    index = checkpoint.index_bytes
    quantization = checkpoint.config.get("quantization_config")
    version = quantization.get("version") if isinstance(quantization, dict) else None
    model_type = checkpoint.config.get("model_type")
    return {
        "name": checkpoint.name,
        "repo": checkpoint.repo,
        "commit": checkpoint.commit,
        "model_type": model_type if isinstance(model_type, str) else None,
        "quark_version": version if isinstance(version, str) else None,
        "files": len(checkpoint.shards),
        "tensors": len(checkpoint.tensors),
        "nbytes": sum(entry.nbytes for entry in checkpoint.tensors.values()),
        "config_sha256": hashlib.sha256(checkpoint.config_bytes).hexdigest(),
        "index_sha256": None if index is None else hashlib.sha256(index).hexdigest(),
    }


def findings(findings: Iterable[Finding]) -> list[c.FindingDocument]:
    """Remarks in the order they were made."""
    return [
        {"code": f.code, "severity": f.severity, "where": f.where, "message": f.message}
        for f in findings
    ]
