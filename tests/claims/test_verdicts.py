"""Every claim has the verdict that the numbers give, and another one when its statement is broken or mended."""

import pytest
import torch

from normscope.claims.ledger import load
from normscope.claims.mutants import MENDED, OTHERS, fates, mutants, unchanged
from normscope.claims.statement import STATED
from normscope.claims.verdicts import (
    BOUND,
    FALSE,
    GAP,
    HOLDS,
    MEASURED,
    REFUTED,
    Case,
    Trial,
    constant,
    coverage,
    identity,
    implication,
    least_factors,
    lower_bound,
    presence,
    upper_bound,
)
from tests.claims.expected import LONG, SLOW, VERDICTS

CLAIMS = load()
EXACT = [id for id, verdict in VERDICTS.items() if verdict != MEASURED]
CHANGED = [pytest.param(id, marks=pytest.mark.full) if id in SLOW else id for id in VERDICTS]


def case(stated: float, true: float, corrected: float | None = None) -> Case:
    tensors = [None if value is None else torch.tensor(value, dtype=torch.float64) for value in (stated, true, corrected)]
    return Case("an instance", *tensors)


def test_every_claim_has_a_verdict_and_mutants():
    assert set(VERDICTS) | set(LONG) == set(CLAIMS)
    assert all(list(mutants(claim)) for claim in CLAIMS.values())


@pytest.mark.parametrize("id", VERDICTS)
def test_the_verdict_as_stated(id, ledger):
    (result,) = [result for result in ledger if result.claim.id == id]
    assert result.outcome.verdict == VERDICTS[id]


@pytest.mark.quick(20)
@pytest.mark.parametrize("id", [id for id in MENDED if id not in SLOW])
def test_what_is_true_instead_holds(id):
    assert VERDICTS[id] in (BOUND, *REFUTED) and unchanged(id, 0).verdict in (HOLDS, BOUND)


@pytest.mark.quick(30)
@pytest.mark.parametrize("id", CHANGED)
def test_a_changed_statement_gets_another_verdict(id):
    """Every mutant in the tables is killed; of those of scale one is, or the evidence says that the statement is not sharp here."""
    found = fates(CLAIMS[id])
    tables = OTHERS.get(id, {})
    assert all(fate.killed for fate in found if fate.mutant in tables), [str(fate) for fate in found]
    if VERDICTS[id] != MEASURED and not any(fate.killed for fate in found if fate.scale):
        evidence = CLAIMS[id].run().outcome.evidence
        assert any("not sharp here" in str(value) for value in evidence.values()), [str(fate) for fate in found]


@pytest.mark.full
@pytest.mark.parametrize("id", LONG)
def test_long_claims_measure_and_flip(id):
    assert all(fate.before.verdict == MEASURED and fate.killed for fate in fates(CLAIMS[id]))


def test_corrections_pass_the_same_test(ledger):
    for result in ledger:
        assert result.outcome.confirmed in (True, None), result.claim.id
        if result.outcome.verdict in REFUTED:
            assert result.correction and result.outcome.instance, result.claim.id
        if result.outcome.verdict == FALSE:
            assert result.outcome.confirmed, f"{result.claim.id} has a correction that nothing checks"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_exact_verdicts_do_not_depend_on_the_seed(seed):
    for id in EXACT:
        assert CLAIMS[id].run(seed).outcome.verdict == VERDICTS[id], id


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_claims_run_in_any_default_dtype(ledger, dtype):
    """Every exact claim but the slowest, T-T20 and a trained one: the same outcome as in float32."""
    default = torch.get_default_dtype()
    chosen = {"T-T20", "A-E1", *EXACT} - (set(SLOW) - {"T-T20"})
    try:
        torch.set_default_dtype(dtype)
        outcomes = {id: CLAIMS[id].run().outcome for id in chosen}
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(default)
    assert outcomes == {result.claim.id: result.outcome for result in ledger if result.claim.id in chosen}


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


def test_lower_bound():
    assert lower_bound([case(1, 1), case(1, 9)]).verdict == HOLDS
    assert lower_bound([case(1, 2)]).verdict == BOUND and "sharpness" in lower_bound([case(1, 2)]).evidence
    assert lower_bound([case(1, 2), case(2, 1)]).verdict == FALSE


def test_how_far_a_term_could_shrink():
    trials = [Trial("here", 1.0 + 4.0, 2.0, terms=(("g", 4.0),))] * 3 + [Trial("there", 1.0, 0.0, terms=(("g", 1.0),))]
    assert least_factors(trials, 1e-9) == {"g": 0.25}
    assert "g could be × 0.25" in coverage(trials, 1e-9, "a proof").evidence


def test_hedged_statements_are_not_counted_as_false(ledger):
    for result in ledger:
        if result.claim.form.hedge != STATED:
            assert result.outcome.verdict not in (FALSE, GAP), result.claim.id


def test_implication_goes_either_way():
    assert implication([case(2, 1)], {}).verdict == HOLDS and implication([case(1, 2)], {}).verdict == GAP
    assert implication([case(1, 2)], {}, least=True).verdict == HOLDS
    assert implication([case(2, 1)], {}, least=True).verdict == GAP
    assert implication([case(1, 0)], {}, least=True).verdict == GAP and implication([case(0, 0)], {}, least=True).verdict == HOLDS


def test_coverage_is_judged_in_every_setting():
    fine = [Trial("easy", 1.0, 0.0)] * 1000
    assert coverage(fine, 0.05, "a proof").verdict == HOLDS
    assert coverage([*fine, *[Trial("hard", 0.0, 1.0)] * 10], 0.05, "a proof").verdict == FALSE
    assert coverage([*fine, Trial("easy", 0.0, 1.0)], 0.05, "a proof").verdict == HOLDS


def test_rounding_is_shown_as_nothing():
    assert str(case(2.0, 1e-16, 0.0)) == "an instance: stated 2, true 0, corrected 0"
    assert str(case(float("inf"), 1.0)) == "an instance: stated inf, true 1" and "nan" in str(case(float("nan"), 1.0))
    assert (
        "nothing beyond rounding" in presence({"here": 1e-16}, 0.1).instance
        and "at most 0.01" in presence({"here": 0.01}, 0.1).instance
    )


def test_presence():
    assert presence({"here": 0.5}, 0.1).verdict == HOLDS and presence({"here": 1e-9}, 0.1).verdict == FALSE
