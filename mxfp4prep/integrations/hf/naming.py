"""From the checkpoint's names to the model's: what transformers renames, and the base prefix.

A model class may call a module otherwise than its checkpoint does (block_sparse_moe is mlp), and
a model without a head has no "model." before its names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class Found(NamedTuple):
    """A module of the checkpoint: its name after renaming, its path in the model, and itself."""

    renamed: str
    path: str
    module: nn.Module


class Names:
    """The names of one model, before any of its modules is replaced."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = dict(model.named_modules())
        self._base = model.base_model_prefix
        self._renamings = [
            conversion
            for conversion in get_model_conversion_mapping(model)
            if isinstance(conversion, WeightRenaming)
        ]
        # A model that is its own base leaves out heads; every model may leave out draft layers.
        self._is_base = bool(self._base) and model.base_model is model
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or "(?!)")

    def find(self, name: str) -> Found | None:
        """The model's module that the checkpoint calls `name`, or None."""
        key, _ = rename_source_key(f"{name}.weight", self._renamings, [])
        renamed = key.removesuffix(".weight")
        base = f"{self._base}." if self._base else ""
        for candidate in (renamed, name):
            for path in (candidate, candidate.removeprefix(base), base + candidate):
                if path in self._modules:
                    return Found(candidate, path, self._modules[path])
        return None

    def may_lack(self, name: str) -> bool:
        """Whether this class of model leaves the tensor or module `name` out on purpose."""
        outside = self._is_base and not name.startswith(f"{self._base}.")
        return outside or self._ignored.search(f"{name}.") is not None
