"""HTML from Python values: every text and every attribute is escaped, so that no name can become markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Union

from normscope.core.text import lines

VOID = ("meta", "br", "col")  # elements that have no end


class Markup(str):
    """Text that is HTML already, made by `element` or written in this package."""

    __slots__ = ()


Child = Union[Markup, str, None, Sequence["Child"]]


def element(tag: str, *children: Child, **attributes: str | bool | None) -> Markup:
    """One element. Attributes are spelled as Python names: class_, aria_label; True has no value, None and False are left out.

    >>> element("p", "1 < 2", element("b", "!"), class_='a"b')
    '<p class="a&quot;b">1 &lt; 2<b>!</b></p>'
    """
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value not in (None, False))
    opening = "".join(f" {name}" if value is True else f' {name}="{html.escape(lines(str(value)))}"' for name, value in given)
    return Markup(f"<{tag}{opening}>" + ("" if tag in VOID else f"{text(children)}</{tag}>"))


def text(child: Child) -> Markup:
    """A child as HTML: markup as it is, a string escaped, a sequence one after the other."""
    if child is None:
        return Markup()
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return Markup(html.escape(lines(child), quote=False))
    return Markup("".join(map(text, child)))


def table(head: Sequence[str], rows: Iterable[Sequence[Child]], caption: str) -> Markup:
    """A table whose first column names its rows; it scrolls by itself where it is too wide."""
    titles = element("tr", [element("th", title, scope="col") for title in head])
    body = [element("tr", element("th", first, scope="row"), [element("td", cell) for cell in rest]) for first, *rest in rows]
    made = element("table", element("caption", caption), element("thead", titles), element("tbody", body))
    return element("div", made, class_="scroll", role="region", aria_label=caption, tabindex="0")
