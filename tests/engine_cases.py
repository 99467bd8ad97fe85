"""Checkpoints made to ask an engine about, and the answer picked apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from quark_factory import model_config, quant_config, write_checkpoint

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.deployment import TENSOR_PARALLEL, Deployment
from mxfp4prep.engines import ENGINES, Outcome, Prediction, Tuned, predict
from mxfp4prep.survey import Survey, survey

VLLM_ON = {"VLLM_ROCM_USE_AITER": "1"}
ASM_032 = {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "1"}
SGLANG_ON = {"SGLANG_USE_AITER": "1"}
SGLANG_ASM = {"SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM": "1"}


def surveyed(
    root: Path,
    linears: Mapping[str, tuple[int, int]],
    *,
    plain: Iterable[str] = (),
    fp8: Iterable[str] = (),
    tp: Iterable[int] = (1,),
    quant: Mapping[str, Any] | None = None,
    deployment: Deployment = TENSOR_PARALLEL,
    scale_name: str = "weight_scale",
    **model: Any,
) -> Survey:
    """A checkpoint with MXFP4 `linears`, and modules that are bf16 (`plain`) or FP8, surveyed.

    quant   changes to quantization_config; other keywords change config.json
    """
    extra: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}
    for name in plain:
        extra[f"{name}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
    for name in fp8:
        extra[f"{name}.weight"] = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)
        extra[f"{name}.weight_scale"] = torch.ones(64, dtype=torch.bfloat16)
    config = model_config(quant_config(**(quant or {})), **model)
    write_checkpoint(root / "model", linears, config=config, extra=extra, scale_name=scale_name)
    return survey(open_checkpoint(root / "model"), tuple(tp), deployment=deployment)


def ask(
    root: Path,
    engine: str,
    linears: Mapping[str, tuple[int, int]],
    switches: Mapping[str, str] | None = None,
    tuned: Tuned | None = None,
    **words: Any,
) -> Prediction:
    """What `engine` does with the checkpoint that `surveyed` makes of `linears` and `words`.

    switches   beside the engine's own defaults, which are not always what `predict` takes
    """
    defaults = {s.name: "1" if s.on else "0" for s in ENGINES[engine].switches}
    asked = {**defaults, **(switches or {})}
    return predict(engine, surveyed(root, linears, **words), switches=asked, tuned=tuned)


def only(prediction: Prediction, name: str, tp: int = 1) -> Outcome:
    """The outcome of one layer at one degree."""
    return prediction.outcomes[name][tp]


def words_of(prediction: Prediction, name: str) -> dict[int, tuple[str, str | None]]:
    """tp -> (outcome, path) of one layer."""
    return {tp: (made.outcome, made.path) for tp, made in prediction.outcomes[name].items()}


def codes(prediction: Prediction) -> list[str]:
    """The codes of the findings, in order."""
    return [finding.code for finding in prediction.findings]


def message(prediction: Prediction, code: str) -> str:
    """The message of the one finding with `code`."""
    (found,) = [f.message for f in prediction.findings if f.code == code]
    return found
