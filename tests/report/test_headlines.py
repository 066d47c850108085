"""A headline names what holds now and what came before it."""

from __future__ import annotations

import pytest

from normscope.report.summary import Problem, Summary


def problem(rule: str, first: int, last: int, now: bool = False) -> Problem:
    when = f"since step {first}" if now else f"from step {first} until step {last}"
    return Problem(rule, rule, f"at.{rule}", 0, first, last, when, now, f"{rule} is wrong", "")


def summary(*problems: Problem) -> Summary:
    return Summary(problems, (), (), (), 3, 60, 500, 500)


@pytest.mark.parametrize(
    ("worst", "other", "said"),
    [
        (("NS517", 300), ("NS518", 122, 133), "Before it"),  # the window that inputs are compared with is 200 steps long
        (("NS517", 300), ("NS502", 122, 133), "Before it"),
        (("NS517", 350), ("NS518", 122, 133), ""),
        (("NS503", 167), ("NS518", 122, 133), "It began with this"),  # a median over 50 steps comes late
        (("NS503", 190), ("NS518", 122, 133), ""),
        (("NS504", 141), ("NS518", 122, 133), "It began with this"),
        (("NS504", 167), ("NS518", 122, 133), ""),
    ],
)
def test_what_was_over_by_then_is_named_where_it_can_be_behind_it(
    worst: tuple[str, int], other: tuple[str, int, int], said: str
) -> None:
    found = summary(problem(*worst, 500, now=True), problem(*other))
    assert (found.cause is not None) == bool(said)
    end = f" {said}, from step 122 until step 133: look at layer at.{other[0]}: {other[0]} is wrong." if said else ""
    assert found.headline == f"Look at layer at.{worst[0]}: {worst[0]} is wrong (since step {worst[1]}).{end}"
