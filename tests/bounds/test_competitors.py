"""Competing bounds: the formulas by hand, monotone as theory says, in log domain, invariant, and covering where certified."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from scipy.stats import binom
from torch import nn

import normscope as ns
from normscope.bounds.grids import RATIO, log_inverse_weight, on_grid, power_above, rounded_up
from normscope.bounds.losses import zero_one
from normscope.bounds.network import MatrixLayer, Network, network
from normscope.bounds.table import NotApplicable
from normscope.bounds.theorems.bartlett2017 import bartlett, spectral_complexity
from normscope.bounds.theorems.bartlett2017 import rademacher_complexity as bartlett_complexity
from normscope.bounds.theorems.cisneros2025 import cisneros
from normscope.bounds.theorems.golowich2018 import golowich
from normscope.bounds.theorems.golowich2018 import rademacher_complexity as golowich_complexity
from normscope.bounds.theorems.hou2023 import hou
from normscope.bounds.theorems.lyu2022 import lyu
from normscope.bounds.theorems.margin_choice import candidate_margins, ramp_risk, usual_margin
from normscope.bounds.theorems.neyshabur2018 import neyshabur
from normscope.bounds.theorems.vc import dimension_of, log_growth, vc_dimension, vc_gap
from normscope.core.magnitude import Magnitude
from tests.bounds.distributions import DISTRIBUTIONS, Distribution
from tests.bounds.models import batch_norm, data, layer_norm, plain, seeded

COMPETITORS = [
    "Bartlett et al. 2017", "Cisneros-Velarde et al. 2025", "Golowich et al. 2018", "Hou et al. 2023", "Lyu et al. 2022",
    "Neyshabur et al. 2018", "VC dimension (Bartlett et al. 2019)",
]  # fmt: skip
BY_NORMS = (golowich, bartlett, neyshabur)


def matrices(*pairs: tuple[float, float], width: int = 4) -> Network:
    """A chain of layers without biases with such spectral and Frobenius norms."""
    layers = [
        MatrixLayer(str(i), Magnitude(s), Magnitude(f), Magnitude(2 * f), Magnitude(0), width, width, width**2)
        for i, (s, f) in enumerate(pairs)
    ]
    return Network(tuple(layers))


def value_of(bound, chain: Network, margins: torch.Tensor, norms: torch.Tensor, delta: float = 0.05) -> Magnitude:
    return (golowich(chain, margins, norms, 2, delta) if bound is golowich else bound(chain, margins, norms, delta))[0]


# formulas ----------------------------------------------------------------------------------------------------------------------


def test_golowich_by_hand():
    margins, norms = torch.tensor([2.0, 2.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 2.0, 4.0])
    value, parts = golowich(matrices((1, 2), (1, 5)), margins, norms, 3, 0.1)
    power = math.ceil(math.log(10 / 2) / math.log(RATIO))
    complexity = RATIO**power * (math.sqrt(2 * math.log(2) * 2) + 1) * 5 / 4
    confidence = 3 * math.sqrt((math.log(2 / 0.1) + math.log(1.5 * (power + 1) * (power + 2))) / 8)
    assert parts["margin"] == 2.0 and parts["risk at margin"] == 0.0
    assert float(value) == pytest.approx(4 * 3 * complexity + confidence)


def test_bartlett_by_hand():
    assert float(spectral_complexity([Magnitude(2), Magnitude(3)], [Magnitude(16), Magnitude(3)])) == pytest.approx(
        6 * (4 + 1) ** 1.5
    )
    found = bartlett_complexity(Magnitude(5), 8, torch.full((100,), 2.0), 0.5)
    root = 2 * math.sqrt(2 * math.log(128)) * 20 / 0.5 * 5
    assert float(found) == pytest.approx(4 / 1000 + 18 * math.log(100) * root / 100)


def test_neyshabur_by_hand():
    margins, norms = torch.full((50,), 3.0), torch.full((50,), 2.0)
    value, parts = neyshabur(matrices((2, 4), (3, 3)), margins, norms, 0.1)
    inside = 4 * 4 * 4 * math.log(8) * 36 * (4 + 1) + math.log(2 * 50 / 0.1)
    assert parts["share of margins below"] == 1.0
    assert float(value) == pytest.approx(1 + math.sqrt(inside / (9 * 50)))


def test_cisneros_hou_and_lyu_by_hand():
    assert float(cisneros(matrices((1, 2), (1, 3)), 100)) == pytest.approx(36 / 10)
    weights, distances = torch.tensor([0.25, 0.75]).double(), torch.tensor([2.0, 4.0]).double()
    value, spread = hou(0.1, weights, distances, Magnitude(3), 25, 100, 0.05)
    assert float(spread) == pytest.approx(3 * 3.5 + 12 * math.sqrt(math.log(80) / 100))
    assert float(value) == pytest.approx(float(spread) + 0.1 + 0.5)
    small, _ = hou(0.0, weights, distances, Magnitude(0.5), 25, 100, 0.05)  # max{1, L} in the mean, L in the deviation
    assert float(small) == pytest.approx(3.5 + 2 * math.sqrt(math.log(80) / 100) + 0.5)
    value, noise = lyu(0.2, 3.0, 400)
    scale = math.log(400) / 20
    grid = torch.logspace(-3, 3, 20001, dtype=torch.float64)
    assert float(value) == pytest.approx(float((0.2 + 3 * grid**2 / 2 + scale / grid).min()), rel=1e-6)
    assert lyu(0.2, -1.0, 400) == (Magnitude(0.2), math.inf) and noise == pytest.approx((scale / 3) ** (1 / 3))


def test_vc_by_hand():
    reach = 1 * 5 + 2 * 1
    cumulative = 20 + (20 + 6)
    assert vc_dimension([20, 6], [5, 1]) == pytest.approx(
        2 + cumulative * math.log2(4 * math.e * reach * math.log2(2 * math.e * reach))
    )
    chain = network(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)), torch.zeros(1, 3))
    assert dimension_of(chain) == vc_dimension([20, 6], [5, 1])  # the difference of two outputs has one unit
    assert log_growth(10.0, 1000, 2) == pytest.approx(10 * math.log(2 * math.e * 100))
    assert log_growth(10.0, 1000, 3) == pytest.approx(3 * 10 * math.log(2 * math.e * 100))
    assert log_growth(1e9, 1000, 2) == pytest.approx(2000 * math.log(2))
    assert vc_gap(50.0, 1000, 0.05) == pytest.approx(math.sqrt(8 * (50 + math.log(80)) / 1000))


def test_vc_dimension_is_at_least_that_of_halfspaces():
    """A single linear unit in d dimensions shatters d + 1 points."""
    for d in (1, 2, 10, 100):
        assert vc_dimension([d + 1], [1]) >= d + 1


@pytest.mark.parametrize(("parameters", "units"), [([2], [1]), ([20, 6], [5, 1]), ([1000, 300, 50], [30, 10, 1])])
def test_vc_dimension_solves_the_count_of_sign_patterns(parameters, units):
    """At the bound there are fewer patterns, 2^L (2eRm/ΣW_i)^{ΣW_i} at most, than 2^m."""
    reach = sum((i + 1) * count for i, count in enumerate(units))
    cumulative = sum(sum(parameters[: i + 1]) for i in range(len(parameters)))
    m = vc_dimension(parameters, units)
    assert len(units) + cumulative * math.log2(2 * math.e * reach * m / cumulative) <= m * (1 + 1e-12)


# union bounds and margins ------------------------------------------------------------------------------------------------------


def test_weights_of_the_grid_add_up_to_one():
    total = sum(math.exp(-log_inverse_weight(k)) for k in range(-200_000, 200_001))
    assert 1 - 1e-4 < total <= 1


@pytest.mark.parametrize("log10", [-300, -3.7, -1e-17, 0, 1e-17, 0.3, 50, 500])
def test_the_grid_point_is_above_by_less_than_a_ratio(log10):
    value = Magnitude.from_log10(log10)
    (above,), weight = rounded_up([value])
    assert value <= above <= value * RATIO * (1 + 1e-9) and weight == log_inverse_weight(power_above(value))
    assert power_above(on_grid(7)) == 7


def test_margins_that_a_sample_has():
    margins = torch.tensor([-1.0, -0.5, 0.5, 1.0, 2.0])
    assert all(margin > 0 for margin in candidate_margins(margins)) and usual_margin(margins) == candidate_margins(margins)[0]
    assert ramp_risk(margins, 1.0) == pytest.approx((1 + 1 + 0.5) / 5)
    assert float((margins <= 0).double().mean()) <= ramp_risk(margins, 2.0) <= float((margins < 2).double().mean())
    with pytest.raises(NotApplicable, match="no training sample"):
        candidate_margins(torch.tensor([-1.0, 0.0]))


# laws --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", BY_NORMS)
def test_monotone_in_size_confidence_and_norms(bound):
    def at(size=1000, delta=0.05, norm=2.0, depth=3, margin=1.0) -> Magnitude:
        return value_of(bound, matrices(*[(norm, 2 * norm)] * depth), torch.full((size,), margin), torch.ones(size), delta)

    for smaller, larger in pairwise([at(size=size) for size in (10**5, 10**4, 10**3, 10**2)]):
        assert smaller < larger
    for smaller, larger in pairwise([at(delta=delta) for delta in (0.5, 0.1, 1e-3, 1e-9)]):
        assert smaller < larger
    for smaller, larger in pairwise([at(norm=norm) for norm in (0.5, 1.0, 3.0, 1e6)]):
        assert smaller <= larger
    for smaller, larger in pairwise([at(depth=depth) for depth in (1, 2, 5, 20)]):
        assert smaller < larger
    for smaller, larger in pairwise([at(margin=margin) for margin in (100.0, 10.0, 1.0, 0.01)]):
        assert smaller <= larger


@pytest.mark.parametrize("bound", BY_NORMS)
def test_capacities_beyond_all_floats(bound):
    value = value_of(bound, matrices(*[(1e10, 1e25)] * 40), torch.ones(100), torch.ones(100))
    assert value.finite and value.log10 > 300 and "inf" not in str(value)
    chain = matrices(*[(1e10, 1e25)] * 40)
    assert cisneros(chain, 100).log10 == pytest.approx(2 * 40 * 25 - 1)
    assert "inf" not in str(hou(0.0, torch.ones(1).double(), torch.ones(1).double(), Magnitude.from_log10(500), 1, 9, 0.1)[0])


def test_complexities_are_above_that_of_linear_functions():
    """For one layer the class is ‖w‖ ≤ 1 and R̂ = E‖Σ ε_i x_i‖/m."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    signs = (torch.randint(2, (2000, 200), generator=generator) * 2 - 1).double()
    truth = float((signs @ x).norm(dim=1).mean()) / 200
    norms = x.norm(dim=1)
    assert truth <= float(golowich_complexity(Magnitude(1), 1, norms))
    assert truth <= float(bartlett_complexity(spectral_complexity([Magnitude(1)], [Magnitude(1)]), 5, norms, 1.0))


def moved_along_symmetries(model: nn.Module, example: torch.Tensor, mode: str = "eval") -> nn.Module:
    moved, point = copy.deepcopy(model), dict(model.named_parameters())
    for number, group in enumerate(ns.symmetries(model, example, mode=mode).groups):
        point = group.transform(point, torch.Generator().manual_seed(number))
    moved.load_state_dict({name: value.detach() for name, value in point.items()}, strict=False)
    return moved


@pytest.mark.parametrize("make", [plain, batch_norm, layer_norm], ids=lambda make: make.__name__)
def test_every_competitor_is_invariant_under_the_symmetries_of_the_model(make):
    model = make(3, 2).double()
    for part in model.modules():
        if hasattr(part, "eps"):
            part.eps = 1e-12  # ε breaks the symmetry of scale
    inputs, labels = data(60, 3)
    sample = inputs.double(), labels
    moved = moved_along_symmetries(model, sample[0])
    torch.testing.assert_close(model(sample[0]), moved(sample[0]), rtol=1e-6, atol=1e-6)
    own, other = (ns.generalization(each, "ramp", sample, held_out=sample, select=COMPETITORS) for each in (model, moved))
    assert {bound.name for bound in own} == set(COMPETITORS)
    for bound in own:
        if bound.name == "Lyu et al. 2022" or any("not invariant" in text for text in bound.assumptions):
            continue  # the symmetries of sharpness are those of batch statistics: below
        assert other[bound.name].value.log == pytest.approx(bound.value.log, abs=1e-4), bound.name
        assert other[bound.name].status == bound.status


def test_sharpness_is_invariant_under_the_symmetries_of_training():
    model = batch_norm(3, 2).double()
    model[1].eps = 1e-12
    inputs, labels = data(60, 3)
    sample = inputs.double(), labels
    moved = moved_along_symmetries(model, sample[0], "train")
    own, other = (ns.generalization(each, "ramp", sample, select=["Lyu et al. 2022"])[0] for each in (model, moved))
    assert other.parts["τ"] == pytest.approx(own.parts["τ"], rel=0.03)


def test_folding_is_what_scaled_statistics_ask_for():
    """W → cW with the statistics that training would then have: the same function, and the same bounds."""
    model = batch_norm(3, 2).double()
    model[1].eps = 0.0
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved[0].weight *= 1000
        moved[0].bias *= 1000
        moved[1].running_mean *= 1000
        moved[1].running_var *= 1000**2
    inputs, labels = data(60, 3)
    sample = inputs.double(), labels
    names = [name for name in COMPETITORS if name != "Lyu et al. 2022"]
    own, other = (ns.generalization(each, "ramp", sample, held_out=sample, select=names) for each in (model, moved))
    for bound in own:
        assert other[bound.name].value.log == pytest.approx(bound.value.log, abs=1e-6), bound.name


@pytest.mark.parametrize(
    ("make", "certified"),
    [
        (plain, {"Bartlett et al. 2017", "Golowich et al. 2018", "VC dimension (Bartlett et al. 2019)"}),
        (batch_norm, {"Bartlett et al. 2017", "Golowich et al. 2018", "VC dimension (Bartlett et al. 2019)"}),
        (layer_norm, set()),
        (lambda d, c: seeded(nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, c))), {"Bartlett et al. 2017"}),
    ],
)
def test_only_what_a_theorem_covers_is_certified(make, certified):
    found = ns.generalization(make(3, 2), "ramp", data(50, 3), held_out=data(50, 3, seed=1), select=COMPETITORS)
    assert {bound.name for bound in found if bound.certified} == certified
    assert len(json.loads(json.dumps(found.to_dict(), allow_nan=False))["bounds"]) == len(COMPETITORS)
    for bound in found:
        if bound.status == "measure":
            assert any("O(·)" in text or "not covered" in text or "leaves open" in text for text in bound.assumptions), bound.name


def test_regression_and_hopeless_models_are_told_why():
    inputs, labels = data(40, 3)
    found = ns.generalization(
        nn.Linear(3, 1), lambda outputs, targets: (outputs[:, 0] - targets).square().clamp(max=1), (inputs, inputs[:, 0]),
        loss_bound=1.0, select=["Golowich et al. 2018", "PAC-Bayes"],
    )  # fmt: skip
    assert not len(found) and set(found.not_given) == {"Golowich et al. 2018", "PAC-Bayes"}
    wrong = seeded(nn.Linear(3, 2))
    with torch.no_grad():
        wrong.weight.zero_()
        wrong.bias.copy_(torch.tensor([0.0, 1.0]))
    found = ns.generalization(wrong, "ramp", (inputs, torch.zeros_like(labels)), select=["Golowich et al. 2018"])
    assert "no training sample" in found.not_given["Golowich et al. 2018"]


# coverage ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda distribution: distribution.name)
@pytest.mark.parametrize("draws", [4, pytest.param(500, marks=pytest.mark.full)])
def test_certified_competitors_cover(distribution: Distribution, draws: int):
    generator, failed, seen = torch.Generator().manual_seed(draws), Counter(), Counter()
    names = ["Bartlett et al. 2017", "Golowich et al. 2018", "VC dimension (Bartlett et al. 2019)"]
    for _ in range(draws):
        train = distribution.draw(80, generator)
        model = distribution.model(train, generator)
        truth = distribution.risk(model, zero_one())
        for bound in ns.generalization(model, "zero-one", train, delta=0.1, select=names):
            assert bound.certified
            empirical = float((model(train[0]).argmax(1) != train[1]).double().mean()) if bound.quantity == "gap" else 0.0
            seen[bound.name] += 1
            failed[bound.name] += bool(bound.value + empirical < truth)
    assert set(seen) == set(names)
    assert max(failed.values()) <= binom.isf(1e-3, draws, 0.1)


def test_golowich_says_something_with_enough_data():
    """A bound that is always vacuous covers trivially: with a large margin and many samples this one is below 1."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (200_000,), generator=generator)
    inputs = (labels * 2.0 - 1)[:, None] * (1 + 0.1 * torch.rand(200_000, 1, generator=generator))
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    (bound,) = ns.generalization(model, "zero-one", (inputs, labels), select=["Golowich et al. 2018"], batch_size=50_000)
    assert bound.certified and not bound.vacuous and 0 < float(bound.value) < 0.2


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.table(x).mean(1))


def test_models_that_no_theorem_on_norms_takes_are_told_so():
    sample = torch.randint(10, (20, 5), generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    found = ns.generalization(
        seeded(Tokens()), "ramp", sample, select=["Golowich et al. 2018", "held-out Hoeffding"], held_out=sample
    )
    assert found["held-out Hoeffding"] and "floating-point" in found.not_given["Golowich et al. 2018"]
    margins = ns.bounds.margins(seeded(Tokens()), sample)
    assert margins.constant is None and "floating-point" in margins.reason


def test_one_sample_and_data_without_numbers():
    one = torch.ones(1, 3), torch.tensor([0])
    model = seeded(nn.Linear(3, 2))
    found = ns.generalization(model, "ramp", one, held_out=one, select=COMPETITORS)
    assert len(found) + len(found.not_given) == len(COMPETITORS) and all(bound.value.finite for bound in found)
    nothing = torch.full((5, 3), math.nan), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ns.InputError, match="data hold nan"):
        ns.generalization(model, "zero-one", nothing, select=["Golowich et al. 2018"])
