"""`normscope curvature` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from tests.cli.commands import normscope

SOURCE = """
import torch
from normscope.lab.models import mlp

def make():
    print("printed by the model")
    return mlp(inputs=64, width=8, depth=3, normalizer="batch")

def real():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 64, generator=generator), torch.randn(20, 10, generator=generator)

class Named(torch.nn.Module):
    # outputs by name, and its own loss where labels are given: the convention of transformers

    def __init__(self):
        super().__init__()
        self.inner = mlp(inputs=64, width=8, depth=3, normalizer="layer")

    def forward(self, pixels, labels=None):
        found = {"logits": self.inner(pixels)}
        if labels is not None:
            found["loss"] = torch.nn.functional.cross_entropy(found["logits"], labels)
        return found

def dicts():
    inputs, targets = real()
    return [{"pixels": inputs, "labels": targets.argmax(1)}]

def pairs():
    inputs, targets = real()
    return inputs, targets.argmax(1)

def column():
    return torch.nn.Linear(64, 1)

class Flat(torch.nn.Module):
    # its loss is linear in its parameters, so the Hessian is zero

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 1)

    def forward(self, pixels, labels=None):
        found = self.inner(pixels)
        return {"logits": found, "loss": found.mean()}

def row():
    inputs, targets = real()
    return inputs.flatten(1), targets[:, 0]

def batches():
    inputs, targets = real()
    return [(inputs[:10], targets[:10]), (inputs[10:], targets[10:])]
"""


pytestmark = pytest.mark.usefixtures("place")


def curvature(*words: str) -> Result:
    return normscope("curvature", *words)


def test_text_says_mode_grouping_spectrum_and_condition() -> None:
    result = curvature("network.py:make", "--data", "digits")
    assert result.exit_code == 0, result.stderr
    for said in (
        "train mode",
        "360 samples in batches: 1 of 256, 1 of 104",
        "2 normalizers",
        "largest:",
        "smallest:",
        "trace:",
        "condition: κ",
    ):
        assert said in result.stdout
    assert "printed by the model" not in result.stdout


def test_json_alone_on_stdout_and_in_a_file(place: Path) -> None:
    words = ("network.py:make", "--data", "digits", "--mode", "eval", "--top", "2", "--float64", "--json")
    content = json.loads(curvature(*words, "-").stdout)
    assert content["schema"] == "normscope.curvature/1" and content["mode"] == "eval" and content["batch_statistics"] == []
    assert len(content["eigenvalues"]["largest"]) == 2 and content["condition"]["threshold"] == 1e-3
    assert curvature(*words, "found.json").exit_code == 0
    assert json.loads((place / "found.json").read_text()) == content


@pytest.mark.parametrize("quotient", [[], ["--quotient"]])
def test_json_is_json_where_a_number_is_infinite(quotient: list[str]) -> None:
    """Of a matrix without positive eigenvalues, or of a loss that is not finite, too."""
    words = ["network.py:Flat", "--data", "network.py:dicts", "--loss", "model", *quotient]
    result = curvature(*words, "--json", "-")
    assert result.exit_code == 0, result.stderr
    json.loads(result.stdout, parse_constant=pytest.fail)


def test_real_targets_and_batches() -> None:
    for data in ("real", "batches"):
        result = curvature("network.py:make", "--data", f"network.py:{data}", "--batch", "10", "--matrix", "gauss-newton")
        assert result.exit_code == 0 and "batches: 2 of 10" in result.stdout, result.stderr


def test_real_targets_are_never_broadcast() -> None:
    """torch would compare a column of 20 outputs with a row of 20 targets as 400 pairs, and only warn."""
    fits, does_not = (curvature(f"network.py:{model}", "--data", "network.py:row") for model in ("column", "make"))
    assert fits.exit_code == 0 and fits.stderr == "", fits.stderr
    assert does_not.exit_code == 2 and "shape of the outputs" in does_not.stderr and "Warning" not in does_not.stderr


def test_models_that_name_their_outputs_and_compute_their_loss() -> None:
    own, usual = (curvature("network.py:Named", "--data", f"network.py:{data}") for data in ("dicts", "pairs"))
    assert own.exit_code == usual.exit_code == 0 and own.stdout == usual.stdout, own.stderr + usual.stderr


def test_ctrl_c_prints_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("normscope.curvature.spectrum.Curvature.trace", interrupted)
    result = curvature("network.py:make", "--data", "digits")
    assert result.exit_code == 130 and "smallest:" in result.stdout and "trace:" not in result.stdout
