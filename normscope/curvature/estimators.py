"""Random estimates of traces: Hutch++ for tr H, stochastic Lanczos quadrature for tr f(H) and the spectral density."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from scipy.stats import wasserstein_distance

from normscope.core.errors import InputError
from normscope.core.progress import Meter
from normscope.curvature.lanczos import Krylov, Operator

LEAST_SAMPLES = 4
ROUNDED = 16.0  # roundings of a part that is exact but for them: all that is left where a sketch holds the whole range
LARGEST_COMPLETE = 2000  # entries: beyond it a basis of the whole space is not made, however many products are allowed


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that holds the truth with probability `confidence`; of no width if it was computed in full."""

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g} at {100 * self.confidence:g} %)"


def trace(operator: Operator, products: int, confidence: float, generator: torch.Generator, progress: Meter) -> Estimate:
    """tr H by Hutch++ (Meyer, Musco, Musco & Woodruff 2021): exact on the range of a sketch, sampled on what is left.

    A third of the products makes the sketch, a third its exact part, and a third the samples, whose mean has Student's interval.
    Where there are products enough for every unit vector the trace is exact.
    """
    check_confidence(confidence)
    if operator.size <= products:
        return _exact_trace(operator, confidence, progress)
    if products < 3 * LEAST_SAMPLES:
        raise InputError(f"products must be at least {3 * LEAST_SAMPLES}, got {products}")
    third = products // 3

    def image(vector: torch.Tensor) -> torch.Tensor:
        progress.advance()
        return operator.product(vector)

    sketch = torch.stack([image(operator.signs(generator)) for _ in range(third)])
    basis = torch.linalg.qr(sketch.mT).Q.mT  # (third, size)
    images = [image(row) for row in basis]
    exact = math.fsum(float(row @ turned) for row, turned in zip(basis, images, strict=True))
    rounding = ROUNDED * torch.finfo(basis.dtype).eps * math.fsum(float(turned.norm()) for turned in images)
    samples: list[float] = []
    try:
        for _ in range(products - 2 * third):
            probe = operator.signs(generator)
            probe -= (basis @ probe) @ basis
            samples.append(float(probe @ image(probe)))
    except KeyboardInterrupt:
        if len(samples) < LEAST_SAMPLES:
            raise
    return student_interval(samples, confidence, exact, rounding)


def _exact_trace(operator: Operator, confidence: float, progress: Meter) -> Estimate:
    total = []
    for unit in torch.eye(operator.size, dtype=torch.float64).to(operator.signs(torch.Generator())):
        total.append(float(unit @ operator.product(unit)))
        progress.advance()
    return Estimate(math.fsum(total), math.fsum(total), math.fsum(total), confidence)


def student_interval(samples: Sequence[float], confidence: float, offset: float = 0.0, rounding: float = 0.0) -> Estimate:
    """The mean of independent samples and Student's interval for it, moved by an offset that is known but for rounding."""
    middle = offset + float(np.mean(samples))
    quantile = float(student.ppf((1 + confidence) / 2, len(samples) - 1))
    margin = quantile * float(np.std(samples, ddof=1)) / math.sqrt(len(samples)) + rounding
    return Estimate(middle, middle - margin, middle + margin, confidence)


@dataclass(frozen=True)
class Quadrature:
    """Points θ and weights w of each probe z, which add up to ‖z‖²: Σ w f(θ) is an unbiased sample of tr f(H).

    complete: the points are all the eigenvalues, so that the sum is tr f(H) itself.
    """

    nodes: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    complete: bool = False

    @staticmethod
    def of(operator: Operator, probes: int, steps: int, generator: torch.Generator, progress: Meter) -> Quadrature:
        """All eigenvalues of a small matrix where probes · steps products suffice, else stochastic Lanczos quadrature."""
        if probes < 1 or steps < 2:
            raise InputError(f"probes must be at least 1 and steps at least 2, got {probes} and {steps}")
        if operator.size <= min(probes * steps, LARGEST_COMPLETE):
            return Quadrature.whole(operator, generator, progress)
        return Quadrature.sampled(operator, probes, steps, generator, progress)

    @staticmethod
    def whole(operator: Operator, generator: torch.Generator, progress: Meter) -> Quadrature:
        """Every eigenvalue, from a complete basis; if interrupted, Gauss's rule of the one probe that it started from."""
        start = operator.signs(generator)
        krylov = Krylov(operator, start, operator.size, generator)
        if not krylov.fill(progress):
            nodes, weights = _gauss(krylov, start)
            return Quadrature((nodes,), (weights,))
        nodes = krylov.ritz().values.numpy()
        return Quadrature((nodes,), (np.ones_like(nodes),), complete=True)

    @staticmethod
    def sampled(operator: Operator, probes: int, steps: int, generator: torch.Generator, progress: Meter) -> Quadrature:
        """Stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017) with random signs as probes."""
        rules: list[tuple[np.ndarray, np.ndarray]] = []
        try:
            for _ in range(probes):
                start = operator.signs(generator)
                krylov = Krylov(operator, start, steps, generator)
                while not krylov.full:
                    krylov.extend()
                    progress.advance()
                    if krylov.coupling[krylov.count - 1] == 0:  # an invariant space: the rule is exact
                        break
                rules.append(_gauss(krylov, start))
        except KeyboardInterrupt:
            if not rules:
                raise
        nodes, weights = zip(*rules, strict=True)
        return Quadrature(nodes, weights)

    def sums(self, function: Callable[[np.ndarray], np.ndarray]) -> list[float]:
        """tr f(H) by each probe."""
        return [float(weight @ function(node)) for node, weight in zip(self.nodes, self.weights, strict=True)]

    def estimate(self, function: Callable[[np.ndarray], np.ndarray], confidence: float) -> Estimate:
        """tr f(H) with Student's interval for the sampling."""
        sums = self.sums(function)
        if self.complete:
            return Estimate(sums[0], sums[0], sums[0], confidence)
        if len(sums) < 2:
            raise InputError(f"an interval needs at least 2 probes, got {len(sums)}")
        return student_interval(sums, confidence)


def _gauss(krylov: Krylov, start: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Gauss's rule for the spectral measure of one vector: Ritz values, and squares of the vector's parts along theirs."""
    ritz = krylov.ritz()
    return ritz.values.numpy(), (float(start.square().sum()) * ritz.coordinates[0].square()).numpy()


@dataclass(frozen=True)
class Density:
    """The distribution of the eigenvalues: a share of them at each point, shown smoothed by a normal of width `width`."""

    nodes: np.ndarray
    weights: np.ndarray
    width: float
    halves: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    complete: bool = False

    @staticmethod
    def of(quadrature: Quadrature, width: float | None = None) -> Density:
        nodes, weights = _pooled(quadrature, slice(None))
        extent = float(nodes.max() - nodes.min())
        halves = (slice(0, None, 2), slice(1, None, 2)) if len(quadrature.nodes) > 1 else ()
        parts = tuple(_pooled(quadrature, half) for half in halves)
        return Density(nodes, weights, width or max(0.005 * extent, 1e-300), parts, quadrature.complete)

    @cached_property
    def sampling_error(self) -> float:
        """Wasserstein distance of one half of the probes to the other, over the spectrum's extent.

        nan for a single probe, 0 where all eigenvalues are known.
        """
        if not self.halves:
            return 0.0 if self.complete else math.nan
        (one, own), (other, others) = self.halves
        return wasserstein_distance(one, other, own, others) / max(self.extent, 1e-300)

    @property
    def extent(self) -> float:
        return float(self.nodes.max() - self.nodes.min())

    def wasserstein(self, eigenvalues: Any) -> float:
        """W₁ to the distribution of given eigenvalues, as a share of their extent."""
        given = np.asarray(eigenvalues, dtype=np.float64)
        return wasserstein_distance(self.nodes, given, self.weights) / max(float(given.max() - given.min()), 1e-300)

    def at(self, points: Any) -> np.ndarray:
        """Σ w · normal(x; θ, width) at each x."""
        apart = (np.asarray(points, dtype=np.float64)[..., None] - self.nodes) / self.width
        return np.exp(-0.5 * apart**2) @ self.weights / (self.width * math.sqrt(2 * math.pi))

    def figure(self, **others: Density) -> Any:
        """The smoothed density on a logarithmic scale, beside others: plain.figure(quotient=divided)."""
        from normscope.report.curvature import densities

        return densities({"plain" if others else "density": self, **others})


def _pooled(quadrature: Quadrature, chosen: slice) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = quadrature.nodes[chosen], quadrature.weights[chosen]
    pooled = np.concatenate(weights)
    return np.concatenate(nodes), pooled / pooled.sum()


def check_confidence(confidence: float) -> None:
    """Check that confidence is between 0 and 1."""
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be between 0 and 1, got {confidence}")
