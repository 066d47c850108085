"""Each rule fires on its bad model and is silent on the near miss; nothing is changed by looking."""

import copy

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.findings.catalogue import RULES
from normscope.findings.table import NEEDS
from tests.doctor.cases import CASES, FURTHER
from tests.doctor.patients import Patient


def rules(patient: Patient) -> set[str]:
    return {finding.rule for finding in ns.doctor(patient.model, patient.example, **patient.settings)}


def test_every_rule_has_a_case_and_there_are_at_least_thirty():
    on_files = {rule for rule in RULES if "files" in RULES[rule].needs}  # tests/checkpoint/test_findings.py has theirs
    assert set(CASES) == set(RULES) - on_files and len(CASES) >= 30


@pytest.mark.parametrize("rule", CASES)
def test_fires_on_the_bad_model(rule):
    assert rule in rules(CASES[rule][0]())


@pytest.mark.quick(32)
@pytest.mark.parametrize("rule", CASES)
def test_is_silent_on_the_near_miss(rule):
    assert rule not in rules(CASES[rule][1]())


@pytest.mark.parametrize("name", FURTHER)
def test_further_cases(name):
    rule, fires, make = FURTHER[name]
    patient = make()
    found = ns.doctor(patient.model, patient.example, select=[rule], **patient.settings)
    assert rule in found.checked and bool(found) == fires


@pytest.mark.quick(15)
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


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_explains_itself(rule):
    check = RULES[rule]
    assert check.severity in ("error", "warning", "info") and set(check.needs) <= set(NEEDS)
    assert len(check.why) > 80 and check.fix.endswith(".") and check.reference


class Turned(nn.Module):
    """A linear layer with its weight stored as (in, out), as in GPT-2."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.detach().T.clone()), layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)


@pytest.mark.parametrize("rule", ["NS101", "NS105", "NS108", "NS401"])
@pytest.mark.parametrize("bad", [True, False], ids=["bad", "near miss"])
def test_a_linear_layer_is_one_however_it_is_written(rule, bad):
    patient = CASES[rule][0 if bad else 1]()
    for path, layer in list(patient.model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(patient.model.get_submodule(parent), name, Turned(layer))
    assert (rule in rules(patient)) == bad
