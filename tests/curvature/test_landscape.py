"""The landscape of losses whose landscape is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.core.errors import InputError
from tests.curvature.models import CASES

CURVATURES = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
ONE = (torch.zeros(1, 1).double(), torch.zeros(1).double())


class Point(nn.Module):
    """A loss that is a function of three numbers."""

    def __init__(self, values=(1.0, 1.0, 1.0)):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, x):
        return self.values


def quadratic(values, _):
    """½ Σ λ θ²."""
    return 0.5 * (CURVATURES * values.square()).sum()


def test_a_quadratic_has_the_smoothness_of_its_hessian():
    found = ns.curvature.landscape(Point((1.0, 0.0, 0.0)), quadratic, ONE)
    assert found.smoothness == pytest.approx(4) and found.gradient_norm == pytest.approx(4)
    assert np.allclose(found.losses, 0.5 * 4 * (1 - 4 * found.learning_rates) ** 2)
    assert np.allclose(found.gradient_changes, 4 * found.lengths)
    assert found.learning_rates.min() == pytest.approx(0.01 / 4) and found.learning_rates.max() == pytest.approx(10 / 4)
    mixed = ns.curvature.landscape(Point(), quadratic, ONE)
    assert mixed.smoothness <= 4


def test_the_largest_stable_rate_of_a_quadratic_is_two_over_its_largest_eigenvalue():
    for start in (1e-4, 1e4):
        found = ns.curvature.landscape(Point((1.0, 0.1, 0.1)), quadratic, ONE, learning_rates=[start])
        assert found.largest_stable_rate(iterations=15, precision=0.02) == pytest.approx(2 / 4, rel=0.03)
    assert ns.curvature.landscape(Point(), lambda values, _: values.sum(), ONE).largest_stable_rate(iterations=2) == math.inf


def test_slices_of_a_quadratic():
    found = ns.curvature.landscape(Point((0.0, 0.0, 1.0)), quadratic, ONE)
    line = found.slice({"values": torch.tensor([0.0, 1.0, 0.0]).double()}, points=5)
    assert np.allclose(line.losses, 0.125 + 0.5 * line.offsets**2)
    plane = found.slice("top", "top", points=3)
    assert np.allclose(plane.losses, 0.125 + 2 * plane.offsets[:, None] ** 2 + 0.5 * plane.offsets**2, atol=1e-5)
    assert len(line.figure().data) == len(plane.figure().data) == 1 and len(found.figure().data) == 2


@pytest.mark.parametrize("name", ["batch norm", "conv batch norm, eval", "attention"])
def test_slices_pass_through_the_point_and_leave_the_model_alone(name):
    case = CASES[name]
    model = case.model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = ns.curvature.landscape(model, case.loss, case.data(), mode=case.mode)
    for directions in (("random",), ("gradient",), ("random", "random"), ("top", "gradient")):
        made = found.slice(*directions, points=3, radius=0.5)
        assert made.losses[(1,) * len(directions)] == pytest.approx(found.loss, abs=1e-12)
    assert found.slice("gradient", points=3, radius=1e-3).losses[0] < found.loss
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_random_directions_have_the_norms_of_the_filters():
    from normscope.curvature.slices import _filter_normalized

    case = CASES["conv batch norm"]
    objective = ns.curvature.landscape(case.model(), case.loss, case.data()).objective
    drawn = objective.layout.unflatten(_filter_normalized(objective, torch.Generator().manual_seed(0)))
    for name, value in case.model().named_parameters():
        if value.dim() > 1:
            assert torch.allclose(drawn[name].flatten(1).norm(dim=1), value.flatten(1).norm(dim=1))
        else:
            assert not drawn[name].any()


@pytest.mark.parametrize(
    "call",
    [
        lambda: ns.curvature.landscape(Point((0.0, 0.0, 0.0)), quadratic, ONE),
        lambda: ns.curvature.landscape(Point(), quadratic, ONE, learning_rates=[]),
        lambda: ns.curvature.landscape(Point(), quadratic, ONE, learning_rates=[-1.0]),
        lambda: ns.curvature.landscape(Point(), quadratic, ONE).largest_stable_rate(iterations=0),
        lambda: ns.curvature.landscape(Point(), quadratic, ONE).slice(),
        lambda: ns.curvature.landscape(Point(), quadratic, ONE).slice("sideways"),
        lambda: ns.curvature.landscape(Point(), quadratic, ONE).slice("random", radius=0),
    ],
)
def test_mistakes_are_one_line(call):
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_path_is_placed_on_the_plane_that_it_lies_in():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(16, 3, generator=generator).double(), torch.randint(2, (16,), generator=generator)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (
        {name: torch.randn(p.shape, generator=generator).double() for name, p in model.named_parameters()} for _ in range(2)
    )
    plane = ns.curvature.landscape(model, nn.functional.cross_entropy, data).slice(first, second, points=3)
    wanted = np.array([[0.0, 0.0], [0.3, -0.7], [1.0, 0.5]])
    path = [
        {name: value + x * first[name] + y * second[name] if name in first else value for name, value in start.items()}
        for x, y in wanted
    ]
    assert np.allclose(plane.coordinates(path), wanted, atol=1e-12)
    assert len(plane.figure(path).data) == 2
    with pytest.raises(ns.InputError, match=r"has no 0\.weight"):
        plane.coordinates([{}])
