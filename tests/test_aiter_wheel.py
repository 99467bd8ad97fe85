"""The AITER backend against the real package: its signatures, its shuffles, its Triton kernels.

MXFP4PREP_AITER_SITE names the folder where `pip install --no-deps --target` put amd-aiter 0.1.7, a
package of Python alone. The kernels run in Triton's interpreter, in a child process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from aiter_stub import SIGNATURES
from conftest import with_path

from mxfp4prep.runtime.backends import Needs
from mxfp4prep.runtime.backends.aiter_functions import read_functions
from mxfp4prep.runtime.backends.aiter_limits import objection, splits_k_wrongly

ROOT = Path(__file__).parent.parent
VERSION = "0.1.7.post2.dev18"
VARIABLE = "MXFP4PREP_AITER_SITE"

CASES = [
    ("asm", 1, 64, 256),
    ("asm", 16, 96, 512),
    ("asm", 31, 64, 768),
    ("asm", 32, 64, 512),
    ("asm", 33, 96, 256),
    ("asm", 64, 64, 512),
    ("asm", 70, 96, 512),
    ("triton", 1, 48, 512),
    ("triton", 33, 50, 256),
    ("kept", 20, 48, 256),
]
REFUSED = [("triton", 5, 32, 640), ("triton", 5, 32, 544)]


@pytest.fixture(scope="module")
def site() -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder with amd-aiter {VERSION}")
    found = [d.version for d in metadata.distributions(name="amd-aiter", path=[folder])]
    assert found == [VERSION], f"{VARIABLE}={folder}"
    return Path(folder).resolve()


@pytest.fixture(scope="module")
def report(site: Path) -> dict:
    """What the child process says of the quantizer, the shuffles and each case."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "aiter_interpreter.py"), str(site), CASES_JSON],
        env=with_path(ROOT, ROOT / "tests") | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CASES_JSON = json.dumps([*CASES, *REFUSED])


def test_signatures_are_the_recorded_ones(site):
    found = read_functions(site / "aiter", VERSION)
    recorded = SIGNATURES[VERSION]["functions"]
    for function in (
        found.gemm_a4w4,
        found.preshuffle,
        found.plain,
        found.quantize,
        found.fused_moe,
    ):
        file = "/".join(function.module.split(".")[1:]) + ".py"
        parameters = recorded[file][function.name]
        assert list(function.parameters) == [text.partition("=")[0] for text in parameters]
        assert list(function.required) == [text for text in parameters if "=" not in text]


def test_what_this_release_is_taken_for(site):
    known = read_functions(site / "aiter", VERSION)
    assert not splits_k_wrongly(known)
    assert objection(known, Needs(k=(512,)), ("triton",)) is None
    assert "NaN" in (objection(known, Needs(k=(640,)), ("triton",)) or "")


def test_shuffles_make_the_bytes_of_our_layouts(report):
    assert report["shuffles"] == dict.fromkeys(
        ("weight", "experts", "is_shuffled", "scale", "input_scale"), True
    )


def test_the_quantizer_is_even_but_for_ties(report):
    """This release rounds ties away from zero, later ones to even."""
    assert report["quantizer"]["not_tied"] == 0
    assert 0 < report["quantizer"]["differs"] < 0.02
    assert report["quantizer"]["scale_strides"] == [1, 64]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_its_kernels_agree_with_the_reference_on_stored_tensors(report, case):
    answer = report["cases"][" ".join(map(str, case))]
    assert answer["nan"] == 0
    assert answer["error"] <= 1


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(map(str, case)))
def test_the_k_that_it_answers_with_nan_is_refused(report, case):
    assert "answers NaN" in report["cases"][" ".join(map(str, case))]["refused"]
    assert report["nan_of_plain"]["512"] == 0
    assert report["nan_of_plain"][str(case[3])] > 0
