"""A still picture of a figure, for pages that run no scripts: lines, points, bars and surfaces as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from normscope.report.theme import COLORS, SEQUENTIAL

WIDTH, HEIGHT = 745, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 215, 40, 90  # margins; the legend is in the right one, words below lean
LEANING = 22  # degrees
SPARE = 40  # of the lower margin, where numbers stand instead of words
DECADES = 3  # of a logarithmic axis: with fewer, 2 and 5 are marked too
STROKES = {"dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3"}  # the kinds of lines that have gaps
CELLS = 41  # of a surface, along an axis
GREY, INK = "#b0b0b0", "#666666"  # readable on white and on black


class Axis:
    """From values to pixels, linear or logarithmic; words get places 0, 1, ….

    Values that cannot be shown (not finite, or not positive on a logarithmic axis) have no place.
    """

    def __init__(self, values: Sequence[Any], start: float, end: float, drawn: Any) -> None:
        """drawn: the figure's axis, for its kind and for ticks of its own."""
        log = drawn.type == "log"
        self.given = list(zip(drawn.tickvals or (), drawn.ticktext or (), strict=False))
        self.words = list(dict.fromkeys(values)) if any(isinstance(value, str) for value in values) else []
        self.log, self.start, self.end = log, start, end
        shown = [place for value in values if (place := self._number(value)) is not None]
        low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
        margin = 0.5 if self.words else 0.03 * (high - low) or 0.5
        self.low, self.high = low - margin, high + margin

    def place(self, value: Any) -> float | None:
        number = self._number(value)
        return None if number is None else self.start + (number - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def unit(self) -> float:
        """The pixels of a unit."""
        return abs(self.end - self.start) / (self.high - self.low)

    def widen(self, unit: float) -> None:
        """Show more on both sides, so that a unit has this many pixels."""
        middle, half = (self.low + self.high) / 2, abs(self.end - self.start) / unit / 2
        self.low, self.high = middle - half, middle + half

    def ticks(self) -> list[tuple[float, str]]:
        """(place, label) of round values."""
        if self.words:
            return [(place, word) for word in self.words if (place := self.place(word)) is not None]
        if self.given:
            return [(place, text) for value, text in self.given if (place := self.place(value)) is not None and self._shows(value)]
        pixels = (self.end - self.start) / (self.high - self.low)
        return [(self.start + (number - self.low) * pixels, _label(number, self.log)) for number in self._round()]

    def _shows(self, value: Any) -> bool:
        number = self._number(value)
        return number is not None and self.low <= number <= self.high

    def _round(self) -> list[float]:
        """Round numbers on the axis, at most 8; of a logarithmic one their logarithms."""
        if not self.log:
            return _multiples(_step(self.low, self.high), self.low, self.high)
        if self.high - self.low >= DECADES:
            return _multiples(math.ceil((self.high - self.low) / 8), self.low, self.high)
        marked = [digit * 10.0**decade for decade in range(math.floor(self.low), math.ceil(self.high)) for digit in (1, 2, 5)]
        low, high = 10.0**self.low, 10.0**self.high
        shown = [number for number in marked if low <= number <= high]
        return [math.log10(number) for number in (shown if len(shown) > 1 else _multiples(_step(low, high), low, high))]

    def _number(self, value: Any) -> float | None:
        if self.words:
            return float(self.words.index(value)) if value in self.words else None
        number = float("nan") if value is None else float(value)
        if self.log:
            number = math.log10(number) if number > 0 else math.nan
        return number if math.isfinite(number) else None


def svg(figure: go.Figure) -> str:
    """The traces of a figure with their names, axes with their titles, and horizontal and vertical lines."""
    layout, traces = figure.layout, figure.data
    levels = [shape.y0 for shape in layout.shapes or () if not _upright(shape)]
    across = Axis([value for trace in traces for value in trace.x], LEFT, WIDTH - RIGHT, layout.xaxis)
    zero = [0.0] if any(trace.type == "bar" for trace in traces) else []
    up = Axis([*(value for trace in traces for value in trace.y), *levels, *zero], HEIGHT - BOTTOM, TOP, layout.yaxis)
    if layout.yaxis.scaleanchor:
        unit = min(across.unit, up.unit)
        across.widen(unit)
        up.widen(unit)
    parts = [*_frame(layout, across, up)]
    for index, trace in enumerate(traces):
        color = COLORS[index % len(COLORS)]
        if trace.type == "contour":
            parts += _surface(trace, across, up)
        elif trace.type == "bar":
            parts += _bars(trace, across, up, color, index, len(traces))
        else:
            parts += _curve(trace, across, up, color)
        if len(traces) > 1:
            parts += _key(trace, TOP + 16 * index, color)
    for shape, note in zip(layout.shapes or (), layout.annotations or (), strict=False):
        place = across.place(shape.x0) if _upright(shape) else up.place(shape.y0)
        if place is not None and _upright(shape):
            parts.append(f'<path d="M{place:.1f} {HEIGHT - BOTTOM}V{TOP}" stroke="{INK}" stroke-dasharray="5 4"/>')
            parts.append(_text(place - 4, TOP + 12, note.text, INK, "end", 11))
        elif place is not None:
            parts.append(f'<path d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="5 4"/>')
            parts.append(_text(LEFT + 4, place - 4, note.text, INK, size=11))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT if across.words else HEIGHT - SPARE}" '
        'font-family="system-ui, sans-serif" fill="none">'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _upright(shape: Any) -> bool:
    """Whether a line is one of `add_vline`, over the whole height."""
    return bool(shape.yref == "y domain")


def _frame(layout: Any, across: Axis, up: Axis) -> list[str]:
    parts = [_text(LEFT, TOP - 16, layout.title.text, INK, size=15)]
    for place, label in across.ticks():
        parts.append(f'<path d="M{place:.1f} {HEIGHT - BOTTOM}V{TOP}" stroke="{GREY}" stroke-width="0.4"/>')
        parts.append(_word(place, label) if across.words else _text(place, HEIGHT - BOTTOM + 16, label, INK, "middle", 11))
    for place, label in up.ticks():
        parts.append(f'<path d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-width="0.4"/>')
        parts.append(_text(LEFT - 6, place + 4, label, INK, "end", 11))
    below = HEIGHT - 14 if across.words else HEIGHT - SPARE - 14
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, below, layout.xaxis.title.text, INK, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, layout.yaxis.title.text, INK, "middle")}</g>')
    return parts


def _word(place: float, text: str) -> str:
    y = HEIGHT - BOTTOM + 12
    return f'<g transform="rotate({-LEANING} {place:.1f} {y})">{_text(place, y, _short(text), INK, "end", 11)}</g>'


def _curve(trace: Any, across: Axis, up: Axis, color: str) -> list[str]:
    """A line, broken where a value has no place, or points."""
    places = [(across.place(x), up.place(y)) for x, y in zip(trace.x, trace.y, strict=True)]
    if not _is_line(trace):
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places if x is not None and y is not None]
    path, pen_down = "", False
    for x, y in places:
        if x is None or y is None:
            pen_down = False
            continue
        path += f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}"
        pen_down = True
    return [f'<path d="{path}" {_stroke(trace, color)}/>']


def _key(trace: Any, y: float, color: str) -> list[str]:
    """A trace's name in the legend, after a piece of its line."""
    left = WIDTH - RIGHT + 8
    line = [f'<path d="M{left} {y - 4}h22" {_stroke(trace, color)}/>'] if _is_line(trace) else []
    return [*line, _text(left + 28 if line else left, y, _short(trace.name), color, size=11)]


def _is_line(trace: Any) -> bool:
    return trace.type == "scatter" and "lines" in (trace.mode or "lines")


def _stroke(trace: Any, color: str) -> str:
    gaps = STROKES.get(trace.line.dash)
    return f'stroke="{color}" stroke-width="1.6"' + (f' stroke-dasharray="{gaps}"' if gaps else "")


def _bars(trace: Any, across: Axis, up: Axis, color: str, index: int, groups: int) -> list[str]:
    width = 0.8 * abs(across.end - across.start) / max(len(across.words), len(trace.x), 1) / groups
    base, parts = up.place(0.0), []
    for x, y in zip(trace.x, trace.y, strict=True):
        middle, top = across.place(x), up.place(y)
        if middle is not None and top is not None and base is not None:
            left, height = middle + (index - groups / 2) * width, abs(base - top)
            parts.append(
                f'<rect x="{left:.1f}" y="{min(base, top):.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
            )
    return parts


def _surface(trace: Any, across: Axis, up: Axis) -> list[str]:
    """One cell per value, at most CELLS along an axis, dark where it is low."""
    x, y, heights = (np.asarray(values, dtype=float) for values in (trace.x, trace.y, trace.z))
    every = math.ceil(max(len(x), len(y)) / CELLS)
    x, y, heights = x[::every], y[::every], heights[::every, ::every]
    shades = (heights - np.nanmin(heights)) / (np.nanmax(heights) - np.nanmin(heights) or 1.0)
    width, height = across.unit * (x[1] - x[0]), up.unit * (y[1] - y[0])
    parts = []
    for (row, column), shade in np.ndenumerate(shades):
        left, top = across.place(x[column]), up.place(y[row])
        if left is not None and top is not None and math.isfinite(shade):
            (color,) = sample_colorscale(SEQUENTIAL, [float(shade)])
            place = f'x="{left - width / 2:.1f}" y="{top - height / 2:.1f}" width="{width + 0.3:.1f}" height="{height + 0.3:.1f}"'
            parts.append(f'<rect {place} fill="{color}"/>')
    return parts


def _text(x: float, y: float, text: str | None, color: str, anchor: str = "start", size: int = 13) -> str:
    shown = escape(text or "")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{shown}</text>'


def _short(text: str | None, length: int = 28) -> str:
    text = text or ""
    return text if len(text) <= length else text[: length - 1] + "…"


def _step(low: float, high: float) -> float:
    """Between two round numbers, of which 3 to 8 lie on an axis from low to high."""
    span = high - low
    if not 1e-300 < span < math.inf:
        return 1.0
    step = 10.0 ** math.floor(math.log10(span))  # 1 to 10 of them
    return 2 * step if span / step > 8 else step if span / step >= 3 else step / 2 if span / step >= 1.5 else step / 4


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(number: float, log: bool) -> str:
    if log:
        large_or_small = not -3 < number < 4 and abs(number - round(number)) < 1e-9
        return f"10^{round(number)}" if large_or_small else f"{10**number:.4g}"
    return f"{round(number, 10):g}"
