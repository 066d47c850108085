"""Norms of sets of entries from Gram matrices, as columns come, at every scale and in both types."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from normscope.certify.grams import Grams
from normscope.certify.perturbed import perturbed_norm
from normscope.core.rounding import length
from normscope.operators.dense import gram_norms
from normscope.rules.remainder import Sets


@pytest.mark.parametrize("seed", range(6))
def test_uncertain_parts_of_a_matrix(seed):
    generator = torch.Generator().manual_seed(seed)
    outputs, width, symbols = 4, 12, 6
    matrix, columns, rows = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((outputs, width), (symbols, outputs), (symbols, width))
    )
    for size in (1.0, 0.1, 1e-3, 0.0):
        signs = [torch.tensor(choice, dtype=torch.float64) for choice in itertools.product((-1.0, 1.0), repeat=symbols)]
        exact = max(float(torch.linalg.matrix_norm(matrix + size * (columns.T * sign) @ rows, 2)) for sign in signs)
        found = perturbed_norm(matrix, size * columns, rows)
        assert exact <= found <= exact * (1 + 1.5 * size + 1e-6)


def test_norms_from_gram_matrices():
    matrices = torch.randn(7, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices[3] = 0
    exact = torch.linalg.matrix_norm(matrices, 2)
    found = gram_norms(matrices @ matrices.mT, 9)
    assert bool((found >= exact).all()) and bool((found <= exact * (1 + 1e-6) + 1e-12).all())


class Entries(NamedTuple):
    """A node, as far as `Grams` look at it."""

    shape: tuple[int, ...]


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e12, 1e-25, 1e-160])
@pytest.mark.parametrize("single", [False, True])
def test_norms_of_sets_as_columns_come(single, size):
    shape, sets = (1, 3, 5), Sets.along((1, 3, 5), (-1,))
    columns = torch.randn(300, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size
    found = Grams(Entries(shape), sets, single)
    for part in columns.split(37):
        found.add(part)
    exact = torch.linalg.matrix_norm(columns.reshape(300, 3, 5).permute(1, 2, 0), 2)
    norms = found.norms(length(columns, 0))
    assert bool((norms >= exact).all())
    assert size < 1e-20 or bool((norms <= exact * (1.001 if single else 1 + 1e-6)).all())


def test_columns_that_float32_rounds_down():
    """1 + 2^-25 becomes 1: what is lost is part of the bound, and the mutant without it is caught."""
    columns = torch.full((2000, 1, 4), 1 + 2.0**-25, dtype=torch.float64)
    found = Grams(Entries((1, 4)), Sets.whole((1, 4)), single=True)
    found.add(columns)
    exact = math.sqrt(8000) * (1 + 2.0**-25)
    assert float(found.norms(length(columns, 0))) >= exact > float(gram_norms(found.grams.double(), 1))
