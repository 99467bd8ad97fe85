"""The table of module names: what serving engines do with the module that stands behind a name.

A row is found by the last part of a module's name, or by the last two where the last alone is
ambiguous (`indexer.wq_b`). Most names mean the same in every model (COMMON); where the same name
means something else, the architecture has a row of its own, found by `model_type` in config.json.
A name without a row is unknown: nothing is guessed, the module is judged whole.

Sources: packed_modules_mapping, stacked weight maps and the *ParallelLinear uses of the model files
of vLLM 0.33.0 and SGLang 0.5.23; the order of rows inside a stored tensor is that of the model
files of transformers 5.24.0.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Parallel = Literal["column", "row", "qkv", "merged", "replicated", "expert", "unknown"]

PARTS: dict[str, str] = {
    "q": "query heads",
    "k": "key heads",
    "v": "value heads",
    "qkv": "q, k and v one after the other",
    "grouped_qkv": "per KV head: its q heads, its k, its v",
    "heads": "whatever an attention head needs, head by head",
    "output_groups": "groups of heads that share an output projection",
    "gate": "gate rows of a gated MLP",
    "up": "up rows of a gated MLP",
    "gate_up": "gate and up rows in one tensor",
    "down": "the MLP's way back",
    "halves": "two blocks of equal size",
    "q_a": "low-rank query",
    "kv_a": "low-rank key and value",
    "linear_qkv": "q, k and v of linear attention one after the other",
    "linear_value": "value heads of linear attention",
    "linear_key": "per key head of linear attention: everything that belongs to it",
    "vocab": "one row per token",
}
"""What the rows of a module are, which decides where they may be cut; "" is rows like any other."""


class Row(NamedTuple):
    """What engines do with the modules of one name.

    part    a key of PARTS, or ""
    fused   last part of the name of the projection that is built from the module and its siblings
    """

    parallel: Parallel
    part: str = ""
    fused: str | None = None


_REPLICATED = Row("replicated")
_COLUMN = Row("column")
_ROW = Row("row")
_VOCABULARY = Row("column", "vocab")
_HEADS = Row("column", "heads")
_QKV = Row("qkv", "qkv")
_GROUPED_QKV = Row("qkv", "grouped_qkv")
_GATE_UP = Row("merged", "gate_up")
_HALVES = Row("merged", "halves")

COMMON: dict[str, Row] = {
    # Attention: Llama, Mistral, Mixtral, Qwen, Gemma, OLMo, Granite, GLM-4.5, MiniMax-M2, gpt-oss.
    # An output gate (Qwen3-Next, Qwen3.5) doubles the rows of each q head and changes nothing here.
    "q_proj": Row("qkv", "q", "qkv_proj"),
    "k_proj": Row("qkv", "k", "qkv_proj"),
    "v_proj": Row("qkv", "v", "qkv_proj"),
    "qkv_proj": _QKV,  # Phi-3 stores it so
    "o_proj": _ROW,
    "out_proj": _ROW,
    # Latent attention: DeepSeek-V2, V3, R1, Kimi-K2, GLM-5, MiniCPM3. Where q_lora_rank is null,
    # q_proj stands alone, which makes it column-parallel by heads.
    "q_a_proj": Row("replicated", "q_a", "fused_qkv_a_proj"),
    "kv_a_proj_with_mqa": Row("replicated", "kv_a", "fused_qkv_a_proj"),
    "q_b_proj": _HEADS,
    "kv_b_proj": _HEADS,
    # Sparse attention's indexer, DeepSeek-V3.2 and V4: every rank scores every token.
    "indexer.wq_b": _REPLICATED,
    "indexer.wk": _REPLICATED,
    "indexer.weights_proj": _REPLICATED,
    # Gated MLPs, routed and shared experts. Phi-3, GLM-4 and gpt-oss store gate_up_proj. The banks
    # of Llama-4 and gpt-oss are (experts, in, out) in transformers; what Quark packs is (out, in).
    "gate_proj": Row("merged", "gate", "gate_up_proj"),
    "up_proj": Row("merged", "up", "gate_up_proj"),
    "gate_up_proj": _GATE_UP,
    "down_proj": Row("row", "down"),
    "w1": Row("merged", "gate", "w13"),  # Mixtral, MiniMax-M2, Phi-3.5-MoE, DeepSeek-V4
    "w3": Row("merged", "up", "w13"),
    "w13": _GATE_UP,
    "w2": Row("row", "down"),
    "fc1": _COLUMN,  # OPT, Phi
    "fc2": _ROW,
    # Granite: banks of experts as (experts, 2 * width, hidden) and (experts, hidden, width).
    "block_sparse_moe.input_linear": Row("expert", "gate_up"),
    "block_sparse_moe.output_linear": Row("expert", "down"),
    "shared_mlp.input_linear": _GATE_UP,
    "shared_mlp.output_linear": Row("row", "down"),
    # Linear attention. Qwen3-Next stores q, k, v, z (and b, a) together, key head by key head;
    # Qwen3.5 stores q | k | v as blocks in one tensor, and z, b, a apart.
    "in_proj_qkvz": Row("column", "linear_key"),
    "in_proj_ba": Row("column", "linear_key"),
    "in_proj_qkv": Row("merged", "linear_qkv", "in_proj_qkvz"),
    "in_proj_z": Row("merged", "linear_value", "in_proj_qkvz"),
    "in_proj_b": Row("merged", "linear_value", "in_proj_ba"),
    "in_proj_a": Row("merged", "linear_value", "in_proj_ba"),
    # Routers and gates of one row.
    "gate": _REPLICATED,
    "gate.wg": _REPLICATED,  # Hunyuan
    "router": _REPLICATED,  # Llama-4, gpt-oss, Jamba
    "router.layer": _REPLICATED,  # Granite, DBRX
    "router.proj": _REPLICATED,  # Gemma 4
    "router.classifier": _REPLICATED,  # LongCat
    "shared_expert_gate": _REPLICATED,
    # Vocabulary.
    "lm_head": _VOCABULARY,
    "embed_tokens": _VOCABULARY,
    "shared_head.head": _VOCABULARY,  # the head of a DeepSeek or GLM MTP layer
    # What joins embedding and hidden state in front of an MTP layer; its other names are the
    # main model's. Qwen's is column-parallel and gathered.
    "eh_proj": _REPLICATED,
    "mtp.fc": _COLUMN,
}
"""Last part, or last two parts, of a module's name -> row."""

# Megatron's names. One tensor holds q, k and v, per KV head (GPT-NeoX, BLOOM: of every head).
_MEGATRON: dict[str, Row] = {
    "query_key_value": _GROUPED_QKV,
    "dense": _ROW,
    "dense_h_to_4h": _COLUMN,
    "dense_4h_to_h": _ROW,
    "word_embeddings": _VOCABULARY,
    "embed_in": _VOCABULARY,
    "embed_out": _VOCABULARY,
}

# State-space layers of the first kind: x and z are the halves of in_proj. Of the second kind
# (Mamba-2: five blocks, some of which are repeated on every rank) in_proj stays unknown.
_MAMBA: dict[str, Row] = {
    f"{parent}.{leaf}": row
    for parent in ("mamba", "mixer")
    for leaf, row in (("in_proj", _HALVES), ("x_proj", _ROW), ("dt_proj", _COLUMN))
}

ARCHITECTURES: dict[str, dict[str, Row]] = {
    "gpt_neox": _MEGATRON,
    "bloom": _MEGATRON,
    "falcon": _MEGATRON,
    # ChatGLM, and GLM-4 under ChatGLM's code: Megatron's names with other contents.
    "chatglm": {
        "query_key_value": _QKV,
        "dense": _ROW,
        "dense_h_to_4h": _GATE_UP,
        "dense_4h_to_h": Row("row", "down"),
        "output_layer": _VOCABULARY,
        "word_embeddings": _VOCABULARY,
    },
    "bailing_moe": {
        "query_key_value": _QKV,
        "dense": _ROW,
        "word_embeddings": _VOCABULARY,
    },
    # Qwen 1 computes w1(x) * silu(w2(x)): w2 is the gate, not the way down.
    "qwen": {
        "c_attn": _QKV,
        "attn.c_proj": _ROW,
        "w1": Row("merged", "up", "gate_up_proj"),
        "w2": Row("merged", "gate", "gate_up_proj"),
        "mlp.c_proj": Row("row", "down"),
        "wte": _VOCABULARY,
    },
    # GPT-2's own layers are Conv1D, stored as (in, out): its c_attn, c_fc and c_proj stay unknown.
    "gpt_bigcode": {"c_attn": _QKV, "c_fc": _COLUMN, "c_proj": _ROW, "wte": _VOCABULARY},
    "starcoder2": {"c_fc": _COLUMN, "c_proj": _ROW},
    "internlm2": {
        "wqkv": _GROUPED_QKV,
        "wo": _ROW,
        "output": _VOCABULARY,
        "tok_embeddings": _VOCABULARY,
    },
    # DBRX's experts stay unknown: w2 is stored (experts * width, hidden), input by output.
    "dbrx": {"Wqkv": _QKV, "wte": _VOCABULARY},
    # Lightning attention: q, k, v of one head, then of the next.
    "minimax": {"qkv_proj": _HEADS, "output_gate": _HEADS},
    "minimax_text_01": {"qkv_proj": _HEADS, "output_gate": _HEADS},
    # Step3: one low-rank query, key and value for all ranks; heads come from wq.
    "step3": {
        "q_proj": Row("replicated", "", "qkv_proj"),
        "k_proj": Row("replicated", "", "qkv_proj"),
        "v_proj": Row("replicated", "", "qkv_proj"),
        "qkv_proj": _REPLICATED,
        "wq": _HEADS,
    },
    # DeepSeek-V4: one KV head, so wkv is whole on every rank; wo_a is a block-diagonal matrix with
    # one block per group of heads. First its own names, then transformers'.
    "deepseek_v4": {
        "attn.wq_a": Row("replicated", "q_a", "fused_wqa_wkv"),
        "attn.wkv": Row("replicated", "kv_a", "fused_wqa_wkv"),
        "attn.wq_b": _HEADS,
        "attn.wo_a": Row("column", "output_groups"),
        "attn.wo_b": _ROW,
        "compressor.wkv": _REPLICATED,
        "compressor.wgate": _REPLICATED,
        "q_a_proj": Row("replicated", "q_a"),
        "kv_proj": Row("replicated", "kv_a"),
        "o_a_proj": Row("column", "output_groups"),
        "o_b_proj": _ROW,
        "compressor.gate_proj": _REPLICATED,
        "indexer.gate_proj": _REPLICATED,
        "indexer.q_b_proj": _REPLICATED,
        "scorer.weights_proj": _REPLICATED,
        "e_proj": _REPLICATED,
        "h_proj": _REPLICATED,
        "embed": _VOCABULARY,
        "head": _VOCABULARY,
    },
    # Qwen with hyper-connections, per-layer n-gram embeddings and sparse attention.
    "qwen4_exp": {
        "index_qk_proj": _REPLICATED,
        "input_mix_weight_up": _REPLICATED,
        "input_mix_weight_down": _REPLICATED,
        "block_inject_weight": _REPLICATED,
        "key_proj": _REPLICATED,
        "value_proj": _REPLICATED,
        "mtp.fc_embedding": _COLUMN,
        "mtp.fc_hidden": _COLUMN,
    },
    "ernie4_5_moe": {"mtp_linear_proj": _REPLICATED},
    # Kimi Linear: low-rank gates, and what belongs to a head.
    "kimi_linear": {
        "f_a_proj": _REPLICATED,
        "g_a_proj": _REPLICATED,
        "f_b_proj": _HEADS,
        "g_b_proj": _HEADS,
        "b_proj": _HEADS,
    },
    "jamba": _MAMBA,
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "nemotron_h": {"fc1_latent_proj": _REPLICATED, "fc2_latent_proj": _REPLICATED},
}
"""model_type -> rows that come before the common ones."""

INTERLEAVED_GATE_UP = frozenset({"gpt_oss"})
"""Architectures that store gate rows even and up rows odd; all others all gate, then all up rows.

Source: GptOssExperts in transformers; amd-quark keeps that order in what it exports.
"""

OTHER_TOWERS = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|vision_encoder|vision_backbone|mm_projector"
    r"|multi_modal_projector|audio_tower|audio_encoder)\."
)
"""Below these, the same names have other sizes and heads: no row applies."""


def family_of(model_type: str) -> str:
    """The key of ARCHITECTURES for a config.json's model_type: a text model goes by its model's."""
    return model_type.removesuffix("_text")


def row_of(name: str, model_type: str = "") -> Row | None:
    """The row for module `name`, the architecture's own first; None where no row knows the name."""
    if OTHER_TOWERS.search(name):
        return None
    parent, _, leaf = name.rpartition(".")
    qualified = f"{parent.rpartition('.')[2]}.{leaf}"
    for table in (ARCHITECTURES.get(family_of(model_type), {}), COMMON):
        row = table.get(qualified) or table.get(leaf)
        if row is not None:
            return row
    return None
