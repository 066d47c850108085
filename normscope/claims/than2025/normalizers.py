"""Than 2025, Section 3 and its slides: Lipschitz constants of BN, LN and GN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normscope.claims.calculus import (
    EPSILON,
    jacobian,
    layer_deviation,
    normal,
    spectral_norm,
    standardize,
    steepness,
    uniform,
)
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, constant, identity, upper_bound

SCALES = (1e-3, 1.0, 1e3)  # of inputs


def batch_norm(deviations: Tensor) -> Callable[[Tensor], Tensor]:
    """BN with population statistics: x ↦ x/√(σ² + ε); the mean only shifts."""
    return lambda x: x / deviations


def norm_of_inverses(deviations: Tensor) -> Tensor:
    """‖1/σ‖₂, Lemma 1's constant."""
    return (1 / deviations).norm()


def batch_norm_deviations(generator: torch.Generator) -> list[Tensor]:
    """√(σ² + ε) of layers of widths 1 to 64: over six orders of magnitude, all equal, and one tiny."""
    variances = [uniform(generator, -3, 3, width) for width in (1, 2, 3, 8, 64)]
    spread = [(10**exponents + EPSILON).sqrt() for exponents in variances]
    return [*spread, torch.ones(16, dtype=torch.float64), torch.tensor([1e-2, 10.0, 10.0], dtype=torch.float64)]


def batch_norm_case(generator: torch.Generator, deviations: Tensor, stated: Callable[[Tensor], Tensor]) -> Case:
    """The stated constant against the spectral norm of the Jacobian, and against its largest entry."""
    true = steepness(batch_norm(deviations), normal(generator, len(deviations)))
    return Case(f"{len(deviations)} channels", stated(deviations), true, (1 / deviations).abs().max())


@claim("T-L1")
def batch_norm_constant(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = norm_of_inverses) -> Ruling:
    """BN with fixed statistics is x_k ↦ (x_k − μ_k)/√(σ_k² + ε), with Jacobian diag(1/√(σ_k² + ε)).

    The constant is the spectral norm of that matrix, taken by automatic differentiation, for widths 1 to 64 and variances over
    six orders of magnitude, among them one tiny variance and all equal.
    """
    return constant([batch_norm_case(generator, deviations, stated) for deviations in batch_norm_deviations(generator)])


@claim("T-S-BN")
def scaled_batch_norm_constant(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = norm_of_inverses) -> Ruling:
    """As T-L1 with random γ of both signs, one of them zero: the Jacobian is diag(γ_k/√(σ_k² + ε)). stated: of √(σ² + ε)/γ."""
    cases = []
    for deviations in batch_norm_deviations(generator):
        gamma = normal(generator, len(deviations))
        gamma[1:2] = 0
        cases.append(batch_norm_case(generator, deviations / gamma, stated))
    return constant(cases)


def inverse_deviation(x: Tensor) -> Tensor:
    """1/√(σ² + ε) at x, Lemma 2's bound."""
    return 1 / layer_deviation(x)


def layer_norm_points(generator: torch.Generator) -> list[Tensor]:
    """Inputs of LN: random at several scales, one spike, and a constant vector, where σ is least."""
    points = [scale * normal(generator, width) for width in (2, 3, 4, 16, 64) for scale in SCALES]
    return [*points, torch.eye(8, dtype=torch.float64)[0] * 100, torch.full((6,), 3.0, dtype=torch.float64)]


@claim("T-L2")
def layer_norm_bound(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = inverse_deviation) -> Ruling:
    """∂LN/∂x = (I − 11ᵀ/n − zzᵀ/n)/√(σ² + ε) with z = LN(x): a contraction over √(σ² + ε).

    For n ≥ 3 some direction is orthogonal to both 1 and z, so the bound is reached. For n = 2 there is none and the norm is
    ε/(σ² + ε)^1.5. The least σ over all of ℝⁿ is √ε, at constant x, so a large σ can only be meant on data or on a region.
    """
    points = layer_norm_points(generator)
    cases = [Case(f"n = {len(x)}, σ = {float(layer_deviation(x)):.3g}", stated(x), steepness(_layer_norm, x)) for x in points]
    pairs = [case for case, x in zip(cases, points, strict=True) if len(x) == 2]
    exact = [EPSILON / float(layer_deviation(x)) ** 3 for x in points if len(x) == 2]
    gap = max(abs(float(case.true) / value - 1) for case, value in zip(pairs, exact, strict=True))
    return upper_bound(cases, **{"largest true/stated at n = 2": max(case.ratio for case in pairs), "error of the n = 2 form": gap})


def layer_norm_jacobian(x: Tensor) -> Tensor:
    """Lemma 23: (I − yyᵀ/(‖y‖² + nε))(I − 11ᵀ/n)/√(σ² + ε), y = x − μ."""
    n, y = len(x), x - x.mean()
    identity = torch.eye(n, dtype=x.dtype)
    return (identity - torch.outer(y, y) / (y @ y + n * EPSILON)) @ (identity - 1 / n) / layer_deviation(x)


@claim("T-L23")
def layer_norm_derivative(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = layer_norm_jacobian) -> Ruling:
    """The closed form against automatic differentiation, entry by entry; errors are relative to 1/σ, the size of what cancels."""
    points = layer_norm_points(generator)
    return identity([Case(f"n = {len(x)}", stated(x), jacobian(_layer_norm, x), scale=float(inverse_deviation(x))) for x in points])


def sum_over_groups(deviations: Tensor) -> Tensor:
    return (1 / deviations).sum()


@claim("T-L3")
def group_norm_bound(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = sum_over_groups) -> Ruling:
    """GN is LN on each group: its Jacobian has one block per group, so its norm is the largest of theirs."""
    cases = []
    for groups, size in ((2, 3), (4, 4), (8, 8)):
        for spread in (0.0, 1.0):  # groups of one scale, and of scales that differ by up to two orders of magnitude
            x = 10 ** uniform(generator, -spread, spread, groups, 1) * normal(generator, groups, size)
            deviations = layer_deviation(x)
            true = steepness(_layer_norm, x)
            cases.append(Case(f"{groups} groups of {size}", stated(deviations), true, (1 / deviations).max()))
    return upper_bound(cases)


def shrunk_by_width(x: Tensor, scales: Tensor) -> Tensor:
    """(1 − 1/n)‖γ/σ‖, the slides' bound, with σ the least of the groups; at one γ = 1 it is the digest's (1 − 1/n)/σ."""
    return (1 - 1 / x.shape[-1]) * scales.norm() / layer_deviation(x).min()


def scaled_layer_norm_cases(
    generator: torch.Generator, shapes: list[tuple[int, ...]], unit: bool, stated: Callable[[Tensor, Tensor], Tensor]
) -> list[Case]:
    """LN along the last axis at inputs of unit scale, γ = e₁; `unit`: γ = 1, the statement being given one 1."""
    cases = []
    for shape in shapes:
        x, size = normal(generator, *shape), shape[-1]
        x[..., 0] = x[..., 1:].mean(-1)  # so that z₁ = 0
        gamma = (torch.ones(size) if unit else torch.eye(size)[0]).double()
        true = spectral_norm(gamma.expand(x.shape).reshape(-1, 1) * jacobian(_layer_norm, x))
        bound = stated(x, gamma[:1] if unit else gamma)
        name = f"{' groups of '.join(map(str, shape))} neurons, γ = {'1' if unit else 'e₁'}"
        cases.append(Case(name, bound, true, gamma.abs().max() / layer_deviation(x).min()))
    return cases


@claim("T-S-LN")
def layer_norm_width_penalty(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = shrunk_by_width) -> Ruling:
    """γ = e₁ keeps one row of ∂LN/∂x, of norm √(1 − 1/n − z₁²/n)/σ, which exceeds (1 − 1/n)/σ where z₁² < 1 − 1/n.

    By hand: x = (0, 1, −1) has σ = √⅔ and z₁ = 0: √⅔/σ = 1 against ⅔/σ = 0.816.
    """
    return upper_bound(scaled_layer_norm_cases(generator, [(3,), (4,), (8,), (32,)], False, stated))


@claim("T-S-GN")
def group_norm_width_penalty(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = shrunk_by_width) -> Ruling:
    """As for LN, in the group of the least σ."""
    return upper_bound(scaled_layer_norm_cases(generator, [(2, 3), (4, 4), (2, 16)], False, stated))


@claim("T-D-LN")
def width_penalty_of_digest(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = shrunk_by_width) -> Ruling:
    """σ·‖∂LN/∂x‖ = 1 for γ = 1 and n ≥ 3, since some direction is orthogonal to 1 and to LN(x); in groups too."""
    return upper_bound(scaled_layer_norm_cases(generator, [(3,), (4,), (32,), (2, 3), (2, 16)], True, stated))


def _layer_norm(x: Tensor) -> Tensor:
    return standardize(x, -1)
