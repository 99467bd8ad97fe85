"""Room: rows that cannot fit are refused in time, and what an allocator says is told apart."""

from __future__ import annotations

import errno

import pytest
import torch
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.errors import IOFailed, UsageError
from mxfp4prep.runtime import room
from mxfp4prep.runtime.room import NoRoom, check_room, is_shortage, rows_nbytes, telling_where
from mxfp4prep.runtime.selfcheck import selfcheck

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture
def prepared(tmp_path):
    bank = [
        Layer(f"{PREFIX}.gate_up_proj", 128, 256, "triton", experts=4),
        Layer(f"{PREFIX}.down_proj", 256, 64, "triton", experts=4),
    ]
    build(tmp_path, [Layer("a.fc1", 64, 256), *bank])
    return mxfp4prep.load(tmp_path)


def test_rows_need_the_more_the_wider_they_are_and_the_more_experts_see_them(prepared):
    layer, experts = prepared["a.fc1"], prepared.experts(PREFIX)
    assert rows_nbytes(layer, 1000, CPU) == 1000 * (256 * 32 + 64 * 12)
    assert rows_nbytes(layer, 1000, GPU) == 1000 * 256 * 6  # drawn on the host
    assert rows_nbytes(experts, 10, CPU, 2) == 10 * (2 * (256 + 64) * 24 + 4 * 12)
    assert rows_nbytes(experts, 10, GPU, 2) == 10 * (256 * 6 + 4 * 12)


def test_what_exceeds_the_free_memory_is_refused(prepared, monkeypatch):
    layer = prepared["a.fc1"]
    needed = rows_nbytes(layer, 1000, CPU)
    monkeypatch.setattr(room, "free_nbytes", lambda _device: needed)
    check_room(layer, 1000, CPU)
    with pytest.raises(NoRoom, match=r"a\.fc1 at m 1000: too many rows .*, expected at most "):
        check_room(layer, 1000, CPU, more=1)
    with pytest.raises(IOFailed, match="at m 1001"):
        check_room(layer, 1001, CPU)
    monkeypatch.setattr(room, "free_nbytes", lambda _device: None)  # nothing says so
    check_room(layer, 10**9, CPU)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU"), "2.00 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                      "2000000000 bytes. Error code 12"), "2 GB"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
         "9 B"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), None),
        (MemoryError(), None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
    ],
)  # fmt: skip
def test_what_allocators_say_is_one_error(error, asked):
    assert is_shortage(error)
    with pytest.raises(NoRoom) as caught, telling_where("here", "do that"):
        raise error
    assert (caught.value.exit_code, caught.value.hint) == (6, "do that")
    more = "" if asked is None else f": found {asked} more asked for"
    assert str(caught.value) == f"here: out of memory{more}"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, "No space left on device"),
        UsageError("x", "is wrong"),
    ],
)
def test_other_errors_go_through(error):
    with pytest.raises(type(error)) as caught, telling_where("here"):
        raise error
    assert caught.value is error


def test_selfcheck_refuses_rows_that_do_not_fit(prepared, monkeypatch):
    for name in ("a.fc1", PREFIX):
        rows = selfcheck(prepared, [name], m=(2, 999_999_999))
        assert next(rows).m == 2
        with pytest.raises(NoRoom, match=f"{name} at m 999999999: too many rows"):
            next(rows)

    def full(*_args, **_more):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("mxfp4prep.runtime.selfcheck.linear_oracle", full)
    with pytest.raises(NoRoom, match=r"a\.fc1 at m 3: out of memory"):
        list(selfcheck(prepared, ["a.fc1"], m=(3,)))
