"""Shows that several commands on one output never mix: one writes, the others refuse.

    python tests/attacks/race.py [--rounds 200] [--seed 0] [--json]

In each round several real processes begin at the same moment: conversions to one name (plain, with
--resume on what a dead run has left, with --overwrite), and verifications of what stands there.
None may fail in another way than by refusing (exit code 5) or by seeing that what it reads is being
replaced (6, for verify 1 and 3 too). Whatever order they come in, the output is whole, and nothing
is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from attacks.faults import World
from attacks.faulty_disk import fast_folder, tree
from attacks.forking import Command, warm_up

KINDS = ("plain", "resume", "overwrite", "verify")


class Race:
    """counts   how often each kind of round came to which end"""

    def __init__(self, base: Path, seed: int) -> None:
        self.world = World(base)
        warm_up(self.world.source, base)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()

    def round(self, kind: str) -> None:
        """Raises AssertionError when the processes got in each other's way."""
        world = self.world
        world.empty()
        before = kind in ("overwrite", "verify")
        if before:
            shutil.copytree(world.old, world.out)
        if kind == "resume":
            world.dead_stage()
        convert = ["convert", world.source, world.out, "-q", "--workers", "1"]
        extra = {"plain": [], "resume": ["--resume"]}.get(kind, ["--overwrite"])
        lines = [[*convert, *extra] for _ in range(1 if kind == "verify" else 4)]
        if kind == "verify":
            lines += [["verify", world.out, "--no-progress"]] * 3
        self.random.shuffle(lines)
        reader, writer = os.pipe()

        def wait_for_the_start() -> None:
            os.close(writer)
            os.read(reader, 1)  # returns when the last writer has closed

        commands = [(line[0], Command(*line, prepare=wait_for_the_start)) for line in lines]
        os.close(writer)
        os.close(reader)
        ends = [(verb, command.wait()) for verb, command in commands]
        for verb, end in ends:
            allowed = {0, 5} if verb == "convert" else {0, 1, 3}
            assert end.code in allowed | ({6} if before else set()), f"{kind}: {verb}: {end}"
            assert "Traceback" not in end.told
        done = sum(end.code == 0 for verb, end in ends if verb == "convert")
        self._check(kind, done)
        self.counts[f"{kind}: {done} wrote"] += 1
        self.counts["commands"] += len(ends)

    def _check(self, kind: str, done: int) -> None:
        world = self.world
        assert tree(world.source) == world.original
        found = tree(world.out) if world.out.exists() else None
        before = world.stale if kind in ("overwrite", "verify") else None
        assert found == (world.fresh if done else before), f"{kind}: the output is not whole"
        if kind in ("plain", "resume"):
            assert done <= 1, f"{done} runs wrote one output"
        left = world.left()
        assert done == 0 or left == [], f"left: {left}"
        if kind == "resume" and not done:  # what nobody took over is there for the next run
            world.bury()
            assert tree(self._again()) == world.fresh
        assert kind == "resume" or left == [], f"left: {left}"

    def _again(self) -> Path:
        words = ["convert", self.world.source, self.world.out, "-q", "--resume"]
        assert Command(*words).wait().code == 0
        return self.world.out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-race-", dir=fast_folder()) as folder:
        race = Race(Path(folder), arguments.seed)
        for number in range(arguments.rounds):
            race.round(KINDS[number % len(KINDS)])
    if arguments.json:
        print(json.dumps(race.counts))
    else:
        for what, count in sorted(race.counts.items()):
            print(f"{count:6,} {what}")
        print("after each: one whole output, nothing left, no other failure than a refusal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
