"""Requests that are made again a few times when the failure is one that passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mxfp4prep.errors import Mxfp4PrepError
from mxfp4prep.hub.address import Address
from mxfp4prep.hub.failures import Refused, failure, is_passing, unwrapped

T = TypeVar("T")

RETRY_SECONDS = (0.25, 1.0, 3.0)
"""How long to wait before each further try."""
MAX_WAIT_SECONDS = 10.0
"""A server that asks for a longer wait than this is not waited for."""


class Cancelled(Exception):
    """Another request failed, or the user asked to stop."""


def patiently(
    call: Callable[[], T],
    address: Address,
    name: str | None,
    stop: threading.Event | None = None,
    let_through: tuple[type[Exception], ...] = (),
    *,
    retry: bool = True,
) -> T:
    """What `call` returns, tried again when the network or a server stumbles.

    name          the file that is read, for errors
    stop          set when the answer is no longer wanted: raises Cancelled
    let_through   errors to raise as they are
    retry         False where `call` itself tries again

    Raises our errors as they are, and for everything else one that a person can act on.
    """
    stop = stop or threading.Event()
    ours: tuple[type[Exception], ...] = (Mxfp4PrepError, Cancelled, *let_through)
    waits = iter(RETRY_SECONDS if retry else ())
    while True:
        if stop.is_set():
            raise Cancelled
        try:
            return call()
        except ours:
            raise
        except Exception as error:  # a library's and a network's: whatever it is, it gets a place
            cause = unwrapped(error)
            wait = next(waits, None) if is_passing(cause) else None
            asked = _asked_wait(cause)
            if wait is None or asked > MAX_WAIT_SECONDS:
                raise failure(address, name, cause) from error
            stop.wait(max(wait, asked))


def _asked_wait(error: Exception) -> float:
    """The seconds that a server asks to wait; dates count as none."""
    text = error.retry_after if isinstance(error, Refused) else ""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
