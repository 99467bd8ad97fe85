"""What is worth telling about a readable checkpoint: one finding per kind, for all its places.

A model has tens of thousands of layers; a remark about each would hide the one that matters. The
table below holds every code, its severity and its sentence. What is said about engines was read in
vLLM 0.33, SGLang 0.5.23, ATOM ffdf3bb and AITER e4048607, or stands in the thread that is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mxfp4prep.findings import Finding, Severity
from mxfp4prep.parallel import Kind

SHOWN = 3
"""Places that a finding names before it says how many more there are."""

TEXTS: dict[str, tuple[Severity, str]] = {
    "tied_quantized_head": (
        "error",
        "the head is quantized although config.json says tie_word_embeddings: an engine that ties "
        "it to the embedding ignores the stored head. Set tie_word_embeddings to false",
    ),
    "quantized_head": (
        "note",
        "the head is quantized: judged like any column layer, its vocabulary padded to a multiple "
        "of 64 before it is split. Engines that build heads unquantized leave out its scale, some "
        "without an error (vLLM issue 57532)",
    ),
    "activation_rounding": (
        "note",
        "inputs are rounded to FP4 at run time, by config.json with scale_calculation_mode even: "
        "AITER's Triton quantization rounds so, its HIP quantization rounds scales up by default "
        "and down before 0.1.16. ATOM gained 1.8 % on GSM8K with even (ATOM PR 1601)",
    ),
    "weight_only": (
        "note",
        "W4A16: AITER's dense FP4 GEMMs multiply FP4 inputs, so the verdict says how the weight "
        "can be stored, not that a fast GEMM runs it. vLLM decodes such weights, ATOM rounds their "
        "inputs to FP4 and says nothing",
    ),
    "rounding_unstated": (
        "note",
        "inputs are rounded to FP4 at run time, and config.json has no scale_calculation_mode. "
        "Quark calibrates with even: check that the engine rounds so. AITER's HIP quantization "
        "rounds scales up by default, and down before 0.1.16",
    ),
    "rounding_not_even": (
        "warning",
        "config.json asks for inputs rounded with another scale_calculation_mode than even. "
        "AITER's Triton quantization (vLLM, SGLang) knows only even, and its HIP quantization "
        "rounds scales up by default: measure the accuracy, or quantize again with even",
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
        "stored unquantized and not excluded by the config (modules that are no linears never "
        "are), copied. An engine that goes by the config builds a linear among them as FP4",
    ),
    "unquantized_router": (
        "note",
        "routers are stored unquantized, as they should be, but the config does not exclude them "
        "(Quark lists only linears), copied. vLLM, SGLang and ATOM build routers unquantized "
        "whatever it says; an engine that goes by it cannot load them (vLLM PR 48606)",
    ),
    "unquantized_experts": (
        "warning",
        "experts stacked in 3-D tensors are stored unquantized and not excluded by the config: "
        "Quark quantizes them only when they were split into linears first. Copied, at full size; "
        "an engine that goes by the config builds them as FP4",
    ),
    "quantized_router": (
        "warning",
        "a router is quantized (Quark's file2file does so unless exclude names it): rounding it "
        "changes which experts are chosen, and engines that build routers unquantized cannot "
        "load it. Quantize again with the router excluded",
    ),
    "quantized_convolution": (
        "warning",
        "a tensor that is no matrix, such as a convolution, is quantized (Quark's file2file does "
        "so unless exclude names it): engines build these unquantized and cannot load it",
    ),
    "exclude_parent": (
        "warning",
        "quantized, although an exclude entry names a module above: Quark 0.12 reads such an "
        "entry as everything below, other versions as that module alone. Taken as stored",
    ),
    "mtp_layers": (
        "note",
        "tensors of multi-token prediction (draft) layers, in the dtype they are stored in. "
        "Engines leave them out unless asked for speculative decoding: vLLM --speculative-config "
        '\'{"method": "mtp", "num_speculative_tokens": 1}\', SGLang --speculative-algorithm EAGLE',
    ),
    "mtp_mixed": (
        "note",
        "draft layers are quantized in part: these of their weights are not MXFP4, copied",
    ),
    "mtp_unlisted": (
        "warning",
        "draft-layer weights are stored unquantized but the config does not exclude them: engines "
        "that trust the config build them as FP4 and fail once speculative decoding is on (vLLM "
        "PR 49187). Add them to exclude, or serve without it",
    ),
    "partial_experts": (
        "warning",
        "the matrices of one bank of experts differ in scheme: engines treat a bank as one, and "
        "one excluded expert as all of them excluded",
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
    "kv_scales": (
        "note",
        "calibrated FP8 scales of the key-value cache or of attention, copied unchanged. Engines "
        "use them only with an FP8 cache (vLLM --kv-cache-dtype fp8) and only for models whose "
        "loader knows them: others run at scale 1.0 without an error (vLLM issue 54623)",
    ),
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
"""Code -> severity and sentence."""


_EVERYWHERE = frozenset({"activation_rounding", "rounding_unstated", "weight_only"})
"""Codes that most layers of a checkpoint have: their number says it all."""


class Remarks:
    """Places by code, in the order of first use."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}
        self._nbytes: dict[str, int] = {}

    def add(self, code: str, *places: str, nbytes: int = 0) -> None:
        """Note `code`, a key of the table, at `places`, which take `nbytes` where that matters."""
        if places:
            self._places.setdefault(code, []).extend(places)
        if nbytes:
            self._nbytes[code] = self._nbytes.get(code, 0) + nbytes

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
            Finding(code, TEXTS[code][0], places[0], f"{TEXTS[code][1]}: {self._size(code)}{text}")
            for code, places in self._places.items()
            for text in (_counted(places) if code in _EVERYWHERE else places_text(places),)
        )

    def _size(self, code: str) -> str:
        nbytes = self._nbytes.get(code)
        return "" if nbytes is None else f"{nbytes:,} bytes in "


def _counted(places: Sequence[str]) -> str:
    return f"{len(places):,} layer{'s' if len(places) != 1 else ''}"


def places_text(places: Sequence[str] | Iterable[str]) -> str:
    """`1 place: a` or `5 places: a, b, c and 2 more`."""
    names = list(places)
    shown = ", ".join(names[:SHOWN])
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{len(names):,} place{'s' if len(names) != 1 else ''}: {shown}{more}"
