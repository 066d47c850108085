"""What a rule says about values and slopes holds wherever one looks."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.certify.upper import forward_pass
from normscope.core.interval import Interval
from normscope.graph.trace import trace
from normscope.rules.activations import Entrywise
from normscope.rules.registry import registry
from tests.cases import ENTRYWISE, RULE_CASES, VARIANTS, Case, Function

CASES = {name: case for name, case in {**RULE_CASES, **VARIANTS}.items() if case.mode == "eval"}


@pytest.mark.quick(50)
@pytest.mark.parametrize("name", CASES)
def test_values_lie_in_their_intervals(name):
    """On inputs in [−2, 2], so that the bounds are worth something."""
    case = CASES[name]
    graph = trace(nn.Sequential(nn.Hardtanh(-2, 2), case.module), case.example)
    bounds = forward_pass(graph)
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


@pytest.mark.quick(28)
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
            if name not in ("sin", "cos", "prelu"):  # not followed interval by interval; one slope per channel
                assert found.max() >= largest - 0.02 * (largest - least) - slack
                assert found.min() <= least + 0.02 * (largest - least) + slack


STEPS = {"floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "sign": torch.sign}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_constant_between_their_jumps(name):
    """On a box that holds no jump the gain is 0; on one that reaches a jump there is none."""
    model, middle = Function(STEPS[name]), torch.tensor([0.25, -1.75, 2.3])
    inside = ns.lipschitz(model, middle[None], region=ns.Ball(middle, 0.2))
    assert inside.upper == 0
    for radius in (0.31, 1.0, 10.0):
        reached = ns.Box(middle - radius, middle + radius)
        jumps = bool((STEPS[name](middle - radius) != STEPS[name](middle + radius)).any())
        found = ns.lipschitz(model, middle[None], region=reached)
        assert (found.upper == math.inf) == jumps and (not jumps or "jump" in found.reason)


POLES = {
    "tan": (torch.tan, [-7.5, -1.3, 0.2, 3.9]),
    "asin": (torch.asin, [-0.9, 0.0, 0.4, 0.93]),
    "acos": (torch.acos, [-0.9, 0.0, 0.4, 0.93]),
    "atanh": (torch.atanh, [-0.9, 0.0, 0.4, 0.93]),
    "acosh": (torch.acosh, [1.2, 1.5, 4.0, 100.0]),
    "logit": (torch.logit, [0.1, 0.3, 0.5, 0.93]),
    "logit with ε": (lambda x: torch.logit(x, 0.2), [0.1, 0.3, 0.5, 0.93]),
}


@pytest.mark.quick(7)
@pytest.mark.parametrize("radius", [1e-3, 0.05])
@pytest.mark.parametrize("name", POLES)
def test_functions_with_poles_are_bounded_away_from_them(name, radius):
    """By the steepest slope of a dense sample; globally there is no finite bound, with a reason."""
    function, places = POLES[name]
    middle = torch.tensor(places, dtype=torch.float64)
    fine = (middle + radius * torch.linspace(-1, 1, 1001, dtype=torch.float64)[:, None]).requires_grad_(True)
    (slopes,) = torch.autograd.grad(function(fine).sum(), fine)
    steepest = float(slopes.abs().max())
    near, everywhere = (
        ns.audit(Function(function), middle[None], region=region, effort=0.01).bracket
        for region in (ns.Box(middle - radius, middle + radius), None)
    )
    assert steepest * (1 - 1e-9) <= float(near.upper) <= steepest * (1 + 1e-6)
    if name == "logit with ε":
        assert math.isclose(float(everywhere.upper), 1 / (0.2 * 0.8), rel_tol=1e-6)
    else:
        said = " ".join([everywhere.reason, *everywhere.certificate.causes])
        assert everywhere.upper in (None, math.inf) and "unbounded" in said


def test_no_bound_at_a_pole():
    for function, place in ((torch.tan, math.pi / 2), (torch.tan, 1e9), (torch.asin, 1.0), (torch.logit, 0.0), (torch.acosh, 1.0)):
        middle = torch.tensor([place], dtype=torch.float64)
        example = torch.full((1, 1), 0.5 if function is not torch.acosh else 2.0, dtype=torch.float64)
        for radius in (1e-12, 0.1):
            found = ns.audit(Function(function), example, region=ns.Ball(middle, radius), effort=0.0)
            assert found.bracket.upper in (None, math.inf)


def gate(x):
    return x / (1 + mpmath.exp(-x))


def logit(x, epsilon=0.0):
    x = min(max(x, mpmath.mpf(epsilon)), 1 - mpmath.mpf(epsilon))
    return mpmath.log(x) - mpmath.log1p(-x)


UNDERFLOWS = [-746.0, -744.4, -732.4, -720.0, -710.46, -708.0]  # of e^x, and of 1/e^-x before
EXACT = {
    "log": (torch.log, mpmath.log, [1.0]),
    "log2": (torch.log2, lambda x: mpmath.log(x) / mpmath.log(2), [1.0]),
    "log10": (torch.log10, lambda x: mpmath.log(x) / mpmath.log(10), [1.0]),
    "log1p": (torch.log1p, mpmath.log1p, [0.0, -0.999]),
    "expm1": (torch.expm1, mpmath.expm1, [0.0, -40.0]),
    "acos": (torch.acos, mpmath.acos, [1 - 1e-5]),
    "acosh": (torch.acosh, mpmath.acosh, [1 + 1e-5]),
    "logit": (torch.logit, logit, [0.5, 0.499999550898479, 1e-3, 0.999]),
    "logit with ε": (lambda x: torch.logit(x, 1e-6), lambda x: logit(x, 1e-6), [0.5, 1 - 2e-6, 1.5]),
    "tan": (torch.tan, mpmath.tan, [math.pi, -3 * math.pi, 710 * math.pi, 1e5 * math.pi]),
    "sigmoid": (torch.sigmoid, lambda x: gate(x) / x, UNDERFLOWS),
    "silu": (functional.silu, gate, UNDERFLOWS),
    "mish": (functional.mish, lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))), UNDERFLOWS),
    "sinh": (torch.sinh, mpmath.sinh, [0.0, -710.46, 710.46]),
    "cosh": (torch.cosh, mpmath.cosh, [0.0, -710.46, 710.46]),
    "hardswish": (functional.hardswish, lambda x: x * min(max(x + 3, 0), 6) / 6, [-3.0, 3.0]),
    "tanhshrink": (functional.tanhshrink, lambda x: x - mpmath.tanh(x), [0.0]),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", EXACT)
def test_values_hold_to_the_last_digit(name):
    """Next to zeros, where a relative error is not enough, and where a function's own exponentials overflow."""
    function, exact, places = EXACT[name]
    steps = [sign * size for size in (2.0**-52, 3e-15, 1.7e-12, 1e-9, 1.8e-6) for sign in (-1, 1)]
    points = torch.tensor([place + (abs(place) or 1.0) * step for place in places for step in (0.0, *steps)], dtype=torch.float64)
    graph = trace(Function(function), torch.full((1, len(points)), 0.75 if name != "acosh" else 1.5, dtype=torch.float64))
    bounds = forward_pass(graph, region=ns.Box(points, points)).interval(graph.output)
    with mpmath.workdps(60):
        for point, low, high in zip(points.tolist(), bounds.low.flatten().tolist(), bounds.high.flatten().tolist(), strict=True):
            assert low <= exact(mpmath.mpf(point)) <= high, point
