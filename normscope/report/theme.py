"""What all figures share: colours that colour-blind readers can tell apart, a template, axes with their units."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#7F7F7F")  # Okabe and Ito, grey for black
SEQUENTIAL = "Cividis"  # of one sign
DIVERGING = "PuOr"  # about zero

TEMPLATE = go.layout.Template(
    layout=go.Layout(
        colorway=COLORS,
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        hovermode="closest",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis={"gridcolor": "rgba(127,127,127,0.25)", "zerolinecolor": "rgba(127,127,127,0.5)", "automargin": True},
        yaxis={"gridcolor": "rgba(127,127,127,0.25)", "zerolinecolor": "rgba(127,127,127,0.5)", "automargin": True},
    )
)


def figure(*traces: Any, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """Traces under a title, with labelled axes (the unit in brackets), logarithmic where values span decades.

    >>> figure(go.Scatter(y=[1, 10]), title="Loss", x="step", y="loss", log_y=True).layout.yaxis.type
    'log'
    """
    return go.Figure(traces).update_layout(
        template=TEMPLATE,
        title=title,
        xaxis={"title": x, "type": "log" if log_x else None},
        yaxis={"title": y, "type": "log" if log_y else None},
    )
