"""Than 2025, Section 5.2: does the bound of Theorem 20 cover, where the true risk is known and the model has seen the data?

The distribution P lives on points of [0, 1], so that F(P, h), λ_i and L_i are exact sums. Losses are chosen after the sample was
drawn, as training does: for a loss fixed beforehand Hoeffding's inequality alone gives C√(ln(1/δ)/2m), which is less than g(D, δ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import log, sqrt

import torch
from torch import Tensor

from normscope.claims.calculus import (
    ROUGH_EPSILON,
    Map,
    chain,
    fixed_batch_norms,
    layer_norms,
    random_weights,
    scalar,
    spectral_product,
    uniform,
)
from normscope.claims.ledger import THAN, claim
from normscope.claims.verdicts import Case, Outcome, Trial, coverage, upper_bound, weaker
from normscope.guarantees.uncertainty import stated_uncertainty

DELTA = 0.05
POINTS = 800
LOSS_BOUND = 1.0


@dataclass(frozen=True)
class Sample:
    """m draws from a distribution on points of [0, 1] that are split into cells."""

    points: Tensor
    probabilities: Tensor
    counts: Tensor
    cell: Tensor  # of each point
    cells: int

    @property
    def setting(self) -> str:
        uneven = "even" if float(self.probabilities.max()) * POINTS < 2 else "uneven"
        return f"{self.size} draws from an {uneven} distribution, cells: {self.cells}"

    @property
    def size(self) -> int:
        return int(self.counts.sum())

    @property
    def seen(self) -> Tensor:
        """Whether each cell holds data."""
        return torch.zeros(self.cells).index_add(0, self.cell, self.counts.float()) > 0

    def risk(self, loss: Tensor) -> float:
        """F(P, h)."""
        return float(self.probabilities @ loss)

    def empirical(self, loss: Tensor) -> float:
        """F(D, h)."""
        return float(self.counts.double() @ loss) / self.size

    def constants(self, loss: Tensor) -> Tensor:
        """L_i of every cell: on a line, the steepest slope between neighbours of the cell."""
        slopes = loss.diff().abs() / self.points.diff()
        inside = self.cell[1:] == self.cell[:-1]
        return torch.zeros(self.cells, dtype=loss.dtype).scatter_reduce(0, self.cell[1:][inside], slopes[inside], "amax")

    def difference(self, values: Tensor) -> Tensor:
        """E[|v(x) − v(s)| : x in the cell of s] at every point s, v being given at the points."""
        together = (self.cell[:, None] == self.cell) * self.probabilities
        return (together * (values[:, None] - values).abs()).sum(1) / together.sum(1)

    @cached_property
    def distance(self) -> Tensor:
        """E[|x − s| : x in the cell of s] at every point s."""
        return self.difference(self.points)

    def spread(self, constants: Tensor) -> float:
        """Σ (m_i/m) λ_i L_i with λ_i the mean distance between a sample of a cell and a draw from it."""
        return float((self.counts * self.distance * constants[self.cell]).sum()) / self.size

    def sensitivity(self, loss: Tensor) -> float:
        """Σ (m_i/m) ε̄_i with ε̄_i the mean change of the loss between a sample of a cell and a draw from it."""
        return float((self.counts * self.difference(loss)).sum()) / self.size

    @cached_property
    def uncertainty(self) -> float:
        """g(D, δ) of the theorem, at the loss bound and confidence of these trials."""
        return uncertainty(int(self.seen.sum()), self.cells, self.size)


def uncertainty(seen: int, cells: int, size: int) -> float:
    """g(D, δ) of the theorem, at the loss bound and confidence of these trials."""
    return stated_uncertainty(seen, cells, size, LOSS_BOUND, DELTA)


def samples(generator: torch.Generator, repeats: int) -> Iterator[Sample]:
    """Even and very uneven distributions, few and many cells, small and large samples."""
    points = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    for size in (100, 400, 3000):
        for cells in (1, 4, 40):
            cell = (points * cells).long().clamp(max=cells - 1)
            for unevenness in (0.0, 3.0):
                for _ in range(repeats):
                    weights = torch.exp(unevenness * torch.randn(POINTS, generator=generator, dtype=torch.float64))
                    probabilities = weights / weights.sum()
                    draws = torch.multinomial(probabilities, size, replacement=True, generator=generator)
                    yield Sample(points, probabilities, draws.bincount(minlength=POINTS), cell, cells)


def memorized(sample: Sample, slope: float) -> Tensor:
    """min(C, slope · distance to the data): no loss on the sample, as much as the slope allows elsewhere."""
    data = sample.points[sample.counts > 0]
    return (slope * (sample.points[:, None] - data).abs().amin(1)).clamp(max=LOSS_BOUND)


Losses = dict[str, Tensor]  # what is said of a loss → its values at the points


def adversarial_losses(sample: Sample) -> Losses:
    """Losses that depend on the data: memorized with gentle and steep slopes, and C on every cell without data."""
    empty = (~sample.seen)[sample.cell].double() * LOSS_BOUND
    both = (memorized(sample, 1.0) + empty).clamp(max=LOSS_BOUND)
    steep = {f"memorized, slope {slope:g}": memorized(sample, slope) for slope in (1.0, 20.0, 1000.0)}
    return {**steep, "high on empty cells": empty, "memorized, high on empty cells": both}


def bound_of_theorem(empirical: float, spread: float, uncertain: float) -> float:
    """(13): F(D, h) + Σ (m_i/m) λ_i L_i + g(D, δ)."""
    return empirical + spread + uncertain


def cover(
    generator: torch.Generator, stated: Callable[[float, float, float], float], losses: Callable[[Sample], Losses]
) -> list[Trial]:
    """Theorem 20's bound against the true risk for every sample and every loss made from it."""
    trials = []
    for sample in samples(generator, 4):
        for name, loss in losses(sample).items():
            bound = stated(sample.empirical(loss), sample.spread(sample.constants(loss)), sample.uncertainty)
            trials.append(Trial(f"{sample.setting}, loss {name}", bound, sample.risk(loss)))
    return trials


@claim("T-T20", THAN, "Theorem 20, Eq. (13)", "With probability 1 − δ, F(P, h) ≤ F(D, h) + Σ (m_i/m) λ_i L_i + g(D, δ).")
def local_lipschitz_bound(generator: torch.Generator, stated: Callable[[float, float, float], float] = bound_of_theorem) -> Outcome:
    """Coverage over even and uneven distributions with losses that memorize the sample, L_i taken on whole cells.

    g(D, δ) alone exceeds Hoeffding's bound, so for a model that is fixed before the data the Lipschitz term adds nothing: what
    the theorem gives is a bound for models that depend on the data. Losses here are functions of x; where the loss jumps with the
    label, the cells must partition (x, y).
    """
    trials = cover(generator, stated, adversarial_losses)
    hoeffding = min(uncertainty(1, 1, size) / sqrt(log(1 / DELTA) / (2 * size)) for size in (100, 400, 3000))
    return coverage(trials, DELTA, **{"least g/Hoeffding": hoeffding})


def no_slope(sample: Sample, loss: Tensor) -> Tensor:
    """The constants of a loss that is flat around every sample."""
    return torch.zeros(sample.cells, dtype=loss.dtype)


@claim(
    "T-T20-local", THAN, "Paragraph after Theorem 20",
    "The theorem needs local Lipschitzness only on small areas around the samples of D.",
    "L_i must hold on the whole of every cell that has data, however far it reaches from the samples: a loss that is flat around "
    "them may jump beyond.",
)  # fmt: skip
def lipschitz_near_samples_only(generator: torch.Generator, stated: Callable[[Sample, Tensor], Tensor] = no_slope) -> Outcome:
    """A loss that is 0 within half a spacing of the data and C elsewhere is constant around every sample and has a large risk.

    Corrected: the same bound with L_i the constant of the whole cell, as the theorem itself says.
    """
    trials = []
    for sample in samples(generator, 2):
        loss = (sample.counts == 0).double() * LOSS_BOUND
        whole, local = (
            bound_of_theorem(sample.empirical(loss), sample.spread(constants), sample.uncertainty)
            for constants in (sample.constants(loss), stated(sample, loss))
        )
        trials.append(Trial(sample.setting, local, sample.risk(loss), whole))
    return coverage(trials, DELTA)


@claim(
    "T-C21",
    THAN,
    "Corollary 21",
    "The same bound holds where the loss is discontinuous on a set of probability zero that separates the cells.",
)
def discontinuous_loss_bound(
    generator: torch.Generator, stated: Callable[[float, float, float], float] = bound_of_theorem
) -> Outcome:
    """Losses that jump from cell to cell and are L_i-Lipschitz inside: the jumps lie between the points of P.

    It needs L_i on whole cells as in Theorem 20: with a jump inside a cell there is no L_i, see T-T20-local.
    """

    def jumping(sample: Sample) -> Losses:
        heights = torch.rand(sample.cells, generator=generator, dtype=torch.float64)
        heights = torch.where(sample.seen, heights / 2, torch.ones_like(heights))
        slopes = {f"of slope {slope:g} with jumps": memorized(sample, slope) for slope in (0.5, 20.0, 500.0)}
        return {name: (heights[sample.cell] + loss).clamp(max=LOSS_BOUND) for name, loss in slopes.items()}

    return coverage(cover(generator, stated, jumping), DELTA)


@claim("T-S-T1", THAN, "Slides, Theorem 1, Eq. (6)", "The bound is two-sided: |F(P, h) − F(D, h)| ≤ Σ (m_i/m) λ_i L_i + g.")
def two_sided_bound(generator: torch.Generator, stated: Callable[[float, float], float] = float.__add__) -> Outcome:
    """Coverage of the absolute difference, with losses that are low on the data and losses that are high there alone."""
    trials = []
    for sample in samples(generator, 3):
        for name, loss in adversarial_losses(sample).items():
            for side, values in {"": loss, "C less ": LOSS_BOUND - loss}.items():
                bound = stated(sample.spread(sample.constants(values)), sample.uncertainty)
                gap = abs(sample.risk(values) - sample.empirical(values))
                trials.append(Trial(f"{sample.setting}, loss {side}{name}", bound, gap))
    return coverage(trials, DELTA)


def batch_norm_factor(deviations: list[Tensor]) -> Tensor:
    """σ^-K with σ = min_k ‖1/σ_k‖^-1."""
    return torch.stack([(1 / deviation).norm() for deviation in deviations]).max() ** len(deviations)


def layer_norm_factor(layers: int) -> Tensor:
    """∏1/σ_k with σ_k = √ε, the least over all inputs."""
    return scalar(ROUGH_EPSILON ** (-layers / 2))


@claim("T-C22", THAN, "Corollary 22", "Theorem 20 with L_i ≤ L_f ∏‖W_k‖, times σ^-K with BN and ∏1/σ_k with LN.")
def network_bound(
    generator: torch.Generator,
    stated: Callable[[list[Tensor]], Tensor] = spectral_product,
    batch: Callable[[list[Tensor]], Tensor] = batch_norm_factor,
    layer: Callable[[int], Tensor] = layer_norm_factor,
) -> Outcome:
    """Random networks on [0, 1] with loss |h₁(x) − ½|, one label for all x: the steepest slope of the loss against each constant.

    Then the coverage of the whole bound for the network with the largest gap of nine, a choice that depends on the data.
    The constants are loose: see T-C10 and T-C11. Where labels differ, see T-C22-labels.
    """
    cases, trials = [], []
    for sample in samples(generator, 1):
        candidates = []
        for widths in ((1, 1), (1, 3), (1, 6, 3)):
            weights = random_weights(widths, generator)
            deviations = [10 ** uniform(generator, -0.5, 0.5, width) for width in widths[1:]]
            kinds: dict[str, tuple[list[Map], Tensor]] = {
                "plain": ([], stated(weights)),
                "BN": (fixed_batch_norms(deviations), stated(weights) * batch(deviations)),
                "LN": (layer_norms(len(weights)), stated(weights) * layer(len(weights))),
            }
            for name, (normalizers, constant) in kinds.items():
                loss = (chain(weights, sample.points[:, None], normalizers)[:, 0] - 0.5).abs()
                cases.append(Case(f"{name} network {widths}", constant, (loss.diff().abs() / sample.points.diff()).max()))
                candidates.append((sample.risk(loss) - sample.empirical(loss), loss, constant))
        gap, loss, constant = max(candidates, key=lambda candidate: candidate[0])
        spread = sample.spread(constant.expand(sample.cells))
        trials.append(Trial(sample.setting, spread + sample.uncertainty * float(loss.max()), gap))
    return weaker(upper_bound(cases), coverage(trials, DELTA))
