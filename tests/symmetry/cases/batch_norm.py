"""Batch normalization: after, before and between layers, in training and with running statistics."""

from __future__ import annotations

from torch import nn

from tests.symmetry.cases.case import Case
from tests.symmetry.layers import RELU, TANH, linear

BATCH_NORM: dict[str, Case] = {
    "BN after linear": Case(
        lambda: nn.Sequential(linear(3, 4), nn.BatchNorm1d(4), TANH(), linear(4, 2)),
        (9, 3),
        (
            "scale 4: 0.weight[0]",
            "shift 4: 0.bias[0]",
        ),
    ),
    "BN after linear, ReLU": Case(
        lambda: nn.Sequential(linear(3, 4), nn.BatchNorm1d(4), RELU(), linear(4, 2)),
        (9, 3),
        (
            "scale 4: 0.weight[0]",
            "shift 4: 0.bias[0]",
            "rescale 4: 1.weight[0] 1.bias[0] 3.weight[1]^-1",
        ),
    ),
    "BN after linear, eval": Case(
        lambda: nn.Sequential(linear(3, 4), nn.BatchNorm1d(4), TANH(), linear(4, 2)),
        (9, 3),
        (
            "rescale 4: 0.weight[0] 0.bias[0] 1.weight[0]^-1 1.bias",
            "shift 4: 0.bias[0] 1.bias",
        ),
        mode="eval",
    ),
    "BN after convolution": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), TANH()),
        (5, 2, 4, 4),
        (
            "scale 3: 0.weight[0]",
            "shift 3: 0.bias[0]",
        ),
    ),
    "BN after transposed convolution": Case(
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.BatchNorm2d(3), TANH()),
        (5, 2, 3, 3),
        (
            "scale 3: 0.weight[1]",
            "shift 3: 0.bias[0]",
        ),
    ),
    "BN after depthwise convolution": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 3, 2, groups=3), nn.BatchNorm2d(3), TANH()),
        (5, 3, 4, 4),
        (
            "scale 3: 0.weight[0]",
            "shift 3: 0.bias[0]",
        ),
    ),
    "BN after grouped convolution": Case(
        lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2, bias=False), nn.BatchNorm2d(6), TANH()),
        (5, 4, 4, 4),
        ("scale 6: 0.weight[0]",),
    ),
    "BN before convolution": Case(
        lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 2), TANH()),
        (5, 2, 4, 4),
        (
            "rescale 2: 0.weight[0] 0.bias[0] 1.weight[1]^-1",
            "shift 2: 0.bias[0] 1.bias",
        ),
    ),
    "BN without affine": Case(
        lambda: nn.Sequential(linear(3, 4), nn.BatchNorm1d(4, affine=False), TANH()),
        (9, 3),
        (
            "scale 4: 0.weight[0]",
            "shift 4: 0.bias[0]",
        ),
    ),
    "BN, linear, BN": Case(
        lambda: nn.Sequential(linear(3, 4), nn.BatchNorm1d(4), linear(4, 3), nn.BatchNorm1d(3), TANH()),
        (9, 3),
        (
            "scale 4: 0.weight[0]",
            "shift 4: 0.bias[0]",
            "rescale 4: 1.weight[0] 2.weight[1]^-1",
            "shift 4: 1.bias[0]",
            "scale 3: 2.weight[0]",
            "shift 3: 2.bias[0]",
        ),
    ),
    "BN, padded convolution, BN": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2), TANH()),
        (5, 2, 5, 5),
        (
            "scale 3: 0.weight[0]",
            "shift 3: 0.bias[0]",
            "rescale 3: 1.weight[0] 1.bias[0] 2.weight[1]^-1",
            "scale 2: 2.weight[0]",
            "shift 2: 2.bias[0]",
        ),
    ),
    "BN, max-pool": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), RELU(), nn.MaxPool2d(2), nn.Flatten(), linear(12, 2)),
        (6, 2, 5, 5),
        (
            "scale 3: 0.weight[0]",
            "shift 3: 0.bias[0]",
            "rescale 3: 1.weight[0] 1.bias[0] 5.weight[1]/4^-1",
        ),
    ),
    "BN before average pool": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), RELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(3, 2)),
        (6, 2, 5, 5),
        (
            "scale 3: 0.weight[0]",
            "shift 3: 0.bias[0]",
            "rescale 3: 1.weight[0] 1.bias[0] 5.weight[1]^-1",
        ),
    ),
    "average pool before BN": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.AvgPool2d(2), nn.BatchNorm2d(3), TANH()),
        (6, 2, 5, 5),
        (
            "scale 3: 0.weight[0]",
            "shift 3: 0.bias[0]",
        ),
    ),
    "ReLU before BN": Case(
        lambda: nn.Sequential(linear(3, 4), RELU(), nn.BatchNorm1d(4), TANH(), linear(4, 2)),
        (9, 3),
        ("joint-scale 4: 0.weight[0] 0.bias[0]",),
    ),
}
