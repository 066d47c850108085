"""The judge sees what it must not miss: bounds that are too small, crashes, and answers that do not come."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

import normscope as ns
from normscope.core.magnitude import ZERO
from tests.sweep import judge as judging
from tests.sweep.judge import judge

BOUNDED = 20  # a program whose bound is tight


def endless(*_, **__):
    while True:
        pass


def crashing(*_, **__):
    raise KeyError("planted")


@pytest.fixture(autouse=True, scope="module")
def judged() -> None:
    """Without a fault. What torch imports late is there then: an import that the limit stops is never made whole."""
    found = judge(BOUNDED)
    assert found.outcome == "bounded" and not found.wrong


@pytest.mark.parametrize(("planted", "told"), [(endless, "no answer after"), (crashing, "planted")])
def test_a_crash_and_an_endless_loop_are_wrong(monkeypatch, planted, told):
    monkeypatch.setattr(judging, "LIMIT", 3 if planted is endless else judging.LIMIT)
    monkeypatch.setattr(import_module("normscope.certify.lipschitz"), "upper", planted)
    assert any(told in line for line in judge(BOUNDED).wrong)


def test_a_bound_below_what_two_points_show_is_wrong(monkeypatch):
    true = ns.lipschitz

    def halved(*args, **kwargs):
        found = true(*args, **kwargs)
        return replace(found, lower=ZERO, upper=found.lower * 0.5)

    monkeypatch.setattr(ns, "lipschitz", halved)
    assert any("but a pair has the quotient" in line for line in judge(BOUNDED).wrong)


def test_samples_that_mix_and_are_certified_are_wrong(monkeypatch):
    monkeypatch.setattr(judging, "mixes", lambda *_: True)
    assert any("samples influence each other" in line for line in judge(BOUNDED).wrong)
