"""Commands run where a file of models lies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The working directory; network.py there is the SOURCE of the test module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "network.py").write_text(request.module.SOURCE)
    return tmp_path
