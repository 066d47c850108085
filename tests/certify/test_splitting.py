"""Boxes in parts: the parts cover the box, and the largest of their bounds is a bound on it that is never worse."""

import itertools

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.certify import splitting
from normscope.certify.splitting import Part, cut
from normscope.certify.upper import upper
from normscope.core.magnitude import Magnitude
from normscope.graph.trace import trace
from normscope.testing import exact_relu_constant


def network(seed, widths=(2, 6, 6, 2)):
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs).double()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(outputs, inputs, generator=generator))
            layer.bias.copy_(0.3 * torch.randn(outputs, generator=generator))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(widths[0], generator=generator, dtype=torch.float64)


def volume(box):
    return float((box.high[0] - box.low[0]).prod())


def test_parts_cover_the_box():
    def bounded(box):
        return Part(box, Magnitude(volume(box) + 1), torch.tensor([[0.2, 0.1]]))

    whole = ns.Box([torch.tensor([-1.0, 0.0])], [torch.tensor([1.0, 3.0])])
    parts = [part.box for part in cut(bounded(whole), bounded, 12)]
    assert len(parts) == 12 and sum(map(volume, parts)) == pytest.approx(volume(whole))
    generator = torch.Generator().manual_seed(0)
    for point in torch.rand(200, 2, generator=generator) * torch.tensor([2.0, 3.0]) - torch.tensor([1.0, 0.0]):
        assert any(part.contains([point]) for part in parts)
    assert len(cut(bounded(whole), bounded, 1)) == len(cut(bounded(whole), lambda box: None, 12)) == 1
    point = ns.Box([torch.zeros(2)], [torch.zeros(2)])
    assert len(cut(bounded(point), bounded, 12)) == 1


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, *range(2, 12)))])
def test_bounds_on_parts_are_sound_and_not_worse(seed, monkeypatch):
    model, x = network(seed)
    graph = trace(model, x[None], "eval", None)
    for width in (0.1, 0.5):
        box = ns.Box(x - width, x + width)
        exact, found = exact_relu_constant(model, box), upper(graph, region=box)
        monkeypatch.setattr(splitting, "MOST_PARTS", 1)
        without = upper(graph, region=box)
        monkeypatch.undo()
        assert exact * (1 - 1e-9) <= float(found.bound) and found.bound <= without.bound
        if found.bound < without.bound:
            assert found.certificate.steps[0].method.startswith("affine forms on ")
