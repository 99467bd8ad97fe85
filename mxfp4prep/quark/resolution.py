"""What a Quark config says about each module: excluded, or of which scheme.

Order: `exclude`; the first matching pattern of `layer_quant_config` in file order;
`layer_type_quant_config`, of which only Linear (and Embedding) can be told from names;
`global_quant_config`. Quark's memory route writes `layer_quant_config` sorted, so the first match
on disk may not be the one that was applied. Where the first match cannot be stored as U8 and a
later match is MXFP4, a U8 weight takes the later one. Where the first is MXFP4 and a later one
would give the same bytes another meaning (amdfp4_g32), nothing can decide and the layer is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, Unsupported
from mxfp4prep.findings import Finding, Severity
from mxfp4prep.quark.binding import PatternUse, Reading, bind
from mxfp4prep.quark.config import QuarkConfig
from mxfp4prep.quark.patterns import parse_patterns
from mxfp4prep.quark.remarks import Remarks, places_text
from mxfp4prep.quark.schemes import Scheme

if TYPE_CHECKING:
    from mxfp4prep.safefile import TensorEntry

_EXCLUDE = "exclude"
_LAYERS = "layer_quant_config"

_READINGS: dict[Reading, tuple[str, str]] = {
    "fused": ("exclude_fused", "names a projection that engines fuse from several modules"),
    "renamed": ("exclude_renamed", "matches only under another root (model., language_model.)"),
    "ambiguous": (
        "exclude_ambiguous",
        "matches modules under several roots (model., language_model.) and was not applied",
    ),
}


class Resolution:
    """The config applied to the modules of one checkpoint."""

    def __init__(self, quark: QuarkConfig, modules: Sequence[str], remarks: Remarks) -> None:
        """Binds every pattern to `modules`. Raises InvalidCheckpoint on a bad expression."""
        self._quark = quark
        self._remarks = remarks
        patterns = parse_patterns(quark.exclude, _EXCLUDE)
        self._excluded = bind(patterns, modules, parents=True)
        patterns = parse_patterns([key for key, _ in quark.layers], _LAYERS)
        self._keyed = bind(patterns, modules, parents=False)
        self._schemes = [quark.layers[pattern.entry][1] for pattern in patterns]
        self._chosen: dict[tuple[int, ...], tuple[Scheme, str | None]] = {}
        if quark.types.keys() - {"Linear", "Embedding"}:
            remarks.add("layer_type_ignored", *sorted(quark.types.keys() - {"Linear", "Embedding"}))

    @property
    def uses(self) -> dict[str, tuple[PatternUse, ...]]:
        """Config key -> what became of its patterns."""
        return {_EXCLUDE: self._excluded.uses, _LAYERS: self._keyed.uses}

    def is_excluded(self, module: str) -> bool:
        """Whether an exclude entry covers the module, or names a module above it."""
        return module in self._excluded.hits or module in self._excluded.below

    def declared(self, module: str) -> tuple[Scheme, ...]:
        """The schemes that the config may mean for a module, its own choice first.

        More than one only where several layer_quant_config patterns match; `exclude` left aside.
        """
        hits = self._keyed.hits.get(module)
        return tuple(self._schemes[hit] for hit in hits) if hits else (self._unkeyed(module),)

    def packed(self, module: str, weight: TensorEntry) -> Scheme:
        """The MXFP4 scheme of a module whose weight is stored as U8.

        Raises InvalidCheckpoint where the config says that the weight is not packed, Unsupported
        where it is packed in another scheme than MXFP4.
        """
        hits = self._excluded.hits.get(module)
        if hits is not None:
            raise self._contradicts_exclude(hits[0], weight)
        if module in self._excluded.below:
            self._remarks.add("exclude_parent", module)
        keys = self._keyed.hits.get(module)
        if keys is None:
            scheme = self._unkeyed(module)
        else:
            scheme = self._choose(keys, module, weight.name)
        if scheme.is_mxfp4:
            return scheme
        raise _not_mxfp4(scheme, weight)

    def _unkeyed(self, module: str) -> Scheme:
        types = self._quark.types
        if types:
            leaf = module.rpartition(".")[2]
            return types.get("Embedding" if "embed" in leaf else "Linear", self._quark.default)
        return self._quark.default

    def _choose(self, keys: tuple[int, ...], module: str, weight: str) -> Scheme:
        known = self._chosen.get(keys)
        if known is None:
            known = self._chosen[keys] = self._weigh(keys, weight)
        scheme, remark = known
        if remark is not None:
            self._remarks.add(remark, module)
        return scheme

    def _weigh(self, keys: tuple[int, ...], weight: str) -> tuple[Scheme, str | None]:
        """The scheme of a U8 weight that all patterns at `keys` match, and what to remark."""
        schemes = [self._schemes[key] for key in keys]
        first = schemes[0]
        if len(set(schemes)) == 1:
            return first, None
        if not first.is_mxfp4:
            later = next((scheme for scheme in schemes if scheme.is_mxfp4), None)
            if later is None or first.may_be_u8:
                return first, None
            first = later
            remark = "pattern_order"
        else:
            remark = "overlapping_patterns"
        for key, scheme in zip(keys, schemes, strict=True):
            if scheme.is_twin:
                raise Unsupported(
                    weight,
                    f"either {first.name} or {scheme.name}, which are stored alike",
                    found=f"several matching {_LAYERS} patterns, "
                    f"{self._keyed.uses[key].text!r} among them",
                    expected="patterns that agree on this layer",
                )
        return first, remark

    def _contradicts_exclude(self, position: int, weight: TensorEntry) -> Mxfp4PrepError:
        use = self._excluded.uses[position]
        how = "" if use.reading == "literal" else f", {use.reading}"
        return InvalidCheckpoint(
            weight.name,
            "excluded by the config but stored quantized",
            found=f"{_stored(weight)} and exclude entry {use.text!r} ({use.kind}{how})",
            expected="an unquantized weight, or no such entry",
            hint="if the layer is meant to be quantized, remove the entry from quantization_config "
            "in config.json",
        )

    def findings(self, tied: bool) -> tuple[Finding, ...]:
        """Entries that match nothing or only in another reading: one finding per list and kind.

        tied   the head shares the embedding's tensor, so an entry for it matches nothing rightly
        """
        found: list[Finding] = []
        for key, uses in self.uses.items():
            where = f"quantization_config.{key}"
            for reading, (code, text) in _READINGS.items():
                places = [_quoted(use) for use in uses if use.reading == reading]
                if places:
                    code = code if key == _EXCLUDE else code.replace(_EXCLUDE, "layer_config")
                    severity: Severity = "note" if reading == "fused" else "warning"
                    message = f"an entry {text}: {places_text(places)}"
                    found.append(Finding(code, severity, where, message))
            unmatched = [_quoted(use) for use in _unmatched(uses, tied)]
            if unmatched:
                message = f"of {len(uses)} patterns, these match nothing: {places_text(unmatched)}"
                found.append(Finding("pattern_unmatched", "warning", where, message))
        return tuple(found)


def _unmatched(uses: Sequence[PatternUse], tied: bool) -> list[PatternUse]:
    """The patterns that match nothing and ought to.

    Left out: the head of a model that ties it, and `x.*` beside an `x` that did match or was left
    out, since Quark 0.12 writes both for every excluded module.
    """
    fine = {use.text for use in uses if use.reading != "unmatched"}
    if tied:
        fine |= {use.text for use in uses if use.text.removesuffix(".*").endswith("lm_head")}
    return [
        use
        for use in uses
        if use.reading == "unmatched"
        and use.text not in fine
        and use.text.removesuffix(".*") not in fine
    ]


def _quoted(use: PatternUse) -> str:
    return f"{use.text!r} ({use.kind})"


def _not_mxfp4(scheme: Scheme, weight: TensorEntry) -> Mxfp4PrepError:
    if scheme.name.startswith("mxfp4_"):
        return Unsupported(
            weight.name,
            "MXFP4 weights with an input quantized in a way that is not known here",
            found=scheme.name,
            expected="no input quantization, or dynamic MXFP4, FP8 or dynamic MXFP6",
        )
    if scheme.may_be_u8:
        return Unsupported(
            weight.name,
            f"the weight is {scheme.name}, not MXFP4",
            found=f"{_stored(weight)} and scheme {scheme.name} in config.json",
            expected="fp4, per_group, group_size 32, scale_format e8m0",
        )
    return InvalidCheckpoint(
        weight.name,
        "the config does not explain this packed weight",
        found=f"{_stored(weight)} and scheme {scheme.name} in config.json",
        expected="an MXFP4 scheme for a U8 weight",
    )


def _stored(weight: TensorEntry) -> str:
    return f"{weight.dtype} {list(weight.shape)}"
