"""vLLM 0.32, 0.33 and what is proposed for its main branch.

Read in the wheels vllm 0.32.0 and vllm 0.33.0; "vllm-main" is 0.33.0 with pull request 58139 as it
stood on 2026-09-22, and nothing else that may have changed since.
"""

from __future__ import annotations

from dataclasses import replace

from mxfp4prep.engines.rules import (
    DenseRule,
    Emulated,
    Engine,
    ExpertRule,
    Kind,
    NameRule,
    Runs,
    SchemeWord,
    SharedRule,
    Switch,
)

_VLLM = "https://github.com/vllm-project/vllm"
_QUANT = "model_executor/layers/quantization/quark"
_NO_SCHEME = "NotImplementedError: no quark compatible scheme was found"

_AITER = Switch("VLLM_ROCM_USE_AITER", False, "AITER's kernels are used at all", usual=True)
_AITER_MOE = Switch("VLLM_ROCM_USE_AITER_MOE", True, "AITER's fused MoE, where AITER is used")
_FUSION = Switch(
    "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS",
    False,
    "shared experts become routed ones, where AITER's fused MoE is used",
)
_INVARIANT = Switch("VLLM_BATCH_INVARIANT", False, "no kernel may depend on the batch")

_WRAPPED = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
_TOWERED = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)
_KIMI = (("language_model.layers.", "language_model.model.layers."),)
_OLD_WRAPPED = (*_WRAPPED, ("model.", "language_model.model."))

_FUSED = {
    "qkv_proj": "qkv_proj",
    "gate_up_proj": "gate_up_proj",
    "w13": "w13",
    "fused_qkv_a_proj": "fused_qkv_a_proj",
    "in_proj_qkvz": "in_proj_qkvz",
    "in_proj_ba": "in_proj_ba",
}

_VLLM_NAMES = NameRule(
    globs=False,
    regex="match",
    parents=False,
    keys="within",
    bank_keys=False,
    fused=_FUSED,
    mixed="refused",
    renames={
        "qwen3_vl": _WRAPPED,
        "qwen3_vl_moe": _WRAPPED,
        "qwen3_5": _WRAPPED,
        "qwen3_5_moe": _WRAPPED,
        "qwen4_exp": _WRAPPED,
        "glm4v": _WRAPPED,
        "glm4v_moe": _WRAPPED,
        "qwen2_5_vl": _OLD_WRAPPED,
        "gemma3": _TOWERED,
        "llava": _TOWERED,
        "mistral3": (*_TOWERED, ("model.", "language_model.model.")),
        "kimi_k25": _KIMI,
    },
    doubtful={
        "glm5_next": "none of 1550 exclude entries of a GLM-5.3-Flash checkpoint matched in vLLM "
        "(issue 54547, open)"
    },
    required=(
        ("export", "ValueError: the export key should be included in the configuration"),
        ("export.kv_cache_group", "TypeError: export.kv_cache_group is None"),
        ("exclude", "TypeError: exclude is None"),
        ("layer_type_quant_config", "AttributeError: layer_type_quant_config is None"),
    ),
    kv_keys="globs",
)

_VLLM_SCHEMES: dict[tuple[Kind, SchemeWord], Runs] = {
    ("linear", "w4a4"): Runs(""),
    ("linear", "w4a16"): Runs("emulation", "needs the amd-quark package"),
    ("linear", "w4a6"): Runs("emulation", "needs the amd-quark package"),
    ("linear", "w4a8 static"): Runs("triton-a8w4"),
    ("linear", "w4a8 dynamic"): Runs(
        None, "ValueError: unsupported activation quant key (dynamic FP8)"
    ),
    ("expert", "w4a4"): Runs(""),
    ("expert", "w4a16"): Runs("moe-aiter-bf16"),
    ("expert", "w4a6"): Runs("moe-emulation", "needs the amd-quark package"),
    ("expert", "w4a8 static"): Runs("moe-aiter-fp8"),
    ("expert", "w4a8 dynamic"): Runs(
        None, "NotImplementedError: dynamic input scales are not implemented for w_mxfp4_a_fp8"
    ),
}

_VLLM_EXPERTS = ExpertRule(
    needs=(_AITER.name, _AITER_MOE.name),
    without=("moe-emulation", "AITER's fused MoE is off: emulated, which needs amd-quark"),
    # oracle/mxfp4.py, mxfp4_round_up_hidden_size_and_intermediate_size; Quark does not pass it the
    # activation, so no other path gets an intermediate size of 128.
    pad=128,
    pad_hidden=256,
    other_pads={"moe-aiter-bf16": (256, 256), "moe-aiter-fp8": (256, 256)},
    scales="floored",
    whole_groups=frozenset({"gpt_oss"}),
    stored_fused=True,
)
_QWEN_SHARED = frozenset({"qwen3_next", "qwen3_5_moe", "qwen4_exp"})
_DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"})

VLLM_033 = Engine(
    name="vllm-0.33",
    label="vLLM 0.33",
    version="vLLM 0.33.0",
    sources=(
        "vllm@0.33.0: model_executor/kernels/linear/mxfp4/aiter.py, _aiter_ops.py",
        f"vllm@0.33.0: {_QUANT}/quark.py, quark_moe.py, utils.py, schemes/quark_ocp_mx.py",
        "vllm@0.33.0: model_executor/layers/fused_moe/routed_experts.py, oracle/mxfp4.py, utils.py",
        "vllm@0.33.0: model_executor/models/qwen3_next.py",
        f"{_VLLM}/pull/55213",
        f"{_VLLM}/pull/49420",
        f"{_VLLM}/issues/54547",
    ),
    switches=(_AITER, _AITER_MOE, _FUSION, _INVARIANT),
    dense=DenseRule(
        asm="tuned",
        needs=(_AITER.name,),
        small_m_triton=1,
        small_m_asm=_INVARIANT.name,
        floored=frozenset({"w4a8 static"}),
    ),
    experts=_VLLM_EXPERTS,
    names=_VLLM_NAMES,
    schemes=_VLLM_SCHEMES,
    no_scheme={"linear": _NO_SCHEME, "expert": "RuntimeError: unsupported FusedMoe scheme"},
    shared=SharedRule(
        fusion=(_AITER.name, _AITER_MOE.name, _FUSION.name),
        replicates=_QWEN_SHARED | {"alice_ai"},
        whole_under_sp=_DEEPSEEK,
    ),
    scale_names=("crash", "no parameter of the name weight_quantizer.scale (amd/Quark issue 44)"),
    outputs=True,
    symmetric=True,
    heads="ValueError: total number of attention heads ({heads}) must be divisible by tensor "
    "parallel size ({tp})",
)

_FP4_ASM = Switch("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", False, "the ASM GEMM for FP4 linears")

VLLM_032 = replace(
    VLLM_033,
    name="vllm-0.32",
    label="vLLM 0.32",
    version="vLLM 0.32.0",
    sources=(
        "vllm@0.32.0: model_executor/kernels/linear/mxfp4/aiter.py, _aiter_ops.py, envs.py",
        f"vllm@0.32.0: {_QUANT}/quark.py, quark_moe.py, utils.py, schemes/quark_ocp_mx.py",
        "vllm@0.32.0: model_executor/layers/fused_moe/routed_experts.py, oracle/mxfp4.py, utils.py",
        "vllm@0.32.0: model_executor/models/qwen3_next.py",
        f"{_VLLM}/pull/55213",
        f"{_VLLM}/pull/57055",
    ),
    switches=(_AITER, _AITER_MOE, _FUSION, _FP4_ASM, _INVARIANT),
    dense=DenseRule(
        asm="switched",
        needs=(_AITER.name, _FP4_ASM.name),
        # It looks for 4 times the packed columns, and AITER names its files by the K of the layer:
        # _aiter_ops.py, is_triton_gemm_afp4wfp4_presh_ws_tuned. 0.33 looks for K.
        small_m_triton=2,
        small_m_asm=_INVARIANT.name,
        floored=frozenset({"w4a8 static"}),
    ),
    experts=replace(
        _VLLM_EXPERTS,
        # The experts of Qwen3.8-Flash-Next over eight ranks: AITER pads 640 to 768 and is not
        # numerically reliable there on gfx950, so vLLM emulates this very bank; in 0.33 no more.
        # oracle/mxfp4.py, _requires_qwen38_tep8_emulation; pull request 57055.
        emulated=(Emulated(512, 2560, 640, 8),),
    ),
    shared=replace(VLLM_033.shared, replicates=_QWEN_SHARED),
)

VLLM_MAIN = replace(
    VLLM_033,
    name="vllm-main",
    label="vLLM main",
    version="vLLM 0.33.0 with pull request 58139 (open on 2026-09-22)",
    sources=(*VLLM_033.sources, f"{_VLLM}/pull/58139"),
    dense=replace(VLLM_033.dense, triton_rows=frozenset({96})),
)
