"""Flatness: noise of the stated standard deviation, a model that is not touched, and a quotient that no symmetry moves."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.bounds.flatness import Curve, filter_noise, plain_noise, quotient_noise
from normscope.core.errors import InputError
from normscope.curvature.objective import Objective
from tests.bounds.models import batch_norm, data, plain, seeded


def objective(model: nn.Module, mode: str = "eval") -> Objective:
    return Objective(model, nn.functional.cross_entropy, data(32, 20), mode)


def test_sigma_is_the_standard_deviation_and_not_the_variance():
    made = objective(seeded(nn.Linear(20, 500)))
    point, direction, _ = plain_noise(made)
    drawn = direction(torch.Generator().manual_seed(1)).double()
    assert torch.equal(point, made.point)
    assert float(drawn.std()) == pytest.approx(1, abs=0.03) and float(drawn.mean()) == pytest.approx(0, abs=0.03)


def test_the_loss_of_a_linear_model_rises_as_sigma_squared_says():
    """E‖(W + σZ)x − y‖² = ‖Wx − y‖² + σ² · outputs · mean‖x‖², for the mean squared error of one-hot targets."""
    inputs, labels = data(64, 10, 3)
    model = seeded(nn.Linear(10, 3, bias=False))

    def squares(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (outputs - nn.functional.one_hot(target, 3)).square().sum(1).mean()

    sigmas = (0.3, 1.5)
    curve = ns.bounds.flatness(model, (inputs, labels), loss=squares, sigmas=sigmas, kinds=("plain",), seeds=400)["plain"]
    for sigma, losses in zip(sigmas, curve.losses, strict=True):
        assert losses.mean() - curve.loss == pytest.approx(sigma**2 * 3 * float(inputs.square().sum(1).mean()), rel=0.1)


def test_filter_noise_has_the_size_of_its_filter_and_leaves_vectors_alone():
    model = nn.Sequential(nn.Linear(400, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 10.0, 0.0])[:, None].expand(3, 400))
    made = Objective(model, nn.functional.cross_entropy, data(8, 400), "eval")
    _, direction, _ = filter_noise(made)
    noise = direction(torch.Generator().manual_seed(0))
    drawn = made.layout.unflatten(noise)
    assert drawn["0.weight"].std(1).tolist() == pytest.approx([1, 10, 0], rel=0.15)
    assert not any(drawn[name].any() for name in drawn if drawn[name].dim() == 1)


def test_the_model_comes_back_bit_identical():
    model = batch_norm().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for mode in ("eval", "train"):
        ns.bounds.flatness(model, data(40), mode=mode, sigmas=(0.1, 1.0), seeds=2)
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_quotient_curves_are_those_of_the_function(mode):
    """Moved along its symmetries the model has the same quotient curve, and another plain one."""
    model = batch_norm(6, 3).double()
    with torch.no_grad():
        model.get_submodule("1").eps = 1e-30
    sample = tuple(part.double() if part.is_floating_point() else part for part in data(60, 6, 3))
    report = ns.symmetries(model, sample[0], mode=mode)
    assert len(report.groups)
    moved = copy.deepcopy(model)
    point = dict(moved.named_parameters())
    for number, group in enumerate(report.groups):
        point = group.transform(point, torch.Generator().manual_seed(number))
    moved.load_state_dict(point, strict=False)
    options = {"mode": mode, "sigmas": (0.05, 0.2, 0.6), "seeds": 3}
    own, other = (ns.bounds.flatness(each, sample, **options) for each in (model, moved))
    np.testing.assert_allclose(other["quotient"].losses, own["quotient"].losses, rtol=1e-5)
    np.testing.assert_allclose(other["quotient"].loss, own["quotient"].loss, rtol=1e-9)
    assert not np.allclose(other["plain"].losses, own["plain"].losses, rtol=1e-3)
    assert own.symmetries == sum(group.count for group in report.groups)


def test_quotient_noise_is_orthogonal_to_the_orbits():
    made = objective(batch_norm(20, 2).double(), "train")
    point, direction, count = quotient_noise(made)
    noise = direction(torch.Generator().manual_seed(0))
    drawn = made.layout.unflatten(noise)
    named = made.layout.unflatten(point)
    report = ns.symmetries(made.model, next(iter(made.batches)).call.args[0], mode="train")
    assert count == report.dimension > 0
    for group in report.groups:
        tangents = group.directions(named)
        flat = torch.cat([drawn[name].reshape(-1) for name in dict.fromkeys(group.parameters)])
        assert float((tangents @ flat).abs().max()) <= 1e-9 * float(tangents.norm() * noise.norm())  # a part may be all rounding


def test_tolerance_is_where_a_tenth_is_lost():
    curve = Curve("plain", np.array([0.1, 1.0, 10.0]), np.array([[0.8, 0.8], [0.76, 0.8], [0.4, 0.3]]), np.zeros((3, 2)), 0.8, 0.0)
    assert 1.0 < curve.tolerance() < 10 and curve.tolerance(0.01) < curve.tolerance(0.1) < curve.tolerance(0.5)
    assert curve.tolerance(0.99) == math.inf
    assert Curve("plain", np.array([1.0]), np.array([[0.1, 0.1]]), np.zeros((1, 2)), 0.8, 0.0).tolerance() == 0.0
    halfway = Curve("plain", np.array([1.0, 100.0]), np.array([[1.0, 1.0], [0.8, 0.8]]), np.zeros((2, 2)), 1.0, 0.0)
    assert halfway.tolerance(0.1) == pytest.approx(10)


def test_what_is_said_and_drawn():
    found = ns.bounds.flatness(batch_norm(), data(40), sigmas=(0.01, 0.1, 1.0), seeds=3)
    assert "running statistics, held" in str(found) and "eval mode" in str(found) and "canonical" in str(found)
    assert "batch statistics" in str(ns.bounds.flatness(batch_norm(), data(40), mode="train", sigmas=(0.1,), kinds=("plain",)))
    assert "no running statistics" in str(ns.bounds.flatness(plain(), data(40), sigmas=(0.1,), kinds=("plain",)))
    assert max(map(len, str(found).splitlines())) <= 100
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [curve["kind"] for curve in content["curves"]] == ["plain", "filter", "quotient"]
    for quantity in ("accuracy", "loss"):
        assert len(found.figure(quantity).data) == 9
    with pytest.raises(InputError, match="choose from accuracy, loss"):
        found.figure("margin")


def test_seeds_decide_and_nothing_else():
    first, again, other = (
        ns.bounds.flatness(plain(), data(40), sigmas=(0.3,), kinds=("plain",), seed=seed)["plain"].losses for seed in (0, 0, 7)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_infinite_noise_is_reported_and_not_raised():
    found = ns.bounds.flatness(plain(), data(20), sigmas=(1e30,), kinds=("plain",), seeds=2)
    assert json.dumps(found.to_dict(), allow_nan=False) and str(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sigmas": ()}, "positive and increasing"),
        ({"sigmas": (0.1, 0.01)}, "positive and increasing"),
        ({"sigmas": (-1.0,)}, "positive"),
        ({"kinds": ("other",)}, "one of plain, filter, quotient"),
        ({"seeds": 1}, "2 seeds"),
        ({"mode": "test"}, "mode must be one of"),
    ],
)
def test_bad_options_are_one_line(options, said):
    with pytest.raises(InputError, match=said):
        ns.bounds.flatness(plain(), data(10), **options)
