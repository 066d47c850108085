"""A pair refutes a bound where its quotient is more than rounding, and rounding refutes none."""

from __future__ import annotations

import pytest
import torch

from tests.sweep.search import largest_quotient, refutes

CENTER = torch.linspace(-1, 1, 6, dtype=torch.float64)
FUNCTIONS = {
    "linear": lambda x: 3 * x,
    "steep": lambda x: (1e9 * x).sum(-1, keepdim=True),
    "tiny": lambda x: 1e-200 * x,
    "written in place": lambda x: (x * 1).add_(1).relu_(),
    "without gradients": lambda x: x + 5 * x.detach(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_of_a_quotient_is_refuted(name):
    best, pair = largest_quotient(FUNCTIONS[name], CENTER, None, 0)
    assert refutes(FUNCTIONS[name], pair, 0.5 * best)
    assert not refutes(FUNCTIONS[name], pair, 2 * best)


CONSTANT = {
    "a difference of equals": lambda x: (x * 1 + 1) * -3 + 3 * x,  # seed 13525
    "a large number added": lambda x: (1e-9 * x + 1).sub(1).mul(1e9) - x,  # as a bias beside small inputs, seed 8390
}


@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize("distance", [1e-6, 1e-8])
def test_rounding_refutes_nothing(name, distance):
    pair = (CENTER, CENTER + distance * torch.ones(6, dtype=torch.float64))
    assert not refutes(CONSTANT[name], pair, 1e-12)
