"""Breaks the code in small ways, one at a time, and says which breaks no test notices.

    python tests/mutation/run.py                    a seeded choice from each file
    python tests/mutation/run.py --all --argued     every mutant: 20 minutes of CPU
    python tests/mutation/run.py layouts --all --only check     what has this word in it

The tests that cover a module run against each mutant in a copy. A mutant that means the same as the
code is argued in argued.toml and not counted; an argument that fits no mutant, or whose mutant is
killed, is an error. Exits with 1 unless every file reaches its share.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # as for the tests, of which this is a part

from mutation.mutants import Mutant, choose, mutants_of  # noqa: E402
from mutation.trial import Result, Trial, make_room, run_all, warm_up  # noqa: E402

TREE = HERE.parents[1]
ARGUED = HERE / "argued.toml"


@dataclass(frozen=True, slots=True)
class Target:
    """A module, the tests that must notice, and the share of its mutants they must kill."""

    tests: tuple[str, ...]
    share: float = 0.95
    literals: bool = False


TARGETS = {
    "alignment": Target(("test_alignment.py",), share=1.0),
    "layouts": Target(("test_layouts.py",), share=1.0),
    "layer_defaults": Target(("test_manifest.py",)),
    "manifest": Target(("test_manifest.py",), literals=True),
    "mxfp4": Target(("test_mxfp4.py",)),
    "header_json": Target(("test_safefile.py",)),
    "safefile": Target(("test_safefile.py",)),
}
SLOW = {
    "test_a_header_of_many_tensors_is_read_whole_in_little_memory",
    "test_what_we_accept_safetensors_reads_the_same",
}
"""Tests that are slow, as all of hypothesis are: left out, so that a mutant which they alone notice
counts as a survivor; with --slow they run last."""

CHOICE = 6
"""Mutants of each file that a run of CI tries."""


@dataclass(slots=True)
class Argument:
    """Why the mutants of one line, of one operator, mean the same. `change` "" stands for each."""

    file: str
    function: str
    operator: str
    line: str
    why: str
    change: str = ""
    used: bool = False

    def fits(self, mutant: Mutant) -> bool:
        mine = (self.file, self.function, self.operator, self.line)
        return mine == mutant.key[:4] and self.change in ("", mutant.change)


@dataclass(slots=True)
class Outcome:
    """What became of the mutants of one file."""

    mutants: int = 0
    killed: int = 0
    by_time: int = 0
    argued: list[tuple[Mutant, str]] = field(default_factory=list)
    survivors: list[Mutant] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        tried = self.killed + len(self.survivors)
        return self.killed / tried if tried else 0.0


def arguments() -> list[Argument]:
    """The written list."""
    return [Argument(**entry) for entry in tomllib.loads(ARGUED.read_text()).get("argued", [])]


class Run:
    """One run over some files."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.jobs = folder, options, options.jobs
        self.argued = arguments()
        self.cpu = 0.0

    def file(self, name: str) -> Outcome:
        """Tries the mutants of one file."""
        target, outcome, quick = TARGETS[name], Outcome(), not self.options.slow
        original = (TREE / "mxfp4prep" / f"{name}.py").read_text()
        mutants = mutants_of(name, original, literals=target.literals)
        outcome.mutants = len(mutants)
        why = {mutant.key: self._why(mutant) for mutant in mutants}
        outcome.argued = [(m, text) for m in mutants if (text := why[m.key])]
        chosen = [m for m in mutants if self.options.argued or not why[m.key]]
        chosen = [mutant for mutant in chosen if self.options.only in str(mutant)]
        if not self.options.all:
            chosen = choose(chosen, self.options.count, f"{self.options.seed} {name}")
        for argument in self.argued:
            if argument.file == name and not argument.used:
                outcome.wrong.append(f"argued, but there is no such mutant: {argument.line}")
        rooms = [make_room(TREE, self.folder / name)]
        control = Trial(0, name, ast.unparse(ast.parse(original)), target.tests, quick=quick)
        ((_, result),) = self._tried([control], rooms)
        if result.killer or not result.passed:
            output = (rooms[0] / "output").read_text()
            outcome.wrong.append(f"the code as it is does not pass: {result.killer}\n{output}")
            outcome.survivors = chosen
            return outcome
        for number in range(1, self.jobs):
            room = self.folder / f"{name}.{number}"
            rooms.append(Path(shutil.copytree(rooms[0], room, symlinks=True)))
        killers: Counter[str] = Counter()
        quick_first = sorted(result.passed, key=result.passed.__getitem__)

        def trials() -> Iterator[Trial]:
            for number, mutant in enumerate(chosen):
                order = [*(test for test, _ in killers.most_common()), *quick_first]
                first = list(dict.fromkeys(order))
                yield Trial(number, name, mutant.source(original), target.tests, first, quick)

        for trial, found in self._tried(trials(), rooms):
            mutant = chosen[trial.number]
            if found.killer is None and why[mutant.key]:
                continue
            if found.killer is None:
                outcome.survivors.append(mutant)
                print(f"survived: {mutant}", flush=True)
                continue
            killers[found.killer] += 1
            if why[mutant.key]:
                outcome.wrong.append(f"argued to mean the same, but {found.killer} fails: {mutant}")
            outcome.killed += 1
            outcome.by_time += found.killer == "time"
        for room in rooms:
            shutil.rmtree(room)
        return outcome

    def _tried(
        self, trials: Sequence[Trial] | Iterator[Trial], rooms: list[Path]
    ) -> Iterator[tuple[Trial, Result]]:
        for trial, result in run_all(trials, rooms, SLOW):
            self.cpu += result.cpu
            if result.foreign:
                sys.exit(f"the tests ran on another package: {result.foreign}")
            yield trial, result

    def _why(self, mutant: Mutant) -> str:
        for argument in self.argued:
            if argument.fits(mutant):
                argument.used = True
                return argument.why
        return ""


def render(outcomes: dict[str, Outcome]) -> str:
    """The table."""
    lines = ["| file | mutants | tried | killed | by time | argued | survived | share | needed |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, o in outcomes.items():
        tried, needed = o.killed + len(o.survivors), TARGETS[name].share
        lines.append(
            f"| {name} | {o.mutants} | {tried} | {o.killed} | {o.by_time} | {len(o.argued)} "
            f"| {len(o.survivors)} | {o.share:.1%} | {needed:.0%} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", choices=[[], *TARGETS], help="all by default")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--slow", action="store_true", help="also against the slow tests")
    parser.add_argument("--count", type=int, default=CHOICE, help="mutants of each file")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--only", default="", help="those whose description has these words")
    parser.add_argument(
        "--argued", action="store_true", help="try the argued ones too, and print why they live"
    )
    options = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        run = Run(Path(folder), options)
        outcomes = {name: run.file(name) for name in options.files or TARGETS}
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = run.cpu + usage.ru_utime + usage.ru_stime
    print(render(outcomes))
    for name, outcome in outcomes.items():
        for text in outcome.wrong:
            print(f"wrong: {name}: {text}")
        for mutant, why in outcome.argued if options.argued else ():
            print(f"means the same: {mutant}: {why}")
    print(f"{cpu:.0f} s of CPU")
    if options.json:
        options.json.write_text(json.dumps(_document(outcomes, cpu), indent=1) + "\n")
    well = all(
        outcome.share >= TARGETS[name].share and not outcome.wrong
        for name, outcome in outcomes.items()
    )
    return 0 if well else 1


def _document(outcomes: dict[str, Outcome], cpu: float) -> dict[str, object]:
    return {
        "cpu_seconds": round(cpu, 1),
        "files": {
            name: {
                "mutants": o.mutants,
                "killed": o.killed,
                "killed_by_time": o.by_time,
                "survived": [str(mutant) for mutant in o.survivors],
                "argued": {str(mutant): why for mutant, why in o.argued},
                "wrong": o.wrong,
                "share": round(o.share, 4),
                "needed": TARGETS[name].share,
            }
            for name, o in outcomes.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
