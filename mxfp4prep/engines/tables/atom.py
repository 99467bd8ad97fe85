"""ATOM.

Read at commit ffdf3bb of 2026-08-22: what its layers, its loader and its config do. Of its model
files, only those of the families in `read` were, at whatever commit was at hand. Qwen3.8-Flash-Next
came after that commit: pull request 2048, opened 2026-08-27.
"""

from __future__ import annotations

from mxfp4prep.engines.rules import (
    DenseRule,
    Engine,
    ExpertRule,
    NameRule,
    Runs,
    SchemeWord,
    SharedRule,
    Switch,
)

_ATOM_TRITON = Switch("ATOM_USE_TRITON_GEMM", False, "Triton's preshuffle GEMM for linears")
_ATOM_PLAIN = Switch(
    "ATOM_USE_FP4_NON_SHUFFLE_TRITON_GEMM", False, "Triton's GEMM on weights as stored"
)
_AS_W4A4 = Runs("", "the config's input quantization is not read: inputs become MXFP4")
_INPUTS: tuple[SchemeWord, ...] = ("w4a16", "w4a6", "w4a8 static", "w4a8 dynamic")

_FLASH_NEXT = ("qwen4_exp", "qwen3_8_flash_next")
_NO_FILE = "ATOM ffdf3bb has no model file of this family"
_GDN = (
    f"{_NO_FILE}; later ones refuse MXFP4 here at every degree (ValueError: requires unquantized "
    "GDN input projections) or build in_proj_qkv, z, b and a one by one"
)

ATOM = Engine(
    name="atom",
    label="ATOM",
    version="ATOM ffdf3bb (2026-08-22)",
    sources=(
        "https://github.com/ROCm/ATOM: atom/model_ops/linear.py, moe.py, embed_head.py",
        "https://github.com/ROCm/ATOM: atom/config.py, atom/quant_spec.py",
        "https://github.com/ROCm/ATOM: atom/models/qwen3_next.py, qwen3_5.py (create_qkvzba_proj)",
        "https://github.com/ROCm/ATOM: atom/models/qwen4_exp.py, qwen3_8_flash_next.py (later)",
        "https://github.com/ROCm/aiter: aiter/ops/shuffle.py, aiter/utility/fp4_utils.py",
        "https://github.com/ROCm/aiter/issues/4176",
        "https://github.com/ROCm/ATOM/pull/2292",
        "https://github.com/ROCm/ATOM/pull/2048",
    ),
    switches=(_ATOM_TRITON, _ATOM_PLAIN),
    dense=DenseRule(
        asm="always",
        instead=((_ATOM_PLAIN.name, "triton"), (_ATOM_TRITON.name, "triton-preshuffle")),
        guarded=False,
        partial_groups="overrun",
    ),
    experts=ExpertRule(
        needs=(),
        without=(None, ""),
        # moe.py, Mxfp4MoEMethod: pad_align for both sizes, whatever the inputs.
        pad=256,
        pad_hidden=256,
        other_pads={"moe-aiter-bf16": (256, 256), "moe-aiter-fp8": (256, 256)},
        scales="floored",
        floored_starts=frozenset({"gpt_oss"}),
    ),
    names=NameRule(
        globs=True,
        regex="search",
        parents=True,
        keys="within",
        bank_keys=False,
        fused={
            "qkv_proj": "qkv_proj",
            "gate_up_proj": "gate_up_proj",
            "w13": "w13",
            "fused_qkv_a_proj": "fused_qkv_a_proj",
            "in_proj_qkvz": "in_proj_qkvz",
            "in_proj_ba": "in_proj_ba",
        },
        # One linear of all six parts only where the global scheme is bfloat16.
        fused_plain={"in_proj_qkvz": "in_proj_qkvzba", "in_proj_ba": "in_proj_qkvzba"},
        unsettled=dict.fromkeys(
            _FLASH_NEXT, dict.fromkeys(("in_proj_qkvz", "in_proj_ba", "in_proj_qkvzba"), _GDN)
        ),
        mixed="unknown",
    ),
    schemes={
        ("linear", "w4a4"): Runs(""),
        ("expert", "w4a4"): Runs(""),
        **{("linear", word): _AS_W4A4 for word in _INPUTS},
        ("expert", "w4a16"): Runs("moe-aiter-bf16"),
        ("expert", "w4a8 static"): Runs("moe-aiter-fp8"),
        ("expert", "w4a8 dynamic"): Runs("moe-aiter-fp8"),
    },
    no_scheme={
        "linear": "not known how its linears run this scheme",
        "expert": "not known how its experts run this scheme",
    },
    shared=SharedRule(fusion=None),
    scale_names=("unknown", "scales are named weight_quantizer.scale: not known how it loads them"),
    outputs=False,
    read=frozenset({"gpt_oss", "llama", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"}),
    unread=dict.fromkeys(
        _FLASH_NEXT,
        f"{_NO_FILE} (pull request 2048 brought one), and of the later ones some keep the shared "
        "expert apart and one fuses it",
    ),
)
