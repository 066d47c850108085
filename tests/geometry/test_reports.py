"""Geometry on the reports of `ns.symmetries` itself: shifts that later biases take back, attention, rescaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope.geometry.flow import gradient_descent, gradient_flow
from normscope.geometry.groups import SCALES, SHIFTS, self_contained
from normscope.geometry.quotient import canonical, horizontal
from tests.optim.standin import convolutional, dense, drawn

symmetries = pytest.importorskip("normscope.symmetry.detect", reason="needs ns.symmetries").symmetries


class Attention(nn.Module):
    """Pre-norm self-attention of one head with its residual, and a readout."""

    def __init__(self):
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(6, 4)
        self.value, self.out, self.last = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        z = self.norm(x)
        attended = nn.functional.scaled_dot_product_attention(self.query(z), self.key(z), self.value(z))
        return self.last(nn.functional.layer_norm(x + self.out(attended), (6,), eps=1e-12)).mean(1)


def encoder(dtype):
    """Post-norm: two groups of rescalings that hold a scale-free vector between them."""
    return drawn(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), dtype, 0)


def vision(dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4, num_channels=1
    )
    config.num_labels = 10
    return Logits(drawn(transformers.ViTForImageClassification(config), dtype, 0))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


MODELS = {
    "dense": (dense, (24, 10)),
    "convolutional": (convolutional, (12, 2, 6, 6)),
    "attention": (lambda dtype: drawn(Attention(), dtype, 0), (8, 5, 6)),
}


@pytest.fixture(params=MODELS)
def case(request):
    make, shape = MODELS[request.param]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    model = make(torch.float64)
    return model, inputs, torch.randint(3, shape[:1], generator=generator), symmetries(model, inputs)


def test_representatives_keep_the_function_and_forget_the_point_of_the_orbit(case):
    model, inputs, _, report = case
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moved, generator = dict(start), torch.Generator().manual_seed(1)
    for group in report.groups:
        if group.kind in SHIFTS or (group.kind in SCALES and self_contained(group, start)):  # others have no preferred element
            moved = group.transform(moved, generator)
    outputs = torch.func.functional_call(model, start, (inputs,))
    first, second = canonical(report, start), canonical(report, moved)
    torch.testing.assert_close(torch.func.functional_call(model, first, (inputs,)), outputs, rtol=1e-6, atol=1e-7)
    for name in start:
        torch.testing.assert_close(first[name], second[name], rtol=1e-6, atol=1e-7)


def test_gradients_are_horizontal_and_tangents_of_orbits_are_not(case):
    model, inputs, labels, report = case
    nn.functional.cross_entropy(model(inputs), labels).backward()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = horizontal(report, named, gradients)
    size = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert all(float((found[name] - gradients[name]).abs().max()) <= 1e-6 * size for name in found)
    total = {name: torch.zeros_like(value) for name, value in named.items()}
    for group in report.groups:
        amounts = torch.randn(group.count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        for name, moved in group.tangent(named, amounts).items():
            total[name] += moved
    size = max(float(moved.abs().max()) for moved in total.values())
    assert all(float(part.abs().max()) <= 1e-9 * size for part in horizontal(report, named, total).values())


def test_charges_obey_their_laws(case):
    model, inputs, labels, report = case
    batch = inputs, labels
    assert (
        gradient_descent(model, nn.functional.cross_entropy, batch, lr=0.1, steps=10, symmetries=report, weight_decay=0.01).defect
        <= 1e-6
    )
    assert gradient_flow(model, nn.functional.cross_entropy, batch, duration=0.02, symmetries=report).defect <= 1e-4


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("make, shape", [(encoder, (2, 5, 16)), (vision, (2, 1, 8, 8))], ids=["encoder layer", "vision"])
def test_representatives_of_transformers(make, shape, mode):
    """The same under each group and under all, idempotent, and the same function but for ε."""
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = make(torch.float64).train(mode == "train")
    report = symmetries(model, inputs, mode=mode)
    start, generator = {name: parameter.detach() for name, parameter in model.named_parameters()}, torch.Generator().manual_seed(1)
    found, everywhere = canonical(report, start), dict(start)
    groups = [group for group in report.groups if group.kind != "linear"]
    points = [group.transform(start, generator) for group in groups]
    for group in groups:
        everywhere = group.transform(everywhere, generator)
    for point in (*points, everywhere, found):
        other = canonical(report, point)
        for name in start:
            torch.testing.assert_close(other[name], found[name], rtol=1e-8, atol=1e-8 * max(1e-4, float(found[name].abs().max())))
    before, after = (report.numerics.without_epsilon(point) for point in (start, found))
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)
