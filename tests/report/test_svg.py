"""Axes of still pictures have a few round numbers, whatever they show."""

import math

import pytest
from hypothesis import given, strategies

from normscope.report.svg import _multiples, _step


@given(strategies.floats(-1, 1), strategies.floats(-290, 290))
def test_a_few_numbers_stand_on_every_axis(place, exponent):
    span = 10.0**exponent
    low = place * span
    assert 2 <= len(_multiples(_step(low, low + span), low, low + span)) <= 9


@pytest.mark.parametrize("high", [0.0, 5e-324, math.inf, math.nan])
def test_an_axis_without_length_has_a_step(high):
    assert _step(0.0, high) == 1.0
