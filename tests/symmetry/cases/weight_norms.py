"""Parametrizations that normalize the weights themselves."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrizations

from tests.symmetry.cases.case import Case
from tests.symmetry.layers import RELU, TANH, linear

WEIGHT_NORMS: dict[str, Case] = {
    "weight norm": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(linear(3, 4)), TANH(), linear(4, 2)),
        (9, 3),
        ("scale 4: 0.parametrizations.weight.original1[0]",),
    ),
    "weight norm of all entries": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(linear(3, 4), dim=None), TANH()),
        (9, 3),
        ("scale 1: 0.parametrizations.weight.original1",),
    ),
    "weight norm of columns": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(linear(3, 4), dim=1), TANH()),
        (9, 3),
        ("scale 3: 0.parametrizations.weight.original1[1]",),
    ),
    "weight norm of a convolution before BN": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 3, 2)), nn.BatchNorm2d(3), TANH()),
        (5, 2, 4, 4),
        (
            "shift 3: 0.bias[0]",
            "scale 3: 0.parametrizations.weight.original0[0]",
            "scale 3: 0.parametrizations.weight.original1[0]",
        ),
    ),
    "weight norm, ReLU": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(linear(3, 4)), RELU(), linear(4, 2)),
        (9, 3),
        (
            "rescale 4: 0.parametrizations.weight.original0[0] 0.bias[0] 2.weight[1]^-1",
            "scale 4: 0.parametrizations.weight.original1[0]",
        ),
    ),
    "spectral norm": Case(
        lambda: nn.Sequential(parametrizations.spectral_norm(linear(3, 4)), TANH()),
        (9, 3),
        ("scale 1: 0.parametrizations.weight.original",),
    ),
    "orthogonal": Case(
        lambda: nn.Sequential(parametrizations.orthogonal(linear(3, 3)), TANH()),
        (9, 3),
        ("weight-shift 3: 0.parametrizations.weight.original[0,1]",),
        unnamed=3,
    ),
}
