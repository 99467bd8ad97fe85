"""Tests that notice: small faults put into the code, one at a time, make them fail."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

from mutation.mutants import choose, mutants_of

TESTS = Path(__file__).parent
FILES = (
    "alignment", "layouts", "layer_defaults", "manifest", "mxfp4", "header_json", "safefile",
)  # fmt: skip


def run(tests: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, tests / "mutation" / "run.py", "--jobs", 1, *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_a_seeded_choice_of_faults_is_noticed(tmp_path, tried):
    found = run(TESTS, *FILES, "--json", tmp_path / "found.json")
    assert found.returncode == 0, found.stdout + found.stderr
    outcomes = json.loads((tmp_path / "found.json").read_text())["files"]
    assert tuple(outcomes) == FILES
    for file, outcome in outcomes.items():
        assert outcome["killed"] + len(outcome["survived"]) == 6
        assert outcome["share"] >= outcome["needed"] == (1.0 if file in FILES[:2] else 0.95)
    tried("N5", 6 * len(FILES))


def test_tests_that_notice_nothing_are_found_out(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("mxfp4prep", "tests/data", "pyproject.toml"):
        (tmp_path / name).symlink_to(TESTS.parent / name)
    for name in ("conftest.py", "reliability.py"):
        shutil.copy2(TESTS / name, tests)
    shutil.copytree(TESTS / "mutation", tests / "mutation")
    (tests / "test_alignment.py").write_text(
        "import mxfp4prep.alignment as a\n\ndef test_it_is_there(): assert a.scale_columns\n"
    )
    with (tests / "mutation" / "argued.toml").open("a") as file:
        fields = ("function", "operator", "why")
        file.write('[[argued]]\nfile = "alignment"\nline = "no such line"\n')
        file.write("".join(f'{name} = "x"\n' for name in fields))
    found = run(tests, "alignment", "--count", 3, "--only", "scale_columns: arithmetic")
    assert found.returncode == 1
    assert found.stdout.count("survived: alignment.py:") == 3, found.stdout + found.stderr
    assert "argued, but there is no such mutant: no such line" in found.stdout


SOURCE = '''"""Text."""
LIMIT: int = 3
Name = Literal["a"]

def first(rows: "int", *, wide: bool = True) -> "int":
    """More text."""
    if not rows:
        raise ValueError("no rows at all")
    return call(rows, wide)[1:] if rows < LIMIT and wide else -rows + 1
'''


def test_what_mutants_are_made():
    made = {(m.function, m.operator, m.change) for m in mutants_of("m", SOURCE)}
    inner = "call(rows, wide)[1:]"
    assert made == {
        ("", "constant", "3 -> 4"),
        ("", "constant", "3 -> 2"),
        ("", "removed", "Name = Literal['a'] removed"),
        ("first", "constant", "True -> False"),
        ("first", "condition", "if not rows -> if not"),
        ("first", "not", "not rows -> rows"),
        ("first", "removed", "raise ValueError('no rows at all') removed"),
        ("first", "string", "'no rows at all' -> ''"),
        (
            "first",
            "return",
            "return call(rows, wide)[1:] if rows < LIMIT and wide else -rows + 1 -> return None",
        ),
        (
            "first",
            "condition",
            f"{inner} if rows < LIMIT and wide else -rows + 1 -> "
            f"{inner} if not (rows < LIMIT and wide) else -rows + 1",
        ),
        ("first", "arguments", "call(rows, wide) -> call(wide, rows)"),
        ("first", "slice", "1: -> 1 + 1:"),
        ("first", "slice", "1: -> 1:-1"),
        ("first", "constant", "1 -> 2"),
        ("first", "constant", "1 -> 0"),
        ("first", "boolean", "rows < LIMIT and wide -> rows < LIMIT or wide"),
        ("first", "operand", "rows < LIMIT and wide without rows < LIMIT"),
        ("first", "operand", "rows < LIMIT and wide without wide"),
        ("first", "comparison", "rows < LIMIT -> rows <= LIMIT"),
        ("first", "arithmetic", "-rows + 1 -> -rows - 1"),
        ("first", "arithmetic", "-rows -> rows"),
        ("first", "constant", "1 -> 2 (2)"),
        ("first", "constant", "1 -> 0 (2)"),
    }


def test_each_mutant_changes_the_code_and_no_two_have_one_key():
    same = ast.unparse(ast.parse(SOURCE))
    for source in (SOURCE, (TESTS.parent / "mxfp4prep" / "layouts.py").read_text()):
        mutants = mutants_of("m", source, literals=True)
        assert len({mutant.key for mutant in mutants}) == len(mutants)
    made = [mutant.source(SOURCE) for mutant in mutants_of("m", SOURCE, literals=True)]
    assert same not in made
    assert len(set(made)) == len(made) == 24  # the string of the Literal is the one more
    for source in made:
        compile(source, "m", "exec")


def test_the_choice_is_the_same_each_time_and_takes_every_operator():
    mutants = mutants_of("m", SOURCE)
    chosen = choose(mutants, 12, "seed")
    assert chosen == choose(mutants_of("m", SOURCE), 12, "seed")
    assert chosen != choose(mutants, 12, "another seed")
    assert len(set(map(str, chosen))) == 12
    assert {m.operator for m in chosen} == {m.operator for m in mutants}
    assert len(choose(mutants, 1000, "seed")) == len(mutants)
