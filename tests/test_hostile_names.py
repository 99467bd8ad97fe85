"""Names, links and things that are no files: nothing outside, nothing raw, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import names


@pytest.mark.parametrize("kind", names.EVERYTHING, ids=lambda kind: kind.__name__)
def test_hostile_names_and_things(kind, tmp_path, tried):
    tries = list(kind(tmp_path))
    assert [each for each in tries if each.wrong] == []
    assert len({each.what for each in tries}) == len(tries)
    tried("H7", len(tries))


def test_what_counts_as_wrong_is_seen(tmp_path, monkeypatch):
    """The attack's own eyes: an escape on stdout, a file beside the output, a traceback."""
    (tmp_path / "m").mkdir()

    def command(words: list[str]) -> int:
        print("\x1b[31m")
        (tmp_path / "beside").write_text("x")
        return 70

    monkeypatch.setattr(names.cli, "main", command)
    wrong: list[str] = []
    with names.untouched(tmp_path, wrong, tmp_path / "out"):
        wrong += names.run("audit", tmp_path / "m")[2]
    assert len(wrong) == 3
    assert [Path(line.split("b'")[1].rstrip("'")).name for line in wrong if "beside" in line] == [
        "beside"
    ]
