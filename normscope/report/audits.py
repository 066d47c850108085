"""Figures of an audit: the bracket with depth, the layers coloured by what they add to it, both sides against the radius."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from normscope.core.magnitude import Magnitude
from normscope.report.theme import COLORS, DIVERGING, NEUTRAL, decade_ticks, escaped, figure, labels

if TYPE_CHECKING:
    from normscope.auditing import Audit
    from normscope.core.gap_curve import GapCurve

WHOLE = "whole"  # after the last layer
SMALLEST_MARKER, LARGEST_MARKER = 9.0, 30.0
ARC_POINTS = 15


def depth_profile(audit: Audit) -> go.Figure:
    """Both sides of the bracket at every layer, on a scale of decades, with and without the normalizers' gains.

    Above: the certified bound from the input to the layer. Below: how far the witness's two points are apart there, which no
    constant of that part can be less than. At the end the bracket of the whole network, whose layers are bounded together.
    """
    names = labels([*(row.name for row in audit.layers), WHOLE])
    inner = names[:-1]
    upper = [row.upper_here for row in audit.layers]
    bare = [row.upper_without_gains for row in audit.layers]
    below = [row.separation for row in audit.layers]
    whole = None not in _logarithms([*upper, *below])  # else the band would go on where there is no bound
    band = {"fill": "tonexty", "fillcolor": "rgba(0,114,178,0.15)"} if whole else {}
    traces = [
        _line("witnessed: at least", inner, below, {"color": COLORS[2], "width": 2}),
        _line("certified: at most", inner, upper, {"color": COLORS[0], "width": 3}, **band),
    ]
    if any(row.gain is not None for row in audit.layers):
        traces.append(_line("without the normalizers' gains", inner, bare, {"color": COLORS[1], "width": 2, "dash": "dash"}))
    ends = [audit.bracket.lower, audit.bracket.upper]
    traces.append(
        _line(
            "whole network: its bracket",
            [names[-1]] * 2,
            ends,
            {"color": COLORS[3], "width": 6},
            mode="lines+markers",
            marker={"size": 12},
        )
    )
    made = figure(
        *traces, title="How the Lipschitz bracket builds up with depth", x="layer, in the order of computation", y="constant"
    )
    _decades(made, traces)
    made.update_xaxes(type="category", categoryorder="array", categoryarray=names, showgrid=False)
    note = _end_of_line(audit)
    if note:
        made.add_annotation(text=note, showarrow=False, x=0.5, y=0.02, xref="paper", yref="paper")
    return made.update_layout(height=480, legend={"traceorder": "normal"})


def _decades(made: go.Figure, traces: Sequence[go.Scatter]) -> None:
    """A vertical axis for traces of log10."""
    drawn = [value for trace in traces for value in trace.y if value is not None]
    low, high = (min(drawn), max(drawn)) if drawn else (0.0, 1.0)
    low, high = low - 0.06 * (high - low) - 0.05, high + 0.06 * (high - low) + 0.05
    values, texts = decade_ticks(low, high)
    made.update_yaxes(range=[low, high], tickvals=values, ticktext=texts, zeroline=False)


def _logarithms(values: Sequence[Magnitude | None]) -> list[float | None]:
    """What can be drawn of them."""
    return [value.log10 if value is not None and math.isfinite(value.log10) else None for value in values]


def _end_of_line(audit: Audit) -> str:
    """Why the line above ends before the last layer, if it does."""
    if audit.bracket.upper is None:
        return f"no upper bound ({escaped(audit.bracket.reason)}): the line ends at the first of them"
    finite = audit.bracket.upper.finite
    return "" if finite else "no finite bound holds for all inputs: the line ends where it becomes infinite"


def _line(name: str, x: Sequence[str], values: Sequence[Magnitude | None], line: dict[str, object], **style: object) -> go.Scatter:
    exact = ["" if value is None else f"{value:.6}" for value in values]
    hover = "<b>%{x}</b><br>%{customdata}<extra>%{fullData.name}</extra>"
    return go.Scatter(
        x=list(x), y=_logarithms(values), customdata=exact, name=name, line=line, hovertemplate=hover, **{"mode": "lines", **style}
    )


def model_graph(audit: Audit) -> go.Figure:
    """The layers in the order of computation, an arc from each to every layer that reads it, coloured by share of log(upper)."""
    names = labels(row.name for row in audit.layers)
    position = {row.name: index for index, row in enumerate(audit.layers)}
    x: list[float | None] = []
    y: list[float | None] = []
    for index, row in enumerate(audit.layers):
        for source in row.reads:
            arc_x, arc_y = _arc(position[source], index)
            x += [*arc_x, None]
            y += [*arc_y, None]
    shares = np.array([row.share_of_log_upper or 0.0 for row in audit.layers])
    largest = float(np.abs(shares).max(initial=0)) or 1.0
    sizes = SMALLEST_MARKER + (LARGEST_MARKER - SMALLEST_MARKER) * np.sqrt(np.abs(shares) / largest)
    detail = [f"{escaped(row.kind)}<br>{_share(row.share_of_log_upper)}" for row in audit.layers]
    arcs = go.Scatter(x=x, y=y, mode="lines", line={"color": NEUTRAL, "width": 1.2}, hoverinfo="skip", showlegend=False)
    marker = {
        "color": 100 * shares, "cmin": -100 * largest, "cmax": 100 * largest, "colorscale": DIVERGING, "reversescale": True,
        "size": sizes, "opacity": 1, "line": {"color": NEUTRAL, "width": 1},
        "colorbar": {"title": {"text": "share [%]"}, "thickness": 14},
    }  # fmt: skip
    layers = go.Scatter(
        x=list(range(len(names))), y=[0.0] * len(names), mode="markers", marker=marker, customdata=detail, text=names,
        hovertemplate="<b>%{text}</b><br>%{customdata}<extra></extra>", showlegend=False,
    )  # fmt: skip
    made = figure(
        arcs, layers, title="Which layers make the bound: share of log(upper)", x="layer, in the order of computation", y=""
    )
    every = math.ceil(len(names) / 40) or 1
    made.update_xaxes(tickvals=list(range(0, len(names), every)), ticktext=names[::every], showgrid=False, zeroline=False)
    return made.update_yaxes(visible=False).update_layout(height=400 if audit.residual else 280)


def certificate_gap(curve: GapCurve) -> go.Figure:
    """Both sides of the bracket against the radius of its region, and the largest radius at which they are within the factor."""
    radii = [math.log10(point.radius) for point in curve.points]
    exact = [f"radius {point.radius:.4g}<br>ratio {point.ratio:.4}" for point in curve.points]

    def side(name: str, values: Sequence[Magnitude | None], color: str, **style: object) -> go.Scatter:
        shown = [f"{text}<br>{value}" for text, value in zip(exact, values, strict=True)]
        hover = "%{customdata}<extra>%{fullData.name}</extra>"
        return go.Scatter(
            x=radii, y=_logarithms(values), customdata=shown, name=name, mode="lines+markers", line={"color": color, "width": 3},
            hovertemplate=hover, **style,
        )  # fmt: skip

    below = side("witnessed: at least", [point.lower for point in curve.points], COLORS[2])
    above = side(
        "certified: at most", [point.upper for point in curve.points], COLORS[0], fill="tonexty", fillcolor="rgba(0,114,178,0.15)"
    )
    made = figure(below, above, title="Certificate gap", x="radius of the region", y="Lipschitz constant")
    values, texts = decade_ticks(min(radii), max(radii))
    made.update_xaxes(tickvals=values, ticktext=texts, zeroline=False)
    _decades(made, [below, above])
    if curve.radius:
        note = (
            f"≤ {curve.factor:g} × up to {curve.radius:.3g}"
            if not curve.exceptions
            else f"≤ {curve.factor:g} × at {curve.radius:.3g}"
        )
        made.add_vline(x=math.log10(curve.radius), line={"color": NEUTRAL, "width": 1.5, "dash": "dash"})
        made.add_annotation(
            x=math.log10(curve.radius), y=0.97, yref="paper", text=note, showarrow=False, xanchor="right", xshift=-6, yanchor="top"
        )
    return made.update_layout(legend={"traceorder": "normal"})


def _arc(start: int, end: int) -> tuple[list[float], list[float]]:
    """A straight line to the next layer, half an ellipse over those that lie between."""
    if end - start == 1:
        return [start, end], [0.0, 0.0]
    angle = np.linspace(math.pi, 0, ARC_POINTS)
    middle, radius = (start + end) / 2, (end - start) / 2
    return list(middle + radius * np.cos(angle)), list(np.sqrt(radius) * np.sin(angle))


def _share(share: float | None) -> str:
    return "no share: the bound is absent, infinite or about 1" if share is None else f"{100 * share:.3g} % of log(upper)"
