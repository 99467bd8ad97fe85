"""MXFP4 for vLLM on a CPU, to compare with: Quark's own tensors, vLLM's own loaders, plain torch.

Shares no code with the package. vLLM has no MXFP4 kernel for CPUs: `register` adds one for linear
layers, and a method for routed experts that keeps Quark's shapes and runs expert by expert.
"""

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
)
from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkMoEMethod
from vllm.model_executor.layers.quantization.quark.schemes import QuarkW4A8_MXFP4_FP8
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms.interface import PlatformEnum

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours; a value there goes to the neighbour with an even code."""


def dense(packed, scale):
    """(..., n, k) float32 from Quark's (..., n, k / 2) and (..., n, k / 32)."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    values = torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])
    powers = torch.exp2(scale.float() - 127)
    return values * powers.repeat_interleave(32, dim=-1)


def quantized(x):
    """x (..., k) as MXFP4 holds it: a power of two for 32 values, chosen from the largest rounded
    to one bit behind the point (Quark's EVEN), values to the nearest, ties to even."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    power = exponent - 1 + (mantissa >= 0.875).int() - 2
    power = torch.where(largest == 0, 0, power.clamp(-126, 127)).float()
    scaled = blocks / torch.exp2(power)
    size = scaled.abs()
    code = sum(
        ((size > border) if number % 2 == 0 else (size >= border)).long()
        for number, border in enumerate(BETWEEN)
    )
    return (E2M1[code] * scaled.sign() * torch.exp2(power)).flatten(-2)


@torch.library.custom_op("vllm_reference::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, scale: Tensor, is_quantizing: bool, bias: Tensor | None
) -> Tensor:
    """A linear layer, in one piece also where vLLM compiles what is around it."""
    rows = quantized(x.float()) if is_quantizing else x.float()
    y = rows @ dense(weight, scale).T
    return (y if bias is None else y + bias.float()).to(x.dtype)


@linear.register_fake
def _(x, weight, scale, is_quantizing, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("vllm_reference::experts", mutates_args=())
def experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    is_quantizing: bool,
) -> Tensor:
    """Routed experts, one after the other: gate and up, silu, down."""
    quantize = quantized if is_quantizing else torch.Tensor.float
    y = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        token, slot = torch.where(topk_ids == expert)
        if not len(token):
            continue
        both = quantize(x[token].float()) @ dense(w13[expert], w13_scale[expert]).T
        gate, up = both.chunk(2, dim=-1)
        middle = quantize(torch.nn.functional.silu(gate) * up)
        out = middle @ dense(w2[expert], w2_scale[expert]).T
        y.index_add_(0, token, out * topk_weights[token, slot].float().unsqueeze(-1))
    return y.to(x.dtype)


@experts.register_fake
def _(x, *_):
    return torch.empty_like(x)


class ReferenceKernel(MxFp4LinearKernel):
    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None):
        is_quantizing = self.config.activation_quant_key is not None
        rows = x.reshape(-1, x.shape[-1])
        y = linear(rows, layer.weight, layer.weight_scale, is_quantizing, bias)
        return y.reshape(*x.shape[:-1], -1)


class ReferenceMoEMethod(FusedMoEMethodBase):
    def __init__(self, moe, is_quantizing):
        super().__init__(moe)
        self.is_quantizing = is_quantizing

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **more
    ):
        width = intermediate_size_per_partition
        attributes = {
            "weight_loader": more["weight_loader"],
            "quant_method": FusedMoeWeightScaleSupported.BLOCK.value,
        }
        for name, n, k in (("w13", 2 * width, hidden_size), ("w2", hidden_size, width)):
            for suffix, columns in (("weight", k // 2), ("weight_scale", k // 32)):
                empty = torch.zeros(num_experts, n, columns, dtype=torch.uint8)
                parameter = torch.nn.Parameter(empty, requires_grad=False)
                layer.register_parameter(f"{name}_{suffix}", parameter)
                set_weight_attrs(parameter, attributes)

    def get_fused_moe_quant_config(self, layer):
        return None

    def apply(self, layer, x, topk_weights, topk_ids, **_):
        if layer.expert_map is not None:  # experts of other ranks: -1
            topk_ids = layer.expert_map[topk_ids.long()]
        banks = layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale
        return experts(x, *banks, topk_weights, topk_ids, self.is_quantizing)


def static_fp8(scheme, layer, x, bias=None):
    """In place of a scheme's emulation, which needs another package: inputs to E4M3 and back."""
    scale = layer.input_scale.float()
    rows = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    y = rows @ dense(layer.weight.data, layer.weight_scale.data).T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _moe_method(quant_config, module, method_cls, weight_quant_key, activation_quant_key, **_):
    return ReferenceMoEMethod(module.moe_config, activation_quant_key is not None)


def register():
    register_linear_kernel(ReferenceKernel, PlatformEnum.CPU, "mxfp4")
    QuarkMoEMethod.get_moe_method = staticmethod(_moe_method)
    QuarkW4A8_MXFP4_FP8._apply_emulation = static_fp8
