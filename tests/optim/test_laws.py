"""Laws of the steps: norms kept, scale forgotten, no radial part, and vectors that are zero, odd or extreme."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from normscope.geometry.sphere import Spheres
from normscope.geometry.vectors import Vectors
from normscope.optim import SGDG, SGDP, AdamG, AdamP
from tests.optim.standin import ALL, DENSE, MODELS, PROJECTED, SPHERICAL, Group, Report, batch, dense, each, train


def norms(model, report):
    named = dict(model.named_parameters())
    rows = []
    for group in report.groups:
        if group.kind != "shift":
            tensors = [named[name].detach().double() for name in group.parameters]
            rows.append(Vectors.of(tensors, group.axes, group.blocks).gather(tensors).norm(dim=1))
    return torch.cat(rows)


@pytest.mark.quick(1)
@each(SPHERICAL)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_stay_constant_over_a_thousand_steps(kind, settings, name, dtype):
    make, report = MODELS[name]
    model = make(dtype)
    before = norms(model, report)
    losses = train(model, kind(model.named_parameters(), symmetries=report, **settings), batch(name, dtype), 1000)
    assert float((norms(model, report) / before - 1).abs().max()) <= 1e-6
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.quick(3)
@each(SPHERICAL)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_training_forgets_the_scale_of_initial_weights(kind, settings, name, factor):
    make, report = MODELS[name]
    functions = []
    for scale in (1.0, factor):
        model = make(torch.float64, epsilon=1e-12 * min(1, factor**2))
        named = dict(model.named_parameters())
        with torch.no_grad():
            for group in report.groups:
                for parameter in group.parameters if group.kind != "shift" else ():
                    named[parameter].mul_(scale)
        data = batch(name, torch.float64)
        train(model, kind(model.named_parameters(), symmetries=report, orthogonality=0.1, **settings), data, 100)
        functions.append(model(data[0]).detach())
    assert float((functions[0] - functions[1]).abs().max()) <= 1e-4


@each(SPHERICAL)
def test_the_angle_of_a_step_is_rate_times_gradient(kind, settings):
    model, data = dense(torch.float64), batch("dense", torch.float64)
    optimizer = kind(model.named_parameters(), lr=0.01, sphere_ratio=2.0, clip=None, symmetries=DENSE)
    before = model[0].weight.detach().clone()
    train(model, optimizer, data, 1)
    after, gradient = model[0].weight.detach(), model[0].weight.grad
    on_sphere = gradient.norm(dim=1) * before.norm(dim=1)
    expected = 0.02 * on_sphere if kind is SGDG else 0.02 * on_sphere / (on_sphere + 1e-8)
    torch.testing.assert_close(Spheres((0,)).distance(before, after), expected, rtol=1e-5, atol=1e-9)


def test_clipping_bounds_the_angle():
    model = dense(torch.float64)
    with torch.no_grad():
        model[0].weight.mul_(100)  # nothing changes for the sphere
    before = model[0].weight.detach().clone()
    train(
        model,
        SGDG(model.named_parameters(), lr=1.0, sphere_ratio=1.0, clip=1e-3, symmetries=DENSE),
        batch("dense", torch.float64),
        1,
    )
    assert float(Spheres((0,)).distance(before, model[0].weight.detach()).max()) == pytest.approx(1e-3, rel=1e-9)


def test_the_orthogonality_penalty_makes_rows_orthogonal():
    layer = nn.Linear(8, 5, bias=False).double()
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    report = Report((Group("scale", ("weight",), ((0,),)),))
    optimizer = SGDG(layer.named_parameters(), lr=0.05, sphere_ratio=1, clip=None, orthogonality=1.0, symmetries=report)
    layer.weight.grad = torch.zeros_like(layer.weight)
    for _ in range(300):
        optimizer.step()
    unit = nn.functional.normalize(layer.weight.detach())
    torch.testing.assert_close(unit @ unit.T, torch.eye(5, dtype=torch.float64), atol=1e-8, rtol=0)


@each(PROJECTED)
@pytest.mark.parametrize("name", MODELS)
def test_projected_steps_have_no_radial_part(kind, settings, name):
    make, report = MODELS[name]
    model, data = make(torch.float64), batch(name, torch.float64)
    optimizer = kind(model.named_parameters(), lr=0.05, symmetries=report, **settings)
    train(model, optimizer, data, 5)
    named = dict(model.named_parameters())
    before = {key: value.detach().clone() for key, value in named.items()}
    train(model, optimizer, data, 1)
    for group in report.groups:
        if group.kind == "shift":
            continue
        tensors = [before[key] for key in group.parameters]
        vectors = Vectors.of(tensors, group.axes, group.blocks)
        old, new = vectors.gather(tensors), vectors.gather([named[key].detach() for key in group.parameters])
        torch.testing.assert_close((old * (new - old)).sum(1), torch.zeros(vectors.count, dtype=torch.float64), atol=1e-14, rtol=0)
        assert (new - old).norm() > 1e-6


@each(PROJECTED)
def test_scale_free_vectors_decay_by_their_share(kind, settings):
    layer = nn.Linear(4, 3, bias=False)
    before = layer.weight.detach().clone()
    report = Report((Group("scale", ("weight",), ((0,),)),))
    optimizer = kind(layer.named_parameters(), lr=0.1, weight_decay=0.5, decay_ratio=0.2, symmetries=report, **settings)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before * (1 - 0.1 * 0.5 * 0.2 / (1 - settings.get("momentum", 0))))


@each(ALL)
def test_zero_vectors_and_zero_gradients(kind, settings):
    layer = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        layer.weight[1] = 0
    optimizer = kind(layer.named_parameters(), symmetries=Report((Group("scale", ("weight",), ((0,),)),)), **settings)
    layer.weight.grad = torch.zeros_like(layer.weight)
    before = layer.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before)
    layer.weight.grad[1] = 0.01
    for _ in range(3):
        optimizer.step()
    assert layer.weight.isfinite().all() and (layer.weight[1] < 0).all()
    torch.testing.assert_close(layer.weight.detach()[[0, 2]], before[[0, 2]])


@each(ALL)
def test_nan_gradients_stay_in_their_own_vectors(kind, settings):
    layer = nn.Linear(4, 3, bias=False)
    optimizer = kind(layer.named_parameters(), symmetries=Report((Group("scale", ("weight",), ((0,),)),)), **settings)
    layer.weight.grad = torch.ones(3, 4)
    layer.weight.grad[1, 2] = torch.nan
    optimizer.step()
    assert layer.weight[[0, 2]].isfinite().all() and layer.weight[1].isnan().any()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
@each(ALL)
def test_extreme_scales_in_float32(kind, settings, scale):
    """The gradient of a scale-free weight is as small as the weight is large, and the other way round."""
    weight = nn.Parameter(scale * torch.randn(3, 50, generator=torch.Generator().manual_seed(0)))
    size = weight.detach().norm(dim=1)
    settings = settings | ({} if kind in (SGDG, AdamG) else {"lr": 1e-3 * scale * (scale if kind is SGDP else 1)})
    settings = settings | ({"eps": 0.0} if kind is AdamP else {})
    optimizer = kind([("w", weight)], symmetries=Report((Group("scale", ("w",), ((0,),)),)), **settings)
    for _ in range(5):
        direction = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
        weight.grad = Spheres((0,)).project(weight.detach(), direction) * 0.01 / scale
        before = weight.detach().clone()
        optimizer.step()
        assert weight.isfinite().all() and not torch.equal(weight, before)
    if kind in (SGDG, AdamG):
        assert float((weight.detach().norm(dim=1) / size - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@each(PROJECTED)
def test_the_radial_part_is_removed_where_squares_are_no_numbers(kind, settings, scale):
    """In float32 the square of such a norm is 0 or infinite."""
    weight = nn.Parameter(scale * torch.randn(3, 50, generator=torch.Generator().manual_seed(0)))
    before = weight.detach().double().clone()
    settings = settings | {"lr": scale, "momentum": 0.0} if kind is SGDP else settings | {"lr": scale}
    optimizer = kind([("w", weight)], symmetries=Report((Group("scale", ("w",), ((0,),)),)), **settings)
    weight.grad = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    update = weight.detach().double() - before
    radial = (update * before).sum(1) / (update.norm(dim=1) * before.norm(dim=1))
    assert weight.isfinite().all() and float(radial.abs().max()) < 1e-6


def test_shapes_that_are_odd():
    model = nn.ParameterDict({
        "scalar": nn.Parameter(torch.tensor(2.0)), "empty": nn.Parameter(torch.zeros(0, 3)), "middle": nn.Parameter(torch.randn(3, 4, 5)),
        "wide": nn.Parameter(torch.randn(2, 300_000)),
    })  # fmt: skip
    report = Report((
        Group("scale", ("scalar",), ((),)), Group("scale", ("empty",), ((0,),)), Group("scale", ("middle",), ((2, 0),)),
        Group("scale", ("wide",), ((0,),)),
    ))  # fmt: skip
    for kind, settings in ALL:
        copied = copy.deepcopy(model)
        optimizer = kind(copied.named_parameters(), symmetries=report, **settings)
        for parameter in copied.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(p.isfinite().all() for p in copied.values())
        torch.testing.assert_close(copied["scalar"].detach(), torch.tensor(2.0))  # a sphere in one dimension is two points
