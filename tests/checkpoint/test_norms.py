"""Norms of stored tensors: proved above, and tight; the same for every size of block, dtype and scale."""

from __future__ import annotations

import math

import pytest
import torch

from normscope._checkpoint import norms
from normscope._checkpoint.norms import Matrix, Numbers, head_norms, scaled_norm

SHAPES = ((1, 1), (1, 9), (9, 1), (2, 2), (40, 7), (7, 40), (120, 130), (300, 100), (6, 3, 2, 2), (5,), ())
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def random(shape, dtype=torch.float64, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)).double()


def measured(tensor: torch.Tensor, sample: bool = False) -> Numbers:
    return norms.measured(Matrix(tensor), sample)


@pytest.mark.quick(25)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sound_and_tight(shape, dtype, monkeypatch):
    tensor = random(shape, dtype)
    exact = as_matrix(tensor)
    truth = float(torch.linalg.matrix_norm(exact, 2))
    for block in (64, 1 << 26):
        monkeypatch.setattr(norms, "BLOCK_BYTES", block)
        found = measured(tensor)
        assert truth * (1 - 1e-13) <= found.spectral_norm <= truth * (1 + 1e-6)
        assert found.frobenius_norm == pytest.approx(float(exact.norm()), rel=1e-12)
        assert found.rms_to_inf == pytest.approx(float(exact.norm(dim=1).max()) * math.sqrt(exact.shape[1]), rel=1e-9)
        assert found.certified and found.largest == float(exact.abs().max())
    estimate = measured(tensor, sample=True)
    assert estimate.spectral_norm <= truth * (1 + 1e-5) and estimate.spectral_norm >= 0.9 * truth


@pytest.mark.parametrize("scale", [1e-250, 1e-30, 1e30, 1e250])
def test_scales_that_squares_do_not_survive(scale):
    tensor = random((30, 20))
    truth = float(torch.linalg.matrix_norm(tensor, 2))
    assert measured(tensor * scale).spectral_norm / scale == pytest.approx(truth, rel=1e-7)
    assert scaled_norm(Matrix(tensor * scale), torch.ones(20, dtype=torch.float64)) / scale == pytest.approx(truth, rel=1e-7)


def test_lowest_rank_and_nearly_zero():
    tensor = torch.ones(200, 150, dtype=torch.float64)
    tensor[0, 0] = 1e-300
    assert measured(tensor).spectral_norm >= float(torch.linalg.matrix_norm(tensor, 2)) * (1 - 1e-12)
    assert measured(torch.zeros(4, 3)).spectral_norm == 0 and measured(torch.zeros(0, 3)).spectral_norm == 0


def test_what_has_no_norm_says_so():
    bad = random((4, 3))
    bad[1, 1] = math.nan
    found = measured(bad)
    assert found.spectral_norm is None and found.not_finite == 1 / 12 and not found.certified
    assert measured(torch.arange(4)).spectral_norm is None
    assert measured(torch.tensor([1.0, 0.0, 1.0, 2.0])).ones == 0.5


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (100, 100), (120, 300)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_with_gain(shape, transposed):
    weight, scale = random(shape, torch.bfloat16), random(shape[0 if transposed else 1], seed=1)
    truth = float(torch.linalg.matrix_norm((weight.double().T if transposed else weight.double()) * scale, 2))
    assert truth * (1 - 1e-13) <= scaled_norm(Matrix(weight), scale, transposed) <= truth * (1 + 1e-6)


def test_heads():
    weight, scale, shift, bias = random((24, 10), torch.float32), random(10, seed=1), random(10, seed=2), random(24, seed=3)
    for head, (norm, moved) in enumerate(head_norms(weight, 4, scale, shift, bias)):
        own = weight.double()[6 * head : 6 * head + 6]
        truth, offset = float(torch.linalg.matrix_norm(own * scale, 2)), float((own @ shift + bias[6 * head : 6 * head + 6]).norm())
        assert truth <= norm <= truth * (1 + 1e-6) and offset * (1 - 1e-14) <= moved <= offset * (1 + 1e-9)


@pytest.mark.parametrize("size", [5e-324, 1e-308, 1.7e308])
def test_norms_that_may_not_be_in_float64_are_not_called_proved(size):
    found = measured(torch.full((3, 3), size, dtype=torch.float64))
    assert found.spectral_norm is None and not found.certified and "float64" in found.note
