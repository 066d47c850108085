"""Laws of rotation: measured angles beside predicted ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.geometry.dynamics import Rotation, UpdateRule, effective_learning_rate
from normscope.geometry.sphere import Spheres
from tests.optim.standin import DENSE, Group, Report, batch, dense, train

ROWS = Report((Group("scale", ("weight",), ((0,),)),))


def random_walk(optimizer, layer, steps):
    """Gradients as of a scale-free loss that is pure noise: tangent and proportional to 1/‖w‖; mean angles of the last half."""
    generator, spheres = torch.Generator().manual_seed(0), Spheres((0,))
    rotation, angles = Rotation(layer, ROWS), []
    for step in range(steps):
        noise = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
        weight = layer.weight.detach()
        layer.weight.grad = spheres.project(weight, noise) / weight.norm(dim=1, keepdim=True)
        optimizer.step()
        turned = rotation.step()["weight"]
        if step >= steps // 2:
            angles.append(turned.square().mean())
    return math.sqrt(torch.stack(angles).mean())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "kind, settings",
    [
        (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.05}),
        (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.05, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.2}),
        (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.2, "betas": (0.5, 0.99)}),
    ],
    ids=["SGD", "momentum", "AdamW", "AdamW-0.5"],
)
def test_rotation_settles_at_the_predicted_angle(kind, settings):
    layer = nn.Linear(128, 16, bias=False).double()
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    optimizer = kind(layer.parameters(), **settings)
    predicted = UpdateRule.of(optimizer).equilibrium_rotation()
    assert random_walk(optimizer, layer, 2000) == pytest.approx(predicted, rel=0.05)


def test_the_effective_learning_rate_is_that_of_the_direction():
    """Two weights of one direction whose effective rates agree turn by the same angle."""
    for kind, power in ((torch.optim.SGD, 2), (torch.optim.Adam, 1)):
        angles, rates = [], []
        for scale in (1.0, 10.0):
            model = dense(torch.float64)
            with torch.no_grad():
                model[0].weight.mul_(scale)
            optimizer = kind(model.parameters(), lr=1e-3 * scale**power, **({"eps": 1e-30} if power == 1 else {}))
            rotation = Rotation(model, DENSE)
            rates.append(UpdateRule.of(optimizer).effective_learning_rate(rotation.norms()["0.weight"]))
            train(model, optimizer, batch("dense", torch.float64), 1)
            angles.append(rotation.step()["0.weight"])
        torch.testing.assert_close(*angles, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(*rates)


def test_sgd_turns_by_rate_times_gradient():
    model = dense(torch.float64)
    rotation = Rotation(model, DENSE)
    size = rotation.norms()["0.weight"]
    train(model, torch.optim.SGD(model.parameters(), lr=1e-2), batch("dense", torch.float64), 1)
    on_sphere = model[0].weight.grad.norm(dim=1) * size  # of the loss as a function of the direction
    expected = torch.atan(effective_learning_rate(size, 1e-2) * on_sphere)
    torch.testing.assert_close(rotation.step()["0.weight"], expected, rtol=1e-6, atol=1e-9)
    assert set(rotation.step()) == {"0.weight", "3.weight + 3.bias"}


def test_rules_are_read_from_optimizers():
    weights = [nn.Parameter(torch.ones(2))]
    assert UpdateRule.of(torch.optim.SGD(weights, lr=0.1, momentum=0.9)) == UpdateRule("sgd", 0.1, 0.9)
    assert UpdateRule.of(torch.optim.AdamW(weights)) == UpdateRule("adamw", 1e-3, 0.9, 1e-2)
    assert UpdateRule.of(torch.optim.Adam(weights, weight_decay=0.1)) == UpdateRule("adam", 1e-3, 0.9, 0.1)
    with pytest.raises(InputError, match="not RMSprop"):
        UpdateRule.of(torch.optim.RMSprop(weights))
    with pytest.raises(InputError, match="use AdamW"):
        UpdateRule("adam", 1e-3, 0.9, 0.1).equilibrium_rotation()
    with pytest.raises(InputError, match="one of sgd, adam, adamw"):
        UpdateRule("lion", 1e-3)
    with pytest.raises(InputError, match="one of sgd, adam, adamw"):
        effective_learning_rate(torch.ones(1), 0.1, kind="lion")
    with pytest.raises(InputError, match="in \\[0, 1\\)"):
        UpdateRule("sgd", 1e-3, momentum=1.0)
