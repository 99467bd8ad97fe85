"""Ranks that load is told: whole numbers, named where there are several, and existing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prepared_factory import Layer, build

import mxfp4prep
from mxfp4prep.errors import UsageError
from mxfp4prep.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks") / "prepared"
    build(root, [Layer("model.fc1", 64, 64, "triton")])
    return root


@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_a_rank_must_be_named_where_there_are_several(root, kind):
    """Else every process of a server that forgets it would be rank 0, and answer nonsense."""
    other = "ep" if kind == "tp" else "tp"
    with pytest.raises(UsageError, match=f"{kind}_rank: not named") as caught:
        mxfp4prep.load(root, **{f"{kind}_size": 2})
    assert f"add {kind}_rank=" in caught.value.hint
    prepared = mxfp4prep.load(root, **{f"{kind}_size": 2, f"{kind}_rank": 0})
    assert getattr(prepared, f"{kind}_size") == 2
    assert getattr(prepared, f"{other}_size") == 1


@pytest.mark.parametrize("wrong", ["2", 2.0, True, [2], torch.tensor(2.0), b"2"])
@pytest.mark.parametrize("name", ["tp_size", "ep_size", "tp_rank", "ep_rank"])
def test_ranks_are_whole_numbers(root, name, wrong):
    with pytest.raises(UsageError, match=f"{name}: not a whole number") as caught:
        mxfp4prep.load(root, **{name: wrong})
    assert repr(wrong) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("two", [2, np.int64(2), torch.tensor(2)])
def test_whole_numbers_of_any_type(root, two):
    prepared = mxfp4prep.load(root, tp_rank=two - 1, tp_size=two)
    assert (type(prepared.tp_rank), type(prepared.tp_size)) == (int, int)
    assert prepared["model.fc1"].n == 32


@pytest.mark.parametrize("kind", ["tp", "ep"])
@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 2), (1, 1), (None, 0), (0, -1)])
def test_ranks_that_do_not_exist(root, kind, rank, size):
    with pytest.raises(UsageError, match=rf"expected 0 <= {kind}_rank < {kind}_size") as caught:
        mxfp4prep.load(root, **{f"{kind}_rank": rank, f"{kind}_size": size})
    assert caught.value.hint


def test_one_rank_needs_no_name():
    assert Ranks.make(None, 1, None, 1) == (0, 1, 0, 1)
    assert Ranks.make(1, 2, 3, 4) == (1, 2, 3, 4)
