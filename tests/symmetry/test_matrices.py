"""Linear groups in balance: the least sum of squares on the orbit, which no point of the orbit misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.symmetry.matrices import Matrices
from tests.networks import Function
from tests.symmetry.cases import CASES
from tests.symmetry.layers import TANH, linear


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
    report = ns.symmetries(case.model(), case.example, mode=case.mode)
    start = report.numerics.parameters
    for group in report.of_kind("linear"):
        found = group.balanced(start)
        again = group.balanced(group.transform(start, torch.Generator().manual_seed(0)))
        torch.testing.assert_close(report.numerics.outputs(found), report.numerics.outputs(start), rtol=1e-9, atol=1e-9)
        for parameter in group.parameters:  # equal up to a rotation of each block
            assert float(found[parameter].norm()) == pytest.approx(float(again[parameter].norm()), rel=1e-9)
        at_rest = group.balanced(found)
        assert all(float((at_rest[key] - found[key]).abs().max()) <= 1e-12 for key in found)


def halves(change: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Four features, of which something changes the halves, before a linear layer."""
    return nn.Sequential(linear(3, 4), Function(lambda h: change(h[:, :2], h[:, 2:])), linear(4, 2), TANH())


class Branches(nn.Module):
    def __init__(self, *biases: bool) -> None:
        super().__init__()
        self.branches, self.joint = nn.ModuleList(linear(3, 2, bias) for bias in biases), linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(torch.cat([branch(x) for branch in self.branches], 1)).tanh()


PARTS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {  # model, sizes of the blocks of every linear group
    "two branches": (lambda: Branches(True, True), [(2, 2)]),
    "two branches, one bias": (lambda: Branches(False, True), [(2, 2)]),
    "halves joined again": (lambda: halves(lambda a, b: torch.cat([b, a], 1)), [(4,)]),
    "half of it scaled": (lambda: halves(lambda a, b: torch.cat([a, 3 * b], 1)), [(2, 2)]),
    "half of it added": (lambda: halves(lambda a, b: torch.cat([a, b], 1) + nn.functional.pad(3 * b, (0, 2))), [(2,)]),
    "half of it left out": (lambda: nn.Sequential(linear(3, 4), Function(lambda h: h[:, :2]), linear(2, 2), TANH()), [(2,)]),
    "all of it turned": (lambda: nn.Sequential(linear(3, 4), Function(lambda h: h.flip(1)), linear(4, 2), TANH()), [(4,)]),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", PARTS)
def test_what_is_joined_from_parts_mixes_within_each_of_them(name):
    make, blocks = PARTS[name]
    torch.manual_seed(0)
    report = ns.symmetries(make(), normal(5, 3).float())
    found = [tuple(algebra.size for algebra in group.algebras) for group in report.of_kind("linear")]
    assert (found, report.check(), report.completeness().named <= report.completeness().null) == (blocks, [], True)
