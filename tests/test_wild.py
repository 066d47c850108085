"""Networks that nobody here wrote: a few always, every twelfth of the sweep in the full suite (`python -m bench wild`)."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import normscope as ns
from bench.wild import transformers_models
from bench.wild.checks import Known
from bench.wild.table import page
from bench.wild.transformers_models import NotBuilt

FAMILIES = (
    "bert", "gpt2", "mixtral", "mamba", "vit", "resnet", "gemma2", "apertus", "granitemoeshared", "convnext", "t5", "gptj",
)  # fmt: skip
SWEPT = transformers_models.names()[5::12]


def check(name: str) -> None:
    try:
        model, example = transformers_models.build(name)
    except NotBuilt as reason:
        pytest.skip(str(reason))
    output = None
    try:
        try:
            audit = ns.audit(model, example, effort=0.1, local=False)
        except ns.InputError as error:
            assert "choose one with output=" in str(error)
            output = 0
            audit = ns.audit(model, example, output=output, effort=0.1, local=False)
    except (ns.Refusal, ns.ExportError) as refusal:
        assert isinstance(refusal, ns.ExportError) or refusal.causes
        return
    assert list(Known(model, example, output).contradictions(audit)) == []
    bracket = audit.bracket
    if bracket.upper is None:
        assert bracket.certificate.causes and "region" in bracket.certificate.advice
    elif not bracket.upper.finite:
        assert "region" in bracket.reason and "shown by" in bracket.reason


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_each_family(name):
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", SWEPT)
def test_a_part_of_the_sweep(name):
    check(name)


RECORDS = [
    {"name": "able", "outcome": "finite", "lower": "1.0", "upper": "2.0e+03", "local": "1.5", "seconds": 2.5, "wrong": []},
    {"name": "baker", "outcome": "infinite", "why": "a | b jumps", "local": "inf", "seconds": 1.0, "wrong": ["γ is 1, not 2"]},
    {"name": "charlie", "outcome": "too slow", "why": "more than 120 s"},
    {"name": "dog", "outcome": "refused: unproved", "why": "5 to 6 operations", "seconds": 9.0, "unfinished": "doctor: more"},
]


def test_a_page_keeps_what_it_says_of_models_that_were_not_run_again():
    listed = {"transformers": 5, "diffusers": 1}
    whole = page({"transformers": RECORDS, "diffusers": []}, listed)
    for again in ([], RECORDS[:1], RECORDS[1:3]):
        assert page({"transformers": again, "diffusers": []}, listed, whole) == whole
    renewed = [{**RECORDS[0], "name": "charlie"}]
    expected = page({"transformers": [*RECORDS[:2], *RECORDS[3:], *renewed], "diffusers": []}, listed)
    assert page({"transformers": renewed, "diffusers": []}, listed, whole) == expected != whole
