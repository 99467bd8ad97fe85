"""What a test plugs into vLLM beside the package's plugin, as vLLM's own plugins are plugged in."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import Counter
from pathlib import Path

NAMES = ("count_reads", "fast_on_cpu")


def install(site: Path) -> None:
    """Makes the plugins known to a Python that has folder `site` on its path."""
    info = site / "vllm_transports-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-transports\nVersion: 0\n")
    lines = [f"{name} = vllm_transports:{name}" for name in NAMES]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))


def count_reads() -> None:
    """Counts the bytes that go through the package's one way to read files, by file; written to
    read{RANK}.json when the process ends."""
    from mxfp4prep import io

    read: Counter[str] = Counter()
    lock = threading.Lock()
    pread_into = io.pread_into
    if hasattr(pread_into, "is_counting"):
        return

    def counting(fd: int, view: memoryview, offset: int, where: object) -> None:
        pread_into(fd, view, offset, where)
        with lock:
            read[str(Path(f"/proc/self/fd/{fd}").readlink())] += memoryview(view).nbytes

    counting.is_counting = True
    io.pread_into = counting
    path = Path.cwd() / f"read{os.environ['RANK']}.json"
    atexit.register(lambda: path.write_text(json.dumps(read)))


def fast_on_cpu() -> None:
    """fastsafetensors, which can put tensors on a CPU, told to by vLLM. vLLM 0.32 makes a device
    "cuda:" of whatever it runs on: `Invalid device string: 'cuda:cpu'`."""
    from fastsafetensors import parallel_loader
    from vllm.platforms import current_platform

    class OnCpu(parallel_loader.ParallelLoader):
        def __init__(self, *arguments: object, **named: object) -> None:
            named |= {"device": "cpu", "nogds": True}
            super().__init__(*arguments, **named)

    current_platform.current_device = lambda: 0
    parallel_loader.ParallelLoader = OnCpu
