"""The audit as CSV: every cell where it belongs, and nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import json
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxfp4prep.auditing import run_audit
from mxfp4prep.report import csv_table
from mxfp4prep.report.audit_document import audit_document
from mxfp4prep.report.csv_table import COLUMNS, csv_lines

HEADER = (
    "layer,kind,parallel,group,scheme,n,k,experts,nbytes,tp,path,own_path,placement,scale_rows,"
    "scale_columns,reasons,hazards,detail,engine_outcome,engine_path,engine_message"
)


def verdict(path: str, shard: list[int] | None, *reasons: str, **more: Any) -> dict[str, Any]:
    return {"path": path, "scale_shard": shard, "reasons": list(reasons), "hazards": [], **more}


def layer(name: str, **changes: Any) -> dict[str, Any]:
    """A layer that is asm at tp 1 and triton at tp 2."""
    return {
        "name": name,
        "kind": "linear",
        "parallel": "row",
        "group": None,
        "scheme": "w4a4",
        "n": 64,
        "k": 512,
        "experts": None,
        "nbytes": 17408,
        "verdict": {
            "1": verdict("asm", [64, 16]),
            "2": verdict("triton", [64, 4], "scale_rows", "scale_cols"),
        },
        "decided": {"1": "asm", "2": "triton"},
        **changes,
    }


def audit(*layers: dict[str, Any], groups: tuple[dict[str, Any], ...] = ()) -> Any:
    return {"tp": [1, 2], "layers": list(layers), "groups": list(groups)}


def text(document: Any) -> str:
    return "".join(csv_lines(document))


def rows(document: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text(document), newline=""), strict=True))


def test_a_row_per_layer_and_degree() -> None:
    bank = layer(
        "e",
        kind="expert",
        parallel="expert",
        experts=4,
        placement={"1": "sliced", "2": "distributed"},
        verdict={
            "1": verdict("asm", [64, 16], hazards=["short_group", "nan_scale"]),
            "2": verdict("impossible", None, "split_cols", detail='3 / 2, "odd"'),
        },
        decided={"1": "asm", "2": "impossible"},
    )
    assert text(audit(layer("a.0"), bank)).split("\n") == [
        HEADER,
        "a.0,linear,row,,w4a4,64,512,,17408,1,asm,asm,sliced,64,16,,,,,,",
        "a.0,linear,row,,w4a4,64,512,,17408,"
        '"2","triton","triton","sliced","64","4","scale_rows;scale_cols","","","","",""',
        "e,expert,expert,,w4a4,64,512,4,17408,"
        '"1","asm","asm","sliced","64","16","","short_group;nan_scale","","","",""',
        "e,expert,expert,,w4a4,64,512,4,17408,"
        '2,impossible,impossible,distributed,,,split_cols,,"3 / 2, ""odd""",,,',
        "",
    ]


def test_the_group_says_why_where_it_decides() -> None:
    asm = {"1": verdict("asm", [64, 16]), "2": verdict("asm", [32, 16])}
    whole = {
        "1": verdict("triton", [96, 16], "bad_tile"),
        "2": verdict("impossible", None, "split_rows", detail="3 heads of 2"),
    }
    part = {"1": verdict("asm", [128, 16]), "2": verdict("asm", [64, 16])}
    groups = (
        {"name": "x.qkv", "members": [], "mixed": False, "verdict": whole},
        {"name": "x.up", "members": [], "mixed": False, "verdict": part},
    )
    q = layer("x.q", group="x.qkv", verdict=asm, decided={"1": "triton", "2": "impossible"})
    gate = layer("x.gate", group="x.up", verdict=asm, decided={"1": "triton", "2": "asm"})
    mixed = layer("x.m", group="gone")
    own = layer("x.o", group="x.qkv", decided={"1": "triton", "2": "impossible"})
    own["verdict"] = {"1": verdict("triton", [5, 16], "scale_rows"), "2": whole["2"]}
    found = {
        (row["layer"], row["tp"]): row for row in rows(audit(q, gate, mixed, own, groups=groups))
    }
    shown = {
        key: (row["path"], row["own_path"], row["reasons"], row["detail"], row["scale_rows"])
        for key, row in found.items()
    }
    assert shown == {
        ("x.q", "1"): ("triton", "asm", "bad_tile", "", "64"),
        ("x.q", "2"): ("impossible", "asm", "split_rows", "3 heads of 2", "32"),
        ("x.gate", "1"): ("triton", "asm", "group_part", "", "64"),
        ("x.gate", "2"): ("asm", "asm", "", "", "32"),
        ("x.o", "1"): ("triton", "triton", "scale_rows", "", "5"),
        ("x.o", "2"): ("impossible", "impossible", "split_rows", "3 heads of 2", ""),
        ("x.m", "1"): ("asm", "asm", "", "", "64"),
        ("x.m", "2"): ("triton", "triton", "scale_rows;scale_cols", "", "64"),
    }


def test_what_the_engine_does() -> None:
    engine = {
        "1": {"outcome": "ok", "path": "asm", "message": ""},
        "2": {"outcome": "crash", "path": None, "message": "RuntimeError: a, b"},
    }
    found = [
        (row["engine_outcome"], row["engine_path"], row["engine_message"])
        for row in rows(audit(layer("a", engine=engine), layer("b")))
    ]
    assert found == [
        ("ok", "asm", ""),
        ("crash", "", "RuntimeError: a, b"),
        ("", "", ""),
        ("", "", ""),
    ]


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM", "'@SUM"),
        ("  =1", "'  =1"),
        ("\uff1d1", "'\uff1d1"),
        ("\uff0b1", "'\uff0b1"),
        ("\uff0d1", "'\uff0d1"),
        ("\uff201", "'\uff201"),
        ("\t=1", r"\t=1"),
        ("\r=1", r"\r=1"),
        ("a\nb\x1b\u202e", r"a\nb\x1b\u202e"),
        ("\ud800", r"\ud800"),
        ("a=b", "a=b"),
        ("'=1", "'=1"),
        ("漢é", "漢é"),
        ("", ""),
    ],
)
def test_names_neither_run_nor_break_the_table(name: str, cell: str) -> None:
    found = rows(audit(layer(name, group=name)))
    assert [(row["layer"], row["group"], row["tp"]) for row in found] == [
        (cell, cell, "1"),
        (cell, cell, "2"),
    ]


def test_a_semicolon_cannot_part_a_cell() -> None:
    line = text(audit(layer("a;=1"))).split("\n")[1]
    assert line.startswith('"a;\'=1","linear","row","","w4a4","64","512","","17408",1,asm,')


def test_no_cell_is_a_formula_where_semicolons_part_them() -> None:
    written = text(audit(layer(" ; =1+1"), layer("a;+b;-c"), layer("a;b;;@c")))
    for record in csv.reader(io.StringIO(written), delimiter=";"):
        assert not [cell for cell in record if cell.lstrip(' "')[:1] in ("=", "+", "-", "@")]


@given(st.lists(st.text(st.characters(codec=None), max_size=8), max_size=5))
def test_any_names_make_one_line_a_record(names: list[str]) -> None:
    written = text(audit(*map(layer, names)))
    assert written.count("\n") == 1 + 2 * len(names)
    assert "\r" not in written
    found = list(csv.reader(io.StringIO(written, newline=""), strict=True))
    assert {len(record) for record in found} == {len(COLUMNS)}
    for record in found[1:]:
        assert not record[0].lstrip().startswith(("=", "+", "-", "@"))


def test_every_layer_of_a_real_checkpoint(mxfp4_fixture: Path) -> None:
    document = audit_document(run_audit(str(mxfp4_fixture), (1, 2, 3, 8)))
    found = rows(document)
    assert len(found) == 4 * len(document["layers"])
    for row, (item, tp) in zip(
        found, ((item, tp) for item in document["layers"] for tp in (1, 2, 3, 8)), strict=True
    ):
        own = item["verdict"][str(tp)]
        shard = own["scale_shard"] or ["", ""]
        assert (row["layer"], int(row["tp"])) == (item["name"], tp)
        assert (row["path"], row["own_path"]) == (item["decided"][str(tp)], own["path"])
        assert [row["scale_rows"], row["scale_columns"]] == [str(size) for size in shard]
        assert [row["n"], row["k"]] == [str(item["n"]), str(item["k"])]
        assert (row["nbytes"], row["scheme"]) == (str(item["nbytes"]), item["scheme"])
        assert (row["group"] or None) == item["group"]
        assert bool(row["reasons"]) == (row["path"] != "asm")
        assert row["placement"] == item.get("placement", {}).get(str(tp), "sliced")


def test_rows_do_not_depend_on_which_layers_share_their_verdicts(
    mxfp4_fixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = audit_document(run_audit(str(mxfp4_fixture)))
    apart = json.loads(json.dumps(shared))
    written = text(shared)
    assert text(apart) == written
    monkeypatch.setattr(csv_table, "_KNOWN_LIMIT", 1)
    assert text(apart) == text(shared) == written


def test_layers_that_share_only_some_of_it_are_told_apart() -> None:
    first = layer("a")
    verdicts = first["verdict"]
    group = {"name": "g", "verdict": {"1": verdict("triton", [1, 1], "bad_tile"), "2": {}}}
    others = [
        layer("b", verdict=verdicts, decided={"1": "triton", "2": "triton"}),
        layer("c", verdict=verdicts, decided=first["decided"], placement={"1": "fused", "2": "x"}),
        layer(
            "d",
            verdict=verdicts,
            decided=first["decided"],
            engine={tp: {"outcome": "ok", "path": "moe", "message": ""} for tp in "12"},
        ),
    ]
    others.append(layer("e", verdict=verdicts, decided=others[0]["decided"], group="g"))
    others.append(layer("f", decided=first["decided"]))
    others[-1]["verdict"]["1"]["hazards"] = ["short_group"]
    group["verdict"]["2"] = verdict("asm", [1, 1])
    found = rows(audit(first, *others, groups=(group,)))[::2]
    keys = ("layer", "path", "placement", "engine_path", "reasons", "hazards")
    assert [tuple(row[key] for key in keys) for row in found] == [
        ("a", "asm", "sliced", "", "", ""),
        ("b", "triton", "sliced", "", "", ""),
        ("c", "asm", "fused", "", "", ""),
        ("d", "asm", "sliced", "moe", "", ""),
        ("e", "triton", "sliced", "", "bad_tile", ""),
        ("f", "asm", "sliced", "", "", "short_group"),
    ]


def test_a_long_table_comes_in_pieces() -> None:
    verdicts = layer("")["verdict"]

    class OnTheSpot(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return (layer(f"layers.{i}", verdict=verdicts) for i in range(50_000))

    pieces = csv_lines({"tp": [1, 2], "layers": OnTheSpot(), "groups": []})  # type: ignore[typeddict-item]
    header, *parts = islice(pieces, 38)
    assert header == HEADER + "\n"
    assert {part.count("\n") for part in parts} == {2000}
    assert parts[-1].split("\n")[-2].startswith("layers.36999,")
    assert max(map(len, parts)) < 200_000


def test_verdicts_that_nobody_shares_are_not_all_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = audit(*(layer(f"layers.{i}") for i in range(20_000)))
    monkeypatch.setattr(csv_table, "_KNOWN_LIMIT", 10)
    tracemalloc.start()
    try:
        assert sum(piece.count("\n") for piece in csv_lines(document)) == 40_001
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
