"""PAC-Bayes: noise of the stated standard deviation, the divergence of Gaussians, inverses that err upwards, and coverage."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from scipy.stats import binom
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

import normscope as ns
from normscope.bounds.folding import folded
from normscope.bounds.grids import log_inverse_weight, on_grid
from normscope.bounds.losses import zero_one
from normscope.bounds.posterior import ErrorEstimate, GaussianPosterior, binary_kl, kl_inverse
from normscope.bounds.theorems.pac_bayes import best_prior, distance_between, gaussian_kl, langford_seeger, log_moment, mcallester
from normscope.core.magnitude import Magnitude
from tests.bounds.distributions import DISTRIBUTIONS
from tests.bounds.models import batch_norm, data, plain, seeded


@pytest.mark.parametrize("sigma", [0.01, 0.5, 3.0])
def test_noise_has_standard_deviation_sigma_and_not_its_square(sigma):
    model = seeded(nn.Linear(300, 200)).double()
    drawn = GaussianPosterior(model, sigma).draw(torch.Generator().manual_seed(0))
    noise = torch.cat([(drawn[name] - value.detach()).flatten() for name, value in model.named_parameters()])
    assert float(noise.std()) == pytest.approx(sigma, rel=0.02) and abs(float(noise.mean())) < 0.03 * sigma


@pytest.mark.parametrize(("sigma", "prior", "distance"), [(0.1, 0.1, 1.0), (0.1, 2.0, 3.0), (2.0, 0.5, 0.0), (1e-3, 1.0, 10.0)])
def test_divergence_is_that_of_gaussians(sigma, prior, distance):
    mean = torch.zeros(7, dtype=torch.float64)
    mean[0] = distance
    deviations = [torch.full((7,), value, dtype=torch.float64) for value in (sigma, prior)]
    truth = float(kl_divergence(Normal(mean, deviations[0]), Normal(torch.zeros_like(mean), deviations[1])).sum())
    assert float(gaussian_kl(7, sigma, distance, Magnitude(prior))) == pytest.approx(truth, rel=1e-9, abs=1e-12)


def test_divergence_of_huge_distances_stays_in_log_domain():
    assert gaussian_kl(10**9, 1e-200, 1e200, Magnitude(1e-100)).log10 == pytest.approx(600, abs=1)
    value = mcallester(0.1, gaussian_kl(10**9, 1e-200, 1e200, Magnitude(1e-100)), 1000, 0.05)
    assert value.finite and value.log10 > 290 and "inf" not in str(value)
    assert langford_seeger(0.1, Magnitude.from_log10(400), 1000, 0.05) == 1.0


@pytest.mark.parametrize("distance", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dimension", [3, 10**6])
def test_the_prior_is_the_best_of_the_grid(distance, dimension):
    prior, divergence, weight = best_prior(dimension, 0.3, distance)
    others = [gaussian_kl(dimension, 0.3, distance, on_grid(k)) + log_inverse_weight(k) for k in range(-60, 160)]
    assert float(divergence + weight) <= float(min(others)) * (1 + 1e-12)
    assert divergence == gaussian_kl(dimension, 0.3, distance, prior)


@pytest.mark.quick(12)
@pytest.mark.parametrize("q", [0.0, 1e-6, 0.1, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("budget", [0.0, 1e-6, 0.01, 1.0, 50.0, 1e300])
def test_the_inverse_of_kl_errs_upwards(q, budget):
    p = kl_inverse(q, budget)
    assert q <= p <= 1
    if p < 1:
        assert binary_kl(q, p) >= budget * (1 - 1e-9) - 1e-12
        assert binary_kl(q, max(q, p - 1e-9)) <= budget + 1e-9


def test_pinsker_is_weaker_and_both_are_monotone():
    for divergence in (1.0, 10.0, 500.0):
        strict, loose = (form(0.1, Magnitude(divergence), 1000, 0.05) for form in (langford_seeger, mcallester))
        assert strict <= loose
    for form in (langford_seeger, mcallester):
        values = [form(0.1, Magnitude(20), size, 0.05) for size in (100, 1000, 10**5)]
        assert values == sorted(values, reverse=True) and len(set(map(float, values))) == 3
        assert form(0.1, Magnitude(20), 1000, 0.01) > form(0.1, Magnitude(20), 1000, 0.1)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 30, 400])
def test_the_moment_that_maurer_bounds(size):
    """E e^{m kl(k/m ‖ p)} over Binomial(m, p) is at most 2√m for m ≥ 8, and m + 1 for all m."""
    for p in (0.01, 0.2, 0.5, 0.9):
        logs = [float(binom.logpmf(k, size, p)) + size * binary_kl(k / size, p) for k in range(size + 1)]
        moment = sum(map(math.exp, logs))
        assert moment <= math.exp(log_moment(size)) * (1 + 1e-9)


def test_mcallester_by_hand():
    assert float(mcallester(0.2, Magnitude(10), 50, 0.1)) == pytest.approx(
        0.2 + math.sqrt((10 + math.log(2 * math.sqrt(50) / 0.1)) / 100)
    )


def test_estimates_from_chunks_of_unequal_size_cover():
    """Draws of very different means and one short chunk: the upper end misses the mean rarely."""
    generator = torch.Generator().manual_seed(0)
    sizes = [32] * 6 + [5]
    means = torch.tensor([0.05, 0.1, 0.4, 0.05, 0.2, 0.0, 0.9])
    truth = float((torch.tensor(sizes) * means).sum() / sum(sizes))
    missed = 0
    for _ in range(2000):
        wrong = [int(torch.bernoulli(mean, generator=generator)) * size for mean, size in zip(means, sizes, strict=True)]
        missed += ErrorEstimate.of(zip(wrong, sizes, strict=True)).upper(0.1) < truth
    assert missed <= binom.isf(1e-3, 2000, 0.1)


def test_statistics_are_folded_before_the_prior_looks():
    model, sample = batch_norm(3, 2), data(60, 3)
    scaled = copy.deepcopy(model)
    with torch.no_grad():  # the same function by other statistics
        scaled[0].weight *= 100
        scaled[0].bias *= 100
        scaled[1].running_mean *= 100
        scaled[1].running_var.copy_((scaled[1].running_var + model[1].eps) * 1e4 - model[1].eps)
    first, second = (folded(each, sample[0][:2]) for each in (model, scaled))
    assert distance_between(first, None) == pytest.approx(distance_between(second, None), rel=1e-4)


def test_a_prior_at_the_initialization_is_nearer():
    initial, sample = plain(3, 2), data(60, 3)
    model = copy.deepcopy(initial)
    with torch.no_grad():
        model[0].weight += 0.01
    near, far = (ns.generalization(model, "zero-one", sample, select=["PAC-Bayes"], initial=given)[0] for given in (initial, None))
    assert near.parts["‖w − w₀‖"] == pytest.approx(0.01 * math.sqrt(model[0].weight.numel()), rel=1e-3)
    assert near.value < far.value and "initialization" in near.assumptions[1] and "zero" in far.assumptions[1]
    assert any("not invariant" in text for text in far.assumptions)
    other = ns.generalization(model, "zero-one", sample, select=["PAC-Bayes"], initial=nn.Linear(3, 2))
    assert "other parameters" in other.not_given["PAC-Bayes"]


def test_the_same_generator_gives_the_same_bound_and_the_model_stays():
    model, sample = batch_norm(3, 2), data(60, 3)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first, again = (
        ns.generalization(model, "zero-one", sample, select=["PAC-Bayes"], generator=torch.Generator().manual_seed(3))[0].value
        for _ in range(2)
    )
    assert first == again and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("distribution", [DISTRIBUTIONS[1], DISTRIBUTIONS[4]], ids=lambda distribution: distribution.name)
@pytest.mark.parametrize("draws", [3, pytest.param(500, marks=pytest.mark.full)])
def test_the_risk_of_the_randomized_predictor_is_covered(distribution, draws):
    generator, failed = torch.Generator().manual_seed(draws), 0
    for _ in range(draws):
        train = distribution.draw(80, generator)
        model = distribution.model(train, generator)
        found = ns.generalization(model, "zero-one", train, delta=0.1, select=["PAC-Bayes"], generator=generator)
        bound = found["PAC-Bayes (kl)"]
        twin = folded(model, train[0][:2]).float()
        posterior = GaussianPosterior(twin, bound.parts["σ"])
        drawn = [posterior.draw(generator) for _ in range(20)]
        risks = [distribution.risk(partial(functional_call, twin, parameters), zero_one()) for parameters in drawn]
        failed += bool(bound.value < sum(risks) / len(risks))
    assert failed <= binom.isf(1e-3, draws, 0.1)


class _Mixed(nn.Module):
    """A gate of bfloat16, which comes first, and weights of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.weight = nn.Parameter(100 * torch.randn(2, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gate.to(x.dtype)) @ self.weight.to(x.dtype).T


def test_the_divergence_is_that_of_the_noise_that_is_drawn():
    """It is drawn around weights in the type of the first parameter, to which others are rounded."""
    model = seeded(_Mixed())
    initial = copy.deepcopy(model)
    with torch.no_grad():
        model.weight += 1e-3
    points = torch.randn(100, 20)
    labels = initial(points).argmax(1)
    found = ns.generalization(model, "zero-one", (points, labels), initial=initial, select=["PAC-Bayes"])
    moved = model.weight.detach().bfloat16().double() - initial.weight.detach().double()
    for bound in found.bounds:
        assert float(bound.parts["‖w − w₀‖"]) == pytest.approx(float(moved.norm()), rel=1e-9)
