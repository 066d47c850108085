"""Linear groups in balance: the least sum of squares on the orbit, which no point of the orbit misses."""

from __future__ import annotations

import pytest
import torch

import normscope as ns
from normscope.symmetry.matrices import Matrices
from tests.symmetry.cases import CASES


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram(rows: torch.Tensor) -> torch.Tensor:
    return rows @ rows.mT


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("columns", [9, 3], ids=["full rank", "rank below the size"])
def test_the_least_sum_of_squares_is_twice_the_nuclear_norm_of_the_product(columns, scale):
    """min ‖A P‖² + ‖A^{-T} Q‖² = 2 ‖Pᵀ Q‖_*."""
    first, second = scale * normal(5, columns), normal(5, columns, seed=1)
    here, there = Matrices(5).balancing(gram(first), gram(second))
    torch.testing.assert_close(here.mT @ there, torch.eye(5, dtype=torch.float64))
    least = 2 * torch.linalg.matrix_norm(first.mT @ second, "nuc")
    torch.testing.assert_close((here @ first).square().sum() + (there @ second).square().sum(), least, rtol=1e-9, atol=0)


def test_planes_that_are_turned_are_stretched_alone():
    algebra = Matrices(4, planes=((0, 2), (1, 3)))
    first, second = normal(4, 6), 7 * normal(4, 6, seed=1)
    here, there = algebra.balancing(gram(first), gram(second))
    torch.testing.assert_close(here, here.diagonal().diag())
    torch.testing.assert_close(here @ there, torch.eye(4, dtype=torch.float64))
    for plane in ([0, 2], [1, 3]):
        torch.testing.assert_close((here @ first)[plane].norm(), (there @ second)[plane].norm())


def test_nothing_to_balance():
    zero = torch.zeros(3, 3, dtype=torch.float64)
    here, there = Matrices(3).balancing(gram(normal(3, 4)), zero)
    assert torch.equal(here, torch.eye(3, dtype=torch.float64)) and torch.equal(there, here)


@pytest.mark.parametrize("name", ["attention", "attention without biases", "no activation, convolutions"])
def test_groups_in_balance_compute_the_same_and_forget_the_point_of_the_orbit(name):
    case = CASES[name]
    report = ns.symmetries(case.model(), case.example, case.mode)
    start = report.numerics.parameters
    for group in report.of_kind("linear"):
        found = group.balanced(start)
        again = group.balanced(group.transform(start, torch.Generator().manual_seed(0)))
        torch.testing.assert_close(report.numerics.outputs(found), report.numerics.outputs(start), rtol=1e-9, atol=1e-9)
        for parameter in group.parameters:  # equal up to a rotation of each block
            assert float(found[parameter].norm()) == pytest.approx(float(again[parameter].norm()), rel=1e-9)
        at_rest = group.balanced(found)
        assert all(float((at_rest[key] - found[key]).abs().max()) <= 1e-12 for key in found)
