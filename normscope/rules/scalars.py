"""Functions ℝ → ℝ with what is needed to bound their slopes and values on any interval.

On [l, u] a function's slope lies between the least and the largest of its values at l, at u and at the turning points
in between (where the second derivative changes sign, or where the slope jumps); likewise for the function's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from normscope.core.interval import Interval
from normscope.core.rounding import SMALLEST_NORMAL, UNDERFLOW

Function = Callable[[torch.Tensor], torch.Tensor]
ROUNDING = 1e-12  # slopes below are evaluated in float64, each good to a few parts in 1e-16 of values below 10
SATURATED = 2.0**-45  # what is left of a slope such as 1 − tanh² where its two terms cancel, in absolute terms
OVERFLOWN = SMALLEST_NORMAL  # more than what 1/(1 + e^-x) loses where e^-x overflows and torch returns 0


EVERYWHERE = (-math.inf, math.inf)


@dataclass(frozen=True)
class Scalar:
    """A function ℝ → ℝ.

    turns: where its slope is extremal or jumps, as (place, slope just before, slope just after).
    extrema: where its value is extremal. ends: (value, slope) as x → −∞ and as x → +∞.
    domain: outside of it (a pole, a logarithm's negative side) nothing is bounded.
    """

    value: Function
    slope: Function
    turns: Sequence[tuple[float, float, float]] = ()
    extrema: Sequence[float] = ()
    ends: tuple[tuple[float, float], tuple[float, float]] = ((-math.inf, 1.0), (math.inf, 1.0))
    domain: tuple[float, float] = EVERYWHERE
    rounding: float = ROUNDING  # of the slopes; none where they are constants
    slope_error: float = 0.0  # absolute, of a slope whose terms cancel
    value_error: float = 0.0  # absolute, of a value whose terms cancel

    def slopes(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Entrywise (least, largest) slope on [low, high]."""
        ends = [self._at(self.slope, side, 1) for side in (low, high)]
        least, largest = torch.minimum(*ends), torch.maximum(*ends)
        for place, before, after in self.turns:
            inside = (low <= place) & (place <= high)
            least = torch.where(inside, least.clamp(max=min(before, after)), least)
            largest = torch.where(inside, largest.clamp(min=max(before, after)), largest)
        outside = (low < self.domain[0]) | (high > self.domain[1])
        least, largest = least.masked_fill(outside, -math.inf), largest.masked_fill(outside, math.inf)
        if self.slope_error:  # but no slope is beyond those at the ends and at the turns
            limits = [slope for _, slope in self.ends] + [slope for _, *sides in self.turns for slope in sides]
            least, largest = (least - self.slope_error).clamp(min=min(limits)), (largest + self.slope_error).clamp(max=max(limits))
        if not self.rounding:
            return least, largest
        found = Interval(least, largest).widened(self.rounding)
        limits = [slope for _, slope in self.ends] + [slope for _, *sides in self.turns for slope in sides]
        below = min(limits) == 0 and self.domain == EVERYWHERE  # then no slope is below 0, whatever was rounded
        return _past_underflow(found.low, -1).clamp(min=0 if below else -math.inf), _past_underflow(found.high, 1)

    def range(self, bounds: Interval) -> Interval:
        """Bounds on the values over an interval of arguments."""
        ends = [self._at(self.value, side, 0) for side in (bounds.low, bounds.high)]
        least, largest = torch.minimum(*ends), torch.maximum(*ends)
        for place in self.extrema:
            inside = (bounds.low <= place) & (place <= bounds.high)
            at = self.value(torch.tensor(place, dtype=torch.float64))
            least = torch.where(inside, torch.minimum(least, at), least)
            largest = torch.where(inside, torch.maximum(largest, at), largest)
        outside = (bounds.low < self.domain[0]) | (bounds.high > self.domain[1])
        found = Interval.outward(least - self.value_error, largest + self.value_error).widened(ROUNDING)
        least, largest = (_past_underflow(side, sign) for side, sign in ((found.low, -1), (found.high, 1)))
        if self.values[0] == 0:  # never below 0, whatever was rounded
            least = least.clamp(min=0)
        if self.values[1] == 0:
            largest = largest.clamp(max=0)
        return Interval(least.masked_fill(outside, -math.inf), largest.masked_fill(outside, math.inf))

    @property
    def values(self) -> tuple[float, float]:
        """The least and the largest value anywhere, infinite where it is not known."""
        known = [value for value, _ in self.ends] + [float(self.value(torch.tensor(x, dtype=torch.float64))) for x in self.extrema]
        return (-math.inf, math.inf) if any(map(math.isnan, known)) or self.domain != EVERYWHERE else (min(known), max(known))

    def _at(self, function: Function, where: torch.Tensor, which: int) -> torch.Tensor:
        """The function, with its limits at ±∞ filled in."""
        result = function(where.clamp(-1e300, 1e300)) if which else function(where.nan_to_num(0, 0, 0))
        result = torch.where(where == -math.inf, torch.tensor(self.ends[0][which], dtype=torch.float64), result)
        result = torch.where(where == math.inf, torch.tensor(self.ends[1][which], dtype=torch.float64), result)
        return result.nan_to_num(math.inf, math.inf, -math.inf)


def _past_underflow(side: torch.Tensor, sign: int) -> torch.Tensor:
    """Where a value is below 2^-1022 its rounding is absolute."""
    return torch.where(side.abs() < SMALLEST_NORMAL, side + sign * 2 * UNDERFLOW, side)


UNBOUNDED = Scalar(lambda x: x, torch.ones_like, domain=(math.inf, math.inf))  # a function about which nothing is known


def piecewise_linear(value: Function, pieces: Sequence[float], knots: Sequence[float]) -> Scalar:
    """A continuous function with slope pieces[i] between knots[i−1] and knots[i]."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(pieces, dtype=torch.float64)[torch.bucketize(x, torch.tensor(knots, dtype=torch.float64))]

    def end(sign: int, piece: float) -> tuple[float, float]:
        far = float(value(torch.tensor(sign * 1e300, dtype=torch.float64)))
        return (far if piece == 0 else math.copysign(math.inf, sign * piece), piece)

    return Scalar(
        value, slope,
        turns=[(knot, pieces[i], pieces[i + 1]) for i, knot in enumerate(knots)],
        extrema=list(knots), ends=(end(-1, pieces[0]), end(1, pieces[-1])), rounding=0.0,
    )  # fmt: skip


def relu_with_slope(negative: float) -> Scalar:
    return piecewise_linear(lambda x: torch.where(x > 0, x, negative * x), [negative, 1.0], [0.0])


def clamped(low: float, high: float) -> Scalar:
    if low > high:
        return piecewise_linear(lambda x: torch.full_like(x, high), [0.0, 0.0], [0.0])
    pieces, knots = [1.0], []
    if low > -math.inf:
        pieces, knots = [0.0, *pieces], [low]
    if high < math.inf:
        pieces, knots = [*pieces, 0.0], [*knots, high]
    return piecewise_linear(lambda x: x.clamp(low, high), pieces, knots)


def derivative(function: Function) -> Function:
    """The slope of an entrywise function by automatic differentiation, in float64."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        flat = x.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            return torch.autograd.grad(function(flat).sum(), flat)[0].detach()

    return slope


def smooth(
    function: Function,
    turns: Sequence[float],
    extrema: Sequence[float] = (),
    ends: tuple = ((0.0, 0.0), (math.inf, 1.0)),
    value_error: float = 0.0,
) -> Scalar:
    slope = derivative(function)
    at = [float(slope(torch.tensor(place, dtype=torch.float64))) for place in turns]
    sides = [(place, s, s) for place, s in zip(turns, at, strict=True)]
    return Scalar(function, slope, sides, extrema, ends, slope_error=SATURATED, value_error=value_error)


# The turning points were found by bisection on the second derivative; tests sample each slope densely.
def exact_gelu() -> Scalar:
    return smooth(functional.gelu, (-math.sqrt(2), math.sqrt(2)), (-0.7517915246935643,), value_error=SATURATED)


def tanh_gelu() -> Scalar:
    turns = (-1.4185040087908278, 1.4185040087908285)
    return smooth(lambda x: functional.gelu(x, approximate="tanh"), turns, (-0.7524614220710159,), value_error=SATURATED)


def logistic() -> Scalar:
    return smooth(torch.sigmoid, (0.0,), ends=((0.0, 0.0), (1.0, 0.0)), value_error=OVERFLOWN)


def sigmoid_gate(sharpness: float) -> Scalar:
    """x · sigmoid(sharpness · x): SiLU, and the quick GELU at 1.702."""
    if sharpness == 0:
        return piecewise_linear(lambda x: x / 2, [0.5, 0.5], [0.0])
    turns = tuple(sorted(place / sharpness for place in (-2.399357280515468, 2.399357280515468)))
    ends = ((0.0, 0.0), (math.inf, 1.0)) if sharpness > 0 else ((-math.inf, 1.0), (0.0, 0.0))
    lost = 1024 * OVERFLOWN / abs(sharpness)  # sharpness · |x| is below 1024 where the gate is not 0 in any case
    return smooth(lambda x: x * torch.sigmoid(sharpness * x), turns, (-1.278464542761074 / sharpness,), ends, lost)


def exponential(base: float) -> Scalar:
    """base^x."""
    if base == 1:
        return piecewise_linear(torch.ones_like, [0.0, 0.0], [0.0])
    if base <= 0:  # 0^x jumps at 0, and powers of negative numbers are real at whole x only
        return UNBOUNDED
    ends = ((0.0, 0.0), (math.inf, math.inf)) if base > 1 else ((math.inf, -math.inf), (0.0, 0.0))
    return Scalar(lambda x: base**x, lambda x: math.log(base) * base**x, ends=ends)


def power(exponent: float) -> Scalar:
    """x^exponent, on all of ℝ for whole exponents ≥ 0, else on x > 0."""
    if not math.isfinite(exponent):
        return UNBOUNDED
    value: Function = lambda x: x.pow(exponent)  # noqa: E731
    slope: Function = lambda x: exponent * x.pow(exponent - 1)  # noqa: E731
    whole = exponent == int(exponent) and exponent >= 0
    if exponent == 0:
        return piecewise_linear(torch.ones_like, [0.0, 0.0], [0.0])
    if exponent == 1:
        return piecewise_linear(lambda x: x, [1.0, 1.0], [0.0])
    top = (math.inf if exponent > 0 else 0.0, exponent if exponent == 1 else (math.inf if exponent > 1 else 0.0))
    if whole:
        even = int(exponent) % 2 == 0
        return Scalar(
            value, slope, turns=[(0.0, 0.0, 0.0)], extrema=[0.0],
            ends=((math.inf if even else -math.inf, -math.inf if even else math.inf), top),
        )  # fmt: skip
    lowest = 0.0 if exponent > 1 else 5e-324
    return Scalar(value, slope, ends=((math.nan, math.nan), top), domain=(lowest, math.inf))
