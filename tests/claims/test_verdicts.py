"""Every claim has the verdict that the numbers give, and another one when its statement is broken or mended."""

import pytest
import torch

from normscope.claims.ledger import load
from normscope.claims.verdicts import (
    BOUND,
    FALSE,
    GAP,
    HOLDS,
    MEASURED,
    Case,
    Outcome,
    Trial,
    constant,
    coverage,
    identity,
    implication,
    presence,
    upper_bound,
)  # fmt: skip
from tests.claims.mutants import LONG, VERDICTS

CHANGES = [(id, i) for id, (_, changes) in VERDICTS.items() for i in range(len(changes))]
CLAIMS = load()


def case(stated: float, true: float, corrected: float | None = None) -> Case:
    tensors = [None if value is None else torch.tensor(value, dtype=torch.float64) for value in (stated, true, corrected)]
    return Case("an instance", *tensors)


def test_every_claim_has_changes_that_break_it():
    assert set(VERDICTS) | set(LONG) == set(CLAIMS)
    for verdict, changes in VERDICTS.values():
        assert verdict == MEASURED or any(expected != verdict for _, expected in changes)


@pytest.mark.parametrize("id", VERDICTS)
def test_the_verdict_as_stated(id, ledger):
    (result,) = [result for result in ledger if result.claim.id == id]
    assert result.outcome.verdict == VERDICTS[id][0]


@pytest.mark.parametrize("id, change", CHANGES)
def test_the_verdict_changes_with_the_statement(id, change, ledger):
    (result,) = [result for result in ledger if result.claim.id == id]
    changes, expected = VERDICTS[id][1][change]
    changed = CLAIMS[id].run(**changes).outcome
    assert changed.verdict == expected
    if expected == MEASURED:
        assert measured(changed) != measured(result.outcome)


def measured(outcome: Outcome) -> dict[str, object]:
    """What was measured, row by row, and whether it is as the paper says.

    Trainings end elsewhere on another processor, so what a change does to each row's answer is no law; that it shows is one.
    """
    return {name: value for name, value in outcome.evidence.items() if name not in ("theirs", "settings")}


@pytest.mark.full
@pytest.mark.parametrize("id", LONG)
def test_long_claims_measure_and_flip(id):
    claim = CLAIMS[id]
    first, second = claim.run().outcome, claim.run(stated=LONG[id]).outcome
    assert first.verdict == MEASURED and measured(first) != measured(second)


def test_corrections_pass_the_same_test(ledger):
    for result in ledger:
        assert result.outcome.confirmed in (True, None), result.claim.id
        if result.outcome.verdict in (FALSE, GAP):
            assert result.correction and result.outcome.instance, result.claim.id
        if result.outcome.verdict == FALSE:
            assert result.outcome.confirmed, f"{result.claim.id} has a correction that nothing checks"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_exact_verdicts_do_not_depend_on_the_seed(seed):
    for id, (verdict, _) in VERDICTS.items():
        if verdict != MEASURED:
            assert CLAIMS[id].run(seed).outcome.verdict == verdict, id


def test_measured_claims_name_both_figures_and_the_settings(ledger):
    for result in ledger:
        if result.outcome.verdict == MEASURED:
            assert {"theirs", "agrees", "settings"} < set(result.outcome.evidence)


def test_identity():
    assert identity([case(1, 1), case(0, 0)]).verdict == HOLDS
    assert identity([case(1, 1), case(2, 1)]).verdict == FALSE
    assert identity([case(-1, -2)]).verdict == FALSE
    assert identity([case(float("nan"), 1)]).verdict == FALSE
    assert [identity([case(2, 1, right)]).confirmed for right in (1, 3, None)] == [True, False, None]


def test_constant():
    assert constant([case(1, 1), case(0, 0)]).verdict == HOLDS
    assert constant([case(1, 1), case(2, 1)]).verdict == BOUND
    assert constant([case(1, 1), case(1, 2)]).verdict == FALSE
    assert constant([case(float("nan"), 1)]).verdict == FALSE
    assert constant([case(float("inf"), 1)]).verdict == BOUND


def test_upper_bound():
    assert upper_bound([case(1, 1), case(9, 1)]).verdict == HOLDS
    assert upper_bound([case(2, 1), case(9, 1)]).verdict == BOUND
    assert upper_bound([case(2, 1), case(1, 2)]).verdict == FALSE
    assert upper_bound([case(0, 1)]).verdict == FALSE
    assert upper_bound([case(1, float("nan"))]).verdict == FALSE


def test_implication_goes_either_way():
    assert implication([case(2, 1)], {}).verdict == HOLDS and implication([case(1, 2)], {}).verdict == GAP
    assert implication([case(1, 2)], {}, least=True).verdict == HOLDS
    assert implication([case(2, 1)], {}, least=True).verdict == GAP
    assert implication([case(1, 0)], {}, least=True).verdict == GAP and implication([case(0, 0)], {}, least=True).verdict == HOLDS


def test_coverage_is_judged_in_every_setting():
    fine = [Trial("easy", 1.0, 0.0)] * 1000
    assert coverage(fine, 0.05).verdict == HOLDS
    assert coverage([*fine, *[Trial("hard", 0.0, 1.0)] * 10], 0.05).verdict == FALSE
    assert coverage([*fine, Trial("easy", 0.0, 1.0)], 0.05).verdict == HOLDS


def test_rounding_is_shown_as_nothing():
    assert str(case(2.0, 1e-16, 0.0)) == "an instance: stated 2, true 0, corrected 0"
    assert str(case(float("inf"), 1.0)) == "an instance: stated inf, true 1" and "nan" in str(case(float("nan"), 1.0))
    assert (
        "nothing beyond rounding" in presence({"here": 1e-16}, 0.1).instance
        and "at most 0.01" in presence({"here": 0.01}, 0.1).instance
    )


def test_presence():
    assert presence({"here": 0.5}, 0.1).verdict == HOLDS and presence({"here": 1e-9}, 0.1).verdict == FALSE
