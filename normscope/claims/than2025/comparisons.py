"""Than 2025, Section 5.2: the bound that Theorem 20 comes from, what labels do to it, and how it compares with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor

from normscope.bounds.theorems.hou2023 import hou
from normscope.bounds.theorems.lyu2022 import lyu
from normscope.claims.calculus import chain, random_weights, scalar, spectral_product
from normscope.claims.claim import claim
from normscope.claims.than2025.generalization import (
    DELTA,
    LOSS_BOUND,
    POINTS,
    PROOF,
    DrawnSample,
    adversarial_losses,
    bound_of_theorem,
    samples,
    uncertainty,
)
from normscope.claims.verdicts import Case, Ruling, Trial, coverage, implication, upper_bound, weaker
from normscope.core.magnitude import Magnitude

CONSTANT = 1.0  # L and τ of the losses that are compared
MOST_CELLS = 2**20  # of a partition that is tried
FILLED = ((1, 1, 100), (10, 10, 1000), (100, 100, 10_000), (1000, 1000, 10**6))  # cells, all with data, and samples


@claim("T-Eq66")
def sensitivity_bound(generator: torch.Generator, stated: Callable[[float, float, float], float] = bound_of_theorem) -> Ruling:
    """Coverage as for T-T20, with the same losses and one that is linear, for which both sums are equal; then sum against sum.

    It needs no Lipschitz constant, and so holds for any loss, with jumps or without: proved in docs/laws.md (Cells), for cells that
    were fixed before the sample.
    """
    cases, trials = [], []
    for sample in samples(generator, 2):
        for name, loss in {**adversarial_losses(sample), "linear": sample.points}.items():
            change, spread = sample.sensitivity(loss), sample.spread(sample.constants(loss))
            setting = f"{sample.setting}, loss {name}"
            cases.append(Case(setting, scalar(spread), scalar(change)))
            terms = (("the sensitivity term", change), ("g", sample.uncertainty))
            bound = stated(sample.empirical(loss), change, sample.uncertainty)
            trials.append(Trial(setting, bound, sample.risk(loss), terms=terms))
    return weaker(upper_bound(cases), coverage(trials, DELTA, PROOF))


def attacked(loss: Tensor, radius: float) -> Tensor:
    """The largest loss within a radius of every point; the points are even on [0, 1]."""
    reach = min(int(radius * (POINTS - 1) + 1e-6), POINTS - 1)
    most: Tensor = torch.nn.functional.max_pool1d(loss[None], 2 * reach + 1, 1, reach)[0]
    return most


@claim("T-S-adversarial")
def attacks_bound_the_sum(generator: torch.Generator, stated: Callable[[float], float] = float) -> Ruling:
    """In (6) the sum over cells comes from Σ (m_i/m) E[f : X_i]. Where no two points of a cell are further apart than r, that is at
    most the mean over the samples of max f within r, which is what adversarial training of radius r makes small.

    Losses as for T-T20 and a constant one, which reaches it. stated: the radius of the attack, of the cells' diameter. A
    shorter attack is not enough: all samples of a cell at its left end, f = C near its right end. The right side of (6) itself
    need not become small: c|sin kx| is at most c under every attack, and has L = ck.
    """
    cases = []
    for sample in samples(generator, 1):
        losses = {**adversarial_losses(sample), "constant": torch.ones_like(sample.points)}
        cases += [_attacked_case(f"{sample.setting}, loss {name}", sample, loss, stated) for name, loss in losses.items()]
    cells, points = 4, torch.linspace(0, 1, POINTS, dtype=torch.float64)
    cell = (points * cells).long().clamp(max=cells - 1)
    counts = torch.zeros(POINTS, dtype=torch.int64)
    counts[(cell == cells - 1).nonzero()[0]] = 10
    sample = DrawnSample(points, torch.full((POINTS,), 1 / POINTS, dtype=torch.float64), counts, cell, cells)
    far = (points > 1 - 0.05 / cells).double() * LOSS_BOUND
    return upper_bound([*cases, _attacked_case("samples at the left end, loss at the right", sample, far, stated)])


def _attacked_case(name: str, sample: DrawnSample, loss: Tensor, stated: Callable[[float], float]) -> Case:
    inside = sample.shares @ loss  # E[f : X_i] at every point
    bound = sample.empirical(attacked(loss, stated(1 / sample.cells)))
    return Case(name, scalar(bound), scalar(sample.empirical(inside)))


def one_label(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5)


def two_labels(x: Tensor) -> Tensor:
    """1 right of the middle, else 0."""
    return (x > 0.5).to(x)


@claim("T-C22-labels")
def loss_with_labels(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = two_labels) -> Ruling:
    """Random networks on a line with loss |h₁(x) − y(x)|, L_f = L_y = 1: the steepest slope of the loss against ∏‖W_k‖.

    stated: y(x). Beside it, cross-entropy (L_f = √2, no L_y) at the logits (100, 0) when the label changes, ‖y − y'‖ = √2.
    """
    x = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    labels = stated(x)
    jump = (labels.diff().abs() / x.diff()).max()
    cases = []
    for widths in ((1, 1), (1, 4), (1, 6, 3)):
        weights = random_weights(widths, generator)
        loss = (chain(weights, x[:, None])[:, 0] - labels).abs()
        bound = spectral_product(weights)
        cases.append(Case(f"network {widths}, labels 0 and 1", bound, (loss.diff().abs() / x.diff()).max(), bound + jump))
    first, second = -torch.tensor([100.0, 0.0], dtype=torch.float64).log_softmax(0)
    return upper_bound(cases, **{"change of cross-entropy": float(second - first), "L_f‖y − y'‖": 2.0})


def sum_of_hou(distance: float, cells: int, size: int) -> float:
    """γ(L) + √(N/m) of (HKK) without its hidden constant, for cells of equal weight and diameter."""
    weights = torch.full((cells,), 1 / cells)
    return float(hou(0.0, weights, torch.full((cells,), distance), Magnitude(CONSTANT), cells, size, DELTA)[0])


def sum_of_filled(cells: int, size: int) -> float:
    """λL + g of Theorem 20 where every cell has data."""
    return CONSTANT / cells + LOSS_BOUND * uncertainty(cells, cells, size)


@claim("T-HKK")
def smaller_than_hou(
    generator: torch.Generator,
    stated: Callable[[float, int, int], float] = sum_of_hou,
    partitions: Sequence[tuple[int, int, int]] = FILLED,
) -> Ruling:
    """N cells of diameter 1/N, L_i = 1 and C = 1: λL + g of Theorem 20 against what (HKK) adds to F(D, h).

    partitions: cells, those with data, samples.
    """
    cases = []
    for cells, seen, size in partitions:
        ours = CONSTANT / cells + LOSS_BOUND * uncertainty(seen, cells, size)
        what = f"{cells} cells, {seen} with data, {size} samples"
        cases.append(Case(what, scalar(stated(1 / cells, cells, size)), scalar(ours)))
    return implication(cases, {"delta": DELTA})


def sum_of_lyu(size: int) -> float:
    """min_μ τμ²/2 + ln m/(μ√m) of (LLA), 1 for its hidden factor and 0 for its constant."""
    return float(lyu(0.0, CONSTANT, size)[0])


def sum_of_theorem(dimension: int, size: int) -> float:
    """The least λL + g over grids of k^n cells of the unit cube with λ = √n/(2k), at most m of which have data."""
    best = LOSS_BOUND * uncertainty(1, 1, size) + CONSTANT * sqrt(dimension) / 2
    side = 2
    while (cells := side**dimension) <= MOST_CELLS:
        best = min(best, CONSTANT * sqrt(dimension) / (2 * side) + LOSS_BOUND * uncertainty(min(cells, size), cells, size))
        side += 1
    return best


@claim("T-LLA")
def more_efficient_than_lyu(
    generator: torch.Generator, stated: Callable[[int], float] = sum_of_lyu, dimensions: tuple[int, ...] = (2, 4, 8)
) -> Ruling:
    """Sums that are added to F(D, h) for L = τ = C = 1: the factor by which each falls from m = 10⁴ to 10⁸, free of constants.

    dimensions: of the inputs, uniform in a cube.
    """
    few, many = 10**4, 10**8
    cases = [
        Case(
            f"{n} dimensions, part that is left from {few:g} to {many:g} samples",
            scalar(stated(many) / stated(few)),
            scalar(sum_of_theorem(n, many) / sum_of_theorem(n, few)),
        )
        for n in dimensions
    ]
    return implication(cases, {"sharpness": "not sharp here: rates are compared, which no factor changes"})
