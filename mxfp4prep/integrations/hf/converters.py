"""The converters by which transformers' loader makes banks from tensors of single experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers.core_model_loading import ConversionOps, WeightConverter

from mxfp4prep.errors import Unsupported
from mxfp4prep.integrations.hf.bank import Bank
from mxfp4prep.integrations.hf.experts import StoredExperts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from mxfp4prep.manifest import LayerRecord


class Assemble(ConversionOps):
    """Hands what was read of a bank to the module that it belongs to."""

    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **context: Any,  # noqa: ANN401 - what transformers passes besides, more with each release
    ) -> dict[str, Any]:
        """{the parameter's name: the bank}."""
        del target_patterns
        name: str = context["full_layer_name"]
        model: PreTrainedModel = context["model"]
        path, _, param = name.rpartition(".")
        module = model.get_submodule(path)
        assert isinstance(module, StoredExperts)
        return {name: module.assemble(param, [input_dict[source] for source in source_patterns])}


def converters_of(layers: Mapping[str, StoredExperts]) -> list[WeightConverter]:
    """What to add to a model's own converters, in front of them.

    layers   the model's banks by the name that the loader has for them when it asks converters:
             renamed, but with the checkpoint's base prefix
    """
    prefixes: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for renamed, module in layers.items():
        for param, tails in _sources(module):
            prefixes.setdefault((param, tails), []).append(renamed)
    made = []
    for (param, tails), names in prefixes.items():
        # one alternation of whole names: experts of other layers may be BF16, and are transformers'
        prefix = f"^({'|'.join(map(re.escape, names))})"
        sources = [f"{prefix}{tail}$" for tail in tails]
        made.append(WeightConverter(sources, rf"\1.{param}", [Assemble()]))
    return made


def is_ours(conversion: object) -> bool:
    """Whether a conversion is one of `converters_of`."""
    return any(isinstance(op, Assemble) for op in getattr(conversion, "operations", ()))


def _sources(module: StoredExperts) -> list[tuple[str, tuple[str, ...]]]:
    """(parameter, a pattern for each part of it: what follows the prefix in a tensor's name)."""
    found = []
    for param, bank in module.banks.items():
        columns: dict[str, list[str | None]] = {
            param: [record.weight.tensor for record in bank.parts],
            f"{param}_scale": [record.scale.tensor for record in bank.parts],
            f"{param}_bias": [record.bias for record in bank.parts],
            f"{param}_input_scale": [record.input_scale for record in bank.parts],
        }
        for name, tensors in columns.items():
            if all(tensor is not None for tensor in tensors):
                pairs = zip(bank.parts, tensors, strict=True)
                found.append((name, tuple(_tail(bank, *pair) for pair in pairs)))
    return found


def _tail(bank: Bank, record: LayerRecord, tensor: str | None) -> str:
    """The pattern that the tensors of all experts match, from that of the first one."""
    assert tensor is not None
    steps = 1 if record.experts is not None else 2
    prefix = ".".join(record.name.split(".")[:-steps])
    if not tensor.startswith(f"{prefix}."):
        what = f"a tensor of {bank.name} that is not named after it"
        raise Unsupported(tensor, what, expected=f"{prefix}...")
    rest = tensor.removeprefix(f"{prefix}.")
    if record.experts is None:
        number, _, rest = rest.partition(".")
        return rf"\.\d+\.{re.escape(rest)}" if number.isdecimal() else rf"\.{re.escape(rest)}"
    return rf"\.{re.escape(rest)}"


def own(conversions: Sequence[Any]) -> list[Any]:
    """Those that are not ours: what transformers may undo when it looks at the model's tensors."""
    return [conversion for conversion in conversions if not is_ours(conversion)]
