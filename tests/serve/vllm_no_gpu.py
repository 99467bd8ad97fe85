"""The plugin where every touch of a GPU is an error: `python vllm_no_gpu.py PREPARED_DIR`.

Prints one JSON object: what was touched while the plugin was imported and registered twice and the
config of the checkpoint built; and by a plugin that does ask.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import json
import pickle
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

GUARDED = {
    torch.cuda: (
        *("init", "_lazy_init", "_lazy_call", "is_available", "device_count", "current_device"),
        *("set_device", "get_device_properties", "get_device_name", "get_device_capability"),
        *("mem_get_info", "memory_allocated", "memory_reserved", "synchronize", "empty_cache"),
        *("current_stream", "default_stream", "is_bf16_supported", "get_arch_list"),
        *("can_device_access_peer", "device", "_device_count_nvml", "_device_count_amdsmi"),
    ),
    torch._C: (
        *("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"),
        *("_cuda_getCurrentRawStream", "_cuda_synchronize", "_accelerator_getDeviceIndex"),
    ),
    torch.accelerator: (
        *("is_available", "device_count", "current_device_index", "set_device_index"),
        *("synchronize", "current_stream", "empty_cache"),
    ),
}
"""What asks for a GPU or starts one. A torch without CUDA has not all of them."""

LIBRARIES = re.compile(r"cuda|nvidia|nvml|hip|hsa|amd_?smi|rocm", re.IGNORECASE)


class Touched(BaseException):
    """Not an Exception: `except Exception` does not hide it."""


touched: list[str] = []


def guard(name: str):
    """A function that must not be called."""

    def touch(*_arguments: object, **_named: object) -> None:
        touched.append(name)
        raise Touched(name)

    return touch


def set_guards() -> None:
    for module, names in GUARDED.items():
        for name in names:
            setattr(module, name, guard(f"{module.__name__}.{name}"))
    load = ctypes.CDLL.__init__

    def loading(self, name=None, *arguments, **named):
        if name and LIBRARIES.search(Path(str(name)).name):
            guard(f"CDLL {name}")()
        load(self, name, *arguments, **named)

    ctypes.CDLL.__init__ = loading


def set_off(function, *arguments) -> list[str]:
    """What a call touches."""
    touched.clear()
    with suppress(Touched):
        function(*arguments)
    return list(touched)


def import_engine() -> None:
    """Imports what the plugin imports of vLLM, without the plugin: what vLLM and its other packages
    ask for on the way (Triton's drivers, the management library) is theirs."""
    folder = Path(find_spec("mxfp4prep").submodule_search_locations[0]) / "integrations" / "vllm"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                importlib.import_module(node.module)
    assert not any(name.startswith("mxfp4prep.integrations") for name in sys.modules)


def register_and_configure(root: Path) -> None:
    plugin = importlib.import_module("mxfp4prep.integrations.vllm")
    plugin.register()
    plugin.register()
    from vllm.model_executor.layers import quantization

    declared = json.loads((root / "config.json").read_text())["quantization_config"]
    config = quantization.get_quantization_config("mxfp4prep").from_config(declared)
    config.maybe_update_config(str(root))
    again = pickle.loads(pickle.dumps(config))
    assert again.stored.records, "it was opened again"


def asking(line: str):
    """`register` of the plugin with one line more."""
    plugin = importlib.import_module("mxfp4prep.integrations.vllm")
    source = inspect.getsource(plugin.register)
    head, colon, rest = source.partition(" -> None:\n")
    assert colon
    names = dict(vars(plugin), torch=torch, ctypes=ctypes)
    exec(f"{head}{colon}    {line}\n{rest}", names)
    return names["register"]


ASKING = (
    "torch.cuda.is_available()",
    "torch.cuda.device_count()",
    "torch.cuda.get_device_properties(0)",
    "torch.accelerator.device_count()",
    "torch.zeros(1, device='cuda')",
    "ctypes.CDLL('libamdhip64.so')",
)


def main() -> None:
    root = Path(sys.argv[1])
    import_engine()
    set_guards()
    found = {"plugin": set_off(register_and_configure, root)}
    found["asking"] = {line: set_off(asking(line)) for line in ASKING}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
