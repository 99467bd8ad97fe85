"""Mxfp4PrepQuantizer: what transformers calls while it loads a prepared checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.base import HfQuantizer

from mxfp4prep.errors import UsageError
from mxfp4prep.integrations.hf import converters, parallelism, saving, strictness
from mxfp4prep.integrations.hf.naming import Names, check_renamings
from mxfp4prep.integrations.hf.opening import open_checkpoint_of
from mxfp4prep.integrations.hf.swapping import Swapped, swap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mxfp4prep.runtime.opening import Opened

RENAMED = {
    r"\.weight_quantizer\.scale$": ".weight_scale",
    r"\.input_quantizer\.scale$": ".input_scale",
    r"\.output_quantizer\.scale$": ".output_scale",
}
"""Quark 0.11's names of scales, and the ones that modules here have."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `register` was called with."""

    verify: bool = False
    backend: str | None = None


_wishes = Wishes()


def set_wishes(wishes: Wishes) -> None:
    """For the loads that follow."""
    global _wishes
    _wishes = wishes


@dataclass(slots=True)
class Loading:
    """One model being loaded: its checkpoint, what was put into it, how its class renames tensors,
    and each tensor's dtype and shape, as they have to be in the end."""

    opened: Opened
    swapped: Swapped
    renamings: Sequence[WeightRenaming]
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, torch.Size]


class Mxfp4PrepQuantizer(HfQuantizer):
    """Swaps modules on meta, lets transformers' own loader fill them, and checks that it did."""

    requires_calibration = True
    loading: Loading

    def validate_environment(self, *_: object, **__: object) -> None:
        """Nothing: whatever can be wrong is known once the checkpoint is opened."""

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self, **_: object) -> bool:
        """Not by transformers: `save_pretrained` of a loaded model is replaced by ours."""
        return False

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **_: object,
    ) -> None:
        wishes = _wishes
        opened = open_checkpoint_of(model.config, checkpoint_files, verify=wishes.verify)
        parallelism.check(model)
        names = Names(model)
        swapped = swap(model, opened, wishes.backend)
        strictness.be_strict(model, names)
        state = model.state_dict()
        dtypes = {name: tensor.dtype for name, tensor in state.items()}
        shapes = {name: tensor.shape for name, tensor in state.items()}
        self.loading = Loading(opened, swapped, names.renamings, dtypes, shapes)

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Says of every parameter that we put there along which dimension it is sliced."""
        parallelism.extend(plan, dict(model.named_modules()))

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel | None = None
    ) -> list[Any]:
        """The model's conversions, behind those that fill our banks and name our scales.

        Raises Unsupported where a key_mapping renames what is stored.
        """
        del model
        stored, layers = self.loading.opened.places, self.loading.opened.manifest.layers
        check_renamings(weight_conversions, self.loading.renamings, layers)
        renamings = [
            WeightRenaming(pattern, name)
            for pattern, name in RENAMED.items()
            if any(key.endswith(pattern.replace("\\", "").removesuffix("$")) for key in stored)
        ]
        ours = converters.converters_of(self.loading.swapped.experts)
        return [*renamings, *ours, *weight_conversions]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        strictness.stop_being_strict(model)
        strictness.check_shapes(model, self.loading.shapes)
        parallelism.finish(self.loading.swapped.modules())
        _cast(model, self.loading.dtypes)
        conversions: Any = converters.own(getattr(model, "_weight_conversions", None) or [])
        object.__setattr__(model, "_weight_conversions", conversions)
        settings = saving.settings_of(model)
        save = partial(saving.save, model, opened=self.loading.opened, settings=settings)
        object.__setattr__(model, "save_pretrained", save)
        object.__setattr__(model, "push_to_hub", partial(saving.push, model))
        for module in self.loading.swapped.modules():
            module.training = False
            module.get_ready()

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        del model, dtype
        what = "a prepared model is not turned into a plain one"
        raise UsageError("dequantize", what, hint="`mxfp4prep restore`, then Quark's own tools")


def _cast(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Floating tensors that a release of transformers left in their stored dtype."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        wanted = dtypes.get(name)
        if wanted not in (None, tensor.dtype) and tensor.is_floating_point() and not tensor.is_meta:
            tensor.data = tensor.data.to(wanted)
