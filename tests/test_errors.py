"""Errors as other programs meet them."""

from __future__ import annotations

import pickle
import traceback

import pytest

from mxfp4prep import errors

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.Mxfp4PrepError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_goes_from_one_process_to_another(kind):
    """Engines' workers send theirs to the process that asked."""
    reason = {"reason": "split_rows"} if kind is errors.CannotShard else {}
    error = kind("a.weight", "is odd", hint="look at it", **reason)
    error.add_note("in the checkpoint m")
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is kind
    assert traceback.format_exception_only(there) == traceback.format_exception_only(error)
    assert vars(there) == vars(error)
    assert there.args == error.args


def test_a_traceback_shows_the_hint():
    error = errors.InvalidCheckpoint("a", "b", found=1, expected=2, hint="c \x1b")
    said = "".join(traceback.format_exception_only(error))
    assert said.endswith("InvalidCheckpoint: a: b: found 1, expected 2\nhint: c \\x1b\n")


@pytest.mark.parametrize(
    ("root", "where", "named"),
    [
        ("m", "model.safetensors", True),
        ("m", "model.layers.0", True),
        (".", "config.json", True),
        ("m", "m", False),
        ("m", "m/config.json", False),
        ("m", "/other/place.part", False),
    ],
)
def test_an_error_without_its_directory_gets_it(root, where, named):
    with pytest.raises(errors.InvalidCheckpoint) as caught, errors.naming(root):
        raise errors.InvalidCheckpoint(where, "is odd")
    assert getattr(caught.value, "__notes__", []) == (
        [f"in the checkpoint {root}"] if named else []
    )


def test_an_error_keeps_the_directory_nearest_to_it():
    with pytest.raises(errors.IOFailed) as caught, errors.naming("far"), errors.naming("near"):
        raise errors.IOFailed("a", "is odd")
    assert caught.value.__notes__ == ["in the checkpoint near"]


@pytest.mark.parametrize(
    ("kind", "own", "hint"),
    [
        (errors.InvalidManifest, None, "general"),
        (errors.IntegrityError, None, "general"),
        (errors.InvalidCheckpoint, "its own", "its own"),
        (errors.Unsupported, None, None),  # the file is as it should be
        (errors.UsageError, None, None),
    ],
)
def test_a_fault_of_a_file_has_a_way_out(kind, own, hint):
    with pytest.raises(kind) as caught, errors.naming("m", "general"):
        raise kind("a", "is odd", hint=own)
    assert caught.value.hint == hint
    hints = [note for note in getattr(caught.value, "__notes__", ()) if note.startswith("hint: ")]
    assert hints == ([] if hint is None else [f"hint: {hint}"])
