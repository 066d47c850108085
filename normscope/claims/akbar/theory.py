"""Akbar, Sections 4.3, 7 and 10: what is said in passing of natural gradients, rates, margins and the VC dimension."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log

import torch
from torch import Tensor

from normscope.claims.calculus import chain, jacobian, normal, product, random_weights, scalar, spectral_product, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, identity, implication, upper_bound


@claim("A-S4.3-fisher")
def fisher_null_space(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = lambda w: w) -> Ruling:
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


def condition_times_logarithm(condition: float, epsilon: float) -> float:
    """κ ln(1/ε)."""
    return condition * log(1 / epsilon)


@claim("A-S7.1-rate")
def rate_with_strong_convexity(
    generator: torch.Generator, stated: Callable[[float, float], float] = condition_times_logarithm
) -> Ruling:
    """½Σλ_i x_i² with λ from μ to L, step 1/L, x = 1: the slowest entry shrinks by 1 − 1/κ per step, and (1 − 1/κ)^k ≤ e^(−k/κ).

    Steps until ‖x‖_∞ ≤ ε, against κ ln(1/ε). Convexity alone would not do: x⁴/4 on [−1, 1] is convex and 3-smooth with μ = 0, and
    with step ⅓ takes about 1.5/ε² steps to |x| ≤ ε (evidence), a hundred times as many for every digit.
    """
    cases = []
    for condition in (10.0, 1e3, 3e4):
        for epsilon in (1e-2, 1e-4):
            x, steps = 1.0, 0
            while x > epsilon:
                x, steps = x - x / condition, steps + 1
            cases.append(Case(f"κ = {condition:g}, ε = {epsilon:g} (steps)", scalar(stated(condition, epsilon)), scalar(steps)))
    quartic = {f"steps of x⁴/4 to {epsilon:g}": _steps_of_quartic(epsilon) for epsilon in (0.1, 0.01)}
    return upper_bound(cases, **quartic)


def _steps_of_quartic(epsilon: float) -> int:
    x, steps = 1.0, 0
    while x > epsilon:
        x, steps = x - x**3 / 3, steps + 1
    return steps


@claim("A-S7.2-margin")
def margin_and_complexity(generator: torch.Generator, stated: Callable[[float], float] = lambda growth: 1 / growth) -> Ruling:
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
def dichotomies(generator: torch.Generator, stated: Callable[[int], int] = lambda number: number // 2) -> Ruling:
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
