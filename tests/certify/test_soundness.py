"""Sound: no difference quotient of the model itself, computed without normscope, exceeds the upper bound."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.known import Known
from normscope.certify.lower import lower
from normscope.certify.upper import upper
from normscope.graph.trace import trace
from tests.ascent import ascended, project, quotient
from tests.cases import network
from tests.networks import double, is_deep

QUICK, ALL = 120, 500
DEEP = 30  # the quick ones among which networks of hundreds of layers are tried, too
EVERYWHERE = [seed for seed in range(QUICK) if not is_deep(seed) or seed < DEEP]
ON_REGIONS = [seed for seed in range(54) if not is_deep(seed)]
PAIRS, ASCENTS, STEPS = 64, 2, 8  # from the pairs with the largest quotients, both points climb
# Constants that a float32 model computes from its parameters are folded in float32, as the model does.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def check(seed: int) -> None:
    module, example, mode = network(seed)
    twin, slack = double(module, mode), 1 + TOLERANCE[example.dtype]
    bracket = ns.lipschitz(module, example, mode=mode)
    assert bracket.lower <= bracket.upper
    assert bracket.upper.finite or bracket.reason
    if bracket.lower:
        assert bracket.witness.replay() == bracket.lower
    highest = [*sorted(pairs(twin, example.double(), mode, seed), key=lambda pair: -quotient(twin, *pair))[:ASCENTS]]
    for first, second in highest:
        assert quotient(twin, first, second) <= ascended(twin, first, second, STEPS) <= float(bracket.upper) * slack
    if is_deep(seed):  # tracing three hundred layers again takes its time
        return
    graph = trace(module, example, mode)
    point = example.double() if mode == "batch" else example[:1].double()
    with torch.no_grad():
        expected, found = twin(point), graph.run([point], torch.float64)[0]
    assert torch.allclose(found, expected, rtol=slack - 1, atol=(slack - 1) * float(expected.abs().max()), equal_nan=True)


def pairs(function: nn.Module, example: Tensor, mode: str, seed: int):
    """Points at every scale, each with a partner in a random direction and one up the gradient of a random output."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def power_of_ten(low: float, high: float) -> float:
        return 10 ** (low + (high - low) * float(torch.rand((), generator=generator)))

    start = example if mode == "batch" else example[:1]
    for _ in range(PAIRS // 2):
        point = (start + power_of_ten(-2, 2) * noise(*start.shape)).requires_grad_(True)
        output = function(point)
        slope = gradient(output, point, noise(*output.shape))
        for direction in (noise(*start.shape), slope if slope is not None else noise(*start.shape)):
            size = float(torch.linalg.vector_norm(direction))
            if math.isfinite(size) and size > 0:
                step = power_of_ten(-3, 1) * float(torch.linalg.vector_norm(point.detach())) / size
                yield point.detach(), (point + step * direction).detach()


def gradient(output: Tensor, point: Tensor, weights: Tensor) -> Tensor | None:
    """Of the weighted output; none where autograd cannot go back, as through a ReLU whose output was overwritten (seed 1428)."""
    try:
        return torch.autograd.grad(output, point, weights, allow_unused=True)[0]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None


def check_on_regions(seed: int) -> None:
    """Balls of several radii and a box: no bound is above the global one or below a quotient."""
    module, example, mode = network(seed)
    twin, slack = double(module, mode), 1 + TOLERANCE[example.dtype]
    generator = torch.Generator().manual_seed(seed)
    graph = certifiable_graph(module, example, mode, None)
    known = Known()
    center = example.double() if mode == "batch" else example[0].double()
    size = float(torch.linalg.vector_norm(center)) * 10 ** (-float(torch.rand((), generator=generator)))
    everywhere = upper(graph, known=known).bound
    for region in (
        *(ns.Ball(center, size * r) for r in (10.0, 0.3, 0.01, 1e-5)),
        ns.Box(center, center + 1e-5 * size / center.numel()),
    ):
        bound = upper(graph, region=region, known=known).bound
        assert bound <= everywhere * (1 + 1e-6)  # semidefinite programs are solved to about 1e-8
        found, witness = lower(graph, center.reshape(1, -1), 0.1, generator, region)
        assert found <= bound
        for point in witness or ():
            assert region.contains((point[0] if mode == "batch" else point[0][0],))
        inside = [[points_inside(region, center, generator) for _ in range(2)] for _ in range(PAIRS // 4)]
        batched = [ends if mode == "batch" else [end[None] for end in ends] for ends in inside]
        for first, second in sorted(batched, key=lambda pair: -quotient(twin, *pair))[:1]:
            assert ascended(twin, first, second, STEPS, partial(project, region)) <= float(bound) * slack


def points_inside(region: ns.Ball | ns.Box, center: Tensor, generator: torch.Generator) -> Tensor:
    """A random point of the region, near its rim half of the time."""
    if isinstance(region, ns.Box):
        share = torch.rand(center.shape, generator=generator, dtype=torch.float64)
        return region.low + share.clamp(0.25, 0.75).sub(0.25).mul(2) * (region.high - region.low)
    away = torch.randn(center.shape, generator=generator, dtype=torch.float64)
    share = float(torch.rand((), generator=generator)) ** (1 / center.numel())
    return center + away * (region.radius * share * (1 - 1e-9) / float(torch.linalg.vector_norm(away)))


@pytest.mark.quick(5)
@pytest.mark.parametrize("seed", EVERYWHERE)
def test_sound(seed):
    check(seed)


@pytest.mark.quick(4)
@pytest.mark.parametrize("seed", ON_REGIONS)
def test_sound_on_regions(seed):
    check_on_regions(seed)


@pytest.mark.full
@pytest.mark.parametrize("start", range(0, ALL, 20))
def test_sound_on_many_more(start):
    for seed in range(start, start + 20):
        if seed not in EVERYWHERE:
            check(seed)
        if seed not in ON_REGIONS:
            check_on_regions(seed)
