"""Puts stored modules in the places of a model's own, on meta, before its weights are loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mxfp4prep.errors import InvalidCheckpoint, Unsupported
from mxfp4prep.integrations.hf.experts import Gate, StoredExperts
from mxfp4prep.integrations.hf.fp8 import FP8, Fp8Linear, inputs_of_fp8
from mxfp4prep.integrations.hf.linear import StoredLinear
from mxfp4prep.integrations.hf.naming import KEY_MAPPING, Found, Names
from mxfp4prep.parallel import Topology
from mxfp4prep.prepared import VERIFY_HINT
from mxfp4prep.runtime.cutting import Cutter
from mxfp4prep.runtime.gathering import gather, group_experts
from mxfp4prep.runtime.gating import activation_of_config, gated
from mxfp4prep.runtime.reading import DTYPES
from mxfp4prep.safefile import FLOAT_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mxfp4prep.manifest import LayerRecord
    from mxfp4prep.runtime.opening import Opened

RESTORE_HINT = "`mxfp4prep restore` gives the original back for an engine that reads it"
ROUTING = ({"top_k_index", "router_indices"}, {"top_k_weights", "routing_weights"})
"""The names of the second and third argument of a fused experts' forward."""


@dataclass(slots=True)
class Swapped:
    """The modules that were put into a model.

    linears   by their path in the model; so are fp8
    experts   by the name that the loader has for them when it converts
    """

    linears: dict[str, StoredLinear] = field(default_factory=dict)
    fp8: dict[str, Fp8Linear] = field(default_factory=dict)
    experts: dict[str, StoredExperts] = field(default_factory=dict)

    def modules(self) -> Iterable[StoredLinear | Fp8Linear | StoredExperts]:
        """All of them."""
        return (*self.linears.values(), *self.fp8.values(), *self.experts.values())


def swap(model: PreTrainedModel, opened: Opened, backend: str | None) -> Swapped:
    """Replaces every module of `model` that the checkpoint stores in MXFP4, or in FP8.

    Raises InvalidCheckpoint where the model has no such module, or another size; Unsupported for a
    kind of module, of scheme or of activation that cannot be run.
    """
    names, swapped = Names(model), Swapped()
    groups = group_experts(opened.manifest.layers)
    fused = {
        prefix: found
        for prefix in groups
        if (found := names.find(prefix)) is not None and not isinstance(found.module, nn.ModuleList)
    }
    inside = {record.name for prefix in fused for record in groups[prefix]}
    if fused:
        cutter = _cutter(opened)
        for prefix, found in fused.items():
            experts = _experts(opened, found, groups[prefix], cutter, backend)
            model.set_submodule(found.path, experts)
            swapped.experts[found.renamed] = experts
    for record in opened.manifest.layers:
        if record.name not in inside:
            _swap_linear(model, opened, names, record, swapped, backend)
    _swap_fp8(model, opened, names, swapped)
    _keep_companions(model, opened, names)
    _untie(model, swapped.linears)
    return swapped


def _cutter(opened: Opened) -> Cutter:
    modules = [record.name for record in opened.manifest.layers]
    topology = Topology.from_config(opened.config)
    return Cutter.make(modules, topology, 0, 1, opened.manifest.target.parallel)


def _place(names: Names, name: str) -> Found | None:
    """Where module `name` is; None where this class of model leaves it out on purpose."""
    found = names.find(name)
    if found is None and not names.may_lack(name):
        what = "the model that config.json describes has no such module"
        hint = names.hint if names.hint != VERIFY_HINT else f"{VERIFY_HINT}; {KEY_MAPPING}"
        raise InvalidCheckpoint(name, what, hint=hint)
    return found


def _linear_at(found: Found, name: str) -> nn.Linear:
    if type(found.module) is not nn.Linear:
        kind = type(found.module).__name__
        what = "transformers has another module there than a linear layer"
        raise Unsupported(name, what, found=kind, expected="Linear", hint=RESTORE_HINT)
    return found.module


def _swap_linear(
    model: PreTrainedModel,
    opened: Opened,
    names: Names,
    record: LayerRecord,
    swapped: Swapped,
    backend: str | None,
) -> None:
    is_bank = record.experts is not None or record.weight.tensor != f"{record.name}.weight"
    is_left_out = names.find(record.name) is None and names.may_lack(record.name)
    if is_bank and not is_left_out:
        what = "stored as a bank of experts, which this model has no fused experts for"
        raise Unsupported(record.name, what, hint=RESTORE_HINT)
    found = _place(names, record.name)
    if found is None:
        return
    layer = StoredLinear(_linear_at(found, record.name), record, opened, backend)
    model.set_submodule(found.path, layer)
    swapped.linears[found.path] = layer


def _experts(
    opened: Opened,
    found: Found,
    records: list[LayerRecord],
    cutter: Cutter,
    backend: str | None,
) -> StoredExperts:
    prefix, module = found.path, found.module
    parts = {record.name: cutter.part(record) for record in records}
    gathered = gather(prefix, records, parts)
    activation, limit = activation_of_config(opened.config, prefix)
    order = gathered.w13[0][0].record.gate_up or "concatenated"
    gate = Gate(activation, limit, order)
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    experts = StoredExperts(prefix, gathered, gate, dtype, backend)
    _check_routing(prefix, module)
    _check_banks(experts, module)
    _check_gate(prefix, module, gate)
    return experts


def _check_routing(where: str, module: nn.Module) -> None:
    arguments = list(inspect.signature(module.forward).parameters)[1:3]
    if len(arguments) != 2 or any(a not in known for a, known in zip(arguments, ROUTING)):  # noqa: B905
        raise Unsupported(
            where,
            f"{type(module).__name__} is called in a way that is not known here",
            found=", ".join(arguments) or "nothing but hidden states",
            expected="the ids and the weights of the routing",
            hint=RESTORE_HINT,
        )


def _check_banks(experts: StoredExperts, module: nn.Module) -> None:
    """Experts, hidden and intermediate size, and biases, are those of the model's own banks."""
    count, hidden, width = experts.num_experts, experts.hidden_dim, experts.intermediate_dim
    sizes = {"gate_up_proj": {2 * width, hidden}, "down_proj": {hidden, width}}
    for param, expected in sizes.items():
        bank = getattr(module, param, None)
        if not isinstance(bank, nn.Parameter) or bank.dim() != 3:
            what = f"{type(module).__name__} has no {param} for all experts"
            raise Unsupported(experts.name, what, hint=RESTORE_HINT)
        if bank.shape[0] != count or set(bank.shape[1:]) != expected:
            raise InvalidCheckpoint(
                f"{experts.name}.{param}",
                "not the size that config.json gives the experts",
                found=f"{count} x {' x '.join(map(str, expected))}",
                expected=" x ".join(map(str, bank.shape)),
            )
        if (getattr(module, f"{param}_bias", None) is None) != (
            getattr(experts, f"{param}_bias") is None
        ):
            what = "of the checkpoint and the model only one has a bias"
            raise InvalidCheckpoint(f"{experts.name}.{param}", what)


def _check_gate(where: str, module: nn.Module, gate: Gate) -> None:
    """The model's own function between the two GEMMs is ours, clamp and order of rows included:
    asked by example, since a class may do there what no config says."""
    values = torch.linspace(-12, 12, 17, device="cpu").expand(17, 17)
    halves = (values, values.T)  # every gate with every up
    interleaved = gate.order == "interleaved"
    both = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    own: Any = getattr(module, "_apply_gate", None)
    try:
        with torch.device("cpu"):
            if own is not None:
                theirs = own(both)
            else:
                act: Any = getattr(module, "act_fn", None) or module.activation_fn
                first, second = both.chunk(2, dim=-1)
                theirs = act(first) * second
    except Exception as error:
        what = f"{type(module).__name__}'s activation cannot be compared: {error}"
        raise Unsupported(where, what, hint=RESTORE_HINT) from error
    ours = gated(both, gate.order, gate.activation, gate.limit)
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5):
        raise Unsupported(
            where,
            f"{type(module).__name__} combines gate and up in another way",
            expected=f"{gate.activation}, limit {gate.limit}, {gate.order}",
            hint=RESTORE_HINT,
        )


def _swap_fp8(model: PreTrainedModel, opened: Opened, names: Names, swapped: Swapped) -> None:
    """FP8 layers; and refuses every other copied tensor that is not of a plain floating dtype."""
    found: dict[str, Found] = {}
    scales = {"weight_scale", "input_scale", "output_scale"}
    for copied in opened.manifest.tensors:
        dtype = opened.places[copied.name].entry.dtype
        module, _, leaf = copied.name.rpartition(".")
        if copied.label == "rotation":
            what = "an online rotation of inputs, which is not applied here"
            raise Unsupported(copied.name, what, hint=RESTORE_HINT)
        if dtype in FLOAT_DTYPES or (leaf in scales and DTYPES[dtype].is_floating_point):
            continue
        place = _place(names, module)
        if place is None:
            continue
        if dtype != FP8 or leaf != "weight":
            what = "a quantized tensor that is not MXFP4, nor FP8 as known here"
            raise Unsupported(copied.name, what, found=dtype, hint=RESTORE_HINT)
        found[module] = place
    source = opened.config["quantization_config"].get("source_quantization_config")
    inputs = inputs_of_fp8(source if isinstance(source, Mapping) else {}, list(found))
    for name, place in found.items():
        layer = Fp8Linear(_linear_at(place, name), name, inputs[name], opened)
        model.set_submodule(place.path, layer)
        swapped.fp8[place.path] = layer


def _keep_companions(model: PreTrainedModel, opened: Opened, names: Names) -> None:
    """Scales of the key-value cache get a buffer where they stand, and are not applied."""
    for copied in opened.manifest.tensors:
        if copied.label != "kv_scale":
            continue
        module, _, leaf = copied.name.replace("output_quantizer.scale", "output_scale").rpartition(
            "."
        )
        found = names.find(module)
        if found is not None:
            entry = opened.places[copied.name].entry
            empty = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            model.get_submodule(found.path).register_buffer(leaf, empty)


def _untie(model: PreTrainedModel, linears: Mapping[str, StoredLinear]) -> None:
    """A quantized head is not the embedding, whatever tie_word_embeddings says."""
    tied = model.all_tied_weights_keys
    for target in [key for key in tied if key.rpartition(".")[0] in linears]:
        del tied[target]
        model.config.tie_word_embeddings = False
