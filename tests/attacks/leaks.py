"""Shows that a process can convert again and again: no file, thread or memory is left behind.

    python tests/attacks/leaks.py [--runs 1000]

Each run converts, verifies against the source and restores with two workers, and then fails in one of
several ways: an unsafe output, a full disk, a disk that cannot be read, no memory, an interruption.
After each it counts open files and threads, and measures memory.
"""
# ruff: noqa: E501 - prose

from __future__ import annotations

import argparse
import errno
import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]

LINEARS = {"model.layers.0.mlp.o_proj": (64, 256), "model.layers.0.mlp.down_proj": (256, 160)}


class Held(NamedTuple):
    """What the process holds."""

    files: tuple[str, ...]
    threads: int
    nbytes: int


def held() -> Held:
    """Open files by what they are, threads as the kernel counts them, resident bytes."""
    files = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, not paths
        try:
            files.append(os.readlink(f"/proc/self/fd/{entry}"))  # noqa: PTH115
        except FileNotFoundError:  # the listing's own
            continue
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    return Held(tuple(sorted(files)), threads, pages * os.sysconf("SC_PAGESIZE"))


@contextmanager
def failing(name: str, after: int, error: Callable[[], BaseException]) -> Iterator[None]:
    """The operation `name` of the file seam fails once, after as many calls."""
    from mxfp4prep import io

    real, lock, calls = getattr(io, name), threading.Lock(), 0

    def operation(*args: object) -> object:
        nonlocal calls
        with lock:
            calls += 1
            now = calls == after + 1
        if now:
            raise error()
        return real(*args)

    setattr(io, name, operation)
    try:
        yield
    finally:
        setattr(io, name, real)


def run(source: Path, work: Path, number: int) -> bool:
    """Converts, verifies and restores once, then fails in the `number`-th way; whether it did."""
    from mxfp4prep.checkpoint import open_checkpoint
    from mxfp4prep.convert import convert
    from mxfp4prep.errors import IOFailed, Mxfp4PrepError
    from mxfp4prep.plan import make_plan, surveyed_degrees
    from mxfp4prep.restore import restore
    from mxfp4prep.survey import survey
    from mxfp4prep.verify import verify

    def convert_to(out: Path) -> None:
        found = survey(open_checkpoint(source), surveyed_degrees((1,)))
        convert(make_plan(found, (1,)), out, workers=2)

    out, back = work / "out", work / "back"
    convert_to(out)
    assert verify(out, "deep", source, workers=2).problems == ()
    restore(out, back, workers=2)
    shutil.rmtree(back)

    def full() -> BaseException:
        return IOFailed("disk", "full")

    def cut() -> BaseException:
        return OSError(errno.EIO, "cut")

    failures: list[tuple[Callable[[], object], str, int, Callable[[], BaseException]]] = [
        (lambda: convert_to(out), "fsync", 1 << 30, full),  # it exists
        (lambda: convert_to(source / "inside"), "fsync", 1 << 30, full),
        (lambda: convert_to(work / "new"), "write_all", 3, full),
        (lambda: convert_to(work / "new"), "fsync", 1, full),
        (lambda: convert_to(work / "new"), "pread_into", 6, cut),
        (lambda: convert_to(work / "new"), "rename", 2, KeyboardInterrupt),
        (lambda: restore(out, back, workers=2), "write_all", 2, MemoryError),
        (lambda: verify(out, "full", workers=2), "pread_into", 9, KeyboardInterrupt),
    ]
    attempt, name, after, error = failures[number % len(failures)]
    failed = False
    try:
        with failing(name, after, error):
            attempt()
    except (Mxfp4PrepError, OSError, MemoryError, KeyboardInterrupt):
        failed = True
    shutil.rmtree(out)
    left = sorted(str(path.relative_to(work)) for path in work.rglob("*"))
    assert left == [], left
    return failed


def slope(values: list[int]) -> float:
    """Least squares: what each step adds."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    above = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return above / sum((i - middle) ** 2 for i in range(len(values)))


class Outcome(NamedTuple):
    """Held before and after, how many runs failed where they should, bytes that a run adds."""

    before: Held
    after: Held
    failed: int
    growth: float


def repeat(work: Path, runs: int, warm: int = 10) -> Outcome:
    """Runs `warm` times, and `runs` times more between the two looks."""
    from quark_factory import write_checkpoint

    source = write_checkpoint(work / "m", LINEARS, shards=2)
    place = work / "place"
    place.mkdir()
    for number in range(warm):
        run(source, place, number)
    gc.collect()
    before = held()
    sizes, failed = [before.nbytes], 0
    for number in range(runs):
        failed += run(source, place, number)
        sizes.append(held().nbytes)
    gc.collect()
    return Outcome(before, held(), failed, slope(sizes))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    given = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-leaks-") as folder:
        before, after, failed, growth = repeat(Path(folder), given.runs)
    print(f"{given.runs} runs, {failed} failures")
    print(f"open files {len(before.files)} -> {len(after.files)}")
    print(f"threads {before.threads} -> {after.threads}")
    print(f"memory {before.nbytes} -> {after.nbytes} bytes, {growth:,.0f} a run")
    leaked = after[:2] != before[:2] or growth >= 1 << 20 or failed != given.runs
    print("LEAKED" if leaked else "nothing left behind")
    return 1 if leaked else 0


if __name__ == "__main__":
    sys.exit(main())
