"""Corollaries 18 and 19 as calculators: products by hand, with and without normalizers, and labelled with what they do not say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope.bounds.iterations import RESIDUAL, training_cost
from normscope.core.errors import InputError


def scaled(factor: float) -> nn.Linear:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(factor * torch.eye(4))
        layer.bias.zero_()  # so that deep chains give numbers at zero
    return layer


def normalizer(variance: float) -> nn.BatchNorm1d:
    layer = nn.BatchNorm1d(4, eps=0.0)
    layer.running_var.fill_(variance)
    return layer


def test_products_by_hand():
    """s = (2, 3, 5), two BN layers with ‖1/σ‖ = 2/2 and 2/4: σ^-1 = 1 is the larger, whatever the number behind."""
    model = nn.Sequential(scaled(2), normalizer(4.0), nn.ReLU(), scaled(3), normalizer(16.0), nn.ReLU(), scaled(5)).eval()
    first, second = training_cost(model, torch.zeros(1, 4), alpha=0.1)
    assert float(first.behind) == pytest.approx(15) and float(second.behind) == pytest.approx(5)
    assert float(first.least_iterations) == pytest.approx(150) and float(first.evaluations) == pytest.approx(1500)
    assert float(first.normalizers) == pytest.approx(1) and float(second.normalizers) == pytest.approx(1)
    model[1].running_var.fill_(400.0)
    first, second = training_cost(model, torch.zeros(1, 4), alpha=0.1)
    assert float(first.normalizers) == pytest.approx(0.25) and float(second.normalizers) == pytest.approx(0.5)
    assert float(first.evaluations_normalized) == pytest.approx(1500 / 4)
    assert float(first.cited_evaluations) == pytest.approx((15 / 4) ** 2 * 1000)


def test_without_normalizers_nothing_is_saved():
    (row,) = training_cost(nn.Sequential(scaled(2), nn.ReLU(), scaled(7)), torch.zeros(1, 4))
    assert row.evaluations_normalized == row.evaluations


def test_a_product_beyond_floats():
    costs = training_cost(nn.Sequential(*(scaled(1e5) for _ in range(80))), torch.zeros(1, 4))
    assert costs[0].least_iterations.log10 == pytest.approx(397)  # 79 layers behind the first, and 1/α = 100
    assert "e+397" in str(costs) and "inf" not in str(costs)


def test_it_says_what_it_does_not_say():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = scaled(2), scaled(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(torch.relu(self.first(x)))

    assert "not for this loss" in str(training_cost(nn.Sequential(scaled(1), scaled(1)), torch.zeros(1, 4))).replace("\n", " ")
    assert RESIDUAL in training_cost(Residual(), torch.zeros(1, 4)).caveats
    with pytest.raises(InputError, match="alpha"):
        training_cost(nn.Sequential(scaled(1), scaled(1)), torch.zeros(1, 4), alpha=0.0)
