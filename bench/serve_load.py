"""Loading in vLLM: the original checkpoint, shuffled while it is loaded, against the prepared one.

    .serve-venv/bin/python bench/serve_load.py [--layers 2] [--runs 3] [--dir DIR]

Makes Llama-3.1-70B layers (0.46 GB each) as AMD Quark stores them, prepares them, and has vLLM's
own `get_model` load both on the CPU, each in a process of its own, in turn; what was written is in
the page cache. JSON to stdout: seconds of reading weights into parameters, of processing them
afterwards, of both; and peak memory above what the process had before.

The original needs a kernel that vLLM lacks on CPUs: here one that does what vLLM's AITER kernel
does with a layer (the ASM layouts, by the same permutations), on the CPU instead of the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import torch

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, VOCAB = 8192, 28672, 64, 8, 128, 1024

CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "original": ("source", {}),
    "prepared": ("prepared", {}),
    "prepared_sliced": (
        "prepared",
        {"load_format": "mxfp4prep", "model_loader_extra_config": {"verify": False}},
    ),
    "prepared_verified": ("prepared", {"load_format": "mxfp4prep"}),
}
"""Name -> directory and options of vLLM."""


def write_source(root: Path, layers: int) -> None:
    """The Quark checkpoint: random bytes, one shard a layer."""
    from safetensors.torch import save_file

    root.mkdir(parents=True)
    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "ch_axis": -1,
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
        "is_dynamic": False,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "quantization_config": {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": weight,
                "input_tensors": {**weight, "is_dynamic": True},
            },
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head"],
            "export": {"kv_cache_group": [], "pack_method": "reorder"},
        },
    }
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    linears = {
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    weight_map = {}
    for layer in range(layers + 1):
        tensors = {}
        if layer < layers:
            at = f"model.layers.{layer}"
            for name, (n, k) in linears.items():
                packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
                tensors[f"{at}.{name}.weight"] = packed
                scale = torch.randint(110, 120, (n, k // 32), dtype=torch.uint8)
                tensors[f"{at}.{name}.weight_scale"] = scale
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{at}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        else:
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
            for name in ("model.embed_tokens", "lm_head"):
                tensors[f"{name}.weight"] = torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)
        file = f"model-{layer + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, root / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(config))


def register_kernel() -> None:
    """A kernel for vLLM on CPUs that lays weights out as its AITER kernel does, and never runs."""
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
    from vllm.platforms.interface import PlatformEnum

    class Shuffling(MxFp4LinearKernel):
        @classmethod
        def is_supported(cls, *_: object) -> tuple[bool, None]:
            return True, None

        @classmethod
        def can_implement(cls, *_: object) -> tuple[bool, None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            weight, scale = layer.weight.data, layer.weight_scale.data
            n, packed = weight.shape
            columns = scale.shape[1]
            tiles = weight.view(n // 16, 16, packed // 32, 2, 16).permute(0, 2, 3, 1, 4)
            blocks = scale.view(n // 32, 2, 16, columns // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
            for name, made in (("weight", tiles), ("weight_scale", blocks)):
                made = made.contiguous().view(getattr(layer, name).shape)
                setattr(layer, name, torch.nn.Parameter(made, requires_grad=False))

        def apply_weights(self, layer: object, x: object, bias: object = None) -> object:
            raise NotImplementedError

    register_linear_kernel(Shuffling, PlatformEnum.CPU, "mxfp4")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def load(model: str, options: dict[str, Any]) -> dict[str, float]:
    """One model loaded by vLLM in this process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader, get_model

    register_kernel()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it
    process, spent = base_loader.process_weights_after_loading, []

    def timed(*arguments: Any) -> None:
        started = time.perf_counter()
        process(*arguments)
        spent.append(time.perf_counter() - started)

    base_loader.process_weights_after_loading = timed
    arguments = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, **options)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        before = peak_mb()
        started = time.perf_counter()
        get_model(vllm_config=config)
        seconds = time.perf_counter() - started
    return {
        "reading_s": seconds - spent[0],
        "processing_s": spent[0],
        "ready_s": seconds,
        "peak_above_start_mb": peak_mb() - before,
    }


def measured(name: str, work: Path) -> dict[str, float]:
    """A contestant in a process of its own."""
    directory, options = CONTESTANTS[name]
    job = json.dumps([str(work / directory), options])
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", job],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=None, help="where to make the checkpoints")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        model, options = json.loads(given.child)
        print(json.dumps(load(model, options)))
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        work = Path(folder)
        write_source(work / "source", given.layers)
        command = [*measure.mxfp4prep(), "convert", work / "source", work / "prepared", "-q"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        nbytes = sum(path.stat().st_size for path in (work / "prepared").glob("*.safetensors"))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(given.runs):
            for name in CONTESTANTS:
                found[name].append(measured(name, work))
    report: dict[str, Any] = {"nbytes": nbytes, "cores": os.cpu_count()}
    for name, runs in found.items():
        report[name] = {key: measure.spread([run[key] for run in runs]) for key in runs[0]}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
