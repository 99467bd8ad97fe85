"""Time to a ready model against reading the same bytes, and against preparing at load; as JSON.

    python bench/load.py [--device cpu] [--layers 6] [--runs 5] [--dir DIR] [--prepared PREPARED]
    python bench/load.py --device cuda [--layers 9]

Makes a checkpoint of Llama-3.1-70B layers (0.455 GB each) and converts it, which leaves the bytes
in the page cache; `--prepared` takes one that is there. Everything is measured in turn in one
process, so a slow or busy machine moves all of it; imports are not counted, opening and checking
the manifest and headers is.

On a virtual machine memory that was given back is often taken away by the host, and its next use
costs ten times as much: before every measurement as much memory as it needs is touched and freed.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import measure
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import mxfp4prep
from mxfp4prep.runtime import crew, loader, memory

LIMITS = {
    "ready_over_read_one_thread": 1.2,
    "prepare_at_load_over_ready": 3.0,
    "safetensors_over_ready_cuda": 1.0,
}
CHUNK = 8 << 20
HOST = torch.device("cpu")


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def stored_nbytes(root: Path) -> int:
    return sum(path.stat().st_size for path in shards(root))


def read(buffers: dict[Path, torch.Tensor], threads: int) -> None:
    """Every byte of every shard, in order, in pieces of 8 MiB, into host memory."""
    files = {path: os.open(path, os.O_RDONLY) for path in buffers}
    views = {path: memory.view(buffer) for path, buffer in buffers.items()}
    todo = ((path, at) for path in buffers for at in range(0, path.stat().st_size, CHUNK))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            path, at = piece
            stop = min(at + CHUNK, path.stat().st_size)
            while at < stop:
                at += os.preadv(files[path], [views[path][at:stop]], at)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for descriptor in files.values():
        os.close(descriptor)


def read_into_new_memory(root: Path, threads: int) -> dict[Path, torch.Tensor]:
    """As `read`, into memory on huge pages that is made for it, as a model's is."""
    buffers = {path: memory.empty((path.stat().st_size,), HOST) for path in shards(root)}
    read(buffers, threads)
    return buffers


def prepare_at_load(source: Path) -> dict[str, torch.Tensor]:
    """The original checkpoint, each tensor read with safetensors and permuted as engines do."""
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    opened = {file: safe_open(source / file, "pt") for file in sorted(set(index.values()))}
    made = {}
    for name in index:
        if not name.endswith(".weight"):
            continue
        scale_name = f"{name}_scale"
        weight = opened[index[name]].get_tensor(name)
        scale = opened[index[scale_name]].get_tensor(scale_name)
        n, packed = weight.shape
        columns = scale.shape[1]
        if n % 32 == 0 and columns % 8 == 0:
            tiles = weight.view(n // 16, 16, packed // 32, 2, 16).permute(0, 2, 3, 1, 4)
            made[name] = tiles.contiguous()
            blocks = scale.view(n // 32, 2, 16, columns // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
            made[scale_name] = blocks.contiguous()
        else:
            made[name] = weight.clone()
            made[scale_name] = scale.t().contiguous()
    return made


def one_by_one(root: Path) -> mxfp4prep.Prepared:
    """Every layer when it is asked for, one after the other."""
    prepared = mxfp4prep.load(root)
    for name in prepared:
        prepared[name]
    return prepared


def warm_memory(nbytes: int) -> None:
    """Touches as much new memory, and gives it back."""
    piece = 1 << 30
    made = [memory.empty((piece,), HOST) for _ in range(-(-nbytes // piece))]
    for part in made:
        part[::4096] = 1


def in_turn(
    contestants: dict[str, Callable[[], object]], runs: int, before: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of every contestant in every round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(runs + 1):
        for name, run in contestants.items():
            gc.collect()
            before()
            started = time.perf_counter()
            result = run()
            took = time.perf_counter() - started
            del result
            if number:
                seconds[name].append(took)
    return seconds


def compared(
    seconds: dict[str, list[float]], nbytes: int, ratios: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    """Seconds and GB/s of each, and ratios: round by round, and of the fastest of each."""
    result: dict[str, Any] = {"nbytes": nbytes}
    for name, values in seconds.items():
        gbs = round(nbytes / min(values) / 1e9, 2)
        result[name] = {**measure.spread(values), "best_gb_per_s": gbs}
    for name, (above, below) in ratios.items():
        rounds = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
        best = round(min(seconds[above]) / min(seconds[below]), 3)
        result[name] = {**measure.spread(rounds), "of_the_fastest": best}
    return result


def bench_cpu(prepared: Path, source: Path | None, runs: int) -> dict[str, Any]:
    nbytes = stored_nbytes(prepared)
    threads = crew.thread_count(nbytes)
    room = torch.zeros(max(path.stat().st_size for path in shards(prepared)), dtype=torch.uint8)
    buffers = dict.fromkeys(shards(prepared), room)  # one after the other into the same memory
    contestants: dict[str, Callable[[], object]] = {
        "read_one_thread": lambda: read(buffers, 1),
        "read_same_threads": lambda: read(buffers, threads),
        "read_same_threads_new_memory": lambda: read_into_new_memory(prepared, threads),
        "ready": lambda: mxfp4prep.load(prepared, lazy=False),
        "ready_checked": lambda: mxfp4prep.load(prepared, lazy=False, verify=True),
        "ready_one_by_one": lambda: one_by_one(prepared),
    }
    ratios = {
        f"ready_over_{name}": ("ready", name) for name in contestants if name.startswith("read_")
    }
    if source is not None:
        contestants["prepare_at_load"] = lambda: prepare_at_load(source)
        ratios["prepare_at_load_over_ready"] = ("prepare_at_load", "ready")
    seconds = in_turn(contestants, runs, lambda: warm_memory(nbytes))
    return {"threads": threads, **compared(seconds, nbytes, ratios)}


def bench_cuda(prepared: Path, device: torch.device, runs: int) -> dict[str, Any]:
    """Everything on the GPU, its memory given back before each: safetensors, and ours."""
    torch.zeros(1, device=device)
    options: list[dict[str, str]] = [{}]
    if "backend" in inspect.signature(load_file).parameters:  # safetensors 0.8
        options.append({"backend": "pread"})

    def by_safetensors(**how: str) -> list[dict[str, torch.Tensor]]:
        found = [load_file(path, device=str(device), **how) for path in shards(prepared)]
        torch.cuda.synchronize(device)
        return found

    def ours(**how: Any) -> mxfp4prep.Prepared:
        found = mxfp4prep.load(prepared, device=device, lazy=False, backend="torch", **how)
        torch.cuda.synchronize(device)
        return found

    contestants: dict[str, Callable[[], object]] = {
        "_".join(["safetensors", *how.values()]): lambda how=how: by_safetensors(**how)
        for how in options
    }
    contestants |= {"ready": ours, "ready_checked": lambda: ours(verify=True)}
    ratios = {
        f"{name}_over_ready": (name, "ready") for name in contestants if name.startswith("safe")
    }
    same = same_bytes(ours(), by_safetensors())
    seconds = in_turn(contestants, runs, torch.cuda.empty_cache)
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "threads": crew.thread_count(stored_nbytes(prepared)),
        "same_bytes": same,
        **compared(seconds, stored_nbytes(prepared), ratios),
    }


def same_bytes(found: mxfp4prep.Prepared, expected: list[dict[str, torch.Tensor]]) -> bool:
    """Whether every layer has, on the device, exactly what safetensors reads."""
    tensors = {name: tensor for part in expected for name, tensor in part.items()}
    pairs = [
        (stored, tensors[record.tensor])
        for name in found
        for layer in (found.manifest.layer(name),)
        for stored, record in (
            (found[name].weight, layer.weight),
            (found[name].scale, layer.scale),
        )
    ]
    return all(torch.equal(a, b.view(torch.uint8).view(a.shape)) for a, b in pairs)


def checkpoint(given: argparse.Namespace, work: Path) -> Iterator[Path]:
    """The prepared checkpoint and, where it is made here, its source."""
    if given.prepared is not None:
        yield given.prepared
        return
    source, prepared = work / "source", work / "prepared"
    layers = checkpoints.dense_layers(given.layers)
    checkpoints.write(source, layers, shard_nbytes=1 << 30, fill=True)
    command = [*measure.mxfp4prep(), "convert", source, prepared, "-q", "--no-progress"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    yield prepared
    yield source


def main() -> None:
    """Measures on the device and prints one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=HOST, help="cpu, cuda or cuda:N")
    parser.add_argument("--dir", type=Path, default=None, help="where to make the checkpoints")
    parser.add_argument("--prepared", type=Path, default=None, help="one that is there already")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    assert loader is not None  # imported, so that its import is not counted
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="mxfp4prep-bench-") as folder:
        started = time.perf_counter()
        prepared, *rest = checkpoint(given, Path(folder))
        print(f"made in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        result: dict[str, Any] = {"limits": LIMITS, "cores": len(os.sched_getaffinity(0))}
        if given.device.type == "cpu":
            result["cpu"] = bench_cpu(prepared, rest[0] if rest else None, given.runs)
        else:
            result["cuda"] = bench_cuda(prepared, given.device, given.runs)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
