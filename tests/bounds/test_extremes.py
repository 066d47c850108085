"""Weights, data and settings far from 1: no square that underflows makes a bound too small."""

from __future__ import annotations

import copy
import math

import mpmath
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.bounds.flatness import filter_noise
from normscope.bounds.grids import LEAST_POWER, on_grid, power_above
from normscope.bounds.network import network
from normscope.bounds.posterior import kl_inverse
from normscope.bounds.sample import _slopes
from normscope.bounds.theorems.bartlett2017 import bartlett
from normscope.bounds.theorems.bartlett2017 import rademacher_complexity as bartlett_complexity
from normscope.bounds.theorems.cisneros2025 import cisneros
from normscope.bounds.theorems.golowich2018 import golowich
from normscope.bounds.theorems.golowich2018 import rademacher_complexity as golowich_complexity
from normscope.bounds.theorems.hou2023 import hou
from normscope.bounds.theorems.lyu2022 import lyu
from normscope.bounds.theorems.neyshabur2018 import neyshabur
from normscope.bounds.theorems.pac_bayes import best_prior, distance_between, gaussian_kl
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from normscope.curvature.objective import Objective
from tests.bounds.models import data, plain, seeded

SIZES = [
    (torch.float64, 1e160), (torch.float64, 1e-160), (torch.float64, 1e-170), (torch.float64, 1e-200), (torch.float32, 1e30),
    (torch.float32, 1e-30),
]  # fmt: skip
MODELS = {
    "linear": (lambda: nn.Linear(2, 3), (2,)),
    "plain": (plain, (2,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2)), (2, 5, 5)),
}


def scaled(model: nn.Module, size: float, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        for value in model.parameters():
            value *= size
    return model


def ratio(found: Magnitude, expected: Magnitude) -> float:
    return math.exp(found.log - expected.log)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_norms_of_layers_have_the_size_of_weights(name, dtype, size):
    make, shape = MODELS[name]
    model, example = seeded(make()), torch.zeros(1, *shape, dtype=dtype)
    expected, found = network(scaled(model, 1, dtype), example), network(scaled(model, size, dtype), example)
    for one, other in zip(expected.layers, found.layers, strict=True):
        for kind in ("spectral", "frobenius", "rows", "bias"):
            assert ratio(getattr(other, kind), getattr(one, kind) * size) == pytest.approx(1, rel=1e-5), kind
    assert ratio(cisneros(found, 4), cisneros(expected, 4) * Magnitude(size) ** (2 * found.depth)) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("size", [1e160, 1e-160, 1e-170, 1e-200])
def test_bounds_by_margins_depend_on_norms_over_the_margin(size):
    torch.manual_seed(0)
    margins, norms = torch.rand(50, dtype=torch.float64) + 0.1, torch.rand(50, dtype=torch.float64) + 0.1
    model = nn.Linear(2, 3, bias=False)
    chain, other = (network(scaled(model, factor), torch.zeros(1, 2).double()) for factor in (1, size))
    for bound in (bartlett, neyshabur, lambda chain, margins, norms, delta: golowich(chain, margins, norms, 2, delta)):
        expected, known = bound(chain, margins, norms, 0.05)
        for found, parts in (bound(other, margins * size, norms, 0.05), bound(chain, margins * size, norms * size, 0.05)):
            assert found >= expected / 2  # three values on a grid of ratio 2^(1/4)
            assert "Rademacher complexity" not in known or 0.5 <= ratio(*(p["Rademacher complexity"] for p in (parts, known))) <= 2


@pytest.mark.parametrize("size", [1e160, 1e-170, 5e-324])
def test_complexities_have_the_size_of_the_data(size):
    norms = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    for complexity in (
        lambda norms: golowich_complexity(Magnitude(1), 2, norms),
        lambda norms: bartlett_complexity(Magnitude(1e300) * 1e300, 4, norms, 1.0),
    ):
        assert ratio(complexity(norms * size), complexity(norms) * size) == pytest.approx(1)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_the_distance_to_a_prior(dtype, size):
    model, prior = plain().to(dtype), seeded(plain(), 1).to(dtype)
    for other in (None, prior):
        moved = None if other is None else scaled(other, size, dtype)
        found = distance_between(scaled(model, size, dtype), moved)
        assert found / size == pytest.approx(distance_between(model, other), rel=1e-6)


@pytest.mark.parametrize("sigma", [1e-170, 1e-3, 1.0, 1e160])
@pytest.mark.parametrize("distance", [1e-200, 1e-170, 1.0, 1e160])
def test_the_divergence_of_normal_distributions(sigma, distance):
    prior, found, _ = best_prior(10, sigma, distance)
    for scale, value in ((prior, found), (Magnitude(1), gaussian_kl(10, sigma, distance, Magnitude(1)))):
        with mpmath.workdps(400):
            spread = (mpmath.mpf(sigma) / mpmath.exp(scale.log)) ** 2
            exact = 5 * (spread - 1 - mpmath.log(spread)) + (mpmath.mpf(distance) / mpmath.exp(scale.log)) ** 2 / 2
            assert float(mpmath.log(exact)) == pytest.approx(value.log, rel=1e-12, abs=1e-9) if exact > 1e-15 else value < 1e-14


@pytest.mark.parametrize("sharpness", [1e300, 1.0, 1e-320])
def test_lyu_at_its_minimum(sharpness):
    value, _ = lyu(0.0, sharpness, 100)
    scale = mpmath.log(100) / 10
    noise = mpmath.cbrt(scale / mpmath.mpf(sharpness))
    assert float(value) == pytest.approx(float(sharpness * noise**2 / 2 + scale / noise), rel=1e-9)


@pytest.mark.parametrize("size", [1e160, 1e-170])
def test_hou_by_its_constant(size):
    weights, distances = torch.tensor([0.5, 0.5]).double(), torch.tensor([1.0, 2.0]).double()
    _, found = hou(0.1, weights, distances, Magnitude(size) * size, 4, 10, 0.05)
    known = max(Magnitude(size) * size, Magnitude(1)) * 1.5 + Magnitude(size) * size * (2 * math.sqrt(math.log(80) / 10))
    assert ratio(found, known) == pytest.approx(1)


@pytest.mark.parametrize("size", [1e160, 1e-170, 1e-200])
def test_slopes_of_samples(size):
    leaf = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    losses = (leaf * torch.tensor([3.0, 4.0]).double() * size).sum(1)
    torch.testing.assert_close(_slopes(losses, [leaf]) / size, torch.full((2,), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_filter_noise_has_the_size_of_filters(size):
    inputs, labels = data(8)
    linear = seeded(nn.Linear(2, 2))

    def noise(model: nn.Module) -> torch.Tensor:
        objective = Objective(model, nn.functional.cross_entropy, (inputs, labels))
        return filter_noise(objective)[1](torch.Generator().manual_seed(0))

    torch.testing.assert_close(noise(scaled(linear, size, torch.float32)) / size, noise(linear), rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1e-170, 1e-30, 1.0, 1e30, 1e150])
def test_every_theorem_of_a_model(size):
    """A homogeneous model of one layer: what certified bounds say may lose by their grids, and never gains."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False).double()
    inputs, labels = data(64)
    inputs = inputs.double()
    names = ("Golowich", "Bartlett", "Neyshabur", "PAC-Bayes (McAllester)", "Cisneros")

    def found(size: float) -> dict[str, Magnitude]:
        report = ns.generalization(scaled(model, size), "zero-one", (inputs, labels))
        return {bound.name: bound.value for bound in report.bounds if bound.name.startswith(names)}

    known, other = found(1.0), found(size)
    assert known.keys() == other.keys() and len(known) == 5
    for name, value in other.items():
        if name.startswith("Cisneros"):
            assert ratio(value, known[name] * Magnitude(size) ** 2) == pytest.approx(1)
        else:
            assert value >= known[name] / 2, name


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-308, 1.0, 1e308])
def test_the_grid_is_above(value):
    power = power_above(Magnitude(value))
    assert Magnitude(value) <= on_grid(power) and power >= LEAST_POWER
    for log in (2.0**50, 2.0**50 - 0.3, 2.0**49 + 0.1, -(2.0**60)):
        assert Magnitude.from_log(log) <= on_grid(power_above(Magnitude.from_log(log)))
    with pytest.raises(OverflowError):
        power_above(Magnitude(math.inf))


@pytest.mark.parametrize("q", [0.0, 5e-324, 0.5, 1 - 2**-53, 1.0, math.inf, math.nan])
@pytest.mark.parametrize("budget", [0.0, 5e-324, 1.0, math.inf, math.nan])
def test_the_inverse_divergence_ends(q, budget):
    found = kl_inverse(q, budget)
    assert min(q, 1.0) <= found <= 1.0 if q == q else found == 1.0
    assert found == 1.0 or (q == q and math.isfinite(budget))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_has_no_bound(value):
    model = plain()
    with torch.no_grad():
        next(model.parameters())[0, 0] = value
    try:
        assert not ns.generalization(model, "zero-one", data(16)).bounds
    except InputError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("q", "budget"),
    [
        (0.9999107809344201, 1.1692202987558378e-10),
        (0.9728031374175278, 4.545871337389807e-14),
        (0.9879270817896175, 5.5e-17),
        (0.3, 0.0),
    ],
)
def test_the_inverse_of_kl_errs_upwards_where_logarithms_cancel(q, budget):
    found = kl_inverse(q, budget)
    with mpmath.workdps(50):
        exact = mpmath.mpf(q) * mpmath.log(mpmath.mpf(q) / found) + (1 - mpmath.mpf(q)) * mpmath.log(
            (1 - mpmath.mpf(q)) / (1 - mpmath.mpf(found))
        )
        assert budget <= exact <= budget * (1 + 1e-3) + 1e-14
