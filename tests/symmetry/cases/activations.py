"""Layers without a normalizer: what an activation between them lets pass."""

from __future__ import annotations

import torch
from torch import nn

from tests.networks import Function
from tests.symmetry.cases.case import Case
from tests.symmetry.layers import RELU, TANH, linear

ACTIVATIONS: dict[str, Case] = {
    "ReLU between linear layers": Case(
        lambda: nn.Sequential(linear(3, 4), RELU(), linear(4, 2)),
        (9, 3),
        ("rescale 4: 0.weight[0] 0.bias[0] 2.weight[1]^-1",),
    ),
    "leaky ReLU": Case(
        lambda: nn.Sequential(linear(3, 4), nn.LeakyReLU(), linear(4, 2)),
        (9, 3),
        ("rescale 4: 0.weight[0] 0.bias[0] 2.weight[1]^-1",),
    ),
    "PReLU": Case(
        lambda: nn.Sequential(linear(3, 4), nn.PReLU(4), linear(4, 2)),
        (9, 3),
        ("rescale 4: 0.weight[0] 0.bias[0] 2.weight[1]^-1",),
    ),
    "absolute values": Case(
        lambda: nn.Sequential(linear(3, 4), Function(torch.abs), linear(4, 2)),
        (9, 3),
        ("rescale 4: 0.weight[0] 0.bias[0] 2.weight[1]^-1",),
    ),
    "squares": Case(
        lambda: nn.Sequential(linear(3, 4), Function(torch.square), linear(4, 2)),
        (9, 3),
        ("rescale 4: 0.weight[0] 0.bias[0] 2.weight[1]^-2",),
        unnamed=2,
    ),
    "tanh between linear layers": Case(
        lambda: nn.Sequential(linear(3, 4), TANH(), linear(4, 2)),
        (9, 3),
        (),
    ),
    "no activation": Case(
        lambda: nn.Sequential(linear(4, 3), linear(3, 4), TANH()),
        (9, 4),
        (
            "shift 3: 0.bias[0] 1.bias",
            "linear 9: 0.weight[0]/3 0.bias[0]/3 1.weight[1]/3^-1",
        ),
    ),
    "no activation, convolutions": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 2, 2), nn.Conv2d(2, 3, 1), TANH()),
        (9, 3, 4, 4),
        (
            "shift 2: 0.bias[0] 1.bias",
            "linear 4: 0.weight[0]/2 0.bias[0]/2 1.weight[1]/2^-1",
        ),
    ),
    "ReLU, dropout": Case(
        lambda: nn.Sequential(linear(3, 4), RELU(), nn.Dropout(0.3), linear(4, 2)),
        (9, 3),
        ("rescale 4: 0.weight[0] 0.bias[0] 3.weight[1]^-1",),
    ),
}
