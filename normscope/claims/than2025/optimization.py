"""Than 2025, Section 5.1: iteration complexity and convergence rates."""

from __future__ import annotations

from collections.abc import Callable
from math import prod, sqrt
from typing import SupportsFloat

import torch
from torch import Tensor

from normscope.bounds.iterations import cited_evaluations, evaluations, least_iterations
from normscope.claims.calculus import chain, gradient, normal, scalar, scaled_identities
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, implication, lower_bound

WIDTHS = (4, 4, 4, 4)
LONGEST = 1000  # steps that are tried
HIDDEN_CONSTANT = 1e-6  # of Ω: any positive number gives the same verdict, for 0 iterations are less than all of them


def iterations_of_first_layer(norms: list[float], alpha: float) -> float:
    """s_{i+1}⋯s_K/α, Corollary 18 for the first layer."""
    return float(least_iterations(prod(norms[1:]), alpha))


def steps_to_stationarity(weights: list[Tensor], x: Tensor, y: Tensor, alpha: float, rate: float) -> int:
    """Steps of gradient descent in W_1 on the squared error until ‖∂L/∂W_1‖ ≤ α, at most LONGEST."""
    first = weights[0]
    for step in range(LONGEST):
        slope = gradient(lambda w: (chain([w, *weights[1:]], x) - y).square().mean(), first)
        if float(slope.norm()) <= alpha:
            return step
        first = first - rate * slope
    return LONGEST


def least_gap(strong: bool, constant: float, radius: float, steps: int) -> float:
    """What is left after t steps: LR/(2(1 + √t)), so that t is of order L²R²/α²; strongly convex LR/(4t), so that it is LR/(4α)."""
    return constant * radius / (4 * steps) if strong else constant * radius / (2 * (1 + sqrt(steps)))


@claim("T-S5.1")
def quoted_complexities(generator: torch.Generator, stated: Callable[[bool, float, float, int], float] = least_gap) -> Ruling:
    """f(x) = a max_{i ≤ t} x_i + (b/2)‖x‖² with an oracle that returns the first maximal entry (Bubeck 2015, Theorem 3.13).

    x_s is in the span of e_1, …, e_{s−1}, so f(x_s) ≥ 0 up to s = t, and min f = −a²/(2bt). Convex: a = L√t/(1 + √t) and
    b = L/(R(1 + √t)). Strongly convex: a = L/2, b = L/(2R), where the source has L²/(8bα), equal to LR/(4α). Subgradient methods of
    three steps, with momentum and without, in the ball of radius R. Reached by staying at 0.
    """
    cases = []
    for strong in (False, True):
        for constant, radius, steps in ((1.0, 1.0, 4), (3.0, 2.0, 25), (10.0, 0.5, 100)):
            root = sqrt(steps)
            a, b = (constant / 2, constant / (2 * radius)) if strong else (constant * root, constant / radius)
            a, b = (a, b) if strong else (a / (1 + root), b / (1 + root))
            for rate in (0.1, 1.0, 10.0):
                for momentum in (0.0, 0.9):
                    gap = _lowest(a, b, radius, steps, rate * radius / constant, momentum) + a * a / (2 * b * steps)
                    what = f"{'strongly convex' if strong else 'convex'}, L = {constant:g}, R = {radius:g}, {steps} steps"
                    cases.append(Case(what, scalar(stated(strong, constant, radius, steps)), scalar(gap)))
    return lower_bound(cases)


def _lowest(a: float, b: float, radius: float, steps: int, rate: float, momentum: float) -> float:
    """The least value among x_1 = 0, …, x_t of a projected subgradient method with the oracle's answers."""
    x, moved, lowest = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64), 0.0
    for step in range(1, steps):
        slope = b * x
        slope[int(x.argmax())] += a
        moved = momentum * moved - rate / step**0.5 * slope
        x = x + moved
        x = x * min(1.0, radius / max(float(x.norm()), 1e-300))
        lowest = min(lowest, float(a * x.max() + b / 2 * x @ x))
    return lowest


@claim("T-C18")
def iteration_complexity(
    generator: torch.Generator, stated: Callable[[list[float], float], float] = iterations_of_first_layer
) -> Ruling:
    """The extremal members of Theorem 13 with the first layer's units off for all data: ∂L/∂W_1 = 0 whatever ∏s is."""
    x, alpha, cases = normal(generator, 16, WIDTHS[0]).abs(), 1e-3, []
    for size in (2.0, 8.0, 32.0):
        norms = [size] * (len(WIDTHS) - 1)
        weights = scaled_identities(norms, WIDTHS)
        y = chain(weights, x) + normal(generator, 16, WIDTHS[-1])
        dead = steps_to_stationarity([-weights[0].abs(), *weights[1:]], x, y, alpha, 1 / prod(norms[1:]) ** 2)
        claimed = scalar(HIDDEN_CONSTANT * stated(norms, alpha))
        cases.append(Case(f"dead first layer, s = {size:g} (iterations, constant {HIDDEN_CONSTANT:g})", claimed, scalar(dead)))
    return implication(cases, {"sharpness": "not sharp here: the true number is 0, whatever the factor"}, least=True)


@claim("T-C19")
def convergence_rate(generator: torch.Generator, stated: Callable[[float, float], SupportsFloat] = evaluations) -> Ruling:
    """L = ∏s over a range, α = 1: the stated count against the rate that the slides quote from the same source, constants 1."""
    return implication(
        [
            Case(f"L = {constant:g}, α = 1", scalar(float(stated(constant, 1.0))), scalar(float(cited_evaluations(constant, 1.0))))
            for constant in (1.0, 1e3, 1e6)
        ],
        {},
    )
