"""Figures of the loss's curvature: densities of eigenvalues, the loss along its gradient, lines and planes through a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from normscope.report.theme import COLORS, SEQUENTIAL, TEMPLATE, decade_ticks, figure, label, line_style, spans_decades

if TYPE_CHECKING:
    from normscope.curvature.estimators import Density
    from normscope.curvature.landscape import Landscape
    from normscope.curvature.slices import Slice

FLOOR = 1e-7  # of the greatest density: what is drawn as nothing
SYMBOLS = ("circle", "diamond-open", "square", "x-open")
MOST_TICKS = 40


def densities(named: Mapping[str, Density], points: int = 1000) -> go.Figure:
    """Distributions of eigenvalues on one logarithmic scale, for instance plain and with the symmetries divided out."""
    low = min(density.nodes.min() - 5 * density.width for density in named.values())
    high = max(density.nodes.max() + 5 * density.width for density in named.values())
    grid = np.linspace(low, high, points)
    heights = {name: density.at(grid) for name, density in named.items()}
    floor = FLOOR * max(float(values.max()) for values in heights.values())
    traces = [
        go.Scatter(
            x=grid, y=np.where(values >= floor, values, np.nan), name=label(name), mode="lines", line=line_style(position),
            hovertemplate="eigenvalue %{x:.6~g}<br>density %{y:.6~g}<extra>%{fullData.name}</extra>",
        )
        for position, (name, values) in enumerate(heights.items())
    ]  # fmt: skip
    made = figure(*traces, title="Density of the Hessian's eigenvalues", x="eigenvalue λ", y="density [1/λ]", log_y=True)
    return made.update_layout(showlegend=len(named) > 1)


def eigenvalues(named: Mapping[str, Sequence[tuple[float, float]]]) -> go.Figure:
    """The outermost eigenvalues in their order, each (value, error) with its interval, for instance plain and quotient."""
    every = np.array([value for pairs in named.values() for value, _ in pairs], dtype=float)
    traces = [
        go.Scatter(
            x=list(range(1, len(pairs) + 1)), y=[value for value, _ in pairs], name=label(name), mode="markers",
            error_y={"array": [error for _, error in pairs]}, marker={"size": 10, "symbol": SYMBOLS[position % len(SYMBOLS)]},
            hovertemplate="eigenvalue %{x}<br>%{y:.6~g}<extra>%{fullData.name}</extra>",
        )
        for position, (name, pairs) in enumerate(named.items())
    ]  # fmt: skip
    made = figure(
        *traces, title="Outermost eigenvalues", x="place, from the outermost", y="eigenvalue λ", log_y=spans_decades(every)
    )
    return made.update_xaxes(dtick=1 if len(every) <= MOST_TICKS else None).update_layout(showlegend=True)


def landscape(found: Landscape) -> go.Figure:
    """The loss, and the change of its gradient, at θ − η∇L(θ) against the learning rate η."""
    made = make_subplots(rows=1, cols=2, subplot_titles=("loss at θ − η∇L", "change of the gradient"))
    for column, values in enumerate((found.losses, found.gradient_changes), start=1):
        hover = "η %{x:.6~g}<br>%{y:.6~g}<extra></extra>"
        made.add_scatter(x=found.learning_rates, y=values, mode="lines+markers", hovertemplate=hover, row=1, col=column)
        made.update_yaxes(type="log" if spans_decades(values) else None, row=1, col=column)
    made.update_yaxes(title={"text": "loss"}, col=1).update_yaxes(title={"text": "‖∇L(θ − η∇L) − ∇L(θ)‖"}, col=2)
    made.update_xaxes(type="log", title={"text": "learning rate η"})
    return made.update_layout(template=TEMPLATE, title={"text": "The loss along its gradient"}, showlegend=False, height=420)


def loss_slice(found: Slice, trajectory: np.ndarray | None = None) -> go.Figure:
    """The loss on a line, or contours on a plane with the path that a training took, projected onto it.

    trajectory: (points, 2), coordinates along the two directions.
    """
    axes = [f"along {name}" for name in found.names]
    if found.losses.ndim == 1:
        line = go.Scatter(
            x=found.offsets,
            y=found.losses,
            mode="lines",
            line=line_style(0),
            hovertemplate="%{x:.6~g}<br>loss %{y:.6~g}<extra></extra>",
        )
        return figure(line, title="The loss on a line", x=axes[0], y="loss", log_y=spans_decades(found.losses))
    logarithmic = spans_decades(found.losses)
    height = np.log10(found.losses.T) if logarithmic else found.losses.T
    bar: dict[str, object] = {"title": {"text": "loss"}, "thickness": 14, "outlinewidth": 0}
    if logarithmic:
        bar["tickvals"], bar["ticktext"] = decade_ticks(float(np.nanmin(height)), float(np.nanmax(height)))
    plane = go.Contour(
        x=found.offsets, y=found.offsets, z=height, customdata=found.losses.T, colorscale=SEQUENTIAL, colorbar=bar, ncontours=24,
        hovertemplate="(%{x:.4~g}, %{y:.4~g})<br>loss %{customdata:.6~g}<extra></extra>", name="loss",
    )  # fmt: skip
    path = [] if trajectory is None else [_trajectory(np.asarray(trajectory))]
    return figure(plane, *path, title="The loss on a plane", x=axes[0], y=axes[1]).update_layout(showlegend=False, height=520)


def _trajectory(points: np.ndarray) -> go.Scatter:
    sizes = [6] * (len(points) - 1) + [13]
    return go.Scatter(
        x=points[:, 0], y=points[:, 1], mode="lines+markers", name="training", customdata=np.arange(len(points)),
        line={"color": COLORS[1], "width": 3}, marker={"size": sizes, "line": {"color": "white", "width": 1}},
        hovertemplate="point %{customdata} of the path<br>(%{x:.4~g}, %{y:.4~g})<extra></extra>",
    )  # fmt: skip
