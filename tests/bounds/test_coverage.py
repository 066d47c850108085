"""Every certified bound covers: it fails on no more than its share δ of draws, also for models that were trained on the draw."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import binom

from normscope.bounds.bound import GAP
from normscope.bounds.generalization import generalization
from normscope.bounds.losses import loss_of
from normscope.bounds.partition import Partition
from normscope.bounds.theorems import TABLE
from normscope.bounds.uncertainty import sharper_uncertainty, stated_uncertainty
from tests.bounds.distributions import DISTRIBUTIONS, Distribution

DELTA = 0.1
OWN = [name for name in TABLE if name.startswith(("held-out", "Than 2025"))]
UNLIKELY = 1e-3


def most_failures(draws: int, delta: float) -> int:
    """More than these are evidence against a coverage of 1 − δ."""
    return int(binom.isf(UNLIKELY, draws, delta))


def failures(distribution: Distribution, draws: int, seed: int) -> tuple[Counter[str], set[str]]:
    """How often each certified bound fell below the truth, and which there were."""
    generator = torch.Generator().manual_seed(seed)
    failed: Counter[str] = Counter()
    seen: set[str] = set()
    for _ in range(draws):
        train, held_out = distribution.draw(80, generator), distribution.draw(40, generator)
        model = distribution.model(train, generator)
        found = generalization(
            model,
            distribution.loss,
            train,
            held_out=held_out,
            delta=DELTA,
            partition=Partition("voronoi", 4),
            select=OWN,
            generator=generator,
        )
        for bound in found:
            if bound.certified:
                truth = distribution.risk(model, loss_of(bound.loss)) - (found.empirical if bound.quantity == GAP else 0.0)
                seen.add(bound.name)
                failed[bound.name] += bool(bound.value < truth)
    return failed, seen


@pytest.mark.quick(1)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
@pytest.mark.parametrize("draws", [10, pytest.param(500, marks=pytest.mark.full)])
def test_certified_bounds_cover(distribution, draws):
    failed, seen = failures(distribution, draws, seed=draws)
    place = "Corollary 21" if distribution.loss == "zero-one" else "Theorem 20"
    assert {"held-out Hoeffding", "held-out binomial", f"Than 2025, {place}, local constants, sharper g"} <= seen
    assert max(failed.values()) <= most_failures(draws, DELTA), failed


def test_the_binomial_bound_is_exact_enough_to_fail_sometimes():
    """A test of coverage that nothing can fail says nothing: the tightest bound does miss, about as often as it may."""
    distribution, generator = DISTRIBUTIONS[1], torch.Generator().manual_seed(0)
    model = distribution.model(None, generator)
    truth = distribution.risk(model, loss_of("zero-one"))
    missed = 0
    for _ in range(200):
        found = generalization(
            model,
            "zero-one",
            distribution.draw(1, generator),
            held_out=distribution.draw(100, generator),
            delta=DELTA,
            select=["held-out binomial"],
        )
        missed += bool(found[0].value < truth)
    assert 0 < missed <= most_failures(200, DELTA)


@pytest.mark.quick(6)
@pytest.mark.parametrize("unevenness", [0.0, 2.0, 5.0])
@pytest.mark.parametrize("cells", [2, 30, 2000])
@pytest.mark.parametrize("size", [10, 300])
def test_uncertainty_covers_the_worst_loss_of_all(unevenness, cells, size):
    """sup over a in [0, C]^N of Σ (p_i − q_i) a_i is C times the total variation: both g cover it, so they hold for any model."""
    generator = torch.Generator().manual_seed(cells + size)
    p = torch.softmax(unevenness * torch.randn(cells, generator=generator, dtype=torch.float64), 0)
    draws, failed = 500, Counter()
    for _ in range(draws):
        counts = torch.multinomial(p, size, replacement=True, generator=generator).bincount(minlength=cells).double()
        worst = 3 * float((counts / size - p).clamp(min=0).sum())
        seen = counts[counts > 0]
        failed["sharper"] += worst > sharper_uncertainty(seen, cells, 3.0, DELTA)
        failed["stated"] += worst > stated_uncertainty(len(seen), cells, size, 3.0, DELTA)
    assert max(failed.values()) <= most_failures(draws, DELTA)
