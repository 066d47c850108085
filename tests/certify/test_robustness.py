"""Radii: no attack inside a certified ball changes the answer, and the arithmetic is that of the definition."""

import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.certify import robustness
from tests.networks import Function

GENERATOR = torch.Generator().manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).double()
with torch.no_grad():
    for _parameter in MODEL.parameters():
        _parameter.copy_(torch.randn(_parameter.shape, generator=GENERATOR))
X = torch.randn(12, 6, generator=GENERATOR, dtype=torch.float64)
Y = MODEL(X).argmax(1)


def normalized():
    """A network whose bound changes with the radius."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 4)).double().eval()


MODELS = {"ReLU": (MODEL, 6), "LayerNorm": (normalized(), 2)}


def former_rule(monkeypatch, model, data):
    """Balls of the given radii alone."""
    with monkeypatch.context() as patched:
        patched.setattr(robustness, "MOST_BALLS", 0)
        return ns.certify.certify_radius(model, X[:1], data).radius


@pytest.mark.parametrize("name", MODELS)
def test_no_attack_succeeds_inside_a_certified_ball(name, monkeypatch):
    model, count = MODELS[name]
    data = (X[:count], model(X[:count]).argmax(1))
    found = ns.certify.certify_radius(model, X[:1], data)
    assert found.median > 0 and found.certified_accuracy(0.0) == 1.0
    former = former_rule(monkeypatch, model, data)
    assert all(new >= old for new, old in zip(found.radius, former, strict=True)) and sum(found.radius) > sum(former)
    for x, y, radius in zip(*data, found.radius, strict=True):
        steps = torch.randn(500, 6, generator=GENERATOR, dtype=torch.float64)
        near = x + 0.999 * radius * steps / steps.norm(dim=1, keepdim=True)
        for _ in range(20):  # ascent on the strongest other output
            near.requires_grad_(True)
            outputs = model(near)
            others = outputs.masked_fill(nn.functional.one_hot(y, 4).bool(), -torch.inf).amax(1)
            (slope,) = torch.autograd.grad((others - outputs[:, y]).sum(), near)
            away = (near + 0.1 * radius * slope / slope.norm(dim=1, keepdim=True)).detach() - x
            near = x + away * (0.999 * radius / away.norm(dim=1, keepdim=True)).clamp(max=1.0)
        assert (model(near).argmax(1) == y).all()


@pytest.mark.parametrize("radii", [[1e-9], [1e6]])
def test_the_search_finds_the_radius_from_any_start(radii):
    """Of a linear model the radius is known: margin/(√2 ‖W‖), wherever the search begins."""
    model = nn.Linear(6, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(2, 6))
    found = ns.certify.certify_radius(model, X[:1], (X[:3], model(X[:3]).argmax(1)), radii=radii)
    for radius, margin in zip(found.radius, found.margin, strict=True):
        assert math.isclose(radius, margin / math.sqrt(2), rel_tol=1e-6)


def test_a_ball_without_a_bound_is_followed_by_smaller_ones():
    """1/x has no constant on a ball that holds 0."""
    model = nn.Sequential(Function(lambda x: 1 / x), nn.Linear(2, 2, bias=False)).double()
    x = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    found = ns.certify.certify_radius(model, x, (x, model(x).argmax(1)), radii=[10.0])
    assert 0 < found.radius[0] < 0.5


def test_a_wrong_answer_has_no_radius():
    found = ns.certify.certify_radius(MODEL, X[:1], (X, (Y + 1) % 4))
    assert set(found.radius) == {0.0} and found.certified_accuracy(0.0) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_without_numbers_are_named(value):
    data = torch.zeros(3, 8)
    data[2, 5] = value
    model = torch.nn.Linear(8, 3)
    for certify in (
        lambda: ns.certify.certify_radius(model, data, (data, torch.zeros(3))),
        lambda: ns.certify.local_brackets(model, data, data, radius=0.1),
    ):
        with pytest.raises(ns.InputError, match="sample 2 of the data holds NaN or infinity"):
            certify()


def test_labels_are_needed():
    with pytest.raises(ns.InputError, match="labels"):
        ns.certify.certify_radius(MODEL, X[:1], [X])


def test_brackets_around_samples():
    found = ns.certify.local_brackets(MODEL, X[:1], X, radius=0.01)
    everywhere = ns.lipschitz(MODEL, X[:1], effort=0.1).upper
    assert len(found) == len(X)
    assert found.largest.lower == max(b.lower for b in found.brackets)
    assert all(b.upper <= everywhere * (1 + 1e-9) for b in found.brackets)


def test_a_ball_without_a_bound_is_not_called_infinite():
    """x · (x > 0) is ReLU, which no rule sees: on a ball around its kink nothing is proved, and nothing shows infinity."""
    centers = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    found = ns.certify.local_brackets(Function(lambda x: x * (x > 0)), centers[:1], centers, radius=0.1)
    first, second = found.brackets
    assert float(first.proved) == pytest.approx(1) and second.upper is None and second.lower.log10 == pytest.approx(0, abs=1e-6)
    assert found.largest.upper is None and "1 without a bound" in str(found)
    with pytest.raises(ns.Refusal, match="no finite bound was found"):
        _ = found.largest.proved
