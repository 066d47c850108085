"""Figures of guarantees: margins, flatness, bounds side by side, and bounds against the true gaps of a family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from normscope.bounds.bound import STATUSES
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from normscope.report.theme import COLORS, NEUTRAL, escaped, figure, labels

if TYPE_CHECKING:
    from normscope.bounds.bound import Bound
    from normscope.bounds.comparison import FamilyComparison
    from normscope.bounds.flatness import Flatness
    from normscope.bounds.generalization import Guarantees
    from normscope.bounds.margins import Margins

STATUS_COLORS = dict(zip(STATUSES, COLORS, strict=False))
STATUS_SYMBOLS = dict(zip(STATUSES, ("circle", "square", "diamond-open"), strict=True))
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "star", "hexagram", "pentagon")
BINS = 60


def margin_histogram(margins: Margins, normalized: bool = False) -> go.Figure:
    """How many samples have which margin: those answered wrongly, at and below zero, in a colour and a pattern of their own."""
    values = margins.normalized if normalized else margins.values
    values = values[np.isfinite(values)]
    width = float(np.ptp(values)) / BINS if len(values) and np.ptp(values) > 0 else 1.0
    low, high = (float(np.floor(end / width)) for end in (values.min(initial=0.0), values.max(initial=0.0)))
    edges = width * np.arange(low, high + 2)  # zero is an edge
    traces = [
        go.Bar(
            x=(edges[:-1] + edges[1:]) / 2, y=np.histogram(part, edges)[0], width=width, name=name,
            marker={"color": color, "pattern": {"shape": pattern}},
        )
        for part, name, color, pattern in (
            (values[values > 0], "right", COLORS[0], ""), (values[values <= 0], "wrong", COLORS[1], "/"),
        )
    ]  # fmt: skip
    unit = "margin over √2 L, L certified on all inputs" if normalized else "margin, right output less the largest other"
    title = f"Margins of {len(margins):,} samples, {100 * margins.accuracy:.1f} % of them positive"
    return figure(*traces, title=title, x=unit, y="samples").update_layout(barmode="stack", bargap=0.02)


def flatness_curves(flatness: Flatness, quantity: str = "accuracy") -> go.Figure:
    """Mean accuracy or loss against σ, one line per kind of noise, with the confidence band of the mean."""
    if quantity not in ("accuracy", "loss"):
        raise InputError(f"quantity must be accuracy or loss, got {quantity!r}")
    traces = []
    for number, curve in enumerate(flatness.curves):
        bands = curve.bands(curve.accuracies if quantity == "accuracy" else curve.losses, flatness.confidence)
        low, high = np.array([[band.low, band.high] for band in bands]).T
        if quantity == "accuracy":
            low, high = low.clip(0, 1), high.clip(0, 1)
        else:
            low = low.clip(min=0.1 * min((band.value for band in bands if band.value > 0), default=1.0))
        color = COLORS[number % len(COLORS)]
        line = {"color": color, "dash": ("solid", "dash", "dot")[number % 3]}
        edge = {"x": curve.sigmas, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        traces += [
            go.Scatter(y=high, legendgroup=curve.kind, **edge),
            go.Scatter(y=low, fill="tonexty", fillcolor=_faint(color), legendgroup=curve.kind, **edge),
            go.Scatter(
                x=curve.sigmas, y=[band.value for band in bands], name=curve.kind, mode="lines+markers", line=line,
                marker={"symbol": SYMBOLS[number]}, legendgroup=curve.kind,
            ),
        ]  # fmt: skip
    title = f"Noise on the parameters, {100 * flatness.confidence:g} % bands, {flatness.mode} mode"
    return figure(*traces, title=title, x="standard deviation σ of the noise", y=quantity, log_x=True, log_y=quantity == "loss")


def bound_comparison(guarantees: Guarantees, truth: float | None = None) -> go.Figure:
    """log10 of every bound's value, by status; lines at the trivial bound and at what held-out data say."""
    bounds = [bound for bound in guarantees if _drawable(bound.value)]
    names = labels(bound.name for bound in bounds)
    named = list(zip(names, bounds, strict=True))
    traces = [_points([pair for pair in named if pair[1].status == status], status) for status in STATUSES]
    found = figure(*(trace for trace in traces if trace is not None), title="Bounds side by side", x="log₁₀ of the value", y="")
    found.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1])
    scales = sorted({bound.trivial for bound in bounds if 0 < bound.trivial < math.inf})
    lines = [(f"trivial: {scales[-1]:g}", scales[-1], NEUTRAL, "left")] if scales else []
    if truth is not None and truth > 0:
        lines.append((f"held out: {truth:.3g}", truth, COLORS[4], "right"))
    for text, place, color, side in lines:
        found.add_vline(
            x=math.log10(place), line={"color": color, "dash": "dash"}, annotation={"text": text, "yanchor": "bottom"},
            annotation_position=f"top {'right' if side == 'left' else 'left'}",
        )  # fmt: skip
    return found.update_layout(height=180 + 26 * len(names), margin={"t": 80}, legend={"orientation": "h", "y": -0.2})


def bounds_against_gaps(comparison: FamilyComparison) -> go.Figure:
    """One point per model and a bound: log10 of the gap that the bound states against the true gap, and a line where they agree."""
    traces: list[go.Scatter] = []
    for number, name in enumerate(comparison.names):
        stated = [(member, member.predicted(name)) for member in comparison.members]
        points = [(member.gap, value.log10, member.name) for member, value in stated if value is not None and _drawable(value)]
        if points:
            gaps, values, texts = zip(*points, strict=True)
            symbol = SYMBOLS[number % len(SYMBOLS)] + ("" if comparison.certified(name) else "-open")
            marker = {"symbol": symbol, "size": 8, "color": COLORS[number % len(COLORS)]}
            traces.append(go.Scatter(x=gaps, y=values, text=texts, mode="markers", name=name, marker=marker))
    positive = [member.gap for member in comparison.members if member.gap > 0]
    if positive:
        line = np.linspace(min(positive), max(positive), 50)
        traces.append(
            go.Scatter(x=line, y=np.log10(line), mode="lines", name="the true gap", line={"color": NEUTRAL, "dash": "dash"})
        )
    title = f"Bounds (filled: certified) against the true gap of {len(comparison.members)} models"
    found = figure(*traces, title=title, x=f"true gap of the {comparison.loss} loss", y="log₁₀ of the stated gap")
    return found.update_layout(legend={"font": {"size": 11}})


def _drawable(value: Magnitude) -> bool:
    return bool(value) and value.finite


def _points(named: Sequence[tuple[str, Bound]], status: str) -> go.Scatter | None:
    if not named:
        return None
    return go.Scatter(
        x=[bound.value.log10 for _, bound in named],
        y=[name for name, _ in named],
        mode="markers",
        name=status,
        text=[escaped(f"{bound.value}: {bound.quantity}, {bound.loss} loss, {bound.verdict}") for _, bound in named],
        marker={"color": STATUS_COLORS[status], "symbol": STATUS_SYMBOLS[status], "size": 11},
    )


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"
