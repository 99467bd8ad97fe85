"""SGLang 0.5.

Read in the wheel sglang 0.5.23.
"""

from __future__ import annotations

from mxfp4prep.engines.rules import (
    DenseRule,
    Engine,
    ExpertRule,
    NameRule,
    Runs,
    SharedRule,
    Switch,
)

_SGLANG_AITER = Switch(
    "SGLANG_USE_AITER", False, "AITER's kernels, its fused MoE among them", usual=True
)
_SGLANG_ASM = Switch("SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM", False, "the ASM GEMM for FP4 linears")
_A8W4 = Switch("AITER_FORCE_A8W4", False, "linears are decoded to bf16 at load")

_WRAPPED = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "language_model.model."),
)

# Their model files have no packed_modules_mapping; the loader adds gate_up_proj alone for Quark.
_NO_QKV_MAP = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "glm4_moe", "gpt_oss"}
)

SGLANG_05 = Engine(
    name="sglang-0.5",
    label="SGLang 0.5",
    version="SGLang 0.5.23",
    sources=(
        "sglang@0.5.23: srt/layers/quantization/quark/quark.py, utils.py, weights.py",
        "sglang@0.5.23: srt/layers/quantization/quark/schemes/quark_w4a4_mxfp4.py",
        "sglang@0.5.23: srt/layers/quantization/quark/schemes/quark_w4a4_mxfp4_moe.py",
        "sglang@0.5.23: srt/layers/quantization/quark/schemes/quark_w4a8_mxfp4_moe.py",
        "sglang@0.5.23: srt/model_loader/loader.py, srt/models/*.py (packed_modules_mapping)",
        "sglang@0.5.23: srt/layers/parameter.py, srt/layers/moe/fused_moe_triton/layer.py",
        "https://github.com/sgl-project/sglang/pull/39598",
        "https://github.com/sgl-project/sglang/pull/39317",
    ),
    switches=(_SGLANG_AITER, _SGLANG_ASM, _A8W4),
    dense=DenseRule(
        asm="switched",
        needs=(_SGLANG_ASM.name,),
        instead=((_A8W4.name, "bf16"),),
        triton_up_to=128,
        partial_groups="floored",
    ),
    experts=ExpertRule(
        needs=(_SGLANG_AITER.name,),
        without=(None, "NameError: e8m0_shuffle is imported only with SGLANG_USE_AITER=1"),
        pad=256,
        pad_hidden=1,
        other_pads={"moe-aiter-fp8": (256, 256)},
        scales="asserted",
        whole_groups=frozenset({"gpt_oss"}),
    ),
    names=NameRule(
        globs=False,
        regex="match",
        parents=False,
        keys="globs",
        bank_keys=True,
        fused={
            "qkv_proj": "qkv_proj",
            "gate_up_proj": "gate_up_proj",
            "w13": "w13",
            "fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa",
            "in_proj_qkvz": "in_proj_qkvz",
            "in_proj_ba": "in_proj_ba",
        },
        mixed="refused",
        unmapped={
            "qkv_proj": _NO_QKV_MAP,
            "in_proj_qkvz": frozenset({"qwen3_next"}),
            "in_proj_ba": frozenset({"qwen3_next"}),
        },
        renames={
            "qwen3_vl": _WRAPPED,
            "qwen3_vl_moe": _WRAPPED,
            "kimi_k25": (("language_model.layers.", "language_model.model.layers."),),
        },
        bare="language_model.",
        required=(
            ("export", "ValueError: the export key should be included in the configuration"),
            ("export.kv_cache_group", "TypeError: export.kv_cache_group is None"),
            ("layer_quant_config", "TypeError: layer_quant_config is None"),
            ("layer_type_quant_config", "TypeError: layer_type_quant_config is None"),
        ),
        kv_keys="same",
    ),
    schemes={
        ("linear", "w4a4"): Runs(""),
        ("expert", "w4a4"): Runs(""),
        ("expert", "w4a8 static"): Runs("moe-aiter-fp8"),
    },
    no_scheme={
        "linear": "NotImplementedError: no quark compatible scheme was found",
        "expert": "RuntimeError: unsupported FusedMoe scheme",
    },
    shared=SharedRule(fusion=None),
    scale_names=(
        "unknown",
        "scales are named weight_quantizer.scale: most models log 'not found in params_dict' and "
        "go on with scales that were never set",
    ),
    outputs=True,
)
