"""Interval arithmetic encloses the exact result for every value inside."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.core.interval import Interval

INF = math.inf
size = st.floats(1e-100, 1e100)
number = st.just(0.0) | size | size.map(lambda x: -x)
sides = st.tuples(number, number).map(sorted)
fractions = st.floats(0, 1)


def interval(low: float, high: float) -> Interval:
    return Interval(torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64))


def between(pair: list[float], fraction: float) -> Fraction:
    """An exact number inside, as a fraction."""
    low, high = map(Fraction, pair)
    return low + Fraction(fraction) * (high - low)


def encloses(found: Interval, value: Fraction) -> bool:
    return Fraction(float(found.low)) <= value <= Fraction(float(found.high))


@given(sides, sides, fractions, fractions)
def test_arithmetic_encloses_exact_values(first, second, s, t):
    a, b = interval(*first), interval(*second)
    x, y = between(first, s), between(second, t)
    assert encloses(a + b, x + y) and encloses(a * b, x * y) and encloses(-a, -x)
    assert encloses(a.widened(), x) and abs(x) <= Fraction(a.magnitude)


@given(sides, sides)
def test_arithmetic_is_no_wider_than_rounding(first, second):
    """The ends themselves are corners of the exact result."""
    corners = [Fraction(x) * Fraction(y) for x in first for y in second]
    found = interval(*first) * interval(*second)
    slack = Fraction(2) ** -48
    assert Fraction(float(found.low)) >= min(corners) - slack * abs(min(corners))
    assert Fraction(float(found.high)) <= max(corners) + slack * abs(max(corners))


@given(sides, fractions)
def test_increasing_maps_act_on_both_ends(pair, t):
    x = float(between(pair, t))
    for function in (torch.tanh, torch.relu, lambda value: 3 * value + 1):
        found = interval(*pair).map(function)
        assert float(found.low) <= float(function(torch.tensor(x, dtype=torch.float64))) <= float(found.high)


@given(sides)
def test_center_lies_inside_and_radius_is_half_the_width(pair):
    found = interval(*pair)
    assert float(found.low) <= float(found.center) <= float(found.high)
    width = Fraction(pair[1]) - Fraction(pair[0])
    assert 2 * Fraction(float(found.radius)) >= width
    assert math.isclose(2 * float(found.radius), float(width), rel_tol=1e-12, abs_tol=1e-320)


def test_zero_times_infinity_is_zero():
    """A factor that is 0 wherever it may be makes the product 0, whatever the other is."""
    found = interval(0, 0) * Interval.unbounded((1,))
    assert float(found.low) == float(found.high) == 0
    found = interval(0, 2) * interval(1, INF)
    assert float(found.low) == 0 and float(found.high) == INF
    found = interval(-1, 2) * Interval.unbounded((1,))
    assert float(found.low) == -INF and float(found.high) == INF


def test_unbounded_intervals_stay_unbounded():
    line = Interval.unbounded((2, 3))
    assert line.shape == (2, 3) and not line.finite and line.magnitude == INF
    for found in (line + line, -line, line.widened(), line.map(torch.relu), line.map(lambda x: x * 0.5)):
        assert not found.low.isnan().any() and not found.high.isnan().any() and (found.high == INF).all()
    found = line.map(lambda x: x - x)  # ∞ − ∞ is nothing known
    assert (found.low == -INF).all() and (found.high == INF).all()


def test_constants_and_broadcasting():
    found = Interval.constant(-1, 2, (2, 1)) * Interval.constant(3, 3, (3,))
    assert found.shape == (2, 3) and found.finite and math.isclose(found.magnitude, 6)
    assert Interval.constant(0, 1, (0,)).magnitude == 0.0


def test_a_map_that_overflows_still_encloses():
    found = interval(800, 900).map(torch.exp)
    assert float(found.low) <= 1.8e308 and float(found.high) == INF


def test_a_product_that_underflows_still_encloses():
    assert encloses(interval(1e-200, 1e-200) * interval(1e-200, 1e-200), Fraction(1e-200) ** 2)
