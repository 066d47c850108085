"""Akbar, Sections 6.1 and 7.1: the curvature that BN is said to give, in models small enough for a closed form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from normscope.claims.calculus import jacobian, normal, scalar, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, identity


def with_statistics_held(x: Tensor, w: Tensor) -> Tensor:
    """∇_w a_n = (x_n − x̄)/σ, row by row."""
    return (x - x.mean(0)) / (x @ w).std(correction=0)


def with_statistics_moving(x: Tensor, w: Tensor) -> Tensor:
    """∇_w a_n = (x_n − x̄)/σ − ẑ_n · mean(ẑ x)/σ."""
    hat = standardize(x @ w, 0, 0.0)
    return with_statistics_held(x, w) - torch.outer(hat, hat @ x / len(x)) / (x @ w).std(correction=0)


@claim("A-S6.1")
def neuron_gradient(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = with_statistics_held) -> Ruling:
    """∇_w a and ∇_w a·w of every sample of a batch: as stated, by automatic differentiation, and as corrected."""
    cases = []
    for size, inputs in ((8, 3), (40, 5)):
        x, w = 1 + normal(generator, size, inputs), normal(generator, inputs)
        true, moving = jacobian(partial(_neuron, x), w), with_statistics_moving(x, w)
        cases.append(Case(f"batch of {size}, ∇a·w", stated(x, w) @ w, true @ w, moving @ w, scale=size**0.5))
        cases.append(Case(f"batch of {size}, ∇a", stated(x, w), true, moving))
    return identity(cases)


def unit_variance(correlation: Tensor, direction: Tensor) -> Tensor:
    """1 in each direction."""
    return scalar(1.0)


def variance_of_correlated(correlation: Tensor, direction: Tensor) -> Tensor:
    """uᵀRu = 1 + 2ρu₁u₂."""
    return 1 + 2 * correlation * direction.prod()


@claim("A-S7.1")
def variance_after_batch_norm(
    generator: torch.Generator,
    stated: Callable[[Tensor, Tensor], Tensor] = unit_variance,
    correlations: tuple[float, ...] = (0.0, 0.5, 0.99),
) -> Ruling:
    """Two features of given correlation, one 1000 times as large, after BN: the variance along axes and diagonals.

    By hand: x₁ = x₂ leaves (1, −1)/√2 no variance at all. Beside it, κ of least squares with BN and without.
    """
    cases, conditions = [], dict[str, float]()
    half = 0.5**0.5
    for wanted in correlations:
        first, noise = standardize(normal(generator, 400, 2), 0, 0.0).T
        noise = standardize(noise - first * (first @ noise) / 400, 0, 0.0)
        x = torch.stack([first, 1000 * (wanted * first + (1 - wanted**2) ** 0.5 * noise)], 1)
        normalized = standardize(x, 0, 0.0)
        correlation = (normalized[:, 0] * normalized[:, 1]).mean()
        for entries in ((1.0, 0.0), (half, half), (half, -half)):
            direction = torch.tensor(entries, dtype=torch.float64)
            variance = (normalized @ direction).var(correction=0)
            right = variance_of_correlated(correlation, direction)
            cases.append(
                Case(
                    f"correlation {wanted:g}, along ({entries[0]:.2g}, {entries[1]:.2g})",
                    stated(correlation, direction),
                    variance,
                    right,
                )
            )
        for name, inputs in (("BN", normalized), ("no BN", x)):
            conditions[f"κ at correlation {wanted:g}, {name}"] = float(_condition(inputs.T @ inputs))
    return identity(cases, **conditions)


def _neuron(x: Tensor, w: Tensor) -> Tensor:
    return standardize(x @ w, 0, 0.0)


def _condition(matrix: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(matrix)
    return eigenvalues[-1] / eigenvalues[0]
