"""Entrywise bounds on the values a tensor can take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from normscope.core.rounding import LARGEST, SMALLEST_NORMAL, UNDERFLOW, length, summation_error

ROUNDOFF = 2.0**-50  # a few float64 roundings


@dataclass(frozen=True)
class Interval:
    """low ≤ value ≤ high, entry by entry; both are float64 and have the tensor's shape, infinities allowed."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def unbounded(cls, shape: Sequence[int]) -> Interval:
        return cls.constant(-math.inf, math.inf, shape)

    @classmethod
    def constant(cls, low: float, high: float, shape: Sequence[int]) -> Interval:
        return cls(*(torch.tensor(side, dtype=torch.float64).expand(tuple(shape)) for side in (low, high)))

    @classmethod
    def outward(cls, low: torch.Tensor, high: torch.Tensor) -> Interval:
        """Computed bounds as true ones: an overflow is large, not infinite, and a bound that is not a number is none."""
        return cls(
            low.nan_to_num(-math.inf, LARGEST, -math.inf),
            high.nan_to_num(math.inf, math.inf, -LARGEST),
        )

    @classmethod
    def around(cls, center: torch.Tensor, radius: torch.Tensor) -> Interval:
        """All values within `radius` ≥ 0 of `center`, for a radius that was computed in a few roundings."""
        radius = radius * (1 + ROUNDOFF) + UNDERFLOW
        return cls.outward(center - radius, center + radius).widened()

    @property
    def shape(self) -> torch.Size:
        return self.low.shape

    @property
    def finite(self) -> bool:
        return bool(self.low.isfinite().all() and self.high.isfinite().all())

    @property
    def sizes(self) -> torch.Tensor:
        """sup |value|, entry by entry."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def magnitude(self) -> float:
        """sup |value| over all entries."""
        return float(self.sizes.max()) if self.low.numel() else 0.0

    @property
    def length(self) -> float:
        """sup ‖value‖₂."""
        return float(length(self.sizes)) if self.low.numel() else 0.0

    @property
    def center(self) -> torch.Tensor:
        return self.low / 2 + self.high / 2

    @property
    def radius(self) -> torch.Tensor:
        """How far any value can be from `center`, as computed."""
        center = self.center
        return torch.maximum(self.high - center, center - self.low) * (1 + ROUNDOFF)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Interval:
        """The bounds under a map that increases with every entry and is exact in float64, as those that move entries are."""
        return Interval.outward(function(self.low), function(self.high))

    def summed(self, function: Callable[[torch.Tensor], torch.Tensor], terms: float) -> Interval:
        """The bounds under a linear map whose weights have one sign, each result a sum of at most `terms` terms."""
        if float(function(torch.ones_like(self.low)).sum()) < 0:
            return (-self).summed(lambda side: function(-side), terms)
        low, high = function(self.low), function(self.high)
        errors = [summation_error(terms, function(side.abs())) for side in (self.low, self.high)]
        low, high = low - errors[0].nan_to_num(0, 0), high + errors[1].nan_to_num(0, 0)
        low = low.masked_fill(errors[0].isinf(), -math.inf)  # also where a part of the sum overflowed
        return Interval.outward(low, high.masked_fill(errors[1].isinf(), math.inf)).widened()

    def widened(self, relative: float = ROUNDOFF) -> Interval:
        outward = [(side.abs() * relative).nan_to_num(0, 0, 0) for side in (self.low, self.high)]  # ∞ stays ∞
        return Interval.outward(self.low - outward[0], self.high + outward[1])

    def within(self, other: Interval) -> Interval:
        """The values that both allow."""
        return Interval(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))

    def squared(self) -> Interval:
        """value², each with itself."""
        least = torch.where((self.low <= 0) & (self.high >= 0), 0.0, torch.minimum(self.low.abs(), self.high.abs()))
        below, over = Interval(least, least), Interval(self.sizes, self.sizes)
        return Interval((below * below).low.clamp(min=0), (over * over).high)

    def __add__(self, other: Interval) -> Interval:
        return Interval.outward(self.low + other.low, self.high + other.high).widened()

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __mul__(self, other: Interval) -> Interval:
        pairs = [(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        low, high = (torch.stack([_product(a, b, side) for a, b in pairs]) for side in (-UNDERFLOW, UNDERFLOW))
        return Interval.outward(low.amin(0), high.amax(0)).widened()


def _product(a: torch.Tensor, b: torch.Tensor, underflow: float) -> torch.Tensor:
    """a · b, with 0 · ∞ = 0, and moved by `underflow` where rounding is absolute."""
    a, b = torch.broadcast_tensors(a, b)
    found = torch.where((a == 0) | (b == 0), torch.zeros((), dtype=torch.float64), a * b)
    lost = (found.abs() < SMALLEST_NORMAL) & (a != 0) & (b != 0)
    return torch.where(lost, found + underflow, found)
