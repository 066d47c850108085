"""A rehearsal with a few random columns tells about what affine forms would give, and never takes a smaller bound away."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normscope.certify import forms
from normscope.certify.forms import AffineForms, affine_forms
from normscope.certify.passing import Pass
from normscope.certify.rehearsal import rehearsed
from normscope.certify.relays import estimate
from normscope.certify.upper import upper
from normscope.core.region import Ball
from normscope.graph.trace import trace
from tests.certify.test_forms import NETWORKS, drawn

RADII = (1e-4, 3e-2, 3.0)


def deep(layers: int = 8) -> tuple[nn.Module, torch.Tensor]:
    """Beyond a small ball its forms explode: every unit is uncertain, and each layer multiplies what is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 3))
        for part in made:
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=math.sqrt(2 / 16))
        return made.double(), torch.randn(1, 16, dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "no remainder known"])
def test_the_guess_is_near_what_forms_give(name: str) -> None:
    """Not far above it, or forms that help would be left out; and not far below where only kinks are left out of J."""
    _, x, graph = drawn(name, 0)
    for radius in RADII[:2]:
        region = Ball(x[0], radius)
        guess, found = rehearsed(Pass(graph, region)).bound, affine_forms(graph, region)
        assert 0 < guess < forms.HOPELESS / 2 * float(found.bound)
    assert rehearsed(Pass(graph, Ball(x[0], 1e-6))).bound > 0.1 * affine_forms(graph, Ball(x[0], 1e-6)).straight


def test_guessed_symbols_are_about_as_many_as_there_are() -> None:
    model, x = deep(4)
    graph, region = trace(model, x, "eval", None), Ball(x[0], 0.1)
    found, shares = affine_forms(graph, region), rehearsed(Pass(graph, region)).shares
    counted = sum(share * math.prod(node.shape) for node, share in shares.items())
    assert found.symbols and counted == pytest.approx(found.symbols, rel=0.5, abs=6)
    assert estimate(graph) > estimate(graph, shares=dict.fromkeys(shares, 0.0)) == estimate(graph, bent=0.0)


def test_nothing_is_guessed_without_a_remainder() -> None:
    _, x, graph = drawn("no remainder known", 0)
    assert rehearsed(Pass(graph, Ball(x[0], 0.1))).bound == 0.0


@pytest.mark.parametrize("radius", RADII)
def test_forms_are_left_out_only_where_they_do_not_win(radius: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = deep()
    graph, region = trace(model, x, "eval", None), Ball(x[0], radius)
    always = upper(graph, region=region)
    monkeypatch.setattr(forms, "LITTLE_WORK", 0.0)
    monkeypatch.setattr(forms, "HOPELESS", 2.0)
    found = upper(graph, region=region)
    left_out = any("by a guess" in note for note in found.notes)
    assert left_out == (radius == RADII[-1])
    assert float(found.bound) == pytest.approx(float(always.bound), rel=1e-6)
    assert not any("by a guess" in note for note in upper(graph, region=region, effort=1.5).notes)


def test_an_interrupted_or_broken_rehearsal_ends_in_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = deep(3)
    graph, region = trace(model, x, "eval", None), Ball(x[0], 0.01)
    whole = upper(graph, region=region)
    monkeypatch.setattr(forms, "LITTLE_WORK", 0.0)
    for error, interrupted in ((KeyboardInterrupt, True), (ValueError, False)):

        def raised(*_: object, error: type[BaseException] = error) -> None:
            raise error

        monkeypatch.setattr(forms, "rehearsed", raised)
        found = upper(graph, region=region)
        assert found.interrupted is interrupted and found.bound >= whole.bound and found.bound.finite
        assert interrupted or found.bound == whole.bound


def test_what_costs_little_or_cannot_be_afforded_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = deep(3)
    made = AffineForms(trace(model, x, "eval", None))
    assert not made.dear
    monkeypatch.setattr(forms, "LITTLE_WORK", 0.0)
    assert made.dear
    monkeypatch.setattr(forms, "MOST_WORK", 1.0)
    assert not made.dear
