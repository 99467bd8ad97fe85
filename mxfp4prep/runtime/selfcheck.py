"""Runs layers on the device they will serve on and compares them with float64 arithmetic."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.backends import choose_backend
from mxfp4prep.runtime.devices import wait_for
from mxfp4prep.runtime.distinct import distinct, nothing_to_run
from mxfp4prep.runtime.linear import PreparedLinear
from mxfp4prep.runtime.oracle import experts_oracle, linear_oracle
from mxfp4prep.runtime.room import check_room, telling_where

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.runtime.experts import PreparedExperts
    from mxfp4prep.runtime.loader import Prepared

Layer = TypeVar("Layer", "PreparedLinear", "PreparedExperts")

TOKENS = (1, 16, 64)
"""Rows of x: decoding, a small batch, and the most for which AITER takes its small-M kernel."""

ROUNDING = 2.0**-8
"""Relative error of a result rounded to bfloat16."""

ACCUMULATION = 2.0**-22
"""Times sqrt(k) and the sum of magnitudes: what float32 accumulation in any order may lose."""

EXPERTS_TOLERANCE = 0.05
"""Norm of an MoE's error over the norm of its result. The inputs of the second GEMM are quantized
again, so a rounding that falls the other way moves a value by a whole FP4 step."""

COMPARED_ROWS = 1024
"""Output features compared in a layer: the oracle finds each byte by formula, 100 times slower than
the GEMM itself."""

REPEATS = 3

DOUBLE = ("cpu", "cuda")
"""Device types that compute in float64; results of others are judged on the CPU."""


class Row(NamedTuple):
    """One layer at one m. Errors are against float64; the relative one is over the largest value.

    path           "asm", "triton" or "kept"; those of both banks for experts, joined by "+"
    milliseconds   the fastest of a few runs
    nan            compared values that are NaN, because scale bytes of the weight are, or make
                   weights infinite in float32 (from 2^128 on), of which a product with zero is NaN
    """

    layer: str
    path: str
    backend: str
    m: int
    max_abs_error: float
    max_rel_error: float
    milliseconds: float
    ok: bool
    nan: int = 0


def selfcheck(
    prepared: Prepared,
    layers: Iterable[str] | None = None,
    *,
    sample: bool = True,
    device: str | torch.device | None = None,
    backend: str | None = None,
    m: Sequence[int] = TOKENS,
    seed: int = 0,
) -> Iterator[Row]:
    """One row per layer and m, each as soon as it is there.

    layers   names of layers, or prefixes of experts; None takes what the checkpoint has
    sample   without `layers`: only the first of every shape, layout and scheme
    device   where to run; None is where `prepared` puts its layers
    backend  a name from `backends()`; None is the layers' own there, elsewhere the best that can
    m        how many rows x has

    Raises UsageError, before anything runs, for a name that is neither, Unsupported where there is
    no MXFP4 layer, BackendUnavailable for a backend that cannot run a layer, NoRoom (an IOFailed)
    for rows that do not fit into memory.
    """
    if layers is not None:
        names = list(layers)
    else:
        names = one_of_each(prepared) if sample else _all(prepared)
    if not names:
        raise nothing_to_run(prepared)
    for name in names:
        if name not in prepared and name not in prepared.expert_prefixes:
            raise UsageError(name, "no such layer", hint="`mxfp4prep show` lists them")
    where = prepared.device if device is None else torch.device(device)
    return (row for name in names for row in _check(prepared, name, where, backend, m, seed))


def one_of_each(prepared: Prepared) -> list[str]:
    """The first layer of every shape, layout and scheme; experts in their banks, not one by one."""
    return [alike.name for alike in distinct(prepared)]


def _all(prepared: Prepared) -> list[str]:
    records = [record for record in prepared.manifest.layers if record.kind != "expert"]
    return [*(record.name for record in records), *prepared.expert_prefixes]


def _check(
    prepared: Prepared,
    name: str,
    device: torch.device,
    backend: str | None,
    m: Sequence[int],
    seed: int,
) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(seed)
    with telling_where(name, "select smaller layers with --layers"):
        layer = prepared.read(name) if name in prepared else prepared.read_experts(name)
        if device != prepared.device:
            layer = layer.to(device)
    if backend is not None or device.type != prepared.device.type:
        layer.backend = choose_backend(
            device.type, backend, layer.paths, layer.input_quant, layer.needs
        )
    for rows in m:
        top = 1 if isinstance(layer, PreparedLinear) else _top(layer)
        check_room(layer, rows, device, top)
        with telling_where(f"{name} at m {rows}"):
            if isinstance(layer, PreparedLinear):
                row = _check_linear(layer, _judge(layer, device), rows, device, generator)
            else:
                row = _check_experts(layer, _judge(layer, device), rows, device, generator)
        yield row


def _top(layer: PreparedExperts) -> int:
    """How many experts a token goes to here."""
    return min(2, layer.experts)


def _judge(layer: Layer, device: torch.device) -> Layer:
    """The layer where there is float64 to compare with."""
    return layer if device.type in DOUBLE else copy.deepcopy(layer).to("cpu")


def _check_linear(
    layer: PreparedLinear,
    judge: PreparedLinear,
    m: int,
    device: torch.device,
    generator: torch.Generator,
) -> Row:
    x = torch.randn((m, layer.k), generator=generator).to(device, torch.bfloat16)
    y, milliseconds = _timed(lambda: layer(x), device)
    there = judge.weight.device
    rows = _sampled_rows(layer.n, there, generator)
    y = y.to(there)[:, rows]
    expected, magnitude = linear_oracle(judge, x.to(there), rows)
    allowed = ROUNDING * expected.abs() + ACCUMULATION * math.sqrt(layer.k) * magnitude
    error = _error(y, expected, magnitude)
    ok = bool((error <= allowed.nan_to_num()).all())  # a NaN is not <= anything
    return _row(layer, m, error, expected, milliseconds, ok=ok)


def _sampled_rows(n: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Output features to compare: all of a small layer; of a large one both ends and a sample."""
    if n <= COMPARED_ROWS:
        return torch.arange(n, device=device)
    sample = torch.randperm(n, generator=generator)[: COMPARED_ROWS - 64]
    ends = torch.cat((torch.arange(32), torch.arange(n - 32, n)))
    return torch.cat((ends, sample)).sort().values.to(device)


def _check_experts(
    layer: PreparedExperts,
    judge: PreparedExperts,
    m: int,
    device: torch.device,
    generator: torch.Generator,
) -> Row:
    top = _top(layer)
    x = torch.randn((m, layer.hidden), generator=generator).to(device, torch.bfloat16)
    ids = torch.rand((m, layer.experts), generator=generator).topk(top).indices.to(device)
    weights = torch.rand((m, top), generator=generator).to(device)
    y, milliseconds = _timed(lambda: layer(x, weights, ids), device)
    there = judge.w13.device
    expected = experts_oracle(judge, x.to(there), weights.to(there), ids.to(there))
    error = _error(y.to(there), expected)
    ok = bool(error.norm() <= EXPERTS_TOLERANCE * _finite(expected).norm())
    return _row(layer, m, error, expected, milliseconds, ok=ok)


def _error(y: Tensor, expected: Tensor, magnitude: Tensor | None = None) -> Tensor:
    """|y - expected|, float64; a NaN or an overflow where it must be is no error, elsewhere it is
    one for ever.

    magnitude   the sum of each result's magnitudes: where it is beyond the type, a sum may overflow
                on its way to a result that is not
    """
    largest = torch.finfo(y.dtype).max
    right = y.isnan() & expected.isnan()
    right |= y.isinf() & (expected.abs() >= largest) & (y.sign() == expected.sign())
    if magnitude is not None:
        right |= ~y.isfinite() & (magnitude >= largest)
    return (y.double() - expected).abs().masked_fill(right, 0.0)


def _finite(expected: Tensor) -> Tensor:
    """Zero where it is NaN or infinite: what errors are compared with."""
    return expected.nan_to_num(0.0, 0.0, 0.0)


def _timed(run: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """What `run` returns, and the milliseconds of its fastest run after one to warm up."""
    y = run()
    best = math.inf
    for _ in range(REPEATS):
        wait_for(device)
        start = time.perf_counter()
        y = run()
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return y, best * 1000


def _row(
    layer: PreparedLinear | PreparedExperts,
    m: int,
    error: Tensor,
    expected: Tensor,
    milliseconds: float,
    *,
    ok: bool,
) -> Row:
    largest = float(_finite(expected).abs().max()) if expected.numel() else 0.0
    worst = float(error.max()) if error.numel() else 0.0
    relative = worst / largest if largest else worst
    path = "+".join(layer.paths)
    nan = int(expected.isnan().sum())
    return Row(layer.name, path, layer.backend, m, worst, relative, milliseconds, ok, nan)
