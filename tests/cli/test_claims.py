"""`normscope claims`: formats and choice."""

import json

from tests.cli.commands import normscope

FAST = ("--only", "T-T13", "--only", "A-WD")


def claims(*arguments: str):
    return normscope("claims", *arguments)


def test_the_ledger_is_printed_by_paper():
    result = claims(*FAST)
    assert result.exit_code == 0
    assert (
        result.stdout.index("Than 2025") < result.stdout.index("T-T13") < result.stdout.index("Akbar") < result.stdout.index("A-WD")
    )
    assert "false as stated" in result.stdout and "counterexample" in result.stdout


def test_json_alone_on_stdout():
    rows = json.loads(claims(*FAST, "--json", "-").stdout)["claims"]
    assert [row["id"] for row in rows] == ["T-T13", "A-WD"]
    assert all({"id", "paper", "statement", "verdict", "correction", "evidence"} <= set(row) for row in rows)


def test_json_into_a_file(tmp_path):
    assert claims(*FAST, "--json", str(tmp_path / "claims.json")).exit_code == 0
    assert len(json.loads((tmp_path / "claims.json").read_text())["claims"]) == 2


def test_explain():
    result = claims("--explain", "t-t13")
    assert result.exit_code == 0 and "Theorem 13" in result.stdout and "Correction" in result.stdout


def test_mutants_are_listed_with_their_fate():
    lines = claims("--mutants", "--only", "A-WD", "--only", "T-L3").stdout.splitlines()
    assert [line.split()[0] for line in lines[:-2]] == ["A-WD"] * 2 + ["T-L3"] * 3
    assert all("killed" in line for line in lines[:-2] if "× 0.9" in line) and "mutants killed" in lines[-2]
