"""What bounds by margins share: the risk at a margin, and the choice of the margin among those that the sample has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from normscope.bounds.bound import Part
from normscope.bounds.table import NotApplicable
from normscope.core.magnitude import Magnitude

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 100)
USUAL_PERCENTILE = 10  # of measures, which have no best margin

Candidate = tuple[Magnitude, Mapping[str, Part]]  # a value and the parts that it is made of


def ramp_risk(margins: torch.Tensor, margin: float) -> float:
    """The mean of min(1, max(0, 1 − margin_i/γ)): at least the share of wrong answers, at most that of margins below γ."""
    return float((1 - margins.double() / margin).clamp(0, 1).mean())


def candidate_margins(margins: torch.Tensor) -> list[float]:
    """The positive ones among some percentiles of the sample's margins, in increasing order."""
    levels = torch.quantile(margins.double(), torch.tensor(PERCENTILES, dtype=torch.float64) / 100) if len(margins) else margins
    positive = sorted({float(level) for level in levels if level > 0})
    if not positive:
        raise NotApplicable("no training sample has a positive margin")
    return positive


def at_best_margin(margins: torch.Tensor, bound_at: Callable[[float], Candidate]) -> Candidate:
    """The smallest value over candidate margins; a bound must hold for all margins at once to be used so."""
    return min(map(bound_at, candidate_margins(margins)), key=lambda candidate: candidate[0])


def usual_margin(margins: torch.Tensor) -> float:
    """The margin that a tenth of the sample stays below, or the least positive candidate above it."""
    level = float(torch.quantile(margins.double(), USUAL_PERCENTILE / 100))
    return level if level > 0 else candidate_margins(margins)[0]
