"""Completeness of models whose weights are far from 1: every search ends, and no square overflows on the way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.core.errors import NormscopeError
from normscope.symmetry import check
from normscope.symmetry import completeness as checked


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-170, 1.0, 1e160, math.inf, math.nan])
def test_the_search_for_a_rank_ends(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight / model[0].weight.abs() * size if size else torch.zeros(2, 2))
    try:
        said = str(ns.symmetries(model, torch.randn(4, 2).double()).completeness)
    except NormscopeError as error:
        assert "\n\n" not in str(error)
    else:
        assert "nan" not in said or not math.isfinite(size)


def test_a_rank_that_never_settles_is_left(monkeypatch):
    """Ranks that alternate, as those of an ill-conditioned model may."""
    turns = []

    def alternating(values: torch.Tensor) -> int:
        turns.append(len(values))
        return len(turns) % 2

    class Numerics:
        inputs = {}
        parameters = {"w": torch.ones(3, dtype=torch.float64)}

        def without_epsilon(self, parameters, inputs):
            return parameters["w"] * 2

    monkeypatch.setattr(checked, "_rank", alternating)
    checked._jacobians(Numerics.parameters, Numerics(), torch.Generator())
    assert len(turns) == checked.IDLE * 5


@pytest.mark.parametrize(("size", "inputs"), [(1e-170, 1e170), (1e-8, 1.0), (1.0, 1.0), (1e150, 1.0)])
def test_true_groups_are_kept_and_wrong_ones_refuted_at_every_size(size, inputs):
    """Both by the outputs and by the gradient alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    with torch.no_grad():
        model[0].weight.mul_(size)
        model[2].weight.mul_(size)
    report = ns.symmetries(model, torch.randn(8, 4).double() * inputs)
    (group,) = report.groups
    wrong = replace(group, actions=group.actions[:1])
    assert report.check() == []
    assert [found.test for found in check.check([wrong], report.numerics)] == ["outputs"]
    trial = check._Trial(report.numerics)
    assert trial.gradient(group) <= check.TOLERANCE < 1e-3 < trial.gradient(wrong) <= 1.0


@pytest.mark.parametrize("divisor", [9, 10**12, 10**18])
def test_averages_at_padded_borders_keep_no_constants(divisor):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(3, 1, 1, divisor_override=divisor), nn.GroupNorm(3, 3), nn.Conv2d(3, 2, 1)
    )
    report = ns.symmetries(model, torch.randn(2, 2, 5, 5))
    shifted = [group for group in report.groups if "shift" in group.kind and "0.bias" in group.parameters]
    assert not shifted, report


def test_a_function_without_a_second_derivative_is_checked_by_what_there_is():
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Hardsigmoid(), nn.Linear(6, 3))
    report = ns.symmetries(model, torch.randn(3, 4))
    assert any(group.kind == "scale" for group in report.groups) and report.check() == []


@pytest.mark.parametrize("layer", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("size", [1e-10, 1e10])
def test_one_layer_far_from_the_others_hides_no_rank(layer, size):
    """Its columns of the Jacobian are far below those of the others, or far above."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)
    )
    with torch.no_grad():
        for parameter in model[layer].parameters():
            parameter.mul_(size)
    found = ns.symmetries(model, torch.randn(5, 3)).completeness()
    assert found.complete and found.named == 21, found


@pytest.mark.parametrize("size", [3.0, 100.0, 1e6])
def test_saturation_is_no_symmetry(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.Softmax(-1))
    with torch.no_grad():
        model[2].weight.mul_(size)
    found = ns.symmetries(model, torch.randn(6, 3), mode="eval").completeness()
    assert found.named == found.null == 4
