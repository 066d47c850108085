"""Radii: no attack inside a certified ball changes the answer, and the arithmetic is that of the definition."""

import math

import pytest
import torch
from torch import nn

import normscope as ns

GENERATOR = torch.Generator().manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).double()
with torch.no_grad():
    for _parameter in MODEL.parameters():
        _parameter.copy_(torch.randn(_parameter.shape, generator=GENERATOR))
X = torch.randn(12, 6, generator=GENERATOR, dtype=torch.float64)
Y = MODEL(X).argmax(1)


def test_no_attack_succeeds_inside_a_certified_ball():
    found = ns.certify_radius(MODEL, X[:1], (X, Y))
    assert found.median > 0 and found.certified_accuracy(0.0) == 1.0
    for x, y, radius in zip(X, Y, found.radius, strict=True):
        steps = torch.randn(500, 6, generator=GENERATOR, dtype=torch.float64)
        near = x + 0.999 * radius * steps / steps.norm(dim=1, keepdim=True)
        for _ in range(20):  # ascent on the strongest other output
            near.requires_grad_(True)
            outputs = MODEL(near)
            others = outputs.masked_fill(nn.functional.one_hot(y, 4).bool(), -torch.inf).amax(1)
            (slope,) = torch.autograd.grad((others - outputs[:, y]).sum(), near)
            away = (near + 0.1 * radius * slope / slope.norm(dim=1, keepdim=True)).detach() - x
            near = x + away * (0.999 * radius / away.norm(dim=1, keepdim=True)).clamp(max=1.0)
        assert (MODEL(near).argmax(1) == y).all()


def test_a_wrong_answer_has_no_radius():
    found = ns.certify_radius(MODEL, X[:1], (X, (Y + 1) % 4))
    assert set(found.radius) == {0.0} and found.certified_accuracy(0.0) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_without_numbers_are_named(value):
    data = torch.zeros(3, 8)
    data[2, 5] = value
    model = torch.nn.Linear(8, 3)
    for certify in (
        lambda: ns.certify_radius(model, data, (data, torch.zeros(3))),
        lambda: ns.local_brackets(model, data, data, 0.1),
    ):
        with pytest.raises(ns.InputError, match="sample 2 of the data holds NaN or infinity"):
            certify()


def test_labels_are_needed():
    with pytest.raises(ns.InputError, match="labels"):
        ns.certify_radius(MODEL, X[:1], [X])


def test_brackets_around_samples():
    found = ns.local_brackets(MODEL, X[:1], X, radius=0.01)
    everywhere = ns.lipschitz(MODEL, X[:1], effort=0.1).upper
    assert len(found) == len(X)
    assert found.largest.lower == max(b.lower for b in found.brackets)
    assert all(b.upper <= everywhere * (1 + 1e-9) for b in found.brackets)
