"""Shows what the real system's limits lead to: the work done, or one clear error and nothing left.

    python tests/attacks/limits.py [--json]

A full tmpfs, file size, open files, address space, threads, folders that may not be read, written
or entered. Each command runs in a process of its own; what root alone can set up is skipped, with
the reason, for others. As root the commands run as an ordinary user, whom permissions stop.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from attacks.faulty_disk import FaultyDisk, fast_folder, tree
from attacks.forking import Command, Ended, warm_up
from quark_factory import write_checkpoint

from mxfp4prep import io

NOBODY = 65534
MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """One limit: what came of it, or why it could not be tried."""

    name: str
    code: int | None = None
    told: str = ""
    skipped: str = ""


class Limits:
    """A checkpoint, and a folder to write to."""

    def __init__(self, base: Path) -> None:
        base.chmod(0o755)
        self.base = base
        linears = {f"model.layers.{i}.mlp.down_proj": (512, 6144) for i in range(2)}
        self.source = write_checkpoint(base / "m", linears, shards=2)
        for path in self.source.iterdir():  # safetensors makes files that their owner alone reads
            path.chmod(0o644)
        self.before = tree(self.source)
        warm_up(self.source, base)
        for name in ("warm", "warm-again"):
            shutil.rmtree(base / name)
        self.place = base / "place"
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        self._give(self.place)

    def _give(self, folder: Path) -> None:
        """To the user that the commands run as."""
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)

    def _convert(self, prepare: Callable[[], object], out: Path | None = None) -> Ended:
        def before() -> None:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            prepare()

        out = self.place / "out" if out is None else out
        words = ["convert", self.source, out, "--workers", "2", "-q"]
        return Command(*words, prepare=before).wait()

    def all(self) -> Iterator[Outcome]:
        """Every limit in turn; raises AssertionError where something is left or was hurt."""
        yield self._end("a file may have 1000 bytes", _limited(resource.RLIMIT_FSIZE, 1000))
        yield self._end("64 open files", _limited(resource.RLIMIT_NOFILE, 64))
        yield self._end("no more open files", _no_more_files)
        yield self._end("96 MiB of memory", _memory(96 * MIB))
        yield self._end("1 MiB of memory", _no_more_memory)
        yield self._end("no more threads", _no_more_threads)
        yield from self._permissions()
        yield from self._full_disk()

    def _end(self, name: str, prepare: Callable[[], object], out: Path | None = None) -> Outcome:
        ended = self._convert(prepare, out)
        assert tree(self.source) == self.before, f"{name}: the source was touched"
        there = sorted(path.name for path in self.place.iterdir())
        assert there == (["out"] if ended.code == 0 else []), f"{name}: {there}"
        self._clear()
        return Outcome(name, ended.code, ended.told)

    def _permissions(self) -> Iterator[Outcome]:
        def with_mode(name: str, path: Path, mode: int, out: Path | None = None) -> Outcome:
            before = path.stat().st_mode & 0o777
            path.chmod(mode)
            try:
                ended = self._convert(lambda: None, out)
            finally:
                path.chmod(before)
            assert tree(self.source) == self.before
            assert (self.place / "out").exists() == (ended.code == 0)
            assert len(list(self.place.iterdir())) == (ended.code == 0)
            self._clear()
            return Outcome(name, ended.code, ended.told)

        shard = next(self.source.glob("*.safetensors"))
        yield with_mode("a source that may only be read", self.source, 0o555)
        yield with_mode("a folder that may not be written to", self.place, 0o555)
        yield with_mode("a folder that may not be entered", self.place, 0o644)
        yield with_mode("a source that may not be entered", self.source, 0o644)
        yield with_mode("a source that may not be listed", self.source, 0o311)
        yield with_mode("a shard that may not be read", shard, 0o000)

    def _full_disk(self) -> Iterator[Outcome]:
        names = ("a disk of 64 MiB", "a disk that fills up meanwhile")
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", self.place],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            for name in names:
                yield Outcome(name, skipped=f"no tmpfs: {mounted.stderr.strip()}")
            return
        try:
            self._give(self.place)
            ended = self._convert(lambda: None)
            assert list(self.place.iterdir()) == []
            yield Outcome(names[0], ended.code, ended.told)
            ended = self._convert(self._fill_meanwhile)
            there = [path.name for path in self.place.iterdir()]
            assert there == ["filler"], f"{there}: {ended}"
            yield Outcome(names[1], ended.code, ended.told)
        finally:
            subprocess.run(["umount", self.place], check=True)

    def _fill_meanwhile(self) -> None:
        """At the second new file all room is gone; until then there seemed to be enough."""
        created = 0

        def note(operation: str) -> None:
            nonlocal created
            created += operation == "create"
            if operation == "create" and created == 2:
                with (self.place / "filler").open("wb") as filler, suppress(OSError):
                    while True:
                        filler.write(bytes(MIB))

        io.os = FaultyDisk(note=note)  # type: ignore[attr-defined]
        io.free_nbytes = lambda folder: 1 << 40  # type: ignore[assignment]


def _limited(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, most))


def _no_more_files() -> None:
    """Three are left: two workers need four, removing a folder two."""
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, free + 3))


def _memory(margin: int) -> Callable[[], None]:
    """So many bytes of address space more than are in use."""

    def prepare() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + margin
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    return prepare


def _no_more_memory() -> None:
    """Next to nothing is left, in the allocator's own reserves too."""
    _memory(MIB)()
    with suppress(MemoryError):
        while True:
            _held.append(bytearray(MIB // 4))
    del _held[-4:]


def _no_more_threads() -> None:
    """All threads of this user count."""
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


_held: list[bytearray] = []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-limits-", dir=fast_folder()) as folder:
        outcomes = list(Limits(Path(folder)).all())
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
        return 0
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.skipped or f'exit code {outcome.code}'}")
        for line in outcome.told.splitlines():
            print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
