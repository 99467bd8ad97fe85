"""The device that a name means, what torch knows about it, and how to wait for it."""

from __future__ import annotations

from pathlib import Path

import torch

from mxfp4prep.errors import BackendUnavailable, UsageError

MIB = 1 << 20

CACHE_ON_CPU = 64 * MIB
"""Assumed last-level cache: what one thread of a server CPU shares (AMD 32 MiB, Intel up to 60)."""

INFINITY_CACHE = 256 * MIB
"""Behind the L2 of CDNA 3 and 4, which torch does not tell of (AMD CDNA 3 white paper)."""

MEMINFO = Path("/proc/meminfo")

LOADABLE = ("cpu", "cuda")
"""Device types that `load` puts layers on; on others they are moved afterwards."""


def usable_device(name: str | torch.device, where: str = "device") -> torch.device:
    """The device of that name, which torch can put a tensor on.

    where   what the caller calls it, for the error

    Raises UsageError for a name that torch does not know and for meta, which holds no values,
    BackendUnavailable for a device that is not here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise UsageError(where, text, hint="for example cpu or cuda:0") from None
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
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


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
