"""Mistakes planted in models nobody here wrote are found; the models as they come are clean, but for what is listed."""

import pytest

import normscope as ns

pytest.importorskip("transformers")

from bench.doctor_mistakes import CONFIGS, MISTAKES, Patient, doctor_says, found, healthy
from tests.certify.test_zoo import GLOBAL, LOCAL_ONLY, model_of

# True findings in models as they come; docs/doctor.md says why each is right.
KNOWN = {"MobileNetV2": {"NS207"}, "EfficientNet": {"NS201", "NS202", "NS207"}}


@pytest.mark.quick(7)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.rule}-{mistake.kind}-{mistake.what}")
def test_planted_mistakes_are_found(mistake):
    assert found(mistake)


def test_there_are_forty():
    assert len(MISTAKES) >= 40


@pytest.mark.quick(3)
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
