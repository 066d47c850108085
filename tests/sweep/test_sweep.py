"""Sound on random programs: no pair refutes a bound, no samples that mix are certified, nothing but our errors is raised."""

from __future__ import annotations

import pytest

from tests.sweep.judge import judge

QUICK, ALL, STRIDE = 24, 2000, 20
# of the first 20,000 those that were judged wrong once: an operation that reads what it writes, a step where rounding falls on either
# side of a jump, rounding that was taken for a refutation, and a number that is infinite for a batch of two
ONCE_WRONG = (3243, 8390, 8497, 12333, 13525, 14023, 14076)


@pytest.mark.quick(5)
@pytest.mark.parametrize("seed", (*range(QUICK), *ONCE_WRONG))
def test_no_pair_refutes_a_bound(seed):
    assert not judge(seed).wrong


@pytest.mark.full
@pytest.mark.parametrize("start", range(0, ALL, STRIDE))
def test_no_pair_refutes_many_more(start):
    wrong = [line for seed in range(start, start + STRIDE) for line in judge(seed).wrong]
    assert not wrong, "\n".join(wrong)
