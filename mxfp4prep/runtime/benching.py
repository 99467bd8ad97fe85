"""How long a checkpoint's GEMMs take: every shape once, on each backend, beside bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mxfp4prep.errors import BackendUnavailable, Unsupported
from mxfp4prep.runtime.backends import BACKENDS, choose_backend
from mxfp4prep.runtime.bf16_reference import Way
from mxfp4prep.runtime.ceilings import Ceilings, Floor, floor_of
from mxfp4prep.runtime.distinct import Alike
from mxfp4prep.runtime.room import NoRoom, telling_where
from mxfp4prep.runtime.timing import Timing, measure
from mxfp4prep.runtime.workloads import Load, Size, Work, load_of

if TYPE_CHECKING:
    from mxfp4prep.runtime.experts import PreparedExperts
    from mxfp4prep.runtime.linear import PreparedLinear
    from mxfp4prep.runtime.loader import Prepared

TOKENS = (1, 16, 64, 256)
"""Rows of x: decoding, small batches, and a first one that arithmetic may bound."""


class Bf16(NamedTuple):
    """The same work in bfloat16. `by`: linear, grouped_mm or loop (see bf16_reference)."""

    timing: Timing
    by: Way


class BenchRow(NamedTuple):
    """One shape on one backend at one m.

    layer, layers   the first layer of this shape, or a prefix of experts; how many there are
    path            "asm", "triton" or "kept"; those of both banks for experts, joined by "+"
    bf16            None where it did not fit into memory
    floor           from the bytes that move and the operations, at the device's ceilings
    """

    layer: str
    layers: int
    size: Size
    path: str
    scheme: str
    backend: str
    m: int
    timing: Timing
    bf16: Bf16 | None
    floor: Floor


class Skipped(NamedTuple):
    """What did not run, and why. m None: at no m. no_room: memory was too small."""

    layer: str
    backend: str
    m: int | None
    reason: str
    no_room: bool = False


def usable_backends(device: torch.device, requested: Sequence[str] | None = None) -> list[str]:
    """The backends that can run on the device, best first, or the requested ones in their order.

    Raises UsageError for an unknown name, BackendUnavailable for one that cannot run there.
    """
    if requested is not None:
        return [choose_backend(device.type, name) for name in dict.fromkeys(requested)]
    usable = []
    for name in BACKENDS:
        try:
            usable.append(choose_backend(device.type, name))
        except BackendUnavailable:
            continue
    return usable


def bench(
    prepared: Prepared,
    shapes: Sequence[Alike],
    backends: Sequence[str],
    device: torch.device,
    ceilings: Ceilings,
    *,
    m: Sequence[int] = TOKENS,
    seed: int = 0,
) -> Iterator[BenchRow | Skipped]:
    """For each shape one row per m and backend, as soon as it is there, or why there is none.

    shapes     from `distinct`; backends from `usable_backends`
    """
    for shape in shapes:
        layer: PreparedLinear | PreparedExperts
        try:
            with telling_where(shape.name):
                if shape.experts:
                    layer = prepared.read_experts(shape.name).to(device)
                else:
                    layer = prepared.read(shape.name).to(device)
        except (Unsupported, NoRoom) as error:
            yield from (_skipped(shape, backend, None, error) for backend in backends)
            continue
        fitting = []
        for backend in backends:
            try:
                fitting.append(
                    choose_backend(
                        device.type, backend, layer.paths, layer.input_quant, layer.needs
                    )
                )
            except BackendUnavailable as error:
                yield Skipped(shape.name, backend, None, error.what)
        if not fitting:
            continue
        try:
            with telling_where(shape.name):
                load = load_of(layer, prepared.config)
        except NoRoom as error:
            yield from (_skipped(shape, backend, None, error) for backend in fitting)
            continue
        yield from _bench_layer(shape, load, fitting, ceilings, m, seed)
        del load  # before the next layer takes memory


def _skipped(shape: Alike, backend: str, m: int | None, error: Unsupported | NoRoom) -> Skipped:
    reason = str(error).partition("\n")[0]
    if isinstance(error, NoRoom):  # the layer and m are named beside it
        reason = reason.removeprefix(f"{error.where}: ")
    return Skipped(shape.name, backend, m, reason, isinstance(error, NoRoom))


def _bench_layer(
    shape: Alike,
    load: Load,
    backends: Sequence[str],
    ceilings: Ceilings,
    m: Sequence[int],
    seed: int,
) -> Iterator[BenchRow | Skipped]:
    for rows in m:
        try:
            with telling_where(f"{shape.name} at m {rows}"):
                work = load.at(rows, torch.Generator().manual_seed(seed))
        except NoRoom as error:
            yield from (_skipped(shape, backend, rows, error) for backend in backends)
            continue
        yield from _bench_work(shape, load, work, backends, ceilings)


def _bench_work(
    shape: Alike, load: Load, work: Work, backends: Sequence[str], ceilings: Ceilings
) -> Iterator[BenchRow | Skipped]:
    layer = load.modules[0]
    bf16 = _fastest(work)
    floor = floor_of(work.nbytes, work.operations, ceilings)
    for backend in backends:
        for module in load.modules:
            module.backend = backend
        try:
            with telling_where(f"{shape.name} at m {work.m}"):
                timing = measure(work.calls, work.device)
        except (Unsupported, NoRoom) as error:
            yield _skipped(shape, backend, work.m, error)
            continue
        yield BenchRow(
            shape.name,
            shape.layers,
            load.size,
            "+".join(layer.paths),
            layer.scheme,
            backend,
            work.m,
            timing,
            bf16,
            floor,
        )


def _fastest(work: Work) -> Bf16 | None:
    """The fastest way to do the work in bfloat16."""
    found = []
    for by, calls in work.bf16.items():
        try:
            with telling_where("bf16"):
                found.append(Bf16(measure(calls, work.device), by))
        except NoRoom:  # our own calls may still fit
            continue
    return min(found, key=lambda bf16: bf16.timing.median_us, default=None)
