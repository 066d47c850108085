"""Spectral norms: never below the truth, and above it by no more than a few parts in 10⁸."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import normscope as ns
from normscope.core.magnitude import Magnitude
from normscope.operators import dense
from normscope.operators.dense import frobenius_norm, spectral_norm
from tests.cases import Function, randn

TIGHT = 1e-7


def hadamard(size: int) -> Tensor:
    """An orthogonal matrix with entries ±2^-k, for size = 4^k: products with it are exact."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def with_singular_values(values: list[float], rows: int, columns: int) -> Tensor:
    """H diag(values) Hᵀ, exact in float64 where the values are small whole numbers."""
    inner = torch.zeros(rows, columns, dtype=torch.float64)
    inner[range(len(values)), range(len(values))] = torch.tensor(values, dtype=torch.float64)
    return hadamard(rows) @ inner @ hadamard(columns)


SPECTRA = {
    "distinct": list(range(1, 17)),
    "clustered": [1000.0] * 8 + [999.0] * 8,
    "all equal": [3.0] * 16,
    "rank one": [5.0],
    "rank deficient": [7.0, 7.0, 2.0],
    "wide range": [2.0**20, 1.0],
    "one above many": [1025.0] + [1024.0] * 15,
}


@pytest.mark.quick(18)
@pytest.mark.parametrize("rows, columns", [(16, 16), (16, 64), (256, 16), (64, 64), (256, 256)])
@pytest.mark.parametrize("name", SPECTRA)
def test_known_singular_values(name, rows, columns):
    truth = max(SPECTRA[name])
    bound = float(spectral_norm(with_singular_values(SPECTRA[name], rows, columns)))
    assert truth <= bound <= truth * (1 + TIGHT)


def exact_norm(matrix: Tensor) -> mpmath.mpf:
    """The largest singular value with forty digits."""
    with mpmath.workdps(40):
        entries = mpmath.matrix(matrix.tolist())
        squared = entries.T * entries if matrix.shape[1] <= matrix.shape[0] else entries * entries.T
        return mpmath.sqrt(max(mpmath.eigsy(squared, eigvals_only=True)))


def log_ratio(bound: Magnitude, truth: mpmath.mpf) -> float:
    """ln(bound/truth), computed with forty digits."""
    with mpmath.workdps(40):
        return float(mpmath.mpf(bound.log) - mpmath.log(truth))


SHAPES = [(1, 1), (1, 7), (7, 1), (2, 2), (3, 8), (8, 8), (12, 5)]


@pytest.mark.quick(24)
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e-8, 1.0, 1e8, 1e150, 1e300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_never_below_forty_digits(shape, scale):
    for seed in range(3):
        matrix = randn(*shape, seed=seed).double() * scale
        assert 0 <= log_ratio(spectral_norm(matrix), exact_norm(matrix)) <= TIGHT


def test_subnormal_and_extreme_entries():
    for matrix in ([[5e-324, 0.0], [0.0, 5e-324]], [[1.7e308, 1.7e308], [1.7e308, 1.7e308]], [[1e300, 1e-300], [0.0, 1.0]]):
        matrix = torch.tensor(matrix, dtype=torch.float64)
        assert 0 <= log_ratio(spectral_norm(matrix), exact_norm(matrix)) <= TIGHT


def test_zero_and_empty():
    assert spectral_norm(torch.zeros(4, 3)) == 0
    assert spectral_norm(torch.zeros(0, 3)) == 0
    assert spectral_norm(torch.zeros(5, 4, 3)) == 0
    assert frobenius_norm(torch.zeros(4, 3)) == 0


def test_not_finite_entries_have_no_finite_norm():
    for entry in (math.inf, math.nan):
        assert not spectral_norm(torch.tensor([[1.0, entry], [0.0, 1.0]])).finite


@pytest.mark.parametrize("size", [1, 5, 60, 130])
def test_batch_is_the_largest_of_its_members(size):
    batch = torch.stack([randn(size, size + 3, seed=seed).double() * 10.0 ** (seed - 2) for seed in range(5)])
    whole, apart = spectral_norm(batch), [spectral_norm(matrix) for matrix in batch]
    truth = float(torch.linalg.matrix_norm(batch, 2).max())
    assert float(max(apart)) * (1 - TIGHT) <= float(whole) <= truth * (1 + TIGHT)
    assert truth * (1 - 1e-13) <= float(whole)


@pytest.mark.parametrize("size", [1, 4, 50, 110])
def test_complex(size):
    matrix = torch.complex(randn(3, size, size).double(), randn(3, size, size, seed=1).double())
    truth = np.linalg.svd(matrix.numpy(), compute_uv=False).max()
    assert truth * (1 - 1e-13) <= float(spectral_norm(matrix)) <= truth * (1 + TIGHT)


@pytest.mark.parametrize("size", [100, 400, 1000])
def test_large_random(size):
    matrix = randn(size, size + 20).double()
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    assert truth * (1 - 1e-13) <= float(spectral_norm(matrix)) <= truth * (1 + TIGHT)


def test_a_perturbation_widens_the_bound_by_itself():
    matrix = randn(5, 5).double()
    assert float(spectral_norm(matrix, 0.5)) == pytest.approx(float(spectral_norm(matrix)) + 0.5)


def test_a_known_bound_is_never_lowered():
    matrix = randn(5, 5).double()
    bound = spectral_norm(matrix)
    assert bound * 2 <= spectral_norm(matrix, at_least=bound * 2) <= bound * 2 * (1 + TIGHT)
    assert spectral_norm(matrix, at_least=bound / 2) >= float(torch.linalg.matrix_norm(matrix, 2))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_frobenius(scale):
    matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64) * scale
    assert frobenius_norm(matrix).log == pytest.approx(math.log(5) + math.log(scale), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_operator_norm_of_a_matrix(dtype):
    matrix = (4 * randn(6, 4)).to(dtype)
    truth = float(torch.linalg.matrix_norm(matrix.double(), 2))
    bracket = ns.certify.operator_norm(matrix)
    assert truth * (1 - TIGHT) <= float(bracket.lower) <= truth * (1 + 1e-13)
    assert truth * (1 - 1e-13) <= float(bracket.upper) <= truth * (1 + TIGHT)
    assert bracket.witness.replay() == bracket.lower


def test_operator_norm_of_affine_modules():
    module = torch.nn.Sequential(
        torch.nn.Conv1d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(18, 4), torch.nn.AvgPool1d(2)
    ).double()
    matrix = torch.autograd.functional.jacobian(lambda x: module(x[None])[0], randn(2, 8).double()).reshape(2, 16)
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    bracket = ns.certify.operator_norm(module, (2, 8))
    assert truth * (1 - 1e-12) <= float(bracket.upper) <= truth * (1 + TIGHT)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ns.certify.operator_norm(torch.nn.ReLU(), (3,)),
        lambda: ns.certify.operator_norm(torch.nn.Conv1d(1, 1, 1)),
        lambda: ns.certify.operator_norm(torch.zeros(3)),
        lambda: ns.certify.operator_norm(torch.zeros(1, 2, 3, 3), (3, 8, 8)),
        lambda: ns.certify.operator_norm(torch.zeros(1, 2, 3, 3), (8,)),
        lambda: ns.certify.operator_norm(torch.full((2, 2), math.nan)),
    ],
    ids=["not affine", "no shape", "a vector", "wrong channels", "wrong axes", "NaN"],
)
def test_operator_norm_refuses(call):
    with pytest.raises(ns.InputError) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_vanished_in_rounding_is_not_zero():
    """(1e20 x + x) − 1e20 x is x, but float64 computes 0."""
    assert float(spectral_norm(torch.zeros(3, 2), perturbation=0.5)) >= 0.5
    assert float(ns.certify.operator_norm(Function(lambda x: (1e20 * x + x) - 1e20 * x), (2,)).upper) >= 1


@pytest.mark.quick(20)
@pytest.mark.parametrize("size", [1, 3, 60, 100])
@pytest.mark.parametrize("scale", [0.0, 5e-324, 1e-310, 1e-170, 1.0, 1e170, 1e300])
@pytest.mark.parametrize("first", [0.0, 1.0])
def test_zero_members_of_a_batch_end(size, scale, first):
    """As for a pattern of dead units, or a group of a pruned convolution, wherever it stands in the batch."""
    matrix = torch.eye(size, dtype=torch.float64) * scale
    batch = torch.stack([matrix * first, matrix * (1 - first)])
    for known in (0.0, scale / 2, scale, 1e308):
        bound = spectral_norm(batch, at_least=Magnitude(known))
        least = max(Magnitude(scale), Magnitude(known))
        assert least <= bound <= least.widened(TIGHT)


def test_guesses_that_are_too_low_end():
    """When no guess helps, what is proved is the Frobenius norm."""
    batch = torch.stack([randn(100, 100, seed=seed).double() for seed in range(2)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_largest_eigenvalue", lambda *_: 0.0)
        patch.setattr(dense, "_dense_eigenvalue", lambda *_: math.nan)
        for some in (batch, batch[:, :20, :20]):
            truth = float(torch.linalg.matrix_norm(some, 2).max())
            assert truth <= float(spectral_norm(some)) <= 10 * truth
        patch.setattr(dense, "_below", lambda *_: False)
        assert float(spectral_norm(batch)) >= float(torch.linalg.matrix_norm(batch).max())


@pytest.mark.parametrize("below", [0.0, 7.0, math.nan])
def test_a_gram_matrix_is_read_from_its_diagonal_upwards(below):
    matrix = randn(130, 120, seed=0).double()
    upper = torch.ones(120, 120).triu().bool()
    gram = torch.where(upper, matrix.T @ matrix, below)
    truth = float(torch.linalg.matrix_norm(matrix, 2))
    assert truth <= dense.gram_norm(gram, 130) <= truth * (1 + TIGHT)


def test_a_factorization_with_nan_proves_nothing():
    """Some of LAPACK's implementations compare pivots with 0 alone, which NaN passes."""
    gram = torch.eye(120, dtype=torch.float64)
    gram[3, 90] = math.nan
    assert not dense._below(gram, 10.0) and dense._below(torch.eye(120, dtype=torch.float64), 10.0)


@pytest.mark.parametrize("value", [0.0, 5e-324, 1.0, 1e300, math.inf, math.nan])
def test_lanczos_ends_on_every_operator(value):
    found, vector = dense.largest_eigenpair(lambda v: value * v, 7, torch.float64, 1e-8)
    assert bool(vector.isfinite().all()) and found == (pytest.approx(value) if math.isfinite(value) else 0.0)


def test_a_complex_entry_is_two_numbers():
    weight = torch.randn(3, 4, dtype=torch.complex64)
    assert float(frobenius_norm(weight.conj())) == pytest.approx(
        float(weight.to(torch.complex128).abs().square().sum().sqrt()), rel=1e-12
    )
