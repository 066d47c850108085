"""Regions: points projected into one are in it, and stay where they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.core.errors import InputError
from normscope.core.region import Ball, Box
from tests.networks import randn

seeds = st.integers(0, 2**31 - 1)


def points(seed: int, scale: float, count: int = 16) -> torch.Tensor:
    return scale * randn(count, 6, seed=seed).double()


def shaped(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[:4].reshape(2, 2), flat[4:]


def ball(seed: int, radius: float) -> Ball:
    return Ball(shaped(randn(6, seed=seed + 1).double()), radius)


def box(seed: int, width: float) -> Box:
    low = randn(6, seed=seed + 1).double()
    return Box(shaped(low), shaped(low + width * randn(6, seed=seed + 2).double().abs()))


def check_projection(region: Ball | Box, flat: torch.Tensor) -> None:
    once = region.project(flat)
    assert all(region.contains(shaped(point)) for point in once)
    assert torch.allclose(region.project(once), once, rtol=1e-12, atol=1e-12)
    for middle, bounds in zip(region.middle, region.intervals(), strict=True):
        assert (bounds.low <= middle).all() and (middle <= bounds.high).all()
    for point in once:
        for part, middle, bounds in zip(shaped(point), region.middle, region.intervals(), strict=True):
            assert (bounds.low <= part).all() and (part <= bounds.high).all() and middle.shape == part.shape
        away = sum(float((a - b).square().sum()) for a, b in zip(shaped(point), region.middle, strict=True)) ** 0.5
        assert away <= region.reach * (1 + 1e-12)


@given(seeds, st.floats(1e-4, 1e4), st.floats(1e-3, 1e4))
def test_projection_onto_a_ball_lies_inside_and_is_idempotent(seed, radius, scale):
    check_projection(ball(seed, radius), points(seed, scale))


@given(seeds, st.floats(1e-2, 1e4), st.floats(1e-3, 1e4))
def test_projection_onto_a_box_lies_inside_and_is_idempotent(seed, width, scale):
    check_projection(box(seed, width), points(seed, scale))


@given(seeds, st.floats(0.1, 10))
def test_projection_is_the_nearest_point(seed, radius):
    """No other point of the region is nearer, up to the margin of 1e-6 that a ball keeps from its surface."""
    others, outside = points(seed + 3, radius), points(seed + 4, 10 * radius)
    for region in (ball(seed, radius), box(seed, radius)):
        near = torch.linalg.vector_norm(outside - region.project(outside), dim=1)
        inside = region.project(others)
        for point, distance in zip(outside, near, strict=True):
            assert (torch.linalg.vector_norm(inside - point, dim=1) >= distance - 2e-6 * radius).all()


@given(seeds)
def test_points_well_inside_do_not_move(seed):
    region = ball(seed, 2.0)
    middle = torch.cat([part.reshape(-1) for part in region.middle])
    inside = middle + 0.9 * points(seed, 1.0) / 10
    assert torch.allclose(region.project(inside), inside, rtol=0, atol=1e-15)
    region = box(seed, 2.0)
    middle = torch.cat([part.reshape(-1) for part in region.middle])[None]
    assert torch.equal(region.project(middle), middle)


def test_contains_is_exact_at_the_surface():
    region = Ball(torch.zeros(2), 5.0)
    assert region.contains([torch.tensor([3.0, 4.0])]) and not region.contains([torch.tensor([3.0, 4.001])])
    region = Box(torch.zeros(2), torch.ones(2))
    assert region.contains([torch.tensor([0.0, 1.0])]) and not region.contains([torch.tensor([0.5, 1.0001])])
    assert not region.contains([torch.tensor([-0.0001, 0.5])]) and not region.contains([torch.tensor([math.nan, 0.5])])
    assert Ball(torch.ones(2), 0.0).contains([torch.ones(2)])


def test_reach_is_the_largest_distance():
    assert Ball(torch.zeros(3), 2).reach == 2.0
    assert math.isclose(Box(torch.zeros(4), torch.ones(4)).reach, 1.0) and Box(torch.zeros(4), torch.ones(4)).reach >= 1.0


def test_reach_covers_a_box_as_thin_as_rounding():
    low = torch.ones(1, dtype=torch.float64)
    high = low + 2**-52
    region = Box(low, high)
    assert max(float(high - region.middle[0]), float(region.middle[0] - low)) <= region.reach


def test_a_center_that_needs_gradients_is_detached():
    assert not Ball(torch.zeros(2, requires_grad=True), 1.0).middle[0].requires_grad


@pytest.mark.parametrize("radius", [-1.0, -1e-300, math.inf, math.nan])
def test_a_ball_has_a_finite_radius(radius):
    with pytest.raises(InputError, match="radius"):
        Ball(torch.zeros(2), radius)


@pytest.mark.parametrize(
    "low, high",
    [
        (torch.ones(2), torch.tensor([2.0, 0.9])),
        (torch.zeros(2), torch.ones(1, 2)),
        ([torch.zeros(2), torch.ones(1)], [torch.ones(2), torch.zeros(1)]),
    ],
)
def test_a_box_has_low_below_high_and_one_shape(low, high):
    with pytest.raises(InputError, match="low ≤ high"):
        Box(low, high)


def test_a_box_of_unequal_shapes_is_refused():
    with pytest.raises(InputError):
        Box(torch.zeros(2), torch.ones(3))


def test_a_box_with_nan_is_refused():
    with pytest.raises(InputError):
        Box(torch.tensor([math.nan, 0.0]), torch.ones(2))


def test_a_ball_around_nan_is_refused():
    with pytest.raises(InputError):
        Ball(torch.tensor([math.nan, 0.0]), 1.0)
