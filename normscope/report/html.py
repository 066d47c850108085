"""One self-contained page: figures and Plotly travel inside it, packed, and nothing is fetched from anywhere."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from normscope.report.markup import Child, Markup, element
from normscope.report.theme import SCHEMES, label
from normscope.version import __version__

CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
MOST_OPEN = 5  # items of a list that may be folded, up to which it is open
SHORT = 12  # characters of a layer's name on a narrow screen
WITHOUT = "Drawing… Without scripts there is no picture; the table below has its numbers."


@dataclass(frozen=True)
class Drawing:
    """A figure with what it shows in words and its numbers as a table."""

    title: str
    made: go.Figure
    caption: str
    numbers: Markup


@dataclass
class Page:
    """Collects the figures of a page while its body is built."""

    figures: dict[str, Any] = field(default_factory=dict)

    def draw(self, drawing: Drawing) -> Markup:
        """The place of a figure, its caption, and its table behind a click."""
        name = f"figure-{len(self.figures) + 1}"
        height = drawing.made.layout.height
        above = 20 if drawing.made.layout.showlegend is False else 46  # the title is the page's, a legend the figure's
        made = go.Figure(drawing.made).update_layout(title=None, margin={"t": above, "l": 60, "r": 10, "b": 50})
        made.update_layout(meta={"short": _short_names(made)})
        self.figures[name] = json.loads(made.to_json())
        plot = element(
            "div", element("p", WITHOUT), id=name, class_="plot", role="group", aria_label=drawing.title,
            style=f"min-height: {height:g}px",
        )  # fmt: skip
        numbers = element("details", element("summary", f"{drawing.title} as a table"), drawing.numbers)
        return element("figure", element("h3", drawing.title), element("figcaption", drawing.caption), plot, numbers)

    def render(self, title: str, *body: Child, sections: Sequence[tuple[str, str]]) -> str:
        """The whole file. sections: (id, title) of what the navigation leads to."""
        links = [element("li", element("a", name, href=f"#{anchor}")) for anchor, name in sections]
        head = [
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=policy()),
            element("title", f"{title} · normscope"),
            element("style", Markup(_static("report.css"))),
        ]
        top = element(
            "header",
            element("h1", title),
            element("button", "Light or dark", id="scheme", type="button", hidden=True),
            element("nav", element("ul", links), aria_label="Sections"),
        )
        packed = json.dumps({"figures": self.figures, "schemes": SCHEMES, "config": CONFIG}, separators=(",", ":"))
        data = [
            element("script", Markup(_packed(get_plotlyjs())), id="plotly", type="text/plain"),
            element("script", Markup(_packed(packed)), id="figures", type="text/plain"),
            element("script", Markup(_static("report.js"))),
        ]
        skip = element("a", "Skip to the summary", href="#summary", class_="skip")
        footer = element("footer", element("p", f"Made by normscope {__version__}. This file fetches nothing."))
        page = element("body", skip, top, element("main", *body), footer, data)
        return "<!doctype html>\n" + element("html", element("head", head), page, lang="en")


def section(anchor: str, title: str, *children: Child) -> Markup:
    """A section under its heading; `anchor` is its address in the page."""
    return element("section", element("h2", title), *children, id=anchor, aria_label=title)


def columns(children: Sequence[Child]) -> Markup:
    """Side by side, where there is room."""
    return element("div", list(children), class_="columns")


def titled(title: str, items: Sequence[Child], kind: str, fold: bool = False) -> Markup | None:
    """A list under its title; nothing where it is empty. fold: of a long one the title alone is seen until it is opened."""
    if not items:
        return None
    listed = element("ul", [element("li", item) for item in items])
    if fold and len(items) > MOST_OPEN:
        return element("details", element("summary", element("h3", f"{title} ({len(items)})", class_=kind)), listed)
    return element("div", element("h3", title, class_=kind), listed)


def number(value: float | None) -> str:
    """
    >>> number(1234.5678), number(float("inf")), number(None)
    ('1235', '∞', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4g}" if math.isfinite(value) else ("∞" if value > 0 else "−∞")


def words(content: str) -> Markup:
    """A cell of running text."""
    return element("span", content, class_="words")


def _short_names(made: go.Figure) -> dict[str, str]:
    """The ends of the names on a vertical axis of layers."""
    if made.layout.yaxis.type != "category":
        return {}
    names = [str(name) for trace in made.data for name in (trace.y if trace.y is not None else ())]
    cut = {name: html.unescape(name) for name in names}
    return {name: label("…" + plain[-SHORT:]) for name, plain in cut.items() if len(plain) > SHORT}


def policy() -> str:
    """Only the two scripts of this page run, whatever else might stand in it, and nothing is fetched."""
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in (_static("report.js"), get_plotlyjs()))
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {scripts}; {rest}"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _packed(content: str) -> str:
    return base64.b64encode(gzip.compress(content.encode(), 9, mtime=0)).decode()


@cache
def _static(name: str) -> str:
    return (files("normscope.report") / "static" / name).read_text(encoding="utf-8")


__all__ = ["Drawing", "Page", "columns", "number", "policy", "section", "titled", "words"]
