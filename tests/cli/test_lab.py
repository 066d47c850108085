"""`normscope lab` and `normscope data`: what is printed and written."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commands import normscope

TINY = ["--set", "networks=mlp", "--set", 'networks={"mlp":{"width":8,"depth":3}}', "--set", "epochs=1", "--set", "images=100"]


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = normscope(*arguments)
    return done.exit_code, done.stdout, done.stderr


def test_list_names_every_experiment() -> None:
    code, shown, _ = invoke("lab", "list")
    assert code == 0 and "weight-norms" in shown and "Than 2025, Figure 1" in shown


def test_run_then_show(tmp_path: Path) -> None:
    code, shown, progress = invoke("lab", "run", "weight-norms", *TINY, "--out", str(tmp_path))
    assert code == 0 and "mlp, batch: layers with" in shown and "1.00 of 2 trials" not in shown
    assert progress.count("2.00 of 2 trials, about 0 minutes left") == 1
    assert invoke("lab", "show", "weight-norms", "--out", str(tmp_path)) == (0, shown, "")


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    code, shown, _ = invoke("lab", "run", "input-variance", *TINY, "--seeds", "2", "--json", "--out", str(tmp_path))
    content = json.loads(shown)
    assert code == 0 and content["settings"]["seeds"] == [0, 1] and len(content["trials"]) == 4


def test_data_check_says_what_there_is() -> None:
    code, shown, _ = invoke("data", "check", "digits")
    assert code == 0 and "1437 training and 360 test samples of 1×8×8, 10 classes" in shown
