"""Who runs the GEMMs: the list of backends, whether each can run here, and which one a layer gets.

A backend is a module with the functions of `Backend`. Its line in `BACKENDS` is all that makes it
known; it is imported when a layer first runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from mxfp4prep.errors import BackendUnavailable, UsageError
from mxfp4prep.runtime.backends import availability

if TYPE_CHECKING:
    from torch import Tensor


class Backend(Protocol):
    """What a backend module provides; arguments as in runtime/ops.py."""

    def gemm(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        n: int,
        path: str,
        input_quant: str,
        *,
        bias: Tensor | None,
        input_scale: Tensor | None,
    ) -> Tensor: ...

    def fused_moe(
        self,
        x: Tensor,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        intermediate: int,
        w13_path: str,
        w2_path: str,
        input_quant: str,
        *,
        activation: str,
        limit: float | None,
        gate_up: str,
        hidden_pad: int,
        intermediate_pad: int,
        bias1: Tensor | None,
        bias2: Tensor | None,
        a1_scale: Tensor | None,
        a2_scale: Tensor | None,
    ) -> Tensor: ...


class BackendStatus(NamedTuple):
    """One backend: whether it can run on this machine, and why or why not."""

    name: str
    available: bool
    reason: str


class Needs(NamedTuple):
    """What a layer asks of a backend beyond its paths and inputs.

    k            columns of its matrices
    activation   of experts, None for a linear layer; so are gate_up and limit
    """

    k: tuple[int, ...]
    gate_up: str | None = None
    activation: str | None = None
    limit: float | None = None
    has_bias: bool = False


class _Entry(NamedTuple):
    """What is known about a backend without importing it; None in place of a set means all.

    module      where it is, None while this version does not have it
    obstacle    why it cannot run on this machine, or None
    objection   why it cannot run a layer with these needs and paths, or None; asked only where
                there is no obstacle
    failure     why it does not load after all, or None: asked last, since it imports the backend
    """

    module: str | None
    what: str
    obstacle: Callable[[], str | None]
    devices: frozenset[str] | None = None
    paths: frozenset[str] | None = None
    input_quants: frozenset[str] | None = None
    objection: Callable[[Needs, tuple[str, ...]], str | None] | None = None
    failure: Callable[[], str | None] | None = None


BACKENDS: dict[str, _Entry] = {  # in order of preference
    "aiter": _Entry(
        module="mxfp4prep.runtime.backends.aiter_backend",
        what="ROCm AITER on gfx950",
        obstacle=lambda: availability.aiter_obstacle(),
        devices=frozenset({"cuda"}),
        input_quants=frozenset({"mxfp4"}),
        objection=lambda needs, paths: availability.aiter_objection(needs, paths),
        failure=lambda: availability.aiter_failure(),
    ),
    "triton": _Entry(
        module="mxfp4prep.runtime.backends.triton_backend",
        what="Triton kernels on a GPU",
        obstacle=lambda: availability.triton_obstacle(),
        devices=frozenset({"cuda"}),
    ),
    "torch": _Entry(
        module="mxfp4prep.runtime.backends.torch_backend",
        what="the reference in plain torch, on any device",
        obstacle=lambda: None,
    ),
}


def backends() -> list[BackendStatus]:
    """Every backend, best first, with what it is or why it cannot run here. Imports none."""
    return [_status(name) for name in BACKENDS]


def _status(name: str) -> BackendStatus:
    entry = BACKENDS[name]
    obstacle = entry.obstacle()
    if obstacle is None and entry.module is None:
        obstacle = f"this version of mxfp4prep has no {name} backend"
    return BackendStatus(name, obstacle is None, entry.what if obstacle is None else obstacle)


def choose_backend(
    device_type: str,
    requested: str | None = None,
    paths: tuple[str, ...] = (),
    input_quant: str | None = None,
    needs: Needs | None = None,
) -> str:
    """The backend for layers on a device: the requested one, or the best that can run them.

    paths, input_quant, needs   what the layer asks for, where a layer is meant

    Raises UsageError for an unknown name, BackendUnavailable for one that cannot run there.
    """
    if requested is None:
        return next(
            name
            for name in BACKENDS
            if _misfit(name, device_type, paths, input_quant) is None
            and _status(name).available
            and _objection(name, paths, needs) is None
        )
    if not isinstance(requested, str) or requested not in BACKENDS:
        hint = "leave backend out to take the best that can run"
        known = " or ".join(BACKENDS)
        raise UsageError("backend", "unknown", found=repr(requested), expected=known, hint=hint)
    status = _status(requested)
    misfit = _misfit(requested, device_type, paths, input_quant)
    if misfit is None and status.available:
        misfit = _objection(requested, paths, needs)
    if misfit is not None or not status.available:
        raise BackendUnavailable(
            f"backend {requested}",
            status.reason if not status.available else misfit or "",
            hint="leave backend out to take the best that can run, or name 'torch'",
        )
    return requested


def _misfit(
    name: str, device_type: str, paths: tuple[str, ...], input_quant: str | None
) -> str | None:
    """What about a layer or its device this backend does not handle, or None."""
    entry = BACKENDS[name]
    facts = [("device", device_type, entry.devices)]
    facts += [("path", path, entry.paths) for path in paths]
    if input_quant is not None:
        facts.append(("input quantization", input_quant, entry.input_quants))
    for what, found, handled in facts:
        if handled is not None and found not in handled:
            return f"does not handle {what} {found}, only {', '.join(sorted(handled))}"
    return None


def _objection(name: str, paths: tuple[str, ...], needs: Needs | None) -> str | None:
    """Why a backend that could run here does not run this layer, or None. Loads it, if all fits."""
    entry = BACKENDS[name]
    if needs is None:
        return None
    objection = None if entry.objection is None else entry.objection(needs, paths)
    if objection is None and entry.failure is not None:
        objection = entry.failure()
    return objection


def implementation(name: str) -> Backend:
    """The module of backend `name`, imported on first use."""
    entry = BACKENDS.get(name)
    if entry is None or entry.module is None:
        raise UsageError("backend", "unknown", found=repr(name), expected="a name from backends()")
    return cast(Backend, import_module(entry.module))
