"""Files of a prepared checkpoint that were edited, removed or added: what takes notice, and how.

`docs/format.md` has the table; each of its rows is tried here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import FIXTURES
from quark_factory import write_checkpoint
from test_convert import LINEARS, converted, files_of

from mxfp4prep import cli
from mxfp4prep.errors import InvalidCheckpoint, Mxfp4PrepError
from mxfp4prep.integrations.vllm.stored import open_stored
from mxfp4prep.runtime.opening import open_for_serving

PAGE = (Path(__file__).parent.parent / "docs/format.md").read_text("utf-8")
SECTION = PAGE.partition("\n## Changing files afterwards\n")[2]
ROWS = {
    what: tuple(cells)
    for what, *cells in (
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in re.findall(r"^\| .*$", SECTION, re.MULTILINE)[2:]
    )
}
SHARD = "model-00001-of-00002.safetensors"


def setting(root: Path) -> None:
    config = json.loads((root / "config.json").read_text())
    config["max_position_embeddings"] = 12345
    (root / "config.json").write_text(json.dumps(config, indent=2))


def mark(root: Path) -> None:
    text = (root / "config.json").read_text()
    (root / "config.json").write_text(text.replace('"mxfp4prep"', '"other"', 1))


def a_byte(root: Path) -> None:
    raw = bytearray((root / SHARD).read_bytes())
    raw[-1] ^= 1
    (root / SHARD).write_bytes(raw)


def manifest(root: Path) -> None:
    path = root / "mxfp4prep.json"
    path.write_text(path.read_text().replace('"tp":[1]', '"tp":[1,2]'))


def more(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / name).open("a") as file:
            file.write("\n")

    return change


CHANGES: dict[str, list[Callable[[Path], object]]] = {
    "a setting in `config.json`": [setting, more("config.json")],
    "`quant_method` in `config.json`": [mark],
    "`generation_config.json`, tokenizer, chat template, README": [
        more("generation_config.json"),
        more("tokenizer/tokenizer.json"),
        more("chat_template.jinja"),
        more("README.md"),
    ],
    "one of these is removed": [lambda root: (root / "chat_template.jinja").unlink()],
    "a file is added": [more("note.txt")],
    "an original in `source/`": [more("source/config.json")],
    "a shard's bytes": [a_byte],
    "a shard is removed": [lambda root: (root / SHARD).unlink()],
    "the digests": [
        more("mxfp4prep.digests.json"),
        lambda root: (root / "mxfp4prep.digests.json").unlink(),
    ],
    "a decision in the manifest": [manifest],
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("changed")
    names = ("generation_config.json", "tokenizer/tokenizer.json", "chat_template.jinja")
    side = dict.fromkeys((*names, "README.md"), b"{}")
    source = write_checkpoint(base / "m", LINEARS, shards=2, side_files=side)
    converted(source, base / "m-mxfp4prep")
    return base


@pytest.fixture
def prepared(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in the current directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pristine / "m-mxfp4prep", "p")
    return Path("p")


def taken_or_refused(open_it: Callable[[], object]) -> str:
    try:
        open_it()
    except Mxfp4PrepError:
        return "refused"
    return "taken"


def ended(*words: str) -> str:
    code = cli.main([*words, "--no-progress"])
    return f"exit {code}" if code else "taken"


def found(root: Path) -> tuple[str, ...]:
    """A row of the table, as it is."""
    return (
        ended("verify", str(root)),
        ended("restore", str(root), "again"),
        taken_or_refused(lambda: open_for_serving(root, verify=False)),
        taken_or_refused(lambda: open_for_serving(root, verify=True)),
    )


def test_the_table_names_what_is_tried_here() -> None:
    assert ROWS.keys() == CHANGES.keys()


def test_untouched_all_take_it(prepared: Path) -> None:
    assert found(prepared) == ("taken",) * 4


@pytest.mark.parametrize(
    ("row", "change"), [(row, change) for row, changes in CHANGES.items() for change in changes]
)
def test_each_row_of_the_table_is_so(
    prepared: Path, pristine: Path, row: str, change: Callable[[Path], object]
) -> None:
    before = files_of(prepared)
    change(prepared)
    assert files_of(prepared) != before
    assert found(prepared) == ROWS[row]
    vllm = taken_or_refused(lambda: open_stored(prepared, lambda name: name))
    assert vllm == ROWS[row][3]
    if ROWS[row][1] == "taken":
        assert files_of(Path("again")) == files_of(pristine / "m")
    else:
        assert not Path("again").exists()


def test_who_edits_the_config_is_told_of_the_ways_to_a_setting(prepared: Path) -> None:
    setting(prepared)
    with pytest.raises(Mxfp4PrepError, match=r"config\.json: not the one") as caught:
        open_for_serving(prepared, verify=True)
    assert re.search("verify.*--hf-overrides.*convert again", caught.value.hint or "")


def test_overwrite_replaces_edited_files(pristine: Path, prepared: Path) -> None:
    setting(prepared)
    words = ["convert", str(pristine / "m"), str(prepared), "--overwrite", "--no-progress"]
    assert cli.main(words) == 0
    assert files_of(prepared) == files_of(pristine / "m-mxfp4prep")


# --- what is missing ------------------------------------------------------------------------------

LACKING = "error: {}: the manifest lists it, but it is not there\nin: p\nhint: "


@pytest.mark.parametrize(
    "name", [SHARD, "README.md", "source/config.json", "model.safetensors.index.json"]
)
def test_a_restore_of_what_is_not_whole_is_refused_before_it_writes(
    prepared: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (prepared / name).unlink()

    def staged(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("mxfp4prep.restore.staged", staged)
    assert cli.main(["restore", "p", "again", "--no-progress"]) == 3
    assert capsys.readouterr().err.startswith(LACKING.format(name))


def test_a_changed_small_file_shows_before_the_shards_are_written(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewrite(*_: object, **__: object) -> None:
        raise AssertionError

    more("README.md")(prepared)
    monkeypatch.setattr("mxfp4prep.restore.rewrite", rewrite)
    assert cli.main(["restore", "p", "again", "--no-progress"]) == 1


@pytest.mark.parametrize(
    "name", ["source/config.json", "model.safetensors.index.json", "README.md", SHARD]
)
def test_verify_says_a_missing_file_once(
    prepared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (prepared / name).unlink()
    assert cli.main(["verify", "p", "--format", "json", "--no-progress"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert problems == [{"file": name, "tensor": None, "what": "is missing"}]


def test_a_loader_says_that_a_shard_is_not_there(prepared: Path) -> None:
    (prepared / SHARD).unlink()
    with pytest.raises(InvalidCheckpoint, match=f"^{SHARD}: the manifest lists it, but"):
        open_for_serving(prepared, verify=False)


# --- which directory ------------------------------------------------------------------------------


def test_verify_names_the_directory_that_was_given(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "p", "--quick"]) == 0
    assert capsys.readouterr().out.startswith("p: quick: ")
    assert cli.main(["verify", "p", "--quick", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "m"  # the source's, as ever


def test_selfcheck_names_the_directory_that_was_given(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["selfcheck", "p", "--layers", "*.0.mlp.down_proj", "--m", "1", "--no-progress"]
    cli.main(words)  # random scales: some are NaN
    assert capsys.readouterr().out.startswith("p on cpu\n")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "m"],
        ["convert", "m", "out"],
        ["convert", "./m/", "out", "--dry-run"],
        ["diff", "good", "m", "--tp", "1"],
        ["restore", "m", "out"],
        ["selfcheck", "m"],
    ],
    ids=" ".join,
)
def test_an_error_about_a_file_says_in_which_directory(
    pristine: Path, prepared: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the directory's name is the beginning of the file's."""
    of = "m-mxfp4prep" if words[0] in ("restore", "selfcheck") else "m"
    shutil.copytree(pristine / of, "m")
    shutil.copytree(pristine / "m", "good")
    cut(Path("m") / SHARD)
    assert cli.main(words) == 3
    lines = capsys.readouterr().err.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"error: {SHARD}: truncated"))
    assert lines[at + 1] == "in: m"
    assert lines[at + 2].startswith("hint: ")


@pytest.mark.parametrize(
    "words",
    [
        ["restore", "p", "p"],
        ["restore", "nope", "out"],
        ["convert", "m", "m/out"],
        ["audit", "m", "--tp", "0"],
        ["convert", "m", "out", "--keep", "no.such.layer"],
    ],
    ids=" ".join,
)
def test_what_says_its_place_itself_has_no_such_line(
    pristine: Path, prepared: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pristine / "m", "m")
    assert cli.main(words) > 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "\nin: " not in err


@pytest.mark.parametrize("verb", ["audit", "convert"])
def test_an_error_about_a_layer_says_in_which_directory(
    prepared: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that shows only once the checkpoint is open."""
    shutil.copytree(FIXTURES / "lookalike-nvfp4", "m")
    assert cli.main([verb, "m"]) == 4
    assert capsys.readouterr().err.splitlines()[1] == "in: m"
