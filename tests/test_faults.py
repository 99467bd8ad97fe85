"""The k-th call of each file operation fails, for every k: nothing is lost, a rerun is the same."""

from __future__ import annotations

import contextlib
import io as text_io
import shutil
import tempfile
from pathlib import Path

import pytest
from attacks.faults import SCENARIOS, World, attack, die_everywhere
from attacks.faulty_disk import (
    ANY,
    ERRNOS,
    EXCEPTIONS,
    OPERATIONS,
    Fault,
    FaultyDisk,
    fast_folder,
    on_disk,
    tree,
)

from mxfp4prep import cli

pytestmark = pytest.mark.timeout(300)

FEW = {"stat": ("EIO",), "close": ("EIO",)}
"""Errors of operations that are called often; `python tests/attacks/faults.py` tries them all."""


@pytest.fixture(scope="module")
def world():
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-faults-", dir=fast_folder()) as folder:
        yield World(Path(folder))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_failure_of_a_conversion_leaves_nothing_and_the_rerun_is_the_same(
    world, tried, operation
):
    count = attack(world, SCENARIOS["convert"], operation, FEW.get(operation), every=False)
    if operation in ("chmod", "exchange", "unlink", "rmdir"):
        assert count == 0  # which a plain conversion has no need of
    else:
        tried("F1", count)


NAMES = ("rename", "exchange")
"""Operations after which there is another output. The others fail in one of the ways, which goes
by scenario and operation: what differs is what was done before, not what the failure says."""

OTHERS = [
    (name, operation)
    for name in SCENARIOS
    for operation in OPERATIONS
    if name not in ("convert", "renames")
    and (operation not in FEW or name in ("overwrite", "resume"))
    and (operation != "exchange" or name == "overwrite")
] + [("renames", "rename")]


@pytest.mark.parametrize(("name", "operation"), OTHERS)
def test_any_failure_of_the_other_ways_of_writing(world, tried, name, operation):
    kinds = (*ERRNOS, *EXCEPTIONS)
    turn = list(SCENARIOS).index(name) + OPERATIONS.index(operation)
    errors = ("EIO", "KeyboardInterrupt") if operation in NAMES else (kinds[turn % len(kinds)],)
    count = attack(world, SCENARIOS[name], operation, errors, every=False)
    if count:
        tried("F1", count)
    elif operation not in ("chmod", "unlink", "rmdir"):
        pytest.fail(f"{name} never calls {operation}")


def test_every_operation_is_made_to_fail_somewhere(world):
    seen = set()
    for scenario in SCENARIOS.values():
        world.empty()
        scenario.begin(world)
        with on_disk(FaultyDisk()) as disk:
            scenario.run(world)
        seen |= set(disk.counts) - {ANY}
    assert seen == set(OPERATIONS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_has_been_done_when_the_process_dies_one_can_go_on_from_there(world, tried, name):
    """The state after each prefix of the run's operations; all finished shards are taken over."""
    tried("F3", die_everywhere(world, SCENARIOS[name], 1 if name == "convert" else 4))


@pytest.mark.parametrize("error", [*ERRNOS, *EXCEPTIONS])
@pytest.mark.parametrize(
    "operation", [o for o in OPERATIONS if o not in ("exchange", "unlink", "rmdir")]
)
def test_the_command_says_what_failed_where_and_what_to_do(world, tried, operation, error):
    with contextlib.redirect_stdout(text_io.StringIO()):
        count = sum(_command(world, Fault(operation, call, error)) for call in (1,))
    if count:
        tried("F1", count)
    else:
        assert operation == "chmod"


def _command(world: World, fault: Fault) -> bool:
    world.empty()
    words = ["convert", str(world.source), str(world.out), "-q", "--workers", "1"]
    with on_disk(FaultyDisk(fault)) as disk, contextlib.redirect_stderr(text_io.StringIO()) as told:
        code = cli.main(words)
    if not disk.fired:
        return False
    lines = told.getvalue().splitlines()
    if fault.error == "KeyboardInterrupt":
        assert (code, lines) == (130, ["interrupted"])
    else:
        assert code == 6, lines
        assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert world.left() == []
    assert not world.out.exists()
    assert tree(world.source) == world.original
    return True


def test_a_failure_with_resume_says_how_to_go_on(world):
    world.empty()
    words = ["convert", str(world.source), str(world.out), "--no-progress", "--workers", "1"]
    with (
        on_disk(FaultyDisk(Fault("create", 3, "ENOSPC"))),
        contextlib.redirect_stderr(text_io.StringIO()) as told,
    ):
        assert cli.main([*words, "--resume"]) == 6
    [nothing, note, error, hint] = told.getvalue().splitlines()
    assert nothing.endswith(": this one starts from the beginning")
    [kept] = world.left()
    assert note.startswith(f"note: kept for --resume: 2 finished files in {kept};")
    assert "the disk is full" in error
    assert hint.startswith("hint: free some space")
    with contextlib.redirect_stdout(text_io.StringIO()) as said:
        assert cli.main([*words, "--resume"]) == 0
    assert "every byte compared: 2 shards" in " ".join(said.getvalue().split())
    assert tree(world.out) == world.fresh
    assert world.left() == []


def test_without_resume_a_failure_leaves_nothing_and_a_rerun_sweeps(world):
    world.empty()
    shutil.copytree(world.dead_stage(), world.place / "copy")
    shutil.rmtree(world.place / "copy")
    assert len(world.left()) == 1
    with contextlib.redirect_stdout(text_io.StringIO()):
        assert cli.main(["convert", str(world.source), str(world.out), "-q"]) == 0
    assert world.left() == []
    assert tree(world.out) == world.fresh
