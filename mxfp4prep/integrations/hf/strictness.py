"""What transformers only warns of is an error here: tensors missing, left over, or misshapen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.prepared import VERIFY_HINT

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from transformers import PreTrainedModel

    from mxfp4prep.integrations.hf.naming import Names

HOOK = "_adjust_missing_and_unexpected_keys"
"""What transformers calls, when all is read, with the names that it will report."""
SHOWN = 5
"""Names that an error lists of each kind."""


def be_strict(model: PreTrainedModel, names: Names) -> None:
    """Has loading raise InvalidCheckpoint where any tensor is missing, left over or misshapen, or
    where a bank cannot be put together.

    Raises Unsupported for a release of transformers that offers no such place.
    """
    adjust = getattr(model, HOOK, None)
    if adjust is None:
        import transformers

        raise Unsupported(
            f"transformers {transformers.__version__}",
            "does not say which tensors it could not place",
            hint="install a release that mxfp4prep was tested with, see its README",
        )

    def raising(info: Any) -> None:  # noqa: ANN401 - transformers' LoadStateDictInfo
        adjust(info)
        failed = dict(sorted(info.conversion_errors.items()))
        lists = {
            "missing": set(info.missing_keys),
            "unexpected": {key for key in info.unexpected_keys if not names.may_lack(key)},
            "mismatched": {key for key, *_ in info.mismatched_keys},
        }
        # transformers raises for these two as well, when it reports: in our stead, and saying less
        info.conversion_errors.clear()
        info.mismatched_keys.clear()
        for name, text in failed.items():
            # a traceback, the error's own words, and a line on what was being converted
            message = text.rpartition("\nError")[0].rpartition("\n")[2]
            raise InvalidCheckpoint(name, message.removeprefix(f"{name}: "))
        said = [f"{_shown(keys)} {what}" for what, keys in lists.items() if keys]
        if said:
            what = f"not the tensors of {type(model).__name__}: {'; '.join(said)}"
            raise InvalidCheckpoint(model.config.name_or_path, what, hint=names.hint)

    object.__setattr__(model, HOOK, raising)


def check_shapes(model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
    """Raises InvalidCheckpoint for a tensor of another shape than it was to have: releases of
    transformers before 5.24 compare none where a quantizer is at work."""
    state = model.state_dict()
    wrong = {name for name, shape in shapes.items() if name in state and state[name].shape != shape}
    if wrong:
        what = f"not the tensors of {type(model).__name__}: {_shown(wrong)} mismatched"
        raise InvalidCheckpoint(model.config.name_or_path, what, hint=VERIFY_HINT)


def stop_being_strict(model: PreTrainedModel) -> None:
    """Takes the hook off a model that is loaded."""
    model.__dict__.pop(HOOK, None)


def _shown(keys: set[str]) -> str:
    first = sorted(keys)[:SHOWN]
    more = f" and {len(keys) - len(first)} more" if len(keys) > len(first) else ""
    return ", ".join(first) + more
