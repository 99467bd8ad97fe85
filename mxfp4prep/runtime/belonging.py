"""Whether a record is its layer's: its tensors, the cut and row order its name means, its inputs.

Two layers of one shape may trade tensors, and a fused projection may lose the mark of its parts:
every shape still agrees and every answer is wrong. The name is the only witness left.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from mxfp4prep.alignment import RULE_VERSION
from mxfp4prep.errors import InvalidManifest, UsageError
from mxfp4prep.manifest import LayerRecord, Manifest
from mxfp4prep.marks import MANIFEST_NAME
from mxfp4prep.parallel import (
    GateUp,
    Kind,
    Role,
    Topology,
    assign_roles,
    gate_up_order,
    kind_of,
    parse_rules,
)
from mxfp4prep.prepared import CONVERT_HINT
from mxfp4prep.runtime.agreement import Place
from mxfp4prep.runtime.source_inputs import Inputs, named_inputs
from mxfp4prep.safefile import FLOAT_DTYPES

DISTRIBUTION = "mxfp4prep"

ANY = "in any scale mode"
"""Scale modes of MX inputs are Quark's; one that is not EVEN is refused where the layer is made."""

SCHEME_INPUTS: dict[str, tuple[Inputs, ...]] = {
    "w4a4": (Inputs("fp4", ANY, static=False),),
    "w4a6": (Inputs("fp6_e2m3", ANY, static=False), Inputs("fp6_e3m2", ANY, static=False)),
    "w4a8": (
        Inputs("fp8_e4m3", None, static=True),
        Inputs("fp8_e4m3", "per_token", static=False),
        Inputs("fp8_e4m3", "per_tensor", static=False),
    ),
    "w4a16": (Inputs(None, None, static=False),),
}
"""Scheme -> the inputs that it means."""

_DIGITS = str.maketrans("123456789", "000000000")


def check_tensors(record: LayerRecord, places: Mapping[str, Place]) -> None:
    """Nothing; raises InvalidManifest for a record that names another layer's tensor, or leaves
    out what its layer has: a bias that is not added is no error that anything else would show.

    places   every tensor of the checkpoint by name
    """
    name = record.name
    own = (f"{name}.", f"{name}_")
    for what, tensor in (
        ("weight", record.weight.tensor),
        ("scale", record.scale.tensor),
        ("bias", record.bias),
        ("input_scale", record.input_scale),
    ):
        if tensor is not None and tensor != name and not tensor.startswith(own):
            _refuse(name, f"its {what} is another layer's tensor", tensor, f"{name}...")
    bias = f"{name}_bias" if record.weight.tensor == name else f"{name}.bias"
    if record.bias != bias and _is_vector(places.get(bias)):
        _refuse(name, "its bias", record.bias, bias)


def _is_vector(place: Place | None) -> bool:
    """Whether it is there, and a bias: one value a row, or one a row and expert."""
    return place is not None and place.entry.dtype in FLOAT_DTYPES and len(place.entry.shape) < 3


def check_inputs(manifest: Manifest, config: Mapping[str, Any]) -> None:
    """Nothing; raises InvalidManifest where the inputs of a layer are quantized otherwise than its
    scheme means, or than any part of the source's config in config.json says.

    No shape depends on it: what is wrong here only shows in the answers.
    """
    named = named_inputs(config)
    seen: set[tuple[str, Inputs]] = set()
    for record in manifest.layers:
        activation = record.activation
        inputs = Inputs(activation.dtype, activation.scale_mode, activation.static)
        if (record.scheme, inputs) in seen:
            continue
        seen.add((record.scheme, inputs))
        meant = SCHEME_INPUTS[record.scheme]
        any_mode = inputs._replace(scale_mode=ANY)
        if inputs not in meant and any_mode not in meant:
            expected = " or ".join(map(str, meant))
            _refuse(record.name, f"inputs that are not those of {record.scheme}", inputs, expected)
        if named and inputs not in named:
            what = "inputs that the source's config does not name"
            _refuse(record.name, what, inputs, " or ".join(sorted(map(str, named))))


def check_names(manifest: Manifest, topology: Topology) -> None:
    """Nothing; raises InvalidManifest where a layer's kind, cut or order of gate and up is not what
    the name table and the rules that it was planned by say.

    Asks only manifests that this version wrote: another one may have had another table.
    """
    if (manifest.tool_version, manifest.target.rule_version) != (_version(), RULE_VERSION):
        return
    roles = roles_of(manifest, topology)
    # 70,000 names differ in their numbers only, up to the last part: w1 and w2 are not the same.
    known: dict[tuple[str, str], tuple[Kind, GateUp | None]] = {}
    for record in manifest.layers:
        parent, _, leaf = record.name.rpartition(".")
        key = parent.translate(_DIGITS), leaf
        if key not in known:
            known[key] = kind_of(record.name), gate_up_order(record.name, topology)
        kind, order = known[key]
        if record.experts is not None and kind == "linear":
            kind = "expert"
        for what, found, expected in (
            ("kind", record.kind, kind),
            ("parallel", record.parallel, roles[record.name].parallel),
            ("gate_up", record.gate_up, order),
        ):
            if found != expected:
                _refuse(record.name, f"{what} is not what its name says", found, expected)


def roles_of(manifest: Manifest, topology: Topology) -> dict[str, Role]:
    """Every module's role by name, with the rules that the manifest was planned by.

    Raises InvalidManifest for a rule that is none.
    """
    modules = [record.name for record in manifest.layers]
    copied = (tensor.name for tensor in manifest.tensors)
    modules += [name.removesuffix(".weight") for name in copied if name.endswith(".weight")]
    try:
        rules = parse_rules(manifest.target.parallel)
    except UsageError as error:
        raise InvalidManifest(
            f"{MANIFEST_NAME}: target.parallel",
            "not a rule",
            found=error.where,
            expected=error.expected,
            hint=CONVERT_HINT,
        ) from error
    return assign_roles(list(dict.fromkeys(modules)), rules, topology.model_type)


def _version() -> str | None:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # a source tree on the path
        return None


def _refuse(layer: str, what: str, found: object, expected: object) -> None:
    raise InvalidManifest(
        f"{MANIFEST_NAME}: {layer}",
        what,
        found="nothing" if found is None else found,
        expected="nothing" if expected is None else expected,
        hint=CONVERT_HINT,
    )
