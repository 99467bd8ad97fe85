"""Shows that no failure of one file operation can cost a byte: each is made to fail in turn.

    python tests/attacks/faults.py [--scenario NAME] [--operation NAME] [-v]

Scenarios: convert with 1 and 2 workers, --overwrite, the same where no two names can change places
at once, --resume, a rerun after a kill, restore. In each, for each operation beneath the file seam
(open, create, read, write, fsync, chmod, rename, exchange, mkdir, unlink, rmdir, scan, stat, close)
and each k until a run no longer gets that far, the k-th call fails, once and for ever, with EIO,
ENOSPC, EDQUOT, EACCES, EINTR, MemoryError or KeyboardInterrupt, or moves fewer bytes than asked
for. And the process dies at each operation.

After each, the output is absent or whole (the old one or the new one), the source is as it was,
nothing is left that could be removed, no file is open, the error has its place and its way out, and
the same command, or --resume, then gives the same bytes.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from attacks.faulty_disk import (
    ANY,
    ERRNOS,
    EXCEPTIONS,
    OPERATIONS,
    Fault,
    FaultyDisk,
    Killed,
    fast_folder,
    no_exchange,
    on_disk,
    open_descriptors,
    tree,
)
from quark_factory import write_checkpoint

from mxfp4prep import io, leftovers
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.errors import IOFailed
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.restore import restore
from mxfp4prep.survey import survey

DEAD = "999999999-5"
"""A process that is not there, in a staging folder's name."""

LINEARS = {"model.layers.0.mlp.down_proj": (32, 256)}
MOVING = ("pread", "write")


@dataclass
class World:
    """One tiny checkpoint, what becomes of it, and a place where things go wrong.

    place   holds `m`, the source, and what a run makes of it, `out`
    """

    base: Path
    place: Path = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.base / "place"
        self.place.mkdir(parents=True)
        self.source = write_checkpoint(
            self.place / "m", LINEARS, shards=2, side_files={"sub/t.json": b"{}"}
        )
        self.out = self.place / "out"
        self.plan = make_plan(survey(open_checkpoint(self.source), surveyed_degrees((1,))), (1,))
        self.original = tree(self.source)
        self.new = convert(self.plan, self.base / "new").out
        old = make_plan(self.plan.survey, (1,), "triton")
        self.old = convert(old, self.base / "old").out
        self.fresh = tree(self.new)
        self.stale = tree(self.old)
        assert self.fresh != self.stale

    def empty(self) -> None:
        """Removes all but the source."""
        for path in self.place.iterdir():
            if path != self.source:
                shutil.rmtree(path)

    def left(self) -> list[Path]:
        """What stands there beside source and output."""
        return sorted(p for p in self.place.iterdir() if p not in (self.source, self.out))

    def finished(self, result: dict[str, bytes]) -> set[str]:
        """The shards of `result` that stand in what runs have left: names."""
        stages = [folder for folder in self.left() if "-old-" not in folder.name]
        shards = [path for folder in stages for path in folder.glob("*.safetensors")]
        return {path.name for path in shards if path.read_bytes() == result.get(path.name)}

    def bury(self) -> None:
        """Makes this process's folders those of a dead one, as if it had ended."""
        for number, path in enumerate(self.left()):
            found = leftovers._owner(self.out, path)
            assert found is not None, f"not ours: {path}"
            kind = found[0] if found[0] == "old-" else f"left{number}-"
            path.rename(path.with_name(f".out.mxfp4prep-{kind}{found[1]}-99999999{number}-5"))

    def dead_stage(self) -> Path:
        """A killed run's folder: one shard finished, one not, and a file of its own."""
        stage = self.place / f".out.mxfp4prep-{leftovers._host()}-{DEAD}"
        stage.mkdir()
        first, second = sorted(p for p in self.new.iterdir() if p.suffix == ".safetensors")
        shutil.copy(first, stage)
        (stage / f"{second.name}.mxfp4prep.part").write_bytes(second.read_bytes()[:100])
        (stage / "source").mkdir()
        shutil.copy(self.new / "source" / "config.json", stage / "source")
        return stage


@dataclass(frozen=True)
class Scenario:
    """begin   makes what is there before the run
    run     the run that fails
    old     what may also stand at the output's name then
    again   the run after it
    resume  the run after one that was killed
    result  what that one makes
    """

    name: str
    begin: Callable[[World], object]
    run: Callable[[World], object]
    again: Callable[[World], object]
    result: Callable[[World], dict[str, bytes]]
    resume: Callable[[World], Any]
    old: Callable[[World], dict[str, bytes] | None] = lambda world: None


def _convert(workers: int = 1, **options: bool) -> Callable[[World], Any]:
    return lambda w: convert(w.plan, w.out, workers=workers, **options)  # type: ignore[arg-type]


def _restore(world: World) -> object:
    return restore(world.new, world.out, workers=1)


def _without_exchange(run: Callable[[World], Any]) -> Callable[[World], Any]:
    """The same on a disk that cannot let two names change places, as those of networks cannot."""

    def there(world: World) -> Any:
        able = io.exchange_names  # type: ignore[attr-defined]
        io.exchange_names = no_exchange  # type: ignore[attr-defined]
        try:
            return run(world)
        finally:
            io.exchange_names = able  # type: ignore[attr-defined]

    return there


def _nothing(world: World) -> None:
    """There is nothing before."""


def _new(world: World) -> dict[str, bytes]:
    return world.fresh


_RESUME = _convert(resume=True)
_REPLACE = _convert(overwrite=True)
SCENARIOS = {
    s.name: s
    for s in (
        Scenario("convert", _nothing, _convert(), _convert(), _new, _RESUME),
        Scenario("workers", _nothing, _convert(2), _convert(), _new, _RESUME),
        Scenario(
            "overwrite",
            lambda world: shutil.copytree(world.old, world.out),
            _REPLACE,
            _REPLACE,
            _new,
            _convert(overwrite=True, resume=True),
            lambda world: world.stale,
        ),
        Scenario(
            "renames",
            lambda world: shutil.copytree(world.old, world.out),
            _without_exchange(_REPLACE),
            _without_exchange(_REPLACE),
            _new,
            _without_exchange(_convert(overwrite=True, resume=True)),
            lambda world: world.stale,
        ),
        Scenario("resume", World.dead_stage, _RESUME, _RESUME, _new, _RESUME),
        Scenario("sweep", World.dead_stage, _convert(), _convert(), _new, _RESUME),
        Scenario("restore", _nothing, _restore, _restore, lambda w: w.original, _restore),
    )
}


def strike(world: World, scenario: Scenario, fault: Fault, *, rerun: bool = True) -> bool:
    """Whether the fault happened; raises AssertionError when the run did not take it well.

    rerun   False leaves the run after it out where everything is as it was before
    """
    world.empty()
    scenario.begin(world)
    begun = world.left()
    files, threads = open_descriptors(), threading.active_count()
    error: BaseException | None = None
    done = None
    with on_disk(FaultyDisk(fault)) as disk:
        try:
            done = scenario.run(world)
        except (Exception, KeyboardInterrupt, Killed) as caught:
            error = caught
            del caught
    if error is not None:
        error.__traceback__ = None  # its frames hold descriptors of folders that were being read
    if not disk.fired:
        assert error is None, error
        return False
    assert open_descriptors() == files, "a file is still open"
    assert threading.active_count() == threads, "a thread still runs"
    assert tree(world.source) == world.original, "the source was touched"
    if not (error is None and fault.error in ERRNOS and _was_careful(done)):
        _check_error(world, fault, error)
    _check_output(world, scenario, fault, error, begun)
    if rerun or world.left() != begun or world.out.exists():
        _check_rerun(world, scenario)
    return True


def _was_careful(done: object) -> bool:
    """Whether a finished file that could not be read was written anew instead."""
    return "not_reused" in {finding.code for finding in getattr(done, "findings", ())}


def _check_error(world: World, fault: Fault, error: BaseException | None) -> None:
    if fault.error == "short":
        assert error is None, f"fewer bytes at a time are no failure: {error!r}"
        return
    assert error is not None, "a failure went unnoticed"
    if fault.error in EXCEPTIONS:
        assert type(error) is EXCEPTIONS[fault.error], repr(error)
        return
    assert isinstance(error, IOFailed), repr(error)
    assert error.exit_code == 6
    assert error.__cause__ is not None
    assert getattr(error.__cause__, "errno", None) == getattr(errno, fault.error)
    assert error.hint, f"no way out: {error}"
    names = [*world.original, *world.fresh, str(world.base)]
    assert any(name in error.where for name in names), f"no place: {error}"


def _check_output(
    world: World,
    scenario: Scenario,
    fault: Fault,
    error: BaseException | None,
    begun: list[Path],
) -> None:
    result = scenario.result(world)
    found = tree(world.out) if world.out.exists() else None
    if error is None:
        assert found == result, "the output is not what it should be"
        assert world.left() == []
        return
    old = scenario.old(world)
    if found is None and old is not None:  # only where the names could not be put back
        assert scenario.name == "renames", "the old output has lost its name"
        assert fault.ever, "the old output has lost its name"
        [aside] = [p for p in world.left() if "-old-" in p.name]
        assert tree(aside) == old, "the old output is damaged"
    else:
        assert found in (old, result), "the output is neither absent nor whole"
    kept = [p for p in world.left() if p not in begun]
    if scenario.name == "resume":
        for folder in kept:
            assert {p.suffix for p in folder.rglob("*") if p.is_file()} == {".safetensors"} or (
                fault.ever
            ), "more than finished files was kept"
    elif not fault.ever:
        assert kept == [], f"left although it could be removed: {kept}"


def _check_rerun(world: World, scenario: Scenario) -> None:
    world.bury()
    result = scenario.result(world)
    if scenario.old(world) is None and world.out.exists():
        assert tree(world.out) == result
    else:
        with on_disk(FaultyDisk()):
            scenario.again(world)
        assert tree(world.out) == result, "the rerun gives other bytes"
        assert world.left() == [], "the rerun has left something"


def die(world: World, scenario: Scenario, call: int) -> bool:
    """Whether the process died at that call of any operation; one can go on from what it left.

    It is the state after a prefix of the run's operations: nothing was cleaned up.
    """
    world.empty()
    scenario.begin(world)
    with on_disk(FaultyDisk(Fault(ANY, call, "killed", ever=True))) as disk:
        try:
            scenario.run(world)
        except Killed as caught:
            caught.__traceback__ = None
        else:
            return False
    assert tree(world.source) == world.original, "the source was touched"
    found = tree(world.out) if world.out.exists() else None
    old, result = scenario.old(world), scenario.result(world)
    if found is None and old is not None:
        assert scenario.name == "renames", "the old output has lost its name"
        [aside] = [p for p in world.left() if "-old-" in p.name]
        assert tree(aside) == old
    else:
        assert found in (old, result), "the output is neither absent nor whole"
    world.bury()
    if old is None and found is not None:
        return True
    finished = world.finished(result)
    with on_disk(FaultyDisk()):
        done = scenario.resume(world)
    assert tree(world.out) == result, "going on gives other bytes"
    assert world.left() == []
    if scenario.name != "restore":
        assert set(done.reused) == finished, "a finished shard was not taken over"
    assert disk.fired
    return True


def die_everywhere(world: World, scenario: Scenario, step: int = 1) -> int:
    """Dies after every `step`-th prefix of a run's operations; how many those are."""
    for count in itertools.count():
        call = 1 + count * step
        try:
            if not die(world, scenario, call):
                return count
        except Exception as error:
            where = f"{scenario.name}: killed at operation {call}"
            raise AssertionError(f"{where}: {error!r}") from error
    raise AssertionError("unreachable")


def faults(operation: str, errors: tuple[str, ...] | None = None) -> Iterator[list[Fault]]:
    """The faults of one operation for k = 1, 2, ...: those of one k at a time."""
    kinds = errors or (*ERRNOS, *EXCEPTIONS)
    call = 0
    while True:
        call += 1
        found = [Fault(operation, call, error, ever) for error in kinds for ever in (False, True)]
        if "KeyboardInterrupt" in kinds:
            found.append(Fault(operation, call, "KeyboardInterrupt", after=True))
        if operation in MOVING:
            found += [Fault(operation, call, "short", ever) for ever in (False, True)]
        yield found


def attack(
    world: World,
    scenario: Scenario,
    operation: str,
    errors: tuple[str, ...] | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    every: bool = True,
) -> int:
    """Every fault of one operation, for each k until a run is clean; how many there were.

    every   run again after each; else after the first of each k, and where something is left
    """
    count = 0
    for of_one_call in faults(operation, errors):
        for number, fault in enumerate(of_one_call):
            say(f"{scenario.name}: {fault}")
            try:
                if not strike(world, scenario, fault, rerun=every or number == 0):
                    return count
            except Exception as error:
                raise AssertionError(f"{scenario.name}: {fault}: {error!r}") from error
            count += 1
    raise AssertionError("unreachable")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--operation", choices=OPERATIONS, action="append")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every fault")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    total = failures = 0
    say = print if arguments.verbose else lambda line: None
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-faults-", dir=fast_folder()) as folder:
        world = World(Path(folder))
        for name in arguments.scenario or SCENARIOS:
            for operation in arguments.operation or OPERATIONS:
                began = time.process_time()
                try:
                    count = attack(world, SCENARIOS[name], operation, say=say)
                except AssertionError as error:
                    print(f"FAILED {error}")
                    failures += 1
                    continue
                total += count
                print(f"{name}, {operation}: {count} faults, {time.process_time() - began:.1f} s")
            if not arguments.operation:
                try:
                    deaths = die_everywhere(world, SCENARIOS[name])
                except AssertionError as error:
                    print(f"FAILED {name}: {error}")
                    failures += 1
                    continue
                total += deaths
                print(f"{name}: died after each of {deaths} prefixes of its operations")
    print(f"{total:,} faults: output absent or whole each time, the same bytes afterwards")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
