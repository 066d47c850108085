"""Entrywise bounds on the values a tensor can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

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
        return Interval(
            low.nan_to_num(-torch.inf, torch.inf, -torch.inf), high.nan_to_num(torch.inf, torch.inf, -torch.inf)
        ).widened()

    def widened(self, relative: float = ROUNDOFF) -> Interval:
        return Interval(self.low - self.low.abs() * relative, self.high + self.high.abs() * relative)

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high).widened()

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __mul__(self, other: Interval) -> Interval:
        corners = [_product(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(torch.stack(corners).amin(0), torch.stack(corners).amax(0)).widened()


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = torch.broadcast_tensors(a, b)
    return torch.where((a == 0) | (b == 0), torch.zeros((), dtype=torch.float64), a * b)  # 0 · ∞ = 0
