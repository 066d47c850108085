"""Figures of experiments, from their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from normscope.core.errors import InputError
from normscope.core.papers import Plot
from normscope.report.theme import COLORS, SEQUENTIAL, figure

DASHES = ("solid", "dash", "dot", "dashdot")  # of lines whose colours return
TRACES: dict[str, Callable[..., Any]] = {
    "lines": lambda name, x, y: go.Scatter(name=name, x=x, y=y, mode="lines"),
    "lines+points": lambda name, x, y: go.Scatter(name=name, x=x, y=y, mode="lines+markers"),
    "points": lambda name, x, y: go.Scatter(name=name, x=x, y=y, mode="markers"),
    "bars": lambda name, x, y: go.Bar(name=name, x=x, y=y),
}


def plot(shown: Plot) -> go.Figure:
    """An experiment's plot: one trace per series over the contours of its surface, dashed horizontal lines at its levels."""
    if shown.kind not in TRACES:
        raise InputError(f"no kind of plot {shown.kind!r}: choose from {', '.join(TRACES)}")
    traces = [TRACES[shown.kind](name, list(x), [float(value) for value in y]) for name, (x, y) in shown.series.items()]
    for index, trace in enumerate(traces):
        if "lines" in (trace.mode if trace.type == "scatter" else ""):
            trace.line.dash = DASHES[index // len(COLORS) % len(DASHES)]
    drawn = figure(*_contours(shown), *traces, title=shown.title, x=shown.x, y=shown.y, log_x=shown.log_x, log_y=shown.log_y)
    for name, level in shown.levels.items():
        drawn.add_hline(level, line_dash="dash", line_color="#7F7F7F", annotation_text=name, annotation_position="top left")
    if shown.equal:
        drawn.update_yaxes(scaleanchor="x")
    if shown.surface:  # whose scale is on the right
        drawn.update_layout(legend={"orientation": "h", "y": -0.15})
    return drawn.update_layout(showlegend=len(traces) > 1)


def _contours(shown: Plot) -> list[Any]:
    if shown.surface is None:
        return []
    x, y, heights = shown.surface
    return [go.Contour(x=list(x), y=list(y), z=heights, colorscale=SEQUENTIAL, ncontours=30, line_width=0.5, showlegend=False)]
