"""Batch whitening: normalization that also decorrelates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class InverseRoot(torch.autograd.Function):
    """S = Σ^(-1/2) of a symmetric positive definite matrix, with a gradient that is finite also where eigenvalues are equal.

    With Σ = UΛUᵀ, dS = U(K ∘ UᵀdΣU)Uᵀ and K_ij = −1/(√λ_i √λ_j (√λ_i + √λ_j)), the divided differences of λ^(-1/2).
    """

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        roots = values.sqrt()
        ctx.save_for_backward(roots, vectors)
        return vectors / roots @ vectors.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        roots, vectors = ctx.saved_tensors
        differences = -1 / (roots[:, None] * roots * (roots[:, None] + roots))
        return vectors @ (differences * (vectors.T @ gradients[0] @ vectors)) @ vectors.T


class BatchWhitening(nn.Module):
    """γ · (Σ + εI)^(-1/2) (x − μ) + β of (batch, channels), Σ the batch's covariance: unit variances and no correlations (ZCA).

    BN is the same with the diagonal of Σ alone. In eval mode μ and Σ are running means, as in BN.
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
        smoothed = covariance + self.epsilon * torch.eye(len(mean), dtype=x.dtype)
        y: torch.Tensor = self.weight * ((x - mean) @ InverseRoot.apply(smoothed)) + self.bias
        return y

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.mean(0)
        covariance = (x - mean).T @ (x - mean) / len(x)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_covariance.lerp_(covariance, self.momentum)
        return mean, covariance
