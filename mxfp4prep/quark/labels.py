"""Labels of the tensors that engines treat apart from the layers they stand in.

mtp        a tensor of a multi-token prediction (draft) layer, which engines load as a second model
kv_scale   a calibrated scale of the key-value cache or of attention
rotation   an online rotation: the activation has to be rotated at run time
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

_MTP_PART = re.compile(r"(?:^|\.)mtp(?:_[^.]*)?\.")
_LAYER_INDEX = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d{1,9})\.")
_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_KV_SCALES = (
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
    ".output_quantizer.scale",
)


def setting(config: Mapping[str, Any], key: str) -> object:
    """A value of config.json, of the text model where that is nested; None where missing."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and key in nested:
        return cast(object, nested[key])
    return config.get(key)


def label_tensors(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Tensor name -> label, for those that have one; mtp wins over the others.

    Draft layers are those with a path part `mtp` or `mtp_...`, and those whose layer index is not
    below num_hidden_layers where config.json declares draft layers.
    """
    labels: dict[str, str] = {}
    layers = setting(config, "num_hidden_layers")
    drafts = any(setting(config, key) for key in _MTP_COUNTS)
    first_draft = layers if drafts and isinstance(layers, int) else None
    for name in names:
        if _is_draft(name, first_draft):
            labels[name] = "mtp"
        elif name.endswith(_KV_SCALES):
            labels[name] = "kv_scale"
        elif "input_rotation" in name and "input_rotation" in name.rpartition(".")[2]:
            labels[name] = "rotation"
    return labels


def _is_draft(name: str, first_draft: int | None) -> bool:
    if "mtp" in name and _MTP_PART.search(name):
        return True
    index = _LAYER_INDEX.match(name) if first_draft is not None else None
    return index is not None and first_draft is not None and int(index.group(1)) >= first_draft
