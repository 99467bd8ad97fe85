"""The load format `mxfp4prep`: reads only what this rank holds, or checks every byte it reads.

MXFP4 layers are read straight into their parameters by the runtime, several reads at a time; all
other tensors go through the model's own loading, as they do with vLLM's default format.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mxfp4prep.errors import UsageError
from mxfp4prep.integrations.vllm.experts import PreparedExpertsMethod
from mxfp4prep.integrations.vllm.linear import PreparedLinearMethod
from mxfp4prep.integrations.vllm.messages import logger
from mxfp4prep.runtime.opening import open_for_serving
from mxfp4prep.runtime.reading import Batch, Reader

VERIFY = "verify"
"""The one option, in --model-loader-extra-config: compare each tensor with its digest before it is
used. To do that it must be read whole; without, a rank reads its own part only."""


class PreparedModelLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's loader for --load-format mxfp4prep."""

    def __init__(self, load_config: LoadConfig) -> None:
        load_config = copy.copy(load_config)
        options = dict(load_config.model_loader_extra_config or {})
        self.verify = options.pop(VERIFY, True)
        if not isinstance(self.verify, bool) or options:
            raise UsageError(
                "--model-loader-extra-config",
                "load format mxfp4prep has one option",
                found=load_config.model_loader_extra_config,
                expected='{"verify": true} or {"verify": false}',
            )
        load_config.load_format = "safetensors"
        load_config.model_loader_extra_config = options
        super().__init__(load_config)

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:  # noqa: ANN401 - a model of vLLM's
        """Fills every parameter of the model.

        Raises InvalidManifest, InvalidCheckpoint or Unsupported for a checkpoint that does not
        agree, InvalidCheckpoint for another digest.
        """
        folder, *_ = self._prepare_weights(
            model_config.model, None, model_config.revision, False, ["*.safetensors", "*.json"]
        )
        opened = open_for_serving(Path(folder), verify=self.verify)
        reader = Reader(opened)
        taken: set[str] = set()
        batches: dict[torch.device, Batch] = {}
        try:
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, PreparedLinearMethod | PreparedExpertsMethod):
                    device = next(module.parameters()).device
                    batch = batches.setdefault(device, Batch(reader, device))
                    taken.update(method.fill(module, batch))
            for batch in batches.values():
                batch.run()
        finally:
            for batch in batches.values():
                batch.__exit__()
        with Batch(reader, torch.device("cpu")) as batch:
            model.load_weights(_others(batch, taken))
        logger.info(
            "Read %.2f GiB of prepared weights%s",
            reader.nbytes / 2**30,
            ", all of them equal to their digests" if self.verify else "",
        )


def _others(batch: Batch, taken: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint that was not read into its place, in the order of the files.

    Layers of another rank or of a part of the model that is not served are among them: the model's
    own loading knows what it may leave out.
    """
    names = (name for name in batch.reader.opened.places if name not in taken)
    for name in sorted(names, key=batch.reader.position):
        yield name, batch.now(name)
