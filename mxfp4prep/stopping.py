"""Signals that end the work: SIGINT (Ctrl-C), SIGTERM and SIGHUP, with one exit code for all three.

Before the command line is there, and once it is done, nothing has to be cleaned up: the process
leaves at once and without a traceback. In between a signal is a KeyboardInterrupt, so that what was
begun is removed; a second one kills. A signal that is ignored (nohup) stays ignored, and a handler
that is not Python's own or ours is left alone.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType

INTERRUPTED = 130
"""The exit code: 128 + SIGINT."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class AtOnce:
    """The handler while there is nothing to clean up: ends the process with `code`.

    code   None while the command has not run yet
    """

    def __init__(self) -> None:
        self.code: int | None = None

    def take(self) -> None:
        """Takes the signals that nobody else has."""
        for number in _SIGNALS:
            if _is_free(number):
                signal.signal(number, self)

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self.code is None:
            with suppress(OSError):
                os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED if self.code is None else self.code)


class Stop:
    """A context in which the first signal raises KeyboardInterrupt and a second one kills.

    asked   whether a signal has come: what else was raised since then is its consequence
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stop:
        for number in _SIGNALS:
            if _is_free(number):
                with suppress(ValueError):  # not the main thread, whose signals they are
                    self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        for each in self._before:
            signal.signal(each, _take)
        # Python calls this for signals that came together one by one, and prints a traceback for
        # those whose handler is gone by then: raising one makes it take them all now
        signal.raise_signal(number)
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt


def _take(_number: int, _frame: FrameType | None) -> None:
    """The handler of signals that came together with the first one."""


def _is_free(number: int) -> bool:
    handler = signal.getsignal(number)
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, AtOnce)
