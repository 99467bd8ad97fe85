"""An audit as a table: a row for each layer at each degree, for pandas and spreadsheets.

Cells are quoted as RFC 4180 says; lines end in LF, not its CRLF, so that `cut`, `awk` and `sort`
see no stray character in the last column, and every reader of CSV takes both. The text is UTF-8
without a byte order mark. A cell is empty where there is nothing to say.

Names come from files that strangers wrote. Unprintable characters are escaped, so a record is a
line. A cell that a spreadsheet would run as a formula (it begins with = + - @ or one of their wide
forms) gets an apostrophe in front, which Excel and LibreOffice read as "this is text"; JSON has
the name as it is. Some locales part cells at semicolons: cells with one are quoted, and what
follows it is guarded like the beginning of a cell.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Literal

from mxfp4prep.errors import printable

if TYPE_CHECKING:
    from mxfp4prep.report import contract as c

COLUMNS = (
    "layer", "kind", "parallel", "group", "scheme", "n", "k", "experts", "nbytes",
    "tp", "path", "own_path", "placement", "scale_rows", "scale_columns", "reasons", "hazards",
    "detail", "engine_outcome", "engine_path", "engine_message",
)  # fmt: skip
"""The first nine are about the layer (nbytes: all of it, so sum over one degree only), the others
about it at one degree. path counts the fused group in, and reasons say why it is not asm; own_path,
scale_rows and scale_columns are about the layer's own tensor on one rank."""

FORMULA_STARTS = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
_AFTER_SEMICOLON = re.compile(rf"(;\s*)([{re.escape(''.join(sorted(FORMULA_STARTS)))}])")
LAYERS_AT_A_TIME = 1000
_KNOWN_LIMIT = 4096
"""Distinct verdicts that are remembered; a checkpoint has a handful."""

Cell = str | int | None


def csv_lines(document: c.AuditDocument) -> Iterator[str]:
    """The text of the table in pieces of whole lines, the first line being COLUMNS."""
    yield _cells(COLUMNS) + "\n"
    degrees = [str(tp) for tp in document["tp"]]
    groups = {group["name"]: group["verdict"] for group in document["groups"]}
    # Layers share these mappings, and the document keeps them alive: their ids tell them apart.
    known: dict[tuple[int, ...], list[str]] = {}
    layers = iter(document["layers"])
    while part := list(islice(layers, LAYERS_AT_A_TIME)):
        rows = []
        for layer in part:
            group = groups.get(layer["group"]) if layer["group"] is not None else None
            mappings = (
                layer["verdict"],
                layer["decided"],
                layer.get("placement"),
                layer.get("engine"),
                group,
            )
            key = tuple(map(id, mappings))
            ends = known.get(key)
            if ends is None:
                if len(known) >= _KNOWN_LIMIT:
                    known.clear()
                ends = known[key] = [_at(layer, degree, group) for degree in degrees]
            start = _about(layer)
            rows += [start + end for end in ends]
        yield "".join(rows)


def _about(layer: c.LayerDocument) -> str:
    """The cells that do not depend on a degree, and the comma after them."""
    cells = (
        layer["name"],
        layer["kind"],
        layer["parallel"],
        layer["group"],
        layer["scheme"],
        layer["n"],
        layer["k"],
        layer["experts"],
        layer["nbytes"],
    )
    return _cells(cells) + ","


def _at(layer: c.LayerDocument, degree: str, group: Mapping[str, c.VerdictDocument] | None) -> str:
    """The cells about one degree, and the end of the line."""
    own, path = layer["verdict"][degree], layer["decided"][degree]
    rows, columns = own["scale_shard"] or (None, None)
    reasons, detail = _reasons(own, path, None if group is None else group[degree])
    cells: list[Cell] = [
        degree,
        path,
        own["path"],
        layer["placement"][degree] if "placement" in layer else "sliced",
        rows,
        columns,
        ";".join(reasons),
        ";".join(own["hazards"]),
        detail,
    ]
    if "engine" in layer:
        made = layer["engine"][degree]
        cells += [made["outcome"], made["path"], made["message"]]
    else:
        cells += [None, None, None]
    return _cells(cells) + "\n"


def _reasons(
    own: c.VerdictDocument, path: c.Path, group: c.VerdictDocument | None
) -> tuple[list[str], str]:
    """Why `path` is not asm, and the arithmetic of it: from the group where the group decides."""
    if own["path"] == path or group is None:
        return own["reasons"], own.get("detail", "")
    if group["path"] == path:
        return group["reasons"], group.get("detail", "")
    return ["group_part"], ""


def _cells(cells: tuple[Cell, ...] | list[Cell]) -> str:
    """Cells of one line, quoted where they must be."""
    texts = [_text(cell) if isinstance(cell, str) else cell for cell in cells]
    apart = any(isinstance(text, str) and ";" in text for text in texts)
    line = io.StringIO()
    quoting: Literal[0, 1] = csv.QUOTE_ALL if apart else csv.QUOTE_MINIMAL
    csv.writer(line, quoting=quoting, lineterminator="").writerow(texts)
    return line.getvalue()


def _text(cell: str) -> str:
    """`cell` without what a terminal or a spreadsheet would act on."""
    text = cell if cell.isprintable() else printable(cell)
    if ";" in text:  # where ; parts cells, what follows one begins a cell
        text = _AFTER_SEMICOLON.sub(r"\1'\2", text)
    return f"'{text}" if text.lstrip()[:1] in FORMULA_STARTS else text
