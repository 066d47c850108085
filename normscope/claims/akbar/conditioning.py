"""Akbar, Sections 6.1 and 7.1: the curvature that BN is said to give, in models small enough for a closed form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from normscope.claims.calculus import hessian, jacobian, normal, scalar, standardize
from normscope.claims.ledger import AKBAR, claim
from normscope.claims.verdicts import Case, Outcome, identity


def with_statistics_held(x: Tensor, w: Tensor) -> Tensor:
    """∇_w a_n = (x_n − x̄)/σ, row by row."""
    return (x - x.mean(0)) / (x @ w).std(correction=0)


def with_statistics_moving(x: Tensor, w: Tensor) -> Tensor:
    """∇_w a_n = (x_n − x̄)/σ − ẑ_n · mean(ẑ x)/σ."""
    hat = standardize(x @ w, 0, 0.0)
    return with_statistics_held(x, w) - torch.outer(hat, hat @ x / len(x)) / (x @ w).std(correction=0)


@claim(
    "A-S6.1", AKBAR, "Section 6.1", "For a BN neuron a, with σ held fixed, ∇_w a = (x − x̄)/σ, which is orthogonal to w.",
    "w·(x − x̄)/σ = ẑ, which is not 0: it is the change of σ with w that makes the gradient orthogonal to w, by the term "
    "−ẑ mean(ẑx)/σ. Without it the Hessian has no zero along w.",
)  # fmt: skip
def neuron_gradient(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = with_statistics_held) -> Outcome:
    """∇_w a·w of every sample of a batch: as stated, by automatic differentiation, and as corrected."""
    cases, error = [], 0.0
    for size, inputs in ((8, 3), (40, 5)):
        x, w = 1 + normal(generator, size, inputs), normal(generator, inputs)
        true, moving = jacobian(partial(_neuron, x), w), with_statistics_moving(x, w)
        error = max(error, float((moving - true).norm() / true.norm()))
        cases.append(Case(f"batch of {size}, ∇a·w", stated(x, w) @ w, true @ w, moving @ w, scale=size**0.5))
    return identity(cases, **{"error of the corrected ∇a": error})


def perfect_condition(correlation: Tensor) -> Tensor:
    """κ = 1."""
    return scalar(1.0)


def condition_of_correlated(correlation: Tensor) -> Tensor:
    """κ = (1 + |ρ|)/(1 − |ρ|)."""
    return (1 + correlation.abs()) / (1 - correlation.abs())


@claim(
    "A-S7.1", AKBAR, "Sections 6.1 and 7.1",
    "With BN inputs have unit variance in each direction, so that the Hessian is the identity and κ = 1, as by whitening.",
    "They have unit variance along each axis, not in each direction: two features of correlation ρ keep κ = (1 + |ρ|)/(1 − |ρ|). "
    "BN removes what scales do to κ, and nothing of what correlations do.",
)  # fmt: skip
def condition_after_batch_norm(
    generator: torch.Generator,
    stated: Callable[[Tensor], Tensor] = perfect_condition,
    correlations: tuple[float, ...] = (0.0, 0.5, 0.99),
) -> Outcome:
    """Least squares on two features, one 1000 times as large, after BN: κ of the Hessian in the weights; beside it, without BN."""
    cases, plain = [], 0.0
    for wanted in correlations:
        first, noise = standardize(normal(generator, 400, 2), 0, 0.0).T
        noise = standardize(noise - first * (first @ noise) / 400, 0, 0.0)
        x = torch.stack([first, 1000 * (wanted * first + (1 - wanted**2) ** 0.5 * noise)], 1)
        normalized, targets = standardize(x, 0, 0.0), normal(generator, 400)
        condition, before = (
            _condition(hessian(partial(_squares, inputs, targets), normal(generator, 2))) for inputs in (normalized, x)
        )
        correlation = (normalized[:, 0] * normalized[:, 1]).mean()
        plain = max(plain, float(before))
        cases.append(Case(f"correlation {wanted:g}", stated(correlation), condition, condition_of_correlated(correlation)))
    return identity(cases, **{"largest κ without BN": plain})


def _neuron(x: Tensor, w: Tensor) -> Tensor:
    return standardize(x @ w, 0, 0.0)


def _squares(x: Tensor, targets: Tensor, w: Tensor) -> Tensor:
    return (x @ w - targets).square().mean()


def _condition(matrix: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(matrix)
    return eigenvalues[-1] / eigenvalues[0]
