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

from normscope.bounds.uncertainty import stated_uncertainty
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
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, Trial, coverage, implication, upper_bound, weaker

DELTA = 0.05
POINTS = 800
LOSS_BOUND = 1.0
PROOF = "docs/laws.md, Cells"  # for cells that were fixed before the sample


@dataclass(frozen=True)
class DrawnSample:
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
        return self.occupied > 0

    @property
    def occupied(self) -> Tensor:
        """q_i = m_i/m of every cell."""
        return self.points.new_zeros(self.cells).index_add(0, self.cell, self.counts.double()) / self.size

    @property
    def underrepresented(self) -> Tensor:
        """Whether each cell has a smaller share of the data than of P."""
        return self.occupied < self.points.new_zeros(self.cells).index_add(0, self.cell, self.probabilities) - 1e-9

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
        return torch.einsum("sx,sx->s", self.shares, (values[:, None] - values).abs_())

    @cached_property
    def shares(self) -> Tensor:
        """P(x | the cell of s) for every pair of points (s, x)."""
        together = (self.cell[:, None] == self.cell) * self.probabilities
        return together.div_(together.sum(1, keepdim=True))

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


def samples(generator: torch.Generator, repeats: int) -> Iterator[DrawnSample]:
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
                    yield DrawnSample(points, probabilities, draws.bincount(minlength=POINTS), cell, cells)


def memorized(sample: DrawnSample, slope: float) -> Tensor:
    """min(C, slope · distance to the data): no loss on the sample, as much as the slope allows elsewhere."""
    data = sample.points[sample.counts > 0]
    return (slope * (sample.points[:, None] - data).abs().amin(1)).clamp(max=LOSS_BOUND)


Losses = dict[str, Tensor]  # what is said of a loss → its values at the points


def adversarial_losses(sample: DrawnSample) -> Losses:
    """Losses that depend on the data: memorized with gentle and steep slopes, and C on every cell without data.

    C on every cell that the sample underrepresents, 0 elsewhere, makes g necessary: L_i = 0 in each cell.
    """
    empty = (~sample.seen)[sample.cell].double() * LOSS_BOUND
    both = (memorized(sample, 1.0) + empty).clamp(max=LOSS_BOUND)
    steep = {f"memorized, slope {slope:g}": memorized(sample, slope) for slope in (1.0, 20.0, 1000.0)}
    missed = sample.underrepresented[sample.cell].double() * LOSS_BOUND
    return {**steep, "high on empty cells": empty, "memorized, high on empty cells": both, "high on underrepresented cells": missed}


def bound_of_theorem(empirical: float, spread: float, uncertain: float) -> float:
    """(13): F(D, h) + Σ (m_i/m) λ_i L_i + g(D, δ)."""
    return empirical + spread + uncertain


def cover(
    generator: torch.Generator, stated: Callable[[float, float, float], float], losses: Callable[[DrawnSample], Losses]
) -> list[Trial]:
    """Theorem 20's bound against the true risk for every sample and every loss made from it."""
    trials = []
    for sample in samples(generator, 4):
        for name, loss in losses(sample).items():
            empirical, spread = sample.empirical(loss), sample.spread(sample.constants(loss))
            terms = (("the Lipschitz term", spread), ("g", sample.uncertainty))
            bound = stated(empirical, spread, sample.uncertainty)
            trials.append(Trial(f"{sample.setting}, loss {name}", bound, sample.risk(loss), terms=terms))
    return trials


@claim("T-T20")
def local_lipschitz_bound(generator: torch.Generator, stated: Callable[[float, float, float], float] = bound_of_theorem) -> Ruling:
    """Proved in docs/laws.md (Cells), for cells that were fixed before the sample; the verdict rests on that proof.

    The trials (losses that memorize the sample, and C on the cells that it underrepresents, L_i on whole cells) can refute it, not
    prove it: the evidence says by how much each term could shrink before a violation shows.

    g(D, δ) alone exceeds Hoeffding's bound, so for a model that is fixed before the data the Lipschitz term adds nothing: what
    the theorem gives is a bound for models that depend on the data. Losses here are functions of x; where the loss jumps with the
    label, the cells must partition (x, y).
    """
    trials = cover(generator, stated, adversarial_losses)
    hoeffding = min(uncertainty(1, 1, size) / sqrt(log(1 / DELTA) / (2 * size)) for size in (100, 400, 3000))
    return coverage(trials, DELTA, PROOF, **{"least g/Hoeffding": hoeffding})


@claim("T-T20-local")
def lipschitz_on_cells_with_data(
    generator: torch.Generator, stated: Callable[[float, float, float], float] = bound_of_theorem
) -> Ruling:
    """Losses that jump at random between 0 and C on every cell without data, and are memorized with a slope where there is data.

    The theorem's hypothesis is f's slope on the cells that hold samples, the small areas around them; proof in docs/laws.md
    (Cells). On a smaller set than the cell it is not enough: a loss that is 0 within half a spacing of the samples and C beyond,
    inside of one cell, breaks the bound with L = 0 (evidence).
    """

    def wild(sample: DrawnSample) -> Losses:
        noise = (torch.rand(POINTS, generator=generator, dtype=torch.float64) > 0.2).double() * LOSS_BOUND
        inside = sample.seen[sample.cell]
        return {
            f"memorized, slope {slope:g}, wild elsewhere": torch.where(inside, memorized(sample, slope), noise)
            for slope in (1.0, 20.0)
        }

    sample = next(samples(generator, 1))
    spiky = (sample.counts == 0).double() * LOSS_BOUND
    flat = {"inside of one cell, L = 0 near the samples: bound": sample.uncertainty, "risk": sample.risk(spiky)}
    return coverage(cover(generator, stated, wild), DELTA, PROOF, **flat)


def chosen_after(size: int, risk: float) -> float:
    """(13) on cells that were chosen after the sample: |T| = 1, N = 2, L = 0."""
    return uncertainty(1, 2, size)


@claim("T-T20-partition")
def partition_from_the_sample(generator: torch.Generator, stated: Callable[[int, float], float] = chosen_after) -> Ruling:
    """P uniform on [0, 1], m samples, X_1 = balls of radius 1/(200 m) around them, X_2 = the rest, f = 0 on X_1 and 1 on X_2.

    F(D, h) = 0, L = 0 on X_1, X_2 holds no data: the bound is g with |T| = 1 and N = 2. X_1 has probability at most 1/100.
    """
    cases = []
    for size in (1000, 10_000):
        draws, radius = torch.rand(size, generator=generator, dtype=torch.float64).sort().values, 1 / (200 * size)
        low, high = (draws - radius).clamp(min=0), (draws + radius).clamp(max=1)
        covered = (high - torch.maximum(low, torch.cat([low[:1], high[:-1]]))).clamp(min=0).sum()
        risk = LOSS_BOUND * (1 - covered)
        cases.append(Case(f"{size} samples (bound on the risk)", scalar(stated(size, float(risk))), risk, scalar(LOSS_BOUND)))
    return implication(cases, {"delta": DELTA})


@claim("T-C21")
def discontinuous_loss_bound(
    generator: torch.Generator, stated: Callable[[float, float, float], float] = bound_of_theorem
) -> Ruling:
    """Losses that jump from cell to cell and are L_i-Lipschitz inside: the jumps lie between the points of P.

    Proof: docs/laws.md (Cells), which asks for slopes inside of cells only. With a jump inside a cell there is no L_i.
    """

    def jumping(sample: DrawnSample) -> Losses:
        heights = torch.rand(sample.cells, generator=generator, dtype=torch.float64)
        heights = torch.where(sample.seen, heights / 2, torch.ones_like(heights))
        slopes = {f"of slope {slope:g} with jumps": memorized(sample, slope) for slope in (0.5, 20.0, 500.0)}
        return {name: (heights[sample.cell] + loss).clamp(max=LOSS_BOUND) for name, loss in slopes.items()}

    return coverage(cover(generator, stated, jumping), DELTA, PROOF)


@claim("T-S-T1")
def two_sided_bound(generator: torch.Generator, stated: Callable[[float, float], float] = float.__add__) -> Ruling:
    """Coverage of the absolute difference, with losses that are low on the data and losses that are high there alone.

    Proved in docs/laws.md (Cells, two-sided), for cells that were fixed before the sample; the trials cannot prove it.
    """
    trials = []
    for sample in samples(generator, 3):
        for name, loss in adversarial_losses(sample).items():
            for side, values in {"": loss, "C less ": LOSS_BOUND - loss}.items():
                spread = sample.spread(sample.constants(values))
                terms = (("the Lipschitz term", spread), ("g", sample.uncertainty))
                gap = abs(sample.risk(values) - sample.empirical(values))
                bound = stated(spread, sample.uncertainty)
                trials.append(Trial(f"{sample.setting}, loss {side}{name}", bound, gap, terms=terms))
    return coverage(trials, DELTA, PROOF)


def sum_of_errors(optimization: Tensor, deviation: Tensor) -> Tensor:
    return optimization + 2 * deviation


@claim("T-S-errors")
def error_decomposition(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = sum_of_errors) -> Ruling:
    """F(P, h_o) − F(P, h⋆) = [F(P, h_o) − F(D, h_o)] + [F(D, h_o) − F(D, h_o⋆)] + [F(D, h_o⋆) − F(D, h⋆)] + [F(D, h⋆) − F(P, h⋆)].

    The third is at most 0. Random risks of finite families; reached by two models of risks (1, 0) and empirical risks (½, ½).
    """
    families = [torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)]
    families += [torch.rand(2, size, generator=generator, dtype=torch.float64) for size in (2, 5, 50) for _ in range(5)]
    cases = []
    for true, empirical in families:
        deviation = (true - empirical).abs().max()
        for chosen in range(min(len(true), 5)):
            bound = stated(empirical[chosen] - empirical.min(), deviation)
            cases.append(Case(f"{len(true)} models, model {chosen + 1} chosen", bound, true[chosen] - true.min()))
    return upper_bound(cases)


def batch_norm_factor(deviations: list[Tensor]) -> Tensor:
    """σ^-K with σ = min_k ‖1/σ_k‖^-1."""
    return torch.stack([(1 / deviation).norm() for deviation in deviations]).max() ** len(deviations)


def layer_norm_factor(layers: int) -> Tensor:
    """∏1/σ_k with σ_k = √ε, the least over all inputs."""
    return scalar(ROUGH_EPSILON ** (-layers / 2))


@claim("T-C22")
def network_bound(
    generator: torch.Generator,
    stated: Callable[[list[Tensor]], Tensor] = spectral_product,
    batch: Callable[[list[Tensor]], Tensor] = batch_norm_factor,
    layer: Callable[[int], Tensor] = layer_norm_factor,
) -> Ruling:
    """Random networks on [0, 1] with loss |h₁(x) − ½|, one label for all x: the steepest slope of the loss against each constant.

    Then the coverage of the whole bound for the network with the largest gap of nine, a choice that depends on the data; it is
    Theorem 20 (docs/laws.md, Cells) with the constants of Corollaries 10 and 11.
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
    return weaker(upper_bound(cases), coverage(trials, DELTA, PROOF))
