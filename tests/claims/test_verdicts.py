"""Every claim has the verdict that the numbers give, and another one when its statement is broken or mended."""

import pytest
import torch

from normscope.claims.claim import load
from normscope.claims.mutants import MENDED, OTHERS, UNEXPLAINED, Fate, fates, mutants, reason, unchanged
from normscope.claims.statement import STATED
from normscope.claims.verdicts import (
    BOUND,
    FALSE,
    GAP,
    HOLDS,
    MEASURED,
    REFUTED,
    Case,
    DrawnMean,
    Ruling,
    Trial,
    constant,
    coverage,
    expectation,
    identity,
    implication,
    least_factors,
    lower_bound,
    presence,
    upper_bound,
)
from tests.claims.expected import EXACT, LATE, LONG, SLOW, VERDICTS

CLAIMS = load()
QUICK = [id for id in EXACT if id not in SLOW]
CHANGED = [pytest.param(id, marks=pytest.mark.full) if id in (*SLOW, *LATE) else id for id in VERDICTS]


def case(stated: float, true: float, corrected: float | None = None) -> Case:
    tensors = [None if value is None else torch.tensor(value, dtype=torch.float64) for value in (stated, true, corrected)]
    return Case("an instance", *tensors)


def test_every_claim_has_a_verdict_and_mutants():
    assert set(VERDICTS) | set(LONG) == set(CLAIMS)
    assert all(list(mutants(claim)) for claim in CLAIMS.values())


@pytest.mark.parametrize("id", [id for id in VERDICTS if id not in LATE])
def test_the_verdict_as_stated(id, ledger):
    (result,) = [result for result in ledger if result.claim.id == id]
    assert result.outcome.verdict == VERDICTS[id]


@pytest.mark.quick(20)
@pytest.mark.parametrize("id", [id for id in MENDED if id not in SLOW])
def test_what_is_true_instead_holds(id):
    assert VERDICTS[id] in (BOUND, *REFUTED) and unchanged(id, 0).verdict in (HOLDS, BOUND)


@pytest.mark.quick(15)
@pytest.mark.parametrize("id", CHANGED)
def test_a_changed_statement_gets_another_verdict(id):
    """Every mutant in the tables is killed; of those of scale one is, or the evidence says that the statement is not sharp here."""
    found = fates(CLAIMS[id])
    assert all(fate.killed for fate in found if fate.mutant in OTHERS.get(id, {})), [str(fate) for fate in found]
    assert all(fate.killed or reason(fate, found) != UNEXPLAINED for fate in found), [str(fate) for fate in found]
    assert VERDICTS[id] == MEASURED or any(fate.scale for fate in found), f"{id} has no mutant of scale"


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


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 12))
def test_no_exact_verdict_depends_on_the_seed(seed):
    assert {id: CLAIMS[id].run(seed).outcome.verdict for id in EXACT} == {id: VERDICTS[id] for id in EXACT}


@pytest.mark.parametrize(
    ("dtype", "chosen"),
    [
        pytest.param(torch.float64, (*QUICK[::3], "T-T20", "A-smooth"), id="float64"),
        pytest.param(torch.bfloat16, (*EXACT, "A-smooth"), id="bfloat16", marks=pytest.mark.full),
    ],
)
def test_claims_run_in_any_default_dtype(ledger, dtype, chosen, monkeypatch, tmp_path):
    """The same outcome as in float32; what is trained is trained anew."""
    monkeypatch.setattr("normscope.claims.observed.directory", lambda: tmp_path)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        outcomes = {id: CLAIMS[id].run().outcome for id in chosen}
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(default)
    assert outcomes == {result.claim.id: result.outcome for result in ledger if result.claim.id in chosen}


def test_measured_claims_name_both_figures_and_the_settings(ledger):
    assert all({"theirs", "agrees", "settings"} < set(row.outcome.evidence) for row in ledger if row.outcome.verdict == MEASURED)


@pytest.mark.full
def test_every_measured_claim_does(measurements):
    assert all(
        row.outcome.verdict == MEASURED and {"theirs", "agrees", "settings"} < set(row.outcome.evidence) for row in measurements
    )


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


def test_stated_means_are_compared_with_draws():
    draws = torch.randn(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert expectation([DrawnMean("here", 0.0, draws)], "a proof").verdict == HOLDS
    refuted = expectation([DrawnMean("here", 0.0, draws), DrawnMean("there", 0.1, draws)], "a proof")
    assert refuted.verdict == FALSE and "there: stated 0.1" in refuted.instance and "refute" in str(refuted.evidence["rests on"])


def test_a_survivor_needs_a_reason():
    """Sharp and shrunk without a change of the verdict: unexplained. Where the evidence says so: not sharp here."""
    blunt, sharp, other = Ruling(HOLDS, {"sharpness": "not sharp here"}), Ruling(HOLDS, {}), Ruling(FALSE, {})
    assert reason(Fate("T", "× 0.9", True, blunt, blunt), []) == "not sharp here"
    survivor, victim = Fate("T", "× 1.1", True, sharp, sharp), Fate("T", "× 0.9", True, sharp, other)
    assert reason(survivor, [survivor]) == UNEXPLAINED and "weaker" in reason(survivor, [survivor, victim])


def test_rounding_is_shown_as_nothing():
    assert str(case(2.0, 1e-16, 0.0)) == "an instance: stated 2, true 0, corrected 0"
    assert str(case(float("inf"), 1.0)) == "an instance: stated inf, true 1" and "nan" in str(case(float("nan"), 1.0))
    assert (
        "nothing beyond rounding" in presence({"here": 1e-16}, 0.1).instance
        and "at most 0.01" in presence({"here": 0.01}, 0.1).instance
    )


def test_presence():
    assert presence({"here": 0.5}, 0.1).verdict == HOLDS and presence({"here": 1e-9}, 0.1).verdict == FALSE
