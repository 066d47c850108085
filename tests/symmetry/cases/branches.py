"""Values that are read more than once: residuals, sums, concatenations, shared weights, gates and attention."""

from __future__ import annotations

import torch
from torch import nn

from tests.networks import Function, Joined
from tests.symmetry.cases.case import Case
from tests.symmetry.layers import RELU, TANH, Attention, Embedded, Residual, Shared, TiedAutoencoder, linear

BRANCHES: dict[str, Case] = {
    "residual before LN": Case(
        lambda: nn.Sequential(linear(5, 4), Residual(linear(4, 4), TANH(), linear(4, 4)), nn.LayerNorm(4), TANH()),
        (9, 5),
        (
            "rescale 1: 0.weight 0.bias 1.branch.0.weight^-1 1.branch.2.weight 1.branch.2.bias",
            "shift 4: 0.bias[0] 1.branch.0.bias 1.branch.2.bias",
            "weight-shift 4: 1.branch.2.weight[1]",
            "shift 1: 1.branch.2.bias",
        ),
        unnamed=4,
    ),
    "pre-norm residual": Case(
        lambda: nn.Sequential(linear(5, 4), Residual(nn.LayerNorm(4), linear(4, 4), TANH(), linear(4, 4)), nn.LayerNorm(4), TANH()),
        (9, 5),
        (
            "joint-scale 1: 0.weight 0.bias 1.branch.3.weight 1.branch.3.bias",
            "weight-shift 5: 0.weight[1]",
            "shift 1: 0.bias",
            "rescale 4: 1.branch.0.weight[0] 1.branch.0.bias[0] 1.branch.1.weight[1]^-1",
            "shift 4: 1.branch.0.bias[0] 1.branch.1.bias",
            "weight-shift 4: 1.branch.1.weight[0] 1.branch.1.bias",
            "weight-shift 4: 1.branch.3.weight[1]",
            "shift 1: 1.branch.3.bias",
        ),
    ),
    "residual before BN": Case(
        lambda: nn.Sequential(linear(5, 4), Residual(TANH(), linear(4, 4)), nn.BatchNorm1d(4), TANH()),
        (9, 5),
        ("shift 4: 1.branch.1.bias[0]",),
    ),
    "sum of branches before BN": Case(
        lambda: nn.Sequential(Joined(torch.add, linear(3, 4), nn.Sequential(TANH(), linear(3, 4))), nn.BatchNorm1d(4), TANH()),
        (9, 3),
        (
            "joint-scale 4: 0.branches.0.weight[0] 0.branches.1.1.weight[0]",
            "shift 4: 0.branches.0.bias[0]",
            "shift 4: 0.branches.1.1.bias[0]",
        ),
    ),
    "sum of ReLU branches before RMSNorm": Case(
        lambda: nn.Sequential(
            Joined(torch.add, nn.Sequential(linear(3, 4), RELU()), nn.Sequential(linear(3, 4), RELU())), nn.RMSNorm(4), TANH()
        ),
        (9, 3),
        ("joint-scale 1: 0.branches.0.0.weight 0.branches.0.0.bias 0.branches.1.0.weight 0.branches.1.0.bias",),
    ),
    "concatenation before LN": Case(
        lambda: nn.Sequential(
            Joined(lambda a, b: torch.cat([a, b], 1), nn.Sequential(linear(3, 2), TANH(), linear(2, 2)), linear(3, 2)),
            nn.LayerNorm(4),
            TANH(),
        ),
        (9, 3),
        ("joint-scale 1: 0.branches.0.2.weight 0.branches.0.2.bias 0.branches.1.weight 0.branches.1.bias",),
        unnamed=1,
    ),
    "concatenation before BN": Case(
        lambda: nn.Sequential(Joined(lambda a, b: torch.cat([a, b], 1), linear(3, 2), linear(3, 2)), nn.BatchNorm1d(4), TANH()),
        (9, 3),
        (
            "scale 2: 0.branches.0.weight[0]",
            "shift 2: 0.branches.0.bias[0]",
            "scale 2: 0.branches.1.weight[0]",
            "shift 2: 0.branches.1.bias[0]",
        ),
    ),
    "shared layer before BN": Case(
        lambda: nn.Sequential(Shared(linear(3, 3, False), RELU(), nn.BatchNorm1d(3)), TANH()),
        (9, 3),
        ("scale 1: 0.layer.weight",),
    ),
    "shared layer before RMSNorm": Case(
        lambda: nn.Sequential(Shared(linear(3, 3, False), RELU(), nn.RMSNorm(3)), TANH()),
        (9, 3),
        ("scale 1: 0.layer.weight",),
    ),
    "tied before nothing": Case(
        lambda: TiedAutoencoder(RELU()),
        (9, 4),
        (),
    ),
    "tied before RMSNorm": Case(
        lambda: nn.Sequential(TiedAutoencoder(RELU()), nn.RMSNorm(4), TANH()),
        (9, 4),
        ("scale 1: 0.encoder.weight",),
    ),
    "softmax at the end": Case(
        lambda: nn.Sequential(linear(3, 4), TANH(), linear(4, 3), nn.Softmax(1)),
        (9, 3),
        (
            "weight-shift 4: 2.weight[1]",
            "shift 1: 2.bias",
        ),
    ),
    "gated": Case(
        lambda: nn.Sequential(Joined(torch.mul, linear(3, 4), nn.Sequential(linear(3, 4), nn.Sigmoid())), linear(4, 2)),
        (9, 3),
        ("rescale 4: 0.branches.0.weight[0] 0.branches.0.bias[0] 1.weight[1]^-1",),
    ),
    "attention": Case(
        lambda: nn.Sequential(TANH(), Attention(), TANH()),
        (4, 5, 4),
        (
            "shift 4: 1.key.bias[0]",
            "linear 8: 1.query.weight[0]/2 1.query.bias[0]/2 1.key.weight[0]/2^-1 1.key.bias[0]/2^-1",
            "shift 4: 1.value.bias[0] 1.out.bias",
            "linear 8: 1.value.weight[0]/2 1.value.bias[0]/2 1.out.weight[1]/2^-1",
        ),
    ),
    "attention without biases": Case(
        lambda: nn.Sequential(TANH(), Attention(bias=False), TANH()),
        (4, 5, 4),
        (
            "linear 8: 1.query.weight[0]/2 1.key.weight[0]/2^-1",
            "linear 8: 1.value.weight[0]/2 1.out.weight[1]/2^-1",
        ),
    ),
    "attention before LN": Case(
        lambda: nn.Sequential(TANH(), Attention(bias=False), nn.LayerNorm(4), TANH()),
        (4, 5, 4),
        (
            "linear 8: 1.query.weight[0]/2 1.key.weight[0]/2^-1",
            "scale 1: 1.out.weight",
            "weight-shift 4: 1.out.weight[1]",
            "linear 8: 1.value.weight[0]/2 1.out.weight[1]/2^-1",
        ),
    ),
    "half of the channels normalized": Case(
        lambda: nn.Sequential(
            linear(3, 4),
            Joined(
                lambda a, b: torch.cat([a, b], 1),
                nn.Sequential(Function(lambda x: x[:, :2]), nn.BatchNorm1d(2)),
                Function(lambda x: x[:, 2:]),
            ),
            TANH(),
        ),
        (9, 3),
        (
            "scale 2: 0.weight[0]",
            "shift 2: 0.bias[0]",
        ),
    ),
    "tokens and positions before LN": Case(
        lambda: Embedded(nn.LayerNorm(4)),
        (9, 3, 5),
        (
            "weight-shift 3: position[0]",
            "joint-scale 1: table.weight position",
            "weight-shift 5: table.weight[1]",
        ),
    ),
    "tokens and positions before RMSNorm": Case(
        lambda: Embedded(nn.RMSNorm(4)),
        (9, 3, 5),
        ("joint-scale 1: table.weight position",),
    ),
}
