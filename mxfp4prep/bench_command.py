"""The command `bench`: how long a prepared checkpoint's GEMMs take on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mxfp4prep import options as o
from mxfp4prep.errors import BackendUnavailable
from mxfp4prep.prepared_commands import device_of, matching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxfp4prep.report.voice import Voice
    from mxfp4prep.runtime.benching import BenchRow, Skipped

EXAMPLES = (
    "bench Qwen3-MXFP4-mxfp4prep --device cuda:0",
    "bench Qwen3-MXFP4-mxfp4prep --device cuda:0 --m 1,64,4096 --layers '*.down_proj'",
    "bench Qwen3-MXFP4-mxfp4prep --device cuda:0 --backend triton --format json",
)


def bench(
    ctx: typer.Context,
    prepared: o.PreparedArg,
    device: o.DeviceOpt = "cpu",
    layers: o.LayersOpt = None,
    m: o.RowsOpt = None,
    backend: o.BackendsOpt = None,
    format: o.FormatOpt = o.Format.text,
    no_progress: o.NoProgressOpt = False,
) -> None:
    """Time each shape of layer on each backend, beside bfloat16 and what the device allows.

    Weights come from memory, not from a cache. The device's bandwidth and its bfloat16 rate are
    measured first; the floor is the time that a layer's bytes or operations take at them.
    """
    import torch

    from mxfp4prep import load
    from mxfp4prep.report.bench_document import bench_document
    from mxfp4prep.runtime import benching, ceilings, devices
    from mxfp4prep.runtime.distinct import distinct
    from mxfp4prep.runtime.room import telling_where

    voice: Voice = ctx.obj
    tokens = o.parse_rows(m) or benching.TOKENS
    target = device_of(device)
    backends = benching.usable_backends(target, o.parse_words(backend))
    loaded = load(prepared, device=devices.load_device(target))
    names = None if layers is None else matching(layers, [*loaded, *loaded.expert_prefixes])
    shapes = distinct(loaded, names)
    total = 1 + len(shapes) * len(backends) * len(tokens)
    results: list[BenchRow | Skipped] = []
    with voice.steps("timing", total, silent=no_progress) as advance:
        with telling_where(f"{target}", "free some there, or choose another with --device"):
            limits = ceilings.measure_ceilings(target)
        advance(1)
        for result in benching.bench(loaded, shapes, backends, target, limits, m=tokens):
            results.append(result)
            advance(len(tokens) if result.m is None else 1)
    _check_any(results)
    document = bench_document(
        loaded.manifest.source.name,
        {
            "device": str(target),
            "name": devices.device_name(target),
            "torch": torch.__version__,
            "bandwidth": limits.bandwidth,
            "bf16_rate": limits.rate,
        },
        results,
    )
    if format is o.Format.json:
        voice.print_json(document)
    else:
        from mxfp4prep.report.bench_text import bench_text

        voice.print_text(lambda screen: bench_text(document, screen, str(prepared)))


def _check_any(results: Sequence[BenchRow | Skipped]) -> None:
    """Raises where nothing could run, with the first reason: NoRoom where memory was too small for
    any of it, else BackendUnavailable."""
    from mxfp4prep.runtime.benching import Skipped
    from mxfp4prep.runtime.room import FEWER, NoRoom

    skips = [result for result in results if isinstance(result, Skipped)]
    if not skips or len(skips) < len(results):
        return
    for skip in skips:
        if skip.no_room:
            where = skip.layer if skip.m is None else f"{skip.layer} at m {skip.m}"
            raise NoRoom(where, skip.reason, hint=FEWER)
    names = " and ".join(dict.fromkeys(skip.backend for skip in skips))
    raise BackendUnavailable(
        f"backend {names}",
        f"runs none of these layers: {skips[0].reason}",
        hint="leave --backend out, or name torch",
    )
