"""What the page says beside the maps: shared experts, the engine, scale values, findings, codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mxfp4prep.report.page.budget import MAX_FINDINGS, MAX_LISTED
from mxfp4prep.report.page.markup import Child, Html, el, join, name
from mxfp4prep.report.page.reasons import meaning
from mxfp4prep.report.screen import counted, human

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

_DECISIONS = {
    "fused": ("F", "a"),
    "sliced": ("S", "a"),
    "replicated": ("R", "t"),
    "impossible": ("X", "x"),
}
_SEVERITIES = ("error", "warning", "note")


def section(anchor: str, title: str, *children: Child) -> Html:
    """A part of the page with its heading, found by its anchor."""
    return el("section", el("h2", title), children, id=anchor, aria_label=title)


def shared_experts(shared: Sequence[c.SharedExpertDocument], degrees: Sequence[str]) -> Html | None:
    """What becomes of shared experts, the arithmetic under each."""
    if not shared:
        return None
    head = (
        el("th", "shared experts", scope="col"),
        (el("th", el("small", "tp "), tp, scope="col") for tp in degrees),
    )
    caption = "Shared experts by degree"
    table = el(
        "table",
        el("caption", caption),
        el("thead", el("tr", head)),
        (_shared(item, degrees) for item in shared[:MAX_LISTED]),
        class_="map",
    )
    return section(
        "shared",
        "Shared experts",
        el(
            "p",
            "Fusion into the routed experts is decided first; one that stays apart is cut by "
            "itself. ",
            (
                el("span", el("span", letter, class_=f"chip {look}"), f" {word} ", class_="key")
                for word, (letter, look) in _DECISIONS.items()
            ),
        ),
        el("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption),
        _more(len(shared), MAX_LISTED),
    )


def _shared(item: c.SharedExpertDocument, degrees: Sequence[str]) -> Html:
    lines = []
    for degree, message in item["message"].items():
        if degree in degrees:
            lines.append(el("span", el("i", f"tp {degree}"), " ", message, class_="line"))
    cells = []
    for degree in degrees:
        decision = item["decision"].get(degree, "?")
        letter, look = _DECISIONS.get(decision, ("?", "x"))
        label = f"tp {degree}: {decision}"
        cells.append(el("td", el("span", letter, role="img", aria_label=label), class_=look))
    facts = f"{counted(item['blocks'], 'block')} · width {item['width']}"
    can = "can be fused" if item["fusable"] else "cannot be fused"
    why = el("span", f"{can}: {item['why']}", class_="line")
    return el(
        "tbody",
        el("tr", el("th", name(item["name"]), el("small", facts), scope="row"), cells),
        el("tr", el("td", why, lines, colspan=len(degrees) + 1), class_="why"),
    )


def engine(document: c.EngineDocument | None, degrees: Sequence[str]) -> Html | None:
    """What the asked engine would do with the original checkpoint, and on what that rests."""
    if document is None:
        return None
    outcomes: tuple[c.EngineOutcome, ...] = ("ok", "crash", "corrupt", "unknown")
    rows = [
        el(
            "tr",
            el("th", f"tp {tp}", scope="row"),
            (el("td", f"{document['outcomes'][tp].get(outcome, 0):,}") for outcome in outcomes),
        )
        for tp in degrees
        if tp in document["outcomes"]
    ]
    heads = ("layers", *outcomes)
    table = el(
        "table",
        el("thead", el("tr", (el("th", head, scope="col") for head in heads))),
        el("tbody", rows),
        class_="plain",
    )
    facts = [
        *(("switch", f"{switch}={value}") for switch, value in document["switches"].items()),
        *(("assumed", assumption) for assumption in document["assumptions"]),
        *(("source", _linked(source)) for source in document["sources"]),
    ]
    return section(
        "engine",
        f"{document['name']} with the original checkpoint",
        el("p", f"Version {document['version']}. What each layer meets is in its reasons above."),
        el("div", table, class_="scroll"),
        el("dl", ((el("dt", term), el("dd", said)) for term, said in facts)),
    )


def _linked(source: str) -> Html | str:
    if source.startswith("https://") and not any(c.isspace() for c in source):
        return el("a", source, href=source, rel="noreferrer noopener")
    return source


def values(document: c.ValuesDocument | None) -> Html | None:
    """What the scale bytes hold, where they were read."""
    if document is None:
        return None
    said = (
        f"Of {document['scales']:,} scale bytes ({human(document['nbytes'])} read), "
        f"{document['nan']:,} are 255 (their groups decode to NaN); "
        f"{document['zero_blocks']:,} groups hold only zeros. "
        f"Scale bytes run from {document['minimum']} to {document['maximum']}."
    )
    heads = ("layer", "NaN scales", "first at row, column", "zero groups", "scale bytes")
    rows = [
        el(
            "tr",
            el("th", name(layer["layer"]), scope="row"),
            el("td", f"{layer['nan']:,}"),
            el("td", "; ".join(", ".join(map(str, place)) for place in layer["nan_places"])),
            el("td", f"{layer['zero_blocks']:,}"),
            el("td", f"{layer['minimum']} to {layer['maximum']}"),
        )
        for layer in document["layers"][:MAX_LISTED]
    ]
    table = el(
        "table",
        el("thead", el("tr", (el("th", head, scope="col") for head in heads))),
        el("tbody", rows),
        class_="plain",
    )
    return section(
        "values",
        "Scale values",
        el("p", said),
        el("div", table, class_="scroll") if rows else None,
        _more(len(document["layers"]), MAX_LISTED),
    )


def others(found: Sequence[c.OtherDocument]) -> Html | None:
    """Modules whose weight is stored in another dtype, which no path here is about."""
    if not found:
        return None
    rows = [
        el(
            "tr",
            el("th", name(item["name"]), scope="row"),
            el("td", item["dtype"]),
            el("td", f"{item['count']:,}"),
        )
        for item in found[:MAX_LISTED]
    ]
    heads = (el("th", head, scope="col") for head in ("module", "dtype", "modules"))
    table = el("table", el("thead", el("tr", heads)), el("tbody", rows), class_="plain")
    return section(
        "others",
        "Not MXFP4",
        el("p", "Modules whose weight is stored in another type. They run as they are stored."),
        el("div", table, class_="scroll"),
        _more(len(found), MAX_LISTED),
    )


def findings(found: Sequence[c.FindingDocument], counts: Mapping[str, int]) -> Html:
    """Every remark, the gravest first."""
    ordered = sorted(found, key=lambda finding: _SEVERITIES.index(finding["severity"]))
    items = [
        el(
            "li",
            el("b", finding["severity"], class_=f"severity {finding['severity']}"),
            el("div", name(finding["where"]), el("p", finding["message"])),
            el("code", finding["code"], class_="code"),
        )
        for finding in ordered[:MAX_FINDINGS]
    ]
    said = ", ".join(counted(counts[s], s) for s in _SEVERITIES if counts.get(s))
    return section(
        "findings",
        "Findings",
        el("p", f"{said}." if said else "None."),
        el("ul", items, class_="findings") if items else None,
        _more(len(found), MAX_FINDINGS),
    )


def legend(codes: Iterable[str]) -> Html | None:
    """What each code that occurs means."""
    words = [(el("dt", el("code", code)), el("dd", meaning(code))) for code in codes]
    return section("codes", "Codes", el("dl", words, class_="codes")) if words else None


def foot(document: c.AuditDocument, version: str) -> Html:
    """By what this was made, and from which config."""
    source = document["source"]
    digests = [("config.json", source["config_sha256"])]
    if source["index_sha256"] is not None:
        digests.append(("index", source["index_sha256"]))
    read = "headers and scales" if document["values"] is not None else "headers only"
    made = f"mxfp4prep {version}, audit schema {document['schema_version']}; read {read}."
    return el(
        "footer",
        el("p", made),
        (el("p", f"sha256 of {file}: ", el("code", digest)) for file, digest in digests),
    )


def _more(count: int, most: int) -> Html | None:
    if count <= most:
        return None
    said = f"{count - most:,} more have no room here; --format json has them all."
    return el("p", said, class_="note")


def contents(links: Iterable[tuple[str, str]]) -> Html:
    """Links to the parts of the page."""
    return el(
        "nav",
        join(el("a", title, href=f"#{anchor}") for anchor, title in links),
        aria_label="On this page",
    )
