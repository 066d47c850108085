"""Batch whitening: normalization that also decorrelates."""

from __future__ import annotations

import torch
from torch import nn


class BatchWhitening(nn.Module):
    """γ · L⁻¹(x − μ) + β of (batch, channels), with LLᵀ = Σ + εI the batch's covariance: unit variances and no correlations.

    BN is the same with the diagonal of Σ alone. In eval mode μ and Σ are running means, as in BN. L is Cholesky's factor, whose
    gradient is finite also where eigenvalues of Σ are equal.
    """

    running_mean: torch.Tensor
    running_covariance: torch.Tensor

    def __init__(self, channels: int, epsilon: float = 1e-3, momentum: float = 0.1) -> None:
        super().__init__()
        self.epsilon, self.momentum = epsilon, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_covariance", torch.eye(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, covariance = self._statistics(x) if self.training else (self.running_mean, self.running_covariance)
        factor = torch.linalg.cholesky(covariance + self.epsilon * torch.eye(len(mean), dtype=x.dtype))
        whitened = torch.linalg.solve_triangular(factor, (x - mean).T, upper=False).T
        return self.weight * whitened + self.bias

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.mean(0)
        covariance = (x - mean).T @ (x - mean) / len(x)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_covariance.lerp_(covariance, self.momentum)
        return mean, covariance
