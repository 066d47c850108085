"""Verdicts follow from the numbers: as the paper says they agree, against it they differ."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from normscope.lab.experiment import Results, TrialResult, find
from normscope.lab.runner import AGREES, DIFFERS, result_directory, run_experiment, verdict
from tests.lab.tampering import Numbers, Rule, tampered

SMALL = '{"mlp":{"width":8,"depth":3}}'


class Case(NamedTuple):
    """tiny: settings of a run of seconds. paper: numbers that say what the paper says; against: the contrary."""

    tiny: dict[str, str]
    paper: Rule
    against: Rule


def batch(parameters: Any) -> bool:
    return bool(parameters["normalizer"] == "batch")


def flow(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        seen = (
            {"norm_change": 0.005, "turned_back": 0.0, "end_degrees": 3.0}
            if right
            else {"norm_change": 0.2, "turned_back": 40.0, "end_degrees": -60.0}
        )
        norms = {"end_norm": 2.0 if right else 0.9, "least_norm": 0.8 if right else 1.0}
        return {f"{way}/{name}": value for way in ("flow", "descent") for name, value in {**seen, **norms}.items()}

    return numbers


def valleys(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        flat = batch(parameters) == right
        return {
            "ray_spread": 0.0 if flat else 0.5,
            "curvature_along": 0.0 if flat else 1.0,
            "curvature_across": 1.0,
            "steps": [10.0 if flat else 90.0],
        }

    return numbers


def norms(right: bool) -> Rule:
    return lambda parameters: {"norm_change": 0.0 if batch(parameters) == right else 0.3, "exponent": 1.0 if right else 2.0}


def spectra(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        better = batch(parameters) == right
        changed = {f"plain/{name}": 20.0 if better else 200.0 for name in ("largest", "condition 1e-06", "condition 0.001")}
        return {**changed, "iterations": 50.0 if better else math.inf, "spike": 1.5 if better else 30.0}

    return numbers


def starts(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        should_train = batch(parameters) or parameters["initial_scale"] == 1
        return {"train_accuracy": 0.95 if should_train == right else 0.1}

    return numbers


def margins(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        better = batch(parameters) == right
        return {
            "train_accuracy": 1.0 if right else 0.9, "mean": 1.8 if better else 1.2, "deviation": 0.3 if better else 0.9,
            "tolerance/plain": 0.4 if better else 0.2,
        }  # fmt: skip

    return numbers


OUTCOMES = {  # (normalizer, rate, epochs) → whether it trains and its accuracy, as the paper says and against it
    ("batch", 0.01, 1): ((True, 0.90), (True, 0.99)),
    ("batch", 100.0, 1): ((True, 0.95), (False, 0.10)),
    ("none", 0.01, 1): ((True, 0.90), (True, 0.90)),
    ("none", 100.0, 1): ((False, 0.10), (True, 0.995)),
    ("none", 0.01, 2): ((True, 0.95), (True, 0.50)),
    ("none", 100.0, 2): ((False, 0.10), (True, 0.50)),
}


def rates(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        outcome = OUTCOMES[parameters["normalizer"], parameters["learning_rate"], parameters["epochs"]]
        trains, accuracy = outcome[0 if right else 1]
        return {"diverged": not trains, "train_loss": 0.1, "history/0/test_loss": 2.3, "test_accuracy": accuracy}

    return numbers


def slopes(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        smooth = batch(parameters) == right
        seen = {
            f"history/{epoch}/{name}": 0.1 if smooth else 3.0
            for epoch in (0, 1)
            for name in ("loss_range", "gradient_change", "smoothness")
        }
        trained = {"diverged": False, "train_loss": 0.1, "history/0/test_loss": 2.3}
        return {**seen, **trained, "history/1/gradient_norms": [1.0, 1.0, 1.1 if smooth else 50.0]}

    return numbers


def saddles(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        noisy = parameters["batch_size"] is not None
        soon = (batch(parameters) and noisy) == right
        return {"steps": 100.0 if soon else math.inf}

    return numbers


def spheres(right: bool) -> Rule:
    def numbers(parameters: Any) -> Numbers:
        spherical = parameters["optimizer"] in ("sgdg", "adamg")
        ends = {0: 1.0, -1: 1.0 if right else 1.5}
        norms = {f"history/{epoch}/weights/{layer}/frobenius_norm": ends[epoch] for epoch in ends for layer in ("1", "4")}
        return {"test_accuracy": 0.95 if spherical == right else 0.9, **norms}

    return numbers


TRAINED = {"networks": SMALL, "images": "200", "epochs": "1", "seeds": "[0]"}
CASES = {
    "toy-flow": Case({"radii": "[0.3,3.0]", "degrees": "[90.0]", "steps": "20"}, flow(True), flow(False)),
    "invariant-valleys": Case({"points": "5", "degrees": "[90.0]", "steps": "10"}, valleys(True), valleys(False)),
    "norm-over-time": Case({"learning_rates": "[0.0,0.1]", "duration": "0.2", "samples": "40", "width": "4"}, norms(True), norms(False)),
    "conditioning": Case({"learning_rates": "[0.1]", "steps": "15", "seeds": "[0]", "width": "3"}, spectra(True), spectra(False)),
    "bad-init": Case({**TRAINED, "scales": "[0.001,1.0,100.0]"}, starts(True), starts(False)),
    "margins": Case({**TRAINED, "data": "products"}, margins(True), margins(False)),
    "max-learning-rate": Case({**TRAINED, "learning_rates": "[0.01,100.0]", "patience": "2"}, rates(True), rates(False)),
    "smoothness": Case({**TRAINED, "learning_rates": "[0.1]"}, slopes(True), slopes(False)),
    "saddle-escape": Case({"rest": "15", "steps": "10", "seeds": "[0]"}, saddles(True), saddles(False)),
    "riemannian": Case(TRAINED, spheres(True), spheres(False)),
}  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@lru_cache
def tiny_results(name: str, out: Path) -> Results:
    """An experiment, run with tiny settings."""
    outcome = run_experiment(name, settings=CASES[name].tiny, out=out)
    assert not outcome.failures and outcome.comparisons
    records = [json.loads((out / trial["directory"] / "result.json").read_text()) for trial in outcome.content["trials"]]
    return Results([TrialResult(record["label"], record["seed"], record["parameters"], record["numbers"]) for record in records])


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_an_experiment_runs_and_draws(name: str, out: Path) -> None:
    drawn = find(name).plots(tiny_results(name, out))
    figures = result_directory(out, name, full=False) / "figures"
    assert drawn and all((figures / f"{figure}.html").stat().st_size > 1000 for figure in drawn)
    assert all(shown.series or shown.surface for shown in drawn.values())


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CASES)
def test_a_verdict_follows_from_the_numbers(name: str, out: Path) -> None:
    results = tiny_results(name, out)
    agreeing, differing = ([*find(name).judge(tampered(results, rule))] for rule in (CASES[name].paper, CASES[name].against))
    assert [row.quantity for row in agreeing if row.agrees is False] == [] and verdict(agreeing) == AGREES
    assert [row.quantity for row in differing if row.agrees] == [] and verdict(differing) == DIFFERS
