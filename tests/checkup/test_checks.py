"""Each rule fires on its bad model and is silent on the near miss; nothing is changed by looking."""

import copy

import pytest
import torch

import normscope as ns
from normscope.checkup.checks import CHECKS, NEEDS
from tests.checkup.cases import CASES, Patient


def rules(patient: Patient) -> set[str]:
    return {finding.rule for finding in ns.doctor(patient.model, patient.example, **patient.settings)}


def test_every_rule_has_a_case_and_there_are_at_least_thirty():
    assert set(CASES) == set(CHECKS) and len(CHECKS) >= 30


@pytest.mark.parametrize("rule", CASES)
def test_fires_on_the_bad_model(rule):
    assert rule in rules(CASES[rule][0]())


@pytest.mark.parametrize("rule", CASES)
def test_is_silent_on_the_near_miss(rule):
    assert rule not in rules(CASES[rule][1]())


@pytest.mark.parametrize("rule", CASES)
def test_nothing_changes_by_looking(rule):
    patient = CASES[rule][0]()
    before = copy.deepcopy(patient.model.state_dict())
    training = [module.training for module in patient.model.modules()]
    random = torch.get_rng_state()
    ns.doctor(patient.model, patient.example, **patient.settings)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in patient.model.modules()] == training
    assert all(torch.equal(value, before[name]) or bool(value.isnan().any()) for name, value in patient.model.state_dict().items())


@pytest.mark.parametrize("rule", CHECKS)
def test_every_rule_explains_itself(rule):
    check = CHECKS[rule]
    assert check.severity in ("error", "warning", "info") and set(check.needs) <= set(NEEDS)
    assert len(check.why) > 80 and check.fix.endswith(".") and check.reference
