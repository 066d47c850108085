"""Means and variances of a stream of batches, merged without cancellation."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class RunningVariance:
    """Population variance a channel over everything seen so far (Chan, Golub & LeVeque 1979)."""

    count: int = 0
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def update(self, values: torch.Tensor, channel_axis: int) -> None:
        flat = values.detach().to(torch.float64).movedim(channel_axis, 0)[:, None].flatten(1)  # (channels, everything else)
        count = flat.shape[1]
        if count == 0:
            return
        mean = flat.mean(1)
        squares = (flat - mean[:, None]).square().sum(1)
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, squares
            return
        whole = self.count + count
        shift = mean - self.mean
        self.mean = self.mean + shift * (count / whole)
        self.squares = self.squares + squares + shift.square() * (self.count * count / whole)
        self.count = whole

    @property
    def variance(self) -> torch.Tensor:
        return self.squares / max(self.count, 1)
