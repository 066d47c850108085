"""Networks that nobody here wrote: a few always, every twelfth of the sweep in the full suite (`python -m bench wild`)."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import normscope as ns
from bench.wild import transformers_models
from bench.wild.checks import Known
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


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_each_family(name):
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", SWEPT)
def test_a_part_of_the_sweep(name):
    check(name)
