"""What float64 arithmetic may lose, in one place: every bound that adds, squares or multiplies numbers takes its room from here.

u = 2^-53 is the unit roundoff, η = 2^-1074 the smallest positive number. A computed sum of n products, in any order, is within
γ_n Σ|terms| + n η of the exact one, γ_n = n u/(1 − n u) (Higham 2002, section 3.1): relative to what was added, not to the result.
"""

from __future__ import annotations

import math
from typing import overload

import torch

UNIT_ROUNDOFF = 2.0**-53
UNDERFLOW = 5e-324  # η
FEW, FUNCTION = 16, 8  # roundings: of a short expression, and what one function of torch or Python counts as (within 4 ulps)
SUMMED = 1 + 1e-9  # relative rounding of sums of up to 10^6 numbers ≥ 0, and of roots of such sums
SQUARES_LOST = 1e-150  # what squares that underflow take from the root of their sum, at most, of up to 10^7 of them
SMALLEST_NORMAL = 2.0**-1022  # below it rounding is absolute, at most η
VANISHING = 2.0**-450  # what is smaller has a square of which digits may be lost
LOGARITHM = 750  # the largest logarithm of a positive number, in size
LARGEST = torch.finfo(torch.float64).max


def gamma(terms: float) -> float:
    """γ_n = n u/(1 − n u), or infinity where a sum is so long that nothing is known of it."""
    lost = terms * UNIT_ROUNDOFF
    return lost / (1 - lost) if lost < 0.5 else math.inf


def summation_error(terms: float, added: torch.Tensor) -> torch.Tensor:
    """How far a computed sum of `terms` products may be from the exact one; `added`: Σ|products|, computed likewise.

    γ_2n+8 covers the products, the rounding of `added` itself, and that of this error.
    """
    return (added.abs() * gamma(2 * terms + 8) + (terms + 8) * UNDERFLOW).nan_to_num(math.inf, math.inf, math.inf)


@overload
def above(size: float, roundings: float = ...) -> float: ...
@overload
def above(size: torch.Tensor, roundings: float = ...) -> torch.Tensor: ...
def above(size: float | torch.Tensor, roundings: float = FEW) -> float | torch.Tensor:
    """An upper bound on a number ≥ 0 that was computed in no more than so many roundings; zero stays zero, NaN is infinite.

    Each multiplies by 1 + δ, |δ| ≤ u, or is off by η where numbers are subnormal, and (1 − u)^-n < 1 + 2 n u. A sum of n numbers
    ≥ 0 takes n of them; what torch or Python compute of a number (exp, tan, a power) counts as `FUNCTION`.
    """
    if not isinstance(size, torch.Tensor):
        return float(above(torch.tensor(size, dtype=torch.float64), roundings))
    raised = size * (1 + 2 * math.ceil(roundings) * UNIT_ROUNDOFF)
    return torch.where((size > 0) & (size < SMALLEST_NORMAL), raised + 2 * UNDERFLOW, raised).nan_to_num(math.inf, math.inf)


@overload
def below(size: float, roundings: float = ...) -> float: ...
@overload
def below(size: torch.Tensor, roundings: float = ...) -> torch.Tensor: ...
def below(size: float | torch.Tensor, roundings: float = FEW) -> float | torch.Tensor:
    """A lower bound on such a number, not below 0: what `above` adds, taken off; NaN is 0."""
    if not isinstance(size, torch.Tensor):
        return float(below(torch.tensor(size, dtype=torch.float64), roundings))
    return (size * (1 - 2 * math.ceil(roundings) * UNIT_ROUNDOFF) - 2 * UNDERFLOW).nan_to_num(0).clamp(min=0)


def root_of_powers_error(order: float, terms: float, found: torch.Tensor) -> float:
    """How far (ℓ2) computed roots (Σ|x|^p)^(1/p) of so many terms are from exact ones, beside the rounding of any sum.

    Powers below 2^-1022 vanish, so of roots as small nothing is known. Unless p is 2, 1/p is rounded, and with it the logarithm.
    """
    if order == 1 or not 0 < order < math.inf:
        return 0.0
    vanished = 2.0 ** ((math.log2(2 * terms) - 1022) / order) if order > 1 else 0.0
    relative = 0.0 if order == 2 else gamma(2 * (terms + LOGARITHM + FEW + FUNCTION) / order)
    return above(vanished * math.sqrt(found.numel()) + relative * float(length(found)))


def root(count: float) -> float:
    """√ of a whole number, rounded up: IEEE's √ is the nearest number, and exact where that is whole."""
    found = math.sqrt(count)
    return found if found.is_integer() and found * found == count else math.nextafter(found, math.inf)


def exponent_of(values: torch.Tensor) -> int:
    """The e of the largest |value| in [2^(e−1), 2^e); 0 where there is none."""
    largest = float(values.detach().abs().max()) if values.numel() else 0.0
    return math.frexp(largest)[1] if 0 < largest < math.inf else 0


def times_power_of_two(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """values · 2^exponent in two steps, as 2^1074 alone overflows."""
    return values * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)


def euclidean_norm(values: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """√Σ values² over `dim` (all axes unless given), to a few roundings at every scale.

    Each sum is scaled by a power of two of its own first, so that no square overflows, and none that counts is lost.
    """
    values = (values.abs() if values.is_complex() else values).detach().to(torch.float64)
    axes = tuple(range(values.dim())) if dim is None else (dim,) if isinstance(dim, int) else dim
    if not values.dim() or not axes:
        return values.abs()
    if not values.numel():
        return torch.linalg.vector_norm(values, dim=axes)
    largest = values.abs().amax(axes, keepdim=True)
    if bool(((largest == 0) | ((largest > 1e-120) & (largest < 1e120))).all()):  # no square that counts is lost as it is
        return torch.linalg.vector_norm(values, dim=axes)
    exponents = torch.frexp(torch.where((largest > 0) & largest.isfinite(), largest, 1.0)).exponent
    scaled = torch.ldexp(torch.ldexp(values, -(exponents // 2)), exponents // 2 - exponents)  # 2^1074 alone overflows
    found = torch.linalg.vector_norm(scaled, dim=axes, keepdim=True)
    return torch.ldexp(torch.ldexp(found, exponents // 2), exponents - exponents // 2).squeeze(axes)


def length(values: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """An upper bound on `euclidean_norm`, above it by no more than its rounding."""
    axes = range(values.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    summed = math.prod(values.shape[axis] for axis in axes)
    return above(euclidean_norm(values, dim) * (1 + gamma(2 * summed + 8)))
