"""Two audits compared: every kind of difference, and none where there is none."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import typer
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from quark_factory import model_config, quant_config, write_checkpoint

from mxfp4prep import schemas
from mxfp4prep.auditing import run_audit
from mxfp4prep.comparison import compare, read_audit
from mxfp4prep.comparison.renames import match_names
from mxfp4prep.deployment import Deployment
from mxfp4prep.diff_command import diff
from mxfp4prep.errors import InvalidCheckpoint, IOFailed, Mxfp4PrepError, Unsupported, UsageError
from mxfp4prep.report import payload
from mxfp4prep.report.audit_document import audit_document
from mxfp4prep.report.diff_text import diff_text
from mxfp4prep.report.others import each_module, join_modules
from mxfp4prep.report.screen import Screen
from mxfp4prep.report.voice import Voice

DIFFERENCES = {
    "source", "renames", "only_a", "only_b", "changed", "others", "groups", "shared_experts",
    "findings_a", "findings_b", "summary", "paths", "cost", "engine", "values",
}  # fmt: skip
CONTEXT = {"schema_version", "same", "a", "b", "tp", "asked", "skipped"}


# --- hand-made audits ---------------------------------------------------------------------------


def verdict(path: str = "asm", shard: Any = (64, 16), *reasons: str, **more: Any) -> dict[str, Any]:
    shard = None if shard is None else list(shard)
    return {"path": path, "scale_shard": shard, "reasons": list(reasons), "hazards": [], **more}


def layer(name: str, **changes: Any) -> dict[str, Any]:
    """A layer that is asm at tp 1 and 2."""
    return {
        "name": name,
        "kind": "linear",
        "parallel": "row",
        "group": None,
        "scheme": "w4a4",
        "activation": {"dtype": "fp4", "scale_mode": "even", "static": False},
        "n": 64,
        "k": 512,
        "experts": None,
        "scale_shape": [64, 16],
        "nbytes": 17408,
        "verdict": {"1": verdict(), "2": verdict(shard=(64, 8))},
        "decided": {"1": "asm", "2": "asm"},
        **changes,
    }


def group(name: str, *members: str, mixed: bool = False, second: Any = None) -> dict[str, Any]:
    verdicts = {"1": verdict(), "2": second or verdict()}
    return {"name": name, "members": list(members), "mixed": mixed, "verdict": verdicts}


def paths(asm: int, triton: int = 0) -> dict[str, Any]:
    return {
        "asm": {"layers": asm, "nbytes": asm * 17408},
        "triton": {"layers": triton, "nbytes": triton * 17408},
        "impossible": {"layers": 0, "nbytes": 0},
    }


def cost(nbytes: int, asm: float = 1.0) -> dict[str, Any]:
    return {
        "rank_nbytes": nbytes,
        "rank_mxfp4_nbytes": nbytes // 2,
        "padding_nbytes": 0,
        "paths": {
            "asm": {"nbytes": asm, "flops": asm},
            "triton": {"nbytes": 1 - asm, "flops": 1 - asm},
            "impossible": {"nbytes": 0.0, "flops": 0.0},
        },
    }


def engine(name: str = "vllm-0.33", **changes: Any) -> dict[str, Any]:
    outcomes = {"ok": 2, "crash": 0, "corrupt": 0, "unknown": 0}
    return {
        "name": name,
        "version": "0.33.1",
        "sources": [],
        "switches": {},
        "assumptions": [],
        "outcomes": {"1": outcomes, "2": outcomes},
        **changes,
    }


def shared(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "blocks": 2,
        "width": 64,
        "fusable": True,
        "why": "same quantization",
        "decision": {"1": "fused", "2": "fused"},
        "message": {},
        **changes,
    }


def finding(code: str = "odd", where: str = "here", message: str = "is odd") -> dict[str, Any]:
    return {"code": code, "severity": "warning", "where": where, "message": message}


def audit(*layers: dict[str, Any], **changes: Any) -> Any:
    """An audit of `layers` at tp 1 and 2, with `changes` on top; source and summary are merged."""
    summary = {
        "layers": len(layers),
        "groups": 0,
        "mxfp4_nbytes": 17408 * len(layers),
        "copied_nbytes": 100,
        "tp": {"1": paths(len(layers)), "2": paths(len(layers))},
        "asm_tp": [1, 2],
        "possible_tp": [1, 2],
        "largest_clean_tp": 2,
        "recommendation": "",
        "findings": {"error": 0, "warning": 0, "note": 0},
        **changes.pop("summary", {}),
    }
    source = {
        "name": "model",
        "model_type": "llama",
        "quark_version": "0.13",
        "files": 1,
        "tensors": 5,
        "nbytes": 34916,
        "config_sha256": "c" * 64,
        "index_sha256": None,
        **changes.pop("source", {}),
    }
    return {
        "schema_version": 1,
        "source": source,
        "rule": "rows % 32 == 0",
        "tp": [1, 2],
        "deployment": {
            "expert_parallel": False,
            "sequence_parallel": False,
            "shared_experts": "auto",
        },
        "layers": list(layers),
        "groups": [],
        "shared_experts": [],
        "others": [],
        "cost": {},
        "engine": None,
        "values": None,
        "findings": [],
        "summary": summary,
        **changes,
    }


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed["additionalProperties"] = False
    return closed


SCHEMA = jsonschema.Draft202012Validator(strict(json.loads(schemas.read("diff"))))


def compared(a: Any, b: Any) -> Any:
    """The comparison as its JSON says it, held against the schema."""
    document = json.loads(payload.dumps(compare(a, b)))
    SCHEMA.validate(document)
    assert set(document) == DIFFERENCES | CONTEXT
    return document


def differing(document: Any) -> set[str]:
    """The keys with a difference; `same` must agree with them."""
    found = {key for key in DIFFERENCES if document[key]}
    assert document["same"] is (not found)
    return found


def lines(document: Any, columns: int = 80) -> list[str]:
    return diff_text(document, Screen(columns=columns), "a.json", "b.json")


def text(document: Any) -> str:
    return " ".join(" ".join(lines(document)).split())


BASE = audit(
    layer("l.0.down"),
    layer("l.1.down"),
    groups=[group("l.0.up", "l.0.a", "l.0.b")],
    shared_experts=[shared("l.{0,1}.shared_expert")],
    others=[{"name": "l.{0..1}.norm", "dtype": "bf16", "count": 2}],
    cost={"1": cost(1000), "2": cost(500)},
    engine=engine(),
    findings=[finding()],
)
for _layer in BASE["layers"]:
    _layer["engine"] = {tp: {"outcome": "ok", "path": "asm", "message": ""} for tp in "12"}


def changed(change: Callable[[Any], object]) -> Any:
    """BASE with `change` made to a copy."""
    document = copy.deepcopy(BASE)
    change(document)
    return document


# --- nothing differs ----------------------------------------------------------------------------


def test_an_audit_is_the_same_as_itself() -> None:
    document = compared(BASE, copy.deepcopy(BASE))
    assert differing(document) == set()
    assert (document["asked"], document["skipped"]) == ([], [])
    assert document["a"] == document["b"] == {
        "name": "model", "tp": [1, 2], "engine": "vllm-0.33", "layers": 2, "mxfp4_nbytes": 34816,
    }  # fmt: skip
    assert lines(document) == [
        "A  a.json (model): 2 MXFP4 layers, 34.8 kB, tp 1, 2",
        "B  b.json (model): 2 MXFP4 layers, 34.8 kB, tp 1, 2",
        "",
        "A and B are the same at tp 1, 2.",
    ]


def test_a_real_checkpoint_is_the_same_as_its_kept_audit(
    mxfp4_fixture: Path, tmp_path: Path
) -> None:
    document = audit_document(run_audit(str(mxfp4_fixture), (1, 2, 3, 8)))
    kept = tmp_path / "audit.json"
    kept.write_text(payload.dumps(document))
    assert read_audit(kept) == document
    assert differing(compared(document, read_audit(kept))) == set()


def test_order_makes_no_difference() -> None:
    other = copy.deepcopy(BASE)
    for key in ("layers", "groups", "findings", "others"):
        other[key].reverse()
    assert differing(compared(BASE, other)) == set()


# --- every kind of difference -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen3"),
        ("quark_version", None),
        ("files", 2),
        ("tensors", 6),
        ("nbytes", 34917),
        ("config_sha256", "c" * 63 + "d"),
        ("index_sha256", "e" * 64),
    ],
)
def test_facts_of_the_source(key: str, value: Any) -> None:
    document = compared(BASE, changed(lambda d: d["source"].update({key: value})))
    assert differing(document) == {"source"}
    assert document["source"] == [{"fact": key, "a": BASE["source"][key], "b": value}]
    row = next(line for line in lines(document, 200) if line.startswith(("model", "Quark", "saf",
               "tens", "bytes", "config", "index")))  # fmt: skip
    a, b = row.split()[-2:]
    assert a != b
    assert "their MXFP4 layers are" in text(document)


def test_the_name_alone_is_no_difference() -> None:
    assert differing(compared(BASE, changed(lambda d: d["source"].update(name="copy")))) == set()


@pytest.mark.parametrize(
    ("change", "facts", "words"),
    [
        ({"n": 96}, [("n", 64, 96)], "n 64 -> 96"),
        ({"k": 1024}, [("k", 512, 1024)], "k 512 -> 1024"),
        ({"experts": 8}, [("experts", None, 8)], "experts - -> 8"),
        ({"kind": "expert"}, [("kind", "linear", "expert")], "kind linear -> expert"),
        ({"parallel": "column"}, [("parallel", "row", "column")], "parallel row -> column"),
        ({"scheme": "w4a16"}, [("scheme", "w4a4", "w4a16")], "scheme w4a4 -> w4a16"),
        ({"nbytes": 17409}, [("nbytes", 17408, 17409)], "bytes 17,408 -> 17,409"),
        ({"n": 96, "nbytes": 26112}, [("n", 64, 96)], "n 64 -> 96"),
        ({"group": "l.1.up"}, [("group", None, "up")], "group - -> up"),
        ({"group": "x.up"}, [("group", None, "x.up")], "group - -> x.up"),
        (
            {"activation": {"dtype": "fp8_e4m3", "scale_mode": "even", "static": True}},
            [("activation.dtype", "fp4", "fp8_e4m3"), ("activation.static", False, True)],
            "activation.dtype fp4 -> fp8_e4m3 activation.static no -> yes",
        ),
    ],
)
def test_facts_of_a_layer(change: Any, facts: Any, words: str) -> None:
    document = compared(BASE, changed(lambda d: d["layers"][1].update(change)))
    assert differing(document) == {"changed"}
    (found,) = document["changed"]
    assert (found["name"], found["layers"], found["names"]) == ("l.1.down", 1, ["l.1.down"])
    assert [(f["fact"], f["a"], f["b"]) for f in found["facts"]] == facts
    assert found["verdict"] == {}
    assert f"l.1.down 1 {words}" in text(document)
    assert text(document).endswith("A and B, compared at tp 1, 2, differ: 1 layer changed.")


@pytest.mark.parametrize(
    ("change", "side", "words"),
    [
        (
            lambda item: (
                item["decided"].update({"2": "triton"}),
                item["verdict"].update({"2": verdict("triton", (64, 4), "scale_cols")}),
            ),
            {"path": "triton", "own_path": "triton", "scale_shard": [64, 4],
             "reasons": ["scale_cols"]},
            "tp 2: asm -> triton (scale_cols)",
        ),
        (
            lambda item: item["decided"].update({"2": "triton"}),
            {"path": "triton"},
            "tp 2: asm -> triton (with its group)",
        ),
        (
            lambda item: item["verdict"].update({"2": verdict("triton", (64, 8), "bad_tile")}),
            {"own_path": "triton", "reasons": ["bad_tile"]},
            "tp 2: asm -> asm (with its group)",
        ),
        (
            lambda item: item["verdict"]["2"].update(hazards=["short_group"]),
            {"hazards": ["short_group"]},
            "tp 2: hazards none -> short_group",
        ),
        (
            lambda item: item.update(placement={"1": "sliced", "2": "replicated"}),
            {"placement": "replicated"},
            "tp 2: sliced -> replicated",
        ),
        (
            lambda item: item["verdict"]["2"].update(scale_shard=[32, 8]),
            {"scale_shard": [32, 8]},
            "tp 2: scale per rank 64x8 -> 32x8",
        ),
        (
            lambda item: item["engine"].update(
                {"2": {"outcome": "crash", "path": None, "message": "Boom"}}
            ),
            {"engine": {"outcome": "crash", "path": None, "message": "Boom"}},
            "tp 2: engine ok (asm) -> crash: Boom",
        ),
    ],
)  # fmt: skip
def test_the_verdict_at_a_degree(change: Any, side: Any, words: str) -> None:
    document = compared(BASE, changed(lambda d: change(d["layers"][0])))
    assert differing(document) == {"changed"}
    (found,) = document["changed"]
    assert (found["names"], found["facts"]) == (["l.0.down"], [])
    before = {
        "path": "asm", "own_path": "asm", "scale_shard": [64, 8], "reasons": [], "hazards": [],
        "placement": "sliced", "engine": {"outcome": "ok", "path": "asm", "message": ""},
    }  # fmt: skip
    assert found["verdict"] == {"2": {"a": before, "b": {**before, **side}}}
    assert words in text(document)


def test_a_new_shape_alone_explains_other_scale_shards() -> None:
    document = compared(
        BASE,
        changed(
            lambda d: (
                d["layers"][0].update(n=128, nbytes=2 * 17408),
                d["layers"][0]["verdict"].update(
                    {"1": verdict(shard=(128, 16)), "2": verdict(shard=(128, 8))}
                ),
            )
        ),
    )
    (found,) = document["changed"]
    assert (len(found["facts"]), found["verdict"]) == (1, {})


def test_degrees_with_the_same_words_are_one_line() -> None:
    slower = verdict("triton", (64, 8), "scale_cols")
    document = compared(
        BASE,
        changed(
            lambda d: d["layers"][0].update(
                decided={"1": "triton", "2": "triton"}, verdict={"1": slower, "2": slower}
            )
        ),
    )
    assert "tp 1, 2: asm -> triton (scale_cols)" in text(document)
    assert "scale per rank" not in text(document)  # the path says more than another shard
    legend = "scale_cols scale columns are not a multiple of 8"
    assert f"reasons {legend}" in text(document)


def test_the_layer_by_itself_where_its_group_decides_in_both() -> None:
    stuck = {"1": "asm", "2": "impossible"}
    a = changed(lambda d: d["layers"][0].update(decided=stuck))
    b = copy.deepcopy(a)
    b["layers"][0]["verdict"]["2"] = verdict("triton", (64, 8), "bad_tile")
    document = compared(a, b)
    assert differing(document) == {"changed"}
    assert "tp 2: by itself asm -> triton (bad_tile)" in text(document)
    assert "tp 2: asm -> IMPOSSIBLE (with its group)" in text(compared(BASE, a))


def test_the_engines_wording_alone_is_no_difference() -> None:
    other = changed(lambda d: d["layers"][0]["engine"]["1"].update(message="at your own risk"))
    assert differing(compared(BASE, other)) == set()


def test_layers_of_one_side_and_what_they_are_in_the_other() -> None:
    def change(document: Any) -> None:
        document["layers"] = [layer("l.0.down"), layer("m.0.x", n=32, experts=4)]
        document["others"].append({"name": "l.1.down", "dtype": "bf16", "count": 1})
        document["engine"] = None

    document = compared(BASE, changed(change))
    assert differing(document) == {"only_a", "only_b"}
    shape = {"kind": "linear", "scheme": "w4a4", "k": 512}
    assert document["only_a"] == [
        {"name": "l.1.down", "layers": 1, "names": ["l.1.down"], "n": 64, "experts": None,
         "other": "bf16", **shape},
    ]  # fmt: skip
    assert document["only_b"] == [
        {"name": "m.0.x", "layers": 1, "names": ["m.0.x"], "n": 32, "experts": 4,
         "other": "absent", **shape},
    ]  # fmt: skip
    assert (
        "MXFP4 in A only: 1 layer layer layers shape scheme in B l.1.down 1 64x512 w4a4 bf16"
        in (text(document))
    )
    assert (
        "MXFP4 in B only: 1 layer layer layers shape scheme in A m.0.x 1 4x32x512 w4a4 absent"
        in (text(document))
    )
    assert text(document).endswith(
        "A and B, compared at tp 1, 2, differ: 1 layer MXFP4 in A only, 1 layer MXFP4 in B only."
    )


def test_an_audit_without_others_does_not_know() -> None:
    def change(document: Any) -> None:
        document["layers"].pop()
        del document["others"]

    document = compared(BASE, changed(change))
    assert document["only_a"][0]["other"] is None
    assert differing(document) == {"only_a"}
    assert document["skipped"] == ["weights that are not MXFP4: only A lists them"]
    assert "not known" in text(document)


def test_weights_that_are_mxfp4_in_neither() -> None:
    def change(document: Any) -> None:
        document["others"] = [
            {"name": "l.0.norm", "dtype": "bf16", "count": 1},
            {"name": "l.1.norm", "dtype": "f32", "count": 1},
            {"name": "mtp.{0..2}.fc", "dtype": "bf16", "count": 3},
        ]

    document = compared(BASE, changed(change))
    assert differing(document) == {"others"}
    assert document["others"] == [
        {"name": "l.1.norm", "modules": 1, "names": ["l.1.norm"], "a": "bf16", "b": "f32"},
        {"name": "mtp.{0..2}.fc", "modules": 3, "names": ["mtp.0.fc", "mtp.1.fc", "mtp.2.fc"],
         "a": None, "b": "bf16"},
    ]  # fmt: skip
    assert "weights that are MXFP4 in neither: 4 modules" in text(document)
    assert "mtp.{0..2}.fc 3 absent bf16" in text(document)


@pytest.mark.parametrize(
    ("new", "facts", "words"),
    [
        (
            group("l.0.up", "l.0.a", "l.0.b", mixed=True),
            [("mixed", False, True)],
            "mixed no -> yes",
        ),
        (group("l.0.up", "l.0.a"), [("members", "a + b", "a")], "parts a + b -> a"),
        (
            group("l.0.up", "l.0.a", "l.0.b", second=verdict("triton", (96, 16), "bad_tile")),
            [("path.2", "asm", "triton")],
            "tp 2: asm -> triton",
        ),
    ],
)
def test_fused_projections(new: Any, facts: Any, words: str) -> None:
    document = compared(BASE, changed(lambda d: d.update(groups=[new])))
    assert differing(document) == {"groups"}
    (found,) = document["groups"]
    assert (found["name"], found["groups"], found["names"]) == ("l.0.up", 1, ["l.0.up"])
    assert [(f["fact"], f["a"], f["b"]) for f in found["facts"]] == facts
    assert f"l.0.up 1 {words}" in text(document)


def test_shared_experts() -> None:
    new = shared("l.{0,1}.shared_expert", fusable=False, why="parts are bf16",
                 decision={"1": "sliced", "2": "impossible"})  # fmt: skip
    document = compared(BASE, changed(lambda d: d.update(shared_experts=[new])))
    assert differing(document) == {"shared_experts"}
    (found,) = document["shared_experts"]
    assert (found["a"], found["b"]) == (BASE["shared_experts"][0], new)
    assert "A: width 64, fused at tp 1, 2; same quantization" in text(document)
    assert "B: width 64, sliced at tp 1, impossible at tp 2; parts are bf16" in text(document)
    gone = compared(BASE, changed(lambda d: d.update(shared_experts=[])))
    assert gone["shared_experts"] == [
        {"name": "l.{0,1}.shared_expert", "a": BASE["shared_experts"][0], "b": None}
    ]
    assert "B: none in MXFP4" in text(gone)


def test_findings_appear_and_disappear() -> None:
    new = finding("even", "there\x1b", "is [even]")
    document = compared(BASE, changed(lambda d: d.update(findings=[new, finding(), finding()])))
    assert differing(document) == {"findings_b"}
    assert document["findings_b"] == [new, finding()]
    document = compared(BASE, changed(lambda d: d.update(findings=[new])))
    assert (document["findings_a"], document["findings_b"]) == ([finding()], [new])
    shown = lines(document)
    assert "- warning: here: is odd [odd]" in shown
    assert r"+ warning: there\x1b: is [even] [even]" in shown


def test_a_finding_that_says_something_else_is_not_told_twice() -> None:
    long = "a long explanation: of which the end differs: "
    first = [finding("x"), finding("y", message=f"{long}2 places"), finding("z", message="is: odd")]
    a = changed(lambda d: d.update(findings=first))
    b = changed(
        lambda d: d.update(
            findings=[
                {**finding("x"), "severity": "note"},
                finding("y", "there", f"{long}3 places: more"),
                finding("y", message=f"{long}4 places"),
                finding("z", "there", "is: odd"),
            ]
        )
    )
    shown = lines(compared(a, b))
    assert shown[shown.index("findings") :][:8] == [
        "findings",
        "- warning: here: is odd [x]",
        "- warning: here: a long explanation: of which the end differs: 2 places [y]",
        "+ warning: there: ... 3 places: more [y]",
        "- warning: here: is: odd [z]",
        "+ warning: there: ... odd [z]",
        "+ note: here: is odd [x]",
        "+ warning: here: a long explanation: of which the end differs: 4 places [y]",
    ]


def test_findings_of_audits_at_other_degrees_are_compared_without_their_numbers() -> None:
    other = changed(
        lambda d: d.update(tp=[2], findings=[finding(message="is even at tp 2"), finding("new")])
    )
    document = compared(BASE, other)
    assert (document["findings_a"], document["findings_b"]) == ([], [finding("new")])


def test_sums_per_degree() -> None:
    def change(document: Any) -> None:
        document["summary"]["tp"]["2"] = paths(1, 1)
        document["summary"].update(asm_tp=[1], possible_tp=[], largest_clean_tp=1)
        document["cost"]["2"] = cost(600, 0.25)
        document["engine"]["outcomes"]["2"] = {"ok": 1, "crash": 1, "corrupt": 0, "unknown": 0}

    document = compared(BASE, changed(change))
    assert differing(document) == {"paths", "summary", "cost", "engine"}
    assert document["paths"] == {"2": {"a": paths(2), "b": paths(1, 1)}}
    assert document["cost"] == {"2": {"a": cost(500), "b": cost(600, 0.25)}}
    assert document["engine"]["2"]["b"]["crash"] == 1
    assert document["summary"] == [
        {"fact": "asm_tp", "a": [1, 2], "b": [1]},
        {"fact": "possible_tp", "a": [1, 2], "b": []},
        {"fact": "largest_clean_tp", "a": 2, "b": 1},
    ]
    shown = text(document)
    assert "every layer ASM at tp 1, 2 1" in shown
    assert "every layer splits at tp 1, 2 -" in shown
    assert "largest clean tp 2 1" in shown
    assert "tp 2 asm 2 -> 1 layers 34.8 kB -> 17.4 kB" in shown
    assert "tp 2 triton 0 -> 1 layers 0 B -> 17.4 kB" in shown
    assert "IMPOSSIBLE" not in shown
    assert "corrupt" not in shown
    assert "tp 2 500 B -> 600 B 250 B -> 300 B 0 B 100.0% -> 25.0%" in shown
    assert "vllm-0.33 layers tp 2 ok 2 -> 1, crash 0 -> 1" in shown


def test_scale_values() -> None:
    values = {"nbytes": 10, "scales": 10, "nan": 0, "zero_blocks": 3, "minimum": 1, "maximum": 9,
              "layers": []}  # fmt: skip
    a = changed(lambda d: d.update(values=values))
    b = changed(lambda d: d.update(values={**values, "nan": 2, "maximum": 255}))
    document = compared(a, b)
    assert differing(document) == {"values"}
    assert document["values"] == [
        {"fact": "nan", "a": 0, "b": 2},
        {"fact": "maximum", "a": 9, "b": 255},
    ]
    assert "NaN scales 0 2" in text(document)
    assert differing(compared(a, BASE)) == set()
    assert compared(a, BASE)["skipped"] == ["scale values: only A has them"]


# --- what is not compared, and how the audits were made -----------------------------------------


def test_only_degrees_of_both_are_compared() -> None:
    def change(document: Any) -> None:
        document["tp"] = [2, 4, 6]
        for item in document["layers"]:
            for part, value in (
                ("verdict", verdict("impossible", None, "split_cols")),
                ("decided", "impossible"),
                ("engine", {"outcome": "crash", "path": None, "message": ""}),
            ):
                item[part] = {"2": item[part]["2"], "4": value, "6": value}  # fmt: skip
        document["summary"].update(asm_tp=[2], possible_tp=[2])
        document["summary"]["tp"] |= {"4": paths(0, 2)}
        document["cost"]["4"] = cost(1)

    document = compared(BASE, changed(change))
    assert differing(document) == set()
    assert document["tp"] == [2]
    assert document["skipped"] == [
        "tp 1: only A was audited there",
        "tp 4, 6: only B was audited there",
    ]
    assert "not compared: tp 4, 6: only B was audited there" in lines(document)
    assert "A and B are the same at tp 2." in lines(document)


def test_engines_are_compared_only_with_themselves() -> None:
    def change(document: Any) -> None:
        document["engine"] = engine("atom")
        for item in document["layers"]:
            item["engine"]["2"] = {"outcome": "crash", "path": None, "message": ""}

    document = compared(BASE, changed(change))
    assert differing(document) == set()
    assert document["skipped"] == ["engines: A was asked about vllm-0.33, B about atom"]
    assert document["asked"] == [{"fact": "engine", "a": "vllm-0.33 0.33.1", "b": "atom 0.33.1"}]
    none = compared(BASE, changed(lambda d: d.update(engine=None)))
    assert none["skipped"] == ["engines: A was asked about vllm-0.33, B about none"]


def test_a_cost_that_one_audit_lacks_is_left_out() -> None:
    document = compared(BASE, changed(lambda d: d.update(cost={})))
    assert differing(document) == set()
    assert document["skipped"] == ["cost: only A has it"]


def test_how_the_audits_were_made_is_said_but_is_no_difference() -> None:
    def change(document: Any) -> None:
        document["rule"] = "another"
        document["deployment"].update(expert_parallel=True, shared_experts="separate")
        document["engine"]["switches"] = {"VLLM_X": "1"}

    document = compared(BASE, changed(change))
    assert differing(document) == set()
    assert document["asked"] == [
        {"fact": "rule", "a": "rows % 32 == 0", "b": "another"},
        {"fact": "expert_parallel", "a": False, "b": True},
        {"fact": "shared_experts", "a": "auto", "b": "separate"},
        {"fact": "engine", "a": "vllm-0.33 0.33.1", "b": "vllm-0.33 0.33.1 VLLM_X=1"},
    ]
    assert "asked differently: expert parallelism no -> yes" in lines(document)


# --- alike layers are one, and the other way round is the mirror --------------------------------


def test_thousands_of_like_changes_are_one() -> None:
    names = [f"m.layers.{i}.experts.{j}.w2" for i in range(94) for j in range(128)]
    a = audit(*(layer(name, group=f"{name[:-3]}.g") for name in names))
    new = {"decided": {"1": "asm", "2": "triton"}, "group": None}
    b = audit(*(layer(name, **new) for name in names))
    document = compared(a, b)
    (found,) = document["changed"]
    assert found["name"] == "m.layers.{0..93}.experts.{0..127}.w2"
    assert (found["layers"], found["names"]) == (94 * 128, names)
    assert found["facts"] == [{"fact": "group", "a": "g", "b": None}]
    assert len(lines(document)) == 10
    gone = compared(a, audit())
    assert [(item["name"], item["layers"]) for item in gone["only_a"]] == [
        ("m.layers.{0..93}.experts.{0..127}.w2", 94 * 128)
    ]


def test_unlike_changes_stay_apart() -> None:
    names = [f"l.{i}.{leaf}" for i in range(4) for leaf in ("up", "down")]
    a = audit(*map(layer, names))
    b = audit(*(layer(name, n=96 if name.startswith("l.3") else 128) for name in names))
    found = {item["name"]: item["names"] for item in compared(a, b)["changed"]}
    assert found == {
        "l.{0..2}.up": ["l.0.up", "l.1.up", "l.2.up"],
        "l.{0..2}.down": ["l.0.down", "l.1.down", "l.2.down"],
        "l.3.up": ["l.3.up"],
        "l.3.down": ["l.3.down"],
    }


SWAPPED = {"a": "b", "b": "a", "only_a": "only_b", "only_b": "only_a", "findings_a": "findings_b",
           "findings_b": "findings_a"}  # fmt: skip


def mirrored(value: Any) -> Any:
    """`value` with A and B exchanged, lists in an order of their own."""
    if isinstance(value, dict):
        return {SWAPPED.get(key, key): mirrored(part) for key, part in value.items()}
    if isinstance(value, list):
        return sorted(map(mirrored, value), key=lambda part: json.dumps(part, sort_keys=True))
    return value


def in_order(value: Any) -> Any:
    return mirrored(mirrored(value))


def test_the_other_way_round_is_the_mirror() -> None:
    fixtures = sorted(p for p in FIXTURES.iterdir() if p.name.startswith(("llama-", "qwen", "ver")))
    documents = [
        audit_document(run_audit(str(path), (1, 2, 8))) for path in fixtures if path.is_dir()
    ]
    kinds: set[str] = set()
    for a, b in zip(documents, [*documents[1:], documents[0]], strict=True):
        there, back = compared(a, b), compared(b, a)
        kinds |= differing(there)
        for document in (there, back):
            assert all(len(line) <= 80 for line in lines(document))
            document["skipped"] = document["renames"] = []
        assert in_order(there) == mirrored(back)
    assert kinds >= {"source", "changed", "only_a", "only_b", "others", "cost", "findings_a"}


# --- checkpoints --------------------------------------------------------------------------------

MOE = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
    "model_type": "qwen2_moe", "num_experts": 2,
}  # fmt: skip


def moe(root: Path, *, shared_bf16: bool, prefix: str = "model.", exclude: Any = None) -> Any:
    """A two-layer MoE checkpoint, its shared experts packed or in bf16, audited."""
    linears, extra = {}, {}
    for i in range(2):
        at = f"{prefix}layers.{i}.mlp"
        for leaf, (n, k) in {
            "gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512),
        }.items():  # fmt: skip
            for j in range(2):
                linears[f"{at}.experts.{j}.{leaf}"] = (n, k)
            if shared_bf16:
                extra[f"{at}.shared_expert.{leaf}.weight"] = torch.zeros(n, k, dtype=torch.bfloat16)
            else:
                linears[f"{at}.shared_expert.{leaf}"] = (n, k)
        extra[f"{at}.gate.weight"] = torch.zeros(2, 256, dtype=torch.bfloat16)
    out = "language_model.lm_head" if prefix.startswith("language_model") else "lm_head"
    extra[f"{out}.weight"] = torch.zeros(64, 256, dtype=torch.bfloat16)
    names = exclude or (["*shared_expert.*"] if shared_bf16 else [])
    config = model_config(quant_config(exclude=["*lm_head", "*.mlp.gate", *names]), **MOE)
    write_checkpoint(root, linears, config=config, extra=extra)
    return audit_document(run_audit(str(root)))


def test_p44_shared_experts_that_became_mxfp4(tmp_path: Path) -> None:
    a = moe(tmp_path / "a", shared_bf16=True)
    b = moe(tmp_path / "b", shared_bf16=False)
    document = compared(a, b)
    assert document["only_a"] == document["changed"] == document["others"] == []
    assert [(i["name"], i["layers"], i["kind"], i["other"]) for i in document["only_b"]] == [
        (f"model.layers.{{0,1}}.mlp.shared_expert.{leaf}", 2, "shared_expert", "bf16")
        for leaf in ("down_proj", "gate_proj", "up_proj")
    ]
    (expert,) = document["shared_experts"]
    assert (expert["a"], expert["b"]["fusable"], expert["b"]["width"]) == (None, True, 512)
    facts = {fact["fact"] for fact in document["source"]}
    assert facts == {"tensors", "nbytes", "config_sha256"}
    assert "MXFP4 in B only: 6 layers" in text(document)
    back = compared(b, a)
    assert [item["other"] for item in back["only_a"]] == ["bf16"] * 3
    assert "6 layers MXFP4 in A only." in text(back)


@pytest.mark.parametrize(
    ("prefix", "root_a", "root_b", "modules"),
    [
        ("language_model.model.", "", "language_model.", 21),  # P27
        ("model.language_model.", "model.", "model.language_model.", 20),
        ("", "model.", "", 20),  # P41
    ],
)
def test_p27_p41_names_under_another_root(
    tmp_path: Path, prefix: str, root_a: str, root_b: str, modules: int
) -> None:
    a = moe(tmp_path / "a", shared_bf16=False)
    b = moe(tmp_path / "b", shared_bf16=False, prefix=prefix)
    document = compared(a, b)
    assert document["renames"] == [{"a": root_a, "b": root_b, "modules": modules}]
    assert differing(document) <= {"renames", "source"}
    a_place, b_place = (
        f"under {root}" if root else "at the top level" for root in (root_a, root_b)
    )
    assert f"{modules} modules {a_place} in A, {b_place} in B: compared as" in text(document)
    back = compared(b, a)
    assert back["renames"] == [{"a": root_b, "b": root_a, "modules": modules}]
    assert differing(back) <= {"renames", "source"}


def test_p44_and_p27_at_once(tmp_path: Path) -> None:
    a = moe(tmp_path / "a", shared_bf16=False)
    b = moe(tmp_path / "b", shared_bf16=True, prefix="language_model.model.")
    document = compared(a, b)
    assert document["renames"] == [{"a": "", "b": "language_model.", "modules": 21}]
    assert [(i["name"], i["other"]) for i in document["only_a"]] == [
        (f"model.layers.{{0,1}}.mlp.shared_expert.{leaf}", "bf16")
        for leaf in ("down_proj", "gate_proj", "up_proj")
    ]
    assert document["only_b"] == document["changed"] == document["others"] == []
    back = compared(b, a)
    assert [(i["name"], i["other"]) for i in back["only_b"]] == [
        (i["name"], i["other"]) for i in document["only_a"]
    ]


# --- names under another root -------------------------------------------------------------------


def names(prefix: str, count: int = 3, leaf: str = "w") -> list[str]:
    return [f"{prefix}layers.{i}.{leaf}" for i in range(count)]


@pytest.mark.parametrize(
    ("a", "b", "counts"),
    [
        (names("model."), names("model."), {}),
        (names("model."), names("x.model."), {("", "x."): 3}),
        (names("a.b.model."), names("c.model."), {("a.b.", "c."): 3}),
        (names("a.model.b."), names("model.a.b."), {("a.model.", "model.a."): 3}),
        (names(""), names("model."), {("", "model."): 3}),
        ([*names(""), "head"], [*names("model."), "model.head"], {("", "model."): 4}),
        ([*names("a."), "head"], [*names("b."), "head"], {("a.", "b."): 3}),
        ([*names("a."), *names("c.", 2)], [*names("b."), *names("d.", 2)],
         {("a.", "b."): 3, ("c.", "d."): 2}),
        (["a", "b"], ["x.a", "x.b"], {}),
        (names("a.", 4), [*names("b.", 1), *names("b.", 4, "v")], {}),
        (names("a.", 4), [*names("b.", 3), "b.layers.9.w"], {("a.", "b."): 3}),
        (names("mtp.", 1), names("model.", 4), {}),
        (names("model.", 4), names("mtp.", 1), {}),
        (names("a."), [], {}),
    ],
)  # fmt: skip
def test_roots(a: list[str], b: list[str], counts: Any) -> None:
    found = match_names(dict.fromkeys(a), dict.fromkeys(b))
    assert {tuple(rename): count for rename, count in found.counts.items()} == counts
    assert len(set(found.modules.values())) == len(found.modules) == sum(counts.values())
    for old, new in found.modules.items():
        assert old in a
        assert old not in b
        assert new in b
        assert new not in a
    back = match_names(dict.fromkeys(b), dict.fromkeys(a))
    assert back.modules == {new: old for old, new in found.modules.items()}


def test_texts_with_names_under_another_root() -> None:
    renames = match_names({*names(""), "head"}, {*names("model."), "model.head"})
    for old, new in {
        "layers.0.w": "model.layers.0.w",
        "head": "model.head",
        "see layers.0.q_proj, and layers.{0..2}.w": "see model.layers.0.q_proj, and "
        "model.layers.{0..2}.w",
        "all layers. The head is old": "all layers. The head is old",
        "x.layers.0.w": "x.layers.0.w",
        "my-layers.0": "my-layers.0",
        "config.json": "config.json",
    }.items():
        assert renames.text(old) == new
    none = match_names({"a"}, {"a"})
    assert none.text("layers.0") == "layers.0"
    slash = match_names(set(names("a.")), set(names(r"b\1.")))
    assert slash.text("in a.layers.0.w now") == r"in b\1.layers.0.w now"


def test_one_name_under_many_roots_is_no_rename() -> None:
    a = {f"a{i}.layers.0.w" for i in range(300)}
    b = {f"b{i}.layers.0.w" for i in range(300)}
    assert match_names(a, b).modules == {}


def test_findings_and_groups_move_with_their_root() -> None:
    def moved(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("model.", "language_model.model."))

    a = audit(
        layer("model.layers.0.q", group="model.layers.0.qkv"),
        layer("model.layers.0.attn.q", group="model.layers.0.qkv"),
        groups=[group("model.layers.0.qkv", "model.layers.0.q")],
        shared_experts=[shared("model.layers.0.shared_expert")],
        findings=[finding(where="model.layers.0.q", message="as model.layers.0.k is")],
    )
    b = moved(a)
    document = compared(a, b)
    assert differing(document) == {"renames"}
    b["groups"][0]["mixed"] = True
    b["layers"][0]["group"] = "language_model.model.layers.0.other"
    assert differing(compared(a, b)) == {"renames", "groups", "changed"}


# --- modules that are not MXFP4, in lines -------------------------------------------------------


@given(
    st.dictionaries(
        st.from_regex(r"(a|b|\{0\.\.1\}|[0-9]{1,2})(\.(a|b|\{0,1\}|[0-9]|07)){0,3}", fullmatch=True)
        | st.text(max_size=4),
        st.sampled_from(["bf16", "f32"]),
        max_size=40,
    )
)
def test_lines_name_every_module_and_no_other(dtypes: dict[str, str]) -> None:
    found = [(name, line["dtype"]) for line in join_modules(dtypes) for name in each_module(line)]
    assert len(found) == len(dtypes)
    assert dict(found) == dtypes


def test_lines_of_names_that_look_like_lines() -> None:
    dtypes = dict.fromkeys(["a.{0..1}.0", "a.{0..1}.1", "a.0.0", "a.{0..1}"], "bf16")
    found = [name for line in join_modules(dtypes) for name in each_module(line)]
    assert sorted(found) == sorted(dtypes)


def test_lines_are_few() -> None:
    dtypes = {f"l.{i}.experts.{j}.w": "bf16" for i in range(90) for j in range(128) if i != 7}
    dtypes |= {f"l.7.experts.{j}.w": "bf16" for j in range(0, 9, 2)}
    assert join_modules(dtypes) == [
        {"name": "l.{0..6,8..89}.experts.{0..127}.w", "dtype": "bf16", "count": 89 * 128},
        {"name": "l.7.experts.{0,2,4,6,8}.w", "dtype": "bf16", "count": 5},
    ]


@pytest.mark.parametrize(
    ("name", "count"),
    [("a.{0..3}", 3), ("a.{0..3}", 5), ("a", 2), ("a", 0), ("a.{}", 2), ("a.{1,x}", 2),
     ("a.{3..0}", 2), ("a.{0..999999999}", 2), ("a.{0...3}", 4), ("a.{0..9999999999}", 2)],
)  # fmt: skip
def test_lines_that_lie(name: str, count: int) -> None:
    with pytest.raises(ValueError, match=r"does not stand for|is no list"):
        list(each_module({"name": name, "dtype": "bf16", "count": count}))


# --- audits that were kept ----------------------------------------------------------------------


def kept(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "audit.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_kept_audit_is_read_whole(tmp_path: Path) -> None:
    assert read_audit(kept(tmp_path, BASE)) == BASE


def test_keys_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    later = changed(lambda d: (d.update(new=1), d["layers"][0].update(new={"a": []})))
    assert read_audit(kept(tmp_path, later)) == BASE


def test_audits_from_before_a_key_existed_are_read(tmp_path: Path) -> None:
    old = copy.deepcopy(BASE)
    for key in ("deployment", "shared_experts", "others", "cost", "engine", "values"):
        del old[key]
    del old["summary"]["largest_clean_tp"], old["summary"]["recommendation"]
    read = read_audit(kept(tmp_path, old))
    assert differing(compared(read, BASE)) == {"shared_experts"}
    assert read["deployment"]["shared_experts"] == "separate"


def set_at(place: str, value: Any) -> Callable[[Any], None]:
    """Puts `value` at a dotted place of a document; `...` removes what is there."""

    def change(document: Any) -> None:
        *way, last = place.split(".")
        for step in way:
            document = document[int(step) if isinstance(document, list) else step]
        key = int(last) if isinstance(document, list) else last
        if value is ...:
            del document[key]
        else:
            document[key] = value

    return change


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("schema_version", "1", "schema_version: found '1', expected 1"),
        ("schema_version", True, "schema_version: found True, expected 1"),
        ("schema_version", 0, "schema_version: found 0, expected 1"),
        ("schema_version", ..., "not an audit"),
        ("groups", ..., "not an audit: found an object with cost, deployment, engine"),
        ("rule", ..., "rule is missing"),
        ("layers.1.decided", ..., "layers.1.decided is missing"),
        ("layers.0.n", "64", "layers.0.n: Input should be a valid integer: found '64'"),
        ("layers.0.n", True, "layers.0.n: Input should be a valid integer: found True"),
        ("layers.0.n", 64.0, "layers.0.n"),
        ("layers.0.n", -1, "l.0.down: found -1, expected a size"),
        ("layers.0.k", 1 << 63, "l.0.down: found 9223372036854775808, expected a size"),
        ("layers.0.nbytes", -1, "l.0.down: found -1"),
        ("layers.0.experts", -1, "l.0.down: found -1"),
        ("layers.0", None, "layers.0: Input should be a valid dictionary: found NoneType"),
        ("layers.0.verdict.2", ..., "l.0.down: nothing about tp 2, which the audit names"),
        ("layers.0.decided.1", ..., "l.0.down: nothing about tp 1"),
        ("layers.0.decided.1", "fast", "layers.0.decided.1"),
        ("layers.0.engine", ..., "l.0.down: engine: nothing about tp 1"),
        ("layers.0.engine.2", ..., "l.0.down: engine: nothing about tp 2"),
        ("layers.0.placement", {"1": "sliced"}, "l.0.down: nothing about tp 2"),
        ("layers.0.verdict.1.scale_shard", [1], "l.0.down: found [1], expected [rows, columns]"),
        ("layers.0.verdict.1.scale_shard", [1, -1], "l.0.down: found -1"),
        ("layers.0.name", "l.1.down", "layer l.1.down stands twice"),
        ("groups.0.verdict.1", ..., "group l.0.up: nothing about tp 1"),
        ("groups.0.verdict.1.scale_shard", [], "group l.0.up: found []"),
        ("groups", [group("g"), group("g")], "groups: a name stands twice"),
        ("shared_experts.0.decision.2", ..., "shared expert l.{0,1}.shared_expert: nothing about"),
        ("shared_experts.0.width", -1, "shared expert l.{0,1}.shared_expert: found -1"),
        ("tp", [], "tp: found [], expected degrees from 1 to 1024"),
        ("tp", [1, 1], "tp: found [1, 1]"),
        ("tp", [0], "tp: found [0]"),
        ("tp", [2048], "tp: found [2048]"),
        ("tp", [1, 2, 4], "l.0.down: nothing about tp 4"),
        ("source.nbytes", -1, "source: found -1"),
        ("summary.tp.2", ..., "summary: nothing about tp 2"),
        ("summary.tp.2.asm.nbytes", 10**400, "summary: found 1000"),
        ("summary.mxfp4_nbytes", -1, "summary: found -1"),
        ("cost.1.rank_nbytes", -5, "cost: found -5"),
        ("cost.1.paths.asm.flops", 1.5, "cost: found 1.5, expected a share, 0 to 1"),
        ("cost.1.paths.asm.flops", float("nan"), "cost: found nan"),
        ("engine.outcomes.2", ..., "engine: nothing about tp 2"),
        ("engine.outcomes.2.ok", -1, "engine: found -1"),
        ("others.0.count", 3, "others: l.{0..1}.norm does not stand for 3 modules"),
        ("others.0.count", -1, "others: found -1"),
        (
            "others.0",
            {"name": "l.{0..299999}.{0..9}", "dtype": "x", "count": 3 * 10**6},
            "at most 2000000",
        ),
        ("others.0", {"name": "l.0.down", "dtype": "x", "count": 1}, "l.0.down stands twice"),
    ],
)
def test_files_that_are_not_a_whole_audit(
    tmp_path: Path, place: str, value: Any, words: str
) -> None:
    path = kept(tmp_path, changed(set_at(place, value)))
    with pytest.raises(InvalidCheckpoint) as caught:
        read_audit(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.hint == "mxfp4prep audit MODEL --format json > FILE"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "not an audit: found an empty one"),
        ('{"schema_version": 1, "schema_version": 1}', "key 'schema_version' stands twice"),
        ("{" * 100_000, "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ("\x00\x00", "not valid JSON"),
    ],
)
def test_files_that_are_no_audit_at_all(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        read_audit(kept(tmp_path, content))
    assert words in str(caught.value)
    assert "mxfp4prep audit" in (caught.value.hint or "")


def test_other_documents_of_ours_are_named_for_what_they_lack(tmp_path: Path) -> None:
    plan = {"schema_version": 1, "source": {}, "layers": [], "files": [], "findings": []}
    with pytest.raises(InvalidCheckpoint, match="not an audit: found an object with files, "):
        read_audit(kept(tmp_path, plan))


def test_a_newer_schema_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="found schema_version 2, expected at most 1"):
        read_audit(kept(tmp_path, changed(set_at("schema_version", 2))))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(IOFailed, match="no such file"):
        read_audit(tmp_path / "none.json")
    with pytest.raises(InvalidCheckpoint, match="a folder"):
        read_audit(tmp_path)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=5),
    st.just([]), st.just({}), st.just([1, 2]), st.just({"1": None, "2": "asm"}),
)  # fmt: skip


def anywhere(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """(container, key) of a random place in `document`."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        key = rng.choice(keys)
        inner = document[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.1:
            return document, key
        document = inner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audits")


@settings(max_examples=500, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    value=SCALARS,
    way=st.sampled_from(["set", "delete", "twice"]),
)
def test_whatever_is_in_the_file_ends_in_an_answer_or_a_clear_error(
    folder: Path, rng: random.Random, value: Any, way: str
) -> None:
    document = copy.deepcopy(BASE)
    container, key = anywhere(document, rng)
    if way == "set":
        container[key] = value
    elif way == "delete":
        del container[key]
    elif isinstance(container, list):
        container.append(container[key])
    else:
        container[f"{key}x"] = container[key]
    try:
        read = read_audit(kept(folder, document))
    except Mxfp4PrepError:
        return
    for pair in ((read, BASE), (BASE, read)):
        result = compared(*pair)
        assert all(line.isprintable() for line in lines(result))


# --- the command --------------------------------------------------------------------------------


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and stdout of `mxfp4prep diff WORDS`."""
    app = typer.Typer()
    app.command()(diff)

    @app.callback()
    def root(ctx: typer.Context) -> None:
        ctx.obj = Voice(False, {})

    code = app(args=["diff", *words], standalone_mode=False, prog_name="mxfp4prep")
    return code or 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints that differ in the width of one projection."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, k in (("a", 1024), ("b", 640)):
        linears = {"model.layers.0.mlp.down_proj": (512, k), "model.layers.0.mlp.up_proj": (k, 512)}
        write_checkpoint(folder / name, linears)
    return folder / "a", folder / "b"


def test_two_directories(
    checkpoints: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = map(str, checkpoints)
    code, shown = run(a, a, capsys=capsys)
    assert code == 0
    assert shown.endswith("\n\nA and B are the same at tp 1, 2, 4, 8.\n")
    assert " ".join(shown.split()).count(f"{a} (a): 2 MXFP4 layers, 557 kB, tp 1, 2, 4, 8") == 2
    code, shown = run(a, b, "--tp", "1,8", capsys=capsys)
    assert code == 1
    assert "    tp 1: asm -> triton (scale_cols)\n" in shown
    assert "    tp 8: triton (scale_cols) -> IMPOSSIBLE (split_groups)\n" in shown
    assert shown.endswith("A and B, compared at tp 1, 8, differ: 2 layers changed.\n")


def test_torch_is_left_alone(checkpoints: tuple[Path, Path]) -> None:
    code = (
        "import sys, typer\n"
        "from mxfp4prep.diff_command import diff\n"
        "from mxfp4prep.report.voice import Voice\n"
        "app = typer.Typer()\n"
        "app.command()(diff)\n"
        "app(args=sys.argv[1:], standalone_mode=False, obj=Voice(False, {}))\n"
        "print('torch' in sys.modules)"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(checkpoints[0]), str(checkpoints[0])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["A and B are the same at tp 1, 2, 4, 8.", "False"]


def test_json_for_programs(
    checkpoints: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = map(str, checkpoints)
    code, shown = run(a, b, "--format", "json", capsys=capsys)
    document = json.loads(shown)
    SCHEMA.validate(document)
    assert (code, document["same"]) == (1, False)
    assert run(a, a, "--format", "json", capsys=capsys)[0] == 0


def test_a_checkpoint_is_audited_like_the_audit_beside_it(
    checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(checkpoints[0])
    made = audit_document(run_audit(a, (1, 3, 16), deployment=Deployment(True, True, "separate")))
    audit = str(kept(tmp_path, payload.dumps(made)))
    for words in ((audit, a), (a, audit)):
        code, shown = run(*words, "--format", "json", capsys=capsys)
        document = json.loads(shown)
        assert (code, document["tp"]) == (0, [1, 3, 16])
        assert document["asked"] == document["skipped"] == []
    code, shown = run(audit, a, "--tp", "3", "--sp", "--format", "json", capsys=capsys)
    document = json.loads(shown)
    assert document["tp"] == [3]
    assert [fact["fact"] for fact in document["asked"]] == ["expert_parallel", "shared_experts"]


def test_parallel_rules_are_for_checkpoints(
    checkpoints: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = map(str, checkpoints)
    _, shown = run(a, b, "--parallel", "*.down_proj=column", "--format", "json", capsys=capsys)
    parts = {item["name"]: item for item in json.loads(shown)["changed"]}
    down = parts["model.layers.0.mlp.down_proj"]["verdict"]["2"]
    assert down["a"]["scale_shard"] == [256, 32]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tp", "2"), ("--ep", None), ("--sp", None), ("--shared-experts", "fused"),
     ("--parallel", "*=row")],
)  # fmt: skip
def test_options_do_nothing_for_audits_that_are_made(
    flag: str, value: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(kept(tmp_path, BASE))
    assert run(path, path, capsys=capsys)[0] == 0
    with pytest.raises(UsageError, match=f"^{flag}: has no effect"):
        run(path, path, flag, *([value] if value else []), capsys=capsys)


def test_audits_without_a_common_degree_cannot_be_compared(
    checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(kept(tmp_path, BASE))
    with pytest.raises(UsageError, match=r"no degree in common: found tp 1, 2 and tp 4"):
        run(path, str(checkpoints[0]), "--tp", "4", capsys=capsys)


def test_what_is_neither_an_audit_nor_a_checkpoint(
    checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(checkpoints[0])
    with pytest.raises(IOFailed, match="no such file"):
        run(a, str(tmp_path / "gone.json"), capsys=capsys)
    with pytest.raises(InvalidCheckpoint, match="no such directory"):
        run(a, str(tmp_path / "gone"), capsys=capsys)
    with pytest.raises(InvalidCheckpoint, match="not valid JSON"):
        run(a, str(checkpoints[1] / "model.safetensors"), capsys=capsys)
    with pytest.raises(InvalidCheckpoint, match="not an audit"):
        run(a, str(checkpoints[1] / "config.json"), capsys=capsys)
    with pytest.raises(InvalidCheckpoint):
        run(a, "x" * 5000, capsys=capsys)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(InvalidCheckpoint, match="a named pipe"):
        run(a, str(fifo), capsys=capsys)


def test_errors_say_which_of_the_two_it_is(
    checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(checkpoints[0])
    (tmp_path / "config.json").write_text("{")
    for words, line in (((a, str(tmp_path)), f"B is {tmp_path}:"), ((str(tmp_path), a), "A is ")):
        with pytest.raises(InvalidCheckpoint, match=r"^config\.json: not valid JSON"):
            run(*words, capsys=capsys)
        assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("columns", [24, 40, 80, 120])
def test_lines_fit_and_names_are_escaped(columns: int) -> None:
    def change(document: Any) -> None:
        document["source"].update(model_type="evil\x1b[31m", files=3)
        document["layers"][0].update(name="l.\x1b\u202e" + "long" * 30)
        document["layers"][1].update(group="gr\x1b" + "long" * 30, n=32)
        document["others"][0]["dtype"] = "\x1bdtype"
        document["findings"] = [finding("\x1bc", "\x1b", "word " * 40)]
        document["summary"]["tp"]["1"] = paths(1)
        document["cost"]["1"] = cost(10**12)

    document = compared(BASE, changed(change))
    for line in lines(document, columns):
        assert len(line) <= columns
        assert line.isprintable()
