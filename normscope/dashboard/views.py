"""What the page asks for: figures by the report's builders, their tables, and what is known of a run, from checked questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from normscope._watch.columns import METRICS, PRODUCTS, SCALARS
from normscope._watch.growing import MOST_LAYERS
from normscope._watch.reading import Run
from normscope._watch.store import EVENTS
from normscope.core.errors import InputError
from normscope.dashboard.card import alerts, text
from normscope.dashboard.listing import MOST_SHOWN
from normscope.report.quantities import quantity
from normscope.report.runs import ColourScale, heatmap, layer_series, norm_angle, products, series

MOST_LINES = 28  # that can be told apart
MOST_NOTES = 100
TABLE_ROWS = 20  # of a table over steps
LEAST_COLUMNS, MOST_COLUMNS = 50, 500
MOST_CELLS = 1_000_000  # of a heatmap

FIGURES = ("heatmap", "layers", "series", "products", "norm_angle")


@dataclass(frozen=True)
class Question:
    """A figure or a table. of: a metric or a number. layers: positions in the run's layer table. between: steps."""

    of: str
    layers: tuple[int, ...] | None = None
    between: tuple[float, float] | None = None
    columns: int = 250

    @staticmethod
    def parse(given: Mapping[str, str]) -> Question:
        of = given.get("of", METRICS[0])
        if of not in METRICS and of not in SCALARS:
            raise InputError(f"no quantity {of[:100]!r}: choose from {', '.join((*METRICS, *SCALARS))}")
        layers = parse_ranges(given["layers"]) if "layers" in given else None
        between = (_number(given, "from"), _number(given, "to")) if "from" in given or "to" in given else None
        if between is not None and not between[0] < between[1]:
            raise InputError("`from` must be before `to`")
        columns = int(_number(given, "columns")) if "columns" in given else 250
        return Question(of, layers, between, min(max(columns, LEAST_COLUMNS), MOST_COLUMNS))

    def of_metric(self) -> str:
        if self.of not in METRICS:
            raise InputError(f"{self.of} is not a quantity of layers")
        return self.of

    def chosen(self, run: Run) -> list[int]:
        """The layers asked for that the run has."""
        every = range(len(run.layers))
        return list(every) if self.layers is None else [index for index in self.layers if index in every]

    def columns_of(self, rows: int) -> int:
        """Steps to show of so many layers: as many as were asked for, within MOST_CELLS."""
        return max(min(self.columns, MOST_CELLS // max(rows, 1)), 2)


def parse_ranges(text: str) -> tuple[int, ...]:
    """
    >>> parse_ranges("0-2,7")
    (0, 1, 2, 7)
    >>> parse_ranges("0-2,1-3,2")
    (0, 1, 2, 3)
    >>> parse_ranges("")
    ()
    """
    found: dict[int, None] = {}
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if not (
            first.isascii()
            and first.isdigit()
            and len(first) < 7
            and (not last or (last.isascii() and last.isdigit() and len(last) < 7))
        ):
            raise InputError(f"layers must be numbers and ranges such as 0-3,7, got {part[:50]!r}")
        if int(last or first) >= MOST_LAYERS:
            raise InputError("more layers than any run has")
        found |= dict.fromkeys(range(int(first), int(last or first) + 1))
    return tuple(found)


def _number(given: Mapping[str, str], name: str) -> float:
    try:
        value = float(given[name])
    except (KeyError, ValueError) as error:
        raise InputError(f"`{name}` must be a number") from error
    if not math.isfinite(value):
        raise InputError(f"`{name}` must be finite")
    return value


# figures -------------------------------------------------------------------------------------------------------------


def figure(kind: str, runs: Sequence[Run], question: Question) -> go.Figure:
    """heatmap, products and norm_angle are of the first run; heatmap takes its colours' scale from all."""
    _check(runs)
    between, columns = question.between, question.columns
    if kind == "heatmap":
        metric, chosen = question.of_metric(), question.chosen(runs[0])
        scale = ColourScale.shared(runs, metric) if len(runs) > 1 else None
        return heatmap(runs[0], metric, layers=chosen, between=between, columns=question.columns_of(len(chosen)), scale=scale)
    if kind == "layers":
        chosen = question.chosen(runs[0])[:MOST_LINES]
        return layer_series(runs[0], question.of_metric(), chosen, between=between, columns=columns)
    if kind == "series":
        return series(runs, question.of, between=between, columns=columns)
    if kind == "products":
        return products(runs[0], between=between, columns=columns)
    if kind == "norm_angle":
        return norm_angle(runs[0], between=between)
    raise InputError(f"no figure {kind[:50]!r}: choose from {', '.join(FIGURES)}")


def _check(runs: Sequence[Run]) -> None:
    if not 1 <= len(runs) <= MOST_SHOWN:
        raise InputError(f"choose between 1 and {MOST_SHOWN} runs")


# tables --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FigureTable:
    """What a figure shows, for who cannot see it. Numbers are floats, None where there is none."""

    caption: str
    columns: tuple[str, ...]
    rows: list[list[Any]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def table(kind: str, runs: Sequence[Run], question: Question) -> FigureTable:
    """What a figure of this kind shows: of layers first, last, least and greatest values of the first run, else a few steps."""
    _check(runs)
    if kind == "products":
        arrays = runs[0].arrays(*PRODUCTS)
        columns = [(quantity(name).axis, arrays["step"], arrays[name]) for name in PRODUCTS]
        return _step_table(f"Products over depth, {runs[0].name}", columns, question)
    if question.of in METRICS:
        return _layer_table(runs[0], question)
    read = [(run.name, run.arrays(question.of)) for run in runs]
    return _step_table(quantity(question.of).axis, [(name, found["step"], found[question.of]) for name, found in read], question)


def _layer_table(run: Run, question: Question) -> FigureTable:
    arrays = run.arrays(question.of)
    steps, values = arrays["step"], arrays[question.of]
    if question.between is not None:
        inside = (steps >= question.between[0]) & (steps <= question.between[1])
        steps, values = steps[inside], values[inside]
    rows = []
    for index in question.chosen(run):
        seen = np.flatnonzero(np.isfinite(values[:, index]))
        if len(seen):
            column = values[seen, index].astype(np.float64)
            layer = run.layers[index]
            rows.append([
                layer["name"], str(layer.get("kind", "")), column[0], column[-1],
                column.min(), int(steps[seen[column.argmin()]]), column.max(), int(steps[seen[column.argmax()]]),
            ])  # fmt: skip
    columns = ("layer", "kind", "first", "last", "least", "at step", "greatest", "at step")
    return FigureTable(f"{quantity(question.of).axis}, {run.name}", columns, rows)


def _step_table(caption: str, columns: Sequence[tuple[str, np.ndarray, np.ndarray]], question: Question) -> FigureTable:
    """columns: name, steps, values."""
    steps = np.unique(np.concatenate([steps for _, steps, _ in columns]))
    if question.between is not None:
        steps = steps[(steps >= question.between[0]) & (steps <= question.between[1])]
    shown = steps[np.unique(np.linspace(0, len(steps) - 1, TABLE_ROWS).round().astype(int))] if len(steps) else steps
    rows = [[int(step), *(_at(steps, values, step) for _, steps, values in columns)] for step in shown]
    return FigureTable(caption, ("step", *(name for name, _, _ in columns)), rows)


def _at(steps: np.ndarray, values: np.ndarray, step: int) -> float | None:
    """The value recorded last, up to a step; None after the end."""
    place = int(np.searchsorted(steps, step, side="right")) - 1
    return float(values[place]) if place >= 0 and step <= steps[-1] else None


# runs ----------------------------------------------------------------------------------------------------------------


def details(run: Run) -> dict[str, Any]:
    """Layers, findings, notes and settings."""
    manifest = run.manifest
    return {
        "layers": [
            {"name": layer["name"], "kind": str(layer.get("kind", "")), "role": str(layer.get("role", ""))} for layer in run.layers
        ],
        "findings": [asdict(alert) for alert in alerts(run)],
        "notes": _notes(run),
        "settings": {name: manifest[name] for name in ("model", "optimizer", "config", "process", "versions") if name in manifest},
    }


def _notes(run: Run) -> list[str]:
    said = [text(event.get("message")) for kind in ("note", "error") for event in run.events(kind)]
    hidden = [f"{len(said) - MOST_NOTES} more notes are in {EVENTS}"] if len(said) > MOST_NOTES else []
    return [*map(text, run.notes[:MOST_NOTES]), *said[:MOST_NOTES], *hidden]


def quantities() -> dict[str, Any]:
    """Titles of everything that can be shown, for the page's menus."""
    return {
        "metrics": {name: quantity(name).axis for name in METRICS},
        "scalars": {name: quantity(name).axis for name in SCALARS},
    }
