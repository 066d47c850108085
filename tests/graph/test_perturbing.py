"""Noise for large tensors is as good as new numbers: normal, and not the same along any axis."""

from __future__ import annotations

import pytest
import torch

from normscope.graph.graph import Node
from normscope.graph.perturbing import LENGTH, Noise, perturbed, roundoff
from normscope.graph.trace import trace
from tests.networks import Function


@pytest.mark.parametrize("shape", [(3, 4), (LENGTH,), (7, LENGTH), (1000, 250), (LENGTH // 2, 5), ()])
def test_noise_is_normal_and_has_the_shape_asked_for(shape):
    noise = Noise(0)
    first, second = noise(shape), noise(shape)
    assert first.shape == shape
    assert not torch.equal(first, second)
    if first.numel() > 1000:
        assert abs(float(first.mean())) < 0.02
        assert float(first.std()) == pytest.approx(1, abs=0.02)


def test_rows_of_a_large_tensor_are_not_alike():
    rows = torch.nn.functional.normalize(Noise(0)((400, 768)), dim=1)
    assert float((rows @ rows.T).fill_diagonal_(0).abs().max()) < 0.3


def test_rounding_is_relative_and_leaves_what_is_not_a_number():
    value = torch.tensor([0.0, 1.0, -1e20], dtype=torch.float32)
    moved = Noise(0).rounding(value, 1e-3, 1e-38)
    assert moved.dtype == value.dtype
    assert moved[0] == 0
    assert bool(((moved / value - 1).abs()[1:] < 1e-2).all())
    assert Noise(0).rounding(torch.tensor([1]), 1.0, 1e-38).item() == 1
    assert Noise(0).rounding("same", 1.0, 1e-38) == "same"


def test_what_is_below_the_range_of_a_type_may_be_lost_in_it():
    unit, least = roundoff(torch.float32)
    value = torch.tensor([1e-60, 1e-300, least, 1e-20, 0.0, torch.inf], dtype=torch.float64)
    moved = Noise(0).rounding(value, unit, least)
    assert bool(((moved / value - 1).abs()[:3] > 1e-2).all())
    assert moved[3] == pytest.approx(1e-20, rel=1e-6) and moved[4] == 0 and moved[5] == torch.inf


COUNTED = {
    "counts": (lambda x: x + 2 * x.argsort(1).to(x.dtype), "mul", True),
    "shares": (lambda x: x + (x > 2.5).sum(1, keepdim=True) / 3, "div", False),
    "whole numbers of the input": (lambda x: 2 * x + 1, "mul", False),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted_is_not_rounded(name):
    function, op, exact = COUNTED[name]
    x = torch.tensor([[3.0, 1.0, 2.0, 5.0]])
    graph = trace(Function(function), x)
    node = next(node for node in graph if node.op == op)
    evaluate = perturbed(lambda value: value * (1 + 1e-6) if value.is_floating_point() else value)
    plain, moved = (graph.run([x], torch.float64, [node], way)[1][node] for way in (Node.evaluate, evaluate))
    assert torch.equal(plain, moved) == exact
    assert torch.allclose(plain, moved, rtol=1e-4)
