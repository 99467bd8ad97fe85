"""The AITER backend: ROCm's FP4 GEMMs and fused MoE, on gfx950, for W4A4 layers.

Which kernel runs, by path and number of rows m:

    asm      m > 64, n a multiple of 256   gemm_a4w4 (assembly)
             anything else                 the preshuffle GEMM (Triton)
    triton   gemm_afp4wfp4 (Triton), its scale stored (k / 32, n) and passed transposed
    kept     gemm_afp4wfp4 (Triton)

- Inputs are quantized by AITER's Triton kernel, which knows scale mode EVEN only and is told so by
  name. Its HIP kernels round up by default since v0.1.16, and the number for EVEN changed.
- Where a kernel reads tiled input scales, x is filled up with zero rows to a multiple of 32, so
  that every byte it reads was written, and the answer is cut.
- Answers are bfloat16 in AITER; a bias is added to them in float32, then x's dtype is made.
  float32 inputs are rounded to bfloat16 first.
- gemm_a4w4 may pick tiles of 256 columns whose epilogue does not test n, and then writes zeros into
  the rows of the answer that follow; hence the multiple of 256.

Source: AITER's Python sources at e4048607, and gfx950's f4gemm kernels disassembled.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any

import torch

from mxfp4prep.errors import BackendUnavailable
from mxfp4prep.runtime.backends import Needs
from mxfp4prep.runtime.backends.aiter_functions import Bound, bound
from mxfp4prep.runtime.backends.aiter_limits import objection, splits_k_wrongly
from mxfp4prep.runtime.backends.availability import installed_aiter
from mxfp4prep.runtime.devices import launching_on

if TYPE_CHECKING:
    from torch import Tensor

FP4_PAIR: torch.dtype = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0: torch.dtype = getattr(torch, "float8_e8m0fnu", torch.uint8)
"""What AITER calls codes and scales; bytes in a torch that has no such dtypes."""

SMALL_M = 64
"""Most rows for which the preshuffle GEMM is the faster one, as vLLM and AITER's tables have it."""

TILED_M = 32
"""Rows of a tile of input scales. The preshuffle GEMM reads them untiled when there are fewer."""

ASM_TILE_N = 256

ACTIVATIONS = {"silu": "Silu", "swigluoai": "Swiglu"}
"""Our names -> members of its ActivationType."""


def gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    n: int,
    path: str,
    input_quant: str,
    *,
    bias: Tensor | None,
    input_scale: Tensor | None,  # noqa: ARG001 - of static FP8, which is refused
) -> Tensor:
    """As ops.gemm, for input_quant "mxfp4".

    Raises BackendUnavailable for a layer that AITER answers wrongly, or where it does not load.
    """
    m, k = x.shape
    aiter = _usable(Needs(k=(k,)), (path,), input_quant)
    if m == 0:
        return x.new_zeros((0, n))
    with launching_on(x):
        if path != "asm":
            y = _plain_gemm(aiter, x, weight, scale if path == "kept" else scale.T)
        elif m > SMALL_M and n % ASM_TILE_N == 0:
            y = _asm_gemm(aiter, x, weight.view(n, k // 2), scale.view(n, k // 32))
        else:
            y = _preshuffle_gemm(aiter, x, weight, scale, n)
    if bias is not None:
        y = y.float() + bias.float()
    return y.to(x.dtype)


def fused_moe(
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
    a1_scale: Tensor | None,  # noqa: ARG001 - of static FP8, which is refused
    a2_scale: Tensor | None,  # noqa: ARG001
) -> Tensor:
    """As ops.fused_moe, for input_quant "mxfp4". An id of -1 is an expert that is not here.

    Inside, AITER quantizes by rules of its own that no argument changes: the scale mode depends on
    its release and the number of tokens (EVEN where its Triton quantizer runs), and with swigluoai
    the inputs of fewer than 256 tokens stay bfloat16. What a bank holds as padding must be zeros.

    Raises BackendUnavailable for a layer that AITER answers wrongly, or where it does not load.
    """
    tokens, hidden = x.shape
    has_bias = bias1 is not None or bias2 is not None
    needs = Needs((hidden, intermediate), gate_up, activation, limit, has_bias)
    aiter = _usable(needs, (w13_path, w2_path), input_quant)
    more = _moe_options(aiter, hidden_pad, intermediate_pad, bias1, bias2)
    if tokens == 0:
        return x.new_zeros(x.shape)
    rows = x.to(torch.bfloat16)
    if hidden_pad:
        rows = torch.nn.functional.pad(rows[:, : hidden - hidden_pad], (0, hidden_pad))
    experts = w13.shape[0]
    with launching_on(x):
        weights, ids, mask = _routing(topk_weights, topk_ids, experts)
        y: Tensor = aiter.fused_moe(
            rows.contiguous(),
            _bank(w13, experts, 2 * intermediate, hidden),
            _bank(w2, experts, hidden, intermediate),
            weights,
            ids,
            expert_mask=mask,
            activation=getattr(aiter.activation_type, ACTIVATIONS[activation]),
            quant_type=aiter.quant_type.per_1x32,
            w1_scale=w13_scale.view(experts * 2 * intermediate, hidden // 32).view(E8M0),
            w2_scale=w2_scale.view(experts * hidden, intermediate // 32).view(E8M0),
            **more,
        )
    if hidden_pad:
        y[:, hidden - hidden_pad :] = 0
    return y.to(x.dtype)


def _usable(needs: Needs, paths: tuple[str, ...], input_quant: str) -> Bound:
    """AITER, imported. Raises BackendUnavailable where it is not here or not for this layer."""
    aiter = load()
    refusal = objection(aiter.known, needs, paths)
    if input_quant != "mxfp4":
        refusal = f"does not handle input quantization {input_quant}, only mxfp4"
    if refusal is not None:
        raise BackendUnavailable("backend aiter", refusal, hint="name another backend, or none")
    return aiter


@lru_cache(maxsize=1)
def load() -> Bound:
    """AITER's functions. Raises BackendUnavailable where it is not installed or does not import."""
    return bound(installed_aiter())


def _quantize(aiter: Bound, x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (m, k / 2) and scales (m, k / 32), uint8."""
    rows = x.to(torch.bfloat16) if x.dtype == torch.float32 else x
    codes, scales = aiter.quantize(rows, scaling_mode="even")
    return codes, scales


def _quantize_tiled(aiter: Bound, x: Tensor) -> tuple[Tensor, Tensor]:
    """As `_quantize` for x filled up to a multiple of 32 rows, the scales in tile32x8's order.

    Bytes as AITER's e8m0_shuffle makes them, which takes two copies and leaves rows unwritten.
    """
    short = -x.shape[0] % TILED_M
    codes, scales = _quantize(aiter, torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x)
    m, columns = scales.shape
    tiles = scales.view(m // 32, 2, 16, columns // 8, 2, 4)
    return codes, tiles.permute(0, 3, 5, 2, 4, 1).reshape(m, columns)


def _asm_gemm(aiter: Bound, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """weight (n, k / 2) and scale (n, k / 32) are views of the tiled bytes, for their strides."""
    codes, scales = _quantize_tiled(aiter, x)
    options: dict[str, Any] = {"bpreshuffle": True}
    if "out" in aiter.known.gemm_a4w4.parameters:  # up to v0.1.8
        shape = codes.shape[0], weight.shape[0]
        options["out"] = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    y: Tensor = aiter.gemm_a4w4(
        codes.view(FP4_PAIR), weight.view(FP4_PAIR), scales.view(E8M0), scale.view(E8M0), **options
    )
    return y[: x.shape[0]]


def _preshuffle_gemm(aiter: Bound, x: Tensor, weight: Tensor, scale: Tensor, n: int) -> Tensor:
    """weight (n / 16, 8 k) and scale (n / 32, k) as stored: they are its operands."""
    if x.shape[0] < TILED_M:
        codes, scales = _quantize(aiter, x)
    else:
        codes, scales = _quantize_tiled(aiter, x)
        scales = scales.view(scales.shape[0] // 32, -1)
    config = _preshuffle_config(aiter, codes.shape[0], n, codes.shape[1])
    y: Tensor = aiter.preshuffle(codes, weight, scales, scale, dtype=torch.bfloat16, config=config)
    return y[: x.shape[0]]


def _preshuffle_config(aiter: Bound, m: int, n: int, k_packed: int) -> dict[str, Any]:
    """What AITER tuned, with blocks that divide n and k.

    Of a block that hangs over n it reads bytes past the weight's end, and one that hangs over k
    does not compile. The tables' dicts are shared, and its GEMM writes into the one that it gets.
    """
    found = aiter.config(m, n, k_packed, True)
    config = dict(found[0] if isinstance(found, tuple) else found)
    config["BLOCK_SIZE_N"] = gcd(n, config["BLOCK_SIZE_N"])
    config["BLOCK_SIZE_K"] = gcd(2 * k_packed, config["BLOCK_SIZE_K"])
    if splits_k_wrongly(aiter.known):
        config["NUM_KSPLIT"] = 1
    return config


def _plain_gemm(aiter: Bound, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """weight (n, k / 2), scale (n, k / 32) with any strides."""
    codes, scales = _quantize(aiter, x)
    y: Tensor = aiter.plain(codes, weight, scales, scale, dtype=torch.bfloat16)
    return y


def _bank(stored: Tensor, experts: int, rows: int, k: int) -> Tensor:
    """(e, rows, k / 2) pairs of codes, marked as AITER's own shuffle marks them.

    The mark is an attribute of the tensor object, which neither a file nor a buffer keeps.
    """
    bank = stored.view(experts, rows, k // 2).view(FP4_PAIR)
    bank.is_shuffled = True  # type: ignore[attr-defined]
    return bank


def _routing(
    topk_weights: Tensor, topk_ids: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights float32 and ids int32, and (e + 1,) int32: which experts are here, where not all are.

    Ids of -1 become expert e, which the mask leaves out. Its kernels for experts that are all here
    are others, so it gets a mask only where there is such an id; a CUDA graph being captured cannot
    ask, and there expert 0 does the work and its answer gets weight 0.
    """
    weights, ids = topk_weights.float().contiguous(), topk_ids.to(torch.int32).contiguous()
    absent = ids < 0
    if _is_capturing(ids):
        return weights.masked_fill(absent, 0.0), ids.clamp(min=0), None
    if not bool(absent.any()):
        return weights, ids, None
    mask = torch.ones(experts + 1, dtype=torch.int32, device=ids.device)
    mask[experts] = 0
    return weights, ids.masked_fill(absent, experts), mask


def _is_capturing(ids: Tensor) -> bool:
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()


def _moe_options(
    aiter: Bound,
    hidden_pad: int,
    intermediate_pad: int,
    bias1: Tensor | None,
    bias2: Tensor | None,
) -> dict[str, Any]:
    """The later arguments of its fused_moe that this call needs.

    Raises BackendUnavailable for one that the installed version has not.
    """
    wanted: dict[str, Any] = {
        "hidden_pad": hidden_pad or None,
        "intermediate_pad": intermediate_pad or None,
        "bias1": None if bias1 is None else bias1.float(),
        "bias2": None if bias2 is None else bias2.float(),
    }
    options = {name: value for name, value in wanted.items() if value is not None}
    parameters = aiter.known.fused_moe.parameters
    missing = [name for name in options if name not in parameters]
    if missing:
        what = f"amd-aiter {aiter.known.version}: its fused_moe has no {', '.join(missing)}"
        raise BackendUnavailable("backend aiter", what, hint="install a newer amd-aiter")
    if "gate_mode" in parameters:
        options["gate_mode"] = "separated"
    return options
