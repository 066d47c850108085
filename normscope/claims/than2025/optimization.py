"""Than 2025, Section 5.1: iteration complexity and convergence rates."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import SupportsFloat

import torch
from torch import Tensor

from normscope.bounds.iterations import cited_evaluations, evaluations, least_iterations
from normscope.claims.calculus import chain, gradient, normal, scalar, scaled_identities
from normscope.claims.ledger import claim
from normscope.claims.verdicts import Case, Outcome, implication

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


@claim("T-C18")
def iteration_complexity(
    generator: torch.Generator, stated: Callable[[list[float], float], float] = iterations_of_first_layer
) -> Outcome:
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
def convergence_rate(generator: torch.Generator, stated: Callable[[float, float], SupportsFloat] = evaluations) -> Outcome:
    """L = ∏s over a range, α = 1: the stated count against the rate that the slides quote from the same source, constants 1."""
    return implication(
        [
            Case(f"L = {constant:g}, α = 1", scalar(float(stated(constant, 1.0))), scalar(float(cited_evaluations(constant, 1.0))))
            for constant in (1.0, 1e3, 1e6)
        ],
        {},
    )
