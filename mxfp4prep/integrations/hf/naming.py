"""From the checkpoint's names to the model's: what transformers renames, and the base prefix.

A model class may call a module otherwise than its checkpoint does (block_sparse_moe is mlp), and
a model without a head has no "model." before its names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from mxfp4prep.errors import Unsupported
from mxfp4prep.prepared import VERIFY_HINT

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from mxfp4prep.manifest import LayerRecord


OTHER_CLASS = "config.json names {}: load that, or AutoModel and put a head of your own on it"
KEY_MAPPING = (
    "a key_mapping does not reach stored layers: name what it renames with "
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping"
)


class Found(NamedTuple):
    """A module of the checkpoint: its name after renaming, its path in the model, and itself."""

    renamed: str
    path: str
    module: nn.Module


class Names:
    """The names of one model, before any of its modules is replaced.

    renamings   those of its class
    hint        what to do where the checkpoint is not this model's
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = dict(model.named_modules())
        self._base = model.base_model_prefix
        self.renamings = _renamings(get_model_conversion_mapping(model))
        # A model that is its own base leaves out heads; every model may leave out draft layers.
        self._is_base = bool(self._base) and model.base_model is model
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or "(?!)")
        named, own = model.config.architectures or (), type(model).__name__
        is_another = bool(named) and own not in named and not self._is_base
        self.hint = OTHER_CLASS.format(" or ".join(named)) if is_another else VERIFY_HINT

    def find(self, name: str) -> Found | None:
        """The model's module that the checkpoint calls `name`, or None."""
        key, _ = rename_source_key(f"{name}.weight", self.renamings, [])
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


def check_renamings(
    conversions: Iterable[object], own: Sequence[WeightRenaming], layers: Iterable[LayerRecord]
) -> None:
    """Raises Unsupported where `conversions` name a layer otherwise than a model's `own` renamings:
    its module was found without them."""
    given = _renamings(conversions)
    if len(given) == len(own):
        return
    for record in layers:
        key = f"{record.name}.weight"
        found, expected = (rename_source_key(key, list(each), [])[0] for each in (given, own))
        if found != expected:
            what = "renamed by a key_mapping"
            raise Unsupported(key, what, found=found, expected=expected, hint=KEY_MAPPING)


def _renamings(conversions: Iterable[object]) -> list[WeightRenaming]:
    return [each for each in conversions if isinstance(each, WeightRenaming)]
