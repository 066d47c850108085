"""The search for the largest radius, on brackets whose two sides are known at every radius."""

import math

import pytest
import torch

import normscope as ns
from normscope.core.bracket import Bracket, Explorer, GapShare
from normscope.core.errors import Refusal
from normscope.core.gap_curve import GapCurve
from normscope.core.magnitude import Magnitude

BALL = ns.Ball(torch.zeros(3), 0.01)


def bracket(ratio, region=BALL, stop_at=math.inf):
    """lower = 1 and upper = ratio(radius); asked about a radius from `stop_at` on, the user interrupts."""

    def explore(other):
        if other.reach >= stop_at:
            raise KeyboardInterrupt
        return bracket(ratio, other, stop_at)

    upper = ratio(region.reach)
    return Bracket(Magnitude(1), None if upper is None else Magnitude(upper), region=region, explore=Explorer(explore))


CURVES = {
    "rising": (lambda r: 1 + r / 0.4, 0.4),
    "already too large": (lambda r: 1 + r / 1e-5, 1e-5),
    "a jump": (lambda r: 1.0 if r <= 3.21 else 1e30, 3.21),
    "no bound beyond": (lambda r: 1.0 if r <= 0.7 else None, 0.7),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("region", [BALL, ns.Box(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0]))], ids=["ball", "box"])
def test_the_largest_radius_is_enclosed(name, region):
    ratio, expected = CURVES[name]
    found = bracket(ratio, region).radius_within(2)
    assert found.radius <= expected * (1 + 1e-12) and expected <= found.beyond * (1 + 1e-12) and found.beyond / found.radius <= 1.05
    assert math.isclose(found.region.reach, found.radius) and not found.exceptions and not found.interrupted
    assert [point.radius for point in found.points] == sorted(point.radius for point in found.points)
    assert f"not at {found.beyond:.3g}" in str(found)


def test_the_answer_holds_where_the_ratio_falls_again():
    found = bracket(lambda r: 10.0 if 0.05 < r < 0.5 else 1.0).radius_within(2)
    assert found.beyond is None and found.exceptions == (pytest.approx(0.1),)
    assert "not monotone" in str(found) and "the largest tried" in str(found)


def test_no_radius_at_all():
    found = bracket(lambda r: 3.0).radius_within(2)
    assert found.radius == 0 and found.region is None and "at no radius tried" in str(found)


def test_a_rule_without_a_bound_on_large_regions_ends_the_growth():
    known = bracket(lambda r: 1.0)

    def explore(region):
        if region.reach > 0.3:
            raise Refusal("no bound", ["so far out"])
        return bracket(lambda r: 1.0, region)

    found = Bracket(known.lower, known.upper, region=BALL, explore=Explorer(explore)).radius_within(2)
    assert 0.3 / 1.05 <= found.radius <= 0.3 and found.points[-1].upper is None


def test_an_interrupt_keeps_what_is_there():
    found = bracket(lambda r: 1.0, stop_at=5.0).radius_within(2)
    assert found.interrupted and [point.radius for point in found.points] == pytest.approx([0.01, 0.1, 1.0])
    assert found.radius == pytest.approx(1.0) and "interrupted" in str(found)


def test_both_sides_zero_are_no_gap():
    assert Bracket(Magnitude(0), Magnitude(0)).ratio == 1
    assert not Bracket(Magnitude(0), Magnitude(1)).ratio.finite and not Bracket(Magnitude(1), None).ratio.finite


def test_a_curve_survives_its_dictionary():
    found = bracket(CURVES["no bound beyond"][0]).radius_within(3)
    again = GapCurve.from_dict(found.to_dict())
    assert again.to_dict() == found.to_dict() and (again.radius, again.beyond) == (found.radius, found.beyond)
    wrong = {**found.to_dict(), "points": [{"radius": 1.0, "lower_log10": 1.0, "upper_log10": 0.0}]}
    with pytest.raises(ns.InputError, match="exceeds its upper bound"):
        GapCurve.from_dict(wrong)


@pytest.mark.parametrize("factor", [1, 0.5, -1, math.nan, math.inf, "2", None, True])
def test_a_factor_exceeds_one(factor):
    with pytest.raises(ns.InputError, match=r"^factor must be a finite number above 1, got .*$"):
        bracket(lambda r: 1.0).radius_within(factor)


@pytest.mark.parametrize("tolerance", [0, -0.1, math.nan, "x"])
def test_a_tolerance_is_positive(tolerance):
    with pytest.raises(ns.InputError, match="tolerance"):
        bracket(lambda r: 1.0).radius_within(2, tolerance)


def test_a_bracket_without_a_region_has_no_radius():
    with pytest.raises(ns.InputError, match=r"no region to make larger or smaller: take that of ns\.lipschitz"):
        Bracket(Magnitude(1), Magnitude(2)).radius_within(2)
    with pytest.raises(ns.InputError, match="single point"):
        bracket(lambda r: 1.0, ns.Ball(torch.zeros(3), 0.0)).radius_within(2)


@pytest.mark.parametrize(
    "share, said",
    [
        (GapShare("layer2.0", "relu", 31, 0.62), "62 % of the gap comes from 31 ReLUs of layer2.0"),
        (GapShare("norm", "layer_norm", 1, 0.125), "12 % of the gap comes from 1 layer_norm unit of norm"),
        (GapShare("", "rounding", 0, 1.0), "100 % of the gap comes from rounding"),
    ],
)
def test_shares_in_words(share, said):
    assert str(share) == said
