"""Mistakes planted in models nobody here wrote are found; the models as they come are clean, but for what is listed."""

import pytest

import normscope as ns

pytest.importorskip("transformers")

from bench.doctor_mistakes import MISTAKES, doctor_says, found
from bench.doctor_plants import CONFIGS, Patient, healthy
from normscope.findings.catalogue import RULES
from tests.certify.test_zoo import GLOBAL, LOCAL_ONLY, model_of

# True findings in models as they come; docs/doctor.md says why each is right.
KNOWN = {"MobileNetV2": {"NS207"}, "EfficientNet": {"NS202", "NS207"}}


@pytest.mark.quick(4)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.rule}-{mistake.kind}-{mistake.what}")
def test_planted_mistakes_are_found(mistake):
    assert found(mistake)


def test_there_are_eighty_and_every_rule_on_models_has_one():
    """Rules on rows and files have benchmarks of their own."""
    on_models = {rule for rule, check in RULES.items() if not {"rows", "files"} & set(check.needs)}
    assert len(MISTAKES) >= 80 and {mistake.rule for mistake in MISTAKES} == on_models


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [*GLOBAL, *LOCAL_ONLY])
def test_no_false_alarm_on_models_as_they_come(name):
    kind, settings, example = {**GLOBAL, **LOCAL_ONLY}[name]
    findings = ns.doctor(model_of(kind, settings), example, output="last_hidden_state")
    assert {finding.rule for finding in findings} == KNOWN.get(name, set())
    assert len(findings.checked) >= 20


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_no_false_alarm_in_train_mode(kind):
    patient: Patient = healthy(kind)
    assert doctor_says(patient) == KNOWN.get(kind, set())
