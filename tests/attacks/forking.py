"""The command in a process of its own without the cost of starting one: forked from a warm one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mxfp4prep import cli


@dataclass(frozen=True)
class Ended:
    """code   its exit code, or minus the signal that ended it
    told   what it said on stderr
    """

    code: int
    told: str


class Command:
    """A command line that runs in a forked process.

    prepare   is called there before, to take something away from it
    """

    def __init__(self, *words: object, prepare: Callable[[], object] = lambda: None) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            self._become([str(word) for word in words], writer, prepare)
        os.close(writer)
        self._reader = reader

    @staticmethod
    def _become(words: list[str], writer: int, prepare: Callable[[], object]) -> None:
        code = 99
        try:
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            prepare()
            code = cli.main(words)
            sys.stderr.flush()
        finally:
            os._exit(code)

    def wait(self) -> Ended:
        """How it ended."""
        told = bytearray()
        while piece := os.read(self._reader, 1 << 16):
            told += piece
        os.close(self._reader)
        _, status = os.waitpid(self.pid, 0)
        return Ended(os.waitstatus_to_exitcode(status), told.decode())


def warm_up(source: Path, folder: Path) -> None:
    """Runs the verbs once here: forked processes then find all imports done."""
    before = sys.stdout
    with Path(os.devnull).open("w") as sys.stdout:
        assert cli.main(["convert", str(source), str(folder / "warm"), "--no-progress"]) == 0
        assert cli.main(["verify", str(folder / "warm"), "--no-progress"]) == 0
        words = ["restore", str(folder / "warm"), str(folder / "warm-again"), "--no-progress"]
        assert cli.main(words) == 0
    sys.stdout = before
