"""What a rule says about values and slopes holds wherever one looks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normscope.certify.upper import Composition
from normscope.core.interval import Interval
from normscope.graph.trace import trace
from normscope.rules.activations import Entrywise
from normscope.rules.registry import registry
from tests.cases import ENTRYWISE, RULE_CASES, VARIANTS, Case

CASES = {name: case for name, case in {**RULE_CASES, **VARIANTS}.items() if case.mode == "eval"}


@pytest.mark.parametrize("name", CASES)
def test_values_lie_in_their_intervals(name):
    """On inputs in [−2, 2], so that the bounds are worth something."""
    case = CASES[name]
    graph = trace(nn.Sequential(nn.Hardtanh(-2, 2), case.module), case.example)
    bounds = Composition(graph)
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0, 1e6):
        point = scale * torch.randn(case.example.shape, generator=generator, dtype=torch.float64)
        for node, value in graph.run([point], torch.float64, capture=graph.nodes)[1].items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                interval = bounds.interval(node)
                assert (interval.low <= value).all() and (value <= interval.high).all(), node


def entrywise(case: Case):
    """The node and the rule of a function ℝ → ℝ, applied entry by entry."""
    graph = trace(case.module, case.example)
    return next((node, rule) for node in reversed(graph.nodes) if isinstance(rule := registry.find(node), Entrywise))


FUNCTIONS = [name for name in ENTRYWISE if isinstance(registry.rules.get(name), Entrywise)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes_contain_every_difference_quotient_and_are_reached(name):
    node, rule = entrywise(RULE_CASES[name])
    generator = torch.Generator().manual_seed(0)
    for width in (0.01, 1.0, 20.0):
        for middle in (4 * torch.randn(8, generator=generator, dtype=torch.float64)).tolist():
            low, high = torch.tensor(middle - width / 2).double(), torch.tensor(middle + width / 2).double()
            least, largest = (float(side.max()) for side in rule.slopes_on(node, Interval(low.expand(3), high.expand(3))))
            if not math.isfinite(largest - least):
                continue
            x = torch.linspace(float(low), float(high), 3001, dtype=torch.float64)[:, None].expand(-1, 3)
            values = node.apply(x)
            found = values.diff(dim=0) / x.diff(dim=0)
            slack = 1e-9 * (1 + max(abs(least), abs(largest)))
            assert least - slack <= found.min() and found.max() <= largest + slack
            if name not in ("sin", "cos", "prelu"):  # not followed interval by interval; one slope a channel
                assert found.max() >= largest - 0.02 * (largest - least) - slack
                assert found.min() <= least + 0.02 * (largest - least) + slack
