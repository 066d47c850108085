"""Entrywise bounds on the values a tensor can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

UNDERFLOW = 5e-324  # what a product of tiny numbers may lose
ROUNDOFF = 2.0**-50  # a few float64 roundings


@dataclass(frozen=True)
class Interval:
    """low ≤ value ≤ high, entry by entry; both are float64 and have the tensor's shape, infinities allowed."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def unbounded(cls, shape: Sequence[int]) -> Interval:
        return cls(*(torch.tensor(side, dtype=torch.float64).expand(tuple(shape)) for side in (-torch.inf, torch.inf)))

    @classmethod
    def constant(cls, low: float, high: float, shape: Sequence[int]) -> Interval:
        return cls(*(torch.tensor(side, dtype=torch.float64).expand(tuple(shape)) for side in (low, high)))

    @property
    def shape(self) -> torch.Size:
        return self.low.shape

    @property
    def finite(self) -> bool:
        return bool(self.low.isfinite().all() and self.high.isfinite().all())

    @property
    def magnitude(self) -> float:
        """sup |value| over all entries."""
        return float(torch.maximum(self.low.abs(), self.high.abs()).max()) if self.low.numel() else 0.0

    @property
    def center(self) -> torch.Tensor:
        return self.low / 2 + self.high / 2

    @property
    def radius(self) -> torch.Tensor:
        return (self.high / 2 - self.low / 2) * (1 + ROUNDOFF)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Interval:
        """The bounds under an entrywise increasing map, or one that is linear with weights ≥ 0."""
        low, high = function(self.low), function(self.high)
        low = low.clamp(max=torch.finfo(torch.float64).max)  # an overflow is large, not infinite
        high = high.clamp(min=torch.finfo(torch.float64).min)
        return Interval(
            low.nan_to_num(-torch.inf, torch.inf, -torch.inf), high.nan_to_num(torch.inf, torch.inf, -torch.inf)
        ).widened()

    def widened(self, relative: float = ROUNDOFF) -> Interval:
        outward = [(side.abs() * relative).nan_to_num(0, 0, 0) for side in (self.low, self.high)]  # ∞ stays ∞
        return Interval(self.low - outward[0], self.high + outward[1])

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high).widened()

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __mul__(self, other: Interval) -> Interval:
        pairs = [(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        low, high = (torch.stack([_product(a, b, side) for a, b in pairs]) for side in (-UNDERFLOW, UNDERFLOW))
        return Interval(low.amin(0), high.amax(0)).widened()


def _product(a: torch.Tensor, b: torch.Tensor, underflow: float) -> torch.Tensor:
    """a · b, with 0 · ∞ = 0, and `underflow` in its own direction where the product is lost to it."""
    a, b = torch.broadcast_tensors(a, b)
    found = torch.where((a == 0) | (b == 0), torch.zeros((), dtype=torch.float64), a * b)
    lost = (found == 0) & (a != 0) & (b != 0) & (torch.sign(a) * torch.sign(b) * underflow > 0)
    return torch.where(lost, torch.tensor(underflow, dtype=torch.float64), found)
