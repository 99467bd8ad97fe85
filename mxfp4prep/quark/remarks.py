"""What is worth telling about a readable checkpoint: one finding per kind, for all its places.

A model has tens of thousands of layers; a remark about each would hide the one that matters. The
table below holds every code, its severity and its sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mxfp4prep.findings import Finding, Severity
from mxfp4prep.parallel import Kind

SHOWN = 3
"""Places that a finding names before it says how many more there are."""

_TEXTS: dict[str, tuple[Severity, str]] = {
    "tied_quantized_head": (
        "error",
        "the head is quantized although config.json says tie_word_embeddings: an engine that ties "
        "it to the embedding ignores the stored head. Set tie_word_embeddings to false",
    ),
    "missing_input_scale": (
        "error",
        "static activation scales are declared but no input_scale is stored",
    ),
    "unexpected_input_scale": (
        "warning",
        "input_scale is stored although the config declares no static activations",
    ),
    "pattern_order": (
        "warning",
        "the first matching layer_quant_config pattern contradicts the stored tensors, a later one "
        "explains them and was taken (Quark sorts these keys on export)",
    ),
    "overlapping_patterns": (
        "note",
        "several layer_quant_config patterns with different schemes match: the first in file "
        "order decides, as in Quark",
    ),
    "config_disagrees": (
        "warning",
        "stored in another dtype than the config says, copied as stored",
    ),
    "unquantized": (
        "note",
        "stored unquantized and not excluded by the config (routers and other modules that are "
        "no linears never are), copied",
    ),
    "exclude_parent": (
        "warning",
        "quantized, although an exclude entry names a module above: Quark 0.12 reads such an "
        "entry as everything below, other versions as that module alone. Taken as stored",
    ),
    "mtp_layers": ("note", "tensors of multi-token prediction (draft) layers"),
    "mtp_unlisted": (
        "warning",
        "draft-layer weights are stored unquantized but the config does not exclude them: engines "
        "that trust the config build them as FP4",
    ),
    "partial_experts": (
        "warning",
        "only some matrices of this bank of experts are quantized: engines treat a bank as one",
    ),
    "shared_expert_not_fusable": (
        "warning",
        "the shared expert is stored in another scheme than the routed experts and cannot be "
        "fused into their bank",
    ),
    "quantized_embedding": (
        "warning",
        "an embedding is quantized: engines look its rows up and do not multiply by it",
    ),
    "short_group": ("note", "K is not a multiple of 32: the last scale group is short"),
    "scale_spelling": (
        "note",
        "scales are named weight_quantizer.scale (Quark 0.11): kept, but engines may not know it",
    ),
    "kv_scales": ("note", "scales of the key-value cache or of attention, copied unchanged"),
    "rotation": (
        "warning",
        "online rotations: the activations of the rotated layers have to be rotated at run time, "
        "which mxfp4prep's runtime does not do",
    ),
    "scale_without_weight": ("warning", "a scale without a weight, copied"),
    "scale_beside_float": ("warning", "a scale beside an unquantized weight, both copied"),
    "u8_buffer": ("note", "U8 tensors that are no matrices, copied"),
    "layer_type_ignored": (
        "note",
        "layer_type_quant_config names classes other than Linear, which names on disk cannot tell",
    ),
}


class Remarks:
    """Places by code, in the order of first use."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, code: str, *places: str) -> None:
        """Note `code`, a key of the table, at `places`."""
        if places:
            self._places.setdefault(code, []).extend(places)

    def add_experts(self, modules: Iterable[tuple[str, Kind, str]]) -> None:
        """Notes banks of experts that are quantized in part, and shared experts unlike them.

        modules   name, kind and scheme of every matrix of a routed or shared expert
        """
        routed: dict[str, set[str]] = {}
        shared: dict[str, set[str]] = {}
        for name, kind, scheme in modules:
            if kind == "expert" and "experts." in name:
                bank = name[: name.rindex("experts.") + len("experts")]
                routed.setdefault(bank, set()).add(scheme)
            elif kind == "shared_expert":
                block = name[: name.index("shared_expert")].removesuffix(".")
                shared.setdefault(block, set()).add(scheme)
        for bank, schemes in routed.items():
            words = ", ".join(sorted(schemes))
            if len(schemes) > 1:
                self.add("partial_experts", f"{bank} ({words})")
            block = bank.rpartition(".")[0]
            beside = shared.get(block, schemes)
            if beside != schemes:
                place = f"{block} ({', '.join(sorted(beside))} beside {words})"
                self.add("shared_expert_not_fusable", place)

    def findings(self) -> tuple[Finding, ...]:
        """One finding per code; `where` is its first place."""
        return tuple(
            Finding(code, _TEXTS[code][0], places[0], f"{_TEXTS[code][1]}: {places_text(places)}")
            for code, places in self._places.items()
        )


def places_text(places: Sequence[str] | Iterable[str]) -> str:
    """`1 place: a` or `5 places: a, b, c and 2 more`."""
    names = list(places)
    shown = ", ".join(names[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} place{'s' if len(names) != 1 else ''}: {shown}{more}"
