"""`normscope claims`: formats, choice and errors."""

import json

import pytest
from typer.testing import CliRunner

from normscope.cli import app

FAST = ("--only", "T-T13", "--only", "A-WD")


def claims(*arguments: str):
    return CliRunner().invoke(app, ["claims", *arguments])


def test_the_ledger_is_printed_by_paper():
    result = claims(*FAST)
    assert result.exit_code == 0
    assert (
        result.stdout.index("Than 2025") < result.stdout.index("T-T13") < result.stdout.index("Akbar") < result.stdout.index("A-WD")
    )
    assert "false as stated" in result.stdout and "counterexample" in result.stdout


def test_json_alone_on_stdout():
    rows = json.loads(claims(*FAST, "--json", "-").stdout)
    assert [row["id"] for row in rows] == ["T-T13", "A-WD"]
    assert all({"id", "paper", "statement", "verdict", "correction", "evidence"} <= set(row) for row in rows)


def test_json_into_a_file(tmp_path):
    assert claims(*FAST, "--json", str(tmp_path / "claims.json")).exit_code == 0
    assert len(json.loads((tmp_path / "claims.json").read_text())) == 2


def test_explain():
    result = claims("--explain", "t-t13")
    assert result.exit_code == 0 and "Theorem 13" in result.stdout and "Correction" in result.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--only", "T-X"), "no claim 'T-X'"),
        (("--explain", "nothing"), "no claim 'nothing'"),
        (("--only", "A-WD", "--json", "missing/claims.json"), "no directory"),
        (("--seed", "x"), "claims --help"),
        (("--seed", str(2**64)), "claims --help"),
    ],
)
def test_mistakes_of_the_user_are_one_line(arguments, words):
    result = claims(*arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1
