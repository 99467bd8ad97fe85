"""The reports: fit, escape, count and agree with the contract of the JSON."""

from __future__ import annotations

import io
import json
import re
import threading
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from quark_factory import model_config, write_checkpoint

from mxfp4prep import schemas
from mxfp4prep.alignment import HAZARDS, REASONS, Verdict
from mxfp4prep.auditing import audit_checkpoint
from mxfp4prep.checkpoint import Checkpoint, open_checkpoint
from mxfp4prep.decisions import decide
from mxfp4prep.findings import Finding
from mxfp4prep.report import payload
from mxfp4prep.report.audit_document import audit_document
from mxfp4prep.report.audit_text import audit_text, legend
from mxfp4prep.report.families import gather, spell_runs
from mxfp4prep.report.joining import merge_siblings
from mxfp4prep.report.outcome_text import selfcheck_text, verify_text
from mxfp4prep.report.progress import Count, progress
from mxfp4prep.report.screen import Row, Screen, cells, human, screen_of
from mxfp4prep.report.stored_text import Stored, stored_table
from mxfp4prep.report.tally import ASM_ONLY, POSSIBLE, degrees_of
from mxfp4prep.safefile import TensorEntry
from mxfp4prep.schemas.__main__ import generate
from mxfp4prep.survey import survey
from mxfp4prep.verify import ADDED, Problem, VerifyReport

ESC = "\x1b"


def strict(schema: Any) -> Any:
    """The schema with every object closed: a key that it does not name is an error."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed["additionalProperties"] = False
    return closed


def validate(document: Any, name: str) -> None:
    """Raises unless `document` is what the shipped schema `name` says, and nothing more."""
    schema = strict(json.loads(schemas.read(name)))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, jsonschema.Draft202012Validator)


# --- families -----------------------------------------------------------------------------------


def test_names_that_differ_in_numbers_are_one_family() -> None:
    names = [f"model.layers.{i}.mlp.experts.{j}.w2" for i in range(94) for j in range(128)]
    (family,) = gather((name, None, name) for name in names)
    assert family.name == "model.layers.{0..93}.mlp.experts.{0..127}.w2"
    assert (family.count, family.first) == (94 * 128, names[0])


def test_keys_part_families_and_order_is_kept() -> None:
    items = [("b.0", "x", 0), ("a.0", "x", 1), ("b.1", "y", 2), ("b.2", "x", 3), ("b.x", "x", 4)]
    assert [(f.name, f.count) for f in gather(items)] == [
        ("b.{0,2}", 2),
        ("a.0", 1),
        ("b.1", 1),
        ("b.x", 1),
    ]


@pytest.mark.parametrize(
    "name", ["w2.x", "layer07.x", "a.07.b", "a.1e3", "a.-1", "", "a.²", "a.٣.b"]
)
def test_only_whole_plain_numbers_are_folded(name: str) -> None:
    (family,) = gather([(name, 0, 0)])
    assert (family.name, family.numbers) == (name, ())


@given(st.lists(st.from_regex(r"(a|b|[0-9]{1,3})(\.(a|b|[0-9]{1,3})){0,3}", fullmatch=True)))
def test_every_name_is_in_the_family_that_stands_for_it(names: list[str]) -> None:
    families = gather((name, 0, name) for name in names)
    assert sum(family.count for family in families) == len(names)
    numbers = re.compile(r"(?:^|(?<=\.))(?:0|[1-9][0-9]*)(?=\.|$)")
    assert Counter(numbers.sub("#", f.first) for f in families) == Counter(
        {numbers.sub("#", name) for name in names}
    )
    for family in families:
        alike = [n for n in names if numbers.sub("#", n) == numbers.sub("#", family.first)]
        for position, seen in enumerate(family.numbers):
            assert set(seen) == {numbers.findall(name)[position] for name in alike}


@pytest.mark.parametrize(
    ("numbers", "spelled"),
    [
        ([3], "3"),
        ([1, 0], "{0,1}"),
        ([2, 0, 1], "{0..2}"),
        ([0, 1, 2, 5], "{0..2,5}"),
        ([0, 2, 4, 6], "{0,2,4,6}"),
        (list(range(0, 20, 2)), "{0,2,4,...,18}"),
        ([10, 9, 2], "{2,9,10}"),
    ],
)
def test_runs(numbers: list[int], spelled: str) -> None:
    assert spell_runs(numbers) == spelled


# --- screen -------------------------------------------------------------------------------------


def displayed(text: str) -> int:
    """Terminal cells by Unicode's own table: wide and full-width take two, marks none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


@settings(max_examples=200)
@given(
    st.text(st.sampled_from("ab .,/_-0{}[]\u6f22\u5b57") | st.sampled_from("xyz"), max_size=300),
    st.integers(24, 90),
)
def test_wrapped_lines_fit_and_lose_nothing(text: str, columns: int) -> None:
    lines = Screen(columns=columns).wrap(text, "note: ", "  ")
    assert all(displayed(line) <= columns for line in lines)
    joined = "".join(lines).replace(" ", "")
    assert joined == ("note:" + text).replace(" ", "")


def test_prose_breaks_at_spaces_while_words_fit() -> None:
    lines = Screen(columns=24).wrap("per-layer model.layers.0.mlp and more words")
    assert lines == ["per-layer", "model.layers.0.mlp and", "more words"]


HEAD = ("layer", "layers", "tp 1", "tp 2")
ROWS = [
    Row(
        ("model.layers.{0..93}.mlp.experts.{0..127}.down_proj", "12,032", "asm", "IMPOSSIBLE"),
        ("why",),
    ),
    Row(("漢字.漢字", "1", "triton", "asm")),
]


@pytest.mark.parametrize("columns", [24, 40, 60, 80, 120])
def test_tables_fit_and_keep_every_cell(columns: int) -> None:
    lines = Screen(columns=columns).table(HEAD, ROWS, right=(1,))
    assert all(displayed(line) <= columns for line in lines)
    text = "".join("".join(lines).split())
    for row in ROWS:
        for cell in (*row.cells, *row.notes):
            assert cell.replace(" ", "") in text


def test_wide_tables_align_columns() -> None:
    lines = Screen(columns=120).table(HEAD, ROWS, right=(1,))
    assert len(lines) == 4
    starts = {
        displayed(line[: line.index(word)])
        for line, word in zip(
            (lines[0], lines[1], lines[3]), ("tp 1", "asm", "triton"), strict=True
        )
    }
    assert len(starts) == 1


def test_narrow_tables_say_which_column_a_cell_is_of() -> None:
    head = (*HEAD, "tp 4")
    lines = Screen(columns=24).table(head, [Row((*ROWS[1].cells, "IMPOSSIBLE"))])
    facts = " ".join(" ".join(lines[2:]).split())
    assert facts == "layers 1, tp 1 triton, tp 2 asm, tp 4 IMPOSSIBLE"


def test_colours_only_where_asked_for() -> None:
    plain = "\n".join(Screen().table(HEAD, ROWS))
    painted = "\n".join(Screen(colour=True).table(HEAD, ROWS))
    assert ESC not in plain
    assert f"{ESC}[31;1mIMPOSSIBLE" in painted
    assert re.sub(rf"{ESC}\[[0-9;]*m", "", painted).split() == plain.split()


@pytest.mark.parametrize(
    ("encoding", "name", "shown"),
    [
        ("utf-8", "漢[bold]é", "漢[bold]é"),
        ("ascii", "漢[bold]é", r"\u6f22[bold]\xe9"),
        ("latin-1", "漢é", r"\u6f22é"),
        ("utf-8", "a\x1b[31mb\n\u202ec\x00", r"a\x1b[31mb\n\u202ec\x00"),
        ("utf-8", "\udcff", r"\udcff"),
    ],
)
def test_names_are_escaped_for_the_screen(encoding: str, name: str, shown: str) -> None:
    assert Screen(encoding=encoding).name(name) == shown


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("tty", "environ", "colour"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_when_there_are_colours(tty: bool, environ: dict[str, str], colour: bool) -> None:
    stream = _Tty() if tty else io.StringIO()
    assert screen_of(stream, environ).colour is colour


def test_files_have_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert screen_of(io.StringIO(), {}).columns == 80
    assert screen_of(io.StringIO(), {"COLUMNS": "40"}).columns == 40
    monkeypatch.setenv("COLUMNS", "3")
    assert screen_of(io.StringIO(), {"COLUMNS": "3"}).columns == 24


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_340_000, "12.3 MB"),
        (312_600_000, "313 MB"),
        (999_600_000, "1.0 GB"),
        (5 << 30, "5.4 GB"),
        (3_000_000_000_000_000_000, "3000 PB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


def test_cells_of_wide_characters() -> None:
    assert (cells("abc"), cells("漢字a")) == (3, 5)


# --- progress -----------------------------------------------------------------------------------


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_come_in_steps_of_ten_percent_but_not_all_at_once() -> None:
    clock, stream = _Clock(), io.StringIO()
    with progress("converting", 1000, stream, live=False, clock=clock) as advance:
        for _ in range(100):
            clock.now += 0.25
            advance(10)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "converting: 10 % (100 B of 1.0 kB, 40 B/s, 22 s left)"
    assert lines[-1].startswith("converting: 100 %")


def test_fast_work_says_nothing_and_slow_work_something() -> None:
    clock, stream = _Clock(), io.StringIO()
    with progress("x", 1000, stream, live=False, clock=clock) as advance:
        for _ in range(100):
            advance(10)
    assert stream.getvalue() == ""
    with progress("x", 10**9, stream, live=False, clock=clock) as advance:
        for _ in range(25):
            clock.now += 1
            advance(1)
    assert len(stream.getvalue().splitlines()) == 2


def test_progress_never_passes_the_whole_nor_divides_by_it() -> None:
    clock, stream = _Clock(), io.StringIO()
    for total, done in ((100, 250), (0, 7)):
        with progress("x", total, stream, live=False, clock=clock) as advance:
            clock.now += 60
            advance(done)
    assert stream.getvalue().splitlines() == [
        "x: 100 % (100 B of 100 B, 1 B/s, 0 s left)",
        "x: 0 % (0 B of 0 B, 0 B/s, 0 s left)",
    ]


def test_progress_counts_every_thread() -> None:
    clock, stream = _Clock(), io.StringIO()
    with progress("x", 8000, stream, live=False, clock=clock) as advance:
        threads = [
            threading.Thread(target=lambda: [advance(1) for _ in range(1000)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.now += 60
        advance(0)
    assert stream.getvalue().startswith("x: 100 %")


def test_progress_that_nobody_hears_stops_no_work() -> None:
    class Broken(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    clock, stream = _Clock(), Broken()
    with progress("x", 100, stream, live=False, clock=clock) as advance:
        for _ in range(3):
            clock.now += 60
            advance(20)
    assert stream.writes == 1


def test_counts_come_now_and_then() -> None:
    clock, told = _Clock(), []
    count = Count("headers", told.append, clock)
    for done in range(1, 6):
        clock.now += 0.4
        count.advance(done, 1200)
    assert told == ["headers: 3 of 1,200"]
    clock.now += 0.6
    count.advance(6, 1200)
    assert told == ["headers: 3 of 1,200", "headers: 6 of 1,200"]


# --- audit --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def misaligned(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    linears = {}
    for i in range(3):
        prefix = f"model.layers.{i}"
        linears |= {
            f"{prefix}.self_attn.q_proj": (512, 512),
            f"{prefix}.self_attn.k_proj": (128, 512),
            f"{prefix}.self_attn.v_proj": (128, 512),
            f"{prefix}.mlp.gate_proj": (640, 512),
            f"{prefix}.mlp.up_proj": (640, 512),
            f"{prefix}.mlp.down_proj": (512, 640),
        }
    root = tmp_path_factory.mktemp("audit") / "mis[bold]aligned"
    return open_checkpoint(write_checkpoint(root, linears, shards=2))


def text_of(checkpoint: Checkpoint, tp: tuple[int, ...] = (1, 2, 4, 8), **screen: Any) -> str:
    return "\n".join(audit_text(audit_checkpoint(checkpoint, tp), Screen(**screen), "MODEL"))


def test_audit_has_one_row_per_template_with_verdicts_and_arithmetic(
    misaligned: Checkpoint,
) -> None:
    lines = text_of(misaligned).splitlines()
    row = lines.index("model.layers.{0..2}.mlp.down_proj")
    assert lines[row + 1].split() == [
        "3",
        "512x640",
        "w4a4",
        "triton",
        "triton",
        "triton",
        "IMPOSSIBLE",
    ]
    assert lines[row + 2].strip() == "tp 1, 2, 4: scale_cols (20, 10, 5 columns % 8 = 4, 2, 5)"
    assert lines[row + 3].strip() == (
        "tp 8: split_groups (no whole 32-groups: 640 / 8 = 80 columns = 2.5 groups)"
    )
    row = lines.index("model.layers.{0..2}.mlp.{gate_proj,up_proj}")
    assert lines[row + 1].split() == ["6", "640x512", "w4a4", "asm", "asm", "asm", "triton"]
    assert lines[row + 2].strip() == "tp 8: scale_rows (80 rows % 32 = 16)"


def test_audit_explains_each_code_that_occurs_and_no_other(misaligned: Checkpoint) -> None:
    lines = text_of(misaligned, columns=120).splitlines()
    start = lines.index("reasons") + 1
    codes: dict[str, str] = {}
    code = ""
    for line in lines[start:]:
        if not line.startswith("  "):
            break
        if line[2] == " ":
            codes[code] += " " + line.strip()
        else:
            code, _, words = line.strip().partition("  ")
            codes[code] = words.strip()
    every = REASONS | HAZARDS
    used = set(re.findall(rf"\b(?:{'|'.join(every)})\b", "\n".join(lines[:start])))
    assert codes == {code: every[code] for code in used}
    assert "scale_cols" in used


def test_audit_ends_with_a_command(misaligned: Checkpoint, tmp_path: Path) -> None:
    # all but down_proj are asm at 1, 2 and 4 alike, and 8 is impossible
    assert text_of(misaligned).splitlines()[-1] == "next: mxfp4prep convert MODEL --tp 4"
    assert "Do not serve at tp 8:" in " ".join(text_of(misaligned).split())
    good = open_checkpoint(
        write_checkpoint(tmp_path / "good", {"model.layers.0.mlp.down_proj": (512, 2048)})
    )
    lines = text_of(good).splitlines()
    assert lines[-1] == "next: mxfp4prep convert MODEL --tp 8"
    assert "Serve at tp 8: every MXFP4 layer takes the ASM path there" in " ".join(lines)
    assert text_of(misaligned, (8,)).splitlines()[-1] == "next: mxfp4prep audit MODEL --tp 1"


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("tp", [(1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 16, 32, 64)])
@pytest.mark.parametrize(
    "name",
    ["qwen2moe-w4a4-shared-expert", "llama-mixed-fp8attn-kvfp8", "qwen2-w4a4-misaligned-tied"],
)
def test_audit_of_real_checkpoints_fits(name: str, tp: tuple[int, ...], columns: int) -> None:
    text = text_of(open_checkpoint(FIXTURES / name), tp, columns=columns)
    wide = [line for line in text.splitlines() if displayed(line) > columns]
    assert [line for line in wide if not line.startswith("next: ")] == []
    assert text.isascii()


def test_hostile_names_reach_the_screen_escaped(tmp_path: Path) -> None:
    names = [
        "model.\x1b[31mred",
        "model.\u202eevil",
        "model.[bold]b[/bold]",
        "model.new\nline",
        "m.漢字",
    ]
    root = write_checkpoint(tmp_path / "hostile\u202e", dict.fromkeys(names, (256, 256)))
    text = text_of(open_checkpoint(root), encoding="ascii")
    assert text.isascii()
    assert all(c.isprintable() or c == "\n" for c in text)
    for shown in (
        r"\x1b[31mred",
        r"\u202eevil",
        "[bold]b[/bold]",
        r"new\nline",
        r"\u6f22\u5b57",
        r"hostile\u202e",
    ):
        assert shown in text


def test_a_hazard_of_the_asm_path_is_not_told_of_a_group_that_takes_the_other(
    tmp_path: Path,
) -> None:
    # 96 + 32 rows are 128, asm by themselves with few rows; but 96 alone is the bad tile
    at = "model.layers.0.mlp"
    linears = {f"{at}.gate_proj": (96, 512), f"{at}.up_proj": (32, 512)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", linears))
    assert survey(checkpoint, (1,)).groups[0].verdicts[1].hazards == ("small_n",)
    text = text_of(checkpoint, (1,))
    assert "group_part" in text
    assert "small_n" not in text


def test_codes_that_a_file_made_up_are_escaped() -> None:
    lines = legend(["scale_cols", "\x1b[31mq"], ["\u202eh"], Screen())
    assert [line for line in lines if not line.isprintable()] == []
    assert any(r"\x1b[31mq" in line for line in lines)
    assert any(r"\u202eh" in line for line in lines)


def test_parts_of_different_schemes_are_marked(tmp_path: Path) -> None:
    extra = {"model.layers.0.mlp.up_proj.weight": torch.zeros(256, 256, dtype=torch.bfloat16)}
    linears = {"model.layers.0.mlp.gate_proj": (256, 256)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "mixed", linears, extra=extra))
    text = text_of(checkpoint, columns=120)
    assert f"  mixed_group  {REASONS['mixed_group']}" in text.splitlines()
    assert "[mixed_group]" in text  # the finding
    found = survey(checkpoint)
    decisions = decide(found)
    for tp in found.tp:
        assert {name: made[tp] for name, made in decisions.items()} == found.decided(tp)
    assert decisions["model.layers.0.mlp.gate_proj"][1].path == "asm"  # nobody joins it
    (group,) = audit_document(audit_checkpoint(checkpoint))["groups"]
    assert (group["mixed"], group["members"]) == (True, ["model.layers.0.mlp.gate_proj"])


def test_siblings_merge_only_when_all_is_the_same() -> None:
    rows = [
        ("a.x", 2, ("c",), ()),
        ("a.y", 2, ("c",), ()),
        ("a.z", 2, ("d",), ()),
        ("b.x", 2, ("c",), ()),
        ("a.w", 3, ("c",), ()),
        ("a.v", 2, ("c",), ("why",)),
        ("top", 1, ("c",), ()),
        ("a.blocks.{0..3}", 4, ("c",), ()),
        ("a.blocks.{4..7}", 4, ("c",), ()),
    ]
    merged = merge_siblings(rows, Screen())
    assert [row.cells[:2] for row in merged] == [
        ("a.{x,y}", "4"),
        ("a.z", "2"),
        ("b.x", "2"),
        ("a.w", "3"),
        ("a.v", "2"),
        ("top", "1"),
        ("a.blocks.{{0..3},{4..7}}", "8"),
    ]


def test_decisions_are_the_surveys(mxfp4_fixture: Path) -> None:
    found = survey(open_checkpoint(mxfp4_fixture), (1, 2, 3, 4))
    decisions = decide(found)
    for tp in found.tp:
        assert {name: verdicts[tp] for name, verdicts in decisions.items()} == found.decided(tp)


def test_degrees() -> None:
    asm, triton, no = (Verdict(path, None) for path in ("asm", "triton", "impossible"))
    decisions = {"a": {1: asm, 2: asm, 4: triton}, "b": {1: asm, 2: triton, 4: no}}
    assert degrees_of(decisions, (1, 2, 4), ASM_ONLY) == [1]
    assert degrees_of(decisions, (1, 2, 4), POSSIBLE) == [1, 2]


# --- JSON ---------------------------------------------------------------------------------------

LAYER_KEYS = {"name", "kind", "parallel", "group", "scheme", "n", "k", "scale_shape", "verdict"}


def test_audit_json_is_the_contract(misaligned: Checkpoint) -> None:
    made = audit_document(audit_checkpoint(misaligned, (1, 2, 8)))
    document = json.loads(payload.dumps(made))
    validate(document, "audit")
    assert set(document) == {
        "schema_version", "source", "rule", "tp", "deployment", "layers", "others", "patterns",
        "groups",
        "shared_experts", "cost", "engine", "values", "findings", "summary",
    }  # fmt: skip
    assert (document["schema_version"], document["tp"]) == (1, [1, 2, 8])
    layers = {layer["name"]: layer for layer in document["layers"]}
    down = layers["model.layers.0.mlp.down_proj"]
    assert down.keys() >= LAYER_KEYS
    assert {key: down[key] for key in LAYER_KEYS - {"verdict"}} == {
        "name": "model.layers.0.mlp.down_proj",
        "kind": "linear",
        "parallel": "row",
        "group": None,
        "scheme": "w4a4",
        "n": 512,
        "k": 640,
        "scale_shape": [512, 20],
    }
    assert down["verdict"]["1"] == {
        "path": "triton", "scale_shard": [512, 20], "reasons": ["scale_cols"], "hazards": [],
    }  # fmt: skip
    assert down["verdict"]["8"]["path"] == "impossible"
    assert down["verdict"]["8"]["scale_shard"] is None
    assert "2.5 groups" in down["verdict"]["8"]["detail"]
    groups = {group["name"]: group for group in document["groups"]}
    gate_up = groups["model.layers.0.mlp.gate_up_proj"]
    assert gate_up["members"] == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    assert gate_up["mixed"] is False
    assert gate_up["verdict"]["8"]["scale_shard"] == [160, 16]
    assert layers["model.layers.0.mlp.gate_proj"]["group"] == "model.layers.0.mlp.gate_up_proj"


def test_audit_json_counts_every_byte(mxfp4_fixture: Path) -> None:
    checkpoint = open_checkpoint(mxfp4_fixture)
    document = json.loads(payload.dumps(audit_document(audit_checkpoint(checkpoint))))
    validate(document, "audit")
    summary, source = document["summary"], document["source"]
    on_disk = sum(shard.header.file_nbytes - shard.header.data_start for shard in checkpoint.shards)
    assert source["nbytes"] == summary["mxfp4_nbytes"] + summary["copied_nbytes"] == on_disk
    for tp, paths in summary["tp"].items():
        assert sum(share["nbytes"] for share in paths.values()) == summary["mxfp4_nbytes"]
        assert sum(share["layers"] for share in paths.values()) == len(document["layers"])
        for path, share in paths.items():
            members = [layer for layer in document["layers"] if layer["decided"][tp] == path]
            assert share == {"layers": len(members), "nbytes": sum(m["nbytes"] for m in members)}
    assert summary["possible_tp"] == [
        int(tp) for tp, paths in summary["tp"].items() if not paths["impossible"]["layers"]
    ]
    assert sum(summary["findings"].values()) == len(document["findings"])


def test_a_layer_keeps_its_own_verdict_beside_what_its_whole_decides() -> None:
    # Two key heads are repeated over eight ranks, but the four query heads beside them cannot be.
    audit = audit_checkpoint(open_checkpoint(FIXTURES / "qwen2moe-w4a4-shared-expert"), (8,))
    document = audit_document(audit)
    layers = {layer["name"]: layer for layer in document["layers"]}
    k_proj = layers["model.layers.0.self_attn.k_proj"]
    assert (k_proj["verdict"]["8"]["path"], k_proj["decided"]["8"]) == ("triton", "impossible")
    lines = audit_text(audit, Screen(columns=120), "MODEL")
    row = next(i for i, line in enumerate(lines) if "{k_proj,v_proj}" in line)
    assert lines[row].split()[-1] == "IMPOSSIBLE"
    assert lines[row + 1].strip().startswith("tp 8: joined in qkv_proj, split_rows (4 heads of")


def test_json_of_records_is_what_json_reads_back() -> None:
    both = {"path": "asm"}
    rows = [
        {"name": "a", "made": both, "n": 1, "other": {}},
        {"name": "b", "n": 2, "made": both},
        {"made": None, "name": "c", "late": {"x": [1, {"y": "\u00e9\n"}]}},
        {"made": {"path": "triton"}, "other": both},
        {},
    ]
    document = {"schema_version": 1, "rows": rows, "only": [{"a": {"b": 1}}], "empty": []}
    text = payload.dumps(document)
    assert json.loads(text) == document
    assert text.isascii()


def test_json_has_a_line_per_record_and_no_nan() -> None:
    document = {"schema_version": 1, "layers": [{"name": "a\n\x1b漢"}, {"name": "b"}], "none": []}
    text = payload.dumps(document)
    assert json.loads(text) == document
    assert text.isascii()
    assert '{"name":"b"}' in text.splitlines()
    with pytest.raises(ValueError, match="JSON"):
        payload.dumps({"x": float("nan")})


def test_selfcheck_says_what_is_wrong_and_null_for_nan() -> None:
    rows = [
        SimpleNamespace(layer="a.0", path="asm", backend="torch", m=1, max_abs_error=0.5,
                        max_rel_error=0.25, milliseconds=1.5, ok=True, nan=0),
        SimpleNamespace(layer="a.0", path="asm", backend="torch", m=16, max_abs_error=float("nan"),
                        max_rel_error=float("inf"), milliseconds=2.0, ok=False, nan=3),
    ]  # fmt: skip
    document = json.loads(payload.dumps(payload.selfcheck("model", "cpu", rows)))
    validate(document, "selfcheck")
    assert document["ok"] is False
    assert document["rows"][1]["max_abs_error"] is None
    text = "\n".join(selfcheck_text(document, Screen(), "m"))
    assert "m 1: error 0.5 (25.00%), 1.5 ms" in text
    assert "m 16: error not finite, 2 ms, 3 values NaN by the scale bytes, WRONG" in " ".join(
        text.split()
    )
    assert text.endswith("1 of 2 GEMMs WRONG")


def test_verify_names_each_problem_and_what_was_not_checked() -> None:
    problems = (
        Problem("a.safetensors", "w\x1b", "bytes: found 1, expected 2"),
        Problem("f", None, "is missing"),
    )
    report = VerifyReport("full", "model", 3, 4, 5000, problems, ("the source",))
    document = payload.verify(report)
    validate(json.loads(payload.dumps(document)), "verify")
    lines = verify_text(document, Screen(columns=120), "to/it")
    assert lines == [
        r"error: a.safetensors: w\x1b: bytes: found 1, expected 2",
        "error: f: is missing",
        "to/it: full: 3 files, 4 tensors, 5.0 kB read: NOT what was prepared: 2 problems",
        "hint: copy what is named again from where it is right, or convert the original again; "
        "a change that you want belongs in",
        "the original",
        "not checked: the source",
    ]


@pytest.mark.parametrize(
    ("whats", "start", "end"),
    [
        ([ADDED], "hint: move what was added elsewhere", "hint: move what was added elsewhere"),
        ([ADDED, "is missing"], "hint: copy what is", "; move what was added elsewhere"),
        (["is missing"], "hint: copy what is", "belongs in the original"),
    ],
)
def test_the_way_out_is_that_of_the_problems(whats: list[str], start: str, end: str) -> None:
    problems = tuple(Problem(f"f{n}", None, what) for n, what in enumerate(whats))
    report = VerifyReport("full", "model", 3, 4, 5000, problems, ())
    hint = verify_text(payload.verify(report), Screen(columns=300), "to/it")[-1]
    assert hint.startswith(start)
    assert hint.endswith(end)


def test_stored_table_shows_path_reasons_and_degrees() -> None:
    asm = Stored(
        64,
        256,
        None,
        "w4a4",
        "asm",
        "tile16x16",
        "tile32x8",
        (),
        (),
        (("1", "asm"), ("2", "triton")),
    )
    kept = Stored(64, 256, 4, "w4a4", "triton", "raw", "raw", ("kept",), (), (("1", "asm"),))
    lines = stored_table([("l.0.w", asm), ("l.1.w", asm), ("l.2.w", kept)], Screen(columns=120))
    assert lines[1].split() == [
        "l.{0,1}.w",
        "2",
        "64x256",
        "w4a4",
        "asm",
        "tile16x16",
        "+",
        "tile32x8",
    ]
    assert lines[2].strip() == "asm at tp 1; triton at tp 2"
    assert lines[3].split()[:5] == ["l.2.w", "1", "4x64x256", "w4a4", "kept"]


@pytest.mark.parametrize("document", schemas.DOCUMENTS)
def test_shipped_schemas_are_current(document: str) -> None:
    assert json.loads(schemas.read(document)) == json.loads(generate(document)), (
        "run python -m mxfp4prep.schemas"
    )


def test_findings_carry_code_and_place(misaligned: Checkpoint) -> None:
    findings = (Finding("odd", "error", "here\x1b", "is [odd]"),)
    changed = replace(audit_checkpoint(misaligned), findings=findings)
    text = "\n".join(audit_text(changed, Screen(), "M"))
    assert r"  error: here\x1b: is [odd] [odd]" in text


def test_fifty_thousand_layers_are_reported_in_time() -> None:
    tensors = {}
    for i in range(61):
        for j in range(273):
            for leaf, (n, k) in {
                "w1": (1408, 2048),
                "w3": (1408, 2048),
                "w2": (2048, 1408),
            }.items():
                name = f"model.layers.{i}.mlp.experts.{j}.{leaf}"
                weight = TensorEntry(f"{name}.weight", "U8", (n, k // 2), 0, n * k // 2)
                scale = TensorEntry(f"{name}.weight_scale", "U8", (n, k // 32), 0, n * k // 32)
                tensors |= {weight.name: weight, scale.name: scale}
    checkpoint = Checkpoint(
        root=Path("x"),
        name="x",
        config=model_config(),
        config_bytes=b"{}",
        index_bytes=None,
        index_metadata={},
        indexed={},
        shards=(),
        side_files=(),
        tensors=tensors,
        shard_of={},
        findings=(),
    )
    audit = audit_checkpoint(checkpoint)
    lines = audit_text(audit, Screen(), "MODEL")
    text = payload.dumps(audit_document(audit))
    assert "    33,306  1408x2048  w4a4    asm     asm     asm     triton" in lines
    assert len(lines) < 80
    assert text.count("\n") > 49_000
