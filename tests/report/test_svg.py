"""Axes of still pictures have a few round numbers, whatever they show."""

import math
import re

import pytest
from hypothesis import given, strategies

from normscope.core.gap_curve import CurvePoint, GapCurve
from normscope.core.magnitude import Magnitude
from normscope.report.svg import _multiples, _step, svg


@given(strategies.floats(-1, 1), strategies.floats(-290, 290))
def test_a_few_numbers_stand_on_every_axis(place, exponent):
    span = 10.0**exponent
    low = place * span
    assert 2 <= len(_multiples(_step(low, low + span), low, low + span)) <= 9


@pytest.mark.parametrize("high", [0.0, 5e-324, math.inf, math.nan])
def test_an_axis_without_length_has_a_step(high):
    assert _step(0.0, high) == 1.0


def test_ticks_and_lines_of_the_figure_are_kept():
    points = tuple(CurvePoint(radius, Magnitude(20.0), Magnitude(20.0 + 300 * radius)) for radius in (0.005, 0.05, 0.5))
    picture = svg(GapCurve(2.0, points).figure())
    assert "≤ 2 × up to 0.05" in picture and ">0.05<" in picture and ">20<" in picture  # numbers, not their logarithms
    place = re.search(r'd="M([\d.]+) 350V40" stroke="#666666"', picture)  # upright, where the radius is
    assert place is not None and 70 < float(place[1]) < 530
