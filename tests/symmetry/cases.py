"""Small models and all of their symmetries, as theory has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normscope.symmetry.groups import Group
from tests.networks import Function, Joined, randn


@dataclass(frozen=True)
class Case:
    """A model, an example, and its groups as `described` writes them; unnamed: null directions that no group names."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    groups: tuple[str, ...]
    mode: str = "train"
    unnamed: int = 0

    @property
    def example(self) -> Tensor:
        return randn(*self.shape)

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().train()
            for name, buffer in model.named_buffers():  # as after training: initial statistics hide what they add
                if name.endswith("running_mean"):
                    buffer.normal_()
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 2.0)
            return model


def described(group: Group) -> str:
    """ "kind count: parameter[axes]", with /block where a member has several indices and ^degree where that is not 1."""
    parts = []
    for name, axes, block, degree in zip(group.parameters, group.axes, group.blocks, group.degrees, strict=True):
        each = f"[{','.join(map(str, axes))}]" if axes else ""
        parts.append(name + each + (f"/{block}" if block > 1 else "") + ("" if degree == 1 else f"^{degree:g}"))
    return f"{group.kind} {group.count}: {' '.join(parts)}"


class Residual(nn.Module):
    """x + branch(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Shared(nn.Module):
    """One layer, used twice with a function between."""

    def __init__(self, layer: nn.Module, between: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.layer, self.between, self.last = layer, between, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.between(self.layer(x))))


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder transposed."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.encoder, self.activation = nn.Linear(4, 3, bias=False), activation

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.activation(self.encoder(x)), self.encoder.weight.T)


class Attention(nn.Module):
    """Hand-written attention of one or more heads, with or without biases."""

    def __init__(self, width: int = 4, heads: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            layer(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.mT / (width // self.heads) ** 0.5).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, width))


class Embedded(nn.Module):
    """Tokens, here as rows of the input that pick rows of a table, with positions, before a normalizer."""

    def __init__(self, normalizer: nn.Module) -> None:
        super().__init__()
        self.table, self.position, self.normalizer, self.head = (
            nn.Linear(5, 4, bias=False),
            nn.Parameter(randn(3, 4)),
            normalizer,
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.normalizer(self.table(x) + self.position)))


def linear(before: int, after: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(before, after, bias=bias)


def unit(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def standard(x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-6)


TANH, RELU = nn.Tanh, nn.ReLU

CASES: dict[str, Case] = {
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
