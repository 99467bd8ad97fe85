"""One digest a file, whatever the process, its locale and its limits on files are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks import determinism

ROUNDS = 3
"""Of every number of workers, in each process: 27 conversions."""


TURKISH = Path("/usr/share/i18n/locales/tr_TR").exists() and bool(shutil.which("localedef"))
"""Whether that locale can be made here (Debian: the package locales); else it is the C locale."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process of each environment made of the same checkpoint."""
    work: Path = tmp_path_factory.mktemp("determinism")
    locales = determinism.compile_locales(work / "locales") if TURKISH else None
    return determinism.outside(determinism.write_source(work / "model"), work, ROUNDS, locales)


def test_the_combinations_differ_in_everything() -> None:
    turns = determinism.combinations(ROUNDS)
    assert len({tuple(turn.values()) for turn in turns}) == len(turns) == 3 * ROUNDS
    assert {turn["workers"] for turn in turns} == {"1", "2", "4"}
    for key in ("umask", "zone", "inside"):
        assert len({turn[key] for turn in turns}) >= 2, key


def test_one_digest_a_file_and_modes_as_the_umask_has_them(
    said: list[dict[str, Any]], tried: Callable[..., None]
) -> None:
    assert [line for process in said for line in process["wrong"]] == []
    if TURKISH:
        assert "tr_TR" in said[2]["locale"]
    names = set(said[0]["files"])
    assert {
        "mxfp4prep.json",
        "mxfp4prep.digests.json",
        "SHA256SUMS",
        "config.json",
        "source/config.json",
        "source/model.safetensors.index.json",
        "model-00001-of-00003.safetensors",
        "donn\u00e9es/\u0130stanbul.txt",
        "audit.json",
        "audit.csv",
        "audit.html",
    } <= names
    for process in said:
        assert set(process["files"]) == names
    for name in names:
        assert len({digest for process in said for digest in process["files"][name]}) == 1, name
    there = [process for process in said if process["locale"] != "not here"]
    tried("D1", sum(process["conversions"] for process in there))
