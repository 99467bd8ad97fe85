"""`layer_quant_config` as an engine reads it: which key, and so which layer spec, a name finds."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from mxfp4prep.engines.rules import SchemeWord
from mxfp4prep.quark.schemes import Scheme, layer_scheme

_WILD = re.compile(r"[*?\[]")
_INDEX = re.compile(r"[0-9]{1,9}")
_WORDS: dict[str, SchemeWord] = {"w4a4": "w4a4", "w4a16": "w4a16", "w4a6": "w4a6"}


class Spec(NamedTuple):
    """One layer spec of the config.

    text      the spec as canonical JSON: engines compare specs field by field
    word      the scheme where the weights are MXFP4, else None
    outputs   it quantizes outputs or biases
    uneven    its static input scale is not said to be symmetric
    """

    text: str
    scheme: Scheme
    word: SchemeWord | None
    outputs: bool
    uneven: bool


class LayerKeys:
    """The keys of layer_quant_config in order: the first that matches a name decides."""

    def __init__(self, keys: Sequence[tuple[str, Spec]], every_key_is_glob: bool) -> None:
        self._specs = [spec for _, spec in keys]
        self._texts = [key for key, _ in keys]
        self._globs: list[tuple[int, re.Pattern[str]]] = []
        self._exact: dict[str, int] = {}
        self._within: list[str] = []
        self._places: list[int] = []
        for position, (key, _) in enumerate(keys):
            if not every_key_is_glob and "*" not in key:
                self._within.append(key)
                self._places.append(position)
            elif _WILD.search(key):
                self._globs.append((position, re.compile(fnmatch.translate(key))))
            else:
                self._exact.setdefault(key, position)
        # One search through all keys at C speed instead of one per key.
        self._joined = "\n".join(self._within)

    def find(self, name: str) -> Spec | None:
        """The spec of the first key that matches `name`."""
        places = [len(self._specs)]
        if name in self._exact:
            places.append(self._exact[name])
        if self._within:
            at = self._joined.find(name)
            if at >= 0:
                places.append(self._places[self._joined.count("\n", 0, at)])
        first = min(places)
        for position, pattern in self._globs:
            if position >= first:
                break
            if pattern.match(name):
                first = position
                break
        return self._specs[first] if first < len(self._specs) else None

    def below(self, prefix: str) -> dict[str, Spec]:
        """The specs of the keys that start with `prefix`, by what follows it."""
        return {
            text.removeprefix(prefix): spec
            for text, spec in zip(self._texts, self._specs, strict=True)
            if text.startswith(prefix)
        }


def differing_experts(bank: str, specs: Mapping[str, Spec]) -> str:
    """The error of SGLang about keys for single experts that it cannot make one module of, or "".

    specs   `<expert>.<projection>` -> spec, as the keys below `<bank>.` say
    """
    experts: dict[int, set[str]] = {}
    for suffix in specs:
        index, _, projection = suffix.partition(".")
        if not _INDEX.fullmatch(index) or not projection:
            return f"ValueError: entry {suffix!r} in {bank} is not <expert index>.<projection>"
        experts.setdefault(int(index), set()).add(projection)
    indices = range(max(experts, default=-1) + 1)
    missing = list(islice((index for index in indices if index not in experts), 4))
    if missing:
        return f"ValueError: entries in {bank} skip experts {missing}"
    if len({frozenset(projections) for projections in experts.values()}) > 1:
        return f"ValueError: different projections pinned per expert in {bank}"
    if len({spec.text for spec in specs.values()}) > 1:
        return f"ValueError: different quantization configurations among the experts of {bank}"
    return ""


def spec_of(config: object, where: str) -> Spec:
    """The spec of a layer config; one that is missing quantizes nothing."""
    scheme = layer_scheme(config if config is not None else {}, where)
    fields = config if isinstance(config, Mapping) else {}
    inputs = fields.get("input_tensors")
    uneven = isinstance(inputs, Mapping) and inputs.get("symmetric") is not True
    word: SchemeWord | None = _WORDS.get(scheme.name)
    if scheme.name == "w4a8":
        word = "w4a8 static" if scheme.activation.static else "w4a8 dynamic"
    outputs = bool(fields.get("output_tensors") or fields.get("bias"))
    return Spec(canonical(config), scheme, word, outputs, uneven)


def canonical(config: object) -> str:
    """One text for equal configs: their fields in order."""
    return json.dumps(config, sort_keys=True)
