"""Markup that is escaped by construction: what is not `Html` is text when it enters an element.

Names and messages come out of files that strangers wrote. They pass through `text`, always.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Union

from mxfp4prep.errors import printable

MAX_TEXT = 2000
"""Characters of one text; a tensor's name alone may be megabytes."""


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


Child = Union[str, int, "Html", None, Iterable["Child"]]


def text(value: object, most: int = MAX_TEXT) -> Html:
    """`value` as text: escaped, unprintable characters spelled out, the middle cut past `most`."""
    words = str(value)
    if len(words) > most:
        words = f"{words[: most // 2]} … {words[len(words) - most // 2 :]}"
    return Html(escape(printable(words)))


def name(value: str) -> Html:
    """A module's name in code type that may break after its dots."""
    shown = text(value, 400).replace(".", ".<wbr>").replace("/", "/<wbr>")
    return Html(f"<code>{shown}</code>")


def el(tag: str, *children: Child, **attributes: object) -> Html:
    """One element. `class_` is class, `data_x` data-x; True is a bare attribute, None is none."""
    words = [tag]
    for key, value in attributes.items():
        spelled = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(spelled)
        elif value is not None and value is not False:
            words.append(f'{spelled}="{text(value)}"')
    return Html(f"<{' '.join(words)}>{join(children)}</{tag}>")


def void(tag: str, **attributes: object) -> Html:
    """An element that has no content and no end tag."""
    return Html(el(tag, **attributes)[: -len(f"</{tag}>")])


def join(children: Iterable[Child], between: str = "") -> Html:
    """Children one after the other; `between` is text."""
    return Html(str(text(between)).join(_pieces(children)))


def _pieces(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str | int):
            yield text(child)
        else:
            yield from _pieces(child)
