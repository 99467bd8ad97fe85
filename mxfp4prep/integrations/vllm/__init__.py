"""The vLLM plugin: quantization method and load format `mxfp4prep`.

vLLM calls `register` through the entry point group `vllm.general_plugins` in every process that it
starts. Nothing here touches a GPU.
"""

from __future__ import annotations

import logging

from mxfp4prep.marks import QUANT_METHOD


def register() -> None:
    """Makes vLLM know the method and the load format, and has its loaders watched while they load
    prepared models; another call changes nothing.

    A vLLM that lacks what they are built on is left as it is, with a warning: an error here would
    keep it from serving any model, and without the method it refuses a prepared one by itself.
    """
    try:
        from vllm.model_executor import model_loader
        from vllm.model_executor.layers import quantization

        from mxfp4prep.integrations.vllm.accounts import watched
        from mxfp4prep.integrations.vllm.config import PreparedConfig
        from mxfp4prep.integrations.vllm.loader import PreparedModelLoader
    except ImportError as error:
        logging.getLogger("vllm").warning(
            "mxfp4prep: this vLLM cannot serve prepared checkpoints (%s); vllm 0.32 can", error
        )
        return
    if QUANT_METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(QUANT_METHOD)(PreparedConfig)
    # register_model_loader warns of a format that is there already, and does not say whether one is
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    if QUANT_METHOD not in loaders:
        model_loader.register_model_loader(QUANT_METHOD)(PreparedModelLoader)
    for load_format, kind in loaders.items():
        loaders[load_format] = watched(kind)
