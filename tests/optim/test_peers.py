"""Agreement with `adamp` and `geoopt` where the algorithms coincide; `pip install --no-deps adamp geoopt` to run these."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope.optim import SGDG, SGDP, AdamG, AdamP
from tests.optim.standin import CONVOLUTIONAL, Group, Report, batch, convolutional, drawn, train

ROWS = Report((Group("scale", ("w",), ((0,),)),))


def package(name):
    return pytest.importorskip(name, reason=f"{name} is not installed; it is a peer for agreement only")


def train_pair(first, second, make, name):
    models = [make(torch.float64), make(torch.float64)]
    for model, optimizer in zip(models, (first(models[0]), second(models[1])), strict=True):
        train(model, optimizer, batch(name, torch.float64), 50)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def bias_free(dtype):
    """Every matrix before a normalizer is scale-free by itself, which is what a cosine test can see."""
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8, eps=1e-12), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False),
        nn.BatchNorm2d(6, eps=1e-12), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5, bias=False), nn.LayerNorm(5, eps=1e-12),
    )  # fmt: skip
    return drawn(model, dtype, 0)


BIAS_FREE = Report(tuple(Group("scale", (f"{index}.weight",), (axes,)) for index, axes in ((0, (0,)), (3, (0,)), (7, ()))))


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_adamp_agrees(decay):
    theirs = package("adamp").AdamP
    settings = {"lr": 0.01, "weight_decay": decay}
    train_pair(
        lambda model: AdamP(model, symmetries=BIAS_FREE, **settings),
        lambda model: theirs(model.parameters(), **settings),
        bias_free,
        "convolutional",
    )


@pytest.mark.parametrize("settings", [{"momentum": 0.0}, {"momentum": 0.9, "nesterov": True}], ids=["plain", "nesterov"])
def test_sgdp_agrees(settings):
    """With momentum but without Nesterov, `adamp` also projects its momentum buffer in place, which the paper does not."""
    theirs = package("adamp").SGDP
    settings = {"lr": 0.1} | settings
    train_pair(
        lambda model: SGDP(model, symmetries=BIAS_FREE, **settings),
        lambda model: theirs(model.parameters(), **settings),
        bias_free,
        "convolutional",
    )


def unit_rows(dtype=torch.float64):
    return nn.functional.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=dtype))


def loss_of(weight):
    """Of the rays only, so that the gradient is the same for both."""
    unit = nn.functional.normalize(weight)
    matrix = torch.linspace(-1, 1, 36, dtype=weight.dtype).reshape(6, 6).sin()
    return ((unit @ matrix) * unit).sum() + (unit[:, 0] ** 3).sum()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_geoopt_agrees_on_the_sphere(name):
    geoopt = package("geoopt")
    theirs = geoopt.ManifoldParameter(unit_rows(), manifold=geoopt.SphereExact())
    ours = nn.Parameter(unit_rows())
    common = {"sphere_ratio": 1.0, "clip": None, "symmetries": ROWS}
    if name == "sgd":
        pair = SGDG([("w", ours)], lr=0.1, **common), geoopt.optim.RiemannianSGD([theirs], lr=0.1)
    else:  # geoopt projects the first moment onto the new tangent space where Cho and Lee transport it: equal for β₁ = 0
        pair = (
            AdamG([("w", ours)], lr=0.02, betas=(0.0, 0.99), **common),
            geoopt.optim.RiemannianAdam([theirs], lr=0.02, betas=(0.0, 0.99)),
        )
    for _ in range(100):
        for optimizer, weight in zip(pair, (ours, theirs), strict=True):
            optimizer.zero_grad()
            loss_of(weight).backward()
            optimizer.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-9)
    assert float(loss_of(ours).detach()) < float(loss_of(unit_rows()))


def test_their_cosine_test_misses_joint_scales():
    """A weight and a bias that are scale-free only together look to a cosine test like a weight that is not scale-free."""
    theirs = package("adamp").AdamP
    models = [convolutional(torch.float64), convolutional(torch.float64)]
    train(models[0], AdamP(models[0], lr=0.01, symmetries=CONVOLUTIONAL), batch("convolutional", torch.float64), 1)
    train(models[1], theirs(models[1].parameters(), lr=0.01), batch("convolutional", torch.float64), 1)
    assert not torch.allclose(models[0][0].weight, models[1][0].weight, rtol=1e-6)
