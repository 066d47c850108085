"""Tight: against the exact constant on a box, from all activation patterns that are reachable there."""

import pytest
import torch
from torch import nn

import normscope as ns
from bench.local_tightness import relu_network
from normscope.testing import exact_relu_constant


@pytest.mark.quick(1)
@pytest.mark.parametrize("radius, worst", [(0.1, 1.5), (0.4, 3.0)])
def test_close_to_the_exact_constant(radius, worst):
    for seed in range(3):
        model, center = relu_network((3, 8, 6, 2), seed)
        box = ns.Box(center - radius, center + radius)
        exact = exact_relu_constant(model, box)
        upper = float(ns.lipschitz(model, center[None], region=box, effort=0.1).upper)
        assert exact * (1 - 1e-9) <= upper <= worst * exact


def test_the_exact_constant_of_one_unit():
    """|x|, as relu(x) + relu(−x), times 2: slope 2 on either side, and 0 behind a unit that the box never switches on."""
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0], [1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 0.0, -5.0]))
        model[2].weight.copy_(torch.tensor([[2.0, 2.0, 9.0]]))
    assert exact_relu_constant(model, ns.Box(-torch.ones(1), torch.ones(1))) == pytest.approx(2)
    assert exact_relu_constant(model, ns.Box(-torch.ones(1), 6 * torch.ones(1))) == pytest.approx(11)
    with pytest.raises(ns.InputError):
        exact_relu_constant(nn.Sequential(nn.Tanh()), ns.Box(-torch.ones(1), torch.ones(1)))
