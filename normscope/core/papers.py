"""Results of the lab and of the claims as data: what they write and reports show, without either importing the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LAB_SCHEMA = "normscope.lab/1"
CLAIM_SCHEMA = "normscope.claim/2"
LEDGER_SCHEMA = "normscope.claims/1"
CLAIM_VERDICTS = ("holds", "holds as a bound", "false as stated", "does not follow", "not so, but hedged", "measured")


@dataclass(frozen=True)
class Comparison:
    """One quantity: what the paper says, what was measured, and whether they agree; None where the paper says nothing.

    seeds: where there are several, how many of them say the same alone, as "2 of 3"; the runner counts them.
    """

    quantity: str
    paper: str
    ours: str
    agrees: bool | None = None
    seeds: str = ""

    @property
    def answer(self) -> str:
        """agrees, differs, or nothing where the paper says nothing; of several seeds, how many say so."""
        word = {True: "agrees", False: "differs", None: ""}[self.agrees]
        return f"{word} ({self.seeds} seeds)" if self.seeds else word


@dataclass(frozen=True)
class Plot:
    """A figure as data; `normscope.report.plots.plot` draws it. kind: lines, points, lines+points or bars.

    series: name → (x, y). levels: name → y, horizontal lines such as a paper's figure. surface: (x, y, heights[y][x]), contours
    under the series. equal: a unit is as long on both axes.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, tuple[Sequence[Any], Sequence[float]]]
    kind: str = "lines"
    log_x: bool = False
    log_y: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    surface: tuple[Sequence[float], Sequence[float], Sequence[Sequence[float]]] | None = None
    equal: bool = False
