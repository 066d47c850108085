"""The README's example is run as it stands."""

import doctest
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = doctest.testfile(str(README), module_relative=False)
    assert found.attempted > 5 and found.failed == 0
