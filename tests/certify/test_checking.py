"""A wrong rule is caught on every road that a certified number takes, with an error that asks for a report."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.certify import weights
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.checking import check_bound
from normscope.certify.lower import Space, lower, quotient
from normscope.certify.upper import upper
from normscope.core.bracket import Bracket
from normscope.core.errors import InternalError
from normscope.core.magnitude import Magnitude
from tests.cases import Function, randn

X = randn(2, 3)
LABELS = torch.zeros(2, dtype=torch.long)


@pytest.fixture
def tripled(monkeypatch):
    """Three times the input, by an operation whose rule says once."""

    class Once(ns.rules.Rule):
        def gain(self, node, context):
            return ns.rules.Gain.of(1)

    monkeypatch.setitem(ns.rules.registry.rules, "mul", Once())
    return nn.Sequential(Function(lambda x: 3 * x), nn.Linear(3, 2)).eval()


ROADS = {
    "lipschitz": lambda model: ns.lipschitz(model, X),
    "lipschitz on a region": lambda model: ns.lipschitz(model, X, region=ns.Ball(X[0], 0.1)),
    "audit": lambda model: ns.audit(model, X),
    "local_brackets": lambda model: ns.certify.local_brackets(model, X, X, radius=0.1),
    "certify_radius": lambda model: ns.certify.certify_radius(model, X, (X, model(X).argmax(1))),
    "normalizer_ablation": lambda model: ns.certify.normalizer_ablation(model, X),
    "wrt weights": lambda model: ns.lipschitz(model, X, region=ns.Ball(X[0], 0.1), wrt="weights"),
    "generalization": lambda model: ns.generalization(model, "ramp", (X, LABELS), domain=ns.Ball(X[0], 3.0)),
    "training_cost": lambda model: ns.bounds.training_cost(model, X),
    "a bound alone": lambda model: upper(certifiable_graph(model, X, "eval", None)),
}


@pytest.mark.parametrize("road", ROADS)
def test_a_wrong_rule_is_caught(tripled, road):
    with pytest.raises(InternalError, match=r"bug of normscope.*please report it"):
        ROADS[road](tripled)


def test_a_wrong_operator_norm_is_caught(tripled, monkeypatch):
    monkeypatch.setattr(type(ns.rules.registry.rules["mul"]), "linear", lambda *_: True, raising=False)
    with pytest.raises(InternalError, match="please report it"):
        ns.certify.operator_norm(tripled[0], 3)


def test_a_wrong_sensitivity_is_caught(monkeypatch):
    monkeypatch.setattr(weights, "_input_size", lambda *_: Magnitude(1e-3))
    with pytest.raises(InternalError, match=r"weight exceeds the certified bound"):
        ns.certify.weight_sensitivities(nn.Linear(3, 2), X, region=ns.Ball(X[0], 0.1))


def test_a_contradiction_is_no_bare_assertion():
    with pytest.raises(ns.NormscopeError, match="exceeds upper bound"):
        Bracket(Magnitude(2), Magnitude(1))


@pytest.mark.quick(10)
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1.0, 1e150, 1e290])
@pytest.mark.parametrize("slope", [1e-250, 1e-100, 1.0, 1e100, 1e250])
def test_exact_bounds_pass_at_every_scale(scale, slope):
    """The bound of x ↦ slope · x is no rounding below any quotient, on balls of every size."""
    graph = certifiable_graph(Function(lambda x: x * slope), randn(1, 5).double(), "eval", None)
    for center in (torch.zeros(5), randn(5).double() * scale):
        ball = ns.Ball(center, scale)
        bound = upper(graph, region=ball).bound
        check_bound(graph, bound, ball)
        found, witness = lower(graph, center.reshape(1, -1), 0.01, region=ball)
        assert found <= bound and found <= Magnitude(slope).widened(1e-15)
        for point in witness or ():
            assert ball.contains((point[0][0],))


def answers(function) -> Space:
    return Space(certifiable_graph(Function(function), torch.zeros(1, 3).double(), "eval", None))


@pytest.mark.parametrize("apart", [5e-324, 1e-310, 1e-200, 1e-160, 1.0, 1e160, 1e300])
def test_quotients_are_rounded_down(apart):
    space = answers(lambda x: 1.0 * x)
    first = torch.zeros(3, dtype=torch.float64)
    for direction in ([1.0, 0.0, 0.0], [1.0, 1e-5, 0.3], [0.1, 0.2, 0.7]):
        second = torch.tensor(direction, dtype=torch.float64) * apart
        found = quotient(space.graph, space, first, second)
        assert found <= 1
        assert found >= 1 - 1e-10 or apart < 1e-280


@pytest.mark.parametrize("function", [lambda x: x / 0.0, torch.log, lambda x: torch.exp(1e5 * x)])
def test_values_that_are_not_finite_witness_nothing(function):
    space = answers(function)
    assert quotient(space.graph, space, torch.zeros(3).double(), torch.ones(3).double()) == 0


class Outputs(nn.Module):
    """Given numbers, whatever the input is, and a little of the input."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = torch.tensor(values, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.values + 0 * x[:, :1].clamp(-1, 1)


@pytest.mark.parametrize(
    "values, label", [((math.nan, 0.0), 1), ((1.0, math.nan), 0), ((math.inf, 0.0), 0), ((1.0, 1.0), 0), ((0.0, 1.0), 0)]
)
def test_no_radius_without_a_certain_answer(values, label):
    data = (torch.zeros(1, 2).double(), torch.tensor([label]))
    try:
        found = ns.certify.certify_radius(Outputs(*values), data[0], data)
    except ns.NormscopeError:  # a constant that is not finite is refused before
        return
    assert found.radius == (0.0,) and found.certified_accuracy(0.0) == 0.0


@pytest.mark.parametrize(
    "labels", [torch.zeros(1, 2), torch.tensor([0.5]), torch.zeros(2).long(), torch.tensor([2]), torch.tensor([-1])], ids=str
)
def test_labels_that_are_none_are_wrong_inputs(labels):
    with pytest.raises(ns.InputError, match="label"):
        ns.certify.certify_radius(nn.Linear(2, 2), torch.zeros(1, 2), [(torch.zeros(1, 2), labels)])


@pytest.mark.parametrize("radii", [(-1.0,), (0.0,), (math.nan,), (math.inf,)])
def test_radii_that_are_none_are_wrong_inputs(radii):
    with pytest.raises(ns.InputError, match="radii"):
        ns.certify.certify_radius(nn.Linear(2, 2), torch.zeros(1, 2), (torch.zeros(1, 2), LABELS[:1]), radii=radii)


def test_one_class_has_no_margin():
    with pytest.raises(ns.InputError, match="1 outputs"):
        ns.certify.certify_radius(nn.Linear(2, 1), torch.zeros(1, 2), (torch.zeros(1, 2), LABELS[:1]))
