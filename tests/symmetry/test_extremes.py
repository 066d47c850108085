"""Completeness of models whose weights are far from 1: every search ends, and no square overflows on the way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.core.errors import NormscopeError
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
