"""A channel that is zero everywhere is no reason to search for ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normscope as ns


@pytest.mark.parametrize(("padding_mode", "value"), [("zeros", 0.0), ("zeros", 5e-324), ("zeros", 1e-170), ("circular", 0.0)])
def test_a_depthwise_convolution_with_one_dead_channel(padding_mode, value):
    torch.manual_seed(0)
    model = nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode=padding_mode).double()
    with torch.no_grad():
        model.weight[2] = value
    image = torch.randn(1, 4, 10, 10).double()
    matrix = torch.func.jacrev(model)(image).reshape(400, 400)
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    upper = float(ns.lipschitz(model, image).upper)
    assert exact <= upper * (1 + 1e-12) and upper <= exact * (1.5 if padding_mode == "zeros" else 1.01)


def test_a_convolution_of_dead_channels_alone():
    model = nn.Conv2d(4, 4, 3, padding=1, groups=4)
    nn.init.zeros_(model.weight)
    assert float(ns.lipschitz(model, torch.randn(1, 4, 10, 10)).upper) < 1e-100
