"""`quantization_config` as an engine reads it: what it will build for a module.

An engine does not look at the tensors: what the config says decides whether it builds a packed
weight, an unquantized one, or stops.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mxfp4prep.engines.excludes import Excludes, rename
from mxfp4prep.engines.keys import LayerKeys, Spec, canonical, differing_experts, spec_of
from mxfp4prep.engines.rules import Engine


class Reading(NamedTuple):
    """What an engine takes a module for.

    excluded   it builds it unquantized
    spec       else, what it builds it by; None where it stops, or where nobody knows
    refusal    the error where it stops
    """

    excluded: bool
    spec: Spec | None
    refusal: str = ""


_EXCLUDED = Reading(True, None)
_UNKNOWN = Reading(False, None)


class ConfigReader:
    """One checkpoint's quantization_config, read by one engine's rules."""

    def __init__(
        self, engine: Engine, section: Mapping[str, Any], model_type: str, family: str
    ) -> None:
        """Reads `section`, the checkpoint's quantization_config.

        model_type   that of the whole model, which decides how its modules are called
        family       that of its text model
        """
        self._family = family
        self._engine = engine
        self._rule = engine.names
        self._prefixes = engine.names.renames.get(model_type, ())
        self.entries: tuple[str, ...] = tuple(section.get("exclude") or ())
        self._excludes, self._origins = self._read_excludes()
        layers: Mapping[str, Any] = section.get("layer_quant_config") or {}
        self.refusal = _refusal(engine, section, layers)
        kv_group = (section.get("export") or {}).get("kv_cache_group") or ()
        plain = _without_outputs(layers, kv_group)
        self._default = spec_of(section.get("global_quant_config"), "global_quant_config")
        self._keys = LayerKeys(
            [
                (rename(key, self._prefixes), spec_of(plain[key], f"layer_quant_config[{key!r}]"))
                for key in layers
            ],
            every_key_is_glob=self._rule.keys == "globs",
        )
        self._known: dict[str, Reading] = {}

    def _read_excludes(self) -> tuple[Excludes, list[int]]:
        """The entries under the names of the engine's modules, and which entry each one is."""
        names, origins = [], []
        for position, entry in enumerate(self.entries):
            name = rename(entry, self._prefixes)
            names.append(name)
            origins.append(position)
            if self._prefixes and self._rule.bare and name.startswith(self._rule.bare):
                names.append(name.removeprefix(self._rule.bare))
                origins.append(position)
        return Excludes(names, self._rule), origins

    @property
    def matched(self) -> frozenset[str]:
        """The exclude entries that matched a module that was asked about."""
        return frozenset(self.entries[self._origins[i]] for i in self._excludes.matched)

    @property
    def fused_names(self) -> Mapping[str, str]:
        """Leaf of a fused projection -> leaf of the module that the engine builds of it."""
        quantizes = self._default.scheme.weight_dtype is not None
        return self._rule.fused if quantizes else {**self._rule.fused, **self._rule.fused_plain}

    def unsettled(self, name: str) -> str:
        """Why it is not known what becomes of the fused projection `name`, or ""."""
        return self._rule.unsettled.get(self._family, {}).get(name.rpartition(".")[2], "")

    def module_name(self, name: str) -> str:
        """What the engine calls the module that is `name` on disk."""
        return rename(name, self._prefixes)

    def linear(self, name: str) -> Reading:
        """The reading of a linear that stands alone; `name` as on disk."""
        return self._read(name, self._linear)

    def bank(self, name: str) -> Reading:
        """The reading of a bank of routed experts, `....experts` on disk."""
        return self._read(name, self._bank)

    def fused(self, name: str, parts: Sequence[str]) -> Reading:
        """The reading of a fused projection.

        name    of the projection; `parts` its modules, in order; all as on disk
        """
        if self._family in self._rule.unmapped.get(name.rpartition(".")[2], ()):
            return self.linear(name)
        return self._read(name, lambda runtime: self._fused(runtime, parts))

    def _read(self, name: str, read: Callable[[str], Reading]) -> Reading:
        reading = self._known.get(name)
        if reading is None:
            reading = self._known[name] = read(self.module_name(name))
        return reading

    def _linear(self, name: str) -> Reading:
        if self._excludes.match(name):
            return _EXCLUDED
        return Reading(False, self._keys.find(name) or self._default)

    def _bank(self, name: str) -> Reading:
        if self._excludes.match_bank(name):
            return _EXCLUDED
        spec = self._keys.find(name)
        if spec is None and self._rule.bank_keys:
            below = self._keys.below(f"{name}.")
            error = differing_experts(name, below)
            if error:
                return Reading(False, None, error)
            spec = next(iter(below.values()), None)
        return Reading(False, spec or self._default)

    def _fused(self, name: str, parts: Sequence[str]) -> Reading:
        runtime = [self.module_name(part) for part in parts]
        if self._excludes.match(name):
            return _EXCLUDED
        excluded = [self._excludes.match(part) for part in runtime]
        if all(excluded):
            return _EXCLUDED
        leaves = ", ".join(part.rpartition(".")[2] for part in runtime)
        if any(excluded):
            if self._rule.mixed == "unknown":
                return _UNKNOWN
            return Reading(
                False,
                None,
                f"ValueError: different quantization schemes for the shards of {name}: "
                f"{leaves}, of which {sum(excluded)} excluded",
            )
        specs = [self._keys.find(part) or self._default for part in runtime]
        if len({spec.text for spec in specs}) > 1:
            if self._rule.mixed == "unknown":
                return _UNKNOWN
            return Reading(
                False,
                None,
                f"ValueError: a different quantization configuration for {leaves} in {name}",
            )
        return Reading(False, specs[0])


def _refusal(engine: Engine, section: Mapping[str, Any], layers: Mapping[str, Any]) -> str:
    """The error of an engine that cannot do with this config at all, or ""."""
    for path, error in engine.names.required:
        value: Any = section
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return error
    group = (section.get("export") or {}).get("kv_cache_group") or []
    if not group or not engine.names.kv_keys:
        return ""
    keys = set(layers)
    found = set(group) <= keys
    if engine.names.kv_keys == "globs":
        found = found or any(fnmatch.fnmatchcase(key, glob) for key in keys for glob in group)
    if not found:
        return "ValueError: kv_cache_group is set, but no kv_cache configuration was found"
    same = engine.names.kv_keys == "same"
    chosen = (
        [layers[key] for key in group]
        if same
        else [layers[key] for key in layers if _any_glob(key, group)]
    )
    compared = chosen if same else [config.get("output_tensors") for config in chosen]
    if any(canonical(config) != canonical(compared[0]) for config in compared[1:]):
        return "ValueError: the kv_cache configurations of the layers differ"
    if not chosen[0].get("output_tensors"):
        return "ValueError: the kv_cache quantization configuration is empty"
    return ""


def _any_glob(key: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, glob) for glob in globs)


def _without_outputs(layers: Mapping[str, Any], kv_group: Sequence[str]) -> dict[str, Any]:
    """The layer specs with the cache's scales taken out, as engines do that read kv_cache_group."""
    plain = dict(layers)
    for key, config in layers.items():
        if (
            kv_group
            and isinstance(config, Mapping)
            and (key == "*q_proj" or key in kv_group or _any_glob(key, kv_group))
        ):
            plain[key] = {**config, "output_tensors": None}
    return plain
