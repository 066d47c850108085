"""When two stored tensors are the same numbers: bit by bit, or one the other's as its type stores it."""

from __future__ import annotations

import math

import torch

from normscope._checkpoint.norms import MOST_GRAM, Matrix
from normscope._checkpoint.views import View
from normscope.core.rounding import euclidean_norm, exponent_of, gamma, times_power_of_two
from normscope.operators.dense import gram_norm

LARGE, DOWN = 900, 100  # of numbers from 2^900 on differences and norms may be beyond float64, but not of those 2^100 smaller
COARSE = 2.0**-8  # the unit roundoff of bfloat16: what is rounded more coarsely is another function
FINE = 2.0**-10  # a coarser type can hide a change of 1 %
Outcome = tuple[bool, float]  # whether both are the same, and the largest difference relative to the largest entry


def same_numbers(one: View, other: View, shift: float = 0.0) -> Outcome:
    """Whether one = other + shift exactly, or as either type stores it to no less than bfloat16's precision."""
    same, defect = rounded_alike(one, other, shift)
    return same and not (defect and too_coarse(one, other, defect)), defect


def too_coarse(one: View, other: View, defect: float) -> bool:
    """Whether rounding makes another function: a type of few bits, or numbers too small for a type."""
    return max(one.roundoff, other.roundoff) > COARSE or defect > COARSE


def rounded_alike(one: View, other: View, shift: float = 0.0) -> Outcome:
    """Whether one is the other, as either type stores it, however coarse. What is finite in one must be so in the other."""
    if one.shape != other.shape:
        return False, math.inf
    x, y = one.value(), other.value()
    if x.is_complex() or y.is_complex():
        x, y = (torch.view_as_real(value.to(torch.complex128)) for value in (x, y))
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False, math.inf
    if not shift and bool(((x == y) | (x.isnan() & y.isnan())).all()):
        same = not (one.whole and other.whole) or not bool(_step(one, other, x, y).any())
        return same, 0.0
    if shift:
        same = torch.equal(one.rounded(y + shift), x) or torch.equal(other.rounded(x - shift), y)
    else:
        same = torch.equal(other.rounded(x), y) or torch.equal(one.rounded(y), x)
    return same, apart(x, y + shift)


def apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference of entries over the largest entry."""
    if not x.numel():
        return 0.0
    size = max(float(x.abs().max()), float(y.abs().max()))
    return float((x - y).abs().max()) / size if 0 < size < math.inf else 0.0 if size == 0 else math.nan


def change(one: View, other: View) -> dict[str, float | None]:
    """‖Δ‖_F/‖W‖_F, ‖Δ‖, the angle and the largest change between tensors of the same shape."""
    x, y = one.value(), other.value()
    if not bool(x.isfinite().all()) or not bool(y.isfinite().all()) or not x.numel():
        return {}
    down = DOWN if max(exponent_of(x), exponent_of(y)) > LARGE else 0
    x, y = (times_power_of_two(values, -down) for values in (x, y))
    step = _step(one, other, x, y)
    size, other_size, moved = (float(euclidean_norm(values)) for values in (x, y, step))
    cosine = float(((x / size).conj() * (y / other_size)).sum().real) if size and other_size else 1.0
    found: dict[str, float | None] = {
        "change": moved / size if size else math.inf if moved else 0.0,
        "rotation": math.degrees(math.acos(max(-1.0, min(1.0, cosine)))),
        "largest_change": float(step.abs().max()) * 2.0**down,
        "spectral_change": moved * (1 + gamma(x.numel() + 8)) * 2.0**down,
        "rank": None,
    }
    matrix = Matrix(_real_matrix(step.flatten(1))) if len(one.shape) >= 2 and moved else None
    if matrix is not None and matrix.narrow <= MOST_GRAM:
        norm = gram_norm(matrix.gram, matrix.terms) * matrix.unit
        found |= {"spectral_change": norm * 2.0**down, "rank": (moved / norm) ** 2}
    return found


def _step(one: View, other: View, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y − x, their values; of integers exactly, as far as it is told from 0."""
    step = y - x
    if one.whole and other.whole:  # where float64 does not tell them apart they are so near that int64 does
        step = torch.where(step == 0, (other.make().to(torch.int64) - one.make().to(torch.int64)).to(torch.float64), step)
    return step


def _real_matrix(values: torch.Tensor) -> torch.Tensor:
    """A real matrix of the same norm: [[Re, −Im], [Im, Re]] of a complex one."""
    if not values.is_complex():
        return values
    return torch.cat((torch.cat((values.real, -values.imag), 1), torch.cat((values.imag, values.real), 1)))
