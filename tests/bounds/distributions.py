"""Distributions of (x, y) whose risk F(P, h) is a finite sum, or a quadrature that is right to 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from normscope.bounds.losses import Loss

NODES = 20_000


@dataclass(frozen=True, eq=False)
class Distribution:
    """nodes (n, d) with p(x) dx in `mass` (n,) and P(y | x) in `labels` (n, classes)."""

    name: str
    loss: str
    nodes: torch.Tensor
    mass: torch.Tensor
    labels: torch.Tensor
    sampled: Callable[[int, torch.Generator], torch.Tensor]  # inputs
    chances: Callable[[torch.Tensor], torch.Tensor]  # P(y | x) at inputs
    model: Callable[[tuple[torch.Tensor, torch.Tensor], torch.Generator], nn.Module]
    trained: bool = False

    def draw(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.sampled(size, generator)
        y = torch.multinomial(self.chances(x), 1, generator=generator)[:, 0]
        return x, y

    def risk(self, model: nn.Module, loss: Loss) -> float:
        """F(P, h)."""
        with torch.no_grad():
            outputs = model(self.nodes).double()
        classes = range(self.labels.shape[1])
        each = torch.stack([loss(outputs, torch.full((len(outputs),), label)) for label in classes], 1)
        return float((self.mass[:, None] * self.labels * each).sum())


def two(second: torch.Tensor) -> torch.Tensor:
    """P(y | x) from P(y = 1 | x)."""
    return torch.stack([1 - second, second], 1)


def of(name, loss, nodes, mass, sampled, chances, model, trained=False) -> Distribution:
    return Distribution(name, loss, nodes, mass.double(), chances(nodes).double(), sampled, chances, model, trained)


def line(steepness: float) -> Callable[..., nn.Module]:
    """A fixed classifier with scores ± steepness · (x − ½)."""

    def make(data, generator) -> nn.Module:
        model = nn.Linear(1, 2)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[-steepness], [steepness]]))
            model.bias.copy_(torch.tensor([steepness / 2, -steepness / 2]))
        return model.eval()

    return make


def network(data: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator) -> nn.Module:
    """A small network with BN, trained on the draw itself."""
    x, y = data
    model = nn.Sequential(nn.Linear(x.shape[1], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in (*model[0].parameters(), *model[3].parameters()):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(25):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def memory(data: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator) -> nn.Module:
    """Random features with least squares on the draw: as many features as it takes to remember most of it."""
    x, y = data
    hidden = nn.Linear(x.shape[1], 40)
    with torch.no_grad():
        for parameter in hidden.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        features = torch.relu(hidden(x)).double()
        targets = nn.functional.one_hot(y, 2).double() * 4 - 2
        solved = torch.linalg.lstsq(features.T @ features + 1e-3 * torch.eye(40), features.T @ targets).solution
        last = nn.Linear(40, 2)
        last.weight.copy_(solved.T)
        last.bias.zero_()
    return nn.Sequential(hidden, nn.ReLU(), last).eval()


def interval(noise: float, loss: str, steepness: float, name: str) -> Distribution:
    nodes = ((torch.arange(NODES) + 0.5) / NODES)[:, None]
    return of(
        name, loss, nodes, torch.full((NODES,), 1 / NODES),
        lambda size, generator: torch.rand(size, 1, generator=generator),
        lambda x: two(torch.where(x[:, 0] > 0.5, 1 - noise, noise)),
        line(steepness),
    )  # fmt: skip


def gaussians() -> Distribution:
    """x ~ N(±1, 1) with equal chances, and y the sign."""
    nodes = torch.linspace(-8, 8, NODES)[:, None]
    density = torch.exp(-((nodes[:, 0].abs() - 1) ** 2) / 2) + torch.exp(-((nodes[:, 0].abs() + 1) ** 2) / 2)

    def sampled(size: int, generator: torch.Generator) -> torch.Tensor:
        side = torch.randint(2, (size, 1), generator=generator) * 2 - 1
        return torch.randn(size, 1, generator=generator) + side

    return of(
        "two Gaussians", "ramp", nodes, density / density.sum(), sampled, lambda x: two(torch.sigmoid(2 * x[:, 0])), line(0.7)
    )


def square() -> Distribution:
    side = (torch.arange(150) + 0.5) / 150
    nodes = torch.cartesian_prod(side, side)
    return of(
        "square, trained", "l1", nodes, torch.full((len(nodes),), 1 / len(nodes)),
        lambda size, generator: torch.rand(size, 2, generator=generator),
        lambda x: two(torch.where(x.sum(1) > 1, 0.9, 0.1)),
        network, trained=True,
    )  # fmt: skip


def atoms() -> Distribution:
    """Forty points of ℝ³ of very different probabilities, with labels of their own."""
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(40, 3, generator=generator)
    mass = torch.exp(torch.randn(40, generator=generator))
    mass = mass / mass.sum()
    chance = torch.rand(40, generator=generator).round()

    def chances(x: torch.Tensor) -> torch.Tensor:
        return two(chance[torch.cdist(x, points).argmin(1)])

    def sampled(size: int, generator: torch.Generator) -> torch.Tensor:
        return points[torch.multinomial(mass, size, replacement=True, generator=generator)]

    return of("atoms, trained", "ramp", points, mass, sampled, chances, memory, trained=True)


DISTRIBUTIONS = (
    interval(0.0, "l1", 10.0, "interval"),
    interval(0.2, "zero-one", 3.0, "noisy interval"),
    gaussians(),
    square(),
    atoms(),
)
