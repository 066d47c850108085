"""Small classifiers and their data."""

from __future__ import annotations

import torch
from torch import nn


def data(samples: int, dimension: int = 2, classes: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform inputs, and the class by the first coordinate."""
    x = torch.rand(samples, dimension, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * classes).long().clamp(max=classes - 1)


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights and running statistics from a generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())):
            tensor.copy_(
                torch.rand(tensor.shape, generator=generator) + 0.5
                if tensor.dim() == 1
                else torch.randn(tensor.shape, generator=generator)
            )
    return model.eval()


def batch_norm(dimension: int = 2, classes: int = 2) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(dimension, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes)))


def layer_norm(dimension: int = 2, classes: int = 2) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(dimension, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, classes)))


def plain(dimension: int = 2, classes: int = 2) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(dimension, 6), nn.ReLU(), nn.Linear(6, classes)))


MODELS = {"plain": plain, "BN": batch_norm, "LN": layer_norm}
