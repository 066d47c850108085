"""Numbers of one stored tensor, proved in float64, with no more of it in memory than one block of rows and a Gram matrix.

The Gram matrix of the narrow side is summed block by block; each of its entries is a sum of `terms` products in some order,
whatever the blocks are, so that the proof of `operators.dense.gram_norm` holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg.blas import dsyrk

from normscope._checkpoint.entries import BLOCK_BYTES, is_number
from normscope.core.rounding import UNIT_ROUNDOFF, gamma, length, times_power_of_two
from normscope.operators.dense import gram_norm, gram_norms, largest_eigenpair

SAMPLE_SLACK = 1e-3  # of an estimate
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Matrix:
    """A tensor as (first axis, everything else) times 2^−exponent, read block by block in float64."""

    values: torch.Tensor  # (rows, columns) as stored
    exponent: int = 0

    @property
    def narrow(self) -> int:
        return min(self.values.shape)

    @property
    def terms(self) -> int:
        return max(self.values.shape)

    def blocks(self, axis: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(start, part) along an axis, scaled exactly."""
        step = max(1, BLOCK_BYTES // max(1, 8 * self.values.shape[1 - axis]))
        for start in range(0, self.values.shape[axis], step):
            part = self.values.narrow(axis, start, min(step, self.values.shape[axis] - start)).to(torch.float64)
            yield start, times_power_of_two(part, -self.exponent) if self.exponent else part

    def gram(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        """AᵀA or AAᵀ, the smaller of both; scale: of the columns before."""
        rows, columns = self.values.shape
        found = np.zeros((self.narrow, self.narrow), order="F")
        for start, block in self.blocks(0 if columns <= rows else 1):
            if columns <= rows:
                side = (block if scale is None else block * scale).numpy().T  # (columns, some rows), in Fortran's order as it is
            else:
                side = np.asfortranarray((block if scale is None else block * scale[start : start + block.shape[1]]).numpy())
            found = dsyrk(1.0, side, beta=1.0, c=found, overwrite_c=1, lower=1)
        lower = torch.from_numpy(np.asarray(found)).tril()
        return lower + lower.tril(-1).T


def measured(tensor: torch.Tensor, sample: bool = False) -> Numbers:
    """All numbers of a tensor; sample: the spectral norm is estimated by a few products instead of proved."""
    if not is_number(tensor):
        return Numbers(note="not floating-point numbers")
    if not tensor.numel():
        return Numbers(0.0, 0.0, None, 0.0, 0.0, 0.0, None, 0.0, 0.0, 0.0, note="no entries")
    matrix = Matrix(tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1))
    counts = dict.fromkeys(("zeros", "ones", "not_finite"), 0)
    largest, smallest, total = 0.0, math.inf, 0.0
    for _, block in matrix.blocks(0):
        counts["zeros"] += int((block == 0).sum())
        counts["ones"] += int((block == 1).sum())
        counts["not_finite"] += int((~block.isfinite()).sum())
        sizes = block.abs()
        largest, smallest = (
            max(largest, float(sizes.nan_to_num(0, 0).max())),
            min(smallest, float(sizes.nan_to_num(math.inf).min())),
        )
        total += float(block.sum())
    shares = {name: count / tensor.numel() for name, count in counts.items()}
    plain: dict[str, Any] = {"largest": largest, "smallest": smallest, "mean": total / tensor.numel(), **shares}
    if counts["not_finite"]:
        return Numbers(**plain, certified=False, note="it has entries that are not finite, so it has no norm")
    if largest == 0:
        return Numbers(0.0, 0.0, None, 0.0, **plain)
    matrix = Matrix(matrix.values, math.frexp(largest)[1])
    squares, row = 0.0, 0.0
    for _, block in matrix.blocks(0):
        norms = torch.linalg.vector_norm(block, dim=1)
        squares, row = squares + float(norms.square().sum()), max(row, float(norms.max()))
    columns = matrix.values.shape[1]
    frobenius = math.sqrt(squares)
    norm, certified, note = _spectral(matrix, sample, frobenius)
    unit = 2.0**matrix.exponent if -1000 < matrix.exponent < 1000 else math.nan
    return Numbers(
        None if norm is None else norm * unit, frobenius * unit, None if not norm else squares / norm**2,
        row * math.sqrt(columns) * unit * (1 + 2 * gamma(columns + 8)), **plain, certified=certified, note=note,
    )  # fmt: skip


def _spectral(matrix: Matrix, sample: bool, frobenius: float) -> tuple[float | None, bool, str]:
    """(norm, whether it is proved, a note)."""
    if matrix.narrow == 1:
        return frobenius * (1 + 2 * gamma(matrix.values.numel() + 8)), True, ""
    if sample:
        return _estimate(matrix), False, "an estimate, by a few products in float32"
    if matrix.narrow > MOST_GRAM:
        return None, False, f"more than {MOST_GRAM:,} rows and columns: no spectral norm is proved; --sample estimates it"
    return gram_norm(matrix.gram(), matrix.terms), True, ""


def _estimate(matrix: Matrix) -> float:
    values = torch.cat([block.to(torch.float32) for _, block in matrix.blocks(0)])
    values = values if values.shape[1] <= values.shape[0] else values.T

    def apply(vector: torch.Tensor) -> torch.Tensor:
        return (values.T @ (values @ vector.to(torch.float32))).to(torch.float64)

    return math.sqrt(max(largest_eigenpair(apply, values.shape[1], torch.float64, SAMPLE_SLACK)[0], 0.0))


def scaled_norm(tensor: torch.Tensor, scale: torch.Tensor, transposed: bool = False) -> float | None:
    """An upper bound on ‖W diag γ‖, W as (out, in); transposed: it is stored as (in, out). None where it is not proved.

    Each product w γ is rounded once, so the matrix at hand is within u ‖W diag γ‖_F of the one meant.
    """
    values = tensor.reshape(tensor.shape[0], -1)
    matrix = _normalized(values.T if transposed else values)
    if matrix is None or matrix.narrow > MOST_GRAM or matrix.values.shape[1] % len(scale):
        return None
    scale = scale.repeat_interleave(matrix.values.shape[1] // len(scale))  # a kernel reads every channel once per tap
    size = float(scale.abs().max())
    if not 0 < size < math.inf:
        return 0.0 if size == 0 else None
    exponent = math.frexp(size)[1]
    gram = matrix.gram(times_power_of_two(scale, -exponent))
    lost = 2 * UNIT_ROUNDOFF * math.sqrt(float(gram.diagonal().sum()))
    norm = (gram_norm(gram, matrix.terms) + lost) * (1 + 8 * UNIT_ROUNDOFF)
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


def _normalized(values: torch.Tensor) -> Matrix | None:
    """Scaled so that the largest entry is about 1; None where an entry is not finite."""
    largest = max((float(block.abs().max()) for _, block in Matrix(values).blocks(0)), default=0.0)
    return Matrix(values, math.frexp(largest)[1] if largest else 0) if math.isfinite(largest) else None
