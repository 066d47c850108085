"""A ReLU multilayer perceptron, with or without normalizers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.lab.models.dropout import SeededDropout
from normscope.lab.models.layers import linear, normalize_weights
from normscope.lab.models.normalizers import has_layer
from normscope.lab.models.normalizers import normalizer as normalizer_of

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "linear": nn.Identity}


def mlp(
    width: int = 512,
    depth: int = 10,
    inputs: int = 3 * 32 * 32,
    classes: int = 10,
    normalizer: str = "none",
    normalized: int | None = None,
    activation: str = "relu",
    skip: bool = False,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """`depth` linear layers; between them a normalizer and a ReLU. He-normal weights, zero biases.

    >>> mlp(width=16, depth=3, inputs=64)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])

    inputs: entries of a sample, of any shape. normalized: how many hidden layers, from the first, have the normalizer, None for
    all. activation: "relu", "tanh" or "linear" for none. skip: x + f(x) for hidden layers that keep the width. dropout: of what
    enters each linear layer but the first. generator: of the weights, and of what drops; without one they are the same every time.
    """
    if min(width, depth, inputs, classes) < 1:
        raise InputError(f"width, depth, inputs and classes must be at least 1, got {width}, {depth}, {inputs} and {classes}")
    if normalized is not None and not (0 <= normalized < depth and (normalizer == "none" or has_layer(normalizer))):
        raise InputError(f"normalized must be from 0 to {depth - 1}, the hidden layers, with a normalizer that is a layer")
    if activation not in ACTIVATIONS:
        raise InputError(f"no activation {activation!r}: choose from {', '.join(ACTIVATIONS)}")
    generator = generator or torch.Generator().manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for index, (before, after) in enumerate(pairwise([inputs, *[width] * (depth - 1)])):
        chosen = normalizer if normalized is None or index < normalized else "none"
        hidden = [_linear(before, after, activation, generator), normalizer_of(chosen, after), ACTIVATIONS[activation]()]
        layers += [Skip(*_present(hidden))] if skip and before == after else hidden
        layers += [SeededDropout(dropout, seed=generator.initial_seed() + index)] if dropout else []
    layers.append(_linear(width if depth > 1 else inputs, classes, "linear", generator))
    model = nn.Sequential(*_present(layers))
    normalize_weights(model, normalizer, generator)
    return model


class Skip(nn.Sequential):
    """x + f(x)."""

    @property
    def branch_end(self) -> nn.Module:
        return next(layer for layer in self if isinstance(layer, nn.Linear))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + super().forward(x)
        return y


def _present(layers: Iterable[nn.Module]) -> list[nn.Module]:
    return [layer for layer in layers if not isinstance(layer, nn.Identity)]


def _linear(inputs: int, outputs: int, before: str, generator: torch.Generator) -> nn.Linear:
    """A linear layer whose weights have the He variance for what follows it; torch's own init would draw from global state."""
    layer = linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity=before, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
