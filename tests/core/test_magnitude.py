"""A magnitude computes as the real number it stands for, far outside the range of floats."""

from __future__ import annotations

import math
import pickle
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from normscope.core.magnitude import INFINITY, ONE, ZERO, Magnitude, product, root_sum_square, total

positive = st.floats(1e-300, 1e300)
values = st.just(0.0) | positive
everything = values | st.just(math.inf)
small = st.floats(0, 0.5)


def log(value: Fraction) -> float:
    """ln of a fraction of any size."""
    return math.log(value.numerator) - math.log(value.denominator)


def stands_for(found: Magnitude, expected: Fraction) -> bool:
    if expected == 0:
        return found == ZERO
    return math.isclose(found.log, log(expected), rel_tol=1e-13, abs_tol=1e-12)


@given(values, values)
def test_products_are_those_of_fractions(a, b):
    exact = Fraction(a) * Fraction(b)
    assert stands_for(Magnitude(a) * b, exact) and stands_for(a * Magnitude(b), exact)


@given(values, values)
def test_sums_are_those_of_fractions(a, b):
    exact = Fraction(a) + Fraction(b)
    assert stands_for(Magnitude(a) + b, exact) and stands_for(a + Magnitude(b), exact)


@given(values, positive)
def test_quotients_are_those_of_fractions(a, b):
    exact = Fraction(a) / Fraction(b)
    assert stands_for(Magnitude(a) / b, exact) and stands_for(a / Magnitude(b), exact)


@given(positive, st.integers(-40, 40))
def test_powers_are_those_of_fractions(a, exponent):
    assert stands_for(Magnitude(a) ** exponent, Fraction(a) ** exponent)


@given(positive)
def test_a_root_undoes_a_square(a):
    assert stands_for((Magnitude(a) ** 2).sqrt(), Fraction(a))


@given(everything, everything)
def test_order_is_that_of_floats(a, b):
    """ln merges neighbours, so two floats that differ may only be told apart if their logarithms do."""
    for right in (b, Magnitude(b)):
        assert (Magnitude(a) < right, Magnitude(a) <= right, Magnitude(a) > right) == (
            Magnitude(a).log < Magnitude(b).log, Magnitude(a).log <= Magnitude(b).log, Magnitude(a).log > Magnitude(b).log,
        )  # fmt: skip
    if a < b * (1 - 1e-12):
        assert Magnitude(a) < Magnitude(b) and Magnitude(b) > a and Magnitude(a) != b
    assert Magnitude(a) == a and Magnitude(a) > -1 and Magnitude(a) != -1


def test_nothing_is_ordered_beside_nan():
    one, nan = Magnitude(1), math.nan
    assert not (one < nan or one <= nan or one > nan or one >= nan or one == nan)


@given(positive)
def test_a_float_survives_the_round_trip(a):
    assert math.isclose(float(Magnitude(a)), a, rel_tol=1e-12)
    assert math.isclose(Magnitude(a).log10, math.log10(a), rel_tol=1e-13, abs_tol=1e-12)


@given(st.lists(values, max_size=6))
def test_folds_are_those_of_fractions(numbers):
    magnitudes = [Magnitude(number) for number in numbers]
    assert stands_for(total(magnitudes), sum(map(Fraction, numbers), Fraction(0)))
    assert stands_for(product(magnitudes), math.prod(map(Fraction, numbers), start=Fraction(1)))
    assert stands_for(root_sum_square(magnitudes) ** 2, sum((Fraction(number) ** 2 for number in numbers), Fraction(0)))


def test_ten_to_the_500_keeps_its_digits():
    huge = Magnitude.from_log10(500)
    assert huge.finite and float(huge) == math.inf
    assert huge < Magnitude.from_log10(500.001) and huge > 1e308 and huge < math.inf
    assert math.isclose((huge * 3.2 / huge).log, math.log(3.2), rel_tol=1e-12)
    assert math.isclose((huge + huge).log10, 500 + math.log10(2), rel_tol=1e-15)
    assert float(huge**-1) == 0.0 and huge**-1 != ZERO and str(huge * 3.2) == "3.20e+500"


def test_zero_and_infinity():
    assert ZERO * INFINITY == ZERO == INFINITY * 0 and ZERO * math.inf == 0
    assert ZERO + INFINITY == INFINITY and math.inf == INFINITY * 2 and INFINITY**0.5 == INFINITY
    assert ONE / INFINITY == ZERO and ZERO / INFINITY == 0 and ZERO**2 == ZERO and ZERO**0 == INFINITY**0 == ONE
    assert not ZERO and INFINITY and not INFINITY.finite and ZERO.finite and ZERO.log10 == -math.inf
    assert product([]) == ONE and total([]) == ZERO
    with pytest.raises(ZeroDivisionError):
        ONE / ZERO


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"), (math.inf, "inf"), (1, "1.00"), (5, "5.00"), (12.34, "12.3"), (1234, "1234"), (0.0123, "0.0123"),
        (3.2e50, "3.20e+50"), (1e-5, "1.00e-05"), (9.9999e7, "1.00e+08"), (12345, "1.23e+04"),
    ],
)  # fmt: skip
def test_three_significant_digits_are_printed(value, text):
    assert str(Magnitude(value)) == f"{Magnitude(value)}" == text and repr(Magnitude(value)) == f"Magnitude({text})"


def test_width_and_precision_are_obeyed():
    assert f"{Magnitude(3.2e50):.2}" == "3.2e+50" and f"{Magnitude(3.2e50):>10.2}" == "   3.2e+50"
    assert f"{Magnitude(2):8}" == "2.00    " and f"{Magnitude(math.pi):.5}" == "3.1416"


@given(st.floats(1e-250, 1e250), st.integers(1, 9))
def test_what_is_printed_is_within_half_a_digit(a, digits):
    assert math.isclose(float(f"{Magnitude(a):.{digits}}"), a, rel_tol=0.5 * 10 ** (1 - digits) * (1 + 1e-3))


def test_a_magnitude_cannot_be_changed():
    one = Magnitude(1)
    for name in ("log", "anything"):
        with pytest.raises(AttributeError):
            setattr(one, name, 2.0)
    assert one == 1


@given(everything)
def test_pickling_and_hashing_keep_identity(a):
    again = pickle.loads(pickle.dumps(Magnitude(a)))
    assert again == Magnitude(a) and hash(again) == hash(Magnitude(a)) and len({again, Magnitude(a), Magnitude(Magnitude(a))}) == 1


def test_what_is_equal_has_one_hash():
    assert Magnitude(2) == 2 and hash(Magnitude(2)) == hash(2)


@pytest.mark.parametrize("value", [-1, -1e-300, -math.inf, math.nan])
def test_negative_numbers_and_nan_are_rejected(value):
    with pytest.raises(ValueError, match="non-negative"):
        Magnitude(value)
    with pytest.raises(ValueError):
        Magnitude(1) * value
    with pytest.raises(ValueError):
        Magnitude.from_log(math.nan)


def test_other_types_are_not_equal():
    assert Magnitude(1) != "1" and Magnitude(1) is not None and Magnitude(1) != None  # noqa: E711


def exact_log(a: float, factor: Fraction) -> Decimal:
    with localcontext(prec=60):
        exact = Fraction(a) * factor
        return Decimal(exact.numerator).ln() - Decimal(exact.denominator).ln()


def check_rounding(a: float, relative: float) -> None:
    up, down = Magnitude(a).widened(relative), Magnitude(a).narrowed(relative)
    assert Decimal(up.log) >= exact_log(a, 1 + Fraction(relative))
    assert Decimal(down.log) <= exact_log(a, 1 - Fraction(relative))
    assert math.isclose(up.log, math.log(a) + math.log1p(relative), abs_tol=1e-12)
    assert math.isclose(down.log, math.log(a) + math.log1p(-relative), abs_tol=1e-12)


@given(st.floats(2.8, 1e300) | st.floats(1e-300, 0.36), small)
@example(1e300, 0.0)
def test_widened_and_narrowed_are_on_the_safe_side_of_the_exact_product(a, relative):
    check_rounding(a, relative)


@given(st.floats(0.36, 2.8), small)
def test_widened_and_narrowed_go_the_right_way_near_one(a, relative):
    assert Magnitude(a).narrowed(relative) <= Magnitude(a) <= Magnitude(a).widened(relative)
    assert relative < 1e-9 or Magnitude(a).narrowed(relative) < Magnitude(a) < Magnitude(a).widened(relative)


def test_widened_and_narrowed_are_on_the_safe_side_at_one():
    for step in range(1, 200):
        check_rounding(1.0, step / 400)


def test_widened_and_narrowed_at_the_ends():
    assert ZERO.widened(0.1) == ZERO.narrowed(0.1) == ZERO and INFINITY.widened(0.1) == INFINITY
    assert Magnitude(5).narrowed(1) == ZERO == Magnitude(5).narrowed(7)


@pytest.mark.parametrize(
    ("value", "text"), [(1 - 1e-12, "1.00"), (0.99951, "1.00"), (9.9996, "10.0"), (0.0999999, "0.100"), (1.0, "1.00")]
)
def test_a_number_just_below_a_power_of_ten_prints_like_it(value, text):
    assert str(Magnitude(value)) == text
