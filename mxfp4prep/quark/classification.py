"""Which modules of a Quark checkpoint are MXFP4 and how: decided from the tensors and the config.

A module is MXFP4 iff its resolved config says so and a U8 weight with a matching scale is stored.
An unquantized weight is copied whatever the config says. A U8 weight that the config does not
explain is refused, with both facts: guessing here is how nonsense gets served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError, Unsupported
from mxfp4prep.findings import Finding
from mxfp4prep.parallel import SCALE_GROUP, GateUp, Kind, Topology, gate_up_order, kind_of
from mxfp4prep.quark.binding import PatternUse
from mxfp4prep.quark.config import read_config, scheme_of_config
from mxfp4prep.quark.labels import label_tensors, setting
from mxfp4prep.quark.packed import (
    Stock,
    companions,
    is_float,
    is_u8_buffer,
    is_weight_scale,
    label_of,
    measure,
    owner_of,
    scale_for,
    second_stage_of,
    stem,
    take_stock,
)
from mxfp4prep.quark.patterns import similar
from mxfp4prep.quark.remarks import Remarks
from mxfp4prep.quark.resolution import Resolution
from mxfp4prep.quark.schemes import CONFIG_NAME, MXFP4_SCHEMES, Activation

if TYPE_CHECKING:
    from mxfp4prep.safefile import TensorEntry


_INPUT_SCALES = ("input_scale", "input_quantizer.scale")
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Leaves of modules that choose experts or weigh the shared one; `gate_proj` is another thing."""
SchemeName = Literal["w4a4", "w4a16", "w4a8", "w4a6"]


class QuarkLayer(NamedTuple):
    """One MXFP4 layer as stored.

    n, k          out_features and in_features of one matrix
    experts       matrices of a stacked bank, None for a single matrix
    is_matrix     False for weights of other ranks, where n is the product of the leading sizes
    bias          name of the bias tensor, or None; input_scale likewise (static activations)
    gate_up       row order of a tensor that holds gate and up: interleaved, concatenated or None
    """

    name: str
    kind: Kind
    scheme: SchemeName
    activation: Activation
    n: int
    k: int
    experts: int | None
    is_matrix: bool
    weight: TensorEntry
    scale: TensorEntry
    bias: str | None
    input_scale: str | None
    gate_up: GateUp | None


@dataclass(frozen=True, slots=True)
class Classified:
    """Every tensor accounted for: part of an MXFP4 layer, or copied.

    layers    in the order of their weights
    others    module -> bf16, f16, f32, fp8, ... of every module with a weight that is not MXFP4
    copied    names of all tensors that no layer transforms: biases, norms, other formats
    labels    tensor name -> mtp, kv_scale or rotation, for tensors that engines treat apart
    findings  one per kind, see remarks
    patterns  config key -> what became of its entries
    """

    layers: tuple[QuarkLayer, ...]
    others: dict[str, str]
    copied: tuple[str, ...]
    labels: dict[str, str]
    findings: tuple[Finding, ...]
    patterns: dict[str, tuple[PatternUse, ...]] = field(default_factory=dict)


def classify(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], topology: Topology
) -> Classified:
    """Sorts a checkpoint's tensors into MXFP4 layers and what is copied.

    tensors   every tensor of every shard by name, in file order
    config    the parsed config.json

    Raises Unsupported for a checkpoint of another kind or without an MXFP4 layer, naming its
    scheme, and InvalidCheckpoint where config and tensors contradict each other.
    """
    quark = read_config(config)
    stock = take_stock(tensors)
    remarks = Remarks()
    rules = Resolution(quark, [*stock.packed, *stock.others], remarks)
    layers = tuple(_layers(stock, tensors, rules, topology, remarks))
    taken = {layer.scale.name for layer in layers}
    _account_for_scales(stock, taken, tensors, remarks)
    if not layers:
        raise _nothing_to_do(stock, config)
    taken.update(layer.weight.name for layer in layers)
    labels = label_tensors(tensors, config)
    tied = setting(config, "tie_word_embeddings") is True
    _remark_on_others(stock, rules, labels, remarks)
    remarks.add_experts(
        [
            *((layer.name, layer.kind, layer.scheme) for layer in layers if layer.kind != "linear"),
            *_other_experts(stock),
        ]
    )
    _remark_on_loose(stock, tensors, labels, remarks)
    _remark_on_mixed_drafts(layers, stock, labels, remarks)
    heads = (layer.name for layer in layers if layer.name.rpartition(".")[2] == "lm_head")
    remarks.add("tied_quantized_head" if tied else "quantized_head", *heads)
    _remark_on_rounding(layers, remarks)
    return Classified(
        layers=layers,
        others={module: label_of(entry) for module, entry in stock.others.items()},
        copied=tuple(name for name in tensors if name not in taken),
        labels=labels,
        findings=(*rules.findings(tied), *remarks.findings()),
        patterns=rules.uses,
    )


def _layers(
    stock: Stock,
    tensors: Mapping[str, TensorEntry],
    rules: Resolution,
    topology: Topology,
    remarks: Remarks,
) -> Iterator[QuarkLayer]:
    kinds: dict[str, tuple[Kind, GateUp | None, str | None]] = {}
    biases = companions(stock.loose, ("bias",))
    input_scales = companions((*stock.loose, *stock.scales), _INPUT_SCALES)
    for module, weight in stock.packed.items():
        scheme = rules.packed(module, weight)
        packed = measure(module, weight, scale_for(module, weight, tensors))
        key = similar(module)
        if key not in kinds:
            kinds[key] = kind_of(module), gate_up_order(module, topology), _oddity(module)
        kind, gate_up, oddity = kinds[key]
        if packed.experts is not None and kind == "linear":
            kind = "expert"
        start = stem(module, weight)
        layer = QuarkLayer(
            name=module,
            kind=kind,
            scheme=cast(SchemeName, scheme.name),
            activation=scheme.activation,
            n=packed.n,
            k=packed.k,
            experts=packed.experts,
            is_matrix=packed.is_matrix,
            weight=weight,
            scale=packed.scale,
            bias=biases.get(start),
            input_scale=input_scales.get(start),
            gate_up=gate_up,
        )
        _remark_on_layer(layer, oddity, remarks)
        yield layer


def _oddity(module: str) -> str | None:
    """The code for a module that is quantized although engines do not multiply by it as MXFP4."""
    if _is_lookup_or_norm(module):
        return "quantized_embedding"
    return "quantized_router" if kind_of(module) == "linear" and _is_router(module) else None


def _remark_on_layer(layer: QuarkLayer, oddity: str | None, remarks: Remarks) -> None:
    if oddity is not None:
        remarks.add(oddity, layer.name)
    if not layer.is_matrix:
        remarks.add("quantized_convolution", layer.name)
    if layer.k % SCALE_GROUP:
        remarks.add("short_group", layer.name)
    if layer.scale.name.endswith(".weight_quantizer.scale"):
        remarks.add("scale_spelling", layer.name)
    if layer.activation.static:
        if layer.input_scale is None:
            remarks.add("missing_input_scale", layer.name)
    elif layer.input_scale is not None:
        remarks.add("unexpected_input_scale", layer.name)


def _account_for_scales(
    stock: Stock, taken: set[str], tensors: Mapping[str, TensorEntry], remarks: Remarks
) -> None:
    """Explains every U8 and F8_E8M0 scale that no layer took, or raises InvalidCheckpoint."""
    for scale in stock.scales:
        if scale.name in taken:
            continue
        owner = owner_of(scale, tensors)
        if owner is not None:
            if owner.dtype != "U8" and not is_float(owner):
                continue  # of a format that is copied: block FP8, MXFP8
            what, beside = "a scale that its weight does not have", f"beside {owner.name} in"
            beside = f"{beside} {owner.dtype}"
        elif is_weight_scale(scale.name) or len(scale.shape) > 1:
            what, beside = "a scale without a weight", "alone"
        else:
            remarks.add("u8_buffer", scale.name)
            continue
        raise InvalidCheckpoint(
            scale.name,
            what,
            found=f"{scale.dtype} {list(scale.shape)} {beside}",
            expected="one scale per U8 weight",
            hint="see that every shard is there" if owner is None else None,
        )
    for entry in (*stock.scales, *stock.loose):
        module = second_stage_of(entry.name)
        if module in stock.packed:
            raise InvalidCheckpoint(
                entry.name,
                "the config says MXFP4, which has no such tensor",
                found=f"{entry.dtype} {list(entry.shape)} beside {stock.packed[module].name}",
                expected="one scale per weight",
            )


def _nothing_to_do(stock: Stock, config: Mapping[str, Any]) -> Mxfp4PrepError:
    scheme = scheme_of_config(config["quantization_config"])
    stored = sorted({label_of(entry) for entry in stock.others.values()})
    what = f"the checkpoint is {scheme}"
    if MXFP4_SCHEMES.issuperset(scheme.split("+")):
        what = f"{CONFIG_NAME} says {scheme} but nothing is stored so"
    return Unsupported(
        CONFIG_NAME,
        f"no MXFP4 layer: {what}",
        found=f"weights in {', '.join(stored)}" if stored else "no weights",
        expected="U8 weights with E8M0 scales",
    )


def _remark_on_others(
    stock: Stock, rules: Resolution, labels: Mapping[str, str], remarks: Remarks
) -> None:
    """Weights that are not MXFP4, held against what the config says about them."""
    for module, weight in stock.others.items():
        if len(weight.shape) < 2 or rules.is_excluded(module):
            continue
        declared, *later = rules.declared(module)
        if declared.is_mxfp4 and weight.dtype == "I8":
            raise Unsupported(
                weight.name,
                "an MXFP4 weight by the config, stored in another dtype",
                found=f"I8 {list(weight.shape)}",
                expected="U8, as Quark writes",
            )
        if declared.weight_dtype is None or _is_lookup_or_norm(module):
            continue
        if not is_float(weight):
            if declared.may_be_u8:
                explained = any(scheme.weight_dtype and not scheme.may_be_u8 for scheme in later)
                remarks.add("pattern_order" if explained else "config_disagrees", module)
        elif labels.get(weight.name) == "mtp":
            remarks.add("mtp_unlisted", module)
        elif len(weight.shape) == 3 and ("expert" in module or "moe" in module):
            place = f"{module} ({label_of(weight)})"
            remarks.add("unquantized_experts", place, nbytes=weight.nbytes)
        elif kind_of(module) == "linear" and _is_router(module):
            remarks.add("unquantized_router", module)
        else:
            remarks.add("unquantized", module)


def _is_lookup_or_norm(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return "embed" in leaf or leaf in ("wte", "wpe") or leaf.endswith("norm")


def _is_router(module: str) -> bool:
    *parents, leaf = module.split(".")
    if leaf in _ROUTERS:
        return not any("attn" in parent or "attention" in parent for parent in parents)
    return "router" in parents


def _remark_on_mixed_drafts(
    layers: Sequence[QuarkLayer], stock: Stock, labels: Mapping[str, str], remarks: Remarks
) -> None:
    """Draft layers that hold MXFP4 weights and others that could have been."""
    drafts = {name for name, label in labels.items() if label == "mtp"}
    if not drafts or drafts.isdisjoint(layer.weight.name for layer in layers):
        return
    for module, weight in stock.others.items():
        is_matrix = len(weight.shape) > 1 and not _is_lookup_or_norm(module)
        if is_matrix and weight.name in drafts:
            remarks.add("mtp_mixed", f"{module} ({label_of(weight)})")


def _remark_on_rounding(layers: Sequence[QuarkLayer], remarks: Remarks) -> None:
    """How inputs are to be rounded to an MX format, which headers cannot enforce on an engine."""
    for layer in layers:
        mode = layer.activation.scale_mode
        if layer.scheme in ("w4a4", "w4a6") and mode not in ("even", None):
            remarks.add("rounding_not_even", f"{layer.name} ({mode})")
        elif layer.scheme == "w4a4":
            code = "rounding_unstated" if mode is None else "activation_rounding"
            remarks.add(code, layer.name)
        elif layer.scheme == "w4a16":
            remarks.add("weight_only", layer.name)


def _other_experts(stock: Stock) -> Iterator[tuple[str, Kind, str]]:
    for module, weight in stock.others.items():
        if "expert" in module and len(weight.shape) > 1:
            yield module, kind_of(module), label_of(weight)


def _remark_on_loose(
    stock: Stock, tensors: Mapping[str, TensorEntry], labels: Mapping[str, str], remarks: Remarks
) -> None:
    """Tensors that are neither weights nor packed scales."""
    for name, label in labels.items():
        remarks.add({"mtp": "mtp_layers", "kv_scale": "kv_scales"}.get(label, label), name)
    for entry in stock.loose:
        if is_u8_buffer(entry):
            remarks.add("u8_buffer", entry.name)
        elif is_weight_scale(entry.name):
            owner = owner_of(entry, tensors)
            if owner is None:
                remarks.add("scale_without_weight", entry.name)
            elif is_float(owner):
                remarks.add("scale_beside_float", entry.name)
