"""From tensors to kernel launches: what the dense and the grouped products have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from mxfp4prep.layouts import PATHS
from mxfp4prep.mxfp4 import ELEMENTS
from mxfp4prep.parallel import SCALE_GROUP
from mxfp4prep.runtime.kernels import gemm
from mxfp4prep.runtime.kernels.arrange import arrange, encode
from mxfp4prep.runtime.kernels.configs import SMALL
from mxfp4prep.runtime.kernels.counters import counters
from mxfp4prep.runtime.kernels.expand import expand
from mxfp4prep.runtime.kernels.scaled import scaled

if TYPE_CHECKING:
    from torch import Tensor

    from mxfp4prep.runtime.kernels.configs import Tile

PIECES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""How many bfloat16 numbers, of 8 significand bits each, add up to one of another dtype exactly."""

ELEMENT_OF = {"mxfp4": "fp4", "mxfp6_e2m3": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2"}
"""Input quantizations to MX, and their elements in mxfp4.ELEMENTS."""


class Rows(NamedTuple):
    """Activations as the GEMM kernels read them.

    tensor      (pieces, m, width) bfloat16, or (m, width) where there is one piece; their sum is x.
                With `groups`: (m, width / 2) uint8, MXFP4 codes
    row_scale   (m,) float32 that every row of the result is multiplied by, or None
    groups      (m, width / 32) uint8, the scale bytes of MXFP4 codes
    """

    tensor: Tensor
    row_scale: Tensor | None = None
    groups: Tensor | None = None

    @property
    def pieces(self) -> int:
        return self.tensor.shape[0] if self.tensor.dim() == 3 else 1


class Stored(NamedTuple):
    """A stored matrix, or a bank of them, and which part of it counts.

    weight, scale   as `path` stores (n_stored, k_stored) matrices
    bias            (n_stored,) floating, for a bank (e, n_stored), or None
    n, k            rows and columns that are read: the others are padding
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    path: str
    n: int
    k: int
    n_stored: int
    k_stored: int


class Groups(NamedTuple):
    """Which rows go to which matrix of a bank, as grouped.sorted_pairs lists them.

    rows      (blocks * bm,) int32
    expert    (blocks,) int32 or int64; a number of no matrix: the block is nobody's
    top       a row of x is its number in `rows` divided by top
    """

    rows: Tensor
    expert: Tensor
    top: int


def rows_of(x: Tensor, input_quant: str, row_scale: Tensor | None, tile: Tile, k: int) -> Rows:
    """x (m, k) quantized, for a product with `tile`; x itself where the kernel can read it.

    row_scale   for FP8 inputs, as dense.row_scales gives it
    """
    if tile.kernel == "scaled" and input_quant == "mxfp4":
        return encoded(x, tile.columns(k))
    if input_quant == "none" and x.dtype == torch.bfloat16 and x.stride(1) == 1:
        aligned = x.stride(0) % 32 == 0 and x.data_ptr() % 16 == 0
        if aligned and (tile.kernel != "few" or k == tile.columns(k)):
            return Rows(x)
    return arranged(x, input_quant, row_scale, tile.columns(k))


def arranged(x: Tensor, input_quant: str, row_scale: Tensor | None, width: int) -> Rows:
    """x (m, k) quantized, in rows of `width` columns that are zero from k on."""
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    pieces = PIECES[x.dtype] if input_quant == "none" else 1
    out = torch.empty((pieces, m, width), dtype=torch.bfloat16, device=x.device)
    element = ELEMENTS[ELEMENT_OF.get(input_quant, "fp4")]
    kind = "mx" if input_quant in ELEMENT_OF else "none" if input_quant == "none" else "fp8"
    bm, warps = (1, 1) if m <= 32 else (2, 2) if m < 256 else (16, 4)
    arrange[(ceil_div(m, bm), ceil_div(width, 256))](
        x,
        out,
        x if row_scale is None else row_scale,
        m,
        k,
        x.stride(0),
        width,
        out.stride(0),
        KIND=kind,
        MANT=element.mantissa_bits,
        LOW=element.smallest_exponent,
        TOP=element.largest_exponent,
        PIECES=pieces,
        BM=bm,
        BK=256,
        num_warps=warps,
        **dependent(x.device, m * k),
    )
    return Rows(out, row_scale)


def encoded(x: Tensor, width: int) -> Rows:
    """x (m, k) as MXFP4 codes and scale bytes of `width` columns, zero from k on."""
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    codes = torch.empty((m, width // 2), dtype=torch.uint8, device=x.device)
    groups = torch.empty((m, width // SCALE_GROUP), dtype=torch.uint8, device=x.device)
    bm = 1 if m <= 32 else 2
    encode[(ceil_div(m, bm), ceil_div(width, 256))](
        x, codes, groups, m, k, x.stride(0), codes.stride(0), groups.stride(0),
        BM=bm, BK=256, num_warps=1 if m <= 32 else 2,
    )  # fmt: skip
    return Rows(codes, groups=groups)


def product(
    rows: Rows, stored: Stored, out: Tensor, tile: Tile, groups: Groups | None = None
) -> None:
    """Fills out (m, n): rows times a stored matrix, or times a bank's matrices as `groups` says."""
    m, n, k = out.shape[0], stored.n, stored.k
    weight_layout, scale_layout = PATHS[stored.path]
    steps, splits = tile.division(k)
    blocks = ceil_div(m, tile.bm) if groups is None else groups.expert.numel()
    tiles = blocks * ceil_div(n, tile.bn)
    device = out.device
    partial, arrived = out, out
    if splits > 1:
        sums = (tiles, splits, tile.bm, tile.bn)
        partial = torch.empty(sums, dtype=torch.float32, device=device)
        arrived = counters(tiles, device)
    if tile.kernel == "few":
        x = rows.tensor.view(torch.int32)
    else:
        x = rows.tensor
    whole_k = k == tile.columns(k)
    shared = {
        "TILED": weight_layout == "tile16x16",
        "SCALES": scale_layout,
        "WHOLE_N": n % tile.bn == 0,
        "WHOLE_K": whole_k,
        "ODD_K": k % 2 == 1,
        "BIAS": stored.bias is not None,
        "SPLITS": splits,
        "GROUPED": groups is not None,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "STAGES": tile.loads(whole_k, rows.pieces, amd=is_amd(device)),
        "num_warps": tile.warps,
    }
    operands = (stored.weight, stored.scale, out if stored.bias is None else stored.bias)
    lists = (out, out) if groups is None else (groups.rows, groups.expert)
    strides = (ceil_div(stored.k_stored, 2), ceil_div(stored.k_stored, SCALE_GROUP))
    sizes = (m, n, stored.n_stored, k, *strides)
    top = 1 if groups is None else groups.top
    bank = 1 if groups is None else stored.weight.shape[0]
    grid = (tiles, splits)
    if tile.kernel == "scaled":
        codes = rows.groups
        scaled[grid](
            x,
            x if codes is None else codes,
            *operands,
            out,
            partial,
            arrived,
            *lists,
            *sizes,
            x.stride(-2),
            0 if codes is None else codes.stride(0),
            steps,
            top,
            bank,
            ENCODED=codes is not None,
            **shared,
        )
        return
    kernel = gemm.few if tile.kernel == "few" else gemm.many
    kernel[grid](
        x,
        *operands,
        out if rows.row_scale is None else rows.row_scale,
        out,
        partial,
        arrived,
        *lists,
        *sizes,
        x.stride(-2),
        x.stride(0) if x.dim() == 3 else 0,
        steps,
        top,
        bank,
        PIECES=rows.pieces,
        ROW_SCALE=rows.row_scale is not None,
        PTX=speaks_ptx(device),
        WIDE=device.type == "cpu",
        **shared,
        **dependent(device, n * k * (1 if groups is None else blocks)),
    )


def expanded(weight: Tensor, scale: Tensor, n: int, k: int, path: str) -> Tensor:
    """A stored matrix as (n, k) bfloat16, exactly."""
    weight_layout, scale_layout = PATHS[path]
    out = torch.empty((n, k), dtype=torch.bfloat16, device=weight.device)
    bn, bk = 32, 256
    expand[(ceil_div(n, bn), ceil_div(k, bk))](
        weight,
        scale,
        out,
        n,
        n,
        k,
        ceil_div(k, 2),
        ceil_div(k, SCALE_GROUP),
        TILED=weight_layout == "tile16x16",
        SCALES=scale_layout,
        WHOLE_N=n % bn == 0,
        WHOLE_K=k % bk == 0,
        ODD_K=k % 2 == 1,
        PTX=speaks_ptx(weight.device),
        BN=bn,
        BK=bk,
        num_warps=4,
    )
    return out


def ceil_div(count: int, size: int) -> int:
    """How many parts of `size` hold `count`."""
    return -(-count // size)


def speaks_ptx(device: torch.device) -> bool:
    """Whether the device takes NVIDIA's instructions."""
    return device.type == "cuda" and torch.version.hip is None


def is_amd(device: torch.device) -> bool:
    """Whether the device is one of AMD's GPUs."""
    return device.type == "cuda" and torch.version.hip is not None


def multiplies_mxfp4(device: torch.device) -> bool:
    """Whether the device's matrix units take MXFP4: gfx950, and NVIDIA's from Blackwell on."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName)
        return name.partition(":")[0] == "gfx950"
    return torch.cuda.get_device_capability(device) >= (10, 0)


def dependent(device: torch.device, weights: int = 0) -> dict[str, bool]:
    """Launch arguments that let a kernel start while the one before it ends: it waits for that
    one's results before it reads anything, but its launch is already paid for.

    weights   how many numbers the kernel multiplies with: a long kernel gains nothing, and loses
              when the next one takes its place on the multiprocessors early
    """
    if weights >= SMALL or not speaks_ptx(device):
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
