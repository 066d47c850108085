"""What float64 may lose is bounded at every scale, against exact arithmetic."""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

import normscope as ns
from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude, product
from normscope.core.rounding import above, below, gamma, length, root, summation_error

exponents = st.integers(-1070, 1000)
signed = st.floats(-1, 1, allow_subnormal=False)
scaled = st.builds(lambda x, e: math.ldexp(x, e), signed, exponents)  # any size, denormal ones included
vectors = st.lists(scaled, min_size=1, max_size=6)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(vectors)
def test_a_length_is_never_too_small_and_hardly_too_large(values):
    squared = sum((Fraction(x) ** 2 for x in values), Fraction(0))
    found = float(length(tensor(values)))
    if math.isinf(found):
        assert squared > Fraction(1e308) ** 2
        return
    assert Fraction(found) ** 2 >= squared
    assert max(Fraction(found) - Fraction(2.0**-1060), Fraction(0)) ** 2 <= squared * (1 + Fraction(2) ** -40)


def test_lengths_along_axes_and_of_what_is_not_a_number():
    values = tensor([[3e-200, 4e-200], [0.0, 1e-320]])
    found = length(values, -1)
    assert found.shape == (2,) and math.isclose(float(found[0]), 5e-200) and float(found[1]) > 0
    assert math.isinf(float(length(tensor([math.nan])))) and math.isinf(float(length(tensor([1e308] * 9))))
    assert float(length(tensor([0.0, 0.0]))) == 0.0 and float(above(tensor([0.0]))) == 0.0


@given(vectors)
def test_a_sum_is_within_the_error_that_is_stated(values):
    exact = sum(map(Fraction, values), Fraction(0))
    computed, added = (float(side.sum()) for side in (tensor(values), tensor(values).abs()))
    error = float(summation_error(len(values), tensor([added])))
    assert math.isinf(error) or abs(exact - Fraction(computed)) <= Fraction(error)


def test_sums_of_half_bounded_values_stay_half_bounded():
    bounds = Interval(tensor([0.0, 1.0]), tensor([math.inf, 2.0]))
    found = bounds.summed(lambda side: side.sum(), 2)
    assert 0.99 < float(found.low) <= 1.0 and float(found.high) == math.inf
    found = bounds.summed(lambda side: -side.sum(), 2)
    assert -1.01 < float(found.high) <= -0.99 and float(found.low) == -math.inf
    huge = Interval(*(tensor([1.7e308, 1.7e308, -1.7e308, -1.7e308]),) * 2).summed(lambda side: side.sum(), 4)
    assert float(huge.low) <= 0 <= float(huge.high)  # a part of the sum overflows


def test_a_sum_that_is_too_long_is_unknown():
    assert math.isinf(gamma(2**53)) and gamma(10) > 10 * 2.0**-53


@given(st.lists(st.tuples(scaled, scaled).map(sorted), min_size=2, max_size=5), st.data(), st.sampled_from([1, -1]))
def test_sums_of_intervals_enclose_what_cancels(pairs, data, sign):
    """The widening is relative to what is added: 1e16 + x − 1e16 keeps x."""
    bounds = Interval(tensor([low for low, _ in pairs]), tensor([high for _, high in pairs]))
    point = [data.draw(st.sampled_from(pair)) for pair in pairs]
    found = bounds.summed(lambda side: sign * side.sum(), len(pairs))
    exact = sign * sum(map(Fraction, point), Fraction(0))
    assert math.isinf(float(found.low)) or Fraction(float(found.low)) <= exact
    assert math.isinf(float(found.high)) or exact <= Fraction(float(found.high))


@given(scaled, scaled, scaled, scaled)
def test_arithmetic_encloses_at_every_scale(a, b, c, d):
    first, second = (Interval(tensor([min(p)]), tensor([max(p)])) for p in ((a, b), (c, d)))
    for found, exact in ((first * second, Fraction(a) * Fraction(d)), (first + second, Fraction(b) + Fraction(c))):
        low, high = float(found.low), float(found.high)
        assert math.isinf(low) or Fraction(low) <= exact
        assert math.isinf(high) or exact <= Fraction(high)
        assert low < math.inf and high > -math.inf and low <= high
    squared = first.squared()
    assert float(squared.low) >= 0 and (math.isinf(float(squared.high)) or Fraction(float(squared.high)) >= Fraction(a) ** 2)


@given(scaled, scaled)
def test_the_middle_and_the_radius_cover_an_interval(a, b):
    bounds = Interval(tensor([min(a, b)]), tensor([max(a, b)]))
    around = Interval.around(bounds.center, bounds.radius)
    assert float(around.low) <= min(a, b) and max(a, b) <= float(around.high)
    assert bounds.finite and bool(bounds.center.isfinite())


@given(st.lists(st.tuples(scaled, scaled).map(sorted), min_size=1, max_size=4))
def test_a_box_reaches_all_of_its_points(pairs):
    box = ns.Box(tensor([low for low, _ in pairs]), tensor([high for _, high in pairs]))
    (middle,) = box.middle
    for corner in ([low for low, _ in pairs], [high for _, high in pairs]):
        squared = sum(((Fraction(x) - Fraction(m)) ** 2 for x, m in zip(corner, middle.tolist(), strict=True)), Fraction(0))
        assert math.isinf(box.reach) or squared <= Fraction(box.reach) ** 2


def test_each_row_has_a_scale_of_its_own():
    rows = torch.tensor([[3e-300, 4e-300], [3.0, 4.0], [3e300, 4e300], [0.0, 5e-324], [0.0, 0.0]], dtype=torch.float64)
    expected = [5e-300, 5.0, 5e300, 5e-324, 0.0]
    for found, exact in zip(length(rows, 1).tolist(), expected, strict=True):
        assert exact <= found <= exact * (1 + 1e-12) + 1e-322


positive = st.floats(1e-15, 1e15)


@given(st.lists(positive, min_size=1, max_size=16))
def test_products_and_sums_lie_between_below_and_above(values):
    """A product of up to 16 numbers takes fewer roundings than `FEW`; a sum of n takes n."""
    exact = math.prod(map(Fraction, values))
    assert Fraction(below(math.prod(values))) <= exact <= Fraction(above(math.prod(values)))
    many = values * 100
    found = float(tensor(many).cumsum(0)[-1])  # one after the other
    assert Fraction(below(found, len(many))) <= sum(map(Fraction, many)) <= Fraction(above(found, len(many)))


@given(st.floats(0, 1e-300), st.floats(0, 1))
def test_subnormal_products_lie_between_below_and_above(a, b):
    exact, found = Fraction(a) * Fraction(b), a * b
    assert Fraction(below(found)) <= exact and (exact <= Fraction(above(found)) or not found)


def test_what_is_no_number_is_unknown():
    assert above(math.nan) == above(math.inf) == math.inf and below(math.nan) == 0 and below(math.inf) > 1e300
    assert above(0.0) == below(0.0) == 0


@given(st.integers(0, 2**52))
def test_a_root_is_rounded_up_by_two_ulps_at_most(count):
    found = root(count)
    assert Fraction(found) ** 2 >= count
    assert Fraction(max(found - 2 * math.ulp(found), 0.0)) ** 2 <= count
    whole = math.isqrt(count)
    assert root(whole**2) == whole


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=6), positive)
def test_logarithms_are_rounded_outward(values, divisor):
    """A quotient of a product, against logarithms with fifty digits."""
    precise = Context(prec=50)
    exact = sum((Decimal(value).ln(precise) for value in values), Decimal(0)) - Decimal(divisor).ln(precise)
    found = product(map(Magnitude, values)) / divisor
    assert Decimal(found.lowered(*values, divisor).log) <= exact <= Decimal(found.raised(*values, divisor).log)
