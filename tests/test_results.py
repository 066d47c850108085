"""One contract for everything that a public function returns: it prints, is stored, read back, drawn and put on a page."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normscope as ns
from normscope.core.codec import encode, number, plain
from normscope.core.magnitude import Magnitude
from normscope.core.result import Result
from normscope.report.result_sections import SECTIONS
from normscope.report.results import shown_results
from tests.report.recorded_results import TINY
from tests.report.recordings import write_run
from tests.report.test_report import FINDING
from tests.report.test_results import survives_changes


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()


@cache
def stored() -> str:
    path = f"{tempfile.mkdtemp()}/model.safetensors"
    save_file(model().state_dict(), path)
    return path


X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
BALL = ns.Ball(X[0], 0.1)


def half_as_bad(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


CASES = {
    "audit": lambda: ns.audit(model(), X, within=2, region=BALL),
    "bracket": lambda: ns.lipschitz(model(), X),
    "bracket on a region": lambda: ns.lipschitz(model(), X, region=BALL),
    "gap curve": lambda: ns.lipschitz(model(), X, region=BALL).radius_within(2),
    "symmetries": lambda: ns.symmetries(model(), X),
    "findings": lambda: ns.doctor(model(), X),
    "curvature": lambda: ns.hessian(model(), half_as_bad, [(X, Y)]),
    "landscape": lambda: ns.curvature.landscape(model(), half_as_bad, [(X, Y)]),
    "guarantees": lambda: ns.generalization(model(), "zero-one", (X, Y), held_out=(X, Y), select=["held-out Hoeffding"]),
    "bound": lambda: ns.generalization(model(), "zero-one", (X, Y), held_out=(X, Y), select=["held-out Hoeffding"])[0],
    "margins": lambda: ns.bounds.margins(model(), (X, Y)),
    "flatness": lambda: ns.bounds.flatness(model(), (X, Y)),
    "comparison": lambda: ns.bounds.compare(
        {"a": model(), "b": nn.Linear(4, 3)}, "ramp", (X, Y), held_out=(X, Y), select=["held-out Hoeffding"]
    ),
    "checkpoint": lambda: ns.checkpoint(stored()),
    "difference": lambda: ns.diff(stored(), stored()),
    "training cost": lambda: ns.bounds.training_cost(model(), X),
    "local brackets": lambda: ns.certify.local_brackets(model(), X, data=X[:2], radius=0.01),
    "robustness": lambda: ns.certify.certify_radius(model(), X, data=(X[:3], Y[:3])),
    "ablation": lambda: ns.certify.normalizer_ablation(model(), X),
    "run": lambda: ns.load_run(write_run(Path(tempfile.mkdtemp()) / "run", 30, ["a", "b.c"], finding=FINDING)),
    "run without rows": lambda: ns.load_run(write_run(Path(tempfile.mkdtemp()) / "run", 0, ["a"])),
    "ledger": lambda: ns.claims.run_claims(["T-T13", "A-WD", "T-C21"]),
    "experiment": lambda: ns.lab.run_experiment("weight-norms", settings=TINY, out=tempfile.mkdtemp()),
    "path": lambda: ns.geometry.gradient_flow(
        model(), half_as_bad, (X, Y), duration=0.1, points=3, symmetries=ns.symmetries(model(), X, mode="eval")
    ),
    "sensitivities": lambda: ns.certify.weight_sensitivities(model(), X, region=BALL),
}
NEED_THE_MODEL = ("symmetries", "curvature")


@cache
def made(case: str) -> Result:
    return CASES[case]()


@pytest.fixture(params=CASES)
def result(request):
    return made(request.param)


def test_it_prints_within_100_columns(result):
    assert isinstance(result, Result) and all(len(line) <= 100 for line in str(result).splitlines())
    assert "<pre" in result._repr_html_()


def test_its_text_is_the_same_in_a_notebook(result, monkeypatch):
    text = str(result)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *shown: pytest.fail("text was displayed beside the result"))
    assert str(result) == text and "<pre" in result._repr_html_()


def test_its_repr_is_one_short_line(result):
    assert repr(result).startswith(f"<{type(result).__name__}: ") and "\n" not in repr(result) and len(repr(result)) < 200


def test_its_json_begins_with_its_schema(result, tmp_path):
    text = result.to_json(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text(encoding="utf-8") == text + "\n"
    content = json.loads(text, parse_constant=pytest.fail)
    assert next(iter(content)) == "schema" and content["schema"] == type(result).schema
    assert content == plain(result.to_dict())


def alike(a: object, b: object) -> bool:
    """Equal but for the rounding of logarithms."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [*a] == [*b] and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == (pytest.approx(b, rel=1e-12, abs=1e-12) if isinstance(b, float) else b)


@pytest.mark.parametrize("case", [case for case in CASES if case not in NEED_THE_MODEL])
def test_it_can_be_read_back(case):
    result = made(case)
    content = json.loads(result.to_json())
    again = type(result).from_dict(content)
    assert alike(json.loads(again.to_json()), content) and str(again) == str(result)


@pytest.mark.parametrize("case", NEED_THE_MODEL)
def test_what_needs_the_model_says_so(case):
    with pytest.raises(ns.InputError, match="it needs the model"):
        type(made(case)).from_dict({})


@pytest.mark.quick(8)
def test_its_figures_are_drawn_by_name(result):
    assert all(result.figure(name).data for name in result.figures)
    with pytest.raises(ns.InputError, match="no figure"):
        result.figure("no such")
    if result.figures:
        assert result.figure().to_json() == result.figure(result.figures[0]).to_json()


@pytest.mark.quick(8)
def test_it_has_a_page_and_a_section_in_reports(result, tmp_path):
    result.to_html(tmp_path / "page.html")
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    result.to_json(tmp_path / "r.json")
    assert type(result).schema in SECTIONS
    shown = shown_results(tmp_path / "r.json")
    assert shown.section is not None, shown.problem


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("audit", "curvature", "findings", "guarantees")])
def test_no_change_of_its_file_breaks_a_page(case, tmp_path):
    survives_changes(json.loads(made(case).to_json()), 20, tmp_path)


def test_schemas_are_distinct():
    kinds = {type(made(case)) for case in CASES}
    assert len({kind.schema for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    "value", [0.0, -1.5, float("inf"), -float("inf"), float("nan"), np.float64(2.5), torch.tensor(3.0), Magnitude(7)]
)
def test_numbers_survive_the_codec(value):
    assert number(json.loads(encode([value]), parse_constant=pytest.fail)[0]) == pytest.approx(float(value), nan_ok=True)
