"""Layers and functions of which the cases are built."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from tests.networks import randn

TANH, RELU = nn.Tanh, nn.ReLU


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
