"""What all figures share: colours that colour-blind readers can tell apart, axes with their units, labels that cannot be markup."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from normscope.core.text import visible

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")  # Okabe and Ito, without their yellow
DASHES = ("solid", "dash", "dot", "dashdot")  # one more for every round of colours
WARNING = "#D55E00"
SEQUENTIAL = "Cividis"  # of one sign
DIVERGING = "PuOr"  # about zero
NEUTRAL = "#757575"  # text with a contrast above 4.5 on white and on black, where the page behind is not known
SCHEMES = {
    "light": {"font.color": "#1f2328"},
    "dark": {"font.color": "#e6edf3"},
}  # what Plotly.relayout changes for a page's scheme
LONGEST_LABEL, HOVER_WIDTH = 44, 60  # characters
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

AXIS = {
    "gridcolor": "rgba(127,127,127,0.25)",
    "zerolinecolor": "rgba(127,127,127,0.5)",
    "automargin": True,
    "exponentformat": "power",
    "title": {"standoff": 10},
}
STEPS = {"tickformat": ",d"}  # of an axis of training steps
TEMPLATE = go.layout.Template(
    layout=go.Layout(
        colorway=COLORS,
        font={"family": "system-ui, sans-serif", "size": 13, "color": NEUTRAL},
        margin={"l": 60, "r": 20, "t": 84, "b": 50},
        hovermode="closest",
        hoverlabel={"align": "left", "font": {"size": 13}},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": NEUTRAL, "activecolor": COLORS[0]},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        title={"x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top", "font": {"size": 16}},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis=AXIS,
        yaxis=AXIS,
    )
)


def figure(*traces: Any, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """Traces under a title, with labelled axes (the unit in brackets), logarithmic where values span decades.

    >>> figure(go.Scatter(y=[1, 10]), title="Loss", x="step", y="loss", log_y=True).layout.yaxis.type
    'log'
    """
    return go.Figure(traces).update_layout(
        template=TEMPLATE,
        title={"text": title},
        height=420,
        xaxis={"title": {"text": x}, "type": "log" if log_x else None},
        yaxis={"title": {"text": y}, "type": "log" if log_y else None},
    )


def in_scheme(made: go.Figure, scheme: str) -> go.Figure:
    """The figure with the text colour of a light or a dark page."""
    return made.update_layout(font={"color": SCHEMES[scheme]["font.color"]})


def line_style(position: int) -> dict[str, Any]:
    """Colour and dash of the n-th line: no two of the first 28 are alike."""
    return {"color": COLORS[position % len(COLORS)], "dash": DASHES[position // len(COLORS) % len(DASHES)], "width": 2}


def label(name: str) -> str:
    """A name as a figure's text: long ones lose their middle.

    >>> label("<b>"), len(label("block." * 100))
    ('&lt;b&gt;', 44)
    """
    if len(name) > LONGEST_LABEL:
        head = LONGEST_LABEL // 3
        name = f"{name[:head]}…{name[head + 1 - LONGEST_LABEL :]}"
    return escaped(name)


def escaped(words: str) -> str:
    """Text of a figure in which nothing is what Plotly would read as markup."""
    return html.escape(visible(words), quote=False)


def paragraph(words: str) -> str:
    """Running text of a hover box, in lines.

    >>> paragraph("<b> " + "word " * 14)
    '&lt;b&gt; word word word word word word word word word word word<br>word word word'
    """
    return "<br>".join(map(escaped, textwrap.wrap(words, HOVER_WIDTH)))


def labels(names: Iterable[str]) -> list[str]:
    """Labels of several names, no two alike: Plotly draws equal categories on one another."""
    taken: dict[str, int] = {}
    made = []
    for name in map(label, names):
        taken[name] = taken.get(name, 0) + 1
        made.append(name if taken[name] == 1 else f"{name} ({taken[name]})")
    return made


def spans_decades(values: np.ndarray, decades: float = 1.3) -> bool:
    """Whether finite values are all positive and their quotient exceeds 10^decades: then an axis is logarithmic."""
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and math.log10(finite.max()) - math.log10(finite.min()) > decades


def power_of_ten(exponent: int) -> str:
    """
    >>> power_of_ten(-12)
    '10⁻¹²'
    """
    return "10" + str(exponent).translate(SUPERSCRIPTS)


def decade_ticks(low: float, high: float, most: int = 8) -> tuple[list[float], list[str]]:
    """Ticks of an axis that shows log10: whole powers of ten, or 1, 2 and 5 times them where there are few.

    >>> decade_ticks(-3.2, 0.5)
    ([-3, -2, -1, 0], ['10⁻³', '10⁻²', '10⁻¹', '1'])
    """
    whole = range(math.ceil(low), math.floor(high) + 1)
    if len(whole) >= 3:
        shown = whole[:: math.ceil(len(whole) / most)]
        return list(shown), ["1" if exponent == 0 else power_of_ten(exponent) for exponent in shown]
    fine = [factor * 10.0**exponent for exponent in range(math.floor(low), math.ceil(high) + 1) for factor in (1, 2, 5)]
    inside: Sequence[float] = [value for value in fine if low <= math.log10(value) <= high]
    if len(inside) < 2:
        inside = [10.0**low, 10.0**high]
    return [math.log10(value) for value in inside], [f"{value:.3g}" for value in inside]
