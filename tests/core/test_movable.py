"""Parameters of whole numbers, as quantized layers have: no derivative, no symmetry, and they could hold training data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.core.magnitude import ZERO

X, Y = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


class Picked(nn.Module):
    """A linear map whose outputs are multiplied by whole numbers, or picked by them."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.product = product
        self.whole = nn.Parameter(torch.tensor([1, 2, 0]), requires_grad=False)  # the first parameter of the model
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.whole if self.product else self.linear(x)[:, self.whole]


@pytest.mark.parametrize("product", [False, True])
def test_whole_numbers_are_no_parameters_that_move(product):
    model = Picked(product)
    report = ns.symmetries(model, X)
    assert not report.groups and not report.unused and report.check() == [] and report.completeness().named == 0
    rows = {row.parameter: row for row in ns.certify.weight_sensitivities(model, X, region=ns.Ball(X[0], 1.0))}
    assert rows["whole"].bound == ZERO and "whole numbers" in rows["whole"].reason
    assert 0 < float(rows["linear.weight"].bound) < float("inf")
    assert len(ns.bounds.margins(model, (X, Y))) == 64


@pytest.mark.parametrize("product", [False, True])
def test_whole_numbers_count_as_what_could_hold_training_data(product):
    model = Picked(product)
    found = ns.generalization(model, "zero-one", (X, Y), select=["PAC-Bayes"])
    assert not len(found) and "could hold training data" in str(found.to_dict())
    initial = copy.deepcopy(model)
    with torch.no_grad():
        model.linear.weight.add_(0.1)
    assert len(ns.generalization(model, "zero-one", (X, Y), select=["PAC-Bayes"], initial=initial)) == 2
    initial.whole.data.copy_(torch.tensor([2, 1, 0]))
    found = ns.generalization(model, "zero-one", (X, Y), select=["PAC-Bayes"], initial=initial)
    assert not len(found) and "training has changed" in str(found.to_dict())
