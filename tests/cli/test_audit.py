"""`normscope audit` as a user meets it: what goes to stdout, what to stderr, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from normscope.cli.examples import random_example
from normscope.core.errors import InputError
from normscope.version import __version__
from tests.cli.commands import normscope

SOURCE = """
import torch
from torch import nn
print("printed on import")

def make():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2).double(), nn.Linear(3, 2).double()
    def forward(self, left, right):
        return {"sum": self.first(left) + self.second(right), "left": self.first(left)}

class Strange(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x) + torch.erfinv(x)

def labelled():
    return torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
"""


pytestmark = pytest.mark.usefixtures("place")


def audit(*words: str) -> Result:
    return normscope("audit", *words, "--effort", "0.1")


def test_table_on_stdout_fits_100_columns() -> None:
    result = audit("network.py:make", "--input", "6")
    assert result.exit_code == 0, result.stderr
    assert "≤ L ≤" in result.stdout and "batch_norm" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "printed on import" in result.stderr and "printed on import" not in result.stdout


def test_json_alone_on_stdout() -> None:
    result = audit("network.py:make", "--input", "6", "--json", "-")
    content = json.loads(result.stdout)
    assert content["schema"].startswith("normscope.audit/")
    assert content["bracket"]["lower_log10"] <= content["bracket"]["upper_log10"]
    assert [layer["kind"] for layer in content["layers"]] == ["linear", "batch_norm", "linear"]


def test_files_are_written_beside_the_table(place: Path) -> None:
    result = audit("network.py:make", "--input", "6", "--json", "audit.json", "--html", "audit.html")
    assert result.exit_code == 0 and "≤ L ≤" in result.stdout
    assert json.loads((place / "audit.json").read_text())["mode"] == "eval"
    assert "batch_norm" in (place / "audit.html").read_text()


def test_weights_and_seed_decide_the_numbers(place: Path) -> None:
    def upper(*words: str) -> float:
        return json.loads(audit("network.py:make", "--input", "6", "--json", "-", *words).stdout)["bracket"]["upper_log10"]

    assert upper() == upper("--seed", "0") != upper("--seed", "1")
    namespace: dict[str, object] = {}
    exec(SOURCE, namespace)
    state = namespace["make"]().state_dict()  # type: ignore[operator]
    torch.save({key: 0 * value if key == "0.weight" else value for key, value in state.items()}, "zero.pt")
    assert upper("--weights", "zero.pt") == "-inf"


def test_several_inputs_by_position_and_by_name() -> None:
    by_position = audit("network.py:Two", "--input", "4", "--input", "3", "--output", "sum", "--json", "-")
    by_name = audit("network.py:Two", "--input", "right=3", "--input", "left=4", "--output", "sum", "--json", "-")
    assert by_position.exit_code == by_name.exit_code == 0, by_position.stderr + by_name.stderr
    bounds = [json.loads(result.stdout)["bracket"]["upper_log10"] for result in (by_position, by_name)]
    assert bounds[0] == pytest.approx(bounds[1])


def test_mode_batch_takes_the_whole_batch() -> None:
    result = audit("network.py:make", "--input", "6", "--batch", "5", "--mode", "batch", "--json", "-")
    assert json.loads(result.stdout)["inputs"] == [[5, 6]]


def test_examples_have_the_shape_and_type_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    (single,) = random_example(["3x8×2"], 5, torch.float64, generator)
    assert single.shape == (5, 3, 8, 2) and single.dtype == torch.float64
    assert set(random_example(["a=2", "b_1=3"], 1, torch.float32, generator)) == {"a", "b_1"}
    ids = random_example(["input_ids:16:int"], 4, torch.float32, generator, ids=7)["input_ids"]
    assert ids.shape == (4, 16) and ids.dtype == torch.long and 0 <= int(ids.min()) <= int(ids.max()) < 7


@pytest.mark.parametrize("shapes", [["3,8"], ["3x"], ["0x4"], [""], ["-3"], ["=3"], ["a=3", "4"], ["a=3", "a=4"]])
def test_bad_shapes_are_one_line(shapes: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        random_example(shapes, 1, torch.float32, torch.Generator())
    assert "--input" in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_certificate_the_audit_says_what_is_missing() -> None:
    result = audit("network.py:Strange", "--input", "3")
    assert result.exit_code == 0
    _, lower, upper, *causes = result.stdout.splitlines()
    assert "at least" in lower and upper == "upper bound: none: 2 operations without a rule"
    assert ["bessel_j0" in causes[0], "erfinv" in causes[1], "rules.register" in causes[2]] == [True, True, True]
    found = json.loads(audit("network.py:Strange", "--input", "3", "--json", "-").stdout)["bracket"]
    assert found["upper_log10"] is None and found["reason"] == "2 operations without a rule" and len(found["causes"]) == 2


def test_a_refusal_lists_every_cause_and_the_advice() -> None:
    result = audit("network.py:Strange", "--input", "3", "--certify-radius", "network.py:labelled")
    assert result.exit_code == 3 and result.stdout == ""
    headline, *causes, advice = [line for line in result.stderr.splitlines() if line != "printed on import"]
    assert headline.startswith("normscope: no certificate: 2 operations")
    assert ["bessel_j0" in causes[0], "erfinv" in causes[1], len(causes)] == [True, True, 2]
    assert "rules.register" in advice


def test_version_and_help() -> None:
    assert normscope("--version").stdout == f"normscope {__version__}\n"
    for words in ([], ["--help"]):
        result = normscope(*words)
        assert result.exit_code == 0 and "audit" in result.stdout and "demo" in result.stdout


def test_an_interrupt_ends_with_130(place: Path) -> None:
    (place / "stopped.py").write_text("def make():\n    raise KeyboardInterrupt")
    result = audit("stopped.py:make", "--input", "3")
    assert result.exit_code == 130 and "Traceback" not in result.stderr


def test_as_a_real_process() -> None:
    command = [sys.executable, "-m", "normscope", "audit", "network.py:make", "--input", "6", "--effort", "0.1"]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "Sequential"
    wrong = subprocess.run([*command, "--input", "7"], capture_output=True, text=True, timeout=600)
    assert wrong.returncode == 2 and wrong.stderr.splitlines()[-1].startswith("normscope: ")
    assert "Traceback" not in wrong.stderr


def test_certified_radii_of_labelled_data(tmp_path):
    (tmp_path / "small.py").write_text(
        "from normscope.lab.models import mlp\ndef make():\n    return mlp(inputs=64, width=16, depth=2)\n"
    )
    words = ["audit", f"{tmp_path / 'small.py'}:make", "--input", "1x8x8", "--effort", "0.1", "--samples", "5"]
    found = normscope(*words, "--certify-radius", "digits")
    assert found.exit_code == 0 and "5 samples: median certified radius" in found.stdout
    assert normscope(*words, "--certify-radius", "nonsense").exit_code == 2
    assert normscope(*words, "--region", "ball:0.1").exit_code == 0


def test_the_ball_around_the_first_sample_and_the_curve() -> None:
    words = ["network.py:make", "--input", "6", "--effort", "0.1", "--json", "-"]
    found = json.loads(audit(*words, "--local", "0.01", "--within", "2").stdout)
    assert found["local"]["radius"] == 0.01 and found["curve"]["factor"] == 2.0 and found["curve"]["radius"] > 0
    assert (
        json.loads(audit(*words).stdout)["local"]["certified"]
        and json.loads(audit(*words, "--local", "off").stdout)["local"] is None
    )
    for wrong in (["--local", "near"], ["--local", "-1"], ["--within", "1"]):
        result = audit(*words, *wrong)
        assert result.exit_code == 2 and result.stderr.splitlines()[-1].startswith("normscope: ")
