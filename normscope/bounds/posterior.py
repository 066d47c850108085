"""Gaussian noise on a model's parameters as a randomized predictor, and its error on a sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from normscope.bounds.losses import margins
from normscope.curvature.batches import Batch

HALVINGS = 40  # of [q, 1], to within 1e-12
ROUNDING = 2.0**-50  # of kl(q‖p), relative to 1 and to itself: where p is near q, it is a small difference of two logarithms


@dataclass(frozen=True)
class GaussianPosterior:
    """Q = N(w, σ²I): every prediction is made with parameters w + σz, z standard normal; σ is the standard deviation."""

    model: nn.Module
    sigma: float

    @property
    def dimension(self) -> int:
        return sum(value.numel() for value in self.model.parameters())

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Parameters drawn from Q."""
        return {
            name: value.detach() + self.sigma * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in self.model.named_parameters()
        }

    @torch.no_grad()
    def errors(self, batches: Iterable[Batch], chunk: int, generator: torch.Generator) -> Iterator[tuple[int, int]]:
        """(wrong answers, samples) of consecutive chunks of the sample, each with a draw of its own."""
        for batch in batches:
            for part in batch.split(chunk):
                outputs = functional_call(self.model, self.draw(generator), part.call.args, part.call.kwargs)
                yield int((~(margins(outputs, part.target) > 0)).sum()), part.size  # NaN counts as wrong


@dataclass(frozen=True)
class ErrorEstimate:
    """A mean of independent draws in [0, 1], with weights: mean = Σ w_j e_j, `largest` the largest of the weights."""

    mean: float
    draws: int
    largest: float

    @staticmethod
    def of(errors: Iterable[tuple[int, int]]) -> ErrorEstimate:
        wrong, sizes = zip(*errors, strict=True)
        return ErrorEstimate(sum(wrong) / sum(sizes), len(sizes), max(sizes) / sum(sizes))

    def upper(self, delta: float) -> float:
        """At least E[mean] with probability 1 − δ, by Chernoff's bound for the variables w_j e_j / max w, which lie in [0, 1]."""
        scale = self.largest * self.draws
        return min(1.0, scale * kl_inverse(self.mean / scale, math.log(1 / delta) / self.draws))


def binary_kl(q: float, p: float) -> float:
    """kl(q‖p) = q ln(q/p) + (1 − q) ln((1 − q)/(1 − p))."""
    first = q * math.log(q / p) if q > 0 else 0.0
    second = (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0
    return first + second


def kl_inverse(q: float, budget: float) -> float:
    """The largest p with kl(q‖p) ≤ budget, rounded up."""
    if not q < 1:
        return 1.0
    low, high = q, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        least = binary_kl(q, middle) * (1 - ROUNDING) - ROUNDING
        low, high = (low, middle) if least > budget else (middle, high)  # NaN leaves 1
    return high
