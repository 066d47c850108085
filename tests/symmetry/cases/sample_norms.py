"""Normalizers of one sample: layer, group, instance and root-mean-square, as modules and written by hand."""

from __future__ import annotations

from torch import nn

from tests.networks import Function
from tests.symmetry.cases.case import Case
from tests.symmetry.layers import RELU, TANH, linear, rms, standard, unit

SAMPLE_NORMS: dict[str, Case] = {
    "LN after linear": Case(
        lambda: nn.Sequential(linear(3, 4), nn.LayerNorm(4), TANH(), linear(4, 2)),
        (9, 3),
        (
            "joint-scale 1: 0.weight 0.bias",
            "weight-shift 3: 0.weight[1]",
            "shift 1: 0.bias",
        ),
    ),
    "LN after linear, eval": Case(
        lambda: nn.Sequential(linear(3, 4), nn.LayerNorm(4), TANH(), linear(4, 2)),
        (9, 3),
        (
            "joint-scale 1: 0.weight 0.bias",
            "weight-shift 3: 0.weight[1]",
            "shift 1: 0.bias",
        ),
        mode="eval",
    ),
    "LN without affine": Case(
        lambda: nn.Sequential(linear(3, 4, False), nn.LayerNorm(4, elementwise_affine=False), TANH()),
        (9, 3),
        (
            "scale 1: 0.weight",
            "weight-shift 3: 0.weight[1]",
        ),
    ),
    "LN over an image": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.LayerNorm((3, 3, 3)), TANH()),
        (5, 2, 4, 4),
        (
            "joint-scale 1: 0.weight 0.bias",
            "shift 1: 0.bias",
        ),
    ),
    "LN written by hand": Case(
        lambda: nn.Sequential(linear(3, 4), Function(standard), TANH()),
        (9, 3),
        (
            "joint-scale 1: 0.weight 0.bias",
            "weight-shift 3: 0.weight[1]",
            "shift 1: 0.bias",
        ),
    ),
    "LN, ReLU, flatten": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.LayerNorm((3, 2, 2)), RELU(), nn.Flatten(), linear(12, 2)),
        (9, 2, 3, 3),
        (
            "joint-scale 1: 0.weight 0.bias",
            "shift 1: 0.bias",
            "rescale 12: 1.weight[0,1,2] 1.bias[0,1,2] 4.weight[1]^-1",
        ),
    ),
    "GN after convolution": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), TANH()),
        (5, 2, 4, 4),
        (
            "joint-scale 2: 0.weight[0]/2 0.bias[0]/2",
            "shift 2: 0.bias[0]/2",
        ),
    ),
    "GN of one group": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(1, 4), RELU(), nn.Conv2d(4, 2, 2), TANH()),
        (5, 2, 4, 4),
        (
            "joint-scale 1: 0.weight 0.bias",
            "shift 1: 0.bias",
            "rescale 4: 1.weight[0] 1.bias[0] 3.weight[1]^-1",
        ),
    ),
    "GN of one channel each": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(4, 4), TANH()),
        (5, 2, 4, 4),
        (
            "scale 4: 0.weight[0]",
            "shift 4: 0.bias[0]",
        ),
    ),
    "IN after convolution": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), TANH()),
        (5, 2, 4, 4),
        (
            "scale 3: 0.weight[0]",
            "shift 3: 0.bias[0]",
        ),
    ),
    "IN with running statistics, eval": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True, track_running_stats=True), RELU(), nn.Conv2d(3, 2, 2)
        ),
        (5, 2, 4, 4),
        (
            "rescale 3: 0.weight[0] 0.bias[0] 1.weight[0]^-1 1.bias",
            "shift 3: 0.bias[0] 1.bias",
            "rescale 3: 1.weight[0] 1.bias[0] 3.weight[1]^-1",
        ),
        mode="eval",
    ),
    "RMSNorm after linear": Case(
        lambda: nn.Sequential(linear(3, 4), nn.RMSNorm(4), TANH(), linear(4, 2)),
        (9, 3),
        ("joint-scale 1: 0.weight 0.bias",),
    ),
    "RMSNorm without bias": Case(
        lambda: nn.Sequential(linear(3, 4, False), nn.RMSNorm(4), RELU(), linear(4, 2)),
        (9, 3),
        (
            "scale 1: 0.weight",
            "rescale 4: 1.weight[0] 3.weight[1]^-1",
        ),
    ),
    "RMSNorm written by hand": Case(
        lambda: nn.Sequential(linear(3, 4, False), Function(rms), TANH()),
        (9, 3),
        ("scale 1: 0.weight",),
    ),
    "unit vectors": Case(
        lambda: nn.Sequential(linear(3, 4, False), Function(unit), TANH()),
        (9, 3),
        ("scale 1: 0.weight",),
    ),
}
