"""Banks of routed experts, and how many stand in each: counted from what is stored.

config.json states the number too, but a pruned checkpoint, a draft layer or a model with banks of
several sizes may hold another one, and bytes are about what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mxfp4prep.parallel import kind_of
from mxfp4prep.survey import Survey

_EXPERTS = "experts."


def bank_of(name: str) -> str:
    """Name of the bank that an expert's module stands in, such as `model.layers.0.mlp.experts.`.

    A module that is no part of one is a bank by itself.
    """
    start = name.rfind(_EXPERTS)
    return name if start < 0 else name[: start + len(_EXPERTS)]


def stored_experts(survey: Survey) -> Iterator[str]:
    """Modules of experts that are stored one by one, MXFP4 or not."""
    for item in survey.layers:
        layer = item.layer
        if layer.kind == "expert" and layer.experts is None:
            yield layer.name
    tensors = survey.checkpoint.tensors
    for name in survey.classified.others:
        if kind_of(name) == "expert" and f"{name}.weight" in tensors:
            yield name


def banks_of(survey: Survey) -> Mapping[str, int]:
    """Experts in each bank of a checkpoint that stores them one by one."""
    return count_experts(stored_experts(survey))


def count_experts(names: Iterable[str]) -> Mapping[str, int]:
    """Experts in each bank.

    names   modules of single experts, `<bank>.<number>.<leaf>`; the leaves of one expert count once
    """
    banks: dict[str, set[str]] = {}
    for name in names:
        bank = bank_of(name)
        number = name[len(bank) :].partition(".")[0]
        known = banks.get(bank)
        if known is None:
            banks[bank] = {number}
        else:
            known.add(number)
    return {bank: len(numbers) for bank, numbers in banks.items()}
