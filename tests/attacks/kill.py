"""Shows that SIGKILL at any moment costs no more than the work since the last finished file.

    python tests/attacks/kill.py [--kills 1000] [--seed 0] [--json]

Real processes, forked from one that has torch loaded, convert (1 and 2 workers, --overwrite,
--resume) or restore a tiny checkpoint and are killed: half of them at an operation chosen at
random, where they wait for it, half at a random time. A third of the conversions is killed again
while going on, without anything cleaned up in between. Only kills of a living process count.

After each, the output is absent or whole and the source as it was. The run afterwards, with or
without --resume, gives the same bytes and leaves nothing else; --resume takes over every finished
shard.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from attacks.faults import SCENARIOS, Scenario, World
from attacks.faulty_disk import FaultyDisk, fast_folder, on_disk, tree


def killed_at_operation(run: Callable[[], object], number: int) -> bool:
    """Whether a forked process that does `run` came to its operation `number`, and was killed."""
    reader, writer = os.pipe()
    calls = 0
    lock = threading.Lock()

    def note(_operation: str) -> None:
        nonlocal calls
        with lock:
            calls += 1
            there = calls == number
        if there:
            os.write(writer, b"!")
            threading.Event().wait()  # for the end

    def faulty() -> None:
        with on_disk(FaultyDisk(note=note)):
            run()

    child = _fork(faulty)
    os.close(writer)
    reached = os.read(reader, 1) == b"!"  # or its end: the run was over before
    os.close(reader)
    return _kill(child) and reached


def killed_after(run: Callable[[], object], seconds: float) -> bool:
    """Whether a forked process that does `run` was still at it after so long, and was killed."""
    child = _fork(run)
    time.sleep(seconds)
    return _kill(child)


def _fork(run: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return child


def _kill(child: int) -> bool:
    """Kills a process; False when it had ended by itself, and well."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"died of signal {os.WTERMSIG(status)}"
        return True
    assert os.WEXITSTATUS(status) == 0, "a run failed by itself"
    return False


class Campaign:
    """Kills until there were enough.

    counts   kills by what was killed, and how often something was found in which state
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.usual = {name: self._measure(scenario) for name, scenario in SCENARIOS.items()}

    def _measure(self, scenario: Scenario) -> tuple[int, float]:
        """(operations, seconds) of one run."""
        seconds = []
        for _ in range(2):  # the first one warms up
            self.world.empty()
            scenario.begin(self.world)
            began = time.monotonic()
            with on_disk(FaultyDisk()) as disk:
                scenario.run(self.world)
            seconds.append(time.monotonic() - began)
        return sum(disk.counts.values()) // 2, seconds[-1]

    def run(self, kills: int) -> None:
        """Raises AssertionError as soon as one kill was not survived."""
        names = list(SCENARIOS)
        while self.counts["kills"] < kills:
            name = names[self.counts["kills"] % len(names)]
            self.world.empty()
            SCENARIOS[name].begin(self.world)
            if self._strike(name, SCENARIOS[name].run):
                self._finish(name, kills)

    def _strike(self, name: str, run: Callable[[World], object]) -> bool:
        operations, seconds = self.usual[name]
        if self.random.random() < 0.5:
            at = self.random.randint(1, operations)
            hit = killed_at_operation(lambda: run(self.world), at)
        else:
            after = self.random.uniform(0, 1.5 * seconds)
            hit = killed_after(lambda: run(self.world), after)
        if hit:
            self.counts["kills"] += 1
            self.counts[name] += 1
            self._check(SCENARIOS[name])
        return hit

    def _check(self, scenario: Scenario) -> None:
        world = self.world
        assert tree(world.source) == world.original, "the source was touched"
        found = tree(world.out) if world.out.exists() else None
        old = scenario.old(world)
        if found is None and old is not None:
            assert scenario.name == "renames", "the old output has lost its name"
            [aside] = [path for path in world.left() if "-old-" in path.name]
            assert tree(aside) == old, "the old output is damaged"
            self.counts["between two names"] += 1
        else:
            assert found in (old, scenario.result(world)), "the output is neither absent nor whole"
            self.counts["nothing yet" if found == old else "published"] += 1

    def _finish(self, name: str, kills: int) -> None:
        world, scenario = self.world, SCENARIOS[name]
        result = scenario.result(world)
        if scenario.old(world) is None and world.out.exists():
            return
        resuming = self.random.random() < 0.7 and name != "restore"
        again = scenario.resume if resuming else scenario.again
        for _ in range(2):
            if self.counts["kills"] < kills and self.random.random() < 0.33:
                self._strike(name, again)
            if scenario.old(world) is None and world.out.exists():
                return
        finished = world.finished(result)
        done = again(world)
        assert tree(world.out) == result, "going on gives other bytes"
        assert world.left() == [], "something is left"
        if resuming:
            assert set(done.reused) == finished, "a finished shard was not taken over"
            self.counts["resumed"] += 1
            self.counts["shards taken over"] += len(finished)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="counts as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-kill-", dir=fast_folder()) as folder:
        campaign = Campaign(World(Path(folder)), arguments.seed)
        campaign.run(arguments.kills)
    if arguments.json:
        print(json.dumps(campaign.counts))
    else:
        for what, count in sorted(campaign.counts.items()):
            print(f"{count:6,} {what}")
        print("after each: output absent or whole, the same bytes afterwards, nothing left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
