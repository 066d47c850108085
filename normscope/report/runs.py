"""Figures of a recorded training: layers against steps as one picture, and lines over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import plotly.graph_objects as go

from normscope._watch.columns import METRICS, PRODUCTS, SCALARS
from normscope.core.errors import InputError
from normscope.findings.finding import Finding
from normscope.findings.over_time import Judged
from normscope.report.quantities import Quantity, quantity
from normscope.report.theme import (
    DIVERGING,
    SEQUENTIAL,
    STEPS,
    WARNING,
    decade_ticks,
    figure,
    label,
    labels,
    line_style,
    paragraph,
    spans_decades,
)
from normscope.report.thinning import COLUMNS, SampledMatrix, sample_matrix, sample_series

HEATMAPS = ("spectral_norm", "input_variance", "gradient_norm", "effective_lr")  # the main view, in this order
MOST_DECADES = 12.0  # below the greatest value, what a colour scale tells apart
COLOUR_STEPS = 512  # per decade: rounding of what only chooses a colour, so that files stay small
LINES = 8  # layers that get a line of their own
WINDOWS = 40  # points of a path in the norm–angle plane
ROW_HEIGHT, LEAST_HEIGHT, MOST_HEIGHT = 16, 320, 760  # pixels per layer, and of a heatmap

Between = tuple[float, float]


class Recording(Protocol):
    """What figures read: an `ns.Run`, or anything that holds the columns of one."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def findings(self) -> Sequence[Finding]: ...
    @property
    def judged(self) -> Mapping[str, Judged]: ...
    def arrays(self, *columns: str) -> dict[str, np.ndarray]:
        """`step` and the columns, all of one length: (rows,) for a number, (rows, layers) for a metric."""


def run_figure(run: Recording, name: str, **options: Any) -> go.Figure:
    """A figure by its name: a metric (heatmap), a number (line), "products" or "norm_angle"."""
    if name == "products":
        return products(run, **options)
    if name == "norm_angle":
        return norm_angle(run, **options)
    if name in METRICS:
        return heatmap(run, name, **options)
    if name in SCALARS:
        return series([run], name, **options)
    raise InputError(f"no figure {name!r}: choose from products, norm_angle, {', '.join(METRICS)}, {', '.join(SCALARS)}")


# layers × steps ------------------------------------------------------------------------------------------------------


def heatmap(
    run: Recording,
    metric: str,
    *,
    layers: Sequence[int] | None = None,
    between: Between | None = None,
    columns: int = COLUMNS,
    scale: ColourScale | None = None,
) -> go.Figure:
    """One row per layer, one column per few steps, with the findings marked; layers without the metric are left out.

    layers: positions in `run.layers`. between: steps to show. scale: of the colours, to compare runs (`Scale.shared`).
    """
    steps, values = _rows(run, metric, between)
    every, recorded = range(values.shape[1]), np.isfinite(values).any(axis=0)
    chosen = [index for index in (every if layers is None else layers) if recorded[index]]
    about, shown = quantity(metric), labels(run.layers[index]["name"] for index in chosen)
    sampled = sample_matrix(steps, values if chosen == list(every) else values[:, chosen], columns)
    traces = [_cells(sampled, shown, about, scale or ColourScale.of(sampled.values, about.signed))] if chosen else []
    places = {run.layers[index]["name"]: shown[row] for row, index in enumerate(chosen)}
    made = figure(*traces, *_marks(run, places, between), title=about.axis, x="step", y="")  # names say what rows are
    height = min(max(LEAST_HEIGHT, 140 + ROW_HEIGHT * len(chosen)), MOST_HEIGHT)
    made.update_layout(height=height, showlegend=False, yaxis={"autorange": "reversed", "type": "category", "showgrid": False})
    made.update_xaxes(STEPS, showgrid=False, zeroline=False, range=between or _extent(sampled.positions))
    return made if chosen else _empty(made, f"no layer has {about.words} on record")


@dataclass(frozen=True)
class ColourScale:
    """Both ends of a colour scale, of log10 where it is logarithmic."""

    low: float
    high: float
    logarithmic: bool = False

    @staticmethod
    def of(values: np.ndarray, signed: bool = False) -> ColourScale:
        """Logarithmic where values span decades, symmetric about zero where signs matter."""
        finite = values[np.isfinite(values)]
        if signed:
            largest = float(np.abs(finite).max(initial=0)) or 1.0
            return ColourScale(-largest, largest)
        positive = finite[finite > 0]
        if not (finite < 0).any() and spans_decades(positive):
            low, high = np.log10([positive.min(), positive.max()], dtype=np.float64)
            return ColourScale(max(float(low), float(high) - MOST_DECADES), float(high), logarithmic=True)
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        return ColourScale(low, high) if high > low else ColourScale(low - 0.5, high + 0.5)

    @staticmethod
    def shared(runs: Sequence[Recording], metric: str) -> ColourScale:
        """One scale for a metric of several runs."""
        return ColourScale.of(np.concatenate([run.arrays(metric)[metric].ravel() for run in runs]), quantity(metric).signed)

    def place(self, values: np.ndarray) -> np.ndarray:
        """Where values lie on the scale; what is beyond an end, zero and infinity too, lies at that end."""
        with np.errstate(divide="ignore", invalid="ignore"):
            places = np.round(np.log10(values) * COLOUR_STEPS) / COLOUR_STEPS if self.logarithmic else values
        return np.clip(places, self.low, self.high).astype(np.float32)


def _cells(sampled: SampledMatrix, names: Sequence[str], about: Quantity, scale: ColourScale) -> go.Heatmap:
    """Coloured by the scale; hovering shows step and value as recorded."""
    bar: dict[str, Any] = {"title": {"text": about.unit}, "thickness": 14, "outlinewidth": 0}
    if scale.logarithmic:
        bar["tickvals"], bar["ticktext"] = decade_ticks(scale.low, scale.high)
    return go.Heatmap(
        x=sampled.positions, y=list(names), z=scale.place(sampled.values.T), zmin=scale.low, zmax=scale.high,
        colorscale=DIVERGING if about.signed else SEQUENTIAL, colorbar=bar,
        hovertext=_compact(sampled.steps.T), customdata=sampled.values.T.astype(np.float32), hoverongaps=False,
        hovertemplate="<b>%{y}</b><br>step %{hovertext}<br>" + about.title + " %{customdata:.6~g}<extra></extra>",
    )  # fmt: skip


def _extent(positions: np.ndarray) -> list[float] | None:
    """From the left edge of the first column to the right edge of the last."""
    if len(positions) < 2:
        return None
    (first, second), (before, last) = positions[:2], positions[-2:]
    return [float(first - (second - first) / 2), float(last + (last - before) / 2)]


def _compact(steps: np.ndarray) -> np.ndarray:
    """Integers of a type that browsers have; they have none of 64 bits."""
    return steps.astype(np.int32 if steps.max(initial=0) < 2**31 else np.float64)


def _marks(run: Recording, places: Mapping[str, str], between: Between | None) -> list[go.Scatter]:
    """A cross where a finding is about a layer that is shown. places: layer → its label."""
    found = [(finding, finding.first_step) for finding in run.findings if finding.where in places]
    marked = [(finding, step) for finding, step in found if step is not None and _within(step, between)]
    if not marked:
        return []
    return [
        go.Scatter(
            x=[step for _, step in marked], y=[places[finding.where] for finding, _ in marked], mode="markers",
            cliponaxis=False,
            marker={"symbol": "x", "size": 11, "color": WARNING, "line": {"color": "white", "width": 1.5}}, name="finding",
            text=[f"{label(finding.name)}<br>{paragraph(finding.message)}" for finding, _ in marked],
            hovertemplate="<b>%{y}</b><br>step %{x}<br>%{text}<extra></extra>",
        )
    ]  # fmt: skip


# lines ---------------------------------------------------------------------------------------------------------------


def series(
    runs: Sequence[Recording],
    column: str,
    *,
    names: Sequence[str] = (),
    between: Between | None = None,
    columns: int = COLUMNS,
) -> go.Figure:
    """One number over the steps, a line per run. names: of the lines, where the runs' own do not tell them apart."""
    read = [(name, *_rows(run, column, between)) for name, run in zip(names or [run.name for run in runs], runs, strict=True)]
    return _lines(read, quantity(column), columns, between)


def layer_series(
    run: Recording, metric: str, layers: Sequence[int], *, between: Between | None = None, columns: int = COLUMNS
) -> go.Figure:
    """One metric over the steps, a line per layer."""
    steps, values = _rows(run, metric, between)
    return _lines([(run.layers[index]["name"], steps, values[:, index]) for index in layers], quantity(metric), columns, between)


def products(run: Recording, *, between: Between | None = None, columns: int = COLUMNS) -> go.Figure:
    """The product over depth of the weights' norms and of the normalizers' gains, by each definition."""
    arrays = _between(run.arrays(*PRODUCTS), between)
    lines = [(quantity(name).title, arrays["step"], arrays[name]) for name in PRODUCTS if arrays[name].any()]
    return _lines(lines, Quantity("Products over depth", "log10", signed=True), columns, between)


def _lines(
    lines: Sequence[tuple[str, np.ndarray, np.ndarray]], about: Quantity, columns: int, between: Between | None
) -> go.Figure:
    """lines: name, steps, values."""
    every = np.concatenate([values for _, _, values in lines]) if lines else np.empty(0)
    traces = []
    for position, (name, steps, values) in enumerate(lines):
        x, y = sample_series(steps, values, columns)
        hover = "step %{x}<br>%{y:.6~g}<extra>%{fullData.name}</extra>"
        style = line_style(position)
        mode = "lines" if len(x) > 1 else "markers"
        traces.append(go.Scatter(x=x, y=_drawable(y), name=label(name), mode=mode, line=style, hovertemplate=hover))
    made = figure(*traces, title=about.title, x="step", y=about.axis, log_y=not about.signed and spans_decades(every))
    made.update_layout(showlegend=len(lines) > 1).update_xaxes(STEPS, range=between)
    if len(level := np.unique(every[np.isfinite(every)])) == 1 and level[0] > 0:
        made.update_yaxes(range=[0, 2 * float(level[0])])
    return made if np.isfinite(every).any() else _empty(made, f"{about.words} is not on record")


UNJUDGED = "no weight was judged scale-free: record with symmetries=ns.symmetries(model, example)"


def norm_angle(run: Recording, *, between: Between | None = None, most: int = LINES) -> go.Figure:
    """Paths of scale-free weights in the plane of their norm and of their rotation per step, medians of consecutive windows.

    Where weight decay and growth balance, a path comes to rest: its rotation no longer depends on how it began.
    """
    arrays = _between(run.arrays("frobenius_norm", "angle"), between)
    windows = np.array_split(np.arange(len(arrays["step"])), min(WINDOWS, max(len(arrays["step"]), 1)))
    paths = []
    for index, layer in enumerate(run.layers):
        if layer.get("scale_free"):
            norm, angle = (_medians(arrays[name][:, index], windows) for name in ("frobenius_norm", "angle"))
            seen = (norm > 0) & (angle > 0)
            if seen.any():
                starts = np.array([arrays["step"][window[0]] for window in windows])
                paths.append((str(layer["name"]), norm[seen], angle[seen], starts[seen]))
    paths.sort(key=lambda path: -float(np.ptp(np.log(path[1])) + np.ptp(np.log(path[2]))))
    traces = [_path(position, *path) for position, path in enumerate(paths[:most])]
    title = "Norm and rotation of scale-free weights" + (
        f", the {most} of {len(paths)} that move most" if len(paths) > most else ""
    )
    made = figure(*traces, title=title, x="norm ‖w‖", y="rotation a step [rad]", log_x=True, log_y=True)
    made.update_layout(height=520)
    unjudged = any(layer.get("role") == "weight" and layer.get("scale_free") is None for layer in run.layers)
    return made if paths else _empty(made, UNJUDGED if unjudged else "no scale-free weight is on record")


def _medians(values: np.ndarray, windows: Sequence[np.ndarray]) -> np.ndarray:
    parts = [values[window][np.isfinite(values[window])] for window in windows]
    return np.array([np.median(part) if len(part) else np.nan for part in parts])


def _path(position: int, name: str, norm: np.ndarray, angle: np.ndarray, steps: np.ndarray) -> go.Scatter:
    sizes = [4] * (len(norm) - 1) + [12]
    return go.Scatter(
        x=norm, y=angle, customdata=steps, name=label(name), mode="lines+markers",
        line=line_style(position), marker={"size": sizes},
        hovertemplate="from step %{customdata}<br>‖w‖ %{x:.6~g}<br>%{y:.6~g} rad a step<extra>%{fullData.name}</extra>",
    )  # fmt: skip


# reading -------------------------------------------------------------------------------------------------------------


def _rows(run: Recording, column: str, between: Between | None) -> tuple[np.ndarray, np.ndarray]:
    arrays = _between(run.arrays(column), between)
    return arrays["step"], arrays[column]


def _between(arrays: dict[str, np.ndarray], between: Between | None) -> dict[str, np.ndarray]:
    """Only the rows between two steps, and one more on each side so that lines reach the edges."""
    if between is None:
        return arrays
    first, last = np.searchsorted(arrays["step"], between, side="left")
    rows = slice(max(int(first) - 1, 0), int(last) + 1)
    return {name: values[rows] for name, values in arrays.items()}


def _within(step: float, between: Between | None) -> bool:
    return between is None or between[0] <= step <= between[1]


def _drawable(values: np.ndarray) -> np.ndarray:
    """Infinity as a gap, which is how Plotly shows what has no place on an axis."""
    return np.where(np.isfinite(values), values, np.nan)


def _empty(made: go.Figure, reason: str) -> go.Figure:
    return made.add_annotation(text=reason, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
