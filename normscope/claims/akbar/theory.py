"""Akbar, Sections 4.3, 7 and 10: what is said in passing of natural gradients, rates, margins and the VC dimension."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log

import torch
from torch import Tensor

from normscope.claims.calculus import chain, jacobian, normal, product, random_weights, scalar, spectral_product, standardize
from normscope.claims.ledger import claim
from normscope.claims.verdicts import Case, Outcome, identity, implication

HIDDEN_CONSTANT = 10.0  # of O(κ ln 1/ε)


@claim("A-S4.3-fisher")
def fisher_null_space(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = lambda w: w) -> Outcome:
    """Gaussian outputs of variance 1 have the Fisher information JᵀJ, and J(W) maps each row of W that goes into BN to 0.

    Then the natural gradient (JᵀJ)⁺∇L lies in the row space of J, so its part along those rows is 0 too. stated: the direction.
    """
    cases = []
    for outputs, inputs in ((1, 4), (3, 5)):
        x, targets = normal(generator, 30, inputs), normal(generator, 30, outputs)
        weight = normal(generator, outputs * inputs)
        network = partial(_normalized, x, outputs)
        slopes = jacobian(network, weight)
        slope = slopes.T @ (network(weight) - targets).flatten()  # ∇ of ½‖outputs − targets‖²
        natural = torch.linalg.pinv(slopes.T @ slopes, rtol=1e-9, hermitian=True) @ slope
        for row in range(outputs):
            direction = torch.zeros_like(weight).reshape(outputs, inputs)
            direction[row] = stated(weight.reshape(outputs, inputs)[row])
            along = direction.flatten()
            size = float((slopes.norm() ** 2) * along.norm())
            cases.append(Case(f"Fisher, row {row + 1} of {outputs}", scalar(0.0), (slopes.T @ (slopes @ along)).norm(), scale=size))
            cases.append(
                Case(f"natural gradient, row {row + 1}", scalar(0.0), natural @ along, scale=float(natural.norm() * along.norm()))
            )
    return identity(cases)


def logarithmic(epsilon: float) -> float:
    """ln(1/ε), with every constant in front."""
    return log(1 / epsilon)


@claim("A-S7.1-rate")
def rate_without_strong_convexity(generator: torch.Generator, stated: Callable[[float], float] = logarithmic) -> Outcome:
    """x⁴/4 from x = 1 with step 1/3: steps until |x| ≤ ε, against 10·ln(1/ε). stated: the growth with ε."""
    cases = []
    for epsilon in (0.1, 0.03, 0.01):
        x, steps = 1.0, 0
        while x > epsilon:
            x, steps = x - x**3 / 3, steps + 1
        cases.append(Case(f"x⁴/4, ε = {epsilon:g} (steps)", scalar(HIDDEN_CONSTANT * stated(epsilon)), scalar(steps)))
    return implication(cases, {"constant of O": HIDDEN_CONSTANT})


@claim("A-S7.2-margin")
def margin_and_complexity(generator: torch.Generator, stated: Callable[[float], float] = lambda growth: 1 / growth) -> Outcome:
    """ReLU networks whose last weight is multiplied by c: ∏‖W_k‖/margin, the size of a margin bound, before and after.

    stated: by what the bound is multiplied when the margin grows by a factor.
    """
    cases = []
    for widths in ((4, 8, 2), (6, 5, 5, 3)):
        weights, x = random_weights(widths, generator), normal(generator, 20, widths[0]).abs()
        for factor in (2.0, 10.0):
            larger = [*weights[:-1], factor * weights[-1]]
            bounds = [spectral_product(w) / _widest_margin(w, x) for w in (weights, larger)]
            what = f"network {widths}, last weight × {factor:g} (bound/bound before)"
            cases.append(Case(what, scalar(stated(factor)), bounds[1] / bounds[0]))
    return implication(cases, {})


@claim("A-S10-VC")
def dichotomies(generator: torch.Generator, stated: Callable[[int], int] = lambda number: number // 2) -> Outcome:
    """Labelings of d points in general position by sign(w·x), for w of any length and for unit w. stated: how many are left.

    Each labeling y is realized by w = X⁻¹y, and by w/‖w‖: the signs are the same.
    """
    cases = []
    for dimension in (2, 4, 6):
        points = normal(generator, dimension, dimension)
        labels = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * dimension)
        solutions = torch.linalg.solve(points, labels.T).T
        unit = solutions / solutions.norm(dim=1, keepdim=True)
        found = {tuple(row) for row in (unit @ points.T).sign().int().tolist()}
        total = int(product([2.0] * dimension))
        cases.append(
            Case(f"{dimension} points (labelings by unit vectors)", scalar(stated(total)), scalar(len(found)), scalar(total))
        )
    return identity(cases)


def _normalized(x: Tensor, outputs: int, weight: Tensor) -> Tensor:
    return standardize(x @ weight.reshape(outputs, -1).T, 0, 0.0)


def _widest_margin(weights: list[Tensor], x: Tensor) -> Tensor:
    """The largest difference of the two highest outputs."""
    first, second = chain(weights[:-1], x).matmul(weights[-1].T).topk(2).values.T
    return (first - second).max()
