"""The top of the page: what was audited, the answer, and one card a degree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mxfp4prep.marks import PAGE_GENERATOR
from mxfp4prep.report.caveats import EXPERTS
from mxfp4prep.report.page.cases import LETTERS, PATHS, WORDS
from mxfp4prep.report.page.layer_map import CLASSES
from mxfp4prep.report.page.markup import Html, el, name, text, void
from mxfp4prep.report.screen import counted, human

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c


def head(document: c.AuditDocument) -> Html:
    """Title, facts and the rule."""
    source, deployment = document["source"], document["deployment"]
    version = source["quark_version"]
    facts = [
        source["model_type"] or "model type not stated",
        version and f"Quark {version}",
        human(source["nbytes"]),
        counted(source["files"], "safetensors file"),
        counted(source["tensors"], "tensor"),
        counted(document["summary"]["layers"], "MXFP4 layer"),
        f"{human(document['summary']['copied_nbytes'])} not MXFP4",
        deployment["expert_parallel"] and "expert parallelism",
        deployment["sequence_parallel"] and "sequence parallelism",
        deployment["shared_experts"] != "auto" and f"shared experts {deployment['shared_experts']}",
    ]
    return el(
        "header",
        el("p", "MXFP4 audit", class_="eyebrow"),
        el("h1", name(source["name"])),
        el("ul", (el("li", fact) for fact in facts if fact), class_="facts"),
        el(
            "p",
            "The ASM GEMM needs scales with ",
            el("b", document["rule"]),
            " on every rank. Anything else that can be split runs on Triton.",
            f" {EXPERTS}" if _routed(document) else "",
            class_="rule",
        ),
    )


def _routed(document: c.AuditDocument) -> bool:
    """Whether there are routed experts and nothing is said about what an engine does with them."""
    layers = document["layers"]
    return document["engine"] is None and any(layer["parallel"] == "expert" for layer in layers)


def answer(document: c.AuditDocument) -> Html:
    """In a sentence what can be served, then the recommendation where there is one."""
    summary = document["summary"]
    asm, possible = summary["asm_tp"], summary["possible_tp"]
    stuck = [tp for tp in document["tp"] if tp not in possible]
    said = []
    if not summary["layers"]:
        said.append("There is no MXFP4 layer here.")
    elif asm:
        said.append(f"Every layer takes the ASM path at tp {_listed(asm)}.")
    else:
        said.append(f"At none of tp {_listed(document['tp'])} does every layer take the ASM path.")
    if stuck:
        said.append(f"Some layers cannot be split at tp {_listed(stuck)}: do not serve there.")
    look = "good" if asm else "fair" if possible else "bad"
    advice = summary["recommendation"].strip()
    return el(
        "section",
        el("h2", "The answer"),
        el("p", " ".join(said), class_="lead"),
        (el("p", _with_commands(part)) for part in advice.split("\n\n") if part),
        class_=f"answer {look}",
        aria_label="The answer",
    )


def _with_commands(words: str) -> list[Html]:
    """Text with what stands between backticks in code type."""
    pieces = words.split("`")
    if len(pieces) % 2 == 0:  # a backtick without its second is one
        return [text(words)]
    return [el("code", piece) if place % 2 else text(piece) for place, piece in enumerate(pieces)]


def cards(document: c.AuditDocument, degrees: Sequence[str]) -> Html:
    """How much takes which path at each degree, and what a rank holds."""
    left = len(document["tp"]) - len(degrees)
    return el(
        "section",
        el("h2", "By degree"),
        el("p", f"The first {len(degrees)} degrees; {left} more were asked for.", class_="note")
        if left
        else None,
        el("ul", (_card(document, tp) for tp in degrees), class_="cards"),
        id="degrees",
        aria_label="By degree",
    )


def _card(document: c.AuditDocument, tp: str) -> Html:
    share = document["summary"]["tp"][tp]
    counts = {path: share[path] for path in PATHS}  # type: ignore[literal-required]
    cost = document["cost"].get(tp)
    worst = next((path for path in reversed(PATHS) if counts[path]["layers"]), "asm")
    total = sum(count["nbytes"] for count in counts.values())
    status = {
        "asm": "all asm",
        "triton": f"{counted(counts['triton']['layers'], 'layer')} on Triton",
        "impossible": f"{counted(counts['impossible']['layers'], 'layer')} cannot be split",
    }[worst]
    bars = [_bar("bytes", [counts[path]["nbytes"] / (total or 1) for path in PATHS])]
    if cost is not None:
        paths = cost["paths"]
        bars.append(_bar("FLOPs", [paths[path]["flops"] for path in PATHS]))  # type: ignore[literal-required]
    rows = [
        el(
            "tr",
            el("th", _chip(path), " ", WORDS[path], scope="row"),
            el("td", f"{count['layers']:,}"),
            el("td", human(count["nbytes"])),
        )
        for path, count in counts.items()
        if count["layers"] or path == "asm"
    ]
    return el(
        "li",
        el("h3", el("small", "tp "), tp, _largest(document, tp)),
        el("p", _chip(worst), " ", el("b", status), class_="status"),
        bars,
        el(
            "table",
            el("thead", el("tr", (el("th", t, scope="col") for t in ("path", "layers", "stored")))),
            el("tbody", rows),
            class_="counts",
        ),
        _costs(cost) if cost is not None else None,
        _engine(document, tp),
        class_=f"card {CLASSES[worst]}",
    )


def _largest(document: c.AuditDocument, tp: str) -> Html | None:
    clean = document["summary"]["largest_clean_tp"]
    return el("span", "largest clean", class_="badge") if clean == int(tp) else None


def _chip(path: str) -> Html:
    return el("span", LETTERS[path], class_=f"chip {CLASSES[path]}")


def _bar(label: str, shares: Sequence[float]) -> Html:
    """One stacked bar; the numbers are said in words too."""
    said = " · ".join(
        f"{LETTERS[path]} {_percent(share)}"
        for path, share in zip(PATHS, shares, strict=True)
        if share
    )
    at, parts = 0.0, []
    for path, share in zip(PATHS, shares, strict=True):
        if share > 0:
            width = round(100 * share, 3)
            parts.append(el("rect", class_=CLASSES[path], x=round(at, 3), width=width, height=1))
            at += width
    drawing = el(
        "svg",
        parts,
        viewBox="0 0 100 1",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    return el("p", el("span", label), drawing, el("span", said or "nothing"), class_="bar")


def _percent(share: float) -> str:
    """Never `0 %` or `100 %` for what is a little more or less."""
    percent = 100 * share
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %".replace(".0 %", " %")


def _costs(cost: c.CostDocument) -> Html:
    facts = [
        ("a rank holds", human(cost["rank_nbytes"])),
        ("of it MXFP4", human(cost["rank_mxfp4_nbytes"])),
    ]
    if cost["padding_nbytes"]:
        facts.append(("padding to ASM adds", human(cost["padding_nbytes"])))
    return _facts(facts)


def _engine(document: c.AuditDocument, tp: str) -> Html | None:
    engine = document["engine"]
    if engine is None or tp not in engine["outcomes"]:
        return None
    counts = engine["outcomes"][tp].items()
    said = [f"{count:,} {outcome}" for outcome, count in counts if count]
    return _facts([(engine["name"], ", ".join(said) or "no layer")])


def _facts(facts: Iterable[tuple[str, str]]) -> Html:
    return el("dl", ((el("dt", text(term)), el("dd", text(said))) for term, said in facts))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 3 3'%3E"
    "%3Cpath fill='%230b6e5d' d='M0 0h3v3H0z'/%3E%3Cpath fill='%23f2b93b' d='M1 1h2v2H1z'/%3E"
    "%3Cpath fill='%23b4232f' d='M2 2h1v1H2z'/%3E%3C/svg%3E"
)


def page_head(title: str, policy: str, styles: str) -> Html:
    """What stands in <head>."""
    return el(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="generator", content=PAGE_GENERATOR),
        void("meta", http_equiv="Content-Security-Policy", content=policy),
        void("meta", name="viewport", content="width=device-width,initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        void("meta", name="referrer", content="no-referrer"),
        el("title", title),
        void("link", rel="icon", href=Html(ICON)),
        el("style", Html(styles)),
    )
