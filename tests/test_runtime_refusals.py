"""Bad input is refused with one error that says where, what was found, and a way out.

Every field of a manifest is removed, emptied, made unknown, given the values that it has elsewhere
and exchanged with another's. What loads all the same must be on the list of what may differ, hold
the same bytes for the same use, and be refused where SHA256SUMS lies beside it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from prepared_factory import Layer, build, edit_config
from test_runtime_backends import distribution, package

import mxfp4prep
from mxfp4prep import RepackWarning
from mxfp4prep import manifest as m
from mxfp4prep.errors import (
    BackendUnavailable,
    InvalidManifest,
    Mxfp4PrepError,
    Unsupported,
    UsageError,
)
from mxfp4prep.runtime import devices
from mxfp4prep.runtime.backends import availability

ATTN, MLP, MOE = "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.mlp"
PER_TOKEN = {"dtype": "fp8_e4m3", "scale_mode": "per_token", "static": False}
Layers = dict[str, tuple[Callable[[], list[Layer]], dict[str, Any]]]
MODELS: Layers = {
    "llama": (
        lambda: [
            Layer(f"{ATTN}.q_proj", 128, 256, bias=True),
            Layer(f"{ATTN}.k_proj", 64, 256, bias=True),
            Layer(f"{ATTN}.v_proj", 64, 256, bias=True),
            Layer(f"{ATTN}.o_proj", 64, 128, "kept", "w4a16", bias=True),
            Layer(f"{MLP}.gate_proj", 64, 256),
            Layer(f"{MLP}.up_proj", 64, 256),
            Layer(f"{MLP}.down_proj", 48, 192, "triton", "w4a8", input_scale=0.5),
            Layer(f"{MOE}.down_proj", 48, 192, "triton", "w4a8", input_scale=0.25),
            Layer("model.layers.2.self_attn.qkv_proj", 256, 256),
            Layer("model.layers.2.mlp.gate_up_proj", 128, 256),
            Layer("model.layers.3.fc1", 64, 192, "triton", "w4a6"),
            Layer("model.layers.4.fc1", 64, 192, "triton", "w4a8", activation=PER_TOKEN),
            *(
                Layer(f"{MOE}.experts.{expert}.{part}_proj", 64, 64, "triton")
                for expert in (0, 1)
                for part in ("gate", "up", "down")
            ),
        ],
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "gpt_oss": (
        lambda: [
            Layer(f"{MOE}.experts.gate_up_proj", 128, 64, "triton", experts=2, bias=True),
            Layer(f"{MOE}.experts.down_proj", 64, 64, "kept", experts=2, bias=True),
        ],
        {"model_type": "gpt_oss"},
    ),
}
MAY_DIFFER: dict[str, tuple[set[str], str]] = {  # field -> what loads, and why it may
    # the story of the conversion, for people, verify and restore
    "tool_version": ({"unknown"}, "asks whether names are held against this version's table"),
    "source.name": ({"unknown"}, "story"),
    "source.repo": ({"removed", "unknown"}, "story"),
    "source.commit": ({"removed", "unknown"}, "story"),
    "source.config_sha256": ({"unknown"}, "checked by verify"),
    "source.index_sha256": ({"removed", "unknown"}, "checked by verify"),
    "target.gfx": ({"unknown"}, "every layer names its layouts"),
    "target.tp": ({"another"}, "every layer is cut or repacked at any degree"),
    "target.rule_version": ({"unknown", "another"}, "as tool_version"),
    "target.layouts": ({"another"}, "every layer names its layouts"),
    "target.layout": ({"another"}, "every layer names its layouts"),
    "target.keep": ({"unknown"}, "every layer names its layouts"),
    "target.expert_parallel": ({"removed", "another"}, "story"),
    "digests.name": ({"unknown"}, "read with verify=True"),
    "digests.sha256": ({"unknown"}, "read with verify=True"),
    "findings": ({"removed"}, "story"),
    # files that hold no tensor are not opened; the digest of one that does is checked by verify
    "files.name": ({"unknown"}, "of a file without tensors"),
    "files.nbytes": ({"unknown", "another"}, "of a file without tensors"),
    "files.role": ({"another"}, "of a file without tensors"),
    "files.sha256": ({"unknown", "another", "exchanged"}, "checked by verify"),
    "files.source_header": ({"removed", "null", "another", "exchanged"}, "for restore"),
    "tensors.name": ({"exchanged"}, "two tensors of one file"),
    "tensors.label": ({"removed", "unknown"}, "story"),
    # layers
    "layers.group": (
        {"null", "unknown", "another", "exchanged"},
        "decided the path, which is named",
    ),
    "layers.reasons": ({"unknown"}, "why the path is what it is"),
    "layers.hazards": ({"unknown"}, "warnings"),
    "layers.verdict.1": ({"removed", "another"}, "a hint's words"),
    "layers.verdict.2": ({"removed", "another"}, "a hint's words"),
    "layers.verdict.8": ({"removed", "another"}, "a hint's words"),
    "layers.activation.static": ({"removed"}, "false by default"),
    "layers.weight.source_shape": ({"another"}, "leading sizes of a plain weight, for restore"),
    "layers.scale.source_shape": ({"another"}, "leading sizes of a plain scale, for restore"),
    "layers.weight.pad_byte": ({"removed"}, "none by default"),
    "layers.scale.pad_byte": ({"removed"}, "none by default"),
}
KNOWN_BY_SUM: dict[str, set[str]] = {
    # Which of a scheme's inputs a layer has, the source's config says and, where it is not there as
    # in these checkpoints, only the manifest's digest. MX inputs in no mode are in mode EVEN.
    "layers.activation.dtype": {"another"},
    "layers.activation.scale_mode": {"removed", "null", "another"},
}
WORDS: dict[str, tuple[str | int | None, ...]] = {
    "pad_byte": (0, 127),
    "dtype": ("fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", None),
    "scale_mode": ("even", "floor", "per_token", "per_tensor", None),
}


def held(root: Path) -> dict[str, object]:
    """All that decides what a checkpoint computes, whole and on the second of two ranks."""
    found: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RepackWarning)
        for rank, size in ((0, 1), (1, 2)):
            prepared = mxfp4prep.load(root, tp_rank=rank, tp_size=size)
            modules = dict(prepared) | {at: prepared.experts(at) for at in prepared.expert_prefixes}
            for name, module in modules.items():
                facts = [module.input_quant, *module.paths, module.extra_repr()]
                for buffer, tensor in module.named_buffers():
                    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
                    facts += [buffer, tuple(tensor.shape), raw.numpy().tobytes()]
                found[f"{name} {rank}/{size}"] = facts
    return found


class Case:
    """A checkpoint, the document of its manifest, and what it holds."""

    def __init__(self, root: Path, model: str) -> None:
        layers, config = MODELS[model]
        norm = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
        build(root, layers(), config=config, copied=norm, shards=2)
        self.root = root
        self.document = json.loads((root / "mxfp4prep.json").read_bytes())
        self.document["tool_version"] = mxfp4prep.__version__
        self.write(self.document)
        self.held = held(root)
        raw = (root / "mxfp4prep.json").read_bytes()
        self.sums = f"{hashlib.sha256(raw).hexdigest()}  mxfp4prep.json\n"

    def write(self, document: object) -> None:
        (self.root / "mxfp4prep.json").write_text(json.dumps(document))


@pytest.fixture(scope="module", params=list(MODELS))
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("refusals") / "prepared", request.param)


def at(document: Any, path: tuple) -> Any:
    for key in path:
        document = document[key]
    return document


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every key below `value`; lists of objects are entered, other lists are values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from paths(inner, (*path, number))


def field_of(path: tuple) -> str:
    return ".".join(key for key in path if isinstance(key, str))


def choices(path: tuple) -> tuple:
    """What the manifest's model lets a field be, where it is one of a few words."""
    model: Any = m.Manifest
    for key in path:
        if isinstance(key, str):
            fields = getattr(model, "model_fields", {})
            if key not in fields:
                return ("asm", "triton", "impossible") if "verdict" in path else ()
            model = fields[key].annotation
        while get_origin(model) is not Literal and get_args(model):
            model = get_args(model)[0]  # of list[X] and X | None: X
    return get_args(model) if get_origin(model) is Literal else ()


def partners(document: dict, path: tuple) -> list[tuple]:
    """Paths of the field in other records of its list: those of the same sizes, and the next."""
    if len(path) < 3 or not isinstance(path[1], int):
        return []
    records, number = document[path[0]], path[1]
    sizes = [(record.get("n"), record.get("k")) for record in records]
    alike = [
        other for other in range(len(records)) if sizes[other] == sizes[number] != (None, None)
    ]
    chosen = dict.fromkeys([*alike[:6], (number + 1) % len(records)])
    found = []
    for other in chosen:
        try:
            at(document, (path[0], other, *path[2:]))
        except (KeyError, TypeError):  # a digest of another degree, a record without the part
            continue
        if other != number:
            found.append((path[0], other, *path[2:]))
    return found


def unknown(value: object) -> object:
    if isinstance(value, list):
        return [*value, "unheard_of"]
    if isinstance(value, dict):
        return value | {"unheard_of": 1}
    return 1_000_003 if isinstance(value, int) and not isinstance(value, bool) else "unheard_of"


def others(document: dict, path: tuple) -> list:
    """Values that the field has elsewhere or may have."""
    value = at(document, path)
    found = [*choices(path), *WORDS.get(path[-1], ())]
    if isinstance(value, list):
        found = [[choice] for choice in found]
    found += [at(document, partner) for partner in partners(document, path)]
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int):
        found += [2 * value, value // 2]
    elif isinstance(value, list) and value and all(isinstance(size, int) for size in value):
        found += [value[::-1], [1, *value], [value[0] * 2, *value[1:]], []]
    if path[-1] == "reasons":
        found.append(["kept"] if value != ["kept"] else [])
    unique = {json.dumps(other): other for other in found if other is not None and other != value}
    return list(unique.values())


def changed(document: dict, path: tuple) -> Iterator[tuple[str, dict]]:
    """(what was done, the manifest after it): the ways in which one field can be wrong."""
    value, text = at(document, path), json.dumps(document)

    def put(*values: tuple[tuple, object]) -> dict:
        copied = json.loads(text)  # faster than a deep copy
        for place, new in values:
            at(copied, place[:-1])[place[-1]] = copy.deepcopy(new)
        return copied

    removed = json.loads(text)
    del at(removed, path[:-1])[path[-1]]
    yield "removed", removed
    if value is not None:
        yield "null", put((path, None))
    yield "unknown", put((path, unknown(value)))
    for other in others(document, path):
        yield "another", put((path, other))
    operands = {"weight": "scale", "scale": "weight"}
    twin = tuple(operands.get(key, key) for key in path)
    twins = [twin] if twin != path and path[0] == "layers" else []
    for other in twins + partners(document, path):
        if at(document, other) != value:
            yield "exchanged", put((path, at(document, other)), (other, value))


FIELDS = sorted(
    {field for field in MAY_DIFFER if field.split(".")[0] not in ("files", "tensors", "layers")}
    | {"schema_version", "source", "target", "target.parallel", "findings"}
    | {"digests", "digests.algorithm"}
    | {f"files.{field}" for field in m.FileRecord.model_fields}
    | {f"tensors.{field}" for field in m.CopiedTensor.model_fields}
    | {f"layers.{field}" for field in m.LayerRecord.model_fields}
    | {f"layers.activation.{field}" for field in m.ActivationRecord.model_fields}
    | {f"layers.{x}.{f}" for x in ("weight", "scale") for f in m.StoredTensor.model_fields}
    | {f"layers.verdict.{degree}" for degree in (1, 2, 8)}
    | {"files", "layers", "tensors"}
)


def test_no_field_is_left_out(case):
    assert {field_of(path) for path in paths(case.document)} == set(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_a_manifest_with_a_wrong_field(case, field):
    loads: dict[str, list[bool]] = defaultdict(list)
    tried = 0
    sums = case.root / "SHA256SUMS"
    for path in paths(case.document):
        if field_of(path) != field:
            continue
        for what, document in changed(case.document, path):
            tried += 1
            case.write(document)
            try:
                found = held(case.root)
            except Mxfp4PrepError as error:
                assert_whole(error)
                continue
            loads[what].append(found == case.held)
            sums.write_text(case.sums)
            with pytest.raises(InvalidManifest, match="SHA256SUMS"):
                mxfp4prep.load(case.root)
            sums.unlink()
    case.write(case.document)
    assert tried >= 2
    allowed, _ = MAY_DIFFER.get(field, (KNOWN_BY_SUM.get(field, set()), ""))
    assert set(loads) <= allowed
    if field not in KNOWN_BY_SUM:
        assert all(all(same) for same in loads.values()), "it loads and computes something else"
    if case.document["layers"][0]["name"].startswith(ATTN):
        assert set(loads) == allowed, "the list of what may differ is longer than it need be"


@pytest.mark.parametrize("field", ["layers.gate_up", "layers.kind", "layers.experts"])
def test_a_manifest_of_another_version_is_refused_with_a_way_out(case, field):
    """What no decision made again can find, assembling the layers does."""
    document = case.document | {"tool_version": "0.0.1"}
    refused = 0
    for path in paths(document):
        for _, wrong in changed(document, path) if field_of(path) == field else ():
            case.write(wrong)
            try:
                held(case.root)
            except Mxfp4PrepError as error:
                refused += 1
                assert_whole(error)
    case.write(case.document)
    assert refused or field == "layers.kind"  # which matters to experts only


def assert_whole(error: Mxfp4PrepError) -> None:
    """One line that begins with the place, says what is wrong, and a way out beside it."""
    text = str(error)
    assert text.startswith(f"{error.where}: {error.what}"[:40]), text
    assert "\n" not in text
    assert error.hint, f"no way out: {text}"


CONFIG = {"quant_method": "mxfp4prep", "format_version": 1, "manifest": "mxfp4prep.json"}
WRONG_VALUES = ("removed", None, "unheard_of", 2, True, "1", ["mxfp4prep"], "../mxfp4prep.json")


@pytest.mark.parametrize("key", CONFIG)
@pytest.mark.parametrize("value", WRONG_VALUES)
def test_a_config_with_a_wrong_mark(case, key, value):
    text = (case.root / "config.json").read_text()
    holder = "quantization_config"
    if value == "removed":
        edit_config(case.root, lambda config: config[holder].pop(key))
    else:
        edit_config(case.root, lambda config: config[holder].__setitem__(key, value))
    with pytest.raises(InvalidManifest) as caught:
        mxfp4prep.load(case.root)
    (case.root / "config.json").write_text(text)
    assert_whole(caught.value)
    assert key in caught.value.where
    assert caught.value.expected == repr(CONFIG[key])


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A layer and experts of width 256, called by name."""
    root = tmp_path_factory.mktemp("inputs")
    experts = f"{MOE}.experts"
    up = Layer(f"{experts}.gate_up_proj", 64, 256, "triton", experts=2)
    down = Layer(f"{experts}.down_proj", 256, 32, "triton", experts=2)
    build(root, [Layer("fc1", 64, 256), up, down])

    def fresh(name: str):
        prepared = mxfp4prep.load(root)
        return prepared["fc1"] if name == "fc1" else prepared.experts(experts)

    def call(module, x):
        if hasattr(module, "experts"):
            ids = torch.zeros((*x.shape[:-1], 1), dtype=torch.int64)
            return module(x, torch.ones(ids.shape), ids)
        return module(x)

    return fresh, call


INPUTS: dict[str, tuple[Callable[[], torch.Tensor], list[str]]] = {
    "int32": (lambda: torch.ones((2, 256), dtype=torch.int32), ["dtype", "torch.int32"]),
    "uint8": (lambda: torch.ones((2, 256), dtype=torch.uint8), ["dtype", "torch.uint8"]),
    "bool": (lambda: torch.ones((2, 256), dtype=torch.bool), ["dtype", "torch.bool"]),
    "float64": (lambda: torch.ones((2, 256), dtype=torch.float64), ["dtype", "torch.float64"]),
    "fp8": (lambda: torch.ones((2, 256)).to(torch.float8_e4m3fn), ["dtype", "float8_e4m3fn"]),
    "complex": (lambda: torch.ones((2, 256), dtype=torch.complex64), ["dtype", "complex64"]),
    "too narrow": (lambda: torch.ones((2, 255)), ["shape", "(2, 255)", "(..., 256)"]),
    "too wide": (lambda: torch.ones((2, 512)), ["shape", "(2, 512)", "(..., 256)"]),
    "packed": (lambda: torch.ones((2, 128), dtype=torch.uint8), ["shape", "(2, 128)"]),
    "transposed": (lambda: torch.ones((256, 2)), ["shape", "(256, 2)"]),
    "no columns": (lambda: torch.ones((256, 0)), ["shape", "(256, 0)"]),
    "0-d": (lambda: torch.ones(()), ["shape", "()", "(..., 256)"]),
    "elsewhere": (lambda: torch.ones((2, 256), device="meta"), ["device", "meta", "cpu"]),
}


@pytest.mark.parametrize("name", ["fc1", "experts"])
@pytest.mark.parametrize("wrong", INPUTS)
def test_an_input_that_a_layer_cannot_take(modules, name, wrong):
    fresh, call = modules
    make, words = INPUTS[wrong]
    with pytest.raises(UsageError) as caught:
        call(fresh(name), make())
    assert_whole(caught.value)
    assert caught.value.where.endswith(name)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["fc1", "experts"])
def test_an_input_on_the_cpu_for_a_layer_elsewhere(modules, name):
    fresh, call = modules
    with pytest.raises(UsageError, match="found cpu, expected meta") as caught:
        call(fresh(name).to("meta"), torch.ones((2, 256)))
    assert_whole(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["fc1", "experts"])
def test_inputs_that_are_taken(modules, name, dtype):
    fresh, call = modules
    assert call(fresh(name), torch.ones((2, 256), dtype=dtype)).dtype == dtype


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(("backend", "word"), [("aiter", "gfx950"), ("triton", "GPU")])
def test_a_backend_that_cannot_run(case, no_gpu, backend, word):
    with pytest.raises(BackendUnavailable, match=word) as caught:
        mxfp4prep.load(case.root, backend=backend)
    assert_whole(caught.value)
    assert caught.value.where == f"backend {backend}"
    assert "torch" in caught.value.hint


def test_aiter_from_the_wrong_distribution(case, tmp_path, monkeypatch):
    """On a machine that has the GPU: PyPI's aiter is installed in the place of ROCm's."""
    package(tmp_path, content="def map(): ...\n")
    distribution(tmp_path, "aiter")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(availability, "gfx_targets", lambda *_, **__: ("gfx950",))
    with pytest.raises(BackendUnavailable, match="another one") as caught:
        mxfp4prep.load(case.root, backend="aiter")
    assert_whole(caught.value)
    assert "pip install amd-aiter" in str(caught.value)


@pytest.mark.parametrize("backend", ["unheard_of", "", "Torch", "cutlass"])
def test_a_backend_that_nobody_knows(case, backend):
    with pytest.raises(UsageError, match="unknown") as caught:
        mxfp4prep.load(case.root, backend=backend)
    assert repr(backend) in str(caught.value)
    assert "aiter or triton or torch" in str(caught.value)


def test_a_backend_that_is_no_name(case):
    for wrong in (3, ["torch"], True):
        with pytest.raises(UsageError, match="unknown") as caught:
            mxfp4prep.load(case.root, backend=wrong)
        assert_whole(caught.value)


@pytest.mark.parametrize("has_triton", [False, True])
def test_without_a_gpu_that_is_the_first_reason(no_gpu, monkeypatch, has_triton):
    """To install Triton on such a machine is no way out."""
    there = Path("triton") if has_triton else None
    monkeypatch.setattr(availability, "_module_location", lambda _: there)
    reason = next(status for status in mxfp4prep.backends() if status.name == "triton").reason
    assert reason.startswith("no GPU that torch can use")
    assert ("triton is not installed" in reason) != has_triton
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    status = next(status for status in mxfp4prep.backends() if status.name == "triton")
    assert status.available == has_triton
    assert status.reason.startswith("Triton kernels" if has_triton else "triton is not installed")


NO_DEVICES = [None, True, -1, 1.5, "", "toaster", "cuda:-1", "cuda:300", "cuda:x", "CUDA", "cpu "]


@pytest.mark.parametrize("device", [*NO_DEVICES, b"cpu", ["cpu"], torch.float32], ids=repr)
def test_a_device_that_is_none(case, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="device: unknown") as caught:
        mxfp4prep.load(case.root, device=device)
    assert_whole(caught.value)
    assert f"found {device!r}, expected 'cpu', 'cuda', 'cuda:N'" in str(caught.value)
    with pytest.raises(UsageError, match="--device: unknown") as caught:
        devices.usable_device(device, "--device")
    assert_whole(caught.value)
    assert "another device that torch has" in str(caught.value)


@pytest.mark.parametrize("device", ["xpu", "mps", torch.device("hpu")])
def test_a_device_that_layers_are_not_loaded_on(case, device):
    with pytest.raises(UsageError, match="not supported: found") as caught:
        mxfp4prep.load(case.root, device=device)
    assert_whole(caught.value)
    assert ".to(device)" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "name"),
    [(0, "cuda:0"), (3, "cuda:3"), ("cuda", "cuda"), (torch.device("cuda:0"), "cuda:0")],
)
def test_a_gpu_that_is_not_here(case, no_gpu, monkeypatch, device, name):
    with pytest.raises(BackendUnavailable, match=f"device {name}: torch sees no GPU") as caught:
        mxfp4prep.load(case.root, device=device)
    assert_whole(caught.value)
    with pytest.raises(BackendUnavailable, match="no GPU"):
        mxfp4prep.load(case.root, device="meta").materialize(torch.nn.Identity(), device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.loading_device(1) == torch.device("cuda", 1)
    with pytest.raises(BackendUnavailable, match=r"device cuda:2: .* torch sees 2"):
        mxfp4prep.load(case.root, device=2)


@pytest.mark.parametrize("path", [None, 3, ["model"]])
def test_a_path_that_is_none(path):
    with pytest.raises(UsageError, match="path: not a path") as caught:
        mxfp4prep.load(path)
    assert_whole(caught.value)


@pytest.mark.parametrize("progress", [3, "yes"])
def test_progress_that_cannot_be_called(case, progress):
    prepared = mxfp4prep.load(case.root)
    for call in (
        lambda: prepared.load_all(progress),
        lambda: prepared.materialize(torch.nn.Identity(), progress=progress),
        lambda: mxfp4prep.load(case.root, lazy=False, progress=progress),
    ):
        with pytest.raises(UsageError, match="progress: not callable") as caught:
            call()
        assert_whole(caught.value)


LIMITS = [-1, -0.5, float("nan"), float("-inf"), "x", "7", True, [7.0], 1j]


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
def test_a_clamp_that_is_none(case, limit):
    prepared = mxfp4prep.load(case.root)
    for ask in (prepared.experts, prepared.read_experts):
        with pytest.raises(UsageError, match="limit: not a clamp") as caught:
            ask(f"{MOE}.experts", limit=limit)
        assert_whole(caught.value)
        assert repr(limit) in str(caught.value)


@pytest.mark.parametrize("limit", [0, 7, 0.5, float("inf"), np.float32(7)])
def test_clamps_that_are_taken(case, limit):
    assert mxfp4prep.load(case.root).experts(f"{MOE}.experts", limit=limit).limit == limit


@pytest.mark.parametrize("limit", [-1.0, "7", True, [3.0]])
def test_a_clamp_of_the_config_that_is_none(tmp_path, limit):
    layers, config = MODELS["gpt_oss"]
    build(tmp_path, layers(), config=config | {"swiglu_limit": limit})
    prepared = mxfp4prep.load(tmp_path)
    with pytest.raises(Unsupported, match="swiglu_limit") as caught:
        prepared.experts(f"{MOE}.experts")
    assert_whole(caught.value)
    assert prepared.experts(f"{MOE}.experts", "swigluoai", 7.0).limit == 7.0


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"prefix": 3}, ["prefix", "not a name", "found 3"]),
        ({"prefix": None}, ["prefix", "not a name"]),
        ({"prefix": ["a"]}, ["prefix", "not a name", "['a']"]),
        ({"activation": 3}, ["activation", "not a name"]),
        ({"activation": "relu"}, ["unknown activation", "relu", "silu or gelu"]),
        ({"activation": ["silu"]}, ["activation", "not a name"]),
        ({"shared": True}, ["shared", "not a name", "True"]),
        ({"shared": {}}, ["shared", "not a name"]),
        ({"fusion": None}, ["fusion", "None", "auto or fused or separate"]),
        ({"fusion": ["auto"]}, ["fusion", "['auto']"]),
        ({"fusion": "yes", "shared": "auto"}, ["fusion", "'yes'"]),
    ],
)
def test_experts_that_are_asked_for_oddly(case, question, words):
    prepared = mxfp4prep.load(case.root)
    for ask in (prepared.experts, prepared.read_experts):
        with pytest.raises(UsageError) as caught:
            ask(**{"prefix": f"{MOE}.experts"} | question)
        assert_whole(caught.value)
        for word in words:
            assert word in str(caught.value)


def test_a_shared_expert_that_is_a_routed_one(case):
    prepared = mxfp4prep.load(case.root)
    experts = f"{MOE}.experts"
    names = [experts, MOE]
    names += [f"{experts}.0"] if f"{experts}.0.up_proj" in prepared else []
    for name in names:
        with pytest.raises(UsageError, match="routed experts, which no shared") as caught:
            prepared.experts(experts, shared=name)
        assert_whole(caught.value)
        assert "shared='auto'" in caught.value.hint


BACKEND_NAMES = ("torch", "triton")
T, H, I = 4, 64, 32  # noqa: E741 - intermediate


def fused_moe(device: str = "cpu", **changed):
    def bank(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.full((2, rows, columns // 2), 0x22, dtype=torch.uint8)
        return weight, torch.full((2, columns // 32, rows), 127, dtype=torch.uint8)

    ids = torch.zeros((T, 1), dtype=torch.int32)
    tensors = torch.ones((T, H)), *bank(2 * I, H), *bank(H, I), torch.ones((T, 1)), ids
    words = {"w13_path": "triton", "w2_path": "triton", "input_quant": "mxfp4"} | changed
    tensors = [tensor.to(device) for tensor in tensors]
    return torch.ops.mxfp4prep.fused_moe(*tensors, I, **words)


WRONG_CALLS = [
    ({"activation": "relu"}, "unknown activation: found relu"),
    ({"activation": "SiLU"}, "unknown activation: found SiLU"),
    ({"activation": ""}, "unknown activation"),
    ({"gate_up": "mixed"}, "unknown gate_up order: found mixed"),
    ({"input_quant": "mxfp8"}, "unknown input_quant: found mxfp8"),
    ({"w13_path": "fast"}, "unknown path: found fast"),
    ({"w2_path": ""}, "unknown path"),
    ({"limit": -1.0}, "limit: not a clamp"),
    ({"limit": float("nan")}, "limit: not a clamp"),
    ({"hidden_pad": H}, f"hidden_pad {H} of {H}"),
    ({"hidden_pad": H + 32}, f"hidden_pad {H + 32} of {H}"),
    ({"hidden_pad": -32}, f"hidden_pad -32 of {H}"),
    ({"intermediate_pad": I}, f"intermediate_pad {I} of {I}"),
    ({"intermediate_pad": -1}, f"intermediate_pad -1 of {I}"),
]


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize(("changed", "words"), WRONG_CALLS)
def test_a_call_that_no_backend_can_answer(changed, words, backend):
    """Refused before a backend runs: they would not answer alike. On meta it is refused as well."""
    for device in ("cpu", "meta"):
        with pytest.raises(UsageError) as caught:
            fused_moe(device, backend=backend, **changed)
        assert_whole(caught.value)
        assert words in str(caught.value)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_padding_of_all_but_one_value_is_answered(backend):
    wanted = fused_moe(hidden_pad=H - 1, intermediate_pad=I - 1)
    assert (wanted[:, 0] != 0).all()
    assert not wanted[:, 1:].any()
    found = fused_moe(hidden_pad=H - 1, intermediate_pad=I - 1, backend=backend)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert fused_moe("meta", hidden_pad=H - 1).is_meta


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("limit", [0.0, float("inf")])
def test_the_ends_of_what_a_clamp_may_be(backend, limit):
    wanted = fused_moe() if limit else torch.zeros((T, H))
    torch.testing.assert_close(fused_moe(limit=limit, backend=backend), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("changed", [{"input_quant": "int4"}, {"path": "fast"}, {"path": "tri"}])
def test_a_gemm_that_no_backend_can_answer(backend, changed):
    weight = torch.zeros((32, 32), dtype=torch.uint8), torch.zeros((2, 32), dtype=torch.uint8)
    words = {"path": "triton", "input_quant": "mxfp4", "backend": backend} | changed
    for device in ("cpu", "meta"):
        tensors = [tensor.to(device) for tensor in (torch.ones((3, 64)), *weight)]
        with pytest.raises(UsageError, match="unknown") as caught:
            torch.ops.mxfp4prep.gemm(*tensors, 32, **words)
        assert_whole(caught.value)


@pytest.mark.parametrize("device", ["cpu:1", "cpu:3", "cpu:7", "meta:0", "meta:1"])
@pytest.mark.parametrize("kind", [str, torch.device])
def test_a_number_of_a_device_that_there_is_one_of(case, device, kind):
    named = kind(device)
    for refused in (
        lambda: mxfp4prep.load(case.root, named),
        lambda: mxfp4prep.load(case.root, "meta").materialize(torch.nn.Identity(), named),
        lambda: devices.usable_device(named),
    ):
        with pytest.raises(
            UsageError, match=f"device: there is only one: found {device}"
        ) as caught:
            refused()
        assert_whole(caught.value)
    for fine in ("cpu", "cpu:0", torch.device("cpu", 0), "meta"):
        assert mxfp4prep.load(case.root, fine).device.type in ("cpu", "meta")


@pytest.mark.parametrize("value", ["no", "False", "", 0, 1, None, [], np.True_])
@pytest.mark.parametrize("name", ["verify", "lazy", "tensors"])
def test_flags_are_true_or_false(case, name, value):
    prepared = mxfp4prep.load(case.root)
    call = prepared.load_all if name == "tensors" else partial(mxfp4prep.load, case.root)
    with pytest.raises(UsageError, match=f"{name}: not a flag") as caught:
        call(**{name: value})
    assert_whole(caught.value)
    assert caught.value.found == repr(value)


NO_TENSORS = {
    "None": lambda: None,
    "list": lambda: [[1.0] * 256],
    "numpy": lambda: np.ones((1, 256), dtype=np.float32),
    "sparse": lambda: torch.ones((1, 256)).to_sparse(),
    "csr": lambda: torch.ones((1, 256)).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("wrong", NO_TENSORS)
def test_arguments_that_are_no_strided_tensors(modules, wrong):
    fresh, _ = modules
    layer, moe = fresh("fc1"), fresh("experts")
    x, weights, ids = torch.ones((1, 256)), torch.ones((1, 1)), torch.zeros((1, 1), dtype=torch.int)
    calls = [
        (lambda bad: layer(bad), "the input"),
        (lambda bad: moe(bad, weights, ids), "the input"),
        (lambda bad: moe(x, bad, ids), "topk_weights"),
        (lambda bad: moe(x, weights, bad), "topk_ids"),
    ]
    for call, word in calls:
        with pytest.raises(UsageError, match=word) as caught:
            call(NO_TENSORS[wrong]())
        assert_whole(caught.value)
    assert moe(x, weights, ids).shape == x.shape


@pytest.mark.parametrize("module", [None, [], "fc1", torch.ones(1), torch.nn.Identity])
def test_what_is_no_module_cannot_be_filled(case, module):
    with pytest.raises(UsageError, match="module: not a module: found ") as caught:
        mxfp4prep.load(case.root).materialize(module)
    assert_whole(caught.value)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_opened_checkpoint_is_not_copied(case, way):
    prepared = mxfp4prep.load(case.root)
    with pytest.raises(UsageError, match="Prepared: an opened checkpoint cannot be") as caught:
        way(prepared)
    assert_whole(caught.value)


def test_its_layers_are(modules):
    fresh, call = modules
    x = torch.ones((2, 256))
    for name in ("fc1", "experts"):
        module = fresh(name)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(call(other, x), call(module, x))


def shared_in_two_layers(root):
    layers = []
    for block in ("model.layers.0.mlp", "model.layers.1.mlp"):
        for name in (f"{block}.experts.0", f"{block}.experts.1", f"{block}.shared_expert"):
            layers += [Layer(f"{name}.{part}_proj", 64, 64, "triton") for part in ("gate", "up")]
            layers.append(Layer(f"{name}.down_proj", 64, 64, "triton"))
    parts = ("gate", "up", "down")
    layers += [Layer(f"model.layers.0.dense.{part}_proj", 64, 64, "triton") for part in parts]
    build(root, layers)
    return mxfp4prep.load(root)


def test_the_shared_expert_of_another_layer(tmp_path):
    prepared = shared_in_two_layers(tmp_path)
    experts = "model.layers.0.mlp.experts"
    for name in ("model.layers.1.mlp.shared_expert", "model.layers.0.mlp.experts.0"):
        with pytest.raises(UsageError) as caught:
            prepared.experts(experts, shared=name)
        assert_whole(caught.value)
    with pytest.raises(
        UsageError, match=r"another module: found .*layers.1.*, expected .*layers.0"
    ):
        prepared.experts(experts, shared="model.layers.1.mlp.shared_expert")
    # beside the experts, or beside a module that they are in
    for name in ("model.layers.0.mlp.shared_expert", "model.layers.0.dense"):
        assert prepared.experts(experts, shared=name).shared_name == name


def test_fused_with_nothing(tmp_path):
    prepared = shared_in_two_layers(tmp_path)
    with pytest.raises(UsageError, match="fusion: 'fused', but there is no shared") as caught:
        prepared.experts("model.layers.0.mlp.experts", fusion="fused")
    assert_whole(caught.value)
    fused = prepared.experts("model.layers.0.mlp.experts", shared="auto", fusion="fused")
    assert fused.shared_slots
