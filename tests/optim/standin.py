"""The optimizers, and models with the scale groups that they have, written down by hand so that these tests need no detection."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from normscope.optim import SGDG, SGDP, AdamG, AdamP

SPHERICAL = [(SGDG, {"momentum": 0.9}), (AdamG, {})]
PROJECTED = [(SGDP, {"momentum": 0.9}), (AdamP, {})]
ALL = SPHERICAL + PROJECTED


def each(pairs):
    """Run a test with every optimizer and its settings."""
    return pytest.mark.parametrize("kind, settings", pairs, ids=[pair[0].__name__ for pair in pairs])


@dataclass(frozen=True)
class Group:
    kind: str
    parameters: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...] = (1,)
    degrees: tuple[float, ...] = (1.0,)
    count: int = 1


@dataclass(frozen=True)
class Report:
    groups: tuple[Group, ...] = ()


def joint(*parameters: str, axes, blocks=None, degrees=None) -> Group:
    one = (1,) * len(parameters)
    return Group("joint-scale", parameters, axes, blocks or one, degrees or tuple(map(float, one)))


def dense(dtype=torch.float32, epsilon=1e-12, seed=0) -> nn.Sequential:
    """BN (one scale per row), LN (one joint scale of weight and bias), and a classifier that is not scale-free."""
    model = nn.Sequential(
        nn.Linear(10, 16), nn.BatchNorm1d(16, eps=epsilon), nn.ReLU(),
        nn.Linear(16, 12), nn.LayerNorm(12, eps=epsilon), nn.Tanh(), nn.Linear(12, 3),
    )  # fmt: skip
    return drawn(model, dtype, seed)


DENSE = Report(
    (Group("scale", ("0.weight",), ((0,),)), Group("shift", ("0.bias",), ((0,),)), joint("3.weight", "3.bias", axes=((), ())))
)


def convolutional(dtype=torch.float32, epsilon=1e-12, seed=0) -> nn.Sequential:
    """GN (one joint scale of weight and bias for four channels), BN, RMS normalization over all that is left."""
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8, eps=epsilon), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False),
        nn.BatchNorm2d(6, eps=epsilon), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5, bias=False), nn.RMSNorm(5, eps=epsilon),
        nn.Linear(5, 3),
    )  # fmt: skip
    return drawn(model, dtype, seed)


CONVOLUTIONAL = Report((
    joint("0.weight", "0.bias", axes=((0,), (0,)), blocks=(4, 4)), Group("scale", ("3.weight",), ((0,),)),
    Group("scale", ("7.weight",), ((),)),
))  # fmt: skip

INPUTS = {"dense": (24, 10), "convolutional": (12, 2, 6, 6)}
MODELS = {"dense": (dense, DENSE), "convolutional": (convolutional, CONVOLUTIONAL)}


def drawn(model: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """Weights from a generator of our own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / max(1, parameter[0].numel()) ** 0.5
            parameter.copy_(value if parameter.dim() > 1 or name.endswith("bias") else 1 + 0.1 * value)
    return model.to(dtype)


def batch(name: str, dtype=torch.float32, seed=1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = INPUTS[name]
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, shape[:1], generator=generator)


def train(model, optimizer, data, steps, scheduler=None) -> list[float]:
    """Full-batch steps; the losses before each."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]).double(), data[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if scheduler is not None:
            scheduler.step()
    return losses


def parameters_equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
