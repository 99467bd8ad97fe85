"""Which backend the plugin's methods choose on which machine, and what they hand to it:
`python vllm_backends.py SITE SOURCE PREPARED W4A16_PREPARED`.

SITE has a stand-in for AITER that checks what it is given and answers right. Prints one JSON
object. The models are vLLM's own, loaded on the CPU; a machine is what the availability checks find
there, and a GPU what a module's parameters say that they are on.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import aiter_recorder
import torch
from aiter_stub import forget
from moe_cases import Expert, routed64
from prepared_factory import decode64, fake_quantize64
from safetensors.torch import load_file
from vllm_facts import built, tell

MACHINES = {
    # name -> instruction sets of its AMD GPUs, whether torch sees a GPU, whether AITER is installed
    "gfx950": (("gfx950",), True, True),
    "gfx950 without AITER": (("gfx950",), True, False),
    "gfx942": (("gfx942",), True, True),
    "no AMD GPU": ((), True, True),
    "no GPU": ((), False, True),
}


class OnGpu:
    """A module whose parameters say that they are on a GPU."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        found = getattr(self.module, name)
        is_parameter = isinstance(found, torch.nn.Parameter) and name.endswith("weight")
        return SimpleNamespace(device=torch.device("cuda", 0)) if is_parameter else found

    def get_parameter(self, name):
        return getattr(self, name)


def become(machine, site):
    """Makes this process believe that it is on that machine."""
    from mxfp4prep.runtime.backends import availability

    targets, has_gpu, has_aiter = MACHINES[machine]
    availability.gfx_targets = lambda nodes=None: targets
    torch.cuda.is_available = lambda: has_gpu
    sys.path[:] = [*([site] if has_aiter else []), *(path for path in sys.path if path != site)]
    forget()


def ours(model):
    """Name -> module, of those that this package runs."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__.startswith("Prepared")
    }


def chosen(modules, site):
    """Machine -> where the parameters are -> module -> backend."""
    found = {}
    for machine in MACHINES:
        become(machine, site)
        found[machine] = {}
        for where, wrap in (("cuda", OnGpu), ("cpu", lambda module: module)):
            if where == "cuda" and machine == "no GPU":
                continue
            for name, module in modules.items():
                module.quant_method.process_weights_after_loading(wrap(module))
                backends = found[machine].setdefault(where, {})
                backends[name] = module.quant_method.backend
    return found


class Handed:
    """What a function of a backend was given: shapes by argument, and which of them are the
    module's own memory."""

    def __init__(self, module):
        self.own = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in module.named_parameters(recurse=False)
        }
        self.calls = []

    def note(self, function, arguments):
        shapes = {
            self.own[value.untyped_storage().data_ptr()]: [*value.shape]
            for value in arguments
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.own
        }
        self.calls.append([function, shapes])

    def watching(self, function, call):
        def watch(*arguments, **named):
            self.note(function, [*arguments, *named.values()])
            return call(*arguments, **named)

        return watch


def handed_to_aiter(module, *arguments):
    """The calls of AITER's functions, and the answer."""
    handed = Handed(module)
    call = aiter_recorder.call
    aiter_recorder.call = lambda name, version, given: (
        handed.note(name, given.values()) or call(name, version, given)
    )
    try:
        answer = module.quant_method.apply(module, *arguments)
    finally:
        aiter_recorder.call = call
    return [call for call in handed.calls if call[1]], answer


def handed_to_triton(module, *arguments):
    """The calls of the Triton backend's functions, and the answer; the kernels are interpreted."""
    from mxfp4prep.runtime.backends import triton_backend

    handed = Handed(module)
    functions = {name: getattr(triton_backend, name) for name in ("gemm", "fused_moe")}
    for name, function in functions.items():
        setattr(triton_backend, name, handed.watching(name, function))
    try:
        answer = module.quant_method.apply(module, *arguments)
    finally:
        for name, function in functions.items():
            setattr(triton_backend, name, function)
    return handed.calls, answer


def error(answer, expected):
    """The largest, in parts of the largest value there is."""
    return float((answer.double() - expected).abs().max() / expected.abs().max())


def handed_over(modules, source, names, hand):
    """What is handed to a backend by some modules, and how far off their answers are.

    names   module -> number of rows; of a MoE block's experts, or a linear with the parts of its
            fused name
    """
    tensors = load_file(f"{source}/model.safetensors")

    def dense(name):
        packed, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        return decode64(packed, scale, 2 * packed.shape[1])

    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found = {}
    for name, rows in names:
        module = modules[name]
        parent, _, leaf = name.rpartition(".")
        generator = torch.Generator().manual_seed(rows)
        if leaf == "routed_experts":
            experts = [
                Expert(
                    *(dense(f"{parent}.{number}.{part}_proj") for part in ("gate", "up", "down"))
                )
                for number in range(4)
            ]
            x = torch.randn((rows, experts[0].gate.shape[1]), generator=generator).bfloat16()
            ids = torch.randint(0, 4, (rows, 2), generator=generator, dtype=torch.int32)
            weights = torch.rand((rows, 2), generator=generator)
            calls, answer = hand(module, x, weights, ids)
            expected = routed64(experts, x, weights, ids)
        else:
            matrix = torch.cat([dense(f"{parent}.{part}") for part in parts.get(leaf, (leaf,))])
            x = torch.randn((rows, matrix.shape[1]), generator=generator).bfloat16()
            calls, answer = hand(module, x)
            expected = fake_quantize64(x) @ matrix.T
        found[f"{name} x {rows}"] = {"calls": calls, "error": error(answer, expected)}
    return found


def facts(site, source, prepared, weights_only):
    import mxfp4prep.integrations.vllm as plugin

    plugin.register()
    model, _ = built(prepared)
    modules = ours(model)
    found = {"chosen": chosen(modules, site)}
    found["paths"] = {
        name: getattr(module.quant_method, "path", None)
        or [bank.path for bank in module.quant_method.banks]
        for name, module in modules.items()
    }
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    down, experts = f"{mlp}.shared_expert.down_proj", f"{mlp}.experts.routed_experts"
    for machine, hand, names in (
        (
            "gfx950",
            handed_to_aiter,
            [
                *((f"{attention}.qkv_proj", rows) for rows in (4, 100)),
                *((name, 4) for name in (f"{attention}.o_proj", down, experts)),
            ],
        ),
        (
            "gfx942",
            handed_to_triton,
            [(name, 4) for name in (f"{attention}.qkv_proj", down, experts)],
        ),
    ):
        become(machine, site)
        for name, _ in names:
            modules[name].quant_method.process_weights_after_loading(OnGpu(modules[name]))
        found[machine] = handed_over(modules, source, names, hand)
    model, _ = built(weights_only)
    found["weights only"] = chosen(ours(model), site)
    return found


if __name__ == "__main__":
    tell(facts)
