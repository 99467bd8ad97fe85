"""Shows that memory is bounded by a tensor, not by the checkpoint, whatever the number of workers.

    python tests/attacks/memory.py [--gb 40] [--largest-gb 2] [--shards 10] [--dir DIR]

The source is sparse: it takes no room on the disk. Neither does the output: where a piece that is to be
written is all zeros, a hole is left instead (beneath `mxfp4prep.io`, the one place that writes); all else
runs as always: reading, permuting, hashing. Each step runs in a process of its own, which has imported
torch; the figure is its peak resident memory, VmHWM of /proc/PID/status, with all of that in it.
"""
# ruff: noqa: E501 - prose and the lines of a table

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
MIB = 1 << 20
SPARE_NBYTES = 128 * MIB
"""What may be taken beside tensors: the interpreter, torch, buffers."""

K = 16384
K_TRITON = 16384 - 96
"""No multiple of 256: the layer is stored for the Triton path, with its scale transposed."""

SMALL_NBYTES = 32 * MIB


def write_source(root: Path, nbytes: int, largest: int, shards: int) -> Path:
    """A checkpoint of about `nbytes` with a weight of `largest` in each shard, in turn for both paths."""
    from sparse import linear, write_sparse

    made = []
    number = 0
    for shard in range(shards):
        k = K if shard % 2 == 0 else K_TRITON
        sizes = [largest] + [SMALL_NBYTES] * max(
            0, (nbytes // shards - largest * 17 // 16) // (SMALL_NBYTES * 17 // 16)
        )
        shapes: dict[str, tuple[int, ...]] = {}
        for size in sizes:
            rows = size // (k // 2) // 32 * 32
            shapes |= linear(f"model.layers.{number}.mlp.down_proj", rows, k)
            number += 1
        made.append(shapes)
    return write_sparse(root, made, {"model.norm.weight": (8,)})


def leave_holes() -> None:
    """From here on `io.write_all` leaves a hole where all bytes of a piece are zero."""
    from mxfp4prep import io

    zeros = bytes(4 * MIB)
    real_write, real_sync = io.write_all, io.fsync

    def write_all(fd: int, view: Any, where: object) -> None:
        if len(view) > 4096 and bytes(view) == zeros[: len(view)]:
            os.lseek(fd, len(view), os.SEEK_CUR)
        else:
            real_write(fd, view, where)

    def fsync(fd: int, where: object) -> None:
        os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))
        real_sync(fd, where)

    io.write_all, io.fsync = write_all, fsync


def peak() -> int:
    """The largest resident size that this process has had, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


CORES = 2
"""What steps may use. `load` reads 8 MiB ahead with each of up to 8 threads, one a core: little
beside a large tensor, but not beside that of a short run."""


def steps_of(source: Path, work: Path, workers: int) -> dict[str, Callable[[], None]]:
    """The steps, in the order in which each finds what it needs."""
    from mxfp4prep import cli, load

    prepared = work / "prepared"

    def command(*words: object) -> Callable[[], None]:
        def run() -> None:
            assert cli.main([*map(str, words), "--no-progress"]) == 0

        return run

    def load_layer() -> None:
        layer = load(prepared)["model.layers.0.mlp.down_proj"]
        assert layer.n * layer.k > 0

    count = ("--workers", workers)
    return {
        "audit": command("audit", source, "--values", "--fail-on", "never"),
        "convert": command("convert", source, prepared, *count, "-q"),
        "verify": command("verify", prepared, *count, "-q"),
        "verify --source": command("verify", prepared, "--source", source, *count, "-q"),
        "restore": command("restore", prepared, work / "restored", *count, "-q"),
        "load": load_layer,
    }


def inside(source: Path, work: Path, workers: int, wanted: list[str]) -> dict[str, Any]:
    """{step: {"peak": bytes, "seconds": wall}} and "base", the peak of a process that does nothing."""
    import torch

    import mxfp4prep.convert
    import mxfp4prep.restore
    import mxfp4prep.runtime.loader
    import mxfp4prep.verify  # noqa: F401 - what every step needs is there before the first

    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    steps = steps_of(source, work, workers)
    figures: dict[str, Any] = {"base": _forked(lambda: None)}
    for name in wanted:
        figures[name] = _forked(steps[name])
        if name == "restore":
            shutil.rmtree(work / "restored")
    shutil.rmtree(work / "prepared", ignore_errors=True)
    return figures


def _forked(step: Callable[[], None]) -> dict[str, float]:
    """Runs `step` in a child, whose peak begins anew."""
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            leave_holes()
            step()
            os.write(writer, str(peak()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    return {"peak": int(text), "seconds": round(time.monotonic() - began, 1)}


def outside(source: Path, work: Path, workers: int, wanted: list[str]) -> dict[str, Any]:
    """What `inside` says in a fresh process."""
    folder = work / f"workers-{workers}"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, __file__, "--inside", str(source), str(folder), str(workers), *wanted],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def limit(largest: int, workers: int) -> int:
    """Bytes that a step may take at its peak."""
    return (1 + workers) * largest + SPARE_NBYTES


ALL = ["audit", "convert", "verify", "verify --source", "restore", "load"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=40)
    parser.add_argument("--largest-gb", type=float, default=2)
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", nargs="+", default=ALL, choices=ALL)
    parser.add_argument("--dir", type=Path, help="where the sparse files are made")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    if sys.argv[1:2] == ["--inside"]:  # steps have names that look like options
        source, work, workers, *wanted = sys.argv[2:]
        sys.path.insert(0, str(TESTS))
        print(json.dumps(inside(Path(source), Path(work), int(workers), wanted)))
        return 0
    given = parser.parse_args()
    if "convert" not in given.steps and set(given.steps) - {"audit"}:
        parser.error("--steps: all but audit need what `convert` makes: name it too")
    sys.path.insert(0, str(TESTS))
    largest = int(given.largest_gb * 1e9)
    failed = False
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-memory-", dir=given.dir) as folder:
        source = write_source(Path(folder) / "m", int(given.gb * 1e9), largest, given.shards)
        nbytes = sum(path.stat().st_size for path in source.iterdir())
        print(f"{nbytes / 1e9:.1f} GB in {given.shards} shards, largest tensor {largest / 1e9} GB")
        for workers in given.workers:
            most = limit(largest, workers)
            for step, figure in outside(source, Path(folder), workers, given.steps).items():
                bad = figure["peak"] > most
                failed |= bad
                print(
                    f"workers {workers}  {step:16} peak {figure['peak'] / MIB:7.0f} MiB of "
                    f"{most / MIB:.0f}  {figure['seconds']:6.1f} s{'  TOO MUCH' if bad else ''}"
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
