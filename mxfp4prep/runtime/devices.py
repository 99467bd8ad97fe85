"""The device that a name means, what torch knows about it, and how to wait for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from mxfp4prep.errors import BackendUnavailable, UsageError

MIB = 1 << 20

CACHE_ON_CPU = 64 * MIB
"""Assumed last-level cache: what one thread of a server CPU shares (AMD 32 MiB, Intel up to 60)."""

INFINITY_CACHE = 256 * MIB
"""Behind the L2 of CDNA 3 and 4, which torch does not tell of (AMD CDNA 3 white paper)."""

MEMINFO = Path("/proc/meminfo")

LOADABLE = ("cpu", "cuda")
"""Device types that `load` puts layers on; on others they are moved afterwards."""


TO_RUN = "'cpu', 'cuda', 'cuda:N' or another device that torch has"
TO_LOAD = "'cpu', 'cuda', 'cuda:N', 'meta', a GPU's number or a torch.device"


def named_device(device: object, where: str, expected: str) -> torch.device:
    """The device of that name, whether or not it is here; a number is that of a GPU.

    where, expected   what the caller calls it and what he may be told, for the error

    Raises UsageError for what names none.
    """
    name = f"cuda:{device}" if type(device) is int else device
    try:
        target = torch.device(name) if isinstance(name, str | torch.device) else None
    except RuntimeError:
        target = None
    # torch keeps eight bits of a number: to it cuda:300 is cuda:44
    if target is None or not (target.index is None or str(name).endswith(f":{target.index}")):
        hint = "for example cpu or cuda:0"
        raise UsageError(where, "unknown", found=repr(device), expected=expected, hint=hint)
    # tensors on cpu:3 are made, and are equal to nothing on cpu
    if target.index not in _NUMBERS.get(target.type, (target.index,)):
        what, hint = "there is only one", f"leave the number out: {target.type}"
        raise UsageError(where, what, found=str(target), expected=target.type, hint=hint)
    return target


_NUMBERS = {"cpu": (None, 0), "meta": (None,)}
"""What may stand behind the colon where there is but one device of a type."""


def loading_device(device: object) -> torch.device:
    """The device that `load` is told, where it can put layers.

    Raises UsageError for an unknown one and for one of another type, BackendUnavailable for a GPU
    that is not here.
    """
    target = named_device(device, "device", TO_LOAD)
    if target.type not in (*LOADABLE, "meta"):
        raise UsageError(
            "device",
            "not supported",
            found=target.type,
            expected=TO_LOAD,
            hint="load on 'cpu', then move the modules with .to(device)",
        )
    obstacle = _obstacle(target) if target.type == "cuda" else None
    if obstacle is not None:
        raise BackendUnavailable(f"device {target}", obstacle, hint="load with device='cpu'")
    return target


def usable_device(name: str | torch.device, where: str = "device") -> torch.device:
    """The device of that name, which torch can put a tensor on.

    where   what the caller calls it, for the error

    Raises UsageError for a name that torch does not know and for meta, which holds no values,
    BackendUnavailable for a device that is not here.
    """
    device = named_device(name, where, TO_RUN)
    if device.type == "meta":
        raise UsageError(where, "meta tensors hold no values", hint="for example cpu or cuda:0")
    obstacle = _obstacle(device)
    if obstacle is not None:
        hint = f"{where} cpu runs the reference" if where.startswith("--") else "load on 'cpu'"
        raise BackendUnavailable(f"{where} {device}", obstacle, hint=hint)
    return device


def _obstacle(device: torch.device) -> str | None:
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "torch sees no GPU here"
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            return f"there is no such GPU: torch sees {count}, numbered from 0"
        return None
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # each device type has its own
        return " ".join(str(error).partition("\n")[0].partition(". ")[0].split()).rstrip(".")
    return None


def load_device(device: torch.device) -> torch.device:
    """Where `load` can put layers that are to run on `device`: there, or on the CPU before."""
    return device if device.type in LOADABLE else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The maker's name of the device: `NVIDIA H200`, `AMD EPYC 9575F, 8 threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'' if threads == 1 else 's'}"


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "CPU"
    names = (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line)
    return next(names, "") or "CPU"


def cache_nbytes(device: torch.device) -> int:
    """Bytes of the last cache before memory, as far as they are known."""
    if device.type != "cuda":
        return CACHE_ON_CPU
    level2 = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(level2, INFINITY_CACHE) if torch.version.hip else level2


def free_nbytes(device: torch.device, meminfo: Path = MEMINFO) -> int | None:
    """Bytes that new tensors could take on the device; None where nothing says so."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    if device.type != "cpu":
        return None
    try:
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib[0]) * 1024 if kib and kib[0].isdigit() else None


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's GPU is the current device: Triton launches there, whatever
    its arguments are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
