"""The audit as one HTML page: no script needed, no network, nothing from elsewhere.

A pure function of the audit's JSON document. Names from files are escaped by construction
(`page.markup`), and a content security policy allows the page's own style and script only, by
their digests: what slipped through would still not run.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

import mxfp4prep
from mxfp4prep.collector import collector_paused
from mxfp4prep.report.page import budget, remarks
from mxfp4prep.report.page.cases import Cases
from mxfp4prep.report.page.census import Census, Row, fused_rows, take_census
from mxfp4prep.report.page.controls import filters, key
from mxfp4prep.report.page.depth import stacks_of
from mxfp4prep.report.page.depth_map import DepthMap, depth_map
from mxfp4prep.report.page.layer_map import family_map
from mxfp4prep.report.page.markup import Html, el, join
from mxfp4prep.report.page.overview import answer, cards, head, page_head
from mxfp4prep.report.page.reasons import codes_of
from mxfp4prep.report.screen import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxfp4prep.report import contract as c


@collector_paused()
def html_page(document: c.AuditDocument) -> str:
    """The whole page, at most about 1 MB however large the checkpoint."""
    degrees = [str(tp) for tp in document["tp"]][: budget.MAX_DEGREES]
    cases = Cases(document, degrees)
    census = take_census(document["layers"], cases, budget.rows_for(len(degrees)))
    by_depth = depth_map(stacks_of(census), degrees)
    groups, more_groups = fused_rows(
        document["groups"], cases, census.cases, budget.rows_for(len(degrees)) // 2
    )
    every = (*census.rows, *census.rest, *groups, *more_groups)
    parts = {
        "degrees": ("Degrees", cards(document, degrees)),
        "layers": ("Layers", _layers(census, degrees)),
        "depth": ("Depth", _depth(by_depth, census) if by_depth.markup else None),
        "fused": ("Fused projections", _fused(groups, more_groups, degrees) if groups else None),
        "shared": (
            "Shared experts", remarks.shared_experts(document["shared_experts"], degrees)
        ),
        "engine": ("Engine", remarks.engine(document["engine"], degrees)),
        "values": ("Scale values", remarks.values(document["values"])),
        "findings": (
            "Findings", remarks.findings(document["findings"], document["summary"]["findings"])
        ),
        "others": ("Not MXFP4", remarks.others(document.get("others", []))),
        "codes": ("Codes", remarks.legend(codes_of(row.case for row in every))),
    }  # fmt: skip
    styles, script = _asset("page.css") + by_depth.styles, _asset("page.js")
    links = [(anchor, title) for anchor, (title, markup) in parts.items() if markup]
    body = el(
        "body",
        el("a", "Skip to the map of layers", href="#layers", class_="skip"),
        head(document),
        remarks.contents(links),
        el("main", answer(document), (markup for _, markup in parts.values())),
        remarks.foot(document, mxfp4prep.__version__),
        el("div", id="peek", hidden=True, role="status"),
        el("script", Html(script)),
    )
    policy = (
        f"default-src 'none'; style-src {_digest(styles)}; script-src {_digest(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = f"{document['source']['name']}: MXFP4 audit"
    page = join((page_head(title, policy, styles), body))
    return f'<!doctype html>\n<html lang="en">{page}</html>\n'


def _asset(file: str) -> str:
    return resources.files("mxfp4prep.report.page").joinpath(file).read_text("utf-8")


def _digest(source: str) -> str:
    """A source expression for an inline element (CSP level 2, section 4.2.4)."""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _layers(census: Census, degrees: Sequence[str]) -> Html:
    cases = [row.case for row in (*census.rows, *census.rest)]
    return remarks.section(
        "layers",
        "Layers by degree",
        key(cases),
        filters(degrees),
        family_map(census.rows, census.rest, degrees, "Layer families by tensor-parallel degree"),
        el("p", "No row fits these filters.", id="none", class_="note", hidden=True),
    )


def _depth(made: DepthMap, census: Census) -> Html:
    words = (
        "A row for each transformer layer; the experts of a layer are one cell, the worst counts."
    )
    if census.loose:
        words += f" {counted(census.loose, 'layer')} without a number in the name not shown here."
    return remarks.section("depth", "Layers by depth", el("p", words), made.markup)


def _fused(rows: Sequence[Row], more: Sequence[Row], degrees: Sequence[str]) -> Html:
    return remarks.section(
        "fused",
        "Fused projections",
        el("p", "Engines join these parts into one matrix and decide once for all of them."),
        family_map(rows, more, degrees, "Fused projections by tensor-parallel degree"),
    )
