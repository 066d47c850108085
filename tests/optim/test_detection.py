"""Optimizers that are given the model alone find its symmetries themselves, and training is as with the report."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.optim import SGDG, SGDP, AdamG, AdamP
from tests.optim.standin import MODELS, batch, parameters_equal, train

symmetries = pytest.importorskip("normscope.symmetry.detect", reason="needs ns.symmetries").symmetries


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", [SGDG, SGDP, AdamG, AdamP])
@pytest.mark.parametrize("name", MODELS)
def test_model_example_and_report_are_the_same(kind, name):
    make, expected = MODELS[name]
    data = batch(name)
    models = [make() for _ in range(4)]
    optimizers = [
        kind(models[0], symmetries=expected),
        kind(models[1], symmetries=symmetries(models[1], data[0])),
        kind(models[2], example=data[0]),
        kind(models[3]),
    ]
    state = torch.random.get_rng_state()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data, 3)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(set(optimizer.scale_free) == set(optimizers[0].scale_free) for optimizer in optimizers)
    assert all(parameters_equal(models[0], model) for model in models[1:])
    assert all(not optimizer.left_out for optimizer in optimizers)


def test_detection_leaves_buffers_and_gradients_alone():
    make, report = MODELS["dense"]
    data = batch("dense")
    models = [make(), make()]
    for model, optimizer in zip(models, (AdamP(models[0]), AdamP(models[1], symmetries=report)), strict=True):
        train(model, optimizer, data, 1)
    for first, second in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(first, second)
    assert not models[0]._forward_pre_hooks
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first.grad, second.grad)


def test_evaluation_does_not_count_as_the_first_batch():
    make, _ = MODELS["dense"]
    model = make()
    optimizer = AdamP(model)
    model.eval()
    model(batch("dense")[0])
    with pytest.raises(InputError, match="training mode"):
        optimizer.step()
    train(model.train(), optimizer, batch("dense"), 1)
    assert len(optimizer.scale_free) == 2


def test_models_called_by_keywords():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 2)

        def forward(self, x, scale=None):
            return self.last(self.norm(self.first(x)).tanh())

    model = Named()
    optimizer = AdamP(model)
    model(x=torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).sum().backward()
    optimizer.step()
    assert optimizer.scale_free == (("first.weight",),)


def test_models_called_both_ways():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 2)

        def forward(self, x, offset, **others):
            return self.last(self.norm(self.first(x)).tanh()) + offset

    model = Mixed()
    optimizer = AdamP(model)
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), offset=torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert optimizer.scale_free == (("first.weight",),)

    class Variadic(Mixed):
        def forward(self, *inputs, scale):
            return super().forward(*inputs)

    model = Variadic()
    AdamP(model)
    with pytest.raises(InputError, match="pass symmetries"):
        model(torch.ones(3, 4), torch.ones(3, 2), scale=torch.ones(1))
