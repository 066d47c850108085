"""Small trainings that the measured claims share; every random draw comes from the generator that is passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn

from normscope.lab.datasets import digits
from normscope.lab.models.mlp import mlp

Loss = Callable[[Tensor, Tensor], Tensor]


@lru_cache
def flat_digits(unit_ball: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits as vectors in [0, 1]⁶⁴: train inputs and classes, test inputs and classes.

    unit_ball: divided by one number so that ‖x‖ ≤ 1, as Than 2025 scales its data.
    """
    split = digits()
    scale = split.train[0].flatten(1).norm(dim=1).max() if unit_ball else 1.0
    return split.train[0].flatten(1) / scale, split.train[1], split.test[0].flatten(1) / scale, split.test[1]


def digits_mlp(depth: int, width: int, normalizer: str, generator: torch.Generator) -> nn.Sequential:
    return mlp(width=width, depth=depth, inputs=64, normalizer=normalizer, generator=generator)


def batches(inputs: Tensor, targets: Tensor, size: int, steps: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches in a fresh random order each epoch; a last one that is not full is left out."""
    size = min(size, len(inputs))
    per_epoch = len(inputs) // size
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(inputs), generator=generator)
        chosen = order[step % per_epoch * size :][:size]
        yield inputs[chosen], targets[chosen]


def train(
    model: nn.Module,
    data: Iterator[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    loss: Loss = nn.functional.cross_entropy,
) -> list[float]:
    """One step a batch; the losses, which end early where one is not finite."""
    model.train()
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        losses.append(value.item())
        if not value.isfinite():
            break
        value.backward()
        optimizer.step()
    return losses


def accuracy(model: nn.Module, inputs: Tensor, classes: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(inputs).argmax(1) == classes).double().mean())
