"""Bounds on probabilities hold for long rows, and for logits so far apart that exponentials overflow."""

from __future__ import annotations

import math
from types import SimpleNamespace

import mpmath
import pytest
import torch

from normscope.core.interval import Interval
from normscope.core.rounding import gamma
from normscope.graph.trace import trace
from normscope.rules.logits import Weighed, change
from normscope.rules.registry import registry
from normscope.rules.softmax import probability_changes
from tests.networks import Function

D = torch.float64


@pytest.mark.parametrize("entries", [100, 20_000, 1_000_000])
def test_changes_of_probabilities_cover_sums_in_any_order(entries):
    """Nothing moves, but Σp is computed."""
    p, still = torch.full((1, 1, entries), 1 / entries, dtype=D), torch.zeros(1, 1, entries, dtype=D)
    changed, _ = probability_changes(p, still, -1)
    assert float(changed.min()) * entries >= gamma(entries)
    found = change(p, Weighed.of(p.sqrt(), still), torch.zeros(1, 1, dtype=D))
    assert float(found.relative.each.min()) >= gamma(entries) and float(found.factor.min()) >= 1 + gamma(entries)


def bounds_of(logits: torch.Tensor) -> Interval:
    """What the rule says of one point, which a pass over a model evaluates as well."""
    node = trace(Function(lambda x: x.softmax(1)), torch.zeros(1, len(logits), dtype=D)).output
    context = SimpleNamespace(local=True, interval=lambda _: Interval(logits[None], logits[None]))
    return registry.find(node).interval(node, context)


@pytest.mark.parametrize("gap", [700.0, 709.9, 720.0, 744.0, 760.0])
def test_probabilities_far_below_one_hold(gap):
    bounds = bounds_of(torch.tensor([0.0, -gap], dtype=D))
    with mpmath.workdps(400):
        exact = 1 / (1 + mpmath.exp(mpmath.mpf(gap)))
        for low, high, value in zip(bounds.low[0].tolist(), bounds.high[0].tolist(), (1 - exact, exact), strict=True):
            assert low <= value <= high


@pytest.mark.parametrize("entries", [3, 1_000, 100_000])
def test_probabilities_of_long_rows_leave_room_for_their_sum(entries):
    """One logit against many that weigh as much together: their logarithm is near 0, and its error is not."""
    logits = torch.full((entries,), -math.log(entries - 1), dtype=D)
    logits[0] = 0.0
    bounds = bounds_of(logits)
    assert float(bounds.high[0, 0] - bounds.low[0, 0]) >= gamma(entries) / 2
    assert float(bounds.high[0, 0] - bounds.low[0, 0]) <= 1e-12 * entries
