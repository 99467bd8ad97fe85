"""The quantization config of prepared checkpoints: Quark's, with the manifest beside it.

What is MXFP4 is decided by the manifest, and all else (FP8 attention, the KV cache, layers that are
not quantized, whether a shared expert can be fused) by vLLM's own reading of the original config.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.model_executor.models.utils import WeightsMapper

from mxfp4prep.errors import InvalidManifest, Unsupported
from mxfp4prep.integrations.vllm.experts import PreparedExpertsMethod
from mxfp4prep.integrations.vllm.linear import PreparedLinearMethod
from mxfp4prep.integrations.vllm.stored import RESTORE_HINT, Stored, directory_of, open_stored
from mxfp4prep.marks import MANIFEST_NAME, QUANT_METHOD
from mxfp4prep.prepared import CONVERT_HINT, check_marks

ORIGINAL = "source_quantization_config"


class PreparedConfig(QuarkConfig):  # type: ignore[misc]  # vLLM is untyped here
    """`quantization_config` of a prepared checkpoint.

    Goes to other processes by pickle: they open the checkpoint anew, in the same directory.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - Quark's own
        super().__init__(*arguments, **named)
        self.root: Path | None = None
        self._is_download = False
        self._mappers: list[WeightsMapper] = []
        self._stored: Stored | None = None

    def get_name(self) -> str:
        """What config.json calls the method."""
        return QUANT_METHOD

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PreparedConfig:
        """From config.json's `quantization_config`.

        Raises InvalidManifest for another version, or where the original config is not there.
        """
        check_marks(config)
        original = config.get(ORIGINAL)
        if not isinstance(original, Mapping):
            what = "the original quantization config is not there"
            raise InvalidManifest(
                f"config.json: quantization_config.{ORIGINAL}", what, hint=CONVERT_HINT
            )
        # Quark's reading takes what it knows of the KV cache out of the dict that it is given, and
        # some of these keys for granted
        quark = copy.deepcopy(dict(original))
        empty: dict[str, Any] = {
            "exclude": [],
            "layer_quant_config": {},
            "layer_type_quant_config": {},
        }
        quark |= {key: quark.get(key) or value for key, value in empty.items()}
        result: PreparedConfig = super().from_config(quark)
        return result

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: object = None
    ) -> str | None:
        """None: nothing else is taken over. Asked first for every checkpoint, so here a prepared
        one whose config.json was replaced is found out: its bytes are not in Quark's order.

        Raises InvalidManifest for it.
        """
        name = getattr(hf_config, "_name_or_path", None)
        if isinstance(hf_quant_cfg, Mapping) and hf_quant_cfg.get("quant_method") == QUANT_METHOD:
            return None
        if isinstance(name, str) and name and (Path(name) / MANIFEST_NAME).is_file():
            is_mapping = isinstance(hf_quant_cfg, Mapping)
            found = hf_quant_cfg.get("quant_method") if is_mapping else hf_quant_cfg
            raise InvalidManifest(
                name,
                f"{MANIFEST_NAME} is there, but config.json was replaced: a prepared checkpoint is "
                "not served as another",
                found=f"quant_method {found!r}",
                expected=repr(QUANT_METHOD),
                hint=CONVERT_HINT,
            )
        return None

    def maybe_update_config(
        self, model_name: str, hf_config: object = None, revision: str | None = None
    ) -> None:
        """Opens the checkpoint, so that whatever is wrong with it is said before anything starts.

        Raises InvalidManifest, InvalidCheckpoint or Unsupported.
        """
        self.root = directory_of(model_name, revision)
        self._is_download = self.root != Path(model_name)
        self._stored = self._opened(self.root)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Renames modules as the model does."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self._mappers.append(hf_to_vllm_mapper)
        if self._stored is not None:
            self._stored = replace(self._stored)  # without the names that were worked out so far

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": None}

    @property
    def stored(self) -> Stored:
        """The checkpoint, by the names of the model that is being built."""
        if self._stored is None:
            if self.root is None:
                raise InvalidManifest("config.json", "vLLM did not say where the model is")
            self._stored = self._opened(self.root)
        return self._stored

    def _opened(self, root: Path) -> Stored:
        return open_stored(root, self._rename, is_download=self._is_download)

    def _rename(self, name: str) -> str | None:
        for mapper in self._mappers:
            mapped = mapper.apply_list([name])
            if not mapped:
                return None
            name = mapped[0]
        return name

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours for what the manifest has as MXFP4, Quark's for everything else.

        Raises Unsupported for MXFP4 that vLLM has no way to run.
        """
        if isinstance(layer, RoutedExperts):
            gathered = self.stored.experts(prefix)
            if gathered is not None:
                return PreparedExpertsMethod(layer.moe_config, prefix, gathered, self.stored)
        elif isinstance(layer, LinearBase):
            members = self.stored.members(prefix, self.packed_modules_mapping)
            if members:
                return PreparedLinearMethod(prefix, members)
        elif prefix in self.stored.records:
            what = f"vLLM does not run an MXFP4 {type(layer).__name__}"
            raise Unsupported(prefix, what, hint=RESTORE_HINT)
        target, _, _ = self.get_quant_method_target(prefix, type(layer))
        if target == kMxfp4Static:
            if isinstance(layer, LinearBase) and self.stored.is_plain(
                prefix, self.packed_modules_mapping
            ):
                return UnquantizedLinearMethod()  # an `exclude` that vLLM reads differently
            raise Unsupported(
                prefix,
                "MXFP4 by the original quantization config, but the manifest has no such layer",
                hint=CONVERT_HINT,
            )
        method: QuantizeMethodBase | None = super().get_quant_method(layer, prefix)
        return method
