"""A plan as manifest records: what was decided, in the manifest's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mxfp4prep.collector import collector_paused
from mxfp4prep.findings import Finding
from mxfp4prep.manifest import (
    ActivationRecord,
    CopiedTensor,
    FindingRecord,
    LayerRecord,
    LayoutId,
    StoredTensor,
    utf8,
)
from mxfp4prep.plan import LayerPlan, Plan, TensorPlan

NAN_HAZARD = "nan_scale"
"""Known only once the bytes were read: every other field follows from headers and config."""


@collector_paused()
def layer_records(plan: Plan, nan_scales: Mapping[str, int]) -> list[LayerRecord]:
    """One record per MXFP4 layer, sorted by name."""
    files: dict[str, str] = {}
    tensors: dict[str, TensorPlan] = {}
    for shard in plan.shards:
        for tensor in shard.tensors:
            if tensor.layout is not None:
                files[tensor.source.name] = shard.shard.name
                tensors[tensor.source.name] = tensor
    records = [_layer(layer, tensors, files, nan_scales) for layer in plan.layers]
    return sorted(records, key=lambda record: record.name)


def _layer(
    plan: LayerPlan,
    tensors: Mapping[str, TensorPlan],
    files: Mapping[str, str],
    nan_scales: Mapping[str, int],
) -> LayerRecord:
    layer = plan.layer
    nan = (NAN_HAZARD,) if layer.scale.name in nan_scales else ()
    return LayerRecord.model_construct(
        name=layer.name,
        kind=layer.kind,
        parallel=plan.role.parallel,
        group=plan.role.group,
        scheme=layer.scheme,
        activation=ActivationRecord.model_construct(
            dtype=layer.activation.dtype,
            scale_mode=layer.activation.scale_mode,
            static=layer.activation.static,
        ),
        n=layer.n,
        k=layer.k,
        n_padded=layer.n,
        k_padded=layer.k,
        experts=layer.experts,
        gate_up=layer.gate_up,
        path=plan.path,
        reasons=list(plan.reasons),
        hazards=[*plan.hazards, *nan],
        verdict={str(tp): verdict.path for tp, verdict in plan.verdicts.items()},
        weight=_stored(tensors[layer.weight.name], files, plan.weight_layout),
        scale=_stored(tensors[layer.scale.name], files, plan.scale_layout),
        bias=layer.bias,
        input_scale=layer.input_scale,
    )


def _stored(tensor: TensorPlan, files: Mapping[str, str], layout: LayoutId) -> StoredTensor:
    return StoredTensor.model_construct(
        tensor=tensor.source.name,
        file=files[tensor.source.name],
        layout=layout,
        shape=list(tensor.stored.shape),
        source_shape=list(tensor.source.shape),
        pad_byte=None,
    )


def copied_records(plan: Plan) -> list[CopiedTensor]:
    """One record per tensor that was copied byte for byte, sorted by name."""
    labels = plan.survey.classified.labels
    return sorted(
        (
            CopiedTensor(
                name=tensor.source.name,
                file=shard.shard.name,
                label=labels.get(tensor.source.name),
            )
            for shard in plan.shards
            for tensor in shard.tensors
            if tensor.layout is None
        ),
        key=lambda record: record.name,
    )


def finding_records(findings: Iterable[Finding]) -> list[FindingRecord]:
    """Findings as the manifest keeps them."""
    return [
        FindingRecord(
            code=f.code, severity=f.severity, where=utf8(f.where), message=utf8(f.message)
        )
        for f in findings
    ]
