"""`normscope doctor`: formats, baselines and exit codes."""

import json

import pytest
import torch
from torch import nn

import normscope as ns
from tests.cli.commands import normscope

SOURCE = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

def words():
    return nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 2))

def broken():
    model = net()
    model[1].momentum = 0.0
    return model
"""


pytestmark = pytest.mark.usefixtures("place")


def doctor(*arguments: str):
    return normscope("doctor", *arguments)


def test_warnings_are_printed_and_do_not_fail():
    result = doctor("network.py:net", "--input", "4")
    assert result.exit_code == 0 and "NS101 warning 0" in result.stdout and "fix:" in result.stdout


@pytest.mark.parametrize("fail_on, code", [("error", 1), ("never", 0)])
def test_the_exit_code_follows_the_severity(fail_on, code):
    assert doctor("network.py:broken", "--input", "4", "--fail-on", fail_on).exit_code == code


def test_warnings_fail_where_that_is_asked():
    assert doctor("network.py:net", "--input", "4", "--fail-on", "warning").exit_code == 1


def test_json_alone_on_stdout():
    result = doctor("network.py:net", "--input", "4", "--json", "-")
    assert {finding["rule"] for finding in json.loads(result.stdout)["findings"]} == {"NS101"}


def test_a_full_disk_is_one_line(monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    result = doctor("network.py:net", "--input", "4", "--sarif", "found.sarif")
    assert result.exit_code == 2 and result.stderr == "normscope: cannot write found.sarif: No space left on device\n"


def test_select_and_ignore():
    assert "NS101" not in doctor("network.py:net", "--input", "4", "--ignore", "NS1").stdout.split("checked")[0]
    assert "1 found by 1 checks" in doctor("network.py:net", "--input", "4", "--select", "NS101").stdout


def test_known_findings_are_not_reported_again(tmp_path):
    first = doctor("network.py:broken", "--input", "4", "--write-baseline", "known.json")
    assert first.exit_code == 1
    second = doctor("network.py:broken", "--input", "4", "--baseline", "known.json", "--fail-on", "info")
    assert second.exit_code == 0 and "nothing found" in second.stdout


def test_sarif_and_annotations(tmp_path):
    result = doctor("network.py:net", "--input", "4", "--sarif", "out.sarif", "--format", "github")
    assert result.stdout.startswith("::warning ")
    (row,) = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    assert row["ruleId"] == "NS101"


def test_a_rule_is_explained_without_a_model():
    result = doctor("--explain", "NS203")
    assert result.exit_code == 0 and result.stdout.startswith("NS203") and "Fix:" in result.stdout


def test_advice_is_not_a_finding():
    result = doctor("network.py:net", "--input", "4", "--choose", "--batch", "64")
    assert result.exit_code == 0 and "Advice: BatchNorm" in result.stdout


def test_token_ids_an_optimizer_and_micro_batches():
    result = doctor(
        "network.py:words", "--input", "6:int", "--optimizer", "adamw:lr=1e-3,weight_decay=0.1", "--select", "NS1,NS301"
    )
    assert result.exit_code == 0 and "NS102 warning 2" in result.stdout and "NS301 warning" in result.stdout
    result = doctor("network.py:net", "--input", "4", "--micro-batch", "2", "--accumulation", "8", "--select", "NS302,NS311")
    assert "batches of 2" in result.stdout and "1/8" in result.stdout


def test_a_recorded_run(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    result = doctor("network.py:net", "--input", "4", "--run", str(tmp_path / "run"), "--select", "NS501,NS509")
    assert result.exit_code == 0 and "on the run" in result.stdout
