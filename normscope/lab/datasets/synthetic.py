"""Synthetic sets: known distributions, as many samples as one likes."""

from __future__ import annotations

import torch

from normscope.lab.datasets.split import Labelled, Split

SAMPLES = 2000
TEST_PART = 4  # a fourth of the samples


def gaussians(generator: torch.Generator | None = None, samples: int = SAMPLES, features: int = 20, classes: int = 2) -> Split:
    """Unit Gaussian clouds around random centres of norm 3."""
    generator = generator or torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(classes, features, generator=generator)) * 3
    labels = torch.randint(classes, (samples,), generator=generator)
    return _split(centres[labels] + torch.randn(samples, features, generator=generator), labels)


def rings(generator: torch.Generator | None = None, samples: int = SAMPLES) -> Split:
    """Two noisy circles in the plane, of radius 1 and 2: no linear map separates them, and only the scale of x tells them apart."""
    generator = generator or torch.Generator().manual_seed(0)
    labels = torch.randint(2, (samples,), generator=generator)
    angles = 2 * torch.pi * torch.rand(samples, generator=generator)
    radii = 1 + labels + 0.15 * torch.randn(samples, generator=generator)
    return _split(radii[:, None] * torch.stack([angles.cos(), angles.sin()], 1), labels)


def halfplanes(generator: torch.Generator | None = None, samples: int = 400) -> Split:
    """Standard normal points in the plane, on the two sides of the line 2x₁ = x₂: linearly separable."""
    generator = generator or torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 2, generator=generator)
    return _split(inputs, (2 * inputs[:, 0] > inputs[:, 1]).long())


def products(generator: torch.Generator | None = None, samples: int = 400, features: int = 50) -> Split:
    """Standard normal points, classes by the sign of x₁x₂ + x₃: no plane separates them, two layers do."""
    generator = generator or torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator)
    return _split(inputs, (inputs[:, 0] * inputs[:, 1] + inputs[:, 2] > 0).long())


def waves(generator: torch.Generator | None = None, samples: int = 85, features: int = 4) -> Split:
    """Standard normal points and a number for each, sin(x₁x₂) + x₃: regression."""
    generator = generator or torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator)
    return _split(inputs, (inputs[:, 0] * inputs[:, 1]).sin() + inputs[:, 2])


def sigmoids(generator: torch.Generator | None = None, samples: int = 170) -> Split:
    """Standard normal points in the plane and a number for each, tanh x₁ + tanh x₂: regression with two neurons."""
    generator = generator or torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 2, generator=generator)
    return _split(inputs, inputs.tanh().sum(1))


def _split(inputs: torch.Tensor, labels: torch.Tensor) -> Split:
    test = len(inputs) // TEST_PART
    train: Labelled = (inputs[test:], labels[test:])
    return Split(train, (inputs[:test], labels[:test]))


def markov(generator: torch.Generator | None = None, samples: int = SAMPLES, tokens: int = 16, length: int = 24) -> Split:
    """Sequences of a random second-order chain over `tokens` tokens, and the token that follows each: (samples, length) ids."""
    generator = generator or torch.Generator().manual_seed(0)
    chances = torch.softmax(3 * torch.randn(tokens, tokens, tokens, generator=generator), -1)
    steps = [torch.randint(tokens, (samples,), generator=generator) for _ in range(2)]
    for _ in range(length - 1):
        steps.append(torch.multinomial(chances[steps[-2], steps[-1]], 1, generator=generator)[:, 0])
    return _split(torch.stack(steps[:-1], 1), steps[-1])
