"""`normscope generalization` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from tests.cli.commands import normscope

SOURCE = """
import torch
from normscope.lab.models import mlp

def make():
    print("printed by the model")
    return mlp(inputs=64, width=8, depth=3, normalizer="batch")

def small():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(60, 64, generator=generator), torch.randint(10, (60,), generator=generator)

def batches():
    inputs, targets = small()
    return [(inputs[:30], targets[:30]), (inputs[30:], targets[30:])]

def broken():
    raise RuntimeError("no data today")
"""
QUICK = ("--only", "held-out Hoeffding", "--only", "Golowich et al. 2018", "--only", "VC dimension (Bartlett et al. 2019)")


pytestmark = pytest.mark.usefixtures("place")


def generalization(*words: str) -> Result:
    return normscope("generalization", *words)


def test_the_table_stands_side_by_side() -> None:
    result = generalization("network.py:make", "--train", "digits", "--held-out", "digits", *QUICK)
    assert result.exit_code == 0, result.stderr
    for said in ("1,437 training samples", "held-out Hoeffding", "Golowich et al.", "certified", "vacuous", "0.95"):
        assert said in result.stdout
    assert "printed by the model" not in result.stdout
    detailed = generalization("network.py:make", "--train", "network.py:small", "--details", *QUICK)
    assert "Rademacher complexity" in detailed.stdout and "assumes:" in detailed.stdout and "not given" in detailed.stdout


def test_json_alone_on_stdout_and_in_a_file(place: Path) -> None:
    words = ("network.py:make", "--train", "network.py:small", "--held-out", "network.py:batches", *QUICK, "--json")
    content = json.loads(generalization(*words, "-").stdout)
    assert content["schema"] == "normscope.generalization/1" and content["samples"] == 60
    assert {bound["name"] for bound in content["bounds"]} == {name for name in QUICK if name != "--only"}
    assert generalization(*words, "found.json").exit_code == 0
    assert json.loads((place / "found.json").read_text()) == content


def test_a_page_of_figures_needs_no_network(place: Path) -> None:
    words = ("network.py:make", "--train", "network.py:small", "--held-out", "network.py:small", *QUICK)
    result = generalization(*words, "--html", "page.html")
    assert result.exit_code == 0, result.stderr
    page = (place / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "<script src=" not in page
    assert page.count('class="plot"') >= 3 and all(f"<h2>{title}" in page for title in ("Generalization", "Margins", "Flatness"))


def test_weights_before_and_after_training(place: Path) -> None:
    from normscope.lab.models import mlp

    model = mlp(inputs=64, width=8, depth=3, normalizer="batch")
    torch.save(model.state_dict(), place / "before.pt")
    with torch.no_grad():
        model[1].weight.add_(0.01)
    torch.save(model.state_dict(), place / "after.pt")
    words = ("network.py:make", "--train", "network.py:small", "--weights", "after.pt", "--only", "PAC-Bayes", "--json", "-")
    own, zero = (
        json.loads(generalization(*words, *more).stdout)["bounds"][0]["parts"]["‖w − w₀‖"]
        for more in (("--initial", "before.pt"), ())
    )
    assert own == pytest.approx(0.01 * (8 * 64) ** 0.5, rel=1e-3) and zero > 1
