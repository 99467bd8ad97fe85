"""The table of what was tried says no more than the tests do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reliability

pytest_plugins = ["pytester"]


def full() -> reliability.Counts:
    return {row.id: {"test_a.py::test_a": [row.target, True]} for row in reliability.ROWS}


def test_counts_come_from_tests_that_passed(pytester: pytest.Pytester, monkeypatch) -> None:
    monkeypatch.setenv(reliability.VARIABLE, "counts.json")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(
        "from reliability import Counter, tried\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Counter())\n"
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", [1, 2])
        def test_some(tried, n):
            tried("H1", n)

        def test_bad(tried):
            tried("H4", 7)
            assert False

        def test_unknown_row(tried):
            with pytest.raises(AssertionError):
                tried("H99")
            with pytest.raises(AssertionError):
                tried("H1", 0)
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=3, failed=1)
    counts = reliability.read(Path("counts.json"))
    name = "test_counts_come_from_tests_that_passed.py::test_"
    assert counts == {"H1": {name + "some": [3, True]}, "H4": {name + "bad": [0, False]}}


def test_a_full_table_is_neither_missed_nor_overstated() -> None:
    assert list(reliability.missed(full())) == []
    assert list(reliability.overstated(full(), reliability.render(full()))) == []
    assert "MISSED" not in reliability.render(full())


def test_a_row_below_its_target_or_with_a_failure_is_missed() -> None:
    few = full() | {"H5": {"test_a.py::test_a": [19_999, True]}}
    few["I1"] = {"test_a.py::test_a": [25, False]}
    assert list(reliability.missed(few)) == ["H5: 19,999 of 20,000", "I1: 25 of 25, with failures"]
    assert reliability.render(few).count("MISSED") == 2


def test_a_table_that_says_more_is_found(tmp_path: Path, monkeypatch, capsys) -> None:
    more = full() | {"F1": {"test_a.py::test_a": [2_000, True]}}
    table, counts = tmp_path / "RELIABILITY.md", tmp_path / "counts.json"
    monkeypatch.setattr(reliability, "TABLE", table)
    table.write_text(reliability.render(more))
    counts.write_text(json.dumps(full()))
    monkeypatch.setattr("sys.argv", ["reliability", str(counts), "--check"])
    assert reliability.main() == 1
    assert "F1: RELIABILITY.md says 2,000, this run tried 1,500" in capsys.readouterr().err
