"""Numbers of one stored tensor, proved in float64, with no more of it in memory than one block of rows and a Gram matrix.

The Gram matrix of the narrow side is summed block by block; each of its entries is a sum of `terms` products in some order,
whatever the blocks are, so that the proof of `operators.dense.gram_norm` holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.linalg.blas import dsyrk

from normscope._checkpoint.entries import BLOCK_BYTES, is_number
from normscope.core.rounding import UNIT_ROUNDOFF, gamma, length, times_power_of_two
from normscope.operators.dense import gram_norm, gram_norms, largest_eigenpair

SAMPLE_SLACK = 1e-3  # of an estimate
CACHED_BYTES = 1 << 20  # of float64 at a time, where entries are only looked at: what a processor's cache holds
NEAR_ONE = 200  # exponents of entries whose squares are far from the ends of float64, 2^±1022
MOST_GRAM = 16_384  # rows and columns: 2 GiB; beyond it no spectral norm is proved


@dataclass(frozen=True)
class Numbers:
    """Of one tensor as a matrix (first axis, everything else); of a vector the same with one row.

    spectral_norm: an upper bound, 1e-8 above the truth; an estimate from below where `certified` is False; None where it is not
    defined (no floating-point numbers) or the matrix is too large to prove it. rms_to_inf: max ‖row‖ √columns, the largest output
    for an input whose root mean square is 1. zeros, ones, not_finite: shares of the entries.
    """

    spectral_norm: float | None = None
    frobenius_norm: float | None = None
    stable_rank: float | None = None
    rms_to_inf: float | None = None
    largest: float | None = None
    smallest: float | None = None
    mean: float | None = None
    zeros: float | None = None
    ones: float | None = None
    not_finite: float | None = None
    certified: bool = True
    note: str = ""


@dataclass(frozen=True)
class Counts:
    """What one pass over the entries tells. largest, smallest: of |finite entries|; total: their plain sum."""

    zeros: int = 0
    ones: int = 0
    not_finite: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    total: float = 0.0

    @staticmethod
    def of(block: torch.Tensor) -> Counts:
        sizes = block.abs()
        low, high = (float(end) for end in torch.aminmax(sizes))  # NaN where an entry is
        not_finite = 0
        if not high < math.inf:
            not_finite = int((~block.isfinite()).sum())
            low, high = float(sizes.nan_to_num(math.inf).min()), float(sizes.nan_to_num(0, 0).max())
        zeros = block.numel() - int(torch.count_nonzero(block))
        return Counts(zeros, int(torch.count_nonzero(block == 1)), not_finite, high, low, float(block.sum()))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.zeros + other.zeros, self.ones + other.ones, self.not_finite + other.not_finite,
            max(self.largest, other.largest), min(self.smallest, other.smallest), self.total + other.total,
        )  # fmt: skip


class Matrix:
    """A tensor as (first axis, everything else) times 2^−exponent, read block by block in float64."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)  # as stored

    @property
    def narrow(self) -> int:
        return min(self.values.shape)

    @property
    def terms(self) -> int:
        return max(self.values.shape)

    @property
    def long_axis(self) -> int:
        """The axis that a Gram matrix sums over."""
        return 0 if self.values.shape[1] <= self.values.shape[0] else 1

    @cached_property
    def counts(self) -> Counts:
        return sum((Counts.of(block) for _, block in self._parts(0, CACHED_BYTES)), Counts())

    @cached_property
    def exponent(self) -> int:
        """That of the largest entry, or 0 where no square of an entry of that size is near the ends of float64."""
        found = math.frexp(self.counts.largest)[1]
        return 0 if abs(found) <= NEAR_ONE else found

    @property
    def unit(self) -> float:
        """2^exponent; NaN where norms may not be representable."""
        return 2.0**self.exponent if abs(self.exponent) < 1000 else math.nan

    def blocks(self, axis: int, size: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """(start, part) along an axis, of about so many bytes, scaled exactly."""
        for start, part in self._parts(axis, size):
            yield start, times_power_of_two(part, -self.exponent) if self.exponent else part

    def _parts(self, axis: int, size: int | None) -> Iterator[tuple[int, torch.Tensor]]:
        step = max(1, min(size or BLOCK_BYTES, BLOCK_BYTES) // max(1, 8 * self.values.shape[1 - axis]))
        for start in range(0, self.values.shape[axis], step):
            yield start, self.values.narrow(axis, start, min(step, self.values.shape[axis] - start)).to(torch.float64)

    @cached_property
    def gram(self) -> torch.Tensor:
        """AᵀA or AAᵀ, the smaller of both: the diagonal and what stands above it."""
        return self._gram(None)

    def scaled_gram(self, scale: torch.Tensor, axis: int) -> torch.Tensor:
        """The Gram matrix after the rows (axis 0) or columns (axis 1) are scaled; each term is rounded twice more.

        Along the axis that it keeps, the Gram matrix itself is scaled: γ_i (Σ_k a_ki a_kj) γ_j needs no second pass.
        """
        return self._gram(scale) if axis == self.long_axis else self.gram * scale * scale[:, None]

    def _gram(self, scale: torch.Tensor | None) -> torch.Tensor:
        """scale: of the long axis."""
        found = np.zeros((self.narrow, self.narrow), order="F")
        for start, block in self.blocks(self.long_axis):
            part = None if scale is None else scale[start : start + block.shape[self.long_axis]]
            scaled = block if part is None else block * (part[:, None] if self.long_axis == 0 else part)
            side = scaled.numpy().T  # in Fortran's order as it is: (narrow, some) or (some, narrow)
            found = dsyrk(1.0, side, beta=1.0, c=found, overwrite_c=1, lower=1, trans=self.long_axis)
        return torch.from_numpy(found.T)


def measured(matrix: Matrix, sample: bool = False) -> Numbers:
    """All numbers of a tensor; sample: the spectral norm is estimated by a few products instead of proved."""
    size = matrix.values.numel()
    if not is_number(matrix.values):
        return Numbers(note="not floating-point numbers")
    if not size:
        return Numbers(0.0, 0.0, None, 0.0, 0.0, 0.0, None, 0.0, 0.0, 0.0, note="no entries")
    counts = matrix.counts
    plain: dict[str, Any] = {
        "largest": counts.largest, "smallest": counts.smallest, "mean": counts.total / size, "zeros": counts.zeros / size,
        "ones": counts.ones / size, "not_finite": counts.not_finite / size,
    }  # fmt: skip
    if counts.not_finite:
        return Numbers(**plain, certified=False, note="it has entries that are not finite, so it has no norm")
    if counts.largest == 0:
        return Numbers(0.0, 0.0, None, 0.0, **plain)
    if math.isnan(matrix.unit):
        return Numbers(**plain, certified=False, note="its entries are so near the ends of float64 that its norms may not be in it")
    squares, row = 0.0, 0.0
    for _, block in matrix.blocks(0, CACHED_BYTES):
        norms = torch.linalg.vector_norm(block, dim=1)
        squares, row = squares + float(norms.square().sum()), max(row, float(norms.max()))
    columns = matrix.values.shape[1]
    frobenius = math.sqrt(squares)
    norm, certified, note = _spectral(matrix, sample, frobenius)
    return Numbers(
        None if norm is None else norm * matrix.unit, frobenius * matrix.unit, None if not norm else squares / norm**2,
        row * math.sqrt(columns) * matrix.unit * (1 + 2 * gamma(columns + 8)), **plain, certified=certified, note=note,
    )  # fmt: skip


def _spectral(matrix: Matrix, sample: bool, frobenius: float) -> tuple[float | None, bool, str]:
    """(norm, whether it is proved, a note)."""
    if matrix.narrow == 1:
        return frobenius * (1 + 2 * gamma(matrix.values.numel() + 8)), True, ""
    if sample:
        return _estimate(matrix), False, "an estimate, by a few products in float32"
    if matrix.narrow > MOST_GRAM:
        return None, False, f"more than {MOST_GRAM:,} rows and columns: too large to prove a spectral norm; --sample estimates it"
    return gram_norm(matrix.gram, matrix.terms), True, ""


def _estimate(matrix: Matrix) -> float:
    values = torch.cat([block.to(torch.float32) for _, block in matrix.blocks(0)])
    values = values if values.shape[1] <= values.shape[0] else values.T

    def apply(vector: torch.Tensor) -> torch.Tensor:
        return (values.T @ (values @ vector.to(torch.float32))).to(torch.float64)

    return math.sqrt(max(largest_eigenpair(apply, values.shape[1], torch.float64, SAMPLE_SLACK)[0], 0.0))


def scaled_norm(matrix: Matrix, scale: torch.Tensor, transposed: bool = False) -> float | None:
    """An upper bound on ‖W diag γ‖, W as (out, in); transposed: it is stored as (in, out). None where it is not proved.

    Each product w γ is rounded once, or each term of the Gram matrix twice: the matrix at hand is within u ‖W diag γ‖_F of the one
    meant, and the sums have two roundings more.
    """
    axis = 0 if transposed else 1
    inputs = matrix.values.shape[axis]
    if matrix.narrow > MOST_GRAM or inputs % len(scale) or matrix.counts.not_finite:
        return None
    scale = scale.repeat_interleave(inputs // len(scale))  # a kernel reads every channel once per tap
    size = float(scale.abs().max())
    if not 0 < size < math.inf:
        return 0.0 if size == 0 else None
    exponent = math.frexp(size)[1]
    gram = matrix.scaled_gram(times_power_of_two(scale, -exponent), axis)
    lost = 2 * UNIT_ROUNDOFF * math.sqrt(float(gram.diagonal().sum()))
    norm = (gram_norm(gram, matrix.terms + 2) + lost) * (1 + 8 * UNIT_ROUNDOFF)
    return norm * 2.0 ** (exponent + matrix.exponent) if abs(exponent + matrix.exponent) < 1000 else None


def head_norms(
    weight: torch.Tensor, heads: int, scale: torch.Tensor | None, shift: torch.Tensor | None, bias: torch.Tensor | None
) -> list[tuple[float, float]]:
    """For each head (‖W_h diag γ‖, ‖W_h β + b_h‖), upper bounds; weight: (heads · k, d)."""
    found = []
    size = weight.shape[0] // heads
    for head in range(heads):
        own = weight[head * size : (head + 1) * size].to(torch.float64)
        scaled = own if scale is None else own * scale
        lost = 2 * UNIT_ROUNDOFF * float(length(scaled))
        norm = float(gram_norms((scaled @ scaled.T)[None], scaled.shape[1])[0]) + lost
        moved = torch.zeros(size, dtype=torch.float64)
        error = 0.0
        if shift is not None:
            moved = own @ shift
            error = gamma(2 * own.shape[1] + 8) * float(length(own.abs() @ shift.abs()))
        if bias is not None:
            moved = moved + bias[head * size : (head + 1) * size].to(torch.float64)
        found.append((norm * (1 + 8 * UNIT_ROUNDOFF), float(length(moved)) * (1 + 8 * UNIT_ROUNDOFF) + error))
    return found
