"""Certified spectral norms of dense matrices: Lanczos guesses, a Cholesky factorization proves.

For the Gram matrix G = AᴴA, ‖A‖² ≤ c if and only if cI − G is positive semidefinite. A floating-point Cholesky
factorization that runs to completion proves this up to a perturbation that Higham bounds (Accuracy and Stability of
Numerical Algorithms, Theorem 10.3): |ΔB_ij| ≤ γ_{n+1}/(1 − γ_{n+1}) · √(b_ii b_jj), hence ‖ΔB‖ ≤ γ' tr B. Adding the
rounding of G itself, at most γ_m ‖A‖_F², gives an upper bound that is a theorem and sits about 1e-8 above the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.blas import dsymv
from scipy.linalg.lapack import dpotrf

from normscope.core.magnitude import INFINITY, ZERO, Magnitude
from normscope.core.rounding import SQUARES_LOST, UNIT_ROUNDOFF

SLACK = 1e-8  # how far above Lanczos' value the first proof is tried
MOST_LANCZOS_STEPS = 300
BATCHED_SIZE = 96  # below this size a batch is handled in one call
MOST_TURNS = 40  # of a proof: the slack grows fourfold whenever a guess was too low, so twenty turns pass any bound


def spectral_norm(matrices: torch.Tensor, perturbation: float = 0.0, at_least: Magnitude = ZERO, slack: float = SLACK) -> Magnitude:
    """An upper bound, tight to about `slack`, on the largest spectral norm in a batch (…, m, n) of matrices.

    perturbation: a bound on ‖A − A'‖_F, where A' is the matrix meant and A the one at hand.
    at_least: a bound that is known to be reached elsewhere; matrices proved to be below it cost no more than the proof.
    """
    *_, rows, columns = matrices.shape
    if matrices.numel() == 0:
        return at_least
    precise = torch.complex128 if matrices.is_complex() else torch.float64
    matrices = matrices.detach().reshape(-1, rows, columns).to(precise)
    frobenius = _largest_frobenius(matrices)
    if math.isnan(frobenius):
        return INFINITY
    exponent = 0
    if not 1e-100 < frobenius < 1e100:  # squares would overflow or vanish: scale by a power of two, exactly
        largest = float(matrices.abs().max())
        if largest == 0 or math.isinf(largest):
            return max(at_least, Magnitude(perturbation)) if largest == 0 else INFINITY
        exponent = math.frexp(largest)[1]
        matrices = matrices * 2.0 ** (-exponent // 2) * 2.0 ** (-exponent - -exponent // 2)  # 2^1074 alone overflows
        frobenius = _largest_frobenius(matrices)
    frobenius_squared = frobenius**2
    scale = Magnitude.from_log(exponent * math.log(2))
    if at_least > (scale * frobenius + perturbation).widened(1e-12):
        return at_least
    size, inner = sorted((rows, columns))
    if size == 1:
        squared = frobenius_squared * (1 + 4 * inner * UNIT_ROUNDOFF)
    else:
        together = matrices[None] if size < BATCHED_SIZE else matrices[:, None]
        grams = (some.mH @ some if columns <= rows else some @ some.mH for some in together)
        error = product_error(inner, frobenius_squared, matrices.is_complex())
        squared = largest_eigenvalue(grams, frobenius_squared, error, float((at_least / scale) ** 2), slack)
    norm = Magnitude.from_log(math.log(squared) / 2 + exponent * math.log(2))
    return max(at_least, (norm + perturbation).widened(8 * UNIT_ROUNDOFF))


def product_error(terms: int, frobenius_squared: float, is_complex: bool) -> float:
    """‖computed − exact‖_F of a Gram matrix AᴴA, whose entries are sums of `terms` products."""
    return _roundoff(is_complex) * (terms + 8) * frobenius_squared


def largest_eigenvalue(grams: Iterable[torch.Tensor], most: float, error: float, at_least: float, slack: float) -> float:
    """An upper bound, tight to about `slack`, on every eigenvalue of positive semidefinite matrices, (some, n, n) at a time.

    most: a bound on every trace. error: ‖given − meant‖_F of each matrix, at most. at_least: what matrices are compared with first.
    """
    proved, roundoff, size = at_least, 0.0, 0
    for some in grams:
        size, roundoff = some.shape[-1], _roundoff(some.is_complex())
        proved, slack = (_prove_together if size < BATCHED_SIZE else _prove_one_by_one)(some, proved, most, slack)
    return proved + roundoff * ((size + 2) * size * proved + 4 * (proved + most)) + error


def _roundoff(is_complex: bool) -> float:
    return 1.01 * UNIT_ROUNDOFF * (8 if is_complex else 2)


def gram_norms(grams: torch.Tensor, terms: int) -> torch.Tensor:
    """Upper bounds on ‖A‖, one for each Gram matrix A Aᵀ of a batch (sets, m, m) that was computed as sums of `terms` products."""
    size = grams.shape[-1]
    squares = grams.diagonal(dim1=-2, dim2=-1).sum(-1)
    tried = torch.where(squares > 0, torch.linalg.eigvalsh(grams)[:, -1] * (1 + SLACK), 0.0) if size > 1 else squares
    shifted = -grams
    shifted.diagonal(dim1=-2, dim2=-1).add_(tried[:, None])
    proved = torch.where(torch.linalg.cholesky_ex(shifted).info == 0, tried, squares) if size > 1 else squares
    roundoff = 2.02 * UNIT_ROUNDOFF * ((size + 2) * size * proved + (terms + 8) * squares + 4 * proved)
    return ((proved + roundoff).sqrt() * (1 + 8 * UNIT_ROUNDOFF) + SQUARES_LOST).nan_to_num(math.inf, math.inf)


def _largest_frobenius(matrices: torch.Tensor) -> float:
    real = torch.view_as_real(matrices) if matrices.is_complex() else matrices
    return float(torch.linalg.vector_norm(real.flatten(1), dim=1).max()) * (1 + (real[0].numel() + 8) * UNIT_ROUNDOFF)


def _prove_together(grams: torch.Tensor, floor: float, most: float, slack: float) -> tuple[float, float]:
    """c ≥ floor such that cI − G passes Cholesky for every matrix of the batch; c only grows, so what passed stays proved.

    most: the largest trace, which needs no proof: what is left when guesses fail, however small, large or odd the entries are.
    The largest eigenvalue is at least `most` over the rank, so that c > 0 from the start. Also the slack that this took.
    """
    waiting = grams[torch.linalg.matrix_norm(grams).argsort(descending=True)] if len(grams) > 1 else grams
    bound = floor or max(most / grams.shape[-1], _dense_eigenvalue(waiting[0]) * (1 + slack))
    for _ in range(len(waiting) + MOST_TURNS):  # each matrix may raise the bound once, when it is the largest so far
        shifted = -waiting
        shifted.diagonal(dim1=-2, dim2=-1).add_(bound)
        failed = torch.linalg.cholesky_ex(shifted).info != 0
        if not failed.any():
            return bound, slack
        waiting = waiting[failed]
        bound, slack = _raise(bound, _dense_eigenvalue(waiting[0]) * (1 + slack), slack)
    return max(bound, most), slack


def _prove_one_by_one(grams: torch.Tensor, floor: float, most: float, slack: float) -> tuple[float, float]:
    """The same for large matrices, one at a time, with Lanczos only where the proof fails."""
    bound = floor
    for gram in grams:
        proved = _proved(gram, bound, most, slack)
        if proved is None:
            return max(bound, most), slack
        bound, slack = proved
    return bound, slack


def _proved(gram: torch.Tensor, bound: float, most: float, slack: float) -> tuple[float, float] | None:
    """A bound, at least the given one, for which bound·I − G passes Cholesky, and the slack that this took; None if none does."""
    bound = bound or max(most / len(gram), _largest_eigenvalue(gram, slack) * (1 + slack))
    for _ in range(MOST_TURNS):
        if _below(gram, bound):
            return bound, slack
        bound, slack = _raise(bound, _largest_eigenvalue(gram, slack) * (1 + slack), slack)
    return None


def gram_norm(gram: torch.Tensor, terms: int, slack: float = SLACK) -> float:
    """An upper bound on ‖A‖, tight to about `slack`, from one Gram matrix AᵀA that was computed as sums of `terms` products.

    ‖A‖_F² is its trace, of numbers ≥ 0, so that rounding is relative. The entries of A are of size about 1. What stands below the
    diagonal is not read.
    """
    size = len(gram)
    squares = float(gram.diagonal().sum()) * (1 + 2.02 * UNIT_ROUNDOFF * (terms + size + 8)) + size * SQUARES_LOST**2
    if not squares < math.inf:
        return math.inf
    proved = squares
    if size > 1 and squares > 1e-200:
        found = _proved(gram, 0.0, squares, slack)
        proved = squares if found is None else min(found[0], squares)
    roundoff = 2.02 * UNIT_ROUNDOFF * ((size + 2) * size * proved + (terms + 8) * squares + 4 * proved)
    return math.sqrt(proved + roundoff) * (1 + 8 * UNIT_ROUNDOFF) + SQUARES_LOST


def _dense_eigenvalue(gram: torch.Tensor) -> float:
    """The largest one, as a guess; 0 where LAPACK does not converge."""
    try:
        return float(torch.linalg.eigvalsh(gram)[-1])
    except torch.linalg.LinAlgError:
        return 0.0


def _below(gram: torch.Tensor, bound: float) -> bool:
    """Whether Cholesky factorizes bound·I − G; of a real G the diagonal and what stands above it are read."""
    shifted = -gram
    shifted.diagonal().add_(bound)
    if gram.is_complex():
        return int(torch.linalg.cholesky_ex(shifted).info) == 0
    factor, info = dpotrf(shifted.numpy().T, lower=1, clean=0, overwrite_a=1)  # by columns, the upper half is the lower one
    return info == 0 and bool(np.isfinite(factor.diagonal()).all())  # not every LAPACK stops at NaN


def _raise(bound: float, raised: float, slack: float) -> tuple[float, float]:
    """A larger bound to try, even if the guess was not accurate enough for this slack."""
    if raised > bound:
        return raised, slack
    return bound * (1 + 4 * slack), 4 * slack


def _largest_eigenvalue(gram: torch.Tensor, slack: float) -> float:
    """To about a tenth of `slack`; nothing is proved here."""
    if gram.is_complex():
        return largest_eigenpair(lambda vector: gram @ vector, len(gram), gram.dtype, slack)[0]
    columns = gram.numpy().T
    return largest_eigenpair(
        lambda vector: torch.from_numpy(dsymv(1.0, columns, vector.numpy(), lower=1)), len(gram), gram.dtype, slack
    )[0]


def largest_eigenpair(
    apply: Callable[[torch.Tensor], torch.Tensor], size: int, dtype: torch.dtype, slack: float
) -> tuple[float, torch.Tensor]:
    """The largest eigenvalue of a positive semidefinite operator and its vector, by Lanczos; nothing is proved here.

    Where the operator overflows, the last vector that it could be applied to, with eigenvalue 0.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    basis = torch.empty(min(size, MOST_LANCZOS_STEPS), size, dtype=dtype)
    basis[0] = vector / torch.linalg.vector_norm(vector)
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(len(basis)):
        image = apply(basis[step])
        if not bool(image.isfinite().all()):
            break
        diagonal.append(float(torch.vdot(basis[step], image).real))
        known = basis[: step + 1]
        for _ in range(2):  # full reorthogonalization, twice is enough
            image = image - known.T @ (known.conj() @ image)
        beside.append(float(torch.linalg.vector_norm(image)))
        done = step + 1 == len(basis) or beside[-1] <= 1e-14 * max(diagonal)
        if done or (step + 1) % 8 == 0:
            values, vectors = eigh_tridiagonal(np.array(diagonal), np.array(beside[:-1]))
            # the error of a Ritz value is at most its residual, squared over the gap to the next one
            residual = beside[-1] * abs(vectors[-1, -1])
            gap = max(values[-1] - values[-2], 1e-3 * values[-1]) if len(values) > 1 else values[-1]
            if done or residual**2 / max(gap, 1e-300) <= slack / 10 * values[-1]:
                ritz = torch.from_numpy(vectors[:, -1].copy()).to(dtype)
                return float(values[-1]), known.T @ ritz
        basis[step + 1] = image / beside[-1]
    return 0.0, basis[len(diagonal)]


def frobenius_norm(weight: torch.Tensor) -> Magnitude:
    """√Σ |w|², computed without overflow; infinite where an entry is."""
    weight = weight.detach()
    weight = (torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight).to(torch.float64)
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest == 0 or math.isinf(largest):
        return Magnitude(largest)
    return Magnitude(largest) * float(torch.linalg.vector_norm(weight / largest))
