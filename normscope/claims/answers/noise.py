"""Theorem 6 of docs/laws.md: what the statistics of a mini-batch do to the gradient of a neuron before BN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, exp, lgamma, sin, sqrt

import torch
from torch import Tensor

from normscope.claims.calculus import normal, scalar, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import DrawnMean, Ruling, expectation

BATCHES = 20_000  # that are drawn of every size
SIZES = (4, 12, 48)
WITH_VARIANCE = 12  # from here on the variance of the draws can be told from them: they have eight moments


def shrinkage(size: int) -> float:
    """a_m = √(2/m) Γ(m/2)/Γ((m − 1)/2), the mean deviation of m draws of unit variance."""
    return sqrt(2 / size) * exp(lgamma(size / 2) - lgamma((size - 1) / 2))


def mean_and_variance(size: int, slope: float, noise: float) -> tuple[float, float]:
    """Of −∂L/∂v over mini-batches of m: a_mτ, and (m − 2)(mτ² + ν²)/(m(m − 3)) − a_m²τ²."""
    mean = shrinkage(size) * slope
    return mean, (size - 2) * (size * slope**2 + noise**2) / (size * (size - 3)) - mean**2


Stated = Callable[[int, float, float], tuple[float, float]]


@claim("O-batch-noise")
def noise_of_batch_statistics(generator: torch.Generator, stated: Stated = mean_and_variance) -> Ruling:
    """ẑ of z = w·x, ‖w‖ = 1, loss ½mean(ẑ − t)², t = ρz + τy + νn with y = v·x, v ⟂ w a unit vector; −∂L/∂v of 20,000 mini-batches.

    With the statistics of all data it is τ. By hand: a batch of 2 has ẑ = ±1 for every w, so its gradient is 0: batches of 2
    teach w nothing. With γ the noise does move a critical point: that of γ is E mean(tẑ) = a_mρ, not ρ. stated: mean and variance,
    of m, τ and ν. Evidence: a_m, and the largest m·bias²/variance for m from 4 to 4096.
    """
    estimates = []
    for size in SIZES:
        for angle, noise in ((0.3, 0.5), (1.2, 0.0)):
            draws = slopes(size, angle, noise, generator)
            mean, variance = stated(size, sin(angle), noise)
            what = f"batches of {size}, τ = {sin(angle):.2g}, ν = {noise:g}"
            estimates.append(DrawnMean(f"{what}, mean", mean, draws))
            if size >= WITH_VARIANCE:
                estimates.append(DrawnMean(f"{what}, variance", variance, (draws - draws.mean()).square()))
    sizes = [2**power for power in range(2, 13)]
    shares = [size * (1 - shrinkage(size)) ** 2 / mean_and_variance(size, 1.0, 0.0)[1] for size in sizes]
    known = {f"a_{size}": shrinkage(size) for size in SIZES}
    return expectation(estimates, "docs/laws.md, Theorem 6", **known, **{"largest m·bias²/variance": max(shares)})


def slopes(size: int, angle: float, noise: float, generator: torch.Generator) -> Tensor:
    """−∂L/∂v of every batch, by forward-mode differentiation."""
    along, across, random = normal(generator, 3, BATCHES, size)
    targets = cos(angle) * along + sin(angle) * across + noise * random
    _, derivative = torch.func.jvp(partial(_losses, along, across, targets), (scalar(0.0),), (scalar(1.0),))
    return -derivative


def _losses(along: Tensor, across: Tensor, targets: Tensor, turn: Tensor) -> Tensor:
    """The loss of every batch at the weight w + turn·v."""
    return (standardize(along + turn * across, 1, 0.0) - targets).square().mean(1) / 2
