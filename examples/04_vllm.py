"""Serve a prepared checkpoint with vLLM: nothing to set, vLLM finds the plugin by itself.

    pip install 'mxfp4prep[vllm]'
    python 04_vllm.py [PREPARED_DIR] [TENSOR_PARALLEL_SIZE]

The same for a server: `vllm serve PREPARED_DIR`. Without a directory a tiny Llama is made first.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.errors import Mxfp4PrepError
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.prepared import open_prepared
from mxfp4prep.survey import survey

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, VOCAB = 256, 768, 8, 2, 64, 320


def tiny_llama(root: Path) -> Path:
    """A Llama of one layer with random weights, as AMD Quark stores it."""
    tensors = {}
    rows = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    linears = {f"self_attn.{part}_proj": (n, HIDDEN) for part, n in rows.items()}
    linears |= {
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    for name, (n, k) in linears.items():
        at = f"model.layers.0.{name}"
        tensors[f"{at}.weight"] = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        tensors[f"{at}.weight_scale"] = torch.randint(120, 123, (n, k // 32), dtype=torch.uint8)
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
    fp4 = {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1,
        "scale_format": "e8m0", "scale_calculation_mode": "even", "is_dynamic": False,
    }  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "quantization_config": {
            "quant_method": "quark",
            "global_quant_config": {"weight": fp4, "input_tensors": {**fp4, "is_dynamic": True}},
            "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"],
            "export": {"kv_cache_group": [], "pack_method": "reorder"},
        },
    }  # fmt: skip
    root.mkdir()
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(config))
    return root


def prepare(source: Path) -> Path:
    """The prepared checkpoint, beside its source."""
    plan = make_plan(survey(open_checkpoint(source), surveyed_degrees((1,))), (1,))
    return convert(plan, source.with_name("prepared")).out


def main() -> None:
    given = open_prepared(Path(sys.argv[1])).root if len(sys.argv) > 1 else None
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    from vllm import LLM, SamplingParams  # takes its time

    with tempfile.TemporaryDirectory() as folder:
        root = given or prepare(tiny_llama(Path(folder) / "model"))
        llm = LLM(
            model=str(root),
            tensor_parallel_size=size,
            max_model_len=64,
            enforce_eager=True,
            skip_tokenizer_init=True,  # the tiny model has none
            load_format="mxfp4prep",  # reads each tensor once and compares it with its digest;
            # vLLM's own formats work too
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 31, 120], [11, 200, 17])]
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            print(output.prompt_token_ids, "->", list(output.outputs[0].token_ids))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    try:
        main()
    except Mxfp4PrepError as error:  # says what is wrong, and where
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)
