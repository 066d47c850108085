"""The ledger: every id of the papers' table, order, JSON, and a page that is fresh."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import normscope as ns
from normscope.claims.claim import PAPERS, Checked, Ledger, claim, contents, explanation, find, load
from normscope.claims.documentation import documentation
from normscope.claims.statement import HEDGES, QUANTIFIERS, SLIDES, SOURCES
from normscope.claims.verdicts import MEASURED, VERDICTS, Ruling
from normscope.core.errors import InputError
from tests.claims.expected import DISAGREE, LATE, LONG

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
STALE = "run: python -m normscope.claims > docs/claims.md"


def test_every_statement_is_there(ledger):
    assert {result.claim.id for result in ledger} | {*LATE, *LONG} == set(load())
    assert {result.claim.paper for result in ledger} == set(PAPERS)


def test_claims_stand_by_paper():
    papers = [claim.paper for claim in load().values()]
    assert papers == sorted(papers, key=list(PAPERS).index)
    prefixes = {"T": "Than 2025", "A": "Akbar", "L": "Later work", "O": "Open questions"}
    assert all(claim.paper == prefixes[claim.id[0]] for claim in load().values())


def test_every_statement_has_its_logical_form():
    for id, known in load().items():
        form = known.form
        assert form.source in SOURCES and form.quantifier in QUANTIFIERS and form.hedge in HEDGES, id
        assert form.where and form.assumptions and form.statement.endswith("."), id
        assert not form.correction or form.correction.endswith((".", ")")), id


def test_tallies_are_by_source(ledger):
    assert [line.split(":")[0] for line in ledger.tallies()] == list(SOURCES)
    slides = [result.outcome.verdict for result in ledger if result.claim.form.source == SLIDES]
    assert f"{slides.count('false as stated')} false as stated" in ledger.tallies()[1]


def test_each_function_states_its_mathematics():
    names = [claim.check.__name__ for claim in load().values()]
    assert len(set(names)) == len(names)
    for known in load().values():
        assert known.mathematics, known.id


def test_an_id_is_taken_once():
    with pytest.raises(ValueError, match="T-L1 is taken"):
        claim("T-L1")(lambda generator: Ruling("holds", {}))
    assert load()["T-L1"].check.__name__ == "batch_norm_constant"


def test_long_claims_are_skipped_and_named(monkeypatch):
    few = {id: load()[id] for id in ("T-L1", *LONG)}
    monkeypatch.setattr("normscope.claims.claim.load", lambda: few)
    found = ns.claims.run_claims()
    assert [result.claim.id for result in found] == ["T-L1"] and tuple(found.skipped) == LONG
    assert all(find(id).long and id in _text(found) for id in found.skipped)


def test_results_are_the_same_each_time_and_alone(ledger):
    assert [result.claim.id for result in ns.claims.run_claims(["t-t13", "A-WD", "T-T13"])] == ["T-T13", "A-WD"]
    for result in ns.claims.run_claims(["T-T13", "T-C21", "A-WD"]):
        (other,) = [row for row in ledger if row.claim is result.claim]
        assert result.outcome == other.outcome


@pytest.mark.parametrize("ids", [("T-C22", "A-smooth"), pytest.param(("A-E2", "A-large-lr"), marks=pytest.mark.full)])
def test_global_random_state_is_untouched(ids):
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    ns.claims.run_claims(ids, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]


def test_json_lists_the_claims(ledger, tmp_path):
    content = json.loads(ledger.to_json(tmp_path / "claims.json"), parse_constant=pytest.fail)
    assert json.loads((tmp_path / "claims.json").read_text()) == content and content["skipped"] == list(ledger.skipped)
    rows = content["claims"]
    assert len(rows) == len(ledger)
    for row in rows:
        assert {"id", "paper", "source", "where", "quantifier", "assumptions", "hedge", "statement"} <= set(row)
        assert {"verdict", "correction", "evidence"} <= set(row)
        assert row["verdict"] in VERDICTS and row["evidence"]


def test_json_has_no_infinities():
    claim = find("T-L1")
    ledger = Ledger((Checked(claim, Ruling("measured", {"a": float("inf"), "b": float("nan"), "c": 1.5}), 0.0),))
    content = json.loads(ledger.to_json(), parse_constant=pytest.fail)
    assert content["claims"][0]["evidence"] == {"a": "inf", "b": None, "c": 1.5}
    again = Ledger.from_dict(content)[0].outcome.evidence
    assert again["a"] == float("inf") and again["b"] != again["b"] and again["c"] == 1.5


def test_the_print_shows_verdicts_corrections_and_counterexamples(ledger):
    text = _text(ledger)
    assert all(result.claim.id in text and result.outcome.verdict in text for result in ledger)
    assert "instead:" in text and "counterexample:" in text and "(NOT confirmed" not in text


def test_unknown_ids_are_refused_in_one_line():
    for only in (["T-X"], "T-X"):
        with pytest.raises(InputError, match="no claim 'T-X'"):
            ns.claims.run_claims(only)


def test_contents_name_every_claim_once():
    lines = contents().splitlines()
    assert [line.split()[0] for line in lines] == list(load())


def test_explanation():
    text = explanation("t-t13")
    form = find("T-T13").form
    assert (
        "Correction:" in text
        and "there exists" in text
        and all(part in text for part in (form.where, form.assumptions, form.statement))
    )
    assert "Long:" in explanation("T-F1-resnet18")


def test_progress_is_reported():
    seen: list[tuple[str, int, int]] = []
    ns.claims.run_claims(["A-WD", "A-P4.3"], progress=lambda *what: seen.append(what))
    assert seen == [("A-WD", 0, 2), ("A-P4.3", 1, 2)]


def test_the_page_is_fresh(ledger):
    """Of a measurement the page has one thing that it decides: whether a correction is printed. A full test measures all."""
    agreed = [Checked(find(id), Ruling(MEASURED, {"agrees": id not in DISAGREE}), 0.0) for id in LATE]
    assert PAGE.read_text(encoding="utf-8") == documentation(Ledger((*ledger, *agreed))), STALE


@pytest.mark.full
def test_the_page_is_fresh_in_what_is_measured(ledger, measurements):
    assert PAGE.read_text(encoding="utf-8") == documentation(Ledger((*ledger, *measurements))), STALE
    assert {result.claim.id for result in measurements if result.correction} == set(DISAGREE)


def _text(ledger: Ledger) -> str:
    console = Console(width=4000, highlight=False)
    with console.capture() as capture:
        console.print(ledger.render())
    return capture.get()
