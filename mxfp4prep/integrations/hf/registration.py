"""Makes the method `mxfp4prep` known to transformers, and what is asked of every load."""

from __future__ import annotations

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.quantizer_quark import QuarkHfQuantizer

from mxfp4prep.errors import UsageError
from mxfp4prep.integrations.hf.configuration import Mxfp4PrepConfig
from mxfp4prep.integrations.hf.quantizer import Mxfp4PrepQuantizer, Wishes, set_wishes
from mxfp4prep.integrations.hf.relabelled import WaryQuarkQuantizer
from mxfp4prep.marks import QUANT_METHOD


def register(*, verify: bool = False, backend: str | None = None) -> None:
    """Has `from_pretrained` load prepared checkpoints. May be called again, with other wishes.

    verify    compare every tensor with its digest before a model is built; reads all bytes twice
    backend   a name from `mxfp4prep.backends()`; None takes the best for each device

    transformers' own quantizer for Quark checkpoints is replaced by one that does the same, except
    that it refuses a prepared checkpoint whose config.json claims to be Quark's.

    Raises UsageError where something else has taken the name.
    """
    for table, kind, put in (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, Mxfp4PrepConfig, register_quantization_config),
        (AUTO_QUANTIZER_MAPPING, Mxfp4PrepQuantizer, register_quantizer),
    ):
        found = table.get(QUANT_METHOD)
        if found is None:
            put(QUANT_METHOD)(kind)
        elif found is not kind:
            what = f"the quantization method {QUANT_METHOD} is taken in this process"
            raise UsageError("register", what, found=f"{found.__module__}.{found.__qualname__}")
    if AUTO_QUANTIZER_MAPPING.get("quark") is QuarkHfQuantizer:
        AUTO_QUANTIZER_MAPPING["quark"] = WaryQuarkQuantizer
    set_wishes(Wishes(verify=verify, backend=backend))
