"""The HTML page of an audit: what it says, how large it gets, and how it behaves in a browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, Page, chromium
from quark_factory import model_config, quant_config, write_checkpoint
from real_models import MODELS, write

from mxfp4prep.alignment import HAZARDS, REASONS
from mxfp4prep.auditing import EngineQuestion, audit_checkpoint
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.report import payload
from mxfp4prep.report.audit_document import audit_document
from mxfp4prep.report.html import html_page
from mxfp4prep.report.page import budget
from mxfp4prep.report.page.markup import Html, el, join, name, text, void
from mxfp4prep.report.page.overview import _percent
from mxfp4prep.report.page.reasons import spell_degrees

TP = (1, 2, 4, 8)
HOSTILE = "</script></style><img src=x onerror=pwned()>\"'><svg onload=pwned()>&lt;\u202e\x1b[2J"


def document_of(root: Path, tp: tuple[int, ...] = TP, **asked: Any) -> Any:
    """The audit of a checkpoint directory as its JSON document."""
    return audit_document(audit_checkpoint(open_checkpoint(root), tp, **asked))


def everything(root: Path, name: str = "everything") -> Any:
    """A small audit that has every part of the page: T and X, odd experts, an engine, values."""
    linears: dict[str, tuple[int, int]] = {"visual_head": (96, 512)}
    for i in range(4):
        at = f"model.layers.{i}"
        linears |= {
            f"{at}.self_attn.q_proj": (512, 512),
            f"{at}.self_attn.k_proj": (128, 512),
            f"{at}.self_attn.v_proj": (128, 512),
            f"{at}.self_attn.o_proj": (512, 512),
        }
        widths = {f"experts.{e}": 1408 if (i, e) == (2, 3) else 640 for e in range(4)}
        for expert, width in {**widths, "shared_expert": 1408}.items():
            linears |= {
                f"{at}.mlp.{expert}.gate_proj": (width, 512),
                f"{at}.mlp.{expert}.up_proj": (width, 512),
                f"{at}.mlp.{expert}.down_proj": (512, width),
            }
    config = model_config(
        quant_config(exclude=["lm_head", "nothing.like.this"]),
        model_type="qwen2_moe", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    extra = {"lm_head.weight": torch.zeros(64, 512, dtype=torch.bfloat16)}
    path = write_checkpoint(root / name, linears, config=config, extra=extra)
    return document_of(path, engine=EngineQuestion("vllm-0.33"), values=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("html")


@pytest.fixture(scope="module")
def small(folder: Path) -> Any:
    return everything(folder)


@pytest.fixture(scope="module")
def large(folder: Path) -> Any:
    """Qwen3-235B: 94 layers of 128 experts, 36,472 MXFP4 layers."""
    write(folder / "qwen3-235b", MODELS["qwen3-235b"])
    return document_of(folder / "qwen3-235b")


@pytest.fixture(scope="module")
def hostile(folder: Path) -> Any:
    """A checkpoint whose names are attacks, as the page's every part shows them."""
    found = json.loads(payload.dumps(everything(folder, "hostile")))
    found["source"] |= {"name": HOSTILE, "model_type": HOSTILE, "quark_version": HOSTILE}
    found["rule"] = found["summary"]["recommendation"] = HOSTILE
    for layer in found["layers"]:
        layer["name"] = layer["name"].replace("layers", f"layers{HOSTILE}")
        layer["scheme"] = layer["parallel"] = HOSTILE
        for verdict in layer["verdict"].values():
            verdict["reasons"] = [*verdict["reasons"], HOSTILE]
            verdict["detail"] = HOSTILE
        for outcome in layer["engine"].values():
            outcome |= {"path": HOSTILE, "message": HOSTILE}
    for group in found["groups"]:
        group["name"] += HOSTILE
        group["members"] = [member + HOSTILE for member in group["members"]]
    for shared in found["shared_experts"]:
        shared |= {"name": HOSTILE, "why": HOSTILE, "message": dict.fromkeys("1248", HOSTILE)}
    found["engine"] |= {
        "name": HOSTILE, "version": HOSTILE,
        "sources": [HOSTILE, "https://a.invalid/\"><b>", "javascript:pwned()"],
        "switches": {HOSTILE: HOSTILE}, "assumptions": [HOSTILE],
    }  # fmt: skip
    found["values"]["layers"] = [
        {"layer": HOSTILE, "nan": 1, "nan_places": [[0, 1]], "zero_blocks": 0,
         "minimum": 1, "maximum": 255}
    ]  # fmt: skip
    for finding in found["findings"]:
        finding |= {"where": HOSTILE, "message": HOSTILE, "code": HOSTILE}
    for other in found["others"]:
        other |= {"name": HOSTILE, "dtype": HOSTILE}
    return found


class Read(HTMLParser):
    """Ids, links, rows of the first map and all text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.words: list[str] = []
        self._quiet = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self._quiet = tag in ("style", "script")
        for key, value in attrs:
            assert not key.startswith("on"), f"a handler: {key}"
            assert key != "style"  # the policy would block it
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "src"):
                if (value or "").startswith("#"):
                    self.links.append((value or "")[1:])
                else:
                    self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._quiet = False

    def handle_data(self, data: str) -> None:
        if not self._quiet:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def rows_of(page: str) -> dict[str, tuple[str, str]]:
    """Row name -> (paths as a, t, x, its reasons in short) of the map of families."""
    part = page[page.index('id="layers"') :]
    found = {}
    pattern = (
        r'<tbody id="f\d+"[^>]*data-paths="([^"]*)"><tr><th scope="row"><code>(.*?)</code>.*?'
        r"<summary>(.*?)</summary>"
    )
    for paths, named, why in re.findall(pattern, part, re.DOTALL):
        strip = [unescape(re.sub(r"<[^>]*>", "", words)) for words in (named, why)]
        found[strip[0]] = (paths, strip[1])
    return found


# --- markup -------------------------------------------------------------------------------------


def test_what_is_not_markup_is_text() -> None:
    made = el("p", "<b>&", Html("<i>"), 3, None, ["x", ["<"]], title='"<', hidden=True, id=None)
    assert made == '<p title="&quot;&lt;" hidden>&lt;b&gt;&amp;<i>3x&lt;</p>'
    assert void("input", class_="a", data_x=1) == '<input class="a" data-x="1">'
    assert join(["a", "b"], "<") == "a&lt;b"
    assert text("a\x1b\u202e<") == "a\\x1b\\u202e&lt;"


def test_a_long_text_keeps_both_ends() -> None:
    shown = str(text("a" * 3000 + "b" * 3000))
    assert shown == "a" * 1000 + " … " + "b" * 1000
    assert name("a.b/<c") == "<code>a.<wbr>b/<wbr>&lt;c</code>"


# --- what it says -------------------------------------------------------------------------------


def test_the_head_has_the_facts(small: Any) -> None:
    read = Read(html_page(small))
    source = small["source"]
    for fact in (
        "everything", "qwen2_moe", "Quark 0.13", "1 safetensors file", "77 MXFP4 layers",
        "rows % 32 == 0, columns % 8 == 0, rows != 96", source["config_sha256"],
        small["summary"]["recommendation"].split("`")[0], "mxfp4prep 0.",
        "Some layers cannot be split at tp 8: do not serve there.",
    ):  # fmt: skip
        assert fact in read.text


def test_nothing_tells_where_or_when_it_was_made(small: Any, folder: Path) -> None:
    page = html_page(small)
    assert str(folder) not in page
    assert not re.search(r"\b20\d\d-\d\d|\d\d:\d\d", page.split("</style>")[1].split("<script>")[0])
    assert html_page(small) == page


def test_each_row_says_its_path_and_the_numbers(small: Any) -> None:
    rows = rows_of(html_page(small))
    at = "model.layers.{0..3}"
    # 640 / 32 = 20 columns, then 10, 5, and 80 values are 2.5 groups
    paths, why = rows[f"{at}.mlp.experts.{{0..3}}.down_proj"]
    assert paths == "tttx"
    assert "tp 1, 2, 4 scale_cols 20, 10, 5 columns % 8 = 4, 2, 5" in why
    assert "tp 8 impossible, split_groups" in why
    assert "640 / 8 = 80 columns = 2.5 groups" in why
    # 1408 / 32 = 44, 22, 11 columns, and 176 values are 5.5 groups
    paths, why = rows["model.layers.2.mlp.experts.3.down_proj"]
    assert paths == "tttx"
    assert "44, 22, 11 columns % 8 = 4, 6, 3" in why
    # rows 640, 320, 160, and 80 % 32 = 16
    assert rows[f"{at}.mlp.experts.{{0..3}}.{{gate_proj,up_proj}}"][0] == "aaat"
    # K 512: 16, 8 columns; then 4 and 2
    paths, why = rows[f"{at}.self_attn.o_proj"]
    assert paths == "aatt"
    assert "4, 2 columns % 8 = 4, 2" in why
    paths, why = rows["visual_head"]
    assert paths == "tttt"
    assert why.startswith("tp 1, 2, 4, 8 bad_tile 96 rows")


def test_a_part_says_what_its_whole_decides(folder: Path) -> None:
    linears = {
        "model.layers.0.self_attn.q_proj": (512, 256),
        "model.layers.0.self_attn.k_proj": (32, 256),
        "model.layers.0.self_attn.v_proj": (16, 256),
    }
    config = model_config(num_attention_heads=32, num_key_value_heads=2, head_dim=16)
    root = write_checkpoint(folder / "joined", linears, config=config)
    rows = rows_of(html_page(document_of(root, (1,))))
    # 512 + 32 + 16 = 560 rows, and 560 % 32 = 16
    expected = "tp 1 scale_rows joined in qkv_proj: 560 rows % 32 = 16"
    assert rows["model.layers.0.self_attn.q_proj"] == ("t", expected)
    assert rows["model.layers.0.self_attn.k_proj"] == ("t", expected)
    assert rows["model.layers.0.self_attn.v_proj"] == ("t", "tp 1 scale_rows 16 rows % 32 = 16")


def test_a_part_that_another_part_holds_back_says_so(folder: Path) -> None:
    linears = {
        "model.layers.0.self_attn.q_proj": (32, 256),
        "model.layers.0.self_attn.k_proj": (16, 256),
        "model.layers.0.self_attn.v_proj": (16, 256),
    }
    config = model_config(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    root = write_checkpoint(folder / "held", linears, config=config)
    document = document_of(root, (1,))
    document["layers"][1]["verdict"]["1"]["hazards"] = ["small_n"]  # of q_proj, were it ASM
    page = html_page(document)
    rows = rows_of(page)
    # 32 + 16 + 16 = 64 rows are whole tiles, but the parts of 16 are none
    assert rows["model.layers.0.self_attn.q_proj"] == (
        "t", f"tp 1 group_part joined in qkv_proj: {REASONS['group_part']}",
    )  # fmt: skip
    why = rows["model.layers.0.self_attn.{k_proj,v_proj}"][1]
    assert why == "tp 1 scale_rows 16 rows % 32 = 16"
    said = Read(page[page.index('id="fused"') :]).text
    assert "model.layers.0.self_attn.qkv_proj1 fused projection · k_proj + q_proj + v_proj" in said
    assert f"Ttp 1 group_part {REASONS['group_part']}" in said


def test_degrees_share_a_line_only_where_they_share_the_reasons(small: Any) -> None:
    (layer,) = nasty(1, 1, TP)
    columns = {"path": "triton", "scale_shard": [256, 20], "reasons": ["scale_cols"], "hazards": []}
    both = {**columns, "scale_shard": [80, 20], "reasons": ["scale_rows", "scale_cols"]}
    layer["verdict"] = {"1": columns, "2": columns, "4": both, "8": {**columns, "path": "asm"}}
    layer["decided"] = {"1": "triton", "2": "triton", "4": "triton", "8": "asm"}
    (row,) = rows_of(html_page({**small, "layers": [layer], "groups": []})).values()
    assert row == (
        "ttta",
        "tp 1, 2 scale_cols 20 columns % 8 = 4"
        "tp 4 scale_rows scale_cols 80 rows % 32 = 16, 20 columns % 8 = 4"
        "tp 8 asm, scale_cols 20 columns % 8 = 4",
    )


def test_a_hazard_is_marked_and_explained(small: Any) -> None:
    verdict = {"path": "asm", "scale_shard": [128, 8], "reasons": [], "hazards": ["small_n"]}
    (layer,) = nasty(1, 1, (1,))
    layer |= {"verdict": {"1": verdict}, "decided": {"1": "asm"}}
    page = html_page({**small, "tp": [1], "layers": [layer], "groups": []})
    assert ">A<sup>*</sup></a>" in page
    assert "<a href=#f0-1>A<sup>*</sup></a>" in page  # by depth
    assert "* a hazard" in Read(page).text
    (why,) = [why for _, why in rows_of(page).values()]
    assert why == "tp 1 asm, small_n fewer than 256 rows on a rank"
    assert HAZARDS["small_n"] in Read(page).text


def test_a_whole_of_the_same_shape_keeps_its_name(folder: Path) -> None:
    linears = {
        f"model.layers.{i}.mlp.{part}_proj": (n, 256)
        for i in (0, 1)
        for part, n in (("gate", 64), ("up", 32))
    }
    document = document_of(write_checkpoint(folder / "named", linears), (1,))
    first, second = document["groups"]
    assert first["verdict"] is second["verdict"]
    second["name"] = "model.layers.1.mlp.other_proj"
    for layer in document["layers"]:
        if ".1." in layer["name"]:
            layer["group"] = second["name"]
    rows = rows_of(html_page(document))
    for i, whole in enumerate(("gate_up_proj", "other_proj")):
        # 64 + 32 = 96 rows, each part fine by itself
        expected = ("t", f"tp 1 bad_tile joined in {whole}: 96 rows")
        assert rows[f"model.layers.{i}.mlp.gate_proj"] == expected
        assert rows[f"model.layers.{i}.mlp.up_proj"] == expected


def test_the_numbers_of_a_real_model(large: Any) -> None:
    page = html_page(large)
    rows = rows_of(page)
    at = "model.layers.{0..93}"
    # 1536 / 32 = 48 columns, 24, 12, 6
    paths, why = rows[f"{at}.mlp.experts.{{0..127}}.down_proj"]
    assert (paths, why) == ("aatt", "tp 4, 8 scale_cols 12, 6 columns % 8 = 4, 6")
    assert rows[f"{at}.self_attn.q_proj"] == ("aaaa", "asm at every degree")
    read = Read(page)
    assert "36,472 MXFP4 layers" in read.text
    assert "12,032 layers · 4096 × 1536 · W4A4 · expert" in read.text
    assert "Every layer takes the ASM path at tp 1, 2." in read.text


def test_every_reason_and_hazard_is_explained(small: Any) -> None:
    read = Read(html_page(small))
    verdicts = [v for layer in small["layers"] for v in layer["verdict"].values()]
    codes = {code for v in verdicts for code in (*v["reasons"], *v["hazards"])}
    assert {"scale_cols", "scale_rows", "split_groups", "bad_tile"} <= codes
    for code in codes:
        assert (
            f"{code}{(REASONS | HAZARDS)[code]}" in read.text
        )  # the legend's term, then its words


def test_all_parts_are_there_and_linked(small: Any) -> None:
    page = html_page(small)
    read = Read(page)
    assert len(read.ids) == len(set(read.ids)), "an id twice"
    assert set(read.links) <= set(read.ids), "a link to nowhere"
    nav = re.search(r"<nav.*?</nav>", page, re.DOTALL)
    assert nav is not None
    assert re.findall(r'href="#(\w+)"', nav.group()) == [
        "degrees", "layers", "depth", "fused", "shared", "engine", "values", "findings", "others",
        "codes",
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["cost", "engine", "values", "groups", "others", "findings"])
def test_what_was_not_asked_for_is_not_there(small: Any, key: str) -> None:
    empty: dict[str, Any] = {"cost": {}, "engine": None, "values": None}
    changed = {**small, key: empty.get(key, [])}
    read, before = Read(html_page(changed)), Read(html_page(small))
    gone = {
        "cost": "a rank holds",
        "engine": "What each layer meets",
        "values": "Scale bytes run from",
        "groups": "Fused projections",
        "others": "Not MXFP4",
        "findings": "pattern_unmatched",
    }
    assert gone[key] in before.text
    assert gone[key] not in read.text
    assert set(read.links) <= set(read.ids)


def test_an_audit_of_nothing_is_a_page(small: Any) -> None:
    paths = {path: {"layers": 0, "nbytes": 0} for path in ("asm", "triton", "impossible")}
    summary = {
        **small["summary"], "layers": 0, "tp": dict.fromkeys(map(str, TP), paths),
        "findings": {"error": 0, "warning": 0, "note": 0}, "recommendation": "",
    }  # fmt: skip
    nothing = {
        **small, "layers": [], "groups": [], "shared_experts": [], "findings": [], "cost": {},
        "engine": None, "values": None, "others": [], "summary": summary,
    }  # fmt: skip
    read = Read(html_page(nothing))
    assert "There is no MXFP4 layer here." in read.text
    assert set(read.links) <= set(read.ids)


def test_cost_is_said_per_degree(small: Any) -> None:
    cost = {
        "rank_nbytes": 17_100_000_000, "rank_mxfp4_nbytes": 16_400_000_000,
        "padding_nbytes": 3_200_000_000,
        "paths": {
            "asm": {"nbytes": 0.6725, "flops": 0.99975},
            "triton": {"nbytes": 0.3275, "flops": 0.00025},
            "impossible": {"nbytes": 0.0, "flops": 0.0},
        },
    }  # fmt: skip
    read = Read(html_page({**small, "cost": {"4": cost}}))
    for words in ("17.1 GB", "16.4 GB", "3.2 GB", "A > 99.9 % · T < 0.1 %"):
        assert read.text.count(words) == 1


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.0, "0 %"), (1.0, "100 %"), (0.5, "50 %"), (0.1234, "12.3 %"), (0.0004, "< 0.1 %"),
     (0.9996, "> 99.9 %"), (0.001, "0.1 %")],
)  # fmt: skip
def test_a_share_is_never_rounded_to_all_or_nothing(share: float, said: str) -> None:
    assert _percent(share) == said


@pytest.mark.parametrize(
    ("degrees", "said"),
    [("1", "tp 1"), ("1 2 4 8", "tp 1, 2, 4, 8"), ("3 5 6 7 9 10", "tp 3, 5–7, 9, 10")],
)
def test_degrees_are_spelled_as_runs(degrees: str, said: str) -> None:
    assert spell_degrees(degrees.split()) == said


def test_the_engine_speaks_where_it_does_not_run(small: Any) -> None:
    page = html_page(small)
    outcomes = Counter(layer["engine"]["8"]["outcome"] for layer in small["layers"])
    assert outcomes["corrupt"] == 16, "the routed down_proj at tp 8"
    why = rows_of(page)["model.layers.{0..3}.mlp.experts.{0..3}.down_proj"][1]
    assert "tp 8 the engine: corrupt: 640 / 8 = 80 columns" in why
    assert "X<sup>‼</sup>" in page


def test_findings_come_with_their_severity_gravest_first(small: Any) -> None:
    found = [
        {"code": "c1", "severity": "note", "where": "w1", "message": "m1"},
        {"code": "c2", "severity": "error", "where": "w2", "message": "m2"},
        {"code": "c3", "severity": "warning", "where": "w3", "message": "m3"},
    ]
    counts = {"error": 1, "warning": 1, "note": 1}
    summary = {**small["summary"], "findings": counts}
    said = Read(html_page({**small, "findings": found, "summary": summary})).text
    assert "1 error, 1 warning, 1 note." in said
    order = [said.index(words) for words in ("errorw2m2c2", "warningw3m3c3", "notew1m1c1")]
    assert order == sorted(order)


# --- depth --------------------------------------------------------------------------------------


def depth_rows(page: str, place: int) -> dict[str, dict[str, str]]:
    """Number of the layer -> projection -> its cell, of the panel of one degree."""
    part = page[page.index(f'id="p{place}"') :]
    part = part[: part.index("</tbody>")]
    heads = re.findall(r'data-kind="\w+"><span><code>(.*?)</code>', part)
    spans = re.findall(r'<th scope="colgroup" colspan="(\d+)"><code>(.*?)</code>', part)
    above = [parent.replace("<wbr>", "") for count, parent in spans for _ in range(int(count))]
    columns = [f"{parent}.{head}" for parent, head in zip(above, heads, strict=True)]
    rows = {}
    for number, cells in re.findall(r"<th scope=row>(\d+)(.*?)(?=<tr|$)", part, re.DOTALL):
        split = re.split(r"<td(?: class=\w)?>", cells)[1:]
        said = [re.sub(r"<[^>]*>", "", cell) for cell in split]
        rows[number] = dict(zip(columns, said, strict=True))
    return rows


def test_a_row_for_each_layer_and_a_cell_for_each_projection(large: Any) -> None:
    page = html_page(large)
    rows = depth_rows(page, 2)
    assert list(rows) == [str(i) for i in range(94)]
    every = {f"self_attn.{part}_proj" for part in "qkvo"}
    every |= {f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")}
    for row in rows.values():
        # 512 / 4 = 128 rows of k and of v, but 2304 of what they are joined in
        assert row == dict.fromkeys(every, "A") | {"mlp.experts.*.down_proj": "T"}
    for row in depth_rows(page, 0).values():
        assert row == dict.fromkeys(every, "A")
    assert "<span class=run>…93</span>" in page
    assert page.count("<tr class=s>") == 4 * 93  # all but the first of each degree's run


def test_odd_experts_are_counted_and_told_apart(small: Any) -> None:
    page = html_page(small)
    at8 = depth_rows(page, 3)
    # 640 / 8 = 80 rows and 1408 / 8 = 176 rows, both % 32 = 16
    assert at8["1"]["mlp.experts.*.gate_proj"] == "T"
    assert at8["2"]["mlp.experts.*.gate_proj"] == "T≠"
    assert at8["2"]["mlp.experts.*.down_proj"].startswith("X")
    assert at8["2"]["mlp.shared_expert.down_proj"].startswith("X")
    assert depth_rows(page, 1)["2"]["mlp.experts.*.down_proj"] == "T≠"
    assert depth_rows(page, 1)["1"]["mlp.experts.*.down_proj"] == "T"
    apart = page[page.index('class="apart"') :]
    said = Read(apart).text
    assert "mlp.experts.*.down_proj in 2 kinds at model.layers.2" in said
    assert "3 of 4: {0..2}, 512 × 640" in said
    assert "1 of 4: 3, 512 × 1408" in said


def test_the_worst_of_a_cell_counts_and_says_for_how_many(folder: Path) -> None:
    linears = {f"model.layers.0.mlp.experts.{e}.down_proj": (256, 256) for e in range(6)}
    linears |= {f"model.layers.0.mlp.experts.{e}.down_proj": (256, 320) for e in (1, 4)}
    page = html_page(document_of(write_checkpoint(folder / "odd", linears), (1,)))
    assert depth_rows(page, 0) == {"0": {"mlp.experts.*.down_proj": "T2/6"}}
    said = Read(page).text
    # the worse ones first, though they are fewer and come later
    assert said.index("2 of 6: {1,4}, 256 × 320") < said.index("4 of 6: {0,2,3,5}, 256 × 256")


def test_layers_without_a_number_are_counted(small: Any) -> None:
    assert "1 layer without a number in the name not shown here." in Read(html_page(small)).text


# --- size ---------------------------------------------------------------------------------------


def test_a_page_of_36000_layers_stays_small(large: Any) -> None:
    page = html_page(large)
    assert len(page.encode()) < 300_000
    assert len(large["layers"]) == 36_472
    assert Read(page).tags.total() < 12_000
    assert "experts.17." not in page


def nasty(layers: int, experts: int, tp: tuple[int, ...]) -> Any:
    """A document in which no expert is like another."""
    found = []
    for i in range(layers):
        for e in range(experts):
            k = 32 * (i * experts + e + 1)
            verdict, decided = {}, {}
            for degree in tp:
                fits = k % (32 * degree) == 0
                path = "triton" if fits else "impossible"
                shard = [256, k // 32 // degree] if fits else None
                reasons = ["scale_cols"] if fits else ["split_groups"]
                said = {"path": path, "scale_shard": shard, "reasons": reasons, "hazards": []}
                verdict[str(degree)] = (
                    said if fits else {**said, "detail": f"{k} / {degree} is odd"}
                )
                decided[str(degree)] = path
            name = f"model.layers.{i}.mlp.experts.{e}.down_proj"
            found.append(
                {"name": name, "kind": "expert", "parallel": "row", "group": None,
                 "scheme": "w4a4", "n": 256, "k": k, "experts": None, "nbytes": 136 * k,
                 "verdict": verdict, "decided": decided}
            )  # fmt: skip
    return found


@pytest.mark.parametrize("tp", [TP, tuple(range(1, 65)), tuple(range(1, 200))], ids=len)
def test_a_model_of_odd_experts_stays_bounded_and_says_so(small: Any, tp: tuple[int, ...]) -> None:
    layers = nasty(60, 64, tp)
    paths = {path: {"layers": 0, "nbytes": 0} for path in ("asm", "triton", "impossible")}
    summary = {**small["summary"], "tp": dict.fromkeys(map(str, tp), paths), "asm_tp": []}
    document = {
        **small, "tp": list(tp), "layers": layers, "groups": [], "summary": summary,
        "findings": small["findings"] * 500, "shared_experts": small["shared_experts"] * 500,
        "others": small["others"] * 5000,
    }  # fmt: skip
    page = html_page(document)
    assert len(page.encode()) < 1_500_000
    read = Read(page)
    kept = budget.rows_for(min(len(tp), budget.MAX_DEGREES))
    left = 60 * 64 - kept
    assert f"{left:,} more rows, {left:,} layers" in read.text
    assert len(rows_of(page)) == kept
    assert "more have no room here" in read.text
    if len(tp) > budget.MAX_DEGREES:
        assert f"{len(tp) - budget.MAX_DEGREES} more were asked for" in read.text
    assert set(read.links) <= set(read.ids)


def test_the_rest_is_added_up_and_the_worst_rows_are_kept(small: Any) -> None:
    layers = nasty(20, 20, (1, 2))
    layers += [{**layer, "name": layer["name"].replace("down", "up")} for layer in layers]
    # 400 rows of 2 layers; k / 32 is odd for half of them, which cannot be split at tp 2
    paths = {path: {"layers": 0, "nbytes": 0} for path in ("asm", "triton", "impossible")}
    summary = {**small["summary"], "tp": {"1": paths, "2": paths}}
    page = html_page({**small, "tp": [1, 2], "layers": layers, "groups": [], "summary": summary})
    assert {paths for paths, _ in rows_of(page).values()} == {"tx"}
    assert len(rows_of(page)) == budget.MAX_ROWS
    said = Read(page[page.index('id="rest"') :]).text
    assert "240 more rows, 480 layers" in said
    assert "tp 1 480 Triton" in said
    assert "tp 2 400 Triton, 80 impossible" in said


def test_sets_of_experts_that_differ_are_capped(small: Any) -> None:
    layers = nasty(budget.MAX_BREAKDOWNS + 7, 2, (1,))
    paths = {path: {"layers": 0, "nbytes": 0} for path in ("asm", "triton", "impossible")}
    summary = {**small["summary"], "tp": {"1": paths}}
    page = html_page({**small, "tp": [1], "layers": layers, "groups": [], "summary": summary})
    read = Read(page)
    assert "7 more sets of layers that differ have no room here." in read.text
    assert page.count("href=#erest") == 7
    assert set(read.links) <= set(read.ids)


def alike(names: list[str], tp: tuple[int, ...], small: Any) -> Any:
    """A document of layers that differ in nothing but their names."""
    (layer,) = nasty(1, 1, tp)
    paths = {path: {"layers": 0, "nbytes": 0} for path in ("asm", "triton", "impossible")}
    summary = {**small["summary"], "tp": dict.fromkeys(map(str, tp), paths)}
    layers = [{**layer, "name": name} for name in names]
    return {**small, "tp": list(tp), "layers": layers, "groups": [], "summary": summary}


def test_the_map_by_depth_says_what_it_leaves_out(small: Any) -> None:
    stacks = [f"stack{s}.{i}.proj" for s in range(15) for i in range(2)]
    said = Read(html_page(alike(stacks, (1,), small))).text
    assert "6 layers of further stacks or projections left out." in said
    columns = [f"model.layers.{i}.proj{p:02}" for p in range(35) for i in range(2)]
    page = html_page(alike(columns, (1,), small))
    assert "6 layers of further stacks or projections left out." in Read(page).text
    assert len(depth_rows(page, 0)["1"]) == 32
    deep = [f"model.layers.{i}.proj" for i in range(7000)]
    page = html_page(alike(deep, (1, 2), small))
    assert "There is room for tp 1 only; the map above has the others." in Read(page).text
    assert len(depth_rows(page, 0)) == 7000
    deeper = [f"model.layers.{i}.proj" for i in range(12_345)]
    assert "No room for 345 more rows." in Read(html_page(alike(deeper, (1,), small))).text


def test_names_of_all_forms_find_their_place(small: Any) -> None:
    names = ["3.proj", "blocks.0", "blocks.1", "a.5.b.6.c.7.proj", "a.05.proj", "no_number"]
    page = html_page(alike(names, (1,), small))
    read = Read(page)
    assert set(read.links) <= set(read.ids)
    assert set(rows_of(page)) == {
        "3.proj", "blocks.{0,1}", "a.5.b.6.c.7.proj", "a.05.proj", "no_number",
    }  # fmt: skip
    assert "2 layers without a number in the name not shown here." in read.text
    for words in ("numbered layers at tp 1", "blocks at tp 1", "b.*.c.*", "(the layer itself)"):
        assert words in read.text


def test_long_names_and_messages_are_cut(small: Any) -> None:
    layers = [{**layer, "name": layer["name"] + "x" * 100_000} for layer in small["layers"]]
    finding = {"code": "c", "severity": "note", "where": "w" * 10**6, "message": "m" * 10**6}
    page = html_page({**small, "layers": layers, "findings": [finding]})
    assert len(page.encode()) < 400_000


def test_the_page_is_a_function_of_the_json(small: Any, large: Any) -> None:
    for document in (small, large):
        again = json.loads(payload.dumps(document))
        assert html_page(again) == html_page(document)


def test_real_fixtures_make_sound_pages(mxfp4_fixture: Path) -> None:
    document = document_of(mxfp4_fixture)
    page = html_page(document)
    read = Read(page)
    assert page.startswith("<!doctype html>")
    assert len(read.ids) == len(set(read.ids))
    assert set(read.links) <= set(read.ids)
    decided = Counter(
        (layer["decided"]["2"], layer["kind"]) for layer in document["layers"]
    )  # every layer is in a row of its path
    counted: Counter[tuple[str, str]] = Counter()
    words = {"a": "asm", "t": "triton", "x": "impossible"}
    pattern = r'<tbody id="f\d+" data-kind="(\w+)" data-paths="(\w+)">.*?<small>([\d,]+) layer'
    for kind, paths, layers in re.findall(pattern, page, re.DOTALL):
        counted[(words[paths[1]], kind)] += int(layers.replace(",", ""))
    assert counted == decided


# --- safety -------------------------------------------------------------------------------------


def test_hostile_names_stay_text(hostile: Any, small: Any) -> None:
    read, plain = Read(html_page(hostile)), Read(html_page(small))
    assert HOSTILE.split("\u202e")[0] in read.text
    assert r"\u202e\x1b[2J" in read.text
    for tag in ("script", "style", "svg", "img"):
        assert read.tags[tag] == plain.tags[tag]
    assert read.addresses == [read.addresses[0], 'https://a.invalid/"><b>']


def test_the_policy_allows_nothing_from_elsewhere(small: Any) -> None:
    page = html_page(small)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    parts = unescape(policy.group(1)).split(";")
    rules = dict(part.strip().split(" ", 1) for part in parts)
    assert rules.keys() == {
        "default-src", "style-src", "script-src", "img-src", "base-uri", "form-action",
    }  # fmt: skip
    for key, value in rules.items():
        assert value in ("'none'", "data:") or re.fullmatch(r"'sha256-[\w+/]{43}='", value), key
    assert rules["default-src"] == "'none'"
    assert Read(page).addresses[0].startswith("data:image/svg+xml,")
    assert all(a.startswith("https://") for a in Read(page).addresses[1:])


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    profile = tmp_path_factory.mktemp("browser") / "profile"
    with chromium(profile) as started:
        yield started


@pytest.fixture(scope="module")
def files(folder: Path, small: Any, large: Any, hostile: Any) -> dict[str, str]:
    """Addresses of the pages."""
    urls = {}
    for key, document in (("small", small), ("large", large), ("hostile", hostile)):
        path = folder / f"{key}.html"
        path.write_text(html_page(document), encoding="utf-8")
        urls[key] = path.as_uri()
    return urls


def opened(browser: Browser, url: str, **options: Any) -> Page:
    page = browser.page(**options)
    page.open(url)
    return page


def quiet(page: Page, url: str) -> None:
    """Raises unless the page said nothing and asked for itself alone."""
    assert page.complaints() == []
    assert page.requests() == [url]


LOOKS = {
    "light": {"width": 1280, "height": 900},
    "dark": {"width": 1280, "height": 900, "dark": True},
    "narrow": {"width": 390, "height": 844},
    "no scripts": {"width": 1280, "height": 900, "scripts": False},
}

WEAK = """(() => {
  const parse = (words) => (words.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const weak = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || /^(SCRIPT|OPTION)$/.test(element.tagName)) continue;
    if (!element.checkVisibility({ opacityProperty: true })) continue;
    const pair = [light(parse(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    seen += 1;
    if (ratio < 4.5) weak.push([walker.currentNode.data.trim().slice(0, 40), ratio]);
  }
  return [seen, weak.slice(0, 5)];
})()"""
"""Texts whose contrast is below 4.5 (WCAG 2.2, 1.4.3), and how many were measured."""


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("key", ["small", "large", "hostile"])
def test_the_page_is_quiet_whole_and_legible(
    browser: Browser, files: dict[str, str], key: str, look: str
) -> None:
    page = opened(browser, files[key], **LOOKS[look])
    picture = page.screenshot(whole=True)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    width = page.run("document.documentElement.scrollWidth")
    assert width <= LOOKS[look]["width"], "the page itself scrolls sideways"
    seen, weak = page.run(WEAK)
    assert seen > 100
    assert weak == []
    assert page.run("typeof pwned + document.images.length") == "undefined0"
    quiet(page, files[key])


@pytest.mark.parametrize("dark", [False, True])
def test_filtered_and_open_parts_are_legible_too(
    browser: Browser, files: dict[str, str], dark: bool
) -> None:
    page = opened(browser, files["small"], dark=dark)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.click('#filters [name="path"][value="a"]')
    page.run("document.querySelector('#f0 td a').focus()")
    assert page.run("document.querySelectorAll('td.off').length") > 20
    assert page.run("document.querySelector('#peek').hidden") is False
    assert page.run(WEAK)[1] == []


def test_letters_stand_on_different_shades_of_grey(browser: Browser, files: dict[str, str]) -> None:
    """Colours that are told apart without seeing colour, and in print."""
    for dark in (False, True):
        page = opened(browser, files["small"], dark=dark)
        shades = page.run(
            "['a', 't', 'x'].map(c => getComputedStyle(document.querySelector('#f0, .chip.' + c))"
            ".backgroundColor && getComputedStyle(document.querySelector('.chip.' + c))"
            ".backgroundColor.match(/\\d+/g).map(Number))"
        )
        greys = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in shades]
        gaps = [abs(greys[i] - greys[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
        assert min(gaps) > 15, greys


def test_it_prints_with_every_reason(browser: Browser, files: dict[str, str]) -> None:
    page = opened(browser, files["small"])
    paper = page.pdf()
    assert paper.startswith(b"%PDF-")
    assert paper.count(b"/Type /Page\n") + paper.count(b"/Type /Page ") > 2
    page.print_media(True)
    for hidden in ("#filters", "nav", ".chooser"):
        assert page.run(f"document.querySelector('{hidden}').checkVisibility()") is False
    shown = page.run("[...document.querySelectorAll('.sums tr')].map(r => r.checkVisibility())")
    assert len(shown) > 40
    assert all(shown), "the arithmetic of a closed row is not printed"
    panels = "[...document.querySelectorAll('.panel')].every(p => p.checkVisibility())"
    assert page.run(panels) is True
    assert page.run("document.querySelector('tr.s').checkVisibility()") is False
    assert page.run("document.querySelector('.run').checkVisibility()") is True
    assert page.run(WEAK)[1] == []
    assert "exact" in page.run("getComputedStyle(document.querySelector('td.t')).printColorAdjust")


# --- keyboard -----------------------------------------------------------------------------------

HERE = """(() => {
  const at = document.activeElement;
  if (at.closest('#filters')) return 'filter ' + at.name + (at.type === 'reset' ? 'reset' : '');
  if (at.closest('.chooser')) return 'degree ' + at.id;
  if (at.matches('.map td > a')) return 'cell ' + at.hash.slice(1);
  if (at.tagName === 'SUMMARY') return 'summary';
  return at.tagName.toLowerCase() + ' ' + (at.hash || at.className);
})()"""


def stops(page: Page, most: int) -> list[str]:
    """Where Tab leads, from the top of the page."""
    found = []
    for _ in range(most):
        page.press("Tab")
        found.append(page.run(HERE))
    return found


def test_tab_reaches_filters_cells_and_reasons(browser: Browser, files: dict[str, str]) -> None:
    page = opened(browser, files["small"])
    found = stops(page, 60)
    assert found[0] == "a #layers"
    order = [
        "filter text", "filter path", "filter degree", "filter kind", "filter reset", "cell f0-1",
        "summary", "degree d0",
    ]  # fmt: skip
    places = [found.index(stop) for stop in order]
    assert places == sorted(places)
    cells = [stop for stop in found if stop.startswith("cell")]
    assert len(cells) <= 4, "one stop a map; the arrow keys do the rest"
    quiet(page, files["small"])


def test_arrows_move_between_cells(browser: Browser, files: dict[str, str]) -> None:
    page = opened(browser, files["small"])
    page.run("document.querySelector('#f0 td a').focus()")
    seen = []
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End", "Home", "ArrowUp"):
        page.press(key)
        seen.append(page.run(HERE))
    assert seen == [
        "cell f0-2", "cell f1-2", "cell f1-1", "cell f0-1", "cell f0-8", "cell f0-1", "cell f0-1",
    ]  # fmt: skip
    page.press("ArrowDown", "Tab")
    assert page.run(HERE) == "summary"
    page.run(
        "document.querySelector('#p0, .panel').closest('section').querySelector('td a').blur()"
    )
    fine = "[...document.querySelectorAll('.panel')].find(p => p.checkVisibility())"
    page.run(f"{fine}.querySelector('td a').focus()")
    page.press("ArrowDown", "ArrowRight")
    row = page.run("document.activeElement.closest('tr').rowIndex")
    column = page.run("document.activeElement.closest('td').cellIndex")
    assert (row, column) == (3, 2)  # two rows of heads, then layers 0 and 1


@pytest.mark.parametrize("key", ["Enter", " "])
def test_a_cell_opens_its_reasons_and_escape_comes_back(
    browser: Browser, files: dict[str, str], key: str
) -> None:
    page = opened(browser, files["small"])
    row = page.run("document.querySelector('.map [data-paths=tttx]').id")
    page.run(f"document.querySelector('#{row} a[href=\"#{row}-8\"]').focus()")
    told = page.run("document.querySelector('#peek').innerText")
    assert "tp 8" in told
    assert "impossible" in told
    assert page.run(f"document.querySelector('#{row} details').open") is False
    page.press(key)
    assert page.run(f"document.querySelector('#{row} details').open") is True
    assert page.run("document.querySelector('#peek').hidden") is True
    assert page.run(HERE) == "summary"
    line = page.run("document.querySelector('tr.lit').innerText")
    assert "X impossible" in line
    assert "split_groups" in line
    page.press("Escape")
    assert page.run(HERE) == f"cell {row}-8"
    page.press("Escape")
    assert page.run("document.querySelector('#peek').hidden") is True
    quiet(page, files["small"])


def test_a_summary_opens_with_the_keyboard(browser: Browser, files: dict[str, str]) -> None:
    page = opened(browser, files["small"])
    page.run("document.querySelector('#f0 summary').focus()")
    for key in ("Enter", " "):
        before = page.run("document.querySelector('#f0 details').open")
        page.press(key)
        assert page.run("document.querySelector('#f0 details').open") is not before


def test_focus_is_seen(browser: Browser, files: dict[str, str]) -> None:
    page = opened(browser, files["small"])
    page.press("Tab")
    for _ in range(40):
        page.press("Tab")
        width = page.run("getComputedStyle(document.activeElement).outlineWidth")
        assert float(width.removesuffix("px")) >= 1.5, page.run(HERE)


def test_what_takes_the_focus_has_a_name(browser: Browser, files: dict[str, str]) -> None:
    page = opened(browser, files["small"])
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        node
        for node in nodes
        if any(p["name"] == "focusable" and p["value"]["value"] for p in node.get("properties", []))
    ]
    assert len(focusable) > 60
    nameless = [n["role"]["value"] for n in focusable if not n.get("name", {}).get("value")]
    assert set(nameless) <= {"RootWebArea"}
    roles = Counter(node["role"]["value"] for node in nodes)
    assert roles["rowheader"] > 20
    assert roles["columnheader"] > 10
    labels = {n["name"]["value"] for n in focusable if n["role"]["value"] == "link"}
    assert "tp 8: impossible, split_groups, the engine: corrupt" in labels


# --- filters ------------------------------------------------------------------------------------

SHOWN = (
    "[...document.querySelectorAll('#layers .map > tbody')].filter(b => !b.hidden)"
    ".map(b => b.querySelector('th code').textContent)"
)
COUNT = "document.querySelector('#filters output').value"


def put(page: Page, control: str, value: str) -> None:
    page.run(
        f"(e => {{ e.value = {json.dumps(value)};"
        "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true}));"
        f"}})(document.querySelector('#filters [name={control}]'))"
    )


def test_filters_hide_and_show_rows(browser: Browser, files: dict[str, str], small: Any) -> None:
    page = opened(browser, files["small"])
    every = page.run(SHOWN)
    assert set(every) == set(rows_of(html_page(small)))
    assert page.run(COUNT) == f"{len(every)} of {len(every)} rows, 77 layers"
    put(page, "text", "SPLIT_groups")
    assert all(name.endswith("down_proj") for name in page.run(SHOWN))
    assert len(page.run(SHOWN)) == 3
    assert page.run(COUNT) == f"3 of {len(every)} rows, 20 layers"
    put(page, "text", "layers.3.self_attn.k_proj")  # one layer finds its family
    assert page.run(SHOWN) == ["model.layers.{0..3}.self_attn.{k_proj,v_proj}"]
    put(page, "text", "no such layer")
    assert page.run(SHOWN) == []
    assert page.run("document.querySelector('#none').checkVisibility()") is True
    put(page, "text", "")
    put(page, "kind", "shared_expert")
    assert len(page.run(SHOWN)) == 2
    assert all("shared_expert" in name for name in page.run(SHOWN))
    page.click('#filters [type="reset"]')
    assert page.run(SHOWN) == every
    assert page.run("document.querySelector('#none').checkVisibility()") is False
    quiet(page, files["small"])


def test_paths_are_filtered_at_one_degree_or_any(
    browser: Browser, files: dict[str, str], small: Any
) -> None:
    page = opened(browser, files["small"])
    paths = {name: found for name, (found, _) in rows_of(html_page(small)).items()}
    for box in ("a", "t"):
        page.click(f'#filters [name="path"][value="{box}"]')
    assert page.run(SHOWN) == [name for name, found in paths.items() if "x" in found]
    put(page, "degree", "0")
    assert page.run(SHOWN) == []
    put(page, "degree", "3")
    assert page.run(SHOWN) == [name for name, found in paths.items() if found[3] == "x"]
    assert page.run("document.querySelector('#d3').checked") is True, "the map by depth follows"
    visible = "[...document.querySelectorAll('#p3 tbody tr')].map(r => r.checkVisibility())"
    assert page.run(visible) == [True] * 4
    kept = "[...document.querySelectorAll('#p3 tbody td:not(.off)')].map(d => d.className[0])"
    assert set(page.run(kept)) == {"x"}
    put(page, "degree", "0")
    assert page.run("document.querySelector('#p0 tbody tr').checkVisibility()") is False
    page.click('#filters [type="reset"]')
    assert page.run("document.querySelector('#p0 tbody tr').checkVisibility()") is True


def test_a_row_that_is_filtered_out_opens_from_the_map_by_depth(
    browser: Browser, files: dict[str, str]
) -> None:
    page = opened(browser, files["large"])
    page.run("document.querySelector('#d3').click()")
    put(page, "text", "self_attn.q_proj")
    link = "#p3 td.t.off a"
    target = page.run(f"document.querySelector('{link}').hash")
    assert page.run(f"document.querySelector('{target}').closest('tbody[id]').hidden") is True
    page.click(link)
    assert page.run(f"document.querySelector('{target}').checkVisibility()") is True
    assert "6 columns % 8 = 6" in page.run(f"document.querySelector('{target}').innerText")


# --- without scripts ----------------------------------------------------------------------------


def test_without_scripts_every_reason_is_read_and_reached(
    browser: Browser, files: dict[str, str], small: Any
) -> None:
    page = opened(browser, files["small"], scripts=False)
    assert page.run("document.querySelector('#filters').checkVisibility()") is False
    shown = " ".join(page.run("document.body.innerText").split())
    for _, why in rows_of(html_page(small)).values():
        for part in re.split(r"(?=tp \d)", why):
            assert " ".join(part.split()) in shown
    assert "Arrow keys" not in shown
    page.run("document.querySelector('#f0 td a').focus()")
    target = page.run("document.activeElement.hash.slice(1)")
    assert page.run(f"document.getElementById('{target}').checkVisibility()") is False
    page.press("Enter")
    page.run("0")
    assert page.run("location.hash") == f"#{target}"
    assert page.run("document.querySelector('#f0 details').open") is True
    quiet(page, files["small"])


def test_without_scripts_the_degree_is_chosen_and_layers_are_folded(
    browser: Browser, files: dict[str, str]
) -> None:
    page = opened(browser, files["large"], scripts=False)
    shown = (
        "[...document.querySelectorAll('.panel')].filter(p => p.checkVisibility()).map(p => p.id)"
    )
    assert page.run(shown) == ["p2"], "the first degree at which something is not asm"
    page.run("document.querySelector('#d0').click()")
    assert page.run(shown) == ["p0"]
    rows = "[...document.querySelectorAll('#p0 tbody tr')].filter(r => r.checkVisibility()).length"
    assert page.run(rows) == 94
    page.run("document.querySelector('#fold').click()")
    assert page.run(rows) == 1
    assert page.run("document.querySelector('#p0 tbody th').innerText") == "0…93"
