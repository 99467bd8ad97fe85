"""Runs models in vLLM, in a process of its own: `python vllm_child.py JOBS RESULTS`.

JOBS     a JSON list of objects: "model", and any of "tp", "options", "weights", "load_only",
         "again"
RESULTS  JSON lines, one a job as soon as it is done: "tokens", "logprobs" and more, or "error"

Jobs of one call share a process: vLLM takes 10 s to import. Where a launcher has set RANK, this is
one of several ranks that run the same jobs together.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path

PROMPTS = [[5, 9, 31, 120, 7, 64, 250, 3], [11, 200, 17], [44, 45, 46, 47, 48, 49]]
NEW_TOKENS = 6


def run(job):
    """What the model answers, from a new engine."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    launched = meet(job["port"]) if "RANK" in os.environ else {}
    options = {"enforce_eager": True, **launched, **job.get("options", {})}
    llm = LLM(
        model=job["model"],
        tensor_parallel_size=job.get("tp", 1),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        disable_log_stats=True,
        **options,
    )
    result = {"load_seconds": time.perf_counter() - start}
    if not job.get("load_only"):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0, prompt_logprobs=0, detokenize=False
        )
        result |= answers(llm, sampling)
    if job.get("again"):
        llm.reset_prefix_cache()
        result["again"] = {"methods": llm.apply_model(process_again)[0], **answers(llm, sampling)}
    if job.get("weights"):
        result["weights"] = llm.apply_model(digests)[0]
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return result


def answers(llm, sampling):
    """Tokens, and log probabilities of the prompts."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
            for output in outputs
        ],
    }


def process_again(model):
    """Has this package's methods process their weights once more; says which methods these are."""
    found = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method).__module__.startswith("mxfp4prep."):
            method.process_weights_after_loading(module)
            found.add(type(method).__name__)
    return sorted(found)


def meet(port):
    """Options for an engine that is one of several ranks. They meet at a port of their own: vLLM
    names their shared memory after it."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    rank = int(os.environ["RANK"])
    where = f"tcp://127.0.0.1:{port}", rank, rank
    ExecutorWithExternalLauncher._distributed_args = lambda _: where
    return {"distributed_executor_backend": "external_launcher", "seed": 0}


def digests(model):
    """Name -> sha256 of every parameter's bytes."""
    import hashlib

    import torch

    return {
        name: hashlib.sha256(parameter.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.uint8
    }


def main():
    jobs_path, results_path = sys.argv[1:]
    jobs = json.loads(Path(jobs_path).read_text())
    with Path(results_path).open("w") as results:
        for job in jobs:
            try:
                result = run(job)
            except BaseException as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(result), file=results, flush=True)


if __name__ == "__main__":
    main()
