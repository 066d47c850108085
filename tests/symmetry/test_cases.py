"""Every group of every case is found, none is refuted, and nothing else leaves the outputs as they are."""

from __future__ import annotations

from collections import Counter

import pytest

import normscope as ns
from tests.symmetry.cases import CASES, described


@pytest.fixture(scope="module", params=CASES)
def found(request):
    case = CASES[request.param]
    return case, ns.symmetries(case.model(), case.example, mode=case.mode)


@pytest.mark.quick(16)
def test_detection_is_exact(found):
    case, report = found
    assert Counter(map(described, report)) == Counter(case.groups)


@pytest.mark.quick(16)
def test_no_group_is_refuted(found):
    _, report = found
    assert report.check() == []


@pytest.mark.quick(16)
def test_named_directions_are_the_null_space(found):
    case, report = found
    complete = report.completeness()
    assert complete.seen < 1e-10
    assert complete.unnamed == case.unnamed


def test_there_are_at_least_forty_cases():
    assert len(CASES) >= 40
