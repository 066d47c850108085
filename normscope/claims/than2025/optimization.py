"""Than 2025, Section 5.1: iteration complexity and convergence rates. Calculators, and steps counted beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log10, prod
from typing import SupportsFloat

import torch
from torch import Tensor

from normscope.claims.calculus import Map, chain, gradient, normal, random_weights, scalar, scaled_identities, standardize
from normscope.claims.ledger import THAN, claim
from normscope.claims.verdicts import Case, Evidence, Outcome, implication
from normscope.guarantees.iterations import cited_evaluations, evaluations, least_iterations

WIDTHS = (4, 4, 4, 4)
LONGEST = 1000  # steps that are tried
HIDDEN_CONSTANT = 1e-6  # of Ω: any positive number gives the same verdict, for 0 iterations are less than all of them


def iterations_of_first_layer(norms: list[float], alpha: float) -> float:
    """s_{i+1}⋯s_K/α, Corollary 18 for the first layer."""
    return float(least_iterations(prod(norms[1:]), alpha))


def steps_to_stationarity(weights: list[Tensor], x: Tensor, y: Tensor, alpha: float, rate: float, normalizers: list[Map]) -> int:
    """Steps of gradient descent in W_1 on the squared error until ‖∂L/∂W_1‖ ≤ α, at most LONGEST."""
    first = weights[0]
    for step in range(LONGEST):
        slope = gradient(lambda w: (chain([w, *weights[1:]], x, normalizers) - y).square().mean(), first)
        if float(slope.norm()) <= alpha:
            return step
        first = first - rate * slope
    return LONGEST


@claim(
    "T-C18", THAN, "Corollary 18",
    "Any gradient method needs at least Ω(s_{i+1}⋯s_K/α) iterations to an α-stationary point in W_i.",
    "A lower bound over all Lipschitz functions says that some function is slow, not that this loss is: a start whose first layer "
    "is dead is stationary at step 0, whatever the norms.",
)  # fmt: skip
def iteration_complexity(
    generator: torch.Generator, stated: Callable[[list[float], float], float] = iterations_of_first_layer
) -> Outcome:
    """The extremal members of Theorem 13 with the first layer's units off for all data: ∂L/∂W_1 = 0 while ∏s grows without limit.

    Beside it, steps of gradient descent in W_1 (rate 1/∏s²) from the same members with all units on.
    """
    x, alpha, cases = normal(generator, 16, WIDTHS[0]).abs(), 1e-3, []
    counted: Evidence = {}
    for size in (2.0, 8.0, 32.0):
        norms = [size] * (len(WIDTHS) - 1)
        weights = scaled_identities(norms, WIDTHS)
        y = chain(weights, x) + normal(generator, 16, WIDTHS[-1])
        rate = 1 / prod(norms[1:]) ** 2
        dead = steps_to_stationarity([-weights[0].abs(), *weights[1:]], x, y, alpha, rate, [])
        counted[f"steps from a live start, s = {size:g}"] = _counted(steps_to_stationarity(weights, x, y, alpha, rate, []))
        claimed = scalar(HIDDEN_CONSTANT * stated(norms, alpha))
        cases.append(Case(f"dead first layer, s = {size:g} (iterations, constant {HIDDEN_CONSTANT:g})", claimed, scalar(dead)))
    return implication(cases, counted, least=True)


@claim(
    "T-C19", THAN, "Corollary 19",
    "An α-stationary point takes O(σ^{-K+i-1} s_{i+1}⋯s_K/α²) evaluations with BN, s_{i+1}⋯s_K/α² without.",
    "The slides quote the same source with error ∛(L²/T), that is L²/α³ evaluations, which exceeds L/α² without limit as L/α "
    "grows; and a smaller upper bound does not make training faster.",
)  # fmt: skip
def convergence_rate(generator: torch.Generator, stated: Callable[[float, float], SupportsFloat] = evaluations) -> Outcome:
    """L = ∏s over a range, α = 1: the stated count against the rate that the slides quote from the same source.

    Beside it, steps of gradient descent in W_1 to ‖∂L/∂W_1‖ ≤ 10^-2 for one network with and without BN, same weights, rate 1.
    """
    cases = [
        Case(f"L = {constant:g}, α = 1", scalar(float(stated(constant, 1.0))), scalar(float(cited_evaluations(constant, 1.0))))
        for constant in (1.0, 1e3, 1e6)
    ]
    weights = random_weights((6, 16, 16, 16, 2), generator)
    x, y = normal(generator, 64, 6), normal(generator, 64, 2)
    normalizers: list[Map] = [partial(standardize, axis=0)] * len(weights)
    counts = {name: steps_to_stationarity(weights, x, y, 1e-2, 1.0, kind) for name, kind in (("plain", []), ("BN", normalizers))}
    products = log10(float(prod(torch.linalg.matrix_norm(weight, 2) for weight in weights[1:])))
    evidence: Evidence = {f"steps, {name}": _counted(count) for name, count in counts.items()}
    return implication(cases, evidence | {"log10 of the product of norms": products})


def _counted(steps: int) -> int | str:
    return steps if steps < LONGEST else f"more than {LONGEST}"
