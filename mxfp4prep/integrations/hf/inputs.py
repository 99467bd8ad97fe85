"""Dynamic FP8 inputs of layers whose ranks see a part of every row: the scale is the whole input's.

Quark takes the scale of a layer's input over all that the layer reads. Where ranks share a layer's
columns, each sees some of them, and all have to take the largest absolute value of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mxfp4prep import mxfp4

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

DYNAMIC_FP8 = frozenset({"fp8_tensor", "fp8_token"})
"""Names of INPUT_QUANT whose scale depends on the input."""


def quantize_fp8(x: Tensor, dims: Sequence[int], sharers: DeviceMesh | None) -> Tensor:
    """`x` rounded to float8_e4m3fn at scales absmax / 448, decoded: float32 as x.

    dims      along which values share a scale
    sharers   the ranks that hold parts of x, of one shape; None where x is whole
    """
    values = x.float()
    if not values.numel():
        return values
    largest = values.abs().amax(tuple(dims), keepdim=True)
    if sharers is not None:
        import torch.distributed as dist

        dist.all_reduce(largest, dist.ReduceOp.MAX, group=sharers.get_group())
    return mxfp4.fake_quantize_fp8(values, mxfp4.dynamic_fp8_scale(largest))


def quantize_rows(rows: Tensor, input_quant: str, sharers: DeviceMesh) -> Tensor:
    """A rank's columns of an MXFP4 layer's input, (tokens, k), quantized as `input_quant` says, a
    name of DYNAMIC_FP8: float32."""
    return quantize_fp8(rows, (0, 1) if input_quant == "fp8_tensor" else (1,), sharers)
