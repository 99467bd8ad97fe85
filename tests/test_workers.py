"""Jobs on threads: the first failure is reported, and nothing begins after it."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from functools import partial

import pytest

from mxfp4prep import workers
from mxfp4prep.workers import Cancel, Cancelled, run_jobs


def fail() -> None:
    raise ValueError("the first")


def test_no_job_begins_once_one_has_failed(monkeypatch):
    """However late the thread that waits for them takes notice."""
    monkeypatch.setattr(workers, "wait", lambda futures, return_when: wait(futures, 30))
    begun: list[int] = []
    with pytest.raises(ValueError, match="the first"):
        run_jobs([fail, *(partial(begun.append, n) for n in range(3))], 1, Cancel(None))
    assert begun == []


def test_the_others_stop_at_their_next_piece_and_the_first_failure_is_told():
    cancel, both = Cancel(None), threading.Barrier(2)
    stopped: list[str] = []

    def first() -> None:
        both.wait(30)
        fail()

    def second() -> None:
        both.wait(30)
        try:
            while True:
                cancel.done(1)
        except Cancelled:
            stopped.append("second")
            raise

    with pytest.raises(ValueError, match="the first"):
        run_jobs([first, second], 2, cancel)
    assert stopped == ["second"]
